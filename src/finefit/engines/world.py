"""The world of a run: one process a device, which of them this is, and what they tell each other beside tensors.

Follows torch's launcher: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT stand in the environment, whoever set them. The
mesh is the plan's, outermost first: pipeline stages, replicas, shards, context and tensor parallel ranks, so that those that
talk most are next to each other. Ranks of a context have other tokens and the same weights: to whoever asks for them they
are so many more replicas where all is held whole, and so many more shards where it is not. gloo carries a CPU's collectives,
NCCL those of CUDA.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..mesh import Mesh
from .alone import DIMENSIONS, Alone, Dimension

_HOLDING: tuple[Dimension, ...] = ("stages", "replicas", "shards", "tensor")
LONGEST_S = 600.0
"""For which a collective waits for the others: the first of a step may wait for a checkpoint, and for kernels to compile.
``FINEFIT_TIMEOUT_S`` in the environment is another time."""


class World(Alone):
    """``mesh`` over as many processes; `begin` comes first. ``devices`` may be those of a world before it of the same mesh."""

    def __init__(self, mesh: Mesh, kind: str, devices: DeviceMesh | None = None) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh, self.kind = mesh, kind
        degrees = (mesh.stages, mesh.replicas, mesh.shards, mesh.context, mesh.tensor)
        self.devices: DeviceMesh = devices or init_device_mesh(kind, degrees, mesh_dim_names=DIMENSIONS)
        place = dict(zip(DIMENSIONS, self.devices.get_coordinate() or (), strict=True))
        self.place: dict[Dimension, int] = place
        self.data_rank, self.data_size = place["replicas"] * mesh.shards + place["shards"], mesh.data
        self.holding = self.devices if mesh.context == 1 else self._holding()
        # Once: a part of a mesh is tensors, which a step that is traced would count.
        self._groups = {name: self.along(name).get_group() for name in DIMENSIONS}

    def _holding(self) -> DeviceMesh:
        """The same devices by what they hold."""
        mesh = self.mesh
        held = (mesh.stages, mesh.copies, mesh.sharing, mesh.tensor)
        return init_device_mesh(self.kind, held, mesh_dim_names=_HOLDING)

    def along(self, *dimensions: Dimension) -> DeviceMesh:
        return self.devices[dimensions] if "context" in dimensions else self.holding[dimensions]

    def ends(self) -> dist.ProcessGroup:
        if self.mesh.stages == 2:
            return self.group("stages")
        ranks = self.along("stages").mesh.flatten().tolist()
        made: Any = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)
        return made  # type: ignore[no-any-return]

    def group(self, dimension: Dimension) -> dist.ProcessGroup:
        return self._groups[dimension]

    def summed(self, values: Sequence[float]) -> list[float]:
        return self._summed(values, "replicas", "shards")

    def from_last(self, values: Sequence[float]) -> list[float]:
        return self._summed(values, "stages")

    def _summed(self, values: Sequence[float], *dimensions: Dimension) -> list[float]:
        told = torch.tensor(list(values), dtype=torch.float64, device=self.kind)
        for dimension in dimensions:
            if self.along(dimension).size() > 1:
                dist.all_reduce(told, group=self.group(dimension))
        return told.tolist()

    def any(self, flag: bool) -> bool:
        told = torch.tensor(int(flag), device=self.kind)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told.item())

    def total(self, square: Tensor) -> Tensor:
        for dimension in self.parts:
            dist.all_reduce(square, group=self.group(dimension))
        return square

    def most(self, value: Tensor) -> None:
        dist.all_reduce(value, dist.ReduceOp.MAX)

    def told(self, value: Any) -> Any:
        said = [value]
        dist.broadcast_object_list(said)
        return said[0]

    def is_first_of(self, *, sharded: bool, cut: bool) -> bool:
        alike = ["replicas", *([] if sharded else ["shards"]), *([] if cut else ["tensor"])]
        names = self.holding.mesh_dim_names or ()
        place = dict(zip(names, self.holding.get_coordinate() or (), strict=True))
        return not any(place[dimension] for dimension in alike)

    def wait(self) -> None:
        self.any(False)  # barrier of gloo and of NCCL differ in whom they warn of what


@contextmanager
def pretended(mesh: Mesh) -> Iterator[Alone]:
    """The world of the first of ranks that are not there: what they would say has a shape, and no value."""
    if mesh.devices == 1:
        yield Alone()
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=mesh.devices, store=FakeStore())
    try:
        with _nobody_is_asked() if mesh.stages > 1 else nullcontext():
            yield World(mesh, "cpu")
    finally:
        dist.destroy_process_group()


@contextmanager
def _nobody_is_asked() -> Iterator[None]:
    """Stages vote on whether all know their shapes (torch 2.13); ours do, and a vote of ranks that are not there has no result."""
    from torch.distributed.pipelining import schedules

    torchs: Any = schedules
    kind = torchs._PipelineSchedule
    vote = getattr(kind, "_warmup_p2p", None)
    if vote is None:
        yield
        return

    def agreed(_schedule: Any, stages: Any, *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = torchs.InferenceMode.STATIC

    kind._warmup_p2p = agreed
    try:
        yield
    finally:
        kind._warmup_p2p = vote


def begin(kind: str) -> torch.device:
    """Join the other processes; the device of this one."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    patience = timedelta(seconds=float(os.environ.get("FINEFIT_TIMEOUT_S", LONGEST_S)))
    meeting: Any = _meeting()
    dist.init_process_group(backend, timeout=patience, **meeting)
    return device


def _meeting() -> dict[str, Any]:
    """Where processes meet that torch's launcher has begun again: in a part of its store that is new, or they would wait for
    those that are gone (torch 2.13: the store outlives them)."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    return {"store": PrefixStore(f"finefit-{attempt}", store), "rank": rank, "world_size": size}


def end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
