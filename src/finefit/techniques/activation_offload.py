"""What checkpointed blocks keep, their inputs, waits for its backward on the host or its disk.

After a block's forward its input leaves, while its backward runs it is back, and the input of the block before is on its
way: of all inputs two are on the device at once. As ZeRO-R's offload of activation checkpoints (arXiv:1910.02054,
section 6.1) and torchtune's. Declines blocks that are not checkpointed: they keep twelve times as much or more, which
no link carries in the time that it takes to compute.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..layout import Layout
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

Away = Literal["host", "disk"]


@dataclass(frozen=True, slots=True)
class ActivationOffload(Technique):
    name = "activation_offload"
    exact = True

    place: Away = "host"

    def rewrite(self, layout: Layout) -> Layout:
        if not layout.checkpointed:
            raise Unsuitable("activation_offload keeps nothing less without checkpointed blocks")
        if layout.recomputed != "checkpointed" or layout.nested > 1:
            raise Unsuitable("activation_offload takes the inputs of whole blocks: memory.checkpointing_kind=block")
        if layout.mesh.devices > 1:
            raise Unsuitable("activation_offload is planned for one device")
        return replace(layout, offloaded=self.place)

    def apply(self, run: "Run") -> None:
        from ..nn.offloaded import offload
        from ..nn.recomputed import recomputed_blocks
        from ..run import blocks_of

        def seen() -> None:
            run.evidence["inputs_offloaded"] = run.evidence.get("inputs_offloaded", 0) + 1

        offload(recomputed_blocks(blocks_of(run.model)), self.place, seen)

    def describe(self) -> str:
        where = "the host" if self.place == "host" else "disk"
        return f"inputs of checkpointed blocks are on {where} until their backward"

    def setting(self) -> str:
        return self.place

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        from ..nn.recomputed import recomputed_blocks
        from ..run import blocks_of

        steps, seen = run.evidence.get("micro_steps", 0), run.evidence.get("inputs_offloaded", 0)
        blocks = len(recomputed_blocks(blocks_of(run.model)))
        if seen != blocks * steps:
            raise NotAsPlanned(f"activation_offload: {seen} inputs of {blocks} blocks left in {steps} steps")
