"""Frozen linear layers stored in 4 bits, allocating as bitsandbytes and torchao do; no value is computed.

bitsandbytes: ``autograd/_functions.py`` (MatMul4Bit) and ``functional.py`` (dequantize_4bit) of 0.41.1. Until 0.43.2
each call keeps its input on ``ctx`` though no gradient needs it, and as an attribute, not as a saved tensor: it lives
as long as the graph. The weight was cast to fp16 to be quantised, so it comes back as fp16 and is then copied to the
input's type. torchao: ``dtypes/nf4tensor.py`` of 0.7 (LinearNF4, get_original_weight).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 64
NESTED = 256
"""Weights that share a scale, and scales that share one in turn."""


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Bnb4bit(nn.Module):
    """bitsandbytes' ``Linear4bit``; its quantisation state is held as frozen parameters, counted with the weight."""

    def __init__(self, n_in: int, n_out: int, bias: torch.dtype | None, nested: bool, keeps_input: bool) -> None:
        super().__init__()
        n, scales = n_in * n_out, -(-n_in * n_out // BLOCK)
        self.shape, self.nested, self.keeps_input = (n_out, n_in), nested, keeps_input
        self.weight = frozen(torch.empty((n + 1) // 2, 1, dtype=torch.uint8))
        self.absmax = frozen(torch.empty(scales, dtype=torch.uint8 if nested else torch.float32))
        if nested:
            self.absmax_of_absmax = frozen(torch.empty(-(-scales // NESTED), dtype=torch.float32))
        self.bias = None if bias is None else frozen(torch.empty(n_out, dtype=bias))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Bnb.apply(x, self.bias, self)
        return out

    def halved(self) -> Tensor:
        """The weight in fp16; nested scales are brought back to fp32 first and gone when this returns."""
        scales = torch.empty(self.absmax.shape, dtype=torch.float32) if self.nested else None
        weight = torch.empty(self.shape, dtype=torch.float16)
        del scales
        return weight


class _Bnb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: Bnb4bit) -> Tensor:
        out = functional.linear(x, layer.halved().to(x.dtype), bias)
        ctx.layer = layer
        if layer.keeps_input and ctx.needs_input_grad[0]:
            ctx.kept = x
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.matmul(grads[0], ctx.layer.halved().to(grads[0].dtype)), None, None


class AoNf4(nn.Module):
    """A linear layer of a torchao NF4 weight, brought back to ``dtype`` through 64-bit indices in each direction."""

    def __init__(self, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        scales = n_in * n_out // BLOCK
        self.shape = (n_out, n_in)
        self.weight = frozen(torch.empty(n_in * n_out // 2, dtype=torch.uint8))
        self.scalers = frozen(torch.empty(scales, dtype=torch.int8))
        self.factors = frozen(torch.empty(scales // NESTED, dtype=dtype))
        self.table = frozen(torch.empty(16, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Ao.apply(x, self.shape, self.weight, self.scalers, self.factors, self.table)
        return out


def _whole(shape: tuple[int, int], packed: Tensor, scalers: Tensor, factors: Tensor, table: Tensor) -> Tensor:
    first, second = (packed >> 4).to(torch.long), (packed & 15).to(torch.long)
    dequantised = table[first], table[second]
    wide = (scalers.view(-1, NESTED) / factors.unsqueeze(-1)).flatten().to(table.dtype) + 1.0
    repeated = wide.unsqueeze(-1).expand(wide.shape[0], BLOCK // 2)
    scaled = [half * repeated.flatten() for half in dequantised]
    return torch.stack([half.unsqueeze(-1).transpose(0, 1) for half in scaled], -1).reshape(shape)


class _Ao(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], *packed: Tensor) -> Tensor:
        ctx.shape = shape
        ctx.save_for_backward(*packed)
        return functional.linear(x, _whole(shape, *packed).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0] @ _whole(ctx.shape, *ctx.saved_tensors).to(grads[0].dtype)
        return grad, None, None, None, None, None
