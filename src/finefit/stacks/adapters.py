"""Adapters and packed weights as peft and bitsandbytes allocate them (peft 0.13 to 0.21, bitsandbytes 0.43 to 0.50).

``peft/tuners/lora/layer.py`` Linear.forward and ``bitsandbytes/autograd/_functions.py`` MatMul4Bit, MatMul8bitLt. The
latter keeps its input, as it came, for a gradient no frozen weight has; the former did so too before 0.43.2. Both as
attributes: they live as long as the graph.
Values mean nothing here; storages do.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_BLOCK, _NESTED = 64, 256  # bitsandbytes' block of a scale, and of a scale's scale


class PeftLinear(nn.Module):
    """``base(x) + B(A(dropout(x))) * scaling``, the input cast to the adapter's type, the result to the base's."""

    def __init__(self, base: nn.Module, rank: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        shape, device = _shape(base), next(iter((*base.parameters(), *base.buffers()))).device
        self.base: Any = base  # a linear layer or a packed one
        self.lora_A = nn.Linear(shape[1], rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(rank, shape[0], bias=False, device=device, dtype=dtype)
        self.p = dropout

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        if self.p:
            x = nn.functional.dropout(x, self.p, self.training)
        result = result + self.lora_B(self.lora_A(x)) * 2.0
        out: Tensor = result.to(dtype)
        return out


class DoraLinear(PeftLinear):
    """peft's DoRA: the norm of the merged weight each forward, detached, and a second product with the base's weight."""

    def __init__(self, base: nn.Module, rank: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__(base, rank, dropout, dtype)
        self.magnitude = nn.Parameter(torch.empty(_shape(base)[0], device=self.lora_A.weight.device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        weight = self.base.dense() if isinstance(self.base, Packed) else self.base.weight
        eye = torch.eye(self.lora_A.weight.shape[1], device=x.device, dtype=x.dtype)
        merged = self.lora_B(self.lora_A(eye)).T.detach()
        norm = torch.linalg.norm(weight.to(x.dtype) + 2.0 * merged, dim=1)
        del eye, merged
        scale = (self.magnitude / norm).view(1, -1)
        if self.p:
            x = nn.functional.dropout(x, self.p, self.training)
            plain = nn.functional.linear(x, weight.to(x.dtype))
        else:
            plain = result
        result = result + (scale - 1) * plain + scale * self.lora_B(self.lora_A(x)) * 2.0
        out: Tensor = result.to(dtype)
        return out


class Packed(nn.Module):
    """A frozen linear whose weight is stored packed; unpacked for the product, forward and again backward."""

    def __init__(self, linear: nn.Linear, kind: str, device: torch.device, keeps_input: bool = False) -> None:
        super().__init__()
        self.packed: Tensor
        self.shape, self.kind, self.gptq = tuple(linear.weight.shape), kind, kind.startswith("gptq")
        self.keeps_input = keeps_input or kind == "int8"
        numel = linear.weight.numel()
        self.bias = linear.bias
        for name, size, dtype in _stored(kind, numel, self.shape):
            self.register_buffer(name, torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        wanted = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        cast = x.to(torch.bfloat16 if wanted is torch.float32 and not self.gptq else wanted)
        if self.kind == "int8":
            cast = x  # a function of its own, which autocast does not reach
        out: Tensor = _UnpackedProduct.apply(cast, self)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(x.dtype) if not self.gptq else out

    def beside(self) -> list[Tensor]:
        """What bitsandbytes hangs on the packed parameter as its ``quant_state``: no parameter, so sharded by nobody.
        GPTQ's tensors are made parameters before FSDP comes to them (fms-acceleration's ``autogptq_utils.py``)."""
        return [] if self.gptq else [t for name, t in self.named_buffers() if name != "packed"]

    def dense(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight, as the kernel writes it; scales of scales are unpacked first."""
        device = self.packed.device
        if self.kind == "nf4_double":
            count = self.shape[0] * self.shape[1] // _BLOCK
            scales = torch.empty(count, dtype=torch.float32, device=device)
            scales = scales + 0.0
            del scales
        return torch.empty(self.shape, dtype=dtype, device=device)


class _UnpackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Packed) -> Tensor:
        ctx.layer = layer
        if layer.keeps_input and ctx.needs_input_grad[0]:
            ctx.kept = x
        if layer.kind == "int8":
            return _int8_forward(x, layer)
        return nn.functional.linear(x, layer.dense(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return torch.matmul(grad, ctx.layer.dense(grad.dtype)), None


def _int8_forward(x: Tensor, layer: Packed) -> Tensor:
    """The input in 8 bits by rows, an int32 product, the result in half precision."""
    flat = x.reshape(-1, x.shape[-1])
    half = flat.to(torch.float16)
    rows = torch.empty(half.shape, dtype=torch.int8, device=x.device)
    stats = torch.empty(half.shape[0], dtype=torch.float32, device=x.device)
    del half
    product = torch.empty(rows.shape[0], layer.shape[0], dtype=torch.int32, device=x.device)
    out = torch.empty(product.shape, dtype=x.dtype, device=x.device)
    del product, stats, rows
    return out.view(*x.shape[:-1], -1)


def _stored(kind: str, numel: int, shape: Sequence[int]) -> list[tuple[str, int, torch.dtype]]:
    """(buffer, elements, type) of a packed weight."""
    if kind == "int8":
        return [("packed", numel, torch.int8), ("scale", shape[0], torch.float32)]
    if kind.startswith("gptq4"):  # groups of 128, or a row: fp16 scale, 4-bit zero, an int32 group index a column
        groups = shape[0] * (1 if kind == "gptq4_rows" else -(-shape[1] // 128))
        return [
            ("packed", numel // 8, torch.int32), ("scale", groups, torch.float16), ("zero", groups // 8, torch.int32),
            ("index", shape[1], torch.int32),
        ]  # fmt: skip
    scales = numel // _BLOCK
    if kind == "nf4":
        return [("packed", numel // 2, torch.uint8), ("scale", scales, torch.float32), ("code", 16, torch.float32)]
    return [
        ("packed", numel // 2, torch.uint8), ("scale", scales, torch.uint8), ("code", 16, torch.float32),
        ("nested", -(-scales // _NESTED), torch.float32), ("nested_code", 256, torch.float32),
        ("offset", 1, torch.float32),
    ]  # fmt: skip


def _shape(base: Any) -> tuple[int, int]:
    if isinstance(base, Packed):
        return base.shape[0], base.shape[1]
    rows, columns = base.weight.shape
    return int(rows), int(columns)
