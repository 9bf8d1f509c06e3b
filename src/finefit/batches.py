"""What the data is to a plan: for a way of splitting the global batch, its largest micro-batches and its mean work.

``FromOrder`` knows every batch of the run before it starts (lengths are in the token index); ``Uniform`` stands for data
nobody has shown: every example as long as allowed. Torch-free.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from .data.micro import row_of, split, width
from .layout import Micro

NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Work:
    """``largest``: micro-batches none of which is smaller than another in every way. Means are of one optimizer step."""

    largest: tuple[Micro, ...]
    most_steps: int
    mean_steps: float
    mean_tokens: float
    """Computed, padding too."""
    mean_real_tokens: float
    mean_labelled: float
    mean_square: float
    """Sum over sequences of length², what attention costs."""


class Batches(Protocol):
    """The batches of a run."""

    def work(self, max_sequences: int, max_tokens: int, padded: bool) -> Work:
        """``max_tokens`` 0 is no limit; ``padded`` micro-batches are rectangles."""

    def among(self, ranks: int) -> "Batches":
        """What one of so many data-parallel ranks has: each of their shares of a batch counts as a batch."""

    @property
    def longest(self) -> int: ...

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest global batch."""


class FromOrder:
    """Batches of known examples: their rows in order of steps, their lengths and labelled tokens."""

    def __init__(self, steps: Sequence[Sequence[int]], lengths: Sequence[int], labelled: Sequence[int]) -> None:
        self.steps, self.lengths, self.labelled = steps, lengths, labelled
        self.widths = [width(length) for length in lengths]

    @property
    def longest(self) -> int:
        return max(self.widths[row] for step in self.steps for row in step)

    @property
    def most_tokens(self) -> int:
        return max(sum(self.widths[row] for row in step) for step in self.steps)

    def among(self, ranks: int) -> "FromOrder":
        shares = [step[rank::ranks] for step in self.steps for rank in range(ranks)]
        return FromOrder([share for share in shares if share], self.lengths, self.labelled)

    @functools.lru_cache(maxsize=64)  # noqa: B019 (lives as long as one planning)
    def work(self, max_sequences: int, max_tokens: int, padded: bool) -> Work:
        micros: set[Micro] = set()
        most = count = tokens = labelled = square = 0
        for step in self.steps:
            groups = self.groups(step, max_sequences, max_tokens)
            most, count = max(most, len(groups)), count + len(groups)
            for group in groups:
                micro = self.micro(group, padded)
                micros.add(micro)
                tokens += micro.tokens
                labelled += micro.labelled
                square += sum(micro.longest**2 if padded else self.widths[row] ** 2 for row in group)
        real = sum(self.lengths[row] for step in self.steps for row in step)
        n = len(self.steps)
        return Work(undominated(micros), most, count / n, tokens / n, real / n, labelled / n, square / n)

    def groups(self, step: Sequence[int], max_sequences: int, max_tokens: int) -> list[list[int]]:
        """Rows of each micro-batch of a step."""
        lengths = [self.lengths[row] for row in step]
        return [[step[i] for i in group] for group in split(lengths, max_sequences, max_tokens or NO_LIMIT)]

    def micro(self, group: Sequence[int], padded: bool) -> Micro:
        widths = [self.widths[row] for row in group]
        longest = max(widths)
        tokens = longest * len(group) if padded else sum(row_of(widths))
        return Micro(tokens, longest, max(1, sum(self.labelled[row] for row in group)))

    def rows_of(self, micro: Micro, max_sequences: int, max_tokens: int, padded: bool) -> list[int]:
        """Rows of the first micro-batch of the run with these sizes; ``work`` split the same way has it."""
        groups = (g for step in self.steps for g in self.groups(step, max_sequences, max_tokens))
        return next(g for g in groups if self.micro(g, padded) == micro)


@dataclass(frozen=True, slots=True)
class Uniform:
    """``examples`` a step, each ``length`` tokens, a share of them labelled."""

    examples: int
    length: int
    labelled_share: float = 1.0

    def among(self, ranks: int) -> "Uniform":
        return replace(self, examples=-(-self.examples // ranks))

    @property
    def longest(self) -> int:
        return width(self.length)

    @property
    def most_tokens(self) -> int:
        return self.longest * self.examples

    def work(self, max_sequences: int, max_tokens: int, padded: bool) -> Work:
        return _uniform_work(self, max_sequences, max_tokens, padded)


@functools.lru_cache(maxsize=2048)
def _uniform_work(batches: Uniform, max_sequences: int, max_tokens: int, padded: bool) -> Work:
    """As ``split`` shares them out: full micro-batches, and one with what is left."""
    n, wide = batches.examples, width(batches.length)
    labelled = max(1, round(batches.length * batches.labelled_share))
    full = min(n, max_sequences, max(max_tokens // wide, 1) if max_tokens else n)
    filled = {rows: wide * rows if padded else sum(row_of((wide * rows,))) for rows in (full, n % full) if rows}
    micros = {Micro(tokens, wide, labelled * rows) for rows, tokens in filled.items()}
    steps, tokens = -(-n // full), n // full * filled[full] + filled.get(n % full, 0)
    return Work(undominated(micros), steps, steps, tokens, batches.length * n, labelled * n, wide**2 * n)


def undominated(micros: Iterable[Micro]) -> tuple[Micro, ...]:
    """Micro-batches that are largest in something: any other needs no more memory than one of these."""
    kept: list[Micro] = []
    for m in sorted(micros, key=lambda m: (-m.tokens, -m.labelled, -m.longest)):
        if not any(k.tokens >= m.tokens and k.labelled >= m.labelled and k.longest >= m.longest for k in kept):
            kept.append(m)
    return tuple(kept)
