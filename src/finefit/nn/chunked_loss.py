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
            dchunk = None if dhidden is None else dhidden[rows]
            total += _one_chunk(hidden_lh[rows], weight, label_l[rows, None], softcap, (dchunk, dweight))
        ctx.save_for_backward(*(grad for grad in (dhidden, dweight) if grad is not None))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        saved = list(ctx.saved_tensors)
        dhidden = saved.pop(0).mul_(grads[0]) if ctx.needs_input_grad[0] else None
        dweight = saved.pop(0).mul_(grads[0]) if ctx.needs_input_grad[1] else None
        return dhidden, dweight, None, None, None


# One chunk is one call, so that none of its logits is alive while the next chunk's are computed.
def _one_chunk(
    hidden_ch: Tensor, weight_vh: Tensor, label_c1: Tensor, softcap: float | None, grads: tuple[Tensor | None, ...]
) -> Tensor:
    """The chunk's summed loss; its gradients are written into, or added to, ``grads``."""
    dhidden_ch, dweight_vh = grads
    logits_cv, slope = capped(F.linear(hidden_ch, weight_vh).float(), softcap)
    # In place: each row is read before it is written, and a second copy of the chunk would be the step's largest tensor.
    logp_cv = torch.log_softmax(logits_cv, -1, out=logits_cv)
    loss = -logp_cv.gather(1, label_c1).sum()
    if dhidden_ch is None and dweight_vh is None:
        return loss
    dlogits = logp_cv.exp_()
    dlogits.scatter_add_(1, label_c1, torch.full_like(label_c1, -1, dtype=dlogits.dtype))
    if slope is not None:
        dlogits.mul_(slope)
    dlogits = dlogits.to(hidden_ch.dtype)
    if dhidden_ch is not None:
        torch.mm(dlogits, weight_vh, out=dhidden_ch)
    if dweight_vh is not None:
        dweight_vh.add_(dlogits.t().mm(hidden_ch))
    return loss


def capped(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """``softcap·tanh(logits / softcap)`` and its slope; the logits themselves and None without a cap."""
    if softcap is None:
        return logits, None
    tanh = torch.tanh(logits.div_(softcap))
    return tanh * softcap, 1 - tanh * tanh
