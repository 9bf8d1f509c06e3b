"""A frozen linear layer with a low-rank update (LoRA, arXiv:2106.09685, section 4.1): y = x W^T + b + s·(x A^T) B^T.

It keeps its input and x A^T (T·r) for backward: layers that read the same input share one copy of it, and the adapters'
fp32 weights are cast when used. The weight may be a quantised one. Names and file layout follow peft's ``lora.Linear``.
Declines DoRA and training of the bias.

Shapes: T tokens, i inputs, o outputs, r rank.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .in_fp32 import is_island
from .quantised_linear import QuantisedWeight, dense, product


class _LowRank(torch.autograd.Function):
    """``x_Ti`` → one ``y_To`` a layer, in the type of ``x``; gradients for x and each A and B alone.

    Layers that read one input share its products with their stacked A (nr, i), and their gradients for it add up in
    place. ``parts`` are weight, bias, A and B of each layer in turn. Weights are frozen and the model's: they are held by
    reference, so that hooks on saved tensors pass them by.
    """

    @staticmethod
    def forward(ctx: Any, x_ti: Tensor, scales: tuple[float, ...], *parts: Any) -> tuple[Tensor, ...]:
        dtype = x_ti.dtype
        weights, biases, a, b = _by_kind(parts)
        low_tn = F.linear(x_ti, _stacked(a, dtype))
        ctx.save_for_backward(x_ti, low_tn, *a, *b)
        ctx.weights, ctx.scales = weights, scales
        return tuple(
            F.linear(x_ti, dense(weight, dtype), bias if bias is None else bias.to(dtype)).addmm_(
                low, b_or.to(dtype).t(), alpha=scale
            )
            for weight, bias, low, b_or, scale in zip(weights, biases, low_tn.chunk(len(b), 1), b, scales, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        x_ti, low_tn, *saved = ctx.saved_tensors
        layers, dtype = len(dys), x_ti.dtype
        a, b = saved[:layers], saved[layers:]
        dlows = [dy.mm(b_or.to(dtype)).mul_(scale) for dy, b_or, scale in zip(dys, b, ctx.scales, strict=True)]
        dlow_tn = dlows[0] if layers == 1 else torch.cat(dlows, 1)
        dx_ti = None
        if ctx.needs_input_grad[0]:
            dx_ti = dlow_tn.mm(_stacked(a, dtype))
            for dy, weight in zip(dys, ctx.weights, strict=True):
                dx_ti.addmm_(dy, dense(weight, dtype))
        das = [da.to(a[0].dtype, copy=True) for da in dlow_tn.t().mm(x_ti).chunk(layers)]  # each owns its bytes
        grads: list[Any] = [dx_ti, None]
        for dy, low, da, b_or, scale in zip(dys, low_tn.chunk(layers, 1), das, b, ctx.scales, strict=True):
            grads += [None, None, da, dy.t().mm(low).to(b_or.dtype).mul_(scale)]
        return tuple(grads)


def _by_kind(parts: tuple[Any, ...]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    weights, biases, a, b = (list(parts[kind::4]) for kind in range(4))
    return weights, biases, a, b


def _stacked(a: list[Tensor], dtype: torch.dtype) -> Tensor:
    return a[0].to(dtype) if len(a) == 1 else torch.cat([a_ri.to(dtype) for a_ri in a])


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
    """Takes over ``linear``'s weight (frozen) and adds ``lora_A`` (r, i) and ``lora_B`` (o, r) in fp32.

    A weight stored (inputs, outputs), as GPT-2's ``Conv1D`` has it, stays so (peft: ``fan_in_fan_out``).
    """

    def __init__(self, linear: Any, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.transposed = is_transposed(linear)
        self.in_features: int = linear.weight.shape[0] if self.transposed else linear.in_features
        self.out_features: int = linear.weight.shape[1] if self.transposed else linear.out_features
        self.rank, self.scale, self.dropout = rank, alpha / rank, dropout
        weight: Tensor | QuantisedWeight = linear.weight
        frozen = weight if isinstance(weight, QuantisedWeight) else nn.Parameter(weight, requires_grad=False)
        self.weight: nn.Parameter | QuantisedWeight = frozen
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias, requires_grad=False)
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, rank, dtype=torch.float32, device=device))

    @property
    def matrix(self) -> "Tensor | QuantisedWeight":
        """The weight as (outputs, inputs)."""
        return cast("Tensor", self.weight).t() if self.transposed else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return _together(x, (self,))[0]

    def dropped(self, x_ti: Tensor) -> Tensor:
        """``x_Ti`` → ``y_To`` with dropout before A."""
        y_to = product(x_ti, self.matrix, self.bias)
        return y_to + _LowRankDropped.apply(x_ti, self.lora_A, self.lora_B, self.scale, self.dropout)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, scale={self.scale}, dropout={self.dropout}"


def is_transposed(module: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is stored (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def linears(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Each layer's output for the same input: one low-rank product where all are adapted, else a call each, as of an island
    of fp32, whose own call is what widens its input."""
    if not all(isinstance(layer, LoRALinear) and not is_island(layer) for layer in layers):
        return [layer(x) for layer in layers]
    return _together(x, cast("Sequence[LoRALinear]", layers))


def _together(x: Tensor, adapted: Sequence[LoRALinear]) -> list[Tensor]:
    x_ti = x.flatten(0, -2)
    if torch.is_autocast_enabled(x.device.type):
        x_ti = x_ti.to(torch.get_autocast_dtype(x.device.type))
    with torch.autocast(x.device.type, enabled=False):
        if any(layer.training and layer.dropout > 0.0 for layer in adapted):
            ys = [layer.dropped(x_ti) for layer in adapted]
        else:
            parts = [p for layer in adapted for p in (layer.matrix, layer.bias, layer.lora_A, layer.lora_B)]
            ys = _LowRank.apply(x_ti, tuple(layer.scale for layer in adapted), *parts)
    return [y_to.view(*x.shape[:-1], -1) for y_to in ys]
