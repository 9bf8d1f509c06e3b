"""Numeric types of weights and arithmetic.

``fp32``: everything. ``bf16``: weights, activations and, where they train, gradients and optimizer states in bfloat16.
``bf16_mixed``: fp32 weights, gradients and states (the master copy), matrix products in bfloat16 by autocast
(arXiv:1710.03740 without loss scaling, which bfloat16's range makes needless). Loss and norms reduce in fp32 in all.
Declines float16.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..layout import Layout
from .base import NotAsPlanned, Technique

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

Kind = Literal["fp32", "bf16", "bf16_mixed"]
_SAYS = {
    "fp32": "weights and arithmetic in fp32",
    "bf16": "weights and arithmetic in bf16, norms and loss reduced in fp32",
    "bf16_mixed": "fp32 weights, matrix products in bf16 by autocast",
}


@dataclass(frozen=True, slots=True)
class Precision(Technique):
    name = "precision"
    exact = False

    kind: Kind = "fp32"

    def rewrite(self, layout: Layout) -> Layout:
        bits = 16 if self.kind == "bf16" else 32
        return replace(layout, groups=tuple(replace(g, bits=bits) for g in layout.groups)).with_word(self.kind)

    def apply(self, run: "Run") -> None:
        import torch

        # Parameters only: constant buffers such as rotary frequencies stay in fp32, as transformers loads them.
        for parameter in run.model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16 if self.kind == "bf16" else torch.float32)
        if self.kind == "bf16_mixed":
            kind = run.device.type
            run.context = lambda: torch.autocast(kind, dtype=torch.bfloat16)

    def describe(self) -> str:
        return _SAYS[self.kind]

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        import torch

        wanted = torch.bfloat16 if self.kind == "bf16" else torch.float32
        weight = run.model.get_input_embeddings().weight
        if weight.dtype != wanted:
            raise NotAsPlanned(f"precision: the embedding is {weight.dtype}, not {wanted}")
