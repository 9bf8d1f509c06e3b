"""Attention as CUDA's kernels allocate it, for fake tensors: what is saved, and what backward takes for a moment.

On a CUDA device ``scaled_dot_product_attention`` picks a kernel by type, mask and head size; a CPU build picks others.
These functions allocate what the CUDA kernels do and compute nothing real. Sizes follow PyTorch 2.11,
``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`` (mha_fwd, mha_bwd) and ``attention_backward.cu``
(efficient attention); flash-attn 2's own interface allocates the same.

Shapes: b batch, n query heads, m key/value heads, s rows, d head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

Kernel = Literal["flash", "efficient", "math"]


# H200, torch 2.11: forward and backward peaks of every kernel at 6 sizes, benchmarks/results/gpu-kernels.json.
_WIDE_HEADS = 24 * 2**20


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


class Flash(torch.autograd.Function):
    """FlashAttention-2 on ``(b, n, s, d)`` queries and ``(b, m, s, d)`` keys and values; saves q, k, v, output, lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, n, s, _ = q.shape
        # Laid out as the queries are: where those are not a view of (b, s, n, d), joining the heads is a copy.
        out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
        lse = q.new_empty(b, n, s, dtype=torch.float32)
        seed = q.new_empty(2, dtype=torch.int64)
        ctx.save_for_backward(q, k, v, out, lse, seed)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _out, _lse, _seed = ctx.saved_tensors
        b, n, s, d = q.shape
        m, keys = k.shape[1], k.shape[2]
        dq, dk, dv = (t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in (q, k, v))
        rounded = _up(s, 128)
        softmax_d = q.new_empty(b, n, rounded, dtype=torch.float32)
        dq_sum = q.new_empty(b, n, rounded, _up(d, 32 if d <= 128 else 64), dtype=torch.float32)
        wide = [k.new_empty(b, keys, n, d) for _ in range(2)] if m != n else []
        del softmax_d, dq_sum, wide
        return dq, dk, dv


class Efficient(torch.autograd.Function):
    """Memory-efficient attention with an additive mask; saves q, k, v, mask, output, lse; needs n = m."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        b, n, s, d = q.shape
        out = q.new_empty(b, s, n, d).transpose(1, 2)
        lse = q.new_empty(b, n, _up(s, 32), dtype=torch.float32)
        if d > 128 and q.dtype is not torch.float32:
            q.new_empty(b, s, n, d, dtype=torch.float32)  # the output is summed outside the registers
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, _mask, _out, _lse = ctx.saved_tensors
        b, n, s, d = q.shape
        dq, dk, dv = (t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in (q, k, v))
        delta = q.new_empty(b, n, s, dtype=torch.float32)
        # Half types: dq is summed in fp32. fp32: the product that delta is the sum of. One tensor of that size either way.
        workspace = q.new_empty(b, n, s, d, dtype=torch.float32)
        wide = q.new_empty(_WIDE_HEADS, dtype=torch.uint8) if d > 128 and q.dtype is not torch.float32 else None
        del delta, workspace, wide
        return dq, dk, dv, None


def sdpa(q: Tensor, k: Tensor, v: Tensor, kind: Kernel, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Causal attention by the named kernel, ``(b, n, s, d)`` in and out."""
    if kind == "flash":
        out: Tensor = Flash.apply(q, k, v)
        return out
    if kind == "math":  # the same composite of plain operators on every device
        whole = torch.ops.aten._scaled_dot_product_attention_math.default
        out = whole(q, k, v, mask, dropout, mask is None, None, enable_gqa=q.shape[1] != k.shape[1])[0]
        return out
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    out = Efficient.apply(q, k, v, _aligned(q, mask))
    return out


def _aligned(q: Tensor, mask: Tensor | None) -> Tensor | None:
    """Boolean masks become additive ones of the queries' type, rows padded to a multiple of 16 bytes where needed."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, 0.0)
    step = 16 // q.element_size()
    if mask.shape[-1] % step:
        padded = functional.pad(mask, (0, step - mask.shape[-1] % step))
        mask = padded[..., : mask.shape[-1]]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], mask.shape[-1])


def cuda_choice(q: Tensor, k: Tensor, mask: Tensor | None) -> Kernel:
    """The kernel PyTorch picks on a CUDA device; cuDNN's, first choice on Hopper, takes what flash or efficient takes.

    Grouped heads without a mask in fp32 have no kernel but the composite.
    """
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and mask is None and q.shape[-1] <= 256:
        return "flash"
    return "efficient" if q.shape[1] == k.shape[1] else "math"


@contextmanager
def cuda_kernels(forced: Kernel | None = None) -> Iterator[None]:
    """``scaled_dot_product_attention`` and dropout allocate as on CUDA, in this process, until the end."""
    plain_sdpa, plain_dropout = functional.scaled_dot_product_attention, functional.dropout

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **_: Any
    ) -> Tensor:
        kind = query.device.type
        if torch.is_autocast_enabled(kind):  # attention is on the list of what autocast lowers
            query, key, value = (t.to(torch.get_autocast_dtype(kind)) for t in (query, key, value))
        with torch.autocast(kind, enabled=False):
            return sdpa(query, key, value, forced or cuda_choice(query, key, attn_mask), attn_mask, dropout_p)

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        out: Tensor = torch.ops.aten.native_dropout(input, p, True)[0]
        return out

    functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    functional.dropout = dropout
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = plain_sdpa, plain_dropout
