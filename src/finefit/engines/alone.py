"""The world of a run that one process carries out: it asks nobody. Torch-free; `world.World` is that of several."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..mesh import Mesh

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Parameter

Dimension = Literal["stages", "replicas", "shards", "context", "tensor"]
DIMENSIONS: tuple[Dimension, ...] = ("stages", "replicas", "shards", "context", "tensor")


class Alone:
    """The world of one process."""

    rank = data_rank = 0
    size = data_size = 1
    mesh = Mesh()
    lockstep = False
    """Whether ranks wait for each other in every micro-batch, so that all must have as many."""
    parts: list[Dimension]
    """Along which the model's gradients are in parts, when it is stepped."""

    copies: "set[Parameter]"
    """Of what is stepped here, all that is counted in the gradients' norm by another rank."""

    def __init__(self) -> None:
        self.parts, self.copies = [], set()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def answers(self) -> bool:
        """Whether a model can be asked by itself: where no part of a block is another rank's."""
        return self.mesh.data == self.mesh.devices

    def summed(self, values: Sequence[float]) -> list[float]:
        """Over the ranks that have examples, or tokens, of their own."""
        return list(values)

    def from_last(self, values: Sequence[float]) -> list[float]:
        """What only a pipeline's last stage has, and the others have as zero."""
        return list(values)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return flag

    def total(self, square: "Tensor") -> "Tensor":
        """The square of a norm of which each rank has a part."""
        return square

    def most(self, value: "Tensor") -> None:
        """Replace it by the largest of any rank."""

    def told(self, value: Any) -> Any:
        """What the first rank says."""
        return value

    def is_first_of(self, *, sharded: bool, cut: bool) -> bool:
        """Whether of all ranks that hold the same part of something this is the first one; ``cut``: among tensor-parallel
        ranks, too."""
        return True

    def wait(self) -> None:
        """Until all are here."""

    def ends(self) -> "dist.ProcessGroup":
        """The first and the last device of a pipeline, of which this one is either."""
        raise AssertionError("a process alone is no pipeline")

    def along(self, *dimensions: Dimension) -> "DeviceMesh":
        """The part of the mesh that is this rank's, along some of its dimensions."""
        raise AssertionError(f"a process alone is in no group of {dimensions}")

    def group(self, dimension: Dimension) -> "dist.ProcessGroup":
        return self.along(dimension).get_group()
