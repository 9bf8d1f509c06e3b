"""The world of a run: one process a device, which of them this is, and what they tell each other beside tensors.

Follows torch's launcher: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT stand in the environment, whoever set them. The
mesh is the plan's, outermost first: pipeline stages, replicas, shards, tensor parallel ranks, so that those that talk most
are next to each other. gloo carries a CPU's collectives, NCCL those of CUDA.

A process alone has a world, too, which asks nobody.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..mesh import Mesh

Dimension = Literal["stages", "replicas", "shards", "tensor"]
DIMENSIONS: tuple[Dimension, ...] = ("stages", "replicas", "shards", "tensor")
LONGEST_S = 600.0
"""For which a collective waits for the others: the first of a step may wait for a checkpoint, and for kernels to compile."""


class Alone:
    """The world of one process."""

    rank = data_rank = 0
    size = data_size = 1
    mesh = Mesh()
    lockstep = False
    """Whether ranks wait for each other in every micro-batch, so that all must have as many."""
    parts: list[Dimension]
    """Along which the model's gradients are in parts, when it is stepped."""
    counted_elsewhere: set[torch.nn.Parameter]
    """What of that is held alike by several ranks, and is another's to count in a norm."""

    def __init__(self) -> None:
        self.parts, self.counted_elsewhere = [], set()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def summed(self, values: Sequence[float]) -> list[float]:
        """Over the ranks that have examples of their own."""
        return list(values)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return flag

    def total(self, square: Tensor) -> Tensor:
        """The square of a norm of which each rank has a part."""
        return square

    def most(self, value: Tensor) -> None:
        """Replace it by the largest of any rank."""

    def wait(self) -> None:
        """Until all are here."""

    def along(self, *dimensions: Dimension) -> DeviceMesh:
        """The part of the mesh that is this rank's, along some of its dimensions."""
        raise AssertionError(f"a process alone is in no group of {dimensions}")

    def group(self, dimension: Dimension) -> dist.ProcessGroup:
        return self.along(dimension).get_group()


class World(Alone):
    """``mesh`` over as many processes; `begin` comes first."""

    def __init__(self, mesh: Mesh, kind: str) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh, self.kind = mesh, kind
        degrees = (mesh.stages, mesh.replicas, mesh.shards, mesh.tensor)
        self.devices: DeviceMesh = init_device_mesh(kind, degrees, mesh_dim_names=DIMENSIONS)
        place = dict(zip(DIMENSIONS, self.devices.get_coordinate() or (), strict=True))
        self.place: dict[Dimension, int] = place
        self._groups = {name: self.devices[name].get_group() for name in DIMENSIONS}  # a part of a mesh is tensors
        self.data_rank, self.data_size = place["replicas"] * mesh.shards + place["shards"], mesh.data

    def along(self, *dimensions: Dimension) -> DeviceMesh:
        return self.devices[dimensions]

    def group(self, dimension: Dimension) -> dist.ProcessGroup:
        return self._groups[dimension]

    def summed(self, values: Sequence[float]) -> list[float]:
        told = torch.tensor(list(values), dtype=torch.float64, device=self.kind)
        for dimension in ("replicas", "shards"):
            if self.devices[dimension].size() > 1:
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
        yield World(mesh, "cpu")
    finally:
        dist.destroy_process_group()


def is_rank() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def begin(kind: str) -> torch.device:
    """Join the other processes; the device of this one."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=LONGEST_S))
    return device


def end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
