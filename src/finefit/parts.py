"""The part of a weight that a rank holds: of a tensor that FSDP2 shards (a ``DTensor``) its own rows, of any other all of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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


@contextmanager
def before_resizing(told: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
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
