"""Attention as transformers' registry calls it, with the sequences' boundaries passed explicitly.

On a CPU each sequence goes through ``SegmentAttention`` (PyTorch's CPU kernel is slow in backward); on a CUDA device
through PyTorch's own kernels, a call a sequence. Without boundaries (generation) the batch is plainly causal.

Shapes: n query heads, m key/value heads, B rows, S columns, T = B·S, d head size.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Form, SegmentAttention


def attend(  # noqa: PLR0913 (transformers' signature)
    module: nn.Module,
    q_bnsd: Tensor,
    k_bmsd: Tensor,
    v_bmsd: Tensor,
    _mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    bounds: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """``(B, S, n, d)`` and no weights. Dropout on attention weights is not applied."""
    scale = scaling if scaling is not None else q_bnsd.shape[-1] ** -0.5
    form = Form(scale, sliding_window, softcap)
    if bounds is None:
        return _generating(q_bnsd, k_bmsd, v_bmsd, form), None
    kind = q_bnsd.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v_bmsd.dtype
    q_tnd, k_tmd, v_tmd = (_rows(x).to(dtype) for x in (q_bnsd, k_bmsd, v_bmsd))
    plain = form.softcap is None and (form.window is None or form.window >= bounds[-1])
    with torch.autocast(kind, enabled=False):
        if q_bnsd.is_cuda and plain:
            out_tnd = _by_kernel((q_tnd, k_tmd, v_tmd), bounds, scale)
        else:
            out_tnd = SegmentAttention.apply(q_tnd, k_tmd, v_tmd, bounds, form)
    batch, heads, columns, dim = q_bnsd.shape
    return out_tnd.view(batch, columns, heads, dim), None


def _rows(x_bnsd: Tensor) -> Tensor:
    """``(B, n, S, d)`` → ``(T, n, d)``; a view when the heads were split off the last axis, as models do."""
    return x_bnsd.transpose(1, 2).flatten(0, 1)


def _by_kernel(qkv: tuple[Tensor, Tensor, Tensor], bounds: tuple[int, ...], scale: float) -> Tensor:
    gqa = qkv[0].shape[1] != qkv[1].shape[1]
    outs = []
    for start, end in itertools.pairwise(bounds):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def _generating(q_bnsd: Tensor, k_bmsd: Tensor, v_bmsd: Tensor, form: Form) -> Tensor:
    """New queries against a cache of keys that ends with their own."""
    queries, keys = q_bnsd.shape[2], k_bmsd.shape[2]
    position = torch.arange(keys - queries, keys, device=q_bnsd.device)[:, None]
    key = torch.arange(keys, device=q_bnsd.device)
    seen = key <= position
    if form.window is not None:
        seen &= key > position - form.window
    groups = q_bnsd.shape[1] // k_bmsd.shape[1]
    k_bnsd, v_bnsd = (x.repeat_interleave(groups, 1) for x in (k_bmsd, v_bmsd))
    scores = q_bnsd.matmul(k_bnsd.transpose(2, 3)).float() * form.scale
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    probs = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(v_bnsd.dtype)
    return probs.matmul(v_bnsd).transpose(1, 2)
