"""RMSNorm (arXiv:1910.07467) that keeps its input and one fp32 number a row; the plain module keeps two fp32 copies.

Rounds where transformers' modules round: ``llama`` norms round the normalised value, then multiply by the weight;
``gemma`` norms multiply by (1 + weight) in fp32 and round once. Declines LayerNorm.

Shapes: T rows, h features.
"""

from typing import Any

import torch
from torch import Tensor, nn


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, rounds_once: bool) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_().div_(x.shape[-1])
        rstd = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        if rounds_once:
            return (x.float() * rstd).mul_(weight.float() + offset).to(x.dtype)
        return _times_row(x, rstd).mul_(weight) if weight.dtype == x.dtype else _times_row(x, rstd) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        (dy,) = grads
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = (dy * _times_row(x, rstd)).flatten(0, -2).sum(0, dtype=torch.float32).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            g = dy * (weight + ctx.offset if ctx.offset else weight).to(dy.dtype)
            # d/dx of x·rstd: rstd·g − x·rstd³·mean(g·x)
            inner = (g * x).sum(-1, keepdim=True, dtype=torch.float32).div_(x.shape[-1])
            g = _times_row(g, rstd)
            dx = g.addcmul_(x, inner.mul_(rstd.pow(3)).to(g.dtype), value=-1).to(x.dtype)
        return dx, dweight, None, None, None


def _times_row(x: Tensor, row: Tensor) -> Tensor:
    """``x * row`` for an fp32 factor a row, rounded once, without an fp32 copy of x.

    A 16-bit type cannot hold the factor, so it is split into a high and a low part: x·low is far below one rounding
    step of the sum, and ``addcmul`` adds x·high in fp32 before it rounds.
    """
    if x.dtype == torch.float32:
        return x * row
    high = row.to(x.dtype)
    low = (row - high).to(x.dtype)
    return (x * low).addcmul_(x, high)


class RMSNorm(nn.Module):
    """Takes over ``norm``'s weight. ``offset`` is 1 for the families that store weight − 1 (Gemma), else 0."""

    def __init__(self, norm: Any, eps: float, offset: float) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.eps, self.offset = eps, offset
        self.rounds_once = offset != 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _RMSNorm.apply(x, self.weight, self.eps, self.offset, self.rounds_once)
        return y

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, offset={self.offset}"
