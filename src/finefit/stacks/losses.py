"""The loss of a causal language model as the common tools compute it, by what it keeps.

plain: transformers' ``loss/loss_utils.py`` ForCausalLMLoss: logits raised to fp32, cross-entropy on all rows; before
4.49 on a contiguous copy of all rows but the last.
kernel: the same with one kernel for the entropy, which writes the gradient over its input (Unsloth's,
fms-acceleration's, Liger's ``cross_entropy``). fused: Liger's ``fused_linear_cross_entropy``: head and loss by chunks of rows, gradients computed in
forward. chunked: the head's output taken by chunks, logits in the compute type, fp32 a chunk at a time, each kept.

Shapes: b rows, s columns, V vocabulary, h hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..foreign import ForeignRun


def loss_of(run: ForeignRun, head: Any, hidden_bsh: Tensor, label_bs: Tensor) -> tuple[Tensor, Tensor | None]:
    """The loss, and the logits where they exist, for loops that hold them until backward is over."""
    if run.loss == "fused":
        weight = head.weight if not hasattr(head, "base") else head.base.weight
        return FusedLinear.apply(hidden_bsh.flatten(0, 1), weight, label_bs.flatten()), None
    if run.loss == "chunked":
        return _chunked(head, hidden_bsh, label_bs, run.loss_chunks), None
    entropy = _by_kernel if run.loss == "kernel" else _by_operators
    logits = head(hidden_bsh)
    if not run.loss_raised:
        rows, labels = logits[:, :-1].contiguous(), label_bs[:, 1:].contiguous()
        return entropy(rows.flatten(0, 1), labels.flatten()), logits
    if run.shift == "inside":
        logits = logits.float()
    if run.shift:
        return _shifted(logits, label_bs, entropy), logits
    if run.loss == "kernel" and run.tool != "transformers":
        return entropy(logits.flatten(0, 1), label_bs.flatten()), logits
    labels = nn.functional.pad(label_bs, (0, 1), value=-100)[:, 1:].contiguous()
    return entropy(logits.float().flatten(0, 1), labels.flatten()), logits


Entropy = Callable[[Tensor, Tensor], Tensor]


def _shifted(logits: Tensor, label_bs: Tensor, entropy: Entropy) -> Tensor:
    raised = logits.float()
    rows, labels = raised[:, :-1].contiguous(), label_bs[:, 1:].contiguous()
    return entropy(rows.flatten(0, 1), labels.flatten())


def _by_operators(rows: Tensor, labels: Tensor) -> Tensor:
    if torch.is_autocast_enabled(rows.device.type):
        rows = rows.float()  # the loss is on the list of what autocast raises
    return nn.functional.cross_entropy(rows, labels, ignore_index=-100)


def _by_kernel(rows: Tensor, labels: Tensor) -> Tensor:
    out: Tensor = Kernel.apply(rows, labels)
    return out


def _chunked(head: nn.Module, hidden_bsh: Tensor, label_bs: Tensor, chunks: int) -> Tensor:
    total = hidden_bsh.new_zeros((), dtype=torch.float32)
    for rows, labels in zip(hidden_bsh.chunk(chunks, 1), label_bs.chunk(chunks, 1), strict=True):
        logits = head(rows).flatten(0, 1).float()
        total = total + nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        del logits
    return total


class Kernel(torch.autograd.Function):
    """Loss and log-sum-exp a row; the gradient overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        rows = logits.shape[0]
        losses, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
        ctx.save_for_backward(logits, lse)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class FusedLinear(torch.autograd.Function):
    """Chunks of rows so that a chunk's logits are about as large as the input; gradients are made in forward."""

    @staticmethod
    def forward(ctx: Any, x_th: Tensor, weight_vh: Tensor, labels: Tensor) -> Tensor:
        rows, hidden = x_th.shape
        vocab = weight_vh.shape[0]
        chunk = _power_of_two(-(-rows // -(-vocab // hidden)))
        grad = torch.zeros_like(x_th)
        grad_weight = torch.zeros_like(weight_vh) if weight_vh.requires_grad else None
        losses = torch.zeros(rows, dtype=torch.float32, device=x_th.device)
        for start in range(0, rows, chunk):
            one = x_th[start : start + chunk]
            logits = one @ weight_vh.t().to(one.dtype)
            grad[start : start + chunk] = logits @ weight_vh.to(one.dtype)
            if grad_weight is not None:
                grad_weight += logits.t() @ one
            del logits
        ctx.save_for_backward(grad, grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad, grad_weight = ctx.saved_tensors
        return grad, grad_weight, None


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
