"""The optimizer's step in backward (LOMO, arXiv:2306.09782; torch's tutorial of the same): no gradient outlives its step.

Each parameter is stepped as soon as its gradient is whole, and the gradient freed before the next is formed; what is left
of them is the largest one, or an embedding's that is also the head. Exact where nothing has to know all gradients first:
declines several micro-batches to a step, clipping, a scaled loss and several devices.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..layout import Layout
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run


@dataclass(frozen=True, slots=True)
class FusedBackwardStep(Technique):
    name = "fused_backward_step"
    exact = True

    def rewrite(self, layout: Layout) -> Layout:
        if layout.clipped:
            raise Unsuitable(
                "gradients are clipped, and their norm is known only when all of them are there: train.max_grad_norm=0 "
                "leaves them as they are"
            )
        if layout.half == "float16":
            raise Unsuitable("with a scaled loss a step is skipped as a whole, which needs all gradients first")
        if layout.micro_steps > 1:
            raise Unsuitable(f"gradients of {layout.micro_steps} micro-batches are added up before a step")
        if layout.mesh.devices > 1:
            raise Unsuitable("gradients of several devices are added up before a step")
        if layout.gradients_on != "device":
            raise Unsuitable("gradients leave the device as they appear and are stepped by elsewhere")
        return replace(layout, steps_in_backward=True)

    def apply(self, run: "Run") -> None:
        from ..nn.step_in_backward import StepInBackward

        stepping = StepInBackward(run.optimizer)
        run.optimizer.rule, run.clip = stepping, stepping.norm

    def describe(self) -> str:
        return "each weight is updated in backward as soon as its gradient is there, and the gradient freed"

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        left = [name for name, p in run.model.named_parameters() if p.grad is not None]
        kept = sum(entry.owner == "gradient" for entry in ledger.entries)
        if left or kept:
            raise NotAsPlanned(f"fused_backward_step: {max(len(left), kept)} gradients were kept: {left[:3]}")
