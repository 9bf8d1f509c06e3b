"""Vocabulary head and cross-entropy over labelled tokens only, a chunk of rows at a time; full logits never exist.

The gradient is formed while a chunk's logits are there (as in Liger-Kernel's fused linear cross-entropy), so backward
has nothing to recompute: the loss is a *sum*, whatever comes from behind is a scalar factor. Logits are computed in the
hidden state's type and reduced in fp32, as transformers does. A head's bias (Phi), a factor on the logits (Cohere,
Granite) and soft-capping (Gemma 2) are applied, in this order. Declines label smoothing and a z-loss.

Shapes: L labelled tokens, R ≥ L rows (those after the L-th have no loss), C rows of a chunk, h hidden, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .vocabulary import Vocabulary, vocabulary_of


@dataclass(frozen=True, slots=True)
class Logits:
    """What is done to the head's logits z: ``softcap·tanh(scale·z / softcap)``; ``scale·z`` without a cap. ``vocabulary``:
    whose they are."""

    scale: float = 1.0
    softcap: float | None = None
    vocabulary: Vocabulary = field(default_factory=Vocabulary)

    @classmethod
    def of(cls, config: Any, head: nn.Module) -> "Logits":
        """By the config of a transformers model (5.24: ``modeling_{cohere,granite,gemma2}.py`` and those like them)."""
        times, over = (getattr(config, key, None) or 1.0 for key in ("logit_scale", "logits_scaling"))
        scale = (
            over if config.model_type == "hyperclovax" else times / over
        )  # which multiplies by what others divide by
        return cls(scale, getattr(config, "final_logit_softcapping", None), vocabulary_of(head))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over the first L rows of −log softmax(form(hidden_Rh W_Vh^T + bias_V))[label_L]; fp32 scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_rh: Tensor,
        weight_vh: Tensor,
        bias_v: Tensor | None,
        label_l: Tensor,
        chunk: int,
        form: Logits,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden_rh.device)
        grads = [
            None if one is None or not needed else torch.empty_like(one) if one is hidden_rh else torch.zeros_like(one)
            for one, needed in zip((hidden_rh, weight_vh, bias_v), ctx.needs_input_grad, strict=False)
        ]
        weight = weight_vh.to(hidden_rh.dtype)
        bias = None if bias_v is None else bias_v.to(hidden_rh.dtype)
        for start in range(0, hidden_rh.shape[0], chunk):
            rows = slice(start, min(start + chunk, hidden_rh.shape[0]))
            dchunk = None if grads[0] is None else grads[0][rows]
            total += _one_chunk(hidden_rh[rows], (weight, bias), label_l[rows, None], form, (dchunk, *grads[1:]))
        ctx.save_for_backward(*grads)
        return form.vocabulary.total(total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if grad is None else grad.mul_(grads[0]) for grad in ctx.saved_tensors)
        return (*scaled, None, None, None)


# One chunk is one call, so that none of its logits is alive while the next chunk's are computed.
def _one_chunk(
    hidden_ch: Tensor,
    head: tuple[Tensor, Tensor | None],
    label_c1: Tensor,
    form: Logits,
    grads: tuple[Tensor | None, ...],
) -> Tensor:
    """The chunk's summed loss, of as many of its rows as have a label; gradients are written into, or added to, ``grads``."""
    dhidden_ch, dweight_vh, dbias_v = grads
    logits_cv, slope = shaped(F.linear(hidden_ch, *head).float(), form)
    # In place, or a second copy of the chunk would be the step's largest tensor.
    logp_cv = form.vocabulary.log_softmax(logits_cv)
    labelled = len(label_c1)
    loss = -form.vocabulary.picked(logp_cv[:labelled], label_c1).sum()
    if all(grad is None for grad in grads):
        return loss
    dlogits = logp_cv.exp_()
    dlogits[labelled:].zero_()
    form.vocabulary.take_one(dlogits[:labelled], label_c1)
    if slope is not None:
        dlogits.mul_(slope)
    if form.scale != 1.0:
        dlogits.mul_(form.scale)
    if dbias_v is not None:
        dbias_v.add_(dlogits.sum(0))
    dlogits = dlogits.to(hidden_ch.dtype)
    if dhidden_ch is not None:
        torch.mm(dlogits, head[0], out=dhidden_ch)
    if dweight_vh is not None:
        dweight_vh.add_(dlogits.t().mm(hidden_ch))
    return loss


def shaped(logits: Tensor, form: Logits) -> tuple[Tensor, Tensor | None]:
    """The logits in their form, changed in place, and the soft cap's slope; None without a cap."""
    if form.scale != 1.0:
        logits.mul_(form.scale)
    if form.softcap is None:
        return logits, None
    tanh = torch.tanh(logits.div_(form.softcap))
    return tanh * form.softcap, 1 - tanh * tanh
