"""Norms and gated MLPs as Liger's and Unsloth's kernels keep them: the input and one number a row; gate and up.

``liger_kernel/ops/rms_norm.py`` (saves x and the reciprocal root, gradient in place of dy) and ``ops/swiglu.py`` (saves
gate and up, writes their gradients over them).
"""

from typing import Any

import torch
from torch import Tensor, nn


def with_kernels(model: nn.Module, gated: bool = True) -> None:
    """Swap RMS norms and, if ``gated``, MLPs of the usual form, on the instance."""
    for parent in list(model.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, _Norm(child.weight))
            elif gated and all(hasattr(child, part) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")):
                child.act_fn = nn.Identity()
                _gated(child)


def _gated(mlp: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = mlp.down_proj(GatedProduct.apply(mlp.gate_proj(x), mlp.up_proj(x)))
        return out

    mlp.forward = forward


class _Norm(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = KernelNorm.apply(x, self.weight)
        return out


class KernelNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        root = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, root)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        _x, weight, _root = ctx.saved_tensors
        (grad,) = grads
        return grad, torch.empty_like(weight) if weight.requires_grad else None


class GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate, up
