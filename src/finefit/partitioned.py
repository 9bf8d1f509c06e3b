"""What a rank holds under DeepSpeed between steps, to the byte, and what its engine adds to a predicted step. Torch-free.

Version 0.19 (``runtime/zero/stage_1_and_2.py``, ``stage3.py``). What trains is flat, once for what decays and once for what
does not. Stages 1 and 2: all of it whole, a part of each an fp32 master; padded to two elements a rank. Stage 3: of every
tensor a part, of small ones the whole beside it. Masters are copies even of fp32 weights. Two things are there all the time at
stage 3 that elsewhere come with backward: the sums of gradients, and the bucket they are reduced in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .config.deepspeed import BUCKET, PERSISTENT, bucket_of
from .layout import Layout, ParamGroup
from .sections import Section
from .updating import Piece

_FP32 = 4


def of(layout: Layout) -> "Partitioned | None":
    """What a rank holds where DeepSpeed divides it; None where something else does."""
    return Partitioned(layout) if layout.mesh.engine == "deepspeed" else None


@dataclass(frozen=True)
class Partitioned:
    layout: Layout

    @cached_property
    def trained(self) -> list[ParamGroup]:
        return [g for g in self.layout.groups if g.trainable]

    @cached_property
    def width(self) -> int:
        """Bytes of a weight as the engine has it."""
        return self.layout.element_bytes

    @property
    def ranks(self) -> int:
        return self.layout.mesh.shards

    @property
    def elements(self) -> int:
        return sum(g.numel * g.count for g in self.trained)

    @cached_property
    def flats(self) -> list[int]:
        """Elements of each flat tensor that a rank steps."""
        decayed = [g for g in self.trained if g.columns], [g for g in self.trained if not g.columns]
        if self.layout.mesh.stage == 3:
            return [sum(self._part(g) for g in groups) for groups in decayed if groups]
        unit = 2 * self.ranks
        return [-(-sum(g.numel * g.count for g in groups) // unit) * 2 for groups in decayed if groups]

    def _part(self, group: ParamGroup) -> int:
        return -(-group.numel // self.ranks) * group.count

    def states(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer states, of which the masters are a part."""
        pieces = [Piece(numel, 0, 0, 8 * _FP32) for numel in self.flats]
        update = self.layout.update
        moments = sum(sum(update.tensors(piece)) for piece in pieces) + update.table_bytes(iter(pieces))
        on_host = self.layout.states_on != "device"
        return {
            "parameter": self._parameters(),
            "gradient": 0 if on_host else self.width * sum(self.flats),
            "optimizer_state": 0 if on_host else _FP32 * sum(self.flats) + moments,
        }

    def _parameters(self) -> int:
        if self.layout.mesh.stage < 3:
            frozen = [g for g in self.layout.groups if not g.trainable]
            whole = self.width * self.ranks * sum(self.flats)
            return whole + sum(g.numel * g.count * self.width for g in frozen)
        parts = sum(self._part(g) for g in self.layout.groups if not g.place)
        small = sum(g.numel * g.count for g in self.layout.groups if g.numel <= PERSISTENT)
        return self.width * (parts + small)

    @property
    def loaded(self) -> int:
        """Of the model as it is filled, whole on every rank, before the engine has it."""
        return sum(g.numel * g.count * g.bits // 8 for g in self.layout.groups)

    @property
    def bucket_bytes(self) -> int:
        """Of what gradients are reduced in."""
        return self.width * bucket_of(self.elements)

    def temporary_bytes(self) -> int:
        """What an update takes beside the rule's own: a flat gradient, in fp32, made of those that are there. Stage 3 has
        both of them and one more for a moment (measured, 0.19.8)."""
        narrow = self.width * (self.width < _FP32)
        raised = 2 * _FP32 + self.width if self.layout.mesh.stage == 3 else _FP32 + narrow
        on_host = self.layout.states_on != "device"
        return 0 if on_host else raised * max(self.flats, default=0)

    def step(self, fixed: Mapping[str, int]) -> "Step":
        return Step(self, fixed)


class Step:
    """The sections of a rank's step, made from those of a single device's: the face of ``divided.Divided``.

    Gradients that come are copied into the bucket; stage 2 and 3 keep of them what a rank steps. At stage 3 weights are whole
    up to ``BUCKET`` elements ahead of their use and behind it.
    """

    gathered = last_reduction = over = 0

    def __init__(self, held: Partitioned, fixed: Mapping[str, int]) -> None:
        layout = held.layout
        self.stage, self.reduces = layout.mesh.stage, layout.mesh.stage >= 2
        self.again = layout.micro_steps > 1
        self.bucket, self.sums = held.bucket_bytes, fixed["gradient"]
        self.whole = held.width * held.elements
        block = sum(g.numel * g.count for g in layout.groups if g.kinds) // layout.depth
        everything = sum(g.numel * g.count for g in layout.groups)
        largest = max(g.numel for g in layout.groups)
        self.live = held.width * min(everything, BUCKET + max(2 * block, largest + block))
        self.flat = held.width * min(everything, bucket_of(held.elements))

    def section(self, name: str, section: Section) -> Section:
        end, top = dict(section.end), dict(section.top)
        backward = name.startswith("backward")
        if backward and self.reduces:
            end.pop("gradient", None)  # it is in the bucket, or in the sums
        if name != "optimizer" and (self.stage == 3 or not name.startswith("eval")):
            more = {1: self._whole, 2: self._summed, 3: self._gathered}[self.stage](name, backward)
            for component, n_bytes in more.items():
                top[component] = top.get(component, 0) + n_bytes
        return Section(end, top, sum(top.values()))

    def _whole(self, _name: str, backward: bool) -> dict[str, int]:
        """Gradients of all micro-batches but the last wait whole, with the bucket they are to be reduced in."""
        waiting = self.whole - self.sums if self.again else 0
        return {"gradient": waiting, "temporary": self.bucket * (backward or self.again)}

    def _summed(self, name: str, backward: bool) -> dict[str, int]:
        """What has been reduced is summed when backward is over."""
        reduced = self.sums if name == "backward 0" else 0
        return {"gradient": reduced, "temporary": self.bucket * backward}

    def _gathered(self, name: str, _backward: bool) -> dict[str, int]:
        """Weights are gathered ahead into a flat tensor, out of which they are copied when they are used."""
        sums = 0 if self.again else self.sums
        return {"gradient": sums, "temporary": self.live + self.bucket + self.flat * name.startswith("forward")}
