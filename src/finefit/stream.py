"""The stream of a step's allocations: entries with their lives, in sections, and what can be said of it. Torch-free.

The ledger records one from a step; ``unrolled`` makes that of a deep model from that of a shallow one by repeating a
middle block, so that depth costs nothing to simulate.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .allocator import AWAITED
from .footprint import COMPONENTS, MOMENTS


@dataclass(slots=True)
class Entry:
    """One storage: bytes, the section and event it was born in, and the event it died in (-1 while alive)."""

    n_bytes: int
    section: int
    born: int
    shape: tuple[int, ...]
    itemsize: int
    owner: str = ""
    died: int = -1
    died_section: int = -1
    block: int = -1
    """The decoder block it belongs to, where its section does not say: what an update makes for each tensor."""
    lane: int = 0
    """The CUDA stream it was taken on: 0 computes, others communicate."""
    awaited: bool = False
    """Another CUDA stream reads it when it dies: used again when that is through with it."""
    whole: bool = False
    """A tensor beside a parameter, to engines that cut parameters: each rank has all of it."""


@dataclass(eq=False)
class Stream:
    """``events`` are (entry, +1 born, -1 died or 0 its memory, and that of all before it, can be used again after it was
    awaited; 0 of one that is not empties the allocator's cache); section i holds the events from ``section_start[i]``."""

    entries: list[Entry] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    sections: list[str] = field(default_factory=lambda: ["start"])
    section_start: list[int] = field(default_factory=lambda: [0])

    def opened(self, section: str) -> None:
        """What follows belongs to a new section of that name."""
        self.sections.append(section)
        self.section_start.append(len(self.events))

    def born(self, entry: Entry) -> int:
        """Take the entry in, alive from here on; its index."""
        index = len(self.entries)
        entry.section, entry.born, entry.died, entry.died_section = len(self.sections) - 1, len(self.events), -1, -1
        self.entries.append(entry)
        self.events.append((index, 1))
        return index

    def died(self, index: int) -> None:
        entry = self.entries[index]
        entry.died, entry.died_section = len(self.events), len(self.sections) - 1
        self.events.append((index, -1))

    def through(self, index: int) -> None:
        """The streams that read what died up to this entry are through with it."""
        self.events.append((index, 0))

    def emptied(self) -> None:
        """The allocator's cache is emptied; the last entry, which must not be awaited, stands for it."""
        self.events.append((len(self.entries) - 1, 0))

    def component(self, entry: Entry) -> str:
        """What was born in a forward section and outlived it is an activation, what died where it was born temporary."""
        if entry.owner:
            return entry.owner
        born_in = self.sections[entry.section]
        if born_in.startswith("forward") and entry.died_section != entry.section:
            return "activation"
        return "temporary"

    def by_section(self) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Each section's name and events."""
        starts = [*self.section_start, len(self.events)]
        for i, name in enumerate(self.sections):
            yield name, self.events[starts[i] : starts[i + 1]]

    def curve(self) -> Iterator[tuple[int, int, str, dict[str, int]]]:
        """(event, section, moment of the section, live bytes by component) after each event that adds bytes."""
        live = dict.fromkeys(COMPONENTS, 0)
        section = 0
        for event, (index, sign) in enumerate(self.events):
            while section + 1 < len(self.sections) and self.section_start[section + 1] <= event:
                section += 1
            entry = self.entries[index]
            live[self.component(entry)] += sign * entry.n_bytes
            if sign > 0:
                yield event, section, moment_of(self.sections[section]), live

    def moments(self, after: str = "start") -> dict[str, dict[str, int]]:
        """For each moment after the section of that name, the composition at its highest point."""
        best: dict[str, dict[str, int]] = {}
        tops: dict[str, int] = {}
        first = self.sections.index(after)
        for _, section, moment, live in self.curve():
            total = sum(live.values())
            if moment and section > first and total > tops.get(moment, -1):
                tops[moment], best[moment] = total, {name: n for name, n in live.items() if n}
        return best

    def until(self, section: str) -> "Stream":
        """What is before the first section of that name; what is alive there stays so."""
        at = self.sections.index(section)
        end = self.section_start[at]
        known = {i for i, _ in self.events[:end]}
        entries = [replace(e, died=-1, died_section=-1) if e.died >= end else e for e in self.entries[: max(known) + 1]]
        return Stream(entries, self.events[:end], self.sections[:at], self.section_start[:at])

    def allocations(self) -> list[tuple[int, int, int]]:
        """(entry, bytes, CUDA stream), bytes negative where it goes: what ``allocator.replay`` takes."""
        held = self.entries
        return [
            (i, sign * held[i].n_bytes, AWAITED if sign <= 0 and held[i].awaited else held[i].lane)
            for i, sign in self.events
            if held[i].n_bytes
        ]


def moment_of(section: str) -> str:
    """The moment a section belongs to: its first word, in the names of ``footprint.MOMENTS``."""
    words = {"forward": "forward_end", "backward": "backward_peak", "optimizer": "optimizer_step"}
    first = section.split(" ")[0]
    return words.get(first, first if first in MOMENTS else "")


def block_of(section: str) -> int | None:
    """The decoder block a section is of, None outside the blocks."""
    word = section.rpartition(" ")[2]
    return int(word) if word.isdigit() else None


@dataclass(frozen=True, slots=True)
class Pattern:
    """How blocks repeat: ``prefix`` blocks of their own, then groups of ``period`` blocks, alike."""

    prefix: int = 0
    period: int = 1

    def shallow(self, depth: int, first: int = 0) -> tuple[int, int]:
        """Blocks of a model that shows all that a model of ``depth`` blocks does, and how many of these are ``first``
        ones, which are otherwise treated than the rest: five groups of either kind and what is left over."""
        gone = [max(0, groups - _SHOWN) * self.period for _, groups in self.spans(depth, first)]
        return depth - sum(gone), first - (gone[0] if first > self.prefix else 0)

    def spans(self, depth: int, first: int = 0) -> list[tuple[int, int]]:
        """(first group, how many) of the groups that are alike in all; one cut by the end of the ``first`` blocks is
        alike to none."""
        groups = max(depth - self.prefix, 0) // self.period
        cut, inside = divmod(max(first - self.prefix, 0), self.period)
        if cut >= groups:
            return [(0, groups)]
        return [(0, cut), (cut + (inside > 0), groups - cut - (inside > 0))]

    def group(self, block: int) -> tuple[int, int]:
        return divmod(block - self.prefix, self.period) if block >= self.prefix else (-1, block)


def pattern_of(kinds: list[str]) -> Pattern:
    """The shortest prefix and period that explain the kinds of all blocks."""
    depth = len(kinds)
    for prefix in range(min(depth, 8)):
        for period in range(1, 9):
            if all(kinds[i] == kinds[i + period] for i in range(prefix, depth - period)):
                return Pattern(prefix, period)
    return Pattern(0, depth)


_SHOWN = 5
_UNIT = 2  # the group of those shown that is repeated: its neighbours are groups of the middle, as it is


def unrolled(stream: Stream, pattern: Pattern, depth: int, first: int = 0) -> Stream:
    """The stream of a model with ``depth`` blocks, from that of ``pattern.shallow(depth, first)`` blocks."""
    for start, groups in pattern.spans(depth, first):
        if groups > _SHOWN:
            stream = _Unroller(stream, pattern, start + _UNIT, groups - _SHOWN + 1).run()
    return stream


class _Unroller:
    """Walks the shallow stream's sections in order, those of the unit group ``copies`` times."""

    def __init__(self, stream: Stream, pattern: Pattern, unit: int, copies: int) -> None:
        self.old, self.pattern, self.unit, self.copies = stream, pattern, unit, copies
        self.new = Stream(sections=[], section_start=[])
        self.home = [self._home_of(entry) for entry in stream.entries]
        self.at: dict[tuple[int, int], int] = {}  # (old entry, copy) → new entry
        self.like = self._alike()

    def run(self) -> Stream:
        sections = list(self.old.by_section())
        i = 0
        while i < len(sections):
            last = i
            if self._group(sections[i][0]) == self.unit:
                while last + 1 < len(sections) and self._group(sections[last + 1][0]) == self.unit:
                    last += 1
                backward = sections[i][0].startswith("backward")
                for copy in reversed(range(self.copies)) if backward else range(self.copies):
                    for name, events in sections[i : last + 1]:
                        self._section(name, events, copy)
            else:
                self._section(*sections[i], -1)
            i = last + 1
        return self.new

    def _section(self, name: str, events: list[tuple[int, int]], copy: int) -> None:
        group = self._group(name)
        self.new.opened(self._renamed(name, copy))
        for entry, sign in events:
            for one, which in self._targets(entry, group, copy):
                if sign > 0:
                    old = self.old.entries[one]
                    made = Entry(old.n_bytes, 0, 0, old.shape, old.itemsize, old.owner, whole=old.whole)
                    self.at[one, which] = self.new.born(made)
                else:
                    self.new.died(self.at.pop((one, which)))

    def _targets(self, entry: int, group: int | None, copy: int) -> list[tuple[int, int]]:
        """(old entry, copy) that an event stands for, in the section of ``group`` and its ``copy``."""
        home = self.home[entry]
        if group is None:  # outside the blocks: what belongs to the unit happens to every copy
            return [(entry, j) for j in range(self.copies)] if home == self.unit else [(entry, -1)]
        if group != self.unit:
            if home != self.unit:
                return [(entry, -1)]
            return [(entry, self.copies - 1 if group > self.unit else 0)]
        if home == self.unit:
            return [(entry, copy)]
        neighbour = copy + (home - self.unit if home is not None else 0)
        if home in (self.unit - 1, self.unit + 1) and 0 <= neighbour < self.copies:
            return [(self.like[entry], neighbour)] if entry in self.like else []
        if home in (self.unit - 1, self.unit + 1):
            return [(entry, -1)]
        first = self.copies - 1 if self.new.sections[-1].startswith("backward") else 0
        return [(entry, -1)] if copy == first else []  # of the whole model: it happens once

    def _group(self, section: str) -> int | None:
        block = block_of(section)
        return None if block is None else self.pattern.group(block)[0]

    def _home_of(self, entry: Entry) -> int | None:
        group = self._group(self.old.sections[entry.section])
        if group is None and entry.block >= 0:
            return self.pattern.group(entry.block)[0]
        return group

    def _renamed(self, name: str, copy: int) -> str:
        block = block_of(name)
        if block is None:
            return name
        group, place = self.pattern.group(block)
        if group > self.unit:
            group += self.copies - 1
        elif group == self.unit:
            group += copy
        return (
            f"{name.rpartition(' ')[0]} {self.pattern.prefix + group * self.pattern.period + place}"
            if group >= 0
            else name
        )

    def _alike(self) -> dict[int, int]:
        """Entries of the unit's neighbours to the unit's own that were born as the same, by order of birth."""
        order: dict[tuple[str, int, int, int], list[int]] = {}
        visits: dict[str, int] = {}
        for name, events in self.old.by_section():
            visits[name] = visits.get(name, 0) + 1
            block = block_of(name)
            if block is not None:
                group, place = self.pattern.group(block)
                key = (name.rpartition(" ")[0], visits[name], group, place)
                order[key] = [entry for entry, sign in events if sign > 0]
        out: dict[int, int] = {}
        for (word, visit, group, place), entries in order.items():
            if group in (self.unit - 1, self.unit + 1):
                out.update(zip(entries, order.get((word, visit, self.unit, place), []), strict=False))
        return out
