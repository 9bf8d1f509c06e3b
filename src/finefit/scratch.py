"""Bytes of tensors on a disk for as long as a process lives: what techniques that offload to disk write and read back.

One nameless file in the user's cache (never /tmp, which may itself be memory), so nothing is left behind however the
process ends; places in it are used again. Tensors are written and read whole, through the system's page cache, which
gives way when memory is short; or they are mapped, so that they are tensors as others, whose pages the system takes back.
Tensors without values (a fake step) take a place and no bytes. Declines to hold anything
between processes.
"""

import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import EngineError
from .files import writable_cache

_PART = "scratch"
_ALIGNED = mmap.ALLOCATIONGRANULARITY  # bytes: whole pages, so that no place shares one with another
_EXTENT = 2**30  # bytes mapped at once: each mapping holds an open file, of which a process has about a thousand


class _Pages(mmap.mmap):
    """Pages of a file in memory, for several tensors: where they begin there and in the file, how many bytes are given."""

    address: int
    offset: int
    taken: int


# Of mapped tensors, by the address of their storage, for as long as what they lie in is mapped.
_PAGES: weakref.WeakValueDictionary[int, _Pages] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Place:
    offset: int
    n_bytes: int


class Scratch:
    """``put`` and ``get`` may be called from several threads, for different places."""

    def __init__(self, folder: Path | None = None) -> None:
        where = folder or writable_cache(_PART)
        where.mkdir(parents=True, exist_ok=True)
        self.folder, self._end = where, 0
        self.file, name = tempfile.mkstemp(dir=where)
        os.unlink(name)
        weakref.finalize(self, os.close, self.file)
        self._free: dict[int, list[Place]] = defaultdict(list)  # by size
        self._pages: _Pages | None = None  # what the next mapped tensor may lie in

    def reserve(self, n_bytes: int) -> Place:
        """A place for so many bytes, one that was released if there is one of the size."""
        whole = _whole(n_bytes)
        if self._free[whole]:
            return self._free[whole].pop()
        place = Place(self._end, whole)
        self._end += whole
        return place

    def release(self, place: Place) -> None:
        self._free[place.n_bytes].append(place)

    def mapped(self, tensor: Tensor) -> Tensor:
        """A tensor of the host as that one, its values too, whose bytes are pages of the file."""
        if is_fake(tensor) or not tensor.numel():
            return tensor
        try:
            pages, place = self._room(tensor.nbytes)
            # or a full disk would end the process when a page is first written
            os.posix_fallocate(self.file, place.offset, place.n_bytes)
        except OSError as error:
            raise self._failed(error) from error
        at = place.offset - pages.offset
        _PAGES[pages.address + at] = pages  # first, or who follows tensors takes it for one of the memory's
        made = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(tensor.shape)
        made.copy_(tensor.detach())
        let_go(made)
        return made

    def _room(self, n_bytes: int) -> tuple[_Pages, Place]:
        """Pages that are mapped, and a place in them that nothing else lies in."""
        whole = _whole(n_bytes)
        pages = self._pages
        if pages is None or pages.taken + whole > len(pages):
            extent = self.reserve(max(whole, _EXTENT))
            os.truncate(self.file, self._end)  # without blocks: those come as they are needed
            pages = self._pages = _Pages(self.file, extent.n_bytes, offset=extent.offset)
            pages.offset, pages.taken = extent.offset, 0
            pages.address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        place = Place(pages.offset + pages.taken, whole)
        pages.taken += whole
        return pages, place

    def put(self, tensor: Tensor, place: Place) -> None:
        """Write a contiguous tensor of the host; EngineError where the disk is full or fails."""
        if is_fake(tensor):
            return
        left, offset = _bytes_of(tensor), place.offset
        try:
            while left:
                written = os.pwrite(self.file, left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            raise self._failed(error) from error

    def get(self, tensor: Tensor, place: Place) -> None:
        """Fill a contiguous tensor of the host with what was put there."""
        if is_fake(tensor):
            return
        if not read_whole(self.file, _bytes_of(tensor), place.offset):
            raise EngineError("what was written to the disk is not there any more", where=str(self.folder))

    def _failed(self, error: OSError) -> EngineError:
        return EngineError(
            f"could not write to the disk: {error.strerror}", where=str(self.folder),
            hint="free some space there, or say none for what is offloaded to disk",
        )  # fmt: skip


def read_whole(file: int, into: memoryview, offset: int) -> bool:
    """Fill ``into`` from a file's bytes at ``offset``; whether there were enough of them."""
    while into:
        read = os.preadv(file, [into], offset)
        if not read:
            return False
        into, offset = into[read:], offset + read
    return True


def is_fake(tensor: Tensor) -> bool:
    """Whether it has no values. Their module is 70 MB of imports, and is there where there are any."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def is_mapped(tensor: Tensor) -> bool:
    """Whether it was made by ``Scratch.mapped``."""
    return tensor.device.type == "cpu" and not is_fake(tensor) and tensor.untyped_storage().data_ptr() in _PAGES


def let_go(tensor: Tensor) -> None:
    """Its pages need not be in memory until they are touched again; what is in them is the system's to write."""
    _advise(tensor, "MADV_DONTNEED")


def call_for(tensor: Tensor) -> None:
    """Its pages will be touched soon."""
    _advise(tensor, "MADV_WILLNEED")


def _advise(tensor: Tensor, word: str) -> None:
    if is_mapped(tensor) and hasattr(mmap, word):
        storage = tensor.untyped_storage()
        pages = _PAGES[storage.data_ptr()]
        pages.madvise(getattr(mmap, word), storage.data_ptr() - pages.address, storage.nbytes())


def _whole(n_bytes: int) -> int:
    """In whole pages."""
    return -(-n_bytes // _ALIGNED) * _ALIGNED


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
