"""What a rank holds under DeepSpeed between steps, to the byte, and what its engine adds to a predicted step. Torch-free.

Version 0.19 (``runtime/zero/stage_1_and_2.py``, ``stage3.py``). What trains is flat, once for what decays and once for what
does not. Stages 1 and 2: all of it whole, a part of each an fp32 master; padded to two elements a rank. Stage 3: of every
tensor a part, of small ones the whole beside it; masters are the parts themselves where those are fp32. Two things are there
all the time at stage 3 that elsewhere come with backward: the sums of gradients, and the bucket they are reduced in.
"""

from dataclasses import dataclass
from functools import cached_property

from .config.deepspeed import PERSISTENT, bucket_of
from .layout import Layout, ParamGroup
from .updating import Piece

_FP32 = 4


def is_deepspeeds(layout: Layout) -> bool:
    return layout.mesh.engine == "deepspeed" and layout.mesh.stage > 0


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
        """Bytes of parameters, gradients and optimizer states; masters are states where they are beside the weights."""
        pieces = [Piece(numel, 0, 0, 8 * _FP32) for numel in self.flats]
        update, stage = self.layout.update, self.layout.mesh.stage
        masters = 0 if stage == 3 and self.width == _FP32 else _FP32 * sum(self.flats)
        moments = sum(sum(update.tensors(piece)) for piece in pieces) + update.table_bytes(iter(pieces))
        on_host = self.layout.states_on != "device"
        return {
            "parameter": self._parameters(),
            "gradient": 0 if on_host else self.width * sum(self.flats),
            "optimizer_state": 0 if on_host else masters + moments,
        }

    def _parameters(self) -> int:
        frozen = [g for g in self.layout.groups if not g.trainable]
        if self.layout.mesh.stage < 3:
            whole = self.width * self.ranks * sum(self.flats)
            return whole + sum(g.numel * g.count * self.width for g in frozen)
        parts = sum(self.flats) + sum(map(self._part, frozen))
        small = sum(g.numel * g.count for g in self.layout.groups if g.numel <= PERSISTENT)
        return self.width * (parts + small)

    @property
    def bucket_bytes(self) -> int:
        """Of what gradients are reduced in."""
        return self.width * bucket_of(self.elements)
