"""Layout to footprint: states by arithmetic, activations by traced coefficients, the peak by walking one step.

The walk goes through the step's sections (embedding, blocks, loss, backward, update) with what is alive at each start;
a moment's figure is the highest landmark in it. Torch-free; about a tenth of a millisecond. Of several devices it is the
one that needs most; what dividing the run adds to its sections is ``divided``'s.

Symbols: as in ``poly``.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping

from . import partitioned, phases, recompute
from .coefficients import evaluation_is_traced, sections_for
from .contexts import shared
from .data.micro import width
from .divided import Divided, InPipe, Part, parts
from .footprint import MOMENTS, STEP, Footprint
from .layout import Layout, ParamGroup, traced_blocks
from .recompute import Pass
from .sections import Section, numbers
from .spec import HardwareSpec
from .updating import Update
from .witness import nccl_bytes

QUERY_BLOCK = 128  # rows of one attention block: nn.attention.QUERY_BLOCK
_MOMENT = {"forward": "forward_end", "loss": "loss", "backward": "backward_peak", "optimizer": "optimizer_step",
           "eval": "eval"}  # fmt: skip


def states(layout: Layout) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states on one device, to the byte."""
    if (held := partitioned.of(layout)) is not None:
        return held.states()
    found = dict(_states(layout.groups, layout.mesh.stage, layout.mesh.sharing, layout.update))
    found["parameter"] += layout.arena
    if layout.states_on != "device":
        found["optimizer_state"] = _left(layout)
    if not layout.keeps_gradients:
        found["gradient"] = 0
    return found


def _left(layout: Layout) -> int:
    """Of states that are elsewhere, what stays on the device that steps: tables of codes, and single numbers of a tensor."""
    if layout.gradients_on == "host":
        return 0
    pieces = [(g.piece(), g.count) for g in layout.groups if g.trainable]
    tables = layout.update.table_bytes(piece for piece, _ in pieces)
    return tables + sum(layout.update.scalar_bytes(piece) * count for piece, count in pieces)


@functools.lru_cache(maxsize=1024)
def _states(groups: tuple[ParamGroup, ...], stage: int, shards: int, update: Update) -> Mapping[str, int]:
    def held(group: ParamGroup, since: int) -> int:
        return (group.shard(shards) if stage >= since else group.numel) * group.count * group.bits // 8

    trained = [g for g in groups if g.trainable]
    stepped = [(g.piece(shards if stage else 1), g.count) for g in trained]
    tables = update.table_bytes(piece for piece, _ in stepped)
    return {
        "parameter": sum(held(g, 2) for g in groups if not g.place),
        "gradient": sum(held(g, 2) for g in trained),
        "optimizer_state": tables + sum(count * sum(update.tensors(piece)) for piece, count in stepped),
    }


def temporary_bytes(layout: Layout) -> int:
    """What the optimizer takes beside its states while it steps, of what the device has. With products in float16 it may
    have to skip a step."""
    if layout.gradients_on == "host":
        return 0
    if (held := partitioned.of(layout)) is not None:
        return held.temporary_bytes()
    return _temporary(layout.groups, layout.mesh.sharing, layout.update, layout.half == "float16")


@functools.lru_cache(maxsize=1024)
def _temporary(groups: tuple[ParamGroup, ...], shards: int, update: Update, skips: bool) -> int:
    return update.temporary_bytes((g.piece(shards) for g in groups if g.trainable), skips)


def sizes_of(layout: Layout) -> dict[str, float]:
    """Every symbol's value for this layout; of a tensor-parallel rank those of its part, and U of its rows."""
    model, micro, ranks = layout.model, layout.share, layout.mesh.tensor
    longest, rows, whole = layout.micro.longest, width(micro.labelled), layout.model.symbols()
    return {
        **whole,
        **{symbol: -(-whole[symbol] // ranks) for symbol in "qkfnmV"},
        "U": micro.tokens / ranks,
        "g": model.num_attention_heads / model.num_key_value_heads,
        "T": micro.tokens,
        "S": longest / layout.mesh.context,
        "Q": min(QUERY_BLOCK, longest),
        "L": rows,
        "C": min(layout.loss_chunk or rows, rows),
        "r": layout.rank,
        "W": layout.dequantised,
        "B": layout.micro.tokens / longest,
        "X": model.max_position_embeddings,
        "P": sum(g.count for g in layout.groups if g.trainable),
    }


def footprint(layout: Layout, hardware: HardwareSpec | None = None) -> Footprint:
    """Bytes by component at each moment of a run, on the device that needs most: of a steady step's largest micro-batch,
    and beside the steps.

    Without ``hardware`` the device is a CPU, and nothing is said of its memory beside tensors.
    """
    found = [of_device(part, hardware) for part in parts(layout)]
    return max(found, key=lambda f: f.peak_bytes)


def of_device(part: Part, hardware: HardwareSpec | None = None) -> Footprint:
    """The same of one device."""
    layout = part.layout
    fixed, sizes = states(layout), sizes_of(layout)
    found: dict[str, dict[str, int]] = {}
    for one in part.situations():
        for moment, bytes_ in _of_step(one, fixed, sizes).items():
            found[moment] = max(found.get(moment, {}), bytes_, key=lambda parts: sum(parts.values()))
    if evaluation_is_traced(layout):
        found |= _walked(_Walk(part, {**fixed, "gradient": 0}, sizes), _evaluation(part))
    found |= phases.beside(layout, fixed, hardware.kind if hardware else "cpu")
    if (held := partitioned.of(layout)) is not None:
        found["load"]["parameter"] = held.loaded
    moments = {moment: found[moment] for moment in MOMENTS if moment in found}
    reserved = hardware.context_bytes if hardware else 0
    if hardware and hardware.kind == "cuda":
        reserved += nccl_bytes(layout.mesh.devices)
    on_host = recompute.on_host(layout) if hardware and hardware.kind == "cuda" else 0
    host = {moment: {"copies": on_host} for moment in (*STEP, "eval", "save") if on_host}
    return Footprint("predicted", moments, reserved, host=host)


def _of_step(part: Part, fixed: Mapping[str, int], sizes: Mapping[str, float]) -> dict[str, dict[str, int]]:
    walk = _Walk(part, fixed, sizes)
    if part.is_first and part.is_last:
        return _walked(walk, _itinerary(part))
    alone = _Walk(part, fixed, sizes)
    for turned, passes in itertools.groupby(_itinerary(part), lambda one: one.section.startswith("backward")):
        if turned:
            alone._turn("backward")
            held = {component: alone.live[component] for component in _HELD}
        _walked(alone, passes)
    walk.pipe = InPipe.of(part, held, sum(alone.live[component] for component in _HELD))
    walk._add(walk.pipe.before, 1)
    return _walked(walk, _itinerary(part))


def _walked(walk: "_Walk", passes: Iterator[Pass]) -> dict[str, dict[str, int]]:
    """The highest composition of each moment on the way."""
    for one in passes:
        if one.times:
            walk.through(one)
    return walk.best


def _itinerary(part: Part) -> Iterator[Pass]:
    """The sections in the order of a step. The first ``checkpointed`` blocks are so."""
    depth, k, again = part.layout.depth, part.checkpointed, part.layout.recomputed
    outer, first = (again if k >= n else "plain" for n in (depth, 1))
    blocks: list[tuple[int, str, int]] = []
    passed = 0
    for number, times in traced_blocks(part.layout):
        kept = min(max(k - passed, 0), times)
        blocks += [(number, again, kept), (number, "plain", times - kept)]
        passed += times
    yield Pass("forward before", first, 1)  # later stages receive what the embedding gives the first
    yield from recompute.forward(part.layout, blocks)
    for name in _AFTER if part.is_last else ():
        yield Pass(name, outer, 1, recompute.after(part.layout) if name == "forward after" else 0)
    yield from recompute.backward(part.layout, blocks)
    yield Pass("optimizer", outer, 1)


def _evaluation(part: Part) -> Iterator[Pass]:
    """The same of a held-out micro-batch as large: forward and loss, of which nothing is kept."""
    yield Pass("eval before", "eval", 1)
    for number, times in traced_blocks(part.layout):
        yield Pass(f"eval {number}", "eval", times)
    for name in ("eval after", "eval loss") if part.is_last else ():
        yield Pass(name, "eval", 1)


_AFTER = ("forward after", "loss", "backward start")
_HELD = ("activation", "temporary")
_NOTHING = Section({}, {}, 0)


@functools.cache
def _place(name: str) -> tuple[str, str]:
    """The moment of a section, and which block it is: its number, ``before`` for what is before them, else nothing."""
    first, _, last = name.partition(" ")
    return _MOMENT[first], last if last.isdigit() or last == "before" else ""


class _Walk:
    """Live bytes by component while the sections pass, and the highest composition of each moment."""

    def __init__(self, part: Part, fixed: Mapping[str, int], sizes: Mapping[str, float]) -> None:
        layout = part.layout
        self.part, self.layout, self.fixed, self.sizes = part, layout, fixed, sizes
        self.divided: Divided | partitioned.Step | None = None
        if layout.mesh.devices > 1:
            held = partitioned.of(layout)
            self.divided = Divided(part, fixed) if held is None else held.step(fixed)
        self.again = layout.micro_steps > 1 and not (self.divided and self.divided.reduces)
        # Gradients that leave as they appear are what they are from a second micro-batch on: there for a moment each.
        self.again |= not layout.keeps_gradients
        tokens, labelled = layout.share.tokens, layout.share.labelled
        self.live = {**fixed, "activation": 0, "temporary": 0, "input": 8 * (2 * tokens + width(labelled) + labelled)}
        if layout.micro_steps == 1:
            self.live["gradient"] = 0
        self.pipe = InPipe()
        self.turned = False
        """Whether backward has begun."""
        self.best: dict[str, dict[str, int]] = {}
        self.highest: dict[str, int] = {}  # bytes of each of them together
        self.tables: dict[str, Mapping[str, Section]] = {}
        self.passed: list[tuple[str, str, int]] = []

    def through(self, one: Pass) -> None:
        name, kind, times = one[:3]
        if kind not in self.tables:
            sections = shared(sections_for(self.layout, kind), kind, self.layout)
            table = self.tables[kind] = numbers(sections, self.again, self.sizes)
            if len(self.tables) == 1 and "held" in table:  # tables kept as buffers, in every kind the same
                self._add(table["held"].end, 1)
        section = self.tables[kind].get(name)
        if self.layout.steps_in_backward:
            section = self._stepping(name, section)
        moment, block = _place(name)
        if section is not None and self.divided:
            section = self.divided.section(name, section)
            self._turn(name)
        if section is not None and (one.more or one.returned):
            section = recompute.changed(section, one, recompute.input_bytes(self.layout, self.layout.share.tokens))
        if name == "optimizer" and not self.layout.steps_in_backward:
            section = self._stepped(section)
        if block:
            self.passed.append((block, kind, times))
        if section is not None:
            # What a block adds is the same each time, so its highest pass is the first or the last.
            self._look(moment, section)
            if times > 1:
                self._add(section.end, times - 1)
                self._look(moment, section)
            self._add(section.end, 1)
        if not block:
            self._free_late(name)

    def _stepped(self, section: Section | None) -> Section | None:
        """With what the optimizer's rule takes, after clipping has let go of its norms."""
        needed = temporary_bytes(self.layout)
        if needed <= (section.top_bytes if section else 0):
            return section
        return Section(section.end if section else {}, {"temporary": needed}, needed)

    def _stepping(self, name: str, section: Section | None) -> Section | None:
        """Where each parameter is stepped in backward, by a rule that may take something beside what is there then."""
        if name == "optimizer":
            return _NOTHING  # it is over before that
        needed = temporary_bytes(self.layout) if name.startswith("backward") else 0
        if not needed or section is None:
            return section
        top = {**section.top, "temporary": section.top.get("temporary", 0) + needed}
        return Section(section.end, top, section.top_bytes + needed)

    def _turn(self, name: str) -> None:
        """Where backward begins what is gathered is reckoned with; where it ends only shards of gradients are left."""
        if name.startswith("backward") and not self.turned:
            self.turned = True
            self._add(self.pipe.turning, 1)
            for outer in () if self.part.is_last else _AFTER:  # what the last stage's would let go of
                self._free_late(outer)
            self.live["temporary"] += self.divided.gathered if self.divided else 0
        if name == "optimizer":
            self.live["gradient"] = self.fixed["gradient"]
            last = self.divided.last_reduction if self.divided else 0
            self._look("backward_peak", Section({}, {"temporary": last}, last))
            self.live["temporary"] -= self.divided.over if self.divided else 0
            if self.pipe.before:
                self.live |= dict.fromkeys(_HELD, 0)

    def _look(self, moment: str, section: Section) -> None:
        total = sum(self.live.values()) + section.top_bytes
        if total > self.highest.get(moment, 0):
            now = {**self.live}
            for component, n_bytes in section.top.items():
                now[component] = now.get(component, 0) + n_bytes
            self.best[moment] = {c: n for c, n in now.items() if n}
            self.highest[moment] = total

    def _add(self, change: Mapping[str, int], times: int) -> None:
        for component, n_bytes in change.items():
            self.live[component] = self.live.get(component, 0) + n_bytes * times

    def _free_late(self, outer: str) -> None:
        """What blocks, or what is before them, made and an outer section frees: once for each block of each kind."""
        for block, kind, times in self.passed:
            late = self.tables[kind].get(f"late {block} {outer}")
            if late is not None:
                self._add(late.end, times)
