"""Streamed weights on their way to a CUDA device: from pinned memory of the host, or from files through a little of it.

Copies run on a stream of their own beside the products. Before one begins that stream waits for all that was asked of the
computing stream until then, because the slot it writes to may still be read; before the unit is used the computing stream
waits for the copy. The host waits for neither. Host memory is pinned where it lies (``cudaHostRegister``): pinned memory
that PyTorch's own allocator hands out is rounded up to a power of two.

Not run on a device by us yet; the order of events is tested with streams that only note what is asked of them.
"""

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..scratch import read_whole
from .stores import Extent, Files, Origin, bytes_of, missing

_PAGE = 4096
STAGE = 2**26  # bytes of each of the two pinned pieces that files are read into


class _Side:
    """The stream beside the computing one, and the order of the two."""

    def __init__(self, arena: Tensor) -> None:
        self.device = arena.device
        self.stream: Any = torch.cuda.Stream(self.device)
        self._done: Any = None

    def after_computing(self) -> None:
        """What is copied from here on waits for what the device has been asked to compute until now."""
        self.stream.wait_event(torch.cuda.current_stream(self.device).record_event())

    def copy(self, into: Tensor, source: Tensor) -> Any:
        """The event of a copy from pinned memory."""
        with torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)
            self._done = self.stream.record_event()
        return self._done

    def before_computing(self) -> None:
        """What the device is asked to compute from here on waits for the copies."""
        torch.cuda.current_stream(self.device).wait_event(self._done)


def pinned(n_bytes: int) -> Tensor:
    """Page-locked memory of that size: whole pages of its own, as none may be registered twice."""
    whole = -(-n_bytes // _PAGE) * _PAGE
    room = torch.empty(whole + _PAGE, dtype=torch.uint8)
    start = -room.data_ptr() % _PAGE
    tensor = room[start : start + n_bytes]
    runtime: Any = torch.cuda.cudart()
    address = tensor.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, whole, 0)))
    weakref.finalize(room.untyped_storage(), runtime.cudaHostUnregister, address)
    return tensor


class DeviceFromHost:
    """Every unit whole in pinned memory."""

    def __init__(self, arena: Tensor, extents: Sequence[Extent]) -> None:
        self._arena, self._extents, self._side = arena.data, extents, _Side(arena)
        self._units = [pinned(extent.n_bytes) for extent in extents]

    def put(self, unit: int, start: int, tensor: Tensor) -> None:
        source = tensor.view(-1).view(torch.uint8)
        self._units[unit][start : start + len(source)].copy_(source)

    def link(self, unit: int, start: int, n_bytes: int, origin: Origin) -> None:
        """The file is read now."""
        with origin.path.open("rb") as file:
            if not read_whole(file.fileno(), bytes_of(self._units[unit])[start : start + n_bytes], origin.offset):
                raise missing(origin.path)

    def rows(self, unit: int, ids: Sequence[int], out: Tensor) -> None:
        table = self._units[unit].numpy()
        width = out.shape[-1] * out.element_size()
        rows: Any = table[: len(table) // width * width].reshape(-1, width)[list(ids)]
        out.view(-1).view(torch.uint8).copy_(torch.from_numpy(rows).view(-1))

    def begin(self, unit: int) -> None:
        at = self._extents[unit]
        self._side.after_computing()
        self._side.copy(self._arena[at.start : at.start + at.n_bytes], self._units[unit])

    def finish(self) -> None:
        self._side.before_computing()


class DeviceFromDisk(Files):
    """From files, piece by piece through two pinned pieces of memory: one is read into while the other is copied."""

    def __init__(self, arena: Tensor, extents: Sequence[Extent]) -> None:
        super().__init__(extents)
        self._arena, self._side = arena.data, _Side(arena)
        self._stages: list[tuple[Tensor, Any]] = [(pinned(STAGE), None), (pinned(STAGE), None)]
        self._thread = ThreadPoolExecutor(1, "finefit-weights")
        self._under_way: Future[None] | None = None
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def rows(self, unit: int, ids: Sequence[int], out: Tensor) -> None:  # type: ignore[override]
        rows = bytearray(out.numel() * out.element_size())
        super().rows(unit, ids, memoryview(rows))
        out.view(-1).view(torch.uint8).copy_(torch.frombuffer(rows, dtype=torch.uint8))

    def begin(self, unit: int) -> None:
        self._side.after_computing()
        self._under_way = self._thread.submit(self._bring, unit)

    def finish(self) -> None:
        assert self._under_way is not None, "nothing was begun"
        self._under_way.result()
        self._under_way = None
        self._side.before_computing()

    def _bring(self, unit: int) -> None:
        at = self.extents[unit].start
        for piece in self.of(unit):
            for start in range(piece.start, piece.stop, STAGE):
                stop = min(start + STAGE, piece.stop)
                stage, copied = self._stages.pop(0)
                if copied is not None:
                    copied.synchronize()  # the host must not write over what is still being copied
                self.read_part(piece, start, bytes_of(stage)[: stop - start])
                done = self._side.copy(self._arena[at + start : at + stop], stage[: stop - start])
                self._stages.append((stage, done))
