"""Gradient accumulation: the user's global batch in several micro-batches, the same gradient.

The loss is a sum divided by the labelled tokens of the whole global batch, so any split gives the same gradient; the
mean of micro-batch means would not, as soon as lengths differ. Costs a pass of fixed overhead per micro-batch.
"""

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..data.micro import split
from ..layout import Layout
from .base import Technique

if TYPE_CHECKING:
    from ..run import Run


@dataclass(frozen=True, slots=True)
class Accumulation(Technique):
    """At most ``micro_batch_size`` examples and, if not 0, ``micro_batch_tokens`` tokens; a longer example is alone."""

    name = "accumulation"
    exact = True

    micro_batch_size: int
    micro_batch_tokens: int = 0
    most_steps: int = 1
    """The most micro-batches any global batch falls into."""

    def rewrite(self, layout: Layout) -> Layout:
        return replace(layout, micro_steps=self.most_steps)

    def apply(self, run: "Run") -> None:
        most = self.micro_batch_tokens or 2**62
        run.split = functools.partial(split, max_sequences=self.micro_batch_size, max_tokens=most)

    def describe(self) -> str:
        most = f"{self.micro_batch_size} example" + "s" * (self.micro_batch_size != 1)
        cap = f" and {self.micro_batch_tokens} tokens" if self.micro_batch_tokens else ""
        return f"micro-batches of at most {most}{cap}, up to {self.most_steps} to a step"
