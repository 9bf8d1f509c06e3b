"""Which examples make a step: a pure function of seed and step, so a resumed run goes on exactly where it was.

The examples of all epochs, each shuffled anew, form one endless line that steps cut into pieces: no example is seen
twice in an epoch, and what is left over at an epoch's end is carried into the next one's first step. Steps count from
1, as in the event log. Declined: weights, several sets, and orders that look at lengths (they change what is learned).
"""

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError


def spaced(n: int, most: int) -> list[int]:
    """At most ``most`` of ``n`` row numbers, evenly spaced."""
    return list(range(n)) if n <= most else [i * n // most for i in range(most)]


class Order:
    """``n`` examples, shuffled by ``seed`` anew in each epoch."""

    def __init__(self, n: int, global_batch_size: int, seed: int) -> None:
        if n < 1:
            raise DataError("there are no examples to take an order of", hint="give a data set with at least one row")
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size must be at least 1, not {global_batch_size}")
        self.n, self.global_batch_size, self.seed = n, global_batch_size, seed
        self._kept: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int) -> list[int]:
        """The examples of ``step`` (1, 2, ...), always ``global_batch_size`` of them."""
        if step < 1:
            raise ValueError(f"steps count from 1, there is no step {step}")
        position, end = (step - 1) * self.global_batch_size, step * self.global_batch_size
        taken: list[int] = []
        while position < end:
            epoch, start = divmod(position, self.n)
            piece = self._epoch(epoch)[start : start + end - position]
            taken += piece.tolist()
            position += len(piece)
        return taken

    def steps(self, epochs: float) -> int:
        """Steps after which every example was seen ``epochs`` times."""
        return max(1, int(np.ceil(round(epochs * self.n, 6) / self.global_batch_size)))

    def epoch(self, step: int) -> float:
        """Epochs done after ``step`` steps."""
        return step * self.global_batch_size / self.n

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """The order of epoch 0, 1, ...

        The sorting order of raw 64-bit words, because numpy promises those to stay as they are between versions and
        ``Generator.permutation`` not.
        """
        words = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.n)
        return np.argsort(words, kind="stable").astype(np.int64, copy=False)

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if self._kept[0] != epoch:
            self._kept = (epoch, self.permutation(epoch))
        return self._kept[1]


class InOrder(Order):
    """The examples as they stand in the file, again and again."""

    def __init__(self, n: int, global_batch_size: int) -> None:
        super().__init__(n, global_batch_size, seed=0)

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        return np.arange(self.n, dtype=np.int64)
