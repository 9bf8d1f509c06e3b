"""LoRA (arXiv:2106.09685): the base is frozen, low-rank adapters train in fp32.

Chosen by the user as a method, never by the planner for memory's sake. The layer is ``nn.lora_linear.LoRALinear``;
files are peft's. Declines DoRA, rank patterns and trained biases.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import ConfigError, did_you_mean
from ..layout import Layout, ParamGroup
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run


@dataclass(frozen=True, slots=True)
class Lora(Technique):
    """``targets`` are short names of a block's linears (``q_proj``); empty means all of them."""

    name = "lora"
    exact = False

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    def rewrite(self, layout: Layout) -> Layout:
        model = layout.model
        linears = [(p, count) for p, count in model.block_tensors() if p.role in ("linear", "transposed")]
        adapted = [(p, count) for p, count in linears if not self.targets or p.short_name in self.targets]
        self._check([p.short_name for p in model.linears()])
        frozen = tuple(replace(g, trainable=False) for g in layout.groups)
        adapters = tuple(
            ParamGroup(
                f"block.{p.name}.lora_{half}",
                self.rank * side,
                count,
                32,
                True,
                "linear",
                self.rank if half == "A" else side,
                columns=side if half == "A" else self.rank,
            )
            for p, count in adapted
            for half, side in zip("BA" if p.role == "linear" else "AB", p.shape, strict=True)
        )
        words = ["lora"] + (["dropout"] if self.dropout else [])
        if self.targets and set(self.targets) != {p.short_name for p in model.linears()}:
            words.append("targets=" + ",".join(sorted(self.targets)))
        return replace(layout, groups=frozen + adapters, rank=self.rank, graph=(*layout.graph, *words))

    def _check(self, known: list[str]) -> None:
        if not known:
            raise Unsuitable("the model has no linear layers to adapt")
        for target in self.targets:
            if target not in known:
                hint = did_you_mean(target, known) or f"its blocks have {', '.join(known)}"
                raise ConfigError(f"lora.targets: the model has no linear layer '{target}'", hint=hint)

    def apply(self, run: "Run") -> None:
        from ..nn.lora_linear import LoRALinear, is_transposed
        from ..run import blocks_of, is_linear

        run.model.requires_grad_(False)
        for block in blocks_of(run.model):
            for parent in list(block.modules()):
                for name, child in list(parent.named_children()):
                    wanted = not self.targets or name in self.targets
                    if wanted and (is_linear(child) or is_transposed(child)):
                        setattr(parent, name, LoRALinear(child, self.rank, self.alpha, self.dropout))

    def describe(self) -> str:
        where = ", ".join(self.targets) if self.targets else "all linear layers"
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        return f"LoRA of rank {self.rank}, alpha {self.alpha:g}{dropout} on {where}; the base is frozen"

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        from ..nn.lora_linear import LoRALinear

        layers = [m for m in run.model.modules() if isinstance(m, LoRALinear)]
        adapters = [p for layer in layers for p in (layer.lora_A, layer.lora_B)]
        bare = sum(not run.optimizer.has_updated(p) for p in adapters)
        moved = [n for n, p in run.model.named_parameters() if p.grad is not None and "lora_" not in n]
        if bare or moved or not layers:
            raise NotAsPlanned(f"lora: {bare} adapter tensors got no gradient, frozen ones did: {moved[:3]}")
