"""Activation checkpointing (arXiv:1604.06174): a block keeps its input and computes the rest again in backward.

Any k of the L blocks; they are counted from the first, whose activations would wait longest for their backward. Costs
one more forward of each such block. Non-reentrant, so it works on frozen inputs and replays dropout exactly.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..layout import Layout
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from torch.nn import Module

    from ..ledger import Ledger
    from ..run import Run


@dataclass(frozen=True, slots=True)
class Checkpointing(Technique):
    name = "checkpointing"
    exact = True

    blocks: int = 0

    def rewrite(self, layout: Layout) -> Layout:
        depth = layout.model.num_hidden_layers
        if self.blocks > depth:
            raise Unsuitable(f"{self.blocks} blocks to checkpoint, the model has {depth}")
        return replace(layout, checkpointed=self.blocks)

    def apply(self, run: "Run") -> None:
        import functools

        from torch.utils.checkpoint import checkpoint

        from ..run import blocks_of

        def counted(forward, *args, **kwargs):  # type: ignore[no-untyped-def]
            run.evidence["block_forwards"] = run.evidence.get("block_forwards", 0) + 1
            return forward(*args, **kwargs)

        for block in list(blocks_of(run.model))[: self.blocks]:
            # The generator's state is stored per call (5 kB): only what draws numbers needs it back.
            draws = any(map(_draws, block.modules()))
            forward = functools.partial(counted, block.forward)
            block.forward = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=draws)

    def describe(self) -> str:
        return f"activations of {self.blocks} blocks are computed again in backward"

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        steps, seen = run.evidence.get("micro_steps", 0), run.evidence.get("block_forwards", 0)
        if seen != 2 * self.blocks * steps:
            raise NotAsPlanned(
                f"checkpointing: {seen} forwards of {self.blocks} blocks in {steps} steps, not twice each"
            )


def _draws(module: "Module") -> bool:
    """Whether the module's forward draws random numbers, by the rates it keeps: of dropout, of a router's jitter."""
    rates = {**vars(module), "dropout p": getattr(module, "p", 0.0)}
    return any(isinstance(n, float) and n > 0 for name, n in rates.items() if "dropout" in name or "jitter" in name)
