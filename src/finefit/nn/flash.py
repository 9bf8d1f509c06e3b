"""FlashAttention over sequences packed in one row, on a CUDA device: one kernel for all of them, forward and backward.

PyTorch's own kernels by their operators (``aten::_flash_attention_forward``, arXiv:2307.08691), which take boundaries,
grouped heads and a sliding window. On tensors that are not on such a device (fake ones that stand for it) it allocates
what ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`` does (mha_varlen_fwd, mha_varlen_bwd) and
computes nothing. Half types only; declines soft caps and heads over 256.

Shapes: T tokens of all sequences, n query heads, m key/value heads, d head size.
"""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from .attention import Form

_PAD = 128  # rows a sequence is padded by in the kernel's sums


class PackedFlash(torch.autograd.Function):
    """As ``SegmentAttention``: ``q_Tnd``, ``k_Tmd``, ``v_Tmd`` → ``o_Tnd``; keeps them, the output and ``(n, T)`` sums."""

    @staticmethod
    def forward(ctx: Any, q_tnd: Tensor, k_tmd: Tensor, v_tmd: Tensor, bounds: tuple[int, ...], form: Form) -> Tensor:
        if q_tnd.is_cuda:
            at, longest = _starts(bounds, q_tnd.device), _longest(bounds)
            out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
                q_tnd, k_tmd, v_tmd, at, at, longest, longest, 0.0, True, False, scale=form.scale, **_window(form)
            )
        else:
            out = torch.empty(q_tnd.shape, dtype=q_tnd.dtype, device=q_tnd.device)
            lse = q_tnd.new_empty(q_tnd.shape[1], q_tnd.shape[0], dtype=torch.float32)
            seed, unused = q_tnd.new_empty(2, dtype=torch.int64), q_tnd.new_empty(0)
        ctx.save_for_backward(q_tnd, k_tmd, v_tmd, out, lse, seed, unused)
        ctx.bounds, ctx.form = bounds, form
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_tnd, k_tmd, v_tmd, out, lse, seed, unused = ctx.saved_tensors
        bounds, form = ctx.bounds, ctx.form
        if not q_tnd.is_cuda:
            return (*_as_allocated(q_tnd, k_tmd, v_tmd, len(bounds) - 1), None, None)
        at, longest = _starts(bounds, q_tnd.device), _longest(bounds)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), q_tnd, k_tmd, v_tmd, out, lse, at, at, longest, longest, 0.0, True, seed, unused,
            scale=form.scale, **_window(form),
        )  # fmt: skip
        return dq, dk, dv, None, None


def suits(q_tnd: Tensor, form: Form) -> bool:
    """Whether the kernel takes these heads: half types, no soft cap, head sizes of whole 16 bytes up to 256; on a GPU of the
    Ampere generation or later (a device that is only stood for is one)."""
    dim = q_tnd.shape[-1]
    if q_tnd.dtype not in (torch.bfloat16, torch.float16) or form.softcap is not None or dim > 256 or dim % 8:
        return False
    return not q_tnd.is_cuda or torch.cuda.get_device_capability(q_tnd.device) >= (8, 0)


def _as_allocated(q_tnd: Tensor, k_tmd: Tensor, v_tmd: Tensor, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, after what the kernel holds beside them is gone again."""
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q_tnd, k_tmd, v_tmd))
    tokens, heads, dim = q_tnd.shape
    rows = tokens + _PAD * sequences
    sums = q_tnd.new_empty(heads, rows, dtype=torch.float32), q_tnd.new_empty(rows, heads, dim, dtype=torch.float32)
    wide = [k_tmd.new_empty(tokens, heads, dim) for _ in range(2)] if k_tmd.shape[1] != heads else []
    del sums, wide
    return dq, dk, dv


@functools.lru_cache(maxsize=4)
def _starts(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """The boundaries on the device: every block of a model asks for the same."""
    return torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)


def _longest(bounds: tuple[int, ...]) -> int:
    return max(end - start for start, end in itertools.pairwise(bounds))


def _window(form: Form) -> dict[str, int]:
    return {} if form.window is None else {"window_size_left": form.window - 1, "window_size_right": 0}
