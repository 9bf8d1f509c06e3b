"""finefit's own norm, gated product and packed attention: autograd functions that keep what backward needs, no fp32 copies.

The plain modules keep two fp32 copies of a norm's input and the activated gate beside the gate. Exact up to the order of a
reduction, and up to one rounding less in the rotation. Leaves Phi 3's MLP, whose gate and up are one weight, as it is.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..layout import Layout
from .base import NotAsPlanned, Technique

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

# Classes of transformers' norms: what is added to the stored weight.
NORMS = {
    "LlamaRMSNorm": 0.0, "MistralRMSNorm": 0.0, "Qwen2RMSNorm": 0.0, "Qwen3RMSNorm": 0.0, "Phi3RMSNorm": 0.0,
    "SmolLM3RMSNorm": 0.0,
    "Gemma2RMSNorm": 1.0, "Gemma3RMSNorm": 1.0,
}  # fmt: skip
ATTENTION = (
    "LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Gemma2Attention", "Gemma3Attention",
    "Phi3Attention", "SmolLM3Attention",
)  # fmt: skip
GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Gemma2MLP", "Gemma3MLP", "SmolLM3MLP")


@dataclass(frozen=True, slots=True)
class FusedOps(Technique):
    name = "fused_ops"
    exact = True

    def rewrite(self, layout: Layout) -> Layout:
        return layout.with_word("fused_ops")

    def apply(self, run: "Run") -> None:
        from ..nn.attend import take_over
        from ..nn.gated import ACTIVATIONS, GatedMLP
        from ..nn.norm import RMSNorm

        for parent in list(run.model.modules()):
            for name, child in list(parent.named_children()):
                kind = type(child).__name__
                if kind in NORMS:
                    eps = getattr(child, "variance_epsilon", None) or child.eps
                    setattr(parent, name, RMSNorm(child, eps, NORMS[kind]))
                elif kind in ATTENTION:
                    take_over(child, softcapped=kind == "Gemma2Attention")
                elif kind in GATED and _act(run.model) in ACTIVATIONS:
                    setattr(parent, name, GatedMLP(child, _act(run.model)))

    def describe(self) -> str:
        return "norms, attention and gated MLPs of known families keep their inputs, and attention on a GPU its output, for backward"

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        from ..nn.gated import ACTIVATIONS

        known = {*NORMS, *ATTENTION, *(GATED if _act(run.model) in ACTIVATIONS else ())}
        left = [name for name, module in run.model.named_modules() if type(module).__name__ in known]
        if left:
            raise NotAsPlanned(f"fused_ops: {len(left)} modules are still transformers' own: {left[:3]}")


def _act(model: Any) -> str:
    """Name of the MLPs' activation, as the families with a gated MLP say it."""
    config = model.config.get_text_config()
    return getattr(config, "hidden_activation", None) or str(getattr(config, "hidden_act", ""))
