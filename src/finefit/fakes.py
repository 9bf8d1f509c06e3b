"""What a step under fake tensors needs to be told, because there are no values to ask: for the trace."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .nn import attention
from .nn.exchanged import Exchange


@contextlib.contextmanager
def query_block(rows: int) -> Iterator[None]:
    """Attention in blocks of that many queries."""
    own, attention.QUERY_BLOCK = attention.QUERY_BLOCK, rows
    try:
        yield
    finally:
        attention.QUERY_BLOCK = own


class OneOf(Exchange):
    """The first of so many ranks, of which no other is there: what comes has no values."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.rank = ranks, 0

    def seen(self) -> None:
        return None

    def passed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x.contiguous())


class _Grouped(torch.autograd.Function):
    """``grouped_mm`` of a type that has no fake kernel (torch 2.13: all but bfloat16): it keeps and allocates the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.shapes = x.shape, weight.shape
        return x.new_empty(x.shape[0], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = zip(ctx.needs_input_grad, ctx.shapes, strict=True)
        return tuple(grads[0].new_empty(shape) if needed else None for needed, shape in wanted)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """What transformers decides by values, as it would with them: a row is one sequence, and experts take any type."""
    from transformers import masking_utils
    from transformers.integrations import moe as experts

    masks: Any = masking_utils
    moe: Any = experts
    own, find = moe._grouped_mm, masks.find_packed_sequence_indices

    def product(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        has_kernel = weight.dtype == torch.bfloat16
        out: torch.Tensor = own(x, weight, offs) if has_kernel else _Grouped.apply(x.to(weight.dtype), weight)  # type: ignore[no-untyped-call]
        return out

    moe._grouped_mm, masks.find_packed_sequence_indices = product, lambda places: (find(places), None)[1]
    try:
        yield
    finally:
        moe._grouped_mm, masks.find_packed_sequence_indices = own, find
