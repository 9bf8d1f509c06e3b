"""Pipeline parallel: each device has some of the blocks, micro-batches pass from one to the next.

The micro-batches are those of the accumulation; the schedules are torch's (``torch.distributed.pipelining.schedules``).
``gpipe`` (arXiv:1811.06965): all forwards, then all backwards; every stage holds all micro-batches. ``1f1b``
(arXiv:2006.09503): backwards begin as soon as there are any; the first stage holds as many as there are stages, the last
one. ``interleaved`` (arXiv:2104.04473): a device has several stages, so that it waits less and sends more. Each device
waits for a part of the step, the bubble. Rows of a step are as wide as its widest. Embedding and head that share a weight
are on both ends, and their gradients are summed. Declines more stages than blocks, and models that do not pack.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..layout import Layout
from ..mesh import Schedule
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

_SAYS = {
    "gpipe": "all forwards, then all backwards (GPipe)",
    "1f1b": "micro-batches one behind the other (1F1B)",
    "interleaved": "micro-batches one behind the other, each device with {} stages (interleaved 1F1B)",
}


@dataclass(frozen=True, slots=True)
class PipelineParallel(Technique):
    name = "pipeline_parallel"
    exact = True

    stages: int
    """Devices of the pipeline."""
    schedule: Schedule = "1f1b"
    stages_a_rank: int = 1
    """Of ``interleaved``, 2 or more."""

    def rewrite(self, layout: Layout) -> Layout:
        depth, count = layout.model.num_hidden_layers, self.stages * self.stages_a_rank
        if count > depth:
            raise Unsuitable(f"{count} stages for {depth} blocks")
        if (self.stages_a_rank > 1) is not (self.schedule == "interleaved"):
            raise Unsuitable(f"{self.stages_a_rank} stages a device are not for the schedule '{self.schedule}'")
        if not layout.model.packs:
            raise Unsuitable(
                f"rows of a pipeline are as wide as each other, and '{layout.model.family}' models see what fills them"
            )
        mesh = replace(
            layout.mesh, stages=self.stages, schedule=self.schedule, stages_a_rank=self.stages_a_rank
        )  # fmt: skip
        return replace(layout, mesh=mesh)

    def apply(self, run: "Run") -> None:
        """Nothing: a model is cut when all is changed that is to be."""

    def divide(self, run: "Run") -> None:
        from ..nn.pipelined import Pipelined, share_ends
        from ..nn.staged import cut
        from ..run import blocks_of

        world, embedding = run.world, run.model.get_input_embeddings().weight
        slices = world.mesh.slices(len(blocks_of(run.model)))
        place = world.along("stages").get_local_rank()
        own = range(place, len(slices), self.stages)
        is_tied = run.model.get_output_embeddings().weight is embedding
        run.passed = embedding.dtype
        passes = Pipelined(
            dict(zip(own, cut(run.model, slices, own), strict=True)), len(slices), self.schedule, world.group("stages")
        )
        run.passes, run.forward = passes, passes.forward
        world.parts.append("stages")
        if is_tied and embedding.requires_grad and place in (0, self.stages - 1):
            share_ends(run, world.ends(), is_first=place == 0)

    def describe(self) -> str:
        return f"the blocks in {self.stages} stages, {_SAYS[self.schedule].format(self.stages_a_rank)}"

    def setting(self) -> str:
        return str(self.stages)

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        from ..run import blocks_of, own_blocks

        depth = len(blocks_of(run.model))
        own, most = len(own_blocks(run.model)), max(map(len, run.world.mesh.shares(depth)))
        if run.world.mesh.stages != self.stages or not 0 < own <= most:
            raise NotAsPlanned(f"pipeline_parallel: {own} of {depth} blocks are here, not a part of {self.stages}")
