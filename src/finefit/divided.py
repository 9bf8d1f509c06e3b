"""What dividing a run over devices adds to a predicted step: stages of a pipeline, gathered weights, whole gradients.

As FSDP2 runs it (``torch/distributed/fsdp/_fully_shard``): a unit a block and one for all else, whose weights stay gathered
from the start of forward to the end of backward; of the blocks the one that runs and the next are whole (stage 3), or all
of them (stage 2). A block's gradients are whole until they are reduced; the reduction's fp32 input lives until the next
block's. A tensor-parallel rank's sections are traced as they are. Torch-free.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .layout import Layout, ParamGroup, traced_blocks
from .mesh import Mesh
from .sections import Section

_FP32 = 4


@dataclass(frozen=True, slots=True)
class Part:
    """What one device has: all, or some of a pipeline's blocks and what is before or after them."""

    layout: Layout
    """With the groups this device has."""
    is_first: bool = True
    is_last: bool = True
    in_flight: float = 1
    """Micro-batches whose activations of all its blocks are held when a backward begins."""

    @property
    def checkpointed(self) -> int:
        """Of the device's blocks; of all devices alike."""
        k, depth, whole = self.layout.checkpointed, self.layout.depth, self.layout.model.num_hidden_layers
        return -(-k * depth // whole)

    def situations(self) -> tuple["Part", ...]:
        """Where all of a step's micro-batches are in flight there is no gradient when the first backward begins, and with
        the second backward one micro-batch less."""
        steps = self.layout.micro_steps
        if self.in_flight < steps or steps == 1:
            return (self,)
        fresh = replace(self, layout=replace(self.layout, micro_steps=1))
        return fresh, replace(self, in_flight=self.in_flight - 1)


@dataclass(frozen=True, slots=True)
class InPipe:
    """What a device of a pipeline holds beside the micro-batch that is looked at, by component."""

    before: Mapping[str, int] = field(default_factory=dict)
    """From before its forward to the end of its backward."""
    turning: Mapping[str, int] = field(default_factory=dict)
    """From where its backward begins, what was not there in its forward."""

    @classmethod
    def of(cls, part: Part, held: Mapping[str, int], left: int) -> "InPipe":
        """``held`` of one micro-batch where backward begins. ``left`` of it when that is over: the walk of a device without
        head ends without the gradient that it lets go of, or with the rows that the head would."""
        layout, others = part.layout, part.in_flight - 1
        rows = layout.micro.tokens // layout.mesh.tensor * layout.model.hidden_size * _row_bytes(layout)
        before = {component: round(n_bytes * others) for component, n_bytes in held.items()}
        more = _sent(part)
        if not part.is_first and not any(g.trainable for g in layout.groups if g.role == "embedding"):
            more += part.in_flight  # what a frozen embedding gives nobody saves, what is received is
        if part.in_flight < layout.micro_steps:
            more += 1  # the list of what was received or sent last
        turning = 0
        if not part.is_last:
            turning = max(-left, rows * (3 if layout.rank else 1))
            before["activation"] += round(
                (rows - max(left, 0)) * others
            )  # what was sent stays until its gradient comes
        before["temporary"] += round(more * rows)
        if not part.is_first and not layout.rank and 1 <= part.in_flight < layout.micro_steps:
            turning -= 2 * rows  # no gradient of an embedding follows, whose input is let go of
        return cls(before, {"temporary": turning})


def _sent(part: Part) -> float:
    """Rows between stages of one device: the schedule of several keeps what is sent and received to the step's end (measured
    with torch 2.13 and gloo), of those in flight what has been so far."""
    mesh, steps = part.layout.mesh, part.layout.micro_steps
    if mesh.stages_a_rank == 1:
        return 0
    if part.in_flight >= steps - 1:
        return 2 * (mesh.stages_a_rank - 1) * part.in_flight
    return (4 * mesh.stages_a_rank - 2 * part.is_first - 2 * part.is_last) * steps


def _row_bytes(layout: Layout) -> int:
    """Of an element of what passes between stages: of the embedding's weights, as they are gathered."""
    bits = max((g.bits for g in layout.groups if g.role == "norm"), default=32)
    return min(bits, 16) // 8 if layout.graph[0] == "bf16" else bits // 8


def parts(layout: Layout) -> tuple[Part, ...]:
    """The devices that may need most: of a pipeline the first (most micro-batches held) and the last (the head)."""
    stages = layout.mesh.stages
    return (Part(layout),) if stages == 1 else (part(layout, 0), part(layout, stages - 1))


def part(layout: Layout, rank: int) -> Part:
    """Of a pipeline's device by its place."""
    mesh, whole = layout.mesh, layout.model.num_hidden_layers
    is_first, is_last = rank == 0, rank == mesh.stages - 1
    own = len(mesh.shares(whole)[rank])
    layout = replace(layout, micro_steps=mesh.turns(layout.micro_steps))
    groups = _staged(layout.groups, (own, whole), is_first, is_last, layout.model.tie_word_embeddings)
    return Part(
        replace(layout, groups=groups, own_blocks=own), is_first, is_last,
        _in_flight(mesh, rank, layout.micro_steps),
    )  # fmt: skip


def _in_flight(mesh: Mesh, rank: int, micro_steps: int) -> float:
    """By the schedules of ``torch/distributed/pipelining/schedules.py``: the forwards before a device's first backward."""
    if mesh.schedule == "interleaved":
        a_round = micro_steps // max(1, micro_steps // mesh.stages)
        warm_up = (mesh.stages_a_rank - 1) * a_round + 2 * (mesh.stages - 1 - rank) + 1
        return min(warm_up / mesh.stages_a_rank, micro_steps)
    if mesh.schedule == "gpipe" or micro_steps < mesh.stages:
        return micro_steps
    return mesh.stages - rank


# A search asks for the same groups with every micro-batch and number of checkpointed blocks.
@functools.lru_cache(maxsize=1024)
def _staged(
    groups: tuple[ParamGroup, ...], share: tuple[int, int], is_first: bool, is_last: bool, tied: bool
) -> tuple[ParamGroup, ...]:
    """Groups of a device with so many of all blocks."""
    own, whole = share
    cut = [replace(g, count=-(-g.count * own // whole)) if _is_block(g) else g for g in groups]
    return tuple(
        g
        for g in cut
        if _is_block(g)
        or g.name.startswith("tables.")
        or (is_first if g.role == "embedding" else is_last)
        or (is_last and tied and g.role == "embedding")
    )


def _is_block(group: ParamGroup) -> bool:
    return group.name.startswith("block.")


@dataclass(frozen=True, slots=True)
class _Sums:
    """Bytes as groups are computed with, and of the fp32 inputs of their reduction; of all blocks together."""

    blocks: int
    outer: int
    gradients: int
    trained: int
    reduced: int
    last: int
    """What is outside the blocks, gradients and the input of their reduction, and of all that the embedding's."""
    embedding: int


@functools.lru_cache(maxsize=1024)
def _sums(groups: tuple[ParamGroup, ...], cast: bool) -> _Sums:
    gathered = [(g, _computed(g, cast)) for g in groups if not g.is_whole]
    inside = [(g, n) for g, n in gathered if _is_block(g)]
    outer = [(g, n) for g, n in gathered if not _is_block(g)]
    gradients = sum(n for g, n in inside if g.trainable)
    ends = [(g, n) for g, n in outer if g.trainable]
    in_fp32 = _FP32 * sum(g.numel * g.count for g, _ in ends)
    return _Sums(
        sum(n for _, n in inside), sum(n for _, n in outer), gradients,
        gradients + sum(n for _, n in ends),
        _FP32 * sum(g.numel * g.count for g, _ in inside if g.trainable),
        in_fp32 + sum(n for _, n in ends), in_fp32 + sum(n for g, n in ends if g.role == "embedding"),
    )  # fmt: skip


class Divided:
    """The sections of one device's step, made from those of a single device's."""

    def __init__(self, part: Part, fixed: Mapping[str, int]) -> None:
        layout, self.is_first = part.layout, part.is_first
        mesh = layout.mesh
        self.stage, self.depth = mesh.stage, layout.depth
        self.reduces = mesh.stage >= 2
        """Gradients are reduced to shards after every block's backward."""
        sums = _sums(layout.groups, layout.graph[0] == "bf16")
        self.block, self.outer = sums.blocks // layout.depth, sums.outer
        self.gradients, self.reduced = sums.gradients // layout.depth, sums.reduced // layout.depth
        self.passing = _passing(layout)
        self.last = f"backward {traced_blocks(layout)[-1][0]}"
        whole = sums.trained
        fresh = layout.micro_steps == 1
        self.last_reduction = _last_reduction(layout, sums) if self.reduces else 0
        # The last block's buffer is let go of when the forward of all is over. Of stage 2 only a step's first micro-batch
        # gathers, before there are gradients.
        self.lets_go = self.stage == 2 and mesh.stages == 1
        """Of blocks that stay gathered until backward, as that is through with them."""
        self.waiting = self.block if fresh or self.stage == 3 else max(self.block - fixed["gradient"], 0)
        in_place = fresh and all(g.bits == 8 * _FP32 for g in layout.groups if g.trainable and _is_block(g))
        self.joined = 0 if in_place or not self.reduces or mesh.copies == 1 else self.reduced // mesh.sharing
        """Of a block, what replicas summed of its shards: kept until all of backward is over, beside what it is added to."""
        self.kept = (fixed["gradient"] / whole if fresh else 0.0) if self.reduces and whole else 1.0

    def section(self, name: str, section: Section) -> Section:
        end, top = dict(section.end), dict(section.top)
        of_block = name[-1].isdigit()
        if name == "backward 0":
            self._embedding(end, top)
        if of_block and name.startswith("backward"):
            if "gradient" in end:
                end["gradient"] = round(end["gradient"] * self.kept)
            _add(end, "temporary", self.joined - self.block * self.lets_go)
        if held := self._held(name, of_block):
            top["temporary"] = top.get("temporary", 0) + held
        return Section(end, top, sum(top.values()))

    def _embedding(self, end: dict[str, int], top: dict[str, int]) -> None:
        """Its gradient comes last: on the first device, when those of the block are reduced and its weights let go."""
        table = max(end.get("gradient", 0) - self.gradients, 0)
        if self.is_first:
            there = min(table, self.gradients + self.block) if self.reduces else 0
        else:
            there = table
            _add(end, "gradient", -table)
        _add(top, "gradient", -min(there, top.get("gradient", 0)))

    @property
    def over(self) -> int:
        """Bytes that are let go of when backward is over."""
        return self.depth * self.joined

    @property
    def gathered(self) -> int:
        """Bytes of blocks that are whole when backward begins, and are let go of one by one."""
        return self.depth * self.block * self.lets_go

    def _held(self, name: str, of_block: bool) -> int:
        """Gathered weights, and what a reduction still reads, beside the section's own."""
        if not self.reduces or name == "optimizer":
            return 0
        backward = name.startswith("backward")
        if backward and self.lets_go:
            whole = 0  # they are reckoned with as they are let go of
        elif backward and self.stage == 3:
            whole = min(2, self.depth) * of_block * self.block
        elif of_block or name.endswith(("after", "loss")):  # what is gathered is copied out
            whole = (self.depth if self.stage == 2 else of_block) * self.block + self.waiting
        elif name.endswith(
            "before"
        ):  # what is outside the blocks is copied out of what was gathered, and the first block
            first = self.outer + self.block + self.waiting
            whole = max(first, (self.stage == 2) * self.depth * self.block)
        else:
            whole = (self.stage == 2) * self.depth * self.block
        follows = of_block and backward and name != self.last  # which is first: nothing was reduced before it
        return self.outer + whole + self.reduced * follows + self.passing * of_block


def _last_reduction(layout: Layout, sums: _Sums) -> int:
    """Beside all shards, when what is outside the blocks is reduced: before its own are there, or when its gradients are gone
    but for the embedding's, which autograd still has. Stage 2 keeps all weights but in a step's last micro-batch."""
    mesh, steps = layout.mesh, layout.micro_steps
    shards = sum(g.shard_bytes(mesh.sharing) for g in layout.groups if g.trainable and not _is_block(g))
    keeps = (mesh.stage == 2 and steps > 1) * (sums.outer + sums.blocks)
    if steps <= (2 if mesh.stage == 2 else 1):  # there are none of an earlier micro-batch
        return keeps + max(sums.last - shards, sums.embedding)
    return keeps + max(sums.last, sums.embedding + shards)


def _passing(layout: Layout) -> int:
    """A block's shards on their way between device and host, where they are there: before they are cast, or gradients."""
    placed = [g for g in layout.groups if g.place and _is_block(g)]
    return sum(g.shard_bytes(layout.mesh.sharing) for g in placed) // layout.depth


def _add(parts: dict[str, int], component: str, n_bytes: int) -> None:
    if n_bytes:
        parts[component] = parts.get(component, 0) + n_bytes


def _computed(group: ParamGroup, cast: bool) -> int:
    """Bytes of the group as it is computed with: masters are cast when they are gathered, adapters are not."""
    is_cast = cast and ".lora_" not in group.name
    return group.numel * group.count * (min(group.bits, 16) if is_cast else group.bits) // 8
