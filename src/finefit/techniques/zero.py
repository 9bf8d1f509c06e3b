"""ZeRO (arXiv:1910.02054): what every data-parallel rank would hold alike is divided among them.

Stage 1: optimizer states (``ZeroRedundancyOptimizer``). Stages 2 and 3 as FSDP2 runs them (``fully_shard``, a unit a block;
``torch/distributed/fsdp/_fully_shard``): weights rest in shards, are gathered in the type they are computed in, and a
block's gradients are whole until they are reduced after its backward. Stage 2 gathers once a step and keeps them
(``reshard_after_forward=False``), stage 3 lets each block go after use. Masters and shards of gradients are fp32 under
``bf16_mixed``: the cast is the gather's, not autocast's. DeepSpeed's engine is another way to do the same: ``by_deepspeed``.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..config.deepspeed import Asked, Place, written
from ..layout import Layout
from ..mesh import Engine
from . import by_deepspeed
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

_SAYS = {
    1: "optimizer states",
    2: "optimizer states, gradients and weights at rest",
    3: "optimizer states, gradients and weights",
}


@dataclass(frozen=True, slots=True)
class Zero(Technique):
    name = "zero"
    exact = True

    stage: Literal[1, 2, 3]
    ranks: int
    engine: Engine = "torch"
    optimizer_on: Place = "none"
    """Where DeepSpeed has states and steps, if not on the device."""
    parameters_on: Place = "none"
    """Where it has the shards of weights."""
    nvme: str = ""
    """The folder of what is on disk."""

    def rewrite(self, layout: Layout) -> Layout:
        return _ENGINES[self.engine].rewrite(self, layout)

    def apply(self, run: "Run") -> None:
        _ENGINES[self.engine].apply(self, run)

    def divide(self, run: "Run") -> None:
        _ENGINES[self.engine].divide(self, run)

    def settings(
        self, precision: str, elements: int, max_norm: float = 0.0, size: int = 1, steps: int = 1
    ) -> dict[str, Any]:
        """DeepSpeed's JSON of it, where that many elements train."""
        places = (self.optimizer_on, self.parameters_on, self.nvme)
        return written(self.stage, places, precision, elements, max_norm, size, steps)

    def does(self, asked: Asked) -> bool:
        """Whether it divides as a file of DeepSpeed's asks for it."""
        places = (self.stage, self.optimizer_on, self.parameters_on, self.nvme)
        wanted = (asked.stage, asked.optimizer_on, asked.parameters_on, asked.nvme)
        return self.engine == "deepspeed" and places == wanted

    def describe(self) -> str:
        what, how = _ENGINES[self.engine].says(self)
        after = "" if self.stage < 3 else "; a block's weights are gathered while it runs"
        return f"{what} divided among {self.ranks} ranks{after}{how}"

    def setting(self) -> str:
        return str(self.stage)

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        """That engines take what they are told is not a matter of course: on a CPU some train replicas without a word."""
        if (ranks := run.world.mesh.shards) != self.ranks:
            raise NotAsPlanned(f"zero: {ranks} ranks share, not {self.ranks}")
        _ENGINES[self.engine].verify(self, run)


class _ByTorch:
    """Rows of its own for stage 1, FSDP2 for the others."""

    @staticmethod
    def rewrite(zero: Zero, layout: Layout) -> Layout:
        if zero.stage == 3 and layout.mesh.stages > 1:
            raise Unsuitable("in a pipeline the weights would be gathered again for every micro-batch")
        graph = layout.graph
        if zero.stage > 1:
            graph = tuple("bf16" if word == "bf16_mixed" else word for word in graph)
        return replace(layout, graph=graph, mesh=replace(layout.mesh, shards=zero.ranks, stage=zero.stage))

    @staticmethod
    def apply(zero: Zero, run: "Run") -> None:
        from ..nn.reduced import RowsStepped

        if zero.stage == 1:
            run.optimizer.home = RowsStepped(run.world.group("shards"))
            run.world.parts.append("shards")

    @staticmethod
    def divide(zero: Zero, run: "Run") -> None:
        from ..nn.sharded import shard

        if zero.stage == 1:
            return
        mesh = run.world.along("replicas", "shards") if run.world.mesh.replicas > 1 else run.world.along("shards")
        shard(run, mesh, keeps_whole=zero.stage == 2)

    @staticmethod
    def says(zero: Zero) -> tuple[str, str]:
        return _SAYS[zero.stage], ""

    @staticmethod
    def verify(zero: Zero, run: "Run") -> None:
        from ..parts import is_sharded

        named = [(name, p) for name, p in run.model.named_parameters() if p.dim() and ".tables." not in name]
        if whole := [name for name, p in named if zero.stage > 1 and not is_sharded(p)]:
            raise NotAsPlanned(f"zero: {len(whole)} weights are whole on each rank: {whole[:3]}")
        stepped = sum(one.numel() for one in run.optimizer.state)
        ranks = run.world.mesh.sharing
        if stepped > sum(-(-p.shape[0] // ranks) * p[0].numel() for p in run.optimizer.stepped if p.dim()):
            raise NotAsPlanned(f"zero: a rank steps {stepped} elements, more than its share")


_ENGINES: dict[Engine, Any] = {"torch": _ByTorch, "deepspeed": by_deepspeed}
