"""Vocabulary head and cross-entropy over labelled tokens only, a chunk of rows at a time; full logits never exist.

The gradient is formed while a chunk's logits are there (as in Liger-Kernel's fused linear cross-entropy), so backward
has nothing to recompute: the loss is a *sum*, whatever comes from behind is a scalar factor. Logits are computed in the
hidden state's type and reduced in fp32, as transformers does. Soft-capping (Gemma 2) and a logit scale are applied.
Declines label smoothing and a z-loss.

Shapes: L labelled tokens, C rows of a chunk, h hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over rows of −log softmax(hidden_Lh W_Vh^T)[label_L]; fp32 scalar."""

    @staticmethod
    def forward(
        ctx: Any, hidden_lh: Tensor, weight_vh: Tensor, label_l: Tensor, chunk: int, softcap: float | None
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=torch.float32, device=hidden_lh.device)
        dhidden = torch.empty_like(hidden_lh) if needs_hidden else None
        dweight = torch.zeros_like(weight_vh) if needs_weight else None
        weight = weight_vh.to(hidden_lh.dtype)
        for start in range(0, hidden_lh.shape[0], chunk):
            rows = slice(start, min(start + chunk, hidden_lh.shape[0]))
            logits_cv, slope = capped(F.linear(hidden_lh[rows], weight).float(), softcap)
            norm_c = torch.logsumexp(logits_cv, -1)
            index_c1 = label_l[rows, None]
            total += norm_c.sum() - logits_cv.gather(1, index_c1).sum()
            if not (needs_hidden or needs_weight):
                continue
            dlogits = logits_cv.sub_(norm_c[:, None]).exp_()
            dlogits.scatter_add_(1, index_c1, torch.full_like(index_c1, -1, dtype=dlogits.dtype))
            if slope is not None:
                dlogits.mul_(slope)
            dlogits = dlogits.to(hidden_lh.dtype)
            if dhidden is not None:
                torch.mm(dlogits, weight, out=dhidden[rows])
            if dweight is not None:
                dweight += dlogits.t().mm(hidden_lh[rows])
        ctx.save_for_backward(*(grad for grad in (dhidden, dweight) if grad is not None))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        saved = list(ctx.saved_tensors)
        dhidden = saved.pop(0).mul_(grads[0]) if ctx.needs_input_grad[0] else None
        dweight = saved.pop(0).mul_(grads[0]) if ctx.needs_input_grad[1] else None
        return dhidden, dweight, None, None, None


def capped(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """``softcap·tanh(logits / softcap)`` and its slope; the logits themselves and None without a cap."""
    if softcap is None:
        return logits, None
    tanh = torch.tanh(logits.div_(softcap))
    return tanh * softcap, 1 - tanh * tanh
