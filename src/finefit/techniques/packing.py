"""Packing: several examples in one row without padding, each seeing only itself (block-diagonal attention).

Positions restart at 0 for every example and attention is given the boundaries, so no mask is built and the loss of an
example is what it would be alone. Without it a micro-batch is padded to its longest example.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import NotAsPlanned, Technique

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Example, MicroBatch, Run


@dataclass(frozen=True, slots=True)
class Packing(Technique):
    name = "packing"
    exact = True

    def apply(self, run: "Run") -> None:
        run.collate = packed

    def describe(self) -> str:
        return "examples packed into rows without padding, blind to each other"

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        if run.evidence.get("padding_tokens", 0):
            raise NotAsPlanned(f"packing: {run.evidence['padding_tokens']} tokens of padding were computed")


def packed(examples: Sequence["Example"]) -> "MicroBatch":
    """One row of all examples one after the other."""
    import torch

    from ..run import MicroBatch

    lengths = [len(ids) for ids, _ in examples]
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    ids_t = torch.cat([torch.as_tensor(ids, dtype=torch.long) for ids, _ in examples])
    mask_t = torch.cat([torch.as_tensor(mask, dtype=torch.bool) for _, mask in examples])
    mask_t[torch.tensor(bounds[:-1])] = False  # nothing before an example's first token may predict it
    row_l = mask_t.nonzero().flatten() - 1
    position = torch.cat([torch.arange(length) for length in lengths])
    return MicroBatch(ids_t[None], position[None], tuple(bounds), row_l, ids_t[row_l + 1], bounds[-1])
