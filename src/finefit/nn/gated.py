"""The product act(gate)·up of a gated MLP (arXiv:2002.05202), keeping gate and up; the plain pair keeps act(gate) too.

Shapes: T tokens, f features of the MLP.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _silu_slope(dy: Tensor, gate: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(dy, gate)


def _gelu_tanh(gate: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh")


def _gelu_tanh_slope(dy: Tensor, gate: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(dy, gate, approximate="tanh")


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (F.silu, _silu_slope),
    "gelu_pytorch_tanh": (_gelu_tanh, _gelu_tanh_slope),
}


class GatedProduct(torch.autograd.Function):
    """``act(gate_Tf) * up_Tf``; ``kind`` is a key of ``ACTIVATIONS``."""

    @staticmethod
    def forward(ctx: Any, gate_tf: Tensor, up_tf: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate_tf, up_tf)
        ctx.kind = kind
        return ACTIVATIONS[kind][0](gate_tf).mul_(up_tf)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate_tf, up_tf = ctx.saved_tensors
        act, slope = ACTIVATIONS[ctx.kind]
        dup_tf = act(gate_tf).mul_(grads[0])
        return slope(grads[0] * up_tf, gate_tf), dup_tf, None


class GatedMLP(nn.Module):
    """Takes over the three linears of a transformers gated MLP, under the same names."""

    def __init__(self, mlp: nn.Module, kind: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(GatedProduct.apply(self.gate_proj(x), self.up_proj(x), self.kind))
        return y
