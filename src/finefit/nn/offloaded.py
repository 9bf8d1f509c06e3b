"""Inputs of checkpointed blocks on the host or on its disk from the block's forward to its backward.

While a block computes, its input is written; when its backward begins, it is there again, and the input of the block
before is on its way. At the end of a block's forward nothing is in flight, so what is held is the same every time. As
torchtune's and torchtitan's checkpointing with offload, for one tensor a block. On CUDA copies go by pinned buffers and a
stream of their own; the disk is written and read by one thread. Fake tensors go nowhere and take the same room.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ConfigError
from ..recompute import WRITTEN_AT_ONCE
from ..scratch import Place as Room
from ..scratch import Scratch, is_fake
from .kept import Input, keeping
from .recomputed import Recomputed


class Trip(Protocol):
    """One tensor's way out and back."""

    def gone(self) -> None:
        """Return when the tensor's memory may be used for something else."""
        ...

    def come(self, room: Tensor) -> None:
        """Begin to fill ``room``, a tensor like the one that left."""
        ...

    def come_in(self) -> None:
        """Return when that is done."""
        ...


Place = Callable[[Tensor], Trip]
"""Where tensors go: begins a trip."""


def offload(blocks: Sequence[Recomputed], place: str, seen: Callable[[], None]) -> None:
    """Send the inputs of these blocks, which follow each other, to host or disk; ``seen`` is called for each."""
    chain = _Chain(functools.cache(functools.partial(place_of, place)), seen)
    for number, block in enumerate(blocks):
        block.keeping = chain.keeper(number)


class _Away(Input):
    """A block's input while it is away, and again while its backward runs."""

    def __init__(self, number: int, chain: "_Chain", before: "_Away | None") -> None:
        self.number, self.chain = number, chain
        self.before = weakref.ref(before) if before else lambda: None
        self.trip: Trip | None = None
        self.tensor: Tensor | None = None
        self.is_in = False

    def leave(self, x: Tensor) -> None:
        if not x.is_contiguous():
            raise AssertionError("a hidden state is contiguous")
        self.like = x.shape, x.dtype, x.device
        self.trip = Nowhere() if is_fake(x) else self.chain.place(x.device)(x)
        self.chain.seen()

    def gone(self) -> None:
        assert self.trip is not None, "the input of a checkpointed block is saved"
        self.trip.gone()

    def come(self) -> None:
        if self.tensor is None and self.trip is not None:
            shape, dtype, device = self.like
            self.tensor = torch.empty(shape, dtype=dtype, device=device)
            self.trip.come(self.tensor)

    def back(self) -> Tensor:
        """The input; that of the block before is on its way from now on."""
        self.come()
        assert self.trip is not None and self.tensor is not None
        if not self.is_in:
            self.trip.come_in()
            self.is_in = True
        if before := self.before():
            before.come()
        return self.tensor


class _Chain:
    """The inputs that are away of the forward that is under way."""

    def __init__(self, place: Callable[[torch.device], Place], seen: Callable[[], None]) -> None:
        self.place, self.seen = place, seen
        self.last: Callable[[], _Away | None] = lambda: None

    def keeper(self, number: int) -> Callable[..., AbstractContextManager[Any]]:
        def kept(_call: Any, hidden: Tensor, *_args: Any, **_kwargs: Any) -> AbstractContextManager[Any]:
            away = _Away(number, self, self.last() if number else None)
            self.last = weakref.ref(away)
            return keeping(hidden, away)

        return kept


class Nowhere:
    """A fake tensor's trip."""

    def gone(self) -> None:
        return None

    def come(self, room: Tensor) -> None:
        return None

    def come_in(self) -> None:
        return None


def place_of(name: str, device: torch.device) -> Place:
    """Where ``host`` or ``disk`` is for tensors of ``device``; ConfigError where that is where they are."""
    if device.type != "cuda":
        if name == "host":
            raise ConfigError("activations cannot be offloaded to the host: it is the device", hint="say disk")
        disk = Disk()
        return lambda x: _ToDisk(x, disk)
    if name == "host":
        host = Host(device)
        return lambda x: _ToHost(x, host)
    through = Host(device), Disk()
    return lambda x: _ThroughHost(x, *through)


class Disk:
    """A scratch file and the one thread that writes and reads it, in the order it is asked to."""

    def __init__(self) -> None:
        self.scratch, self.thread = Scratch(), ThreadPoolExecutor(1, "offload")
        self.free: list[Room] = []
        weakref.finalize(self, self.thread.shutdown, wait=False)

    def take(self, n_bytes: int) -> Room:
        """A place of at least so many bytes: micro-batches differ, so each is as large as the largest that needed one."""
        fitting = next((i for i, place in enumerate(self.free) if place.n_bytes >= n_bytes), None)
        if fitting is not None:
            return self.free.pop(fitting)
        if self.free:
            self.scratch.release(self.free.pop())
        return self.scratch.reserve(n_bytes)


class _ToDisk:
    """Of a tensor on the host: its own memory is written and filled."""

    def __init__(self, x: Tensor, disk: Disk) -> None:
        place = disk.take(x.nbytes)
        weakref.finalize(self, disk.free.append, place)
        self.disk, self.place = disk, place
        self.going: Future[None] = disk.thread.submit(_handed, [x], disk.scratch.put, place)

    def gone(self) -> None:
        self.going.result()

    def come(self, room: Tensor) -> None:
        self.coming: Future[None] = self.disk.thread.submit(_handed, [room], self.disk.scratch.get, self.place)

    def come_in(self) -> None:
        self.coming.result()


def _handed(tensor: list[Tensor], do: Callable[[Tensor, Room], None], place: Room) -> None:
    """The tensor is taken out of the thread's task, which lives on for a moment after its result is there."""
    do(tensor.pop(), place)


class Host:
    """Pinned buffers, used again, and the stream that copies to and from them."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.free: list[Tensor] = []
        self.writing: deque[Future[None]] = deque()

    def take(self, n_bytes: int) -> Tensor:
        """A buffer of at least so many bytes; as with places on the disk, a smaller one makes room for a new one."""
        fitting = next((i for i, buffer in enumerate(self.free) if buffer.nbytes >= n_bytes), None)
        if fitting is not None:
            return self.free.pop(fitting)
        if self.free:
            self.free.pop()
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)


class _ToHost:
    """Of a tensor on a CUDA device: nothing waits but the stream that needs the result."""

    def __init__(self, x: Tensor, host: Host) -> None:
        buffer = host.take(x.nbytes)
        weakref.finalize(self, host.free.append, buffer)
        self.host, self.buffer = host, buffer[: x.nbytes]
        host.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(host.stream):
            self.buffer.copy_(_flat(x), non_blocking=True)
            self.went = host.stream.record_event()

    def gone(self) -> None:
        torch.cuda.current_stream().wait_event(self.went)

    def come(self, room: Tensor) -> None:
        self.host.stream.wait_stream(torch.cuda.current_stream())  # what had the room before is through with it
        with torch.cuda.stream(self.host.stream):
            _flat(room).copy_(self.buffer, non_blocking=True)
            self.came = self.host.stream.record_event()

    def come_in(self) -> None:
        torch.cuda.current_stream().wait_event(self.came)


class _ThroughHost:
    """Of a tensor on a CUDA device to the host's disk, by pinned buffers that are held no longer than a copy takes."""

    def __init__(self, x: Tensor, host: Host, disk: Disk) -> None:
        while len(host.writing) >= WRITTEN_AT_ONCE:
            host.writing.popleft().result()
        self.host, self.disk, self.n_bytes = host, disk, x.nbytes
        self.place = disk.take(x.nbytes)
        weakref.finalize(self, disk.free.append, self.place)
        buffer = host.take(x.nbytes)
        host.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(host.stream):
            buffer[: x.nbytes].copy_(_flat(x), non_blocking=True)
            self.went = host.stream.record_event()
        self.written = disk.thread.submit(_written, buffer, x.nbytes, self.went, (host, disk, self.place))
        host.writing.append(self.written)

    def gone(self) -> None:
        torch.cuda.current_stream().wait_event(self.went)

    def come(self, room: Tensor) -> None:
        self.room = room
        self.coming = self.disk.thread.submit(_read, self.written, self.n_bytes, (self.host, self.disk, self.place))

    def come_in(self) -> None:
        buffer = self.coming.result()
        _flat(self.room).copy_(buffer[: self.n_bytes])  # waits, so that the buffer is free again
        self.host.free.append(buffer)
        del self.room, self.coming


def _written(buffer: Tensor, n_bytes: int, copied: Any, to: tuple[Host, Disk, Room]) -> None:
    host, disk, place = to
    copied.synchronize()
    disk.scratch.put(buffer[:n_bytes], place)
    host.free.append(buffer)


def _read(written: "Future[None]", n_bytes: int, at: tuple[Host, Disk, Room]) -> Tensor:
    """In the thread that wrote it, so that is over; a write that failed fails here, or what was there before would be read."""
    written.result()
    host, disk, place = at
    buffer = host.take(n_bytes)
    disk.scratch.get(buffer[:n_bytes], place)
    return buffer


def _flat(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.uint8)
