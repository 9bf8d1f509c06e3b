"""Where the bytes of streamed weights are, and how they come into the arena: from files into memory, by one thread.

What a file of the model has as it is held is read there; what was converted or quantised while it was loaded is in a
scratch file (``scratch``), written once, tensor by tensor. Reads go through the system's page cache, which gives way when
memory is short, and let go of the interpreter's lock. Stores that feed a CUDA device are in ``nn.side_stream``.
"""

import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import EngineError
from ..scratch import Place, Scratch, read_whole

_GAP = 64  # bytes between two tensors that are read over rather than around


@dataclass(frozen=True, slots=True)
class Extent:
    """A unit's place in the arena."""

    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Origin:
    """A file, and where a tensor's bytes begin in it."""

    path: Path
    offset: int


class Store(Protocol):
    """One transfer is under way at a time: ``begin``, then ``finish`` before anything of the unit is used."""

    def put(self, unit: int, start: int, tensor: Tensor) -> None:
        """Keep the bytes of a contiguous tensor of the arena, ``start`` bytes into its unit."""
        ...

    def link(self, unit: int, start: int, n_bytes: int, origin: Origin) -> None:
        """The same of bytes that a file has."""
        ...

    def rows(self, unit: int, ids: Sequence[int], out: Tensor) -> None:
        """Fill ``out`` with these rows of the table that the unit is."""
        ...

    def begin(self, unit: int) -> None: ...
    def finish(self) -> None: ...


def store_for(place: str, arena: Tensor, extents: Sequence[Extent]) -> Store:
    """The store for an arena on its device."""
    if isinstance(arena, FakeTensor):
        return Nowhere()
    if arena.device.type == "cpu":
        assert place == "disk", "the host of a CPU is the device itself"
        return FromDisk(arena, extents)
    from .side_stream import DeviceFromDisk, DeviceFromHost

    return (DeviceFromDisk if place == "disk" else DeviceFromHost)(arena, extents)


class Nowhere:
    """Of tensors without values."""

    def put(self, unit: int, start: int, tensor: Tensor) -> None:
        return None

    def link(self, unit: int, start: int, n_bytes: int, origin: Origin) -> None:
        return None

    def rows(self, unit: int, ids: Sequence[int], out: Tensor) -> None:
        return None

    def begin(self, unit: int) -> None:
        return None

    def finish(self) -> None:
        return None


class _File:
    """Open for reading for as long as it is needed, whatever becomes of its name."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.file)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes ``start`` to ``stop`` of a unit are in ``file`` from ``source`` on."""

    file: Any
    source: int
    start: int
    stop: int

    def goes_on(self, after: "_Piece") -> bool:
        same = self.file is after.file and self.source - self.start == after.source - after.start
        return same and 0 <= self.start - after.stop <= _GAP


class Files:
    """The pieces of every unit, by where they begin in it."""

    def __init__(self, extents: Sequence[Extent]) -> None:
        self.extents = extents
        self._pieces: list[dict[int, _Piece]] = [{} for _ in extents]
        self._merged: dict[int, list[_Piece]] = {}
        self._places: dict[int, Place] = {}
        self._open: dict[Path, _File] = {}
        self._scratch: Scratch | None = None

    def put(self, unit: int, start: int, tensor: Tensor) -> None:
        scratch = self._scratch = self._scratch or Scratch()
        if unit not in self._places:
            self._places[unit] = scratch.reserve(self.extents[unit].n_bytes)
        stop = start + tensor.numel() * tensor.element_size()
        source = self._places[unit].offset + start
        scratch.put(tensor.cpu(), Place(source, stop - start))
        self._add(unit, _Piece(scratch, source, start, stop))

    def link(self, unit: int, start: int, n_bytes: int, origin: Origin) -> None:
        if origin.path not in self._open:
            self._open[origin.path] = _File(origin.path)
        self._add(unit, _Piece(self._open[origin.path], origin.offset, start, start + n_bytes))

    def _add(self, unit: int, piece: _Piece) -> None:
        self._pieces[unit][piece.start] = piece
        self._merged.pop(unit, None)

    def of(self, unit: int) -> list[_Piece]:
        """Those that lie side by side as one."""
        if unit not in self._merged:
            found: list[_Piece] = []
            for _, piece in sorted(self._pieces[unit].items()):
                if found and piece.goes_on(found[-1]):
                    piece = _Piece(piece.file, found[-1].source, found.pop().start, piece.stop)
                found.append(piece)
            self._merged[unit] = found
        return self._merged[unit]

    def read(self, unit: int, into: memoryview) -> None:
        """The whole unit."""
        for piece in self.of(unit):
            self.read_part(piece, piece.start, into[piece.start : piece.stop])

    def read_part(self, piece: _Piece, start: int, into: memoryview) -> None:
        """What of the piece begins ``start`` bytes into the unit."""
        if not read_whole(piece.file.file, into, piece.source + start - piece.start):
            raise missing(getattr(piece.file, "path", None) or piece.file.folder)

    def rows(self, unit: int, ids: Sequence[int], into: memoryview) -> None:
        """Rows of a table, one after the other."""
        (piece,) = self.of(unit)
        width = len(into) // max(len(ids), 1)
        for i, row in enumerate(ids):
            self.read_part(piece, piece.start + row * width, into[i * width : (i + 1) * width])


class FromDisk(Files):
    """Into an arena in memory, by one thread."""

    def __init__(self, arena: Tensor, extents: Sequence[Extent]) -> None:
        super().__init__(extents)
        self._into = bytes_of(arena)
        self._thread = ThreadPoolExecutor(1, "finefit-weights")
        self._under_way: Future[None] | None = None
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def rows(self, unit: int, ids: Sequence[int], out: Tensor) -> None:  # type: ignore[override]
        super().rows(unit, ids, bytes_of(out))

    def begin(self, unit: int) -> None:
        at = self.extents[unit]
        self._under_way = self._thread.submit(self.read, unit, self._into[at.start : at.start + at.n_bytes])

    def finish(self) -> None:
        assert self._under_way is not None, "nothing was begun"
        self._under_way.result()
        self._under_way = None


def missing(where: Path) -> EngineError:
    """A file that has become shorter since its header was read."""
    return EngineError("weights that were there when the run began are not there any more", where=str(where))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host, to be written to behind autograd's back."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
