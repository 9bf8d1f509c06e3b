"""Attention inside packed sequences: as transformers' registry calls it, and as its attention modules do after take-over.

On a CPU each sequence goes through ``SegmentAttention`` (PyTorch's CPU kernel is slow in backward); on a CUDA device all
go through one call of FlashAttention, where it takes them. Without boundaries (generation) the batch is plainly causal.

Shapes: n query heads, m key/value heads, B rows, S columns, T = B·S, d head size, p rotated part of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ..data.micro import width
from .attention import Form, SegmentAttention
from .exchanged import Here
from .flash import PackedFlash, suits
from .lora_linear import linears

ATTENTION = "finefit"
"""Its name in transformers' registry."""


def attend(  # noqa: PLR0913 (transformers' signature)
    module: nn.Module,
    q_bnsd: Tensor,
    k_bmsd: Tensor,
    v_bmsd: Tensor,
    _mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    bounds: tuple[int, ...] | None = None,
    exchange: Here | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """``(B, S, n, d)`` and no weights. Dropout on attention weights is not applied."""
    scale = scaling if scaling is not None else q_bnsd.shape[-1] ** -0.5
    form = Form(scale, sliding_window, softcap)
    if bounds is None:
        return _generating(q_bnsd, k_bmsd, v_bmsd, form), None
    batch, heads, columns, _ = q_bnsd.shape
    out_tnd = _inside([_rows(q_bnsd), _rows(k_bmsd), _rows(v_bmsd)], bounds, form, exchange or Here())
    return out_tnd.view(batch, columns, heads, -1), None


def _rows(x_bnsd: Tensor) -> Tensor:
    """``(B, n, S, d)`` → ``(T, n, d)``; a view when the heads were split off the last axis, as models do."""
    return x_bnsd.transpose(1, 2).flatten(0, 1)


class PackedAttention:
    """Put before a transformers attention class: its forward for packed sequences; generation stays the class's own.

    Projections that read one input are one low-rank product, queries and keys are turned without copies of their
    halves, and ``SegmentAttention`` takes heads as they lie.
    """

    softcapped = False

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
        bounds = kwargs.get("bounds")
        if bounds is None:
            return super().forward(hidden_states, position_embeddings, *args, **kwargs)  # type: ignore[misc]
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        softcap = self.attn_logit_softcapping if self.softcapped else None
        form, exchange = Form(self.scaling, window, softcap), kwargs.get("exchange") or Here()
        heads = self._turned(hidden_states, position_embeddings)
        out_tnd = _inside(heads, bounds, form, exchange)
        return self.o_proj(out_tnd.view(*hidden_states.shape[:-1], -1)), None

    def _turned(self: Any, hidden_states: Tensor, position_embeddings: Any) -> list[Tensor]:
        """The same as ``_heads``, queries and keys at their positions."""
        q_tnd, k_tmd, v_tmd = self._heads(hidden_states)
        if getattr(self, "use_rope", True):
            cos_tp, sin_tp = (x.flatten(0, 1) for x in position_embeddings)
            q_tnd, k_tmd = Rotation.apply(q_tnd, cos_tp, sin_tp), Rotation.apply(k_tmd, cos_tp, sin_tp)
        return [q_tnd, k_tmd, v_tmd]

    def _heads(self: Any, hidden_states: Tensor) -> list[Tensor]:
        """``(T, n, d)``, ``(T, m, d)`` twice: queries, keys, values, the first two normalised where the model does."""
        if hasattr(self, "qkv_proj"):
            qkv_to = self.qkv_proj(hidden_states).flatten(0, 1)
            keys = self.num_key_value_heads * self.head_dim
            parts = qkv_to.split([qkv_to.shape[-1] - 2 * keys, keys, keys], -1)
        else:
            parts = [y.flatten(0, 1) for y in linears(hidden_states, (self.q_proj, self.k_proj, self.v_proj))]
        q_tnd, k_tmd, v_tmd = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if hasattr(self, "q_norm"):
            q_tnd, k_tmd = self.q_norm(q_tnd), self.k_norm(k_tmd)
        return [q_tnd, k_tmd, v_tmd]


def take_over(attention: nn.Module, softcapped: bool) -> None:
    """Make ``attention`` a ``PackedAttention`` of its own class; parameters and their names stay."""
    own = type(attention)
    attention.__class__ = type(f"Packed{own.__name__}", (PackedAttention, own), {"softcapped": softcapped})


class Rotation(torch.autograd.Function):
    """Rotary position embedding (arXiv:2104.09864) of ``x_Tnd`` in transformers' order of halves; keeps the angles alone.

    ``cos_Tp``, ``sin_Tp`` with p ≤ d: the rest of each head passes through. Computed in the angles' type.
    """

    @staticmethod
    def forward(ctx: Any, x_tnd: Tensor, cos_tp: Tensor, sin_tp: Tensor) -> Tensor:
        ctx.save_for_backward(cos_tp, sin_tp)
        return _turned(x_tnd, cos_tp, sin_tp, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_tp, sin_tp = ctx.saved_tensors
        return _turned(grads[0], cos_tp, sin_tp, -1), None, None


def _turned(x_tnd: Tensor, cos_tp: Tensor, sin_tp: Tensor, way: int) -> Tensor:
    turned, half = cos_tp.shape[-1], cos_tp.shape[-1] // 2
    dtype, x_tnd = x_tnd.dtype, x_tnd.to(cos_tp.dtype)
    cos_t1p, sin_t1p = cos_tp[:, None], sin_tp[:, None]
    out_tnd = torch.empty(x_tnd.shape, dtype=x_tnd.dtype, device=x_tnd.device)
    torch.mul(x_tnd[..., :turned], cos_t1p, out=out_tnd[..., :turned])
    out_tnd[..., :half].addcmul_(x_tnd[..., half:turned], sin_t1p[..., :half], value=-way)
    out_tnd[..., half:turned].addcmul_(x_tnd[..., :half], sin_t1p[..., half:], value=way)
    if turned < x_tnd.shape[-1]:
        out_tnd[..., turned:] = x_tnd[..., turned:]
    return out_tnd.to(dtype)


_stands_for: ContextVar[str] = ContextVar("stands_for", default="cpu")


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Tensors on the CPU are stand-ins for those of a device of this kind: its attention is chosen, and allocates."""
    token = _stands_for.set(kind)
    try:
        yield
    finally:
        _stands_for.reset(token)


def _inside(qkv: list[Tensor], bounds: tuple[int, ...], form: Form, exchange: Here) -> Tensor:
    """``(T, n, d)``: each token attends to the earlier ones of its own sequence. ``bounds`` are those of all tokens, whoever
    has them."""
    kind = qkv[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else qkv[2].dtype
    qkv = [x.to(dtype) for x in qkv]
    with torch.autocast(kind, enabled=False):
        q_tnd, k_tmd, v_tmd = exchange.heads(qkv)
        on_cuda = (q_tnd.is_cuda or _stands_for.get() == "cuda") and q_tnd.shape[2] == v_tmd.shape[2]
        function = PackedFlash if on_cuda and suits(q_tnd, form) else SegmentAttention
        return exchange.tokens(function.apply(q_tnd, k_tmd, v_tmd, bounds, form))


def _generating(q_bnsd: Tensor, k_bmsd: Tensor, v_bmsd: Tensor, form: Form) -> Tensor:
    """New queries against a cache of keys that ends with their own, and which is filled up to a `width` that none sees."""
    queries, keys = q_bnsd.shape[2], k_bmsd.shape[2]
    k_bmsd, v_bmsd = (nn.functional.pad(x, (0, 0, 0, width(keys) - keys)) for x in (k_bmsd, v_bmsd))
    position = torch.arange(keys - queries, keys, device=q_bnsd.device)[:, None]
    key = torch.arange(k_bmsd.shape[2], device=q_bnsd.device)
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
