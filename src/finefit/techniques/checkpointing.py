"""Activation checkpointing (arXiv:1604.06174): a block keeps its input and computes the rest again in backward.

Any k of the L blocks; they are counted from the first, whose activations would wait longest for their backward. Costs
one more forward of each such block. Non-reentrant, so it works on frozen inputs and replays dropout exactly.

By kind: the whole block; its attention or its MLP alone, which then keeps its own input; ``selective``: the block, but for
what products and attention gave (torch's selective contexts; for attention alone arXiv:2205.05198, section 5); ``nested``:
the blocks in groups of about the root of their number, of which only the group's input is kept (arXiv:1604.06174, section
4.2), for two more forwards instead of one.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import TYPE_CHECKING

from ..layout import Layout
from ..spec import CheckpointingKind
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

# What transformers calls a block's two halves.
_HALVES = {
    "attention": ("self_attn", "attn", "attention", "self_attention"),
    "mlp": ("mlp", "ffn", "block_sparse_moe", "feed_forward"),
}


@dataclass(frozen=True, slots=True)
class Checkpointing(Technique):
    name = "checkpointing"
    exact = True

    blocks: int = 0
    kind: CheckpointingKind = "block"

    @property
    def group(self) -> int:
        """Blocks of a group of nested ones."""
        return ceil(sqrt(self.blocks)) if self.kind == "nested" else 1

    def rewrite(self, layout: Layout) -> Layout:
        depth = layout.model.num_hidden_layers
        if self.blocks > depth:
            raise Unsuitable(f"{self.blocks} blocks to checkpoint, the model has {depth}")
        if self.kind != "block" and layout.mesh.devices > 1:
            raise Unsuitable(f"checkpointing by {self.kind} is planned for one device")
        if self.kind == "nested" and any(group.place for group in layout.groups):
            raise Unsuitable(
                "nested checkpointing runs blocks again out of their turn, and weights that are streamed are there in turn: "
                "memory.checkpointing_kind=block"
            )
        if self.kind in _HALVES:
            self._half({p.name.partition(".")[0] for p, _ in layout.model.block_tensors()})
        graph = "checkpointed" if self.kind in ("block", "nested") else self.kind
        return replace(layout, checkpointed=self.blocks, recomputed=graph, nested=self.group)

    def _half(self, names: Collection[str]) -> str:
        """What of a block with these parts is computed again."""
        for name in _HALVES[self.kind]:
            if name in names:
                return name
        raise Unsuitable(f"a block of this model has no part that is its {self.kind}")

    def apply(self, run: "Run") -> None:
        from ..nn.nested import group
        from ..nn.recomputed import recomputed, recomputed_blocks, selective
        from ..run import blocks_of

        def seen() -> None:
            run.evidence["block_forwards"] = run.evidence.get("block_forwards", 0) + 1

        blocks = blocks_of(run.model)
        for block in [blocks[i] for i in self._chosen(run)]:
            if self.kind in _HALVES:
                recomputed(block.get_submodule(self._half(dict(block.named_children()))), seen)
            elif self.kind == "selective":
                recomputed(block, seen, selective)
            else:
                recomputed(block, seen)
        if self.kind == "nested":
            group(recomputed_blocks(blocks), self.group)

    def _chosen(self, run: "Run") -> list[int]:
        """The first blocks; of each device of a pipeline as many of its own."""
        shares = run.world.mesh.shares(depth := run.model.config.get_text_config().num_hidden_layers)
        return [i for share in shares for i in share[: ceil(self.blocks * len(share) / depth)]]

    def describe(self) -> str:
        what = {
            "block": f"activations of {self.blocks} blocks are computed again in backward",
            "attention": f"attention of {self.blocks} blocks is computed again in backward",
            "mlp": f"the MLP of {self.blocks} blocks is computed again in backward",
            "selective": f"all but products and attention of {self.blocks} blocks is computed again in backward",
            "nested": f"activations of {self.blocks} blocks are computed again in backward, twice, in groups of {self.group}",
        }
        return what[self.kind]

    def turned_on(self) -> tuple[tuple[str, str], ...]:
        """The number of blocks is searched, not turned on."""
        return (("checkpointing_kind", self.kind),) if self.kind != "block" else ()

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        from ..nn.recomputed import Recomputed
        from ..run import own_blocks

        steps, seen = run.evidence.get("micro_steps", 0), run.evidence.get("block_forwards", 0)
        blocks = self.blocks
        if run.world.mesh.stages > 1:  # this device's
            blocks = sum(isinstance(block.forward, Recomputed) for block in own_blocks(run.model))
        again = blocks - ceil(blocks / self.group)  # to give the others of a group their inputs
        if seen != (2 * blocks + again) * steps:
            raise NotAsPlanned(
                f"checkpointing: {seen} forwards of {blocks} blocks in {steps} steps, not {2 * blocks + again} each"
            )
