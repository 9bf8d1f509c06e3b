"""PyTorch's CUDA caching allocator on paper: what a stream of allocations makes it reserve, and whether it fits.

Rules of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` (PyTorch 2.11): requests are rounded
to 512 bytes; up to 1 MiB they come from 2 MiB segments, up to 10 MiB from 20 MiB segments, else from segments rounded
to 2 MiB; best fit; a block is split when what is left is worth it; neighbours merge when freed; when the device
refuses, whole cached segments are given back and it is asked again. ``expandable`` maps 2 MiB or 20 MiB pages at the
end of one long segment instead. Blocks belong to the CUDA stream they were taken on, each has its pools and segments;
what is cached on one stream serves no other until it is given back to the device. A block that another stream was told
to have read (``record_stream``) is free when it is let go, and used again when that stream is through with it, or when
the device refuses a request and all streams are waited for. No ``max_split_size``, no garbage collection threshold.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

MIB = 2**20
_ROUND, _SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _LARGE_FROM, _LARGE_ROUND = (
    512,
    MIB,
    2 * MIB,
    20 * MIB,
    10 * MIB,
    2 * MIB,
)

Kind = Literal["classic", "expandable"]
Event = tuple[int, int] | tuple[int, int, int]
"""(key of the tensor, bytes, CUDA stream: 0 if left out): positive where it is made, negative where it goes, zero where
the cache is emptied; keys may be used again. On stream ``AWAITED`` negative: it goes, but another stream still reads it;
zero: what that key had, and all that went so before it, may be used again."""
AWAITED = -1


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator did: peaks of rounded live bytes and of reserved bytes, and whether a request was refused."""

    allocated_bytes: int
    reserved_bytes: int
    retries: int = 0
    failed_at: int = -1
    """Index of the event that was refused for good; -1 if none was."""


def replay(
    events: Iterable[Event], capacity: int | None = None, kind: Kind = "classic", emptied_at: int = -1
) -> Replay:
    """Run the events through an empty allocator on a device with ``capacity`` bytes (None: no end of it).

    Before event ``emptied_at`` the cache is emptied and peaks start anew, as tools do that measure one step.
    """
    memory = _Classic(capacity) if kind == "classic" else _Expandable(capacity)
    held: dict[int, tuple[_Pool, _Block]] = {}
    live = most = 0
    for i, (key, n_bytes, *stream) in enumerate(events):
        if i == emptied_at:
            memory.empty()
            most = live
        if n_bytes > 0:
            size = -(-n_bytes // _ROUND) * _ROUND
            pool = memory.pool(stream[0] if stream else 0, size <= _SMALL)
            block = memory.take(pool, size)
            if block is None:
                return Replay(most, memory.most, memory.retries, i)
            held[key] = (pool, block)
            live += block.size
            most = max(most, live)
        elif n_bytes < 0:
            pool, block = held.pop(key)
            live -= block.size
            if stream and stream[0] == AWAITED:
                memory.awaited.append((key, pool, block))
            else:
                memory.give(pool, block)
        elif stream and stream[0] == AWAITED:
            memory.settle(key)
        else:
            memory.give_back()
    return Replay(most, memory.most, memory.retries)


def smallest_capacity(events: Sequence[Event], kind: Kind = "classic", share: float = 0.004) -> int:
    """The least capacity in which the events replay without a refusal, at most ``share`` above it: what a plan needs."""
    free = replay(events, None, kind)
    step = max(2 * MIB, round(free.allocated_bytes * share))
    low, high = free.allocated_bytes // step, -(-free.reserved_bytes // step)
    while low < high:
        middle = (low + high) // 2
        if replay(events, middle * step, kind).failed_at < 0:
            high = middle
        else:
            low = middle + 1
    return low * step


@dataclass(eq=False, slots=True)
class _Block:
    address: int
    size: int
    segment: int
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass(eq=False, slots=True)
class _Pool:
    """Free blocks by (size, address), which no two share; ``end`` and ``top`` are of an expandable segment: its last
    block, its end."""

    is_small: bool
    base: int = 0
    end: "_Block | None" = None
    top: int = 0
    free: list[tuple[int, int, _Block]] = field(default_factory=list)

    def add(self, block: _Block) -> None:
        block.free = True
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def fit(self, size: int) -> int:
        """Where the smallest block of at least that size is; the end of the list if there is none."""
        return bisect_left(self.free, (size,))


class _Memory(ABC):
    """What both kinds share: splitting, merging, counting."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.reserved = self.most = self.retries = 0
        self.pools: dict[tuple[int, bool], _Pool] = {}
        self.awaited: deque[tuple[int, _Pool, _Block]] = deque()
        self.top = 0  # next unused address

    def pool(self, stream: int, is_small: bool) -> _Pool:
        key = (stream, is_small)
        if key not in self.pools:
            base = len(self.pools) << 60  # of an expandable segment: no two ever touch
            self.pools[key] = _Pool(is_small, base, None, base)
        return self.pools[key]

    def empty(self) -> None:
        self.give_back()
        self.most = self.reserved

    def settle(self, last: int | None = None) -> None:
        """Wait for the streams that read what was let go, up to the tensor of that key."""
        if last is not None and all(key != last for key, _, _ in self.awaited):
            return
        while self.awaited:
            key, pool, block = self.awaited.popleft()
            self.give(pool, block)
            if key == last:
                return

    def give_back(self) -> None:
        """Return to the device all that is cached and whole, once no stream reads it."""
        self.settle()
        self.return_whole()

    @abstractmethod
    def return_whole(self) -> None:
        """Return all that is free and whole."""

    def grow(self, n_bytes: int) -> bool:
        if self.capacity is not None and self.reserved + n_bytes > self.capacity:
            return False
        self.reserved += n_bytes
        self.most = max(self.most, self.reserved)
        return True

    def give(self, pool: _Pool, block: _Block) -> None:
        """Free ``block``, merged with its free neighbours."""
        before, after = block.before, block.after
        if before is not None and before.free:
            pool.remove(before)
            block.address, block.size = before.address, block.size + before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            pool.remove(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        pool.add(block)

    def carve(self, pool: _Pool, block: _Block, size: int, worth: int) -> _Block:
        """Take ``size`` bytes from the start of a block that is out of the pool; what is left goes back if worth it."""
        rest = block.size - size
        if rest >= worth:
            tail = _Block(block.address + size, rest, block.segment, True, block, block.after)
            if tail.after is not None:
                tail.after.before = tail
            block.after, block.size = tail, size
            pool.add(tail)
        block.free = False
        return block


class _Classic(_Memory):
    def take(self, pool: _Pool, size: int) -> _Block | None:
        worth = _ROUND if pool.is_small else _SMALL + 1
        at = pool.fit(size)
        if at < len(pool.free):
            return self.carve(pool, pool.free.pop(at)[2], size, worth)
        segment = _segment_bytes(size)
        if not self.grow(segment):
            self.retries += 1
            self.give_back()
            if not self.grow(segment):
                return None
        block = _Block(self.top, segment, self.top)
        self.top += segment + _ROUND  # neighbours of another segment never merge
        return self.carve(pool, block, size, worth)

    def return_whole(self) -> None:
        for pool in self.pools.values():
            for block in [b for _, _, b in pool.free if b.before is None and b.after is None]:
                pool.remove(block)
                self.reserved -= block.size


def _segment_bytes(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _LARGE_FROM else -(-size // _LARGE_ROUND) * _LARGE_ROUND


class _Expandable(_Memory):
    """One segment a pool; mapped pages are its blocks. Pages given back leave holes that are not mapped again."""

    def take(self, pool: _Pool, size: int) -> _Block | None:
        end = pool.end
        at = pool.fit(size)
        # The last block can grow without end, so any other that fits is a better fit.
        if at < len(pool.free) and pool.free[at][2] is end and at + 1 < len(pool.free):
            at += 1
        if at < len(pool.free):
            return self._carve(pool, pool.free.pop(at)[2], size)
        if not self._map(pool, size):
            self.retries += 1
            self.give_back()
            if not self._map(pool, size):
                return None
        end = pool.end
        assert end is not None
        pool.remove(end)
        return self._carve(pool, end, size)

    def _carve(self, pool: _Pool, block: _Block, size: int) -> _Block:
        was_end = pool.end is block
        taken = self.carve(pool, block, size, _ROUND)
        if was_end:
            pool.end = taken.after or taken
        return taken

    def give(self, pool: _Pool, block: _Block) -> None:
        end = pool.end
        swallowed = block.after is end and end is not None and end.free
        super().give(pool, block)
        if swallowed:
            pool.end = block

    def _map(self, pool: _Pool, size: int) -> bool:
        """Lengthen the last free block to ``size`` by whole pages."""
        page = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        end = pool.end
        grows = end if end is not None and end.free and end.address + end.size == pool.top else None
        missing = -(-(size - (grows.size if grows else 0)) // page) * page
        if not self.grow(missing):
            return False
        if grows is not None:
            pool.remove(grows)
            grows.size += missing
            pool.add(grows)
        else:
            touching = end if end is not None and end.address + end.size == pool.top else None
            new = _Block(pool.top, missing, 0, True, touching, None)
            if touching is not None:
                touching.after = new
            pool.add(new)
            pool.end = new
        pool.top += missing
        return True

    def return_whole(self) -> None:
        """Give back the whole pages inside free blocks."""
        for pool in self.pools.values():
            page, base = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT, pool.base
            for block in [b for _, _, b in pool.free]:
                first = base + -(-(block.address - base) // page) * page
                last = base + (block.address + block.size - base) // page * page
                if last > first:
                    self._punch(pool, block, first, last)

    def _punch(self, pool: _Pool, block: _Block, first: int, last: int) -> None:
        """Cut ``[first, last)`` out of a free block; what is before and after it stays."""
        pool.remove(block)
        self.reserved -= last - first
        before, after = block.before, block.after
        left = _Block(block.address, first - block.address, 0, True, before, None) if first > block.address else None
        end = block.address + block.size
        right = _Block(last, end - last, 0, True, None, after) if end > last else None
        if before is not None:
            before.after = left
        if after is not None:
            after.before = right
        for part in (left, right):
            if part is not None:
                pool.add(part)
        if pool.end is block:
            pool.end = right or left or before
