"""ZeRO (arXiv:1910.02054): what every data-parallel rank would hold alike is divided among them.

Stage 1: optimizer states (``ZeroRedundancyOptimizer``). Stages 2 and 3 as FSDP2 runs them (``fully_shard``, a unit a block;
``torch/distributed/fsdp/_fully_shard``): weights rest in shards, are gathered in the type they are computed in, and a
block's gradients are whole until they are reduced after its backward. Stage 2 gathers once a step and keeps them
(``reshard_after_forward=False``), stage 3 lets each block go after use. Masters and shards of gradients are fp32 under
``bf16_mixed``: the cast is the gather's, not autocast's.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..config.deepspeed import Place, written
from ..layout import Layout
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
    engine: Literal["torch", "deepspeed"] = "torch"
    optimizer_on: Place = "none"
    """Where DeepSpeed has states and steps, if not on the device."""
    parameters_on: Place = "none"
    """Where it has the shards of weights."""
    nvme: str = ""
    """The folder of what is on disk."""

    def rewrite(self, layout: Layout) -> Layout:
        if self.engine == "deepspeed":
            return self._by_deepspeed(layout)
        if self.stage == 3 and layout.mesh.stages > 1:
            raise Unsuitable("in a pipeline the weights would be gathered again for every micro-batch")
        graph = layout.graph
        if self.stage > 1:
            graph = tuple("bf16" if word == "bf16_mixed" else word for word in graph)
        return replace(layout, graph=graph, mesh=replace(layout.mesh, shards=self.ranks, stage=self.stage))

    def _by_deepspeed(self, layout: Layout) -> Layout:
        if layout.mesh.devices > 1:
            raise Unsuitable(f"DeepSpeed divides all devices there are, and {layout.mesh.says()} are divided already")
        if any(g.bits < 16 for g in layout.groups):
            raise Unsuitable("DeepSpeed casts a model as a whole, and quantised weights are codes")
        if layout.graph[0] not in ("fp32", "bf16_mixed"):
            raise Unsuitable("DeepSpeed steps fp32 weights of its own: say memory.precision=bf16_mixed, or fp32")
        if layout.graph[0] != "fp32" and not all(g.trainable for g in layout.groups):
            raise Unsuitable(
                "DeepSpeed would hold adapters in 16 bits, with what is frozen: memory.precision=fp32 does not"
            )
        graph = tuple("bf16" if word == "bf16_mixed" else word for word in layout.graph)
        mesh = replace(layout.mesh, shards=self.ranks, stage=self.stage, engine="deepspeed")
        is_on_host = self.optimizer_on != "none"
        return replace(
            layout, graph=graph, mesh=mesh, states_on="device" if self.optimizer_on == "none" else self.optimizer_on,
            gradients_on="host" if is_on_host else "device",
        )  # fmt: skip

    def apply(self, run: "Run") -> None:
        from ..nn.reduced import RowsStepped

        if self.stage == 1 and self.engine == "torch":
            run.optimizer.home = RowsStepped(run.world.group("shards"))
            run.world.parts.append("shards")

    def divide(self, run: "Run") -> None:
        from ..nn.sharded import half_of, shard

        if self.engine == "deepspeed":
            from ..nn.by_deepspeed import divide

            half = {"torch.bfloat16": "bf16_mixed", "torch.float16": "fp16_mixed"}
            kind = half.get(str(half_of(run)), "fp32")
            elements = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
            return divide(run, self.settings(kind, elements))
        if self.stage == 1:
            return
        mesh = run.world.along("replicas", "shards") if run.world.mesh.replicas > 1 else run.world.along("shards")
        shard(run, mesh, keeps_whole=self.stage == 2)

    def settings(
        self, precision: str, elements: int, max_norm: float = 0.0, size: int = 1, steps: int = 1
    ) -> dict[str, Any]:
        """DeepSpeed's JSON of it, where that many elements train."""
        places = (self.optimizer_on, self.parameters_on, self.nvme)
        return written(self.stage, places, precision, elements, max_norm, size, steps)

    def describe(self) -> str:
        after = "" if self.stage < 3 else "; a block's weights are gathered while it runs"
        if self.engine == "deepspeed":
            places = (("states", self.optimizer_on), ("weights", self.parameters_on))
            away = "".join(f", {what} on {where}" for what, where in places if where != "none")
            after += f"; by DeepSpeed{away}"
        what = "optimizer states and gradients" if (self.stage, self.engine) == (2, "deepspeed") else _SAYS[self.stage]
        return f"{what} divided among {self.ranks} ranks{after}"

    def setting(self) -> str:
        return str(self.stage)

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        """That engines take what they are told is not a matter of course: on a CPU some train replicas without a word."""
        from ..parts import is_sharded

        if (ranks := run.world.mesh.shards) != self.ranks:
            raise NotAsPlanned(f"zero: {ranks} ranks share, not {self.ranks}")
        if self.engine == "deepspeed":
            return self._verify_engine(run)
        whole = [name for name, p in run.model.named_parameters() if self.stage > 1 and not is_sharded(p)]
        if whole := [name for name in whole if ".tables." not in name]:
            raise NotAsPlanned(f"zero: {len(whole)} weights are whole on each rank: {whole[:3]}")
        stepped = sum(one.numel() for one in run.optimizer.state)
        if stepped > sum(-(-p.shape[0] // self.ranks) * p[0].numel() for p in run.optimizer.stepped if p.dim()):
            raise NotAsPlanned(f"zero: a rank steps {stepped} elements, more than its share")

    def _verify_engine(self, run: "Run") -> None:
        engine, flats = run.optimizer.engine, run.optimizer.flats()  # type: ignore[attr-defined]
        found = engine.zero_optimization_stage(), engine.dp_world_size
        if found != (self.stage, self.ranks):
            raise NotAsPlanned(f"zero: DeepSpeed runs stage {found[0]} on {found[1]} ranks")
        stepped, trained = sum(f.numel() for f in flats), list(run.optimizer.stepped)
        if stepped > sum(-(-run.optimizer.numel_of(p) // self.ranks) for p in trained) + 4:  # type: ignore[attr-defined]
            raise NotAsPlanned(f"zero: a rank steps {stepped} elements, more than its share")
