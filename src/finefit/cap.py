"""A device smaller than the one there: no more bytes of live tensors than are allowed, or the error the device would give.

On a CPU a dispatch mode counts storages, as the ledger does, and costs as much; on CUDA the allocator itself is told, which
costs nothing. For trying what a run does where memory is short.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .parts import Following, local
from .scratch import is_mapped
from .units import format_bytes


class Refused(torch.OutOfMemoryError):
    """More than is allowed: ``asked_bytes`` beside the ``held_bytes`` in use."""

    def __init__(self, asked_bytes: int, held_bytes: int, limit_bytes: int) -> None:
        self.asked_bytes, self.held_bytes = asked_bytes, held_bytes
        asked, held, limit = map(format_bytes, (asked_bytes, held_bytes, limit_bytes))
        super().__init__(f"{asked} were asked for, {held} of the allowed {limit} are in use")


class Cap(Following):
    """Use as a context. ``live_bytes`` are those of storages that operators made within it."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(self._resized)
        self.limit_bytes, self.live_bytes = limit_bytes, 0
        self._known: dict[int, int] = {}  # bytes by storage

    def _resized(self, storage: torch.UntypedStorage, n_bytes: int) -> None:
        if storage._cdata in self._known:
            self._take(storage._cdata, n_bytes - self._known[storage._cdata])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self._see(leaf)
        return out

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def _see(self, tensor: Tensor) -> None:
        tensor = local(tensor)
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self._known or is_mapped(tensor):
            return
        self._take(key, n_bytes)
        weakref.finalize(storage, self._gone, key)

    def _take(self, key: int, n_bytes: int) -> None:
        if n_bytes > 0 and self.live_bytes + n_bytes > self.limit_bytes:
            raise Refused(n_bytes, self.live_bytes, self.limit_bytes)
        self._known[key] = self._known.get(key, 0) + n_bytes
        self.live_bytes += n_bytes

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key)


@contextmanager
def capped(limit_bytes: int | None, device: torch.device) -> Iterator[None]:
    """No more than so many bytes of the device within the context; None allows all there are."""
    if limit_bytes is None:
        yield
    elif device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), index)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, index)
    else:
        with Cap(limit_bytes):
            yield
