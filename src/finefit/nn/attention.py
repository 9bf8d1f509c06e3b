"""Causal attention over sequences packed in one row, each seeing only itself; what it keeps is q, k, v and nothing else.

Each sequence is taken in blocks of query rows against all its keys so far, so a block's scores are the largest thing
ever held and backward recomputes them (FlashAttention, arXiv:2205.14135, section 3, without its on-line softmax: on a
CPU a whole score row fits). Grouped-query heads are folded into the rows of one product, so keys and values are never
expanded. Declines dropout and custom masks.

Shapes: T tokens of all sequences, n query heads, m key/value heads, g = n / m, d head size (that of values may be
another), R rows, C columns.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from .recomputed import once

QUERY_BLOCK = 128  # rows; 1024 keys x 128 rows x 9 heads in bf16 are 2.3 MiB and stay in cache (128 beat 256 and 512)


class SegmentAttention(torch.autograd.Function):
    """``softmax(q k^T * scale) v`` inside each ``[bounds[i], bounds[i+1])``; ``q_Tnd``, ``k_Tmd``, ``v_Tmd`` → ``o_Tnd``."""

    @staticmethod
    def forward(ctx: Any, q_tnd: Tensor, k_tmd: Tensor, v_tmd: Tensor, bounds: tuple[int, ...], form: "Form") -> Tensor:
        ctx.save_for_backward(q_tnd, k_tmd, v_tmd)
        ctx.bounds, ctx.form = bounds, form
        return once(lambda: _attention((q_tnd, k_tmd, v_tmd), bounds, form))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_tnd, k_tmd, v_tmd = ctx.saved_tensors
        ahead = _ahead(q_tnd, ctx.bounds)
        dq = torch.empty(q_tnd.shape, dtype=q_tnd.dtype, device=q_tnd.device)
        dk, dv = torch.zeros_like(k_tmd), torch.zeros_like(v_tmd)
        for block in _blocks(ctx.bounds, ctx.form):
            _attend_backward(block, ctx.form, ahead, (q_tnd, k_tmd, v_tmd, grads[0]), (dq, dk, dv))
        return dq, dk, dv, None, None


def _attention(qkv: tuple[Tensor, Tensor, Tensor], bounds: tuple[int, ...], form: "Form") -> Tensor:
    q_tnd, _k_tmd, v_tmd = qkv
    ahead = _ahead(q_tnd, bounds)
    out = torch.empty(*q_tnd.shape[:2], v_tmd.shape[2], dtype=q_tnd.dtype, device=q_tnd.device)
    for block in _blocks(bounds, form):
        _attend(block, form, ahead, qkv, out)
    return out


# One block is one call, so that nothing of a block is alive while the next is computed.
def _attend(block: "Block", form: "Form", ahead: Tensor, qkv: tuple[Tensor, ...], out: Tensor) -> None:
    q_tnd, k_tmd, v_tmd = qkv
    low, row, end = block
    q_mrd = _fold(q_tnd[row:end], k_tmd.shape[1]).mul_(form.scale)
    probs = _probabilities(q_mrd, k_tmd[low:end], low, row, form, ahead)[0]
    _unfold(out[row:end], torch.bmm(probs, v_tmd[low:end].transpose(0, 1)))


def _attend_backward(
    block: "Block", form: "Form", ahead: Tensor, qkvo: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> None:
    q_tnd, k_tmd, v_tmd, dout_tnd = qkvo
    dq, dk, dv = grads
    low, row, end = block
    groups = k_tmd.shape[1]
    q_mrd = _fold(q_tnd[row:end], groups).mul_(form.scale)
    probs, capped = _probabilities(q_mrd, k_tmd[low:end], low, row, form, ahead)
    dout = _fold(dout_tnd[row:end], groups)
    dv[low:end].transpose(0, 1).add_(torch.bmm(probs.transpose(1, 2), dout))
    dprobs = torch.bmm(dout, v_tmd[low:end].permute(1, 2, 0))
    dscores = torch._softmax_backward_data(dprobs, probs, -1, probs.dtype)
    if capped is not None:
        dscores.mul_(1 - capped * capped)
    dk[low:end].transpose(0, 1).add_(torch.bmm(dscores.transpose(1, 2), q_mrd))
    _unfold(dq[row:end], torch.bmm(dscores, k_tmd[low:end].transpose(0, 1)).mul_(form.scale))


class Form:
    """The shape of the attention: scale, an optional sliding window of keys, an optional soft cap on the scores."""

    __slots__ = ("scale", "softcap", "window")

    def __init__(self, scale: float, window: int | None = None, softcap: float | None = None) -> None:
        self.scale, self.window, self.softcap = scale, window, softcap

    def first_key(self, start: int, row: int) -> int:
        return start if self.window is None else max(start, row - self.window + 1)


Block = tuple[int, int, int]  # first key, first row, end of both


def _blocks(bounds: tuple[int, ...], form: Form) -> list[Block]:
    return [
        (form.first_key(start, row), row, min(row + QUERY_BLOCK, end))
        for start, end in itertools.pairwise(bounds)
        for row in range(start, end, QUERY_BLOCK)
    ]


def _probabilities(
    q_mrd: Tensor, k_cmd: Tensor, low: int, row: int, form: Form, ahead: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Softmax of one block's scores, ``(m, g*R, C)``, and tanh of the capped scores where there is a cap."""
    cols, groups = k_cmd.shape[:2]
    rows = low + cols - row
    scores = torch.bmm(q_mrd, k_cmd.permute(1, 2, 0))
    capped = None
    if form.softcap is not None:
        capped = torch.tanh(scores.div_(form.softcap))
        scores = capped * form.softcap
    scores_mgrc = scores.view(groups, -1, rows, cols)
    # Only the last `rows` keys can lie ahead of a query; only the first ones can have left the window.
    scores_mgrc[..., cols - rows :].add_(ahead[:rows, :rows])
    if form.window is not None and cols > form.window:
        key = torch.arange(low, low + cols, device=scores.device)
        query = torch.arange(row, row + rows, device=scores.device)[:, None]
        scores_mgrc.masked_fill_(key <= query - form.window, float("-inf"))
    return torch.softmax(scores, -1), capped


def _ahead(like: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """A square of the rows of the largest block: minus infinity where the key comes after the query, else 0."""
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    rows = min(QUERY_BLOCK, longest)
    return torch.full((rows, rows), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)


def _fold(x_rnd: Tensor, groups: int) -> Tensor:
    """``(R, n, d)`` → a new ``(m, g*R, d)``: the query heads of one key head become rows of one product."""
    _rows, heads, dim = x_rnd.shape
    x_mgrd = x_rnd.unflatten(1, (groups, heads // groups)).permute(1, 2, 0, 3)
    return x_mgrd.clone(memory_format=torch.contiguous_format).view(groups, -1, dim)


def _unfold(out_rnd: Tensor, x_mrd: Tensor) -> None:
    """Write ``(m, g*R, d)`` back into ``(R, n, d)``."""
    rows, heads, dim = out_rnd.shape
    groups = x_mrd.shape[0]
    out_rnd.unflatten(1, (groups, heads // groups)).permute(1, 2, 0, 3).copy_(x_mrd.view(groups, -1, rows, dim))
