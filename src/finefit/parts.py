"""The part of a weight that a rank holds: of a tensor that FSDP2 shards (a ``DTensor``) its own rows, of any other all of it.

What all this is a part of may be a tensor-parallel rank's cut of the model's weight: what FSDP2 calls whole is that then.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")  # or torch.distributed.tensor would be loaded to ask that


def local(tensor: Tensor) -> Tensor:
    """The tensor that this rank has of it, sharing its memory."""
    return getattr(tensor, "_local_tensor", tensor)


def rows_of(tensor: Any) -> tuple[int, int]:
    """Where a sharded tensor's own rows begin and end in the whole."""
    start, stop = 0, tensor.shape[0]
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_shard():
            assert placement.dim == 0
            each = -(-tensor.shape[0] // tensor.device_mesh.size(dimension))
            start = min(tensor.device_mesh.get_local_rank(dimension) * each, tensor.shape[0])
            stop = min(start + each, tensor.shape[0])
    return start, stop


def put(into: Tensor, whole: Tensor) -> None:
    """Give ``into`` its part of the value ``whole``."""
    if is_sharded(into):
        start, stop = rows_of(into)
        local(into).copy_(whole[start:stop])
    else:
        into.copy_(whole)


class Following(TorchDispatchMode):
    """A mode that while it is on also hears of each storage that is about to have another size, by ``told``."""

    def __init__(self, told: Callable[[torch.UntypedStorage, int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._told, self._following = told, ExitStack()

    def __enter__(self) -> Any:
        self._following.enter_context(_before_resizing(self._told))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        self._following.close()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]


@contextmanager
def _before_resizing(told: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """``told`` hears of each storage that is about to have another size: FSDP2 keeps the tensors it gathers into, and takes
    and frees their memory so, which no operator shows."""
    resize: Any = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, n_bytes: int) -> Any:
        told(storage, n_bytes)
        return resize(storage, n_bytes)

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a weight that a tensor-parallel rank holds: ranges (start, stop) of one dimension, one behind the other."""

    shape: tuple[int, ...]
    """Of the whole."""
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def even(cls, shape: Sequence[int], dim: int, sections: Sequence[int], place: tuple[int, int]) -> "Cut":
        """Of each of the ``sections`` that ``dim`` is made of the part of rank ``place[0]`` of ``place[1]``."""
        rank, ranks = place
        starts = itertools.accumulate(sections, initial=0)
        ranges = ((at + size * rank // ranks, at + size * (rank + 1) // ranks)
                  for at, size in zip(starts, sections, strict=False))  # fmt: skip
        return cls(tuple(shape), dim, tuple(ranges))

    @property
    def numel(self) -> int:
        """Of the whole."""
        return prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """The part of a tensor of the whole's shape: a view of it where it is one range."""
        found = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def whole(self, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The weight of which each rank of ``group`` has its part; all are to ask."""
        made = own.new_zeros(self.shape)
        parts = torch.split(own, [stop - start for start, stop in self.ranges], self.dim)
        for (start, stop), part in zip(self.ranges, parts, strict=True):
            made.narrow(self.dim, start, stop - start).copy_(part)
        dist.all_reduce(made, group=group)
        return made


def cuts_of(module: nn.Module) -> dict[str, Cut]:
    """The cuts of a module's own weights, by their short names."""
    return module.__dict__.get("cuts") or {}


def all_cuts(model: nn.Module) -> dict[str, Cut]:
    """Of all weights that are cut, by their names in the model."""
    return {
        f"{path}.{leaf}" if path else leaf: cut
        for path, module in model.named_modules()
        for leaf, cut in cuts_of(module).items()
    }
