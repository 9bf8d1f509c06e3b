"""ZeRO by DeepSpeed's engine (``deepspeed/runtime/zero``): what ``zero`` asks of its engine.

Weights are cast as a whole and trained ones stepped as flat fp32 copies, in stages 1 and 2 beside whole weights, in stage 3
beside shards of them. States, and in stage 3 shards, may be on the host or on NVMe. Declines what its flat tensors cannot
hold, and to share devices with another way of dividing them.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from ..layout import Layout
from .base import NotAsPlanned, Unsuitable

if TYPE_CHECKING:
    from ..run import Run
    from .zero import Zero

_SAYS = {
    1: "optimizer states",
    2: "optimizer states and gradients",
    3: "optimizer states, gradients and weights",
}


def rewrite(zero: "Zero", layout: Layout) -> Layout:
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
    mesh = replace(layout.mesh, shards=zero.ranks, stage=zero.stage, engine="deepspeed")
    layout = replace(layout, graph=graph, mesh=mesh)
    if zero.optimizer_on == "none":
        return layout
    return replace(layout, states_on=zero.optimizer_on, gradients_on="host")


def apply(zero: "Zero", run: "Run") -> None:
    """Nothing of the model changes."""


def divide(zero: "Zero", run: "Run") -> None:
    from ..nn.by_deepspeed import divide
    from ..nn.sharded import half_of

    half = {"torch.bfloat16": "bf16_mixed", "torch.float16": "fp16_mixed"}
    elements = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    divide(run, zero.settings(half.get(str(half_of(run)), "fp32"), elements))


def says(zero: "Zero") -> tuple[str, str]:
    places = (("states", zero.optimizer_on), ("weights", zero.parameters_on))
    away = "".join(f", {what} on {where}" for what, where in places if where != "none")
    return _SAYS[zero.stage], f"; by DeepSpeed{away}"


def verify(zero: "Zero", run: "Run") -> None:
    engine, flats = run.optimizer.engine, run.optimizer.flats()  # type: ignore[attr-defined]
    found = engine.zero_optimization_stage(), engine.dp_world_size
    if found != (zero.stage, zero.ranks):
        raise NotAsPlanned(f"zero: DeepSpeed runs stage {found[0]} on {found[1]} ranks")
    stepped, trained = sum(f.numel() for f in flats), list(run.optimizer.stepped)
    if stepped > sum(-(-run.optimizer.numel_of(p) // zero.ranks) for p in trained) + 4:  # type: ignore[attr-defined]
        raise NotAsPlanned(f"zero: a rank steps {stepped} elements, more than its share")
