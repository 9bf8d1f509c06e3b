"""A frozen linear layer with a low-rank update (LoRA, arXiv:2106.09685, section 4.1): y = x W^T + b + s·(x A^T) B^T.

It keeps its input and x A^T (T·r) for backward: layers that read the same input share one copy of it, and the adapters'
fp32 weights are cast when used. Names and file layout follow peft's ``lora.Linear``.
Declines DoRA and training of the bias.

Shapes: T tokens, i inputs, o outputs, r rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _LowRank(torch.autograd.Function):
    """``x_Ti`` → ``y_To`` in the type of ``x``; gradients for x, A and B alone."""

    @staticmethod
    def forward(
        ctx: Any, x_ti: Tensor, weight_oi: Tensor, bias: Tensor | None, a_ri: Tensor, b_or: Tensor, scale: float
    ) -> Tensor:
        dtype = x_ti.dtype
        y_to = F.linear(x_ti, weight_oi.to(dtype), bias if bias is None else bias.to(dtype))
        low_tr = F.linear(x_ti, a_ri.to(dtype))
        ctx.save_for_backward(x_ti, low_tr, weight_oi, a_ri, b_or)
        ctx.scale = scale
        return y_to.addmm_(low_tr, b_or.to(dtype).t(), alpha=scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x_ti, low_tr, weight_oi, a_ri, b_or = ctx.saved_tensors
        dtype, (dy_to,) = x_ti.dtype, grads
        dlow_tr = dy_to.mm(b_or.to(dtype)).mul_(ctx.scale)
        dx_ti = None
        if ctx.needs_input_grad[0]:
            dx_ti = dy_to.mm(weight_oi.to(dtype)).addmm_(dlow_tr, a_ri.to(dtype))
        da_ri = dlow_tr.t().mm(x_ti).to(a_ri.dtype)
        db_or = dy_to.t().mm(low_tr).to(b_or.dtype).mul_(ctx.scale)
        return dx_ti, None, None, da_ri, db_or, None


class _LowRankDropped(torch.autograd.Function):
    """The low-rank half alone, on an input with dropout: keeps x and one bool an element rather than a scaled copy."""

    @staticmethod
    def forward(ctx: Any, x_ti: Tensor, a_ri: Tensor, b_or: Tensor, scale: float, rate: float) -> Tensor:
        dtype = x_ti.dtype
        dropped_ti, kept_ti = torch.native_dropout(x_ti, rate, True)
        ctx.save_for_backward(x_ti, kept_ti, a_ri, b_or)
        ctx.scale, ctx.keep = scale, 1.0 / (1.0 - rate)
        return F.linear(F.linear(dropped_ti, a_ri.to(dtype)), b_or.to(dtype)).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x_ti, kept_ti, a_ri, b_or = ctx.saved_tensors
        dtype, (dy_to,) = x_ti.dtype, grads
        dropped_ti = (x_ti * kept_ti).mul_(ctx.keep)
        dxa_tr = dy_to.mm(b_or.to(dtype)).mul_(ctx.scale)
        dx_ti = dxa_tr.mm(a_ri.to(dtype)).mul_(kept_ti).mul_(ctx.keep)
        da_ri = dxa_tr.t().mm(dropped_ti).to(a_ri.dtype)
        db_or = dy_to.t().mm(F.linear(dropped_ti, a_ri.to(dtype))).to(b_or.dtype).mul_(ctx.scale)
        return dx_ti, da_ri, db_or, None, None


class LoRALinear(nn.Module):
    """Takes over ``linear``'s weight (frozen) and adds ``lora_A`` (r, i) and ``lora_B`` (o, r) in fp32."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.rank, self.scale, self.dropout = rank, alpha / rank, dropout
        self.weight = nn.Parameter(linear.weight, requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias, requires_grad=False)
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, rank, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        x_ti = x.reshape(-1, self.in_features)
        if torch.is_autocast_enabled(x.device.type):
            x_ti = x_ti.to(torch.get_autocast_dtype(x.device.type))
        with torch.autocast(x.device.type, enabled=False):
            y_to = self._low_rank(x_ti)
        return y_to.view(*x.shape[:-1], self.out_features)

    def _low_rank(self, x_ti: Tensor) -> Tensor:
        if self.dropout == 0.0 or not self.training:
            y_to: Tensor = _LowRank.apply(x_ti, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)
            return y_to
        bias = None if self.bias is None else self.bias.to(x_ti.dtype)
        y_to = F.linear(x_ti, self.weight.to(x_ti.dtype), bias)
        return y_to + _LowRankDropped.apply(x_ti, self.lora_A, self.lora_B, self.scale, self.dropout)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, scale={self.scale}, dropout={self.dropout}"
