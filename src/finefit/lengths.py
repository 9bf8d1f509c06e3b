"""Rows of many lengths: the stream of any length from those of three, and what a run of them makes the allocator keep.

Nearly every length asks for sizes of its own. The caching allocator serves a request from a block it keeps, cutting
off what is left, or takes a new segment; it gives cached segments back only when the device refuses one
(``c10/cuda/CUDACachingAllocator.cpp``). So what it holds grows over a run far beyond what its longest step needs, while
the smallest device on which the run goes through hardly does.

Sizes are polynomials of degree two in the length, exactly so but for kernels that round it up (flash attention's
workspaces, to 128 rows). Only requests above 1 MiB are replayed over a run: those below have a pool of their own.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from statistics import median

from .allocator import MIB, Event, replay, smallest_capacity
from .foreign import ForeignRun, Lengths
from .stream import Stream, block_of

MOST, UNKNOWN, HISTORIES = 1024, 128, 3
"""Micro-batches replayed, of a longer run and of one whose data are not known; and how often, in other orders: what is
held depends on it, the median is taken."""
_FITTED = 12  # micro-batches before the smallest capacity is asked for: a bisection, and it settles at once
_EMPTY: Event = (0, 0)
_ROUNDED = 128


def drawn(lengths: Lengths, rows: int, longest: int, seed: int) -> list[int]:
    """Padded lengths of the micro-batches of a run, ``MOST`` at most, the longest among them."""
    chance = random.Random(seed)
    wanted = rows * (MOST if lengths.samples else UNKNOWN)
    samples = (_sample(lengths, longest, chance) for _ in range(lengths.samples or 100 * wanted))
    kept = islice((min(n, longest) for n in samples if n <= longest or lengths.over == "cut"), wanted)
    out = []
    while batch := list(islice(kept, rows)):
        out.append(min(-(-max(batch) // lengths.multiple) * lengths.multiple, longest))
    if out:
        out[chance.randrange(len(out))] = longest
    return out or [longest]


def _sample(lengths: Lengths, longest: int, chance: random.Random) -> int:
    """A length: gamma where mean and deviation are known, else any as likely as another."""
    if not lengths.mean:
        return chance.randint(lengths.least, longest)
    shape = (lengths.mean / lengths.deviation) ** 2
    return max(round(chance.gammavariate(shape, lengths.mean / shape)), lengths.least)


def probes(longest: int) -> tuple[int, ...]:
    """Three lengths that show those up to ``longest``; none where it is too short to tell them apart."""
    unit = _ROUNDED if longest >= 4 * _ROUNDED else 16
    top = -(-longest // unit)
    return (top // 4 * unit, top // 2 * unit, top * unit) if longest >= 4 * unit else ()


@dataclass(frozen=True, slots=True)
class Family:
    """Streams of one run at three lengths, alike but for sizes."""

    longest: Stream
    at: tuple[int, ...]
    n_bytes: Sequence[tuple[int, ...]]
    """For each entry, its bytes at the three lengths."""

    @classmethod
    def of(cls, streams: Mapping[int, Stream]) -> "Family | None":
        """None where the run takes another course at another length."""
        at = tuple(sorted(streams))
        first, *others = (streams[length] for length in at)
        if len(at) != 3 or any(_outline(other) != _outline(first) for other in others):
            return None
        sizes = list(zip(*([e.n_bytes for e in streams[length].entries] for length in at), strict=True))
        return cls(streams[at[-1]], at, sizes)

    def sizes(self, length: int, entries: Iterable[int]) -> dict[int, int]:
        """Bytes at that length."""
        a, b, c = self.at
        x = (length - b) * (length - c) / ((a - b) * (a - c))
        y = (length - a) * (length - c) / ((b - a) * (b - c))
        z = (length - a) * (length - b) / ((c - a) * (c - b))
        out = {}
        for i in entries:
            p, q, r = self.n_bytes[i]
            out[i] = p if p == q == r else max(round(p * x + q * y + r * z), 0)
        return out


def _outline(stream: Stream) -> object:
    """What must be the same at every length: the sections, what is born in each, when, and what dies there."""
    deaths = sorted((e.died_section, i) for i, e in enumerate(stream.entries))
    return stream.sections, stream.section_start, [(e.section, e.owner, e.itemsize) for e in stream.entries], deaths


Piece = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Course:
    """Events that a run repeats, of entries that matter: its first micro-step with all before it, the first update, a
    step's first micro-step, its others, its update."""

    first: Piece
    first_update: Piece
    opening: Piece
    further: Piece
    update: Piece

    @classmethod
    def of(cls, family: Family) -> "_Course":
        stream, shown = family.longest, _shown(family)
        ends = [*stream.section_start, len(stream.events)]
        idle = [ends[i + 1] for i, name in enumerate(stream.sections) if name == "idle"]
        steady, end = (ends[stream.sections.index(name)] for name in ("steady", "end"))
        cuts = [(0, idle[0]), (idle[0], steady), (steady, idle[1]), (idle[1], idle[-1]), (idle[-1], end)]
        return cls(*([(i, sign) for i, sign in stream.events[a:b] if i in shown] for a, b in cuts))

    @property
    def entries(self) -> set[int]:
        pieces = (self.first, self.first_update, self.opening, self.further, self.update)
        return {i for piece in pieces for i, _ in piece}


def _shown(family: Family) -> set[int]:
    """Entries above 1 MiB, without what is born and let go in a block like its neighbours: the blocks before and after
    it ask for the same sizes one after another, and are served from the same place."""
    stream = family.longest
    blocks = {block for name in stream.sections if (block := block_of(name)) is not None}
    depth = max(blocks, default=-1) + 1
    kept = {0, depth // 2, depth - 1}
    out = set()
    for i, entry in enumerate(stream.entries):
        block = block_of(stream.sections[entry.section])
        passing = block is not None and block not in kept and entry.died_section == entry.section
        if not passing and max(family.n_bytes[i]) > MIB:
            out.add(i)
    return out


def history(family: Family, course: _Course, micro_batches: Sequence[int], run: ForeignRun) -> Iterator[Event]:
    """The allocations above 1 MiB of a run that meets these lengths in this order."""
    entries = course.entries
    lanes = {i: family.longest.entries[i].lane for i in entries}
    held: dict[int, int] = {}  # entry → key of what stands for it now
    keys = count(1)

    def play(piece: Piece, sizes: Mapping[int, int]) -> Iterator[Event]:
        for i, sign in piece:
            if sign and i in held:  # it dies, or its place is taken
                yield held.pop(i), -1
            if sign > 0 and sizes[i] > MIB:
                held[i] = key = next(keys)
                yield key, sizes[i], lanes[i]

    every = run.accumulation if course.further else 1
    emptied = run.lengths.emptied_every if run.lengths else 0
    for number, length in enumerate(micro_batches):
        step, place = divmod(number, every)
        sizes = family.sizes(length, entries)
        yield from play(course.further if place else course.opening if step else course.first, sizes)
        if place == every - 1:
            yield from play(course.update if step else course.first_update, sizes)
            if emptied and (step + 1) % emptied == 0:
                yield _EMPTY


def lasting(family: Family, run: ForeignRun, workspaces: Sequence[Event]) -> dict[str, int]:
    """What the allocator holds in the end, and the least it goes through with, when lengths vary."""
    assert run.lengths
    course = _Course.of(family)
    small = [event for event in family.longest.allocations() if abs(event[1]) <= MIB]
    beside = replay(small).reserved_bytes
    orders = [drawn(run.lengths, run.micro_batch_size, run.max_length, seed) for seed in range(HISTORIES)]
    histories = [[*workspaces, *history(family, course, order, run)] for order in orders]
    held = [replay(events, None, run.segments).reserved_bytes for events in histories]
    hard = replace(run, accumulation=min(run.accumulation, 2))  # updates as often as can be
    order = [*orders[0][: _FITTED - 1], run.max_length]
    least = smallest_capacity([*workspaces, *history(family, course, order, hard)], run.segments)
    return {"reserved_bytes": round(median(held)) + beside, "capacity_bytes": least + beside}
