"""Packing: several examples in one row one after the other, each seeing only itself (block-diagonal attention).

Positions restart at 0 for every example and attention is given the boundaries, so no mask is built and the loss of an
example is what it would be alone. Without it a micro-batch is padded to its longest example.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..data.micro import row_of, width
from ..layout import Layout
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Example, MicroBatch, Run


@dataclass(frozen=True, slots=True)
class Packing(Technique):
    name = "packing"
    exact = True

    def rewrite(self, layout: Layout) -> Layout:
        if not layout.model.packs:
            raise Unsuitable(f"the attention of '{layout.model.family}' models is their own and takes whole rows")
        return layout

    def apply(self, run: "Run") -> None:
        run.collate = packed

    def describe(self) -> str:
        return (
            "examples packed into rows, each padded by less than 16 tokens, a row by less than 64, blind to each other"
        )

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        if run.evidence.get("padding_tokens", 0):
            raise NotAsPlanned(f"packing: {run.evidence['padding_tokens']} tokens of padding were computed")


def packed(examples: Sequence["Example"]) -> "MicroBatch":
    """One row of all examples one after the other, each at its width, and a filling: what follows an example's end is seen
    and trained by none."""
    import torch

    from ..run import MicroBatch, filled

    lengths = [len(ids) for ids, _ in examples]
    bounds = (0, *itertools.accumulate(row_of([width(length) for length in lengths])))
    ids_t = torch.zeros(bounds[-1], dtype=torch.long)
    mask_t = torch.zeros(bounds[-1], dtype=torch.bool)
    for start, length, (ids, mask) in zip(bounds, lengths, examples, strict=False):  # nothing predicts a first token
        ids_t[start : start + length] = torch.as_tensor(ids, dtype=torch.long)
        mask_t[start + 1 : start + length] = torch.as_tensor(mask[1:], dtype=torch.bool)
    row_l = mask_t.nonzero().flatten() - 1
    position = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(bounds)])
    return MicroBatch(ids_t[None], position[None], bounds, filled(row_l), ids_t[row_l + 1], sum(lengths))
