"""A gated MLP (arXiv:2002.05202) that keeps gate and up for backward; the plain one keeps act(gate) and the product too.

Shapes: T tokens, f features of the MLP, h hidden, r adapter rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .in_fp32 import is_island
from .lora_linear import linears
from .quantised_linear import QuantisedWeight, dense


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


class GatedDown(torch.autograd.Function):
    """``down(act(gate_Tf) * up_Tf)`` for a linear with or without a low-rank update; keeps gate and up alone.

    The product is what the down projection's own gradients need; it is formed again for them. ``down`` is its weight
    (quantised or not), bias, A and B.
    """

    @staticmethod
    def forward(ctx: Any, gate_tf: Tensor, up_tf: Tensor, kind: str, scale: float, *down: Any) -> Tensor:
        weight_hf, bias_h, a_rf, b_hr = _cast(down, gate_tf.dtype)
        ctx.quantised = weight_hf if isinstance(weight_hf, QuantisedWeight) else None
        ctx.save_for_backward(gate_tf, up_tf, None if ctx.quantised else down[0], *down[1:])
        ctx.kind, ctx.scale = kind, scale
        product_tf = ACTIVATIONS[kind][0](gate_tf).mul_(up_tf)
        y_th = F.linear(product_tf, dense(weight_hf, gate_tf.dtype), bias_h)
        if a_rf is not None and b_hr is not None:
            y_th.addmm_(F.linear(product_tf, a_rf), b_hr.t(), alpha=scale)
        return y_th

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_tf, up_tf, *down = ctx.saved_tensors
        weight_hf, _bias_h, a_rf, b_hr = _cast(down, gate_tf.dtype)
        act, slope = ACTIVATIONS[ctx.kind]
        (dy_th,) = grads
        acted_tf = act(gate_tf)
        dproduct_tf = dy_th.mm(dense(ctx.quantised or weight_hf, gate_tf.dtype))
        dweight = dbias = da = db = None
        needs_weight, needs_bias = ctx.needs_input_grad[4:6]
        if a_rf is not None or needs_weight:
            product_tf = acted_tf * up_tf
        if needs_weight:
            dweight = dy_th.t().mm(product_tf).to(down[0].dtype)
        if needs_bias:
            dbias = dy_th.sum(0, dtype=torch.float32).to(down[1].dtype)
        if a_rf is not None and b_hr is not None:
            dlow_tr = dy_th.mm(b_hr).mul_(ctx.scale)
            dproduct_tf.addmm_(dlow_tr, a_rf)
            da = dlow_tr.t().mm(product_tf).to(down[2].dtype)
            db = dy_th.t().mm(F.linear(product_tf, a_rf)).to(down[3].dtype).mul_(ctx.scale)
        if a_rf is not None or needs_weight:
            del product_tf
        dup_tf = acted_tf.mul_(dproduct_tf)
        dgate_tf = slope(dproduct_tf.mul_(up_tf), gate_tf)
        return dgate_tf, dup_tf, None, None, dweight, dbias, da, db


def _cast(parts: Any, dtype: torch.dtype) -> list[Any]:
    """Tensors in ``dtype``; a quantised weight as it is, to be a matrix for its product alone."""
    return [p.to(dtype) if isinstance(p, Tensor) else p for p in parts]


class GatedMLP(nn.Module):
    """Takes over the three linears of a transformers gated MLP, under the same names."""

    def __init__(self, mlp: Any, kind: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        down: Any = self.down_proj
        gate, up = linears(x, (self.gate_proj, self.up_proj))
        if is_island(down) or (self.training and getattr(down, "dropout", 0.0) > 0.0):
            return self.down_proj(gated(gate, up, self.kind))
        if gate.dtype != up.dtype:  # one of them is an island of fp32 beside autocast
            narrow = min(gate.dtype, up.dtype, key=lambda kind: kind.itemsize)
            gate, up = gate.to(narrow), up.to(narrow)
        low_rank = (getattr(down, "lora_A", None), getattr(down, "lora_B", None))
        with torch.autocast(x.device.type, enabled=False):
            y_th: Tensor = GatedDown.apply(
                gate.flatten(0, -2), up.flatten(0, -2), self.kind, getattr(down, "scale", 0.0),
                down.weight, down.bias, *low_rank,
            )  # fmt: skip
        return y_th.view(*x.shape[:-1], -1)


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """The plain product, for autograd."""
    return ACTIVATIONS[kind][0](gate) * up
