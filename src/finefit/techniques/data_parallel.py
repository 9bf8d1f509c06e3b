"""Data parallel: every rank holds all and has examples of its own; gradients are summed once a step (arXiv:2006.15704).

The sum over ranks is divided by the labelled tokens of all of them, so the gradient is that of one device. Buckets are the
gradients themselves (``gradient_as_bucket_view``), so nothing is held twice.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..layout import Layout
from .base import NotAsPlanned, Technique

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run


@dataclass(frozen=True, slots=True)
class DataParallel(Technique):
    name = "data_parallel"
    exact = True

    ranks: int

    def rewrite(self, layout: Layout) -> Layout:
        return replace(layout, mesh=replace(layout.mesh, replicas=self.ranks))

    def apply(self, run: "Run") -> None:
        from ..nn.reduced import Replicated

        run.optimizer.home = Replicated(run.world.group("replicas"))

    def describe(self) -> str:
        return f"{self.ranks} times the same, each with examples of its own; gradients are summed once a step"

    def setting(self) -> str:
        return str(self.ranks)

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        if (ranks := run.world.mesh.replicas) != self.ranks:
            raise NotAsPlanned(f"data_parallel: {ranks} replicas run, not {self.ranks}")
