"""Optimizers that keep less than AdamW's two moments in the parameter's type, and rounding by chance of what is in bf16.

In codes of 8 or 4 bits (arXiv:2110.02861, arXiv:2309.01507), one moment instead of two (Lion, arXiv:2302.06675), none (SGD),
rows and columns of the second (Adafactor, arXiv:1804.04235), or those of a projected gradient (APOLLO, arXiv:2412.05270).
Chosen by the user, never by the planner. With ``stochastic`` rounding an update smaller than half a step of a bfloat16
weight is kept in expectation (arXiv:2010.06192). Without this technique it is AdamW by torch's fused kernel.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..layout import Layout
from ..updating import CHUNK, OptimizerKind, Rounding, Update
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

_SAYS: dict[OptimizerKind, str] = {
    "adamw": "AdamW, two moments in the weight's own type",
    "adamw_8bit": "AdamW, its two moments in 8 bits (blocks of 256 share a scale)",
    "adamw_4bit": "AdamW, its two moments in 4 bits (blocks of 128 share a scale)",
    "lion": "Lion, one moment in the weight's own type",
    "lion_8bit": "Lion, its one moment in 8 bits (blocks of 256 share a scale)",
    "sgd": "SGD without momentum, which keeps nothing",
    "adafactor": "Adafactor, of the second moment rows and columns, no first",
    "apollo": "APOLLO, gradients scaled by channel as AdamW does in 256 random dimensions of them",
    "apollo_mini": "APOLLO-Mini, gradients scaled as AdamW does in one random dimension of them",
}


@dataclass(frozen=True, slots=True)
class OptimizerStates(Technique):
    name = "optimizer_states"
    exact = False

    kind: OptimizerKind = "adamw_8bit"
    rounding: Rounding = "nearest"
    chunk: int = CHUNK["cpu"]
    """Elements stepped at once, a multiple of 256."""

    def rewrite(self, layout: Layout) -> Layout:
        update = Update(self.kind, self.rounding, self.chunk)
        if self.chunk < 1 or self.chunk % 256:
            raise Unsuitable(f"a chunk of {self.chunk} elements is not whole blocks of 256")
        cuts = (
            "tensor parallel"
            if layout.mesh.tensor > 1
            else f"zero{layout.mesh.stage}"
            if layout.mesh.sharing > 1
            else ""
        )
        if update.by_matrix and cuts:
            raise Unsuitable(f"{self.kind} steps by rows and columns of whole matrices, which {cuts} cuts")
        trained = {group.bits for group in layout.groups if group.trainable}
        if self.rounding == "stochastic" and (16 not in trained or layout.half != "bfloat16"):
            raise Unsuitable("nothing that trains is held in bf16, so nothing is rounded: say memory.precision=bf16")
        return replace(layout, update=update)

    def apply(self, run: "Run") -> None:
        from ..nn.rules import rule_of

        run.optimizer.rule = rule_of(Update(self.kind, self.rounding, self.chunk))

    def describe(self) -> str:
        by_chance = "; what is kept in bf16 is rounded by chance, right on average" * (self.rounding == "stochastic")
        return _SAYS[self.kind] + by_chance

    def setting(self) -> str:
        return self.kind

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        from ..nn.work import piece_of

        update = Update(self.kind, self.rounding, self.chunk)
        for parameter, state in run.optimizer.state.items():
            kept = sum(tensor.untyped_storage().nbytes() for tensor in state.values())
            planned = sum(update.tensors(piece_of(parameter)))
            if kept != planned:
                raise NotAsPlanned(f"optimizer_states: {kept} bytes of {tuple(parameter.shape)} weights, not {planned}")
