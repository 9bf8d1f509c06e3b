"""Pipeline parallel: each device has some of the blocks, micro-batches pass from one to the next.

The schedule is 1F1B (arXiv:2006.09503, ``torch.distributed.pipelining.Schedule1F1B``): the first stage holds as many
micro-batches as there are stages, and each waits for a part of the step, the bubble. The micro-batches are those of the
accumulation. Declines more stages than blocks.
"""

from dataclasses import dataclass, replace

from ..layout import Layout
from .base import Technique, Unsuitable


@dataclass(frozen=True, slots=True)
class PipelineParallel(Technique):
    name = "pipeline_parallel"
    exact = True

    stages: int

    def rewrite(self, layout: Layout) -> Layout:
        depth = layout.model.num_hidden_layers
        if self.stages > depth:
            raise Unsuitable(f"{self.stages} stages for {depth} blocks")
        return replace(layout, mesh=replace(layout.mesh, stages=self.stages))

    def describe(self) -> str:
        return f"the blocks in {self.stages} stages, micro-batches one behind the other (1F1B)"
