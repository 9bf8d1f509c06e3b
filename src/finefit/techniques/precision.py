"""Numeric types of weights and arithmetic.

``fp32``: everything. ``bf16``: weights, activations and, where they train, gradients and optimizer states in bfloat16.
``bf16_mixed``: fp32 weights, gradients and states (the master copy), matrix products in bfloat16 by autocast.
``fp16``, ``fp16_mixed``: the same in float16, whose small numbers end at 6e-8: the loss is multiplied by a scale that is
halved, and the update skipped, where a gradient is not finite, and doubled after 2,000 updates without
(arXiv:1710.03740, section 3.2; torch.amp.GradScaler). ``fp16`` is for a frozen base with adapters in fp32: a weight that
trains in float16 loses updates below a thousandth of itself. Loss and norms reduce in fp32 in all.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..layout import Layout
from ..spec import PrecisionKind
from .base import NotAsPlanned, Technique

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

_SCALED = ", its small gradients kept by a dynamic scale of the loss"
_SAYS = {
    "fp32": "weights and arithmetic in fp32",
    "bf16": "weights and arithmetic in bf16, norms and loss reduced in fp32",
    "bf16_mixed": "fp32 weights, matrix products in bf16 by autocast",
    "fp16": f"weights and arithmetic in fp16, norms and loss reduced in fp32{_SCALED}",
    "fp16_mixed": f"fp32 weights, matrix products in fp16 by autocast{_SCALED}",
}


_AS_WIDE: dict[PrecisionKind, PrecisionKind] = {"fp16": "bf16", "fp16_mixed": "bf16_mixed"}


@dataclass(frozen=True, slots=True)
class Precision(Technique):
    name = "precision"
    exact = False

    kind: PrecisionKind = "fp32"

    @property
    def is_half(self) -> bool:
        return self.kind in ("fp16", "fp16_mixed")

    @property
    def as_wide(self) -> "Precision":
        """The kind whose tensors are as wide: what is traced of it holds for both."""
        return replace(self, kind=_AS_WIDE.get(self.kind, self.kind))

    def rewrite(self, layout: Layout) -> Layout:
        bits = 16 if self.kind in ("bf16", "fp16") else 32
        half = "float16" if self.is_half else "bfloat16"
        groups = tuple(replace(g, bits=bits) for g in layout.groups)
        return replace(layout, groups=groups, half=half).with_word(self.as_wide.kind)

    def apply(self, run: "Run") -> None:
        import torch

        from ..nn.scaling import Scaler

        half, kind = torch.float16 if self.is_half else torch.bfloat16, run.device.type
        # Parameters only: constant buffers such as rotary frequencies stay in fp32, as transformers loads them.
        for parameter in run.model.parameters():
            parameter.data = parameter.data.to(half if self.kind in ("bf16", "fp16") else torch.float32)
        if self.kind.endswith("_mixed"):
            run.context = lambda: torch.autocast(kind, dtype=half)
        if self.is_half:
            run.scaler = Scaler(kind, run.world)
            run.scaler.scale(torch.zeros((), device=run.device))  # its two numbers are there from now on

    def describe(self) -> str:
        return _SAYS[self.kind]

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        import torch

        from ..nn.in_fp32 import is_island

        wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.kind, torch.float32)
        embedding = run.model.get_input_embeddings()
        weight = getattr(embedding, "weight", None)  # another stage of a pipeline may have it
        kept = wanted if weight is None else run.optimizer.kept_in(weight)
        if kept != wanted and not is_island(embedding):
            raise NotAsPlanned(f"precision: the embedding is {kept}, not {wanted}")
        if run.scaler.is_enabled() != self.is_half:
            raise NotAsPlanned(f"precision: the loss is {'not ' if self.is_half else ''}scaled, against the plan")
