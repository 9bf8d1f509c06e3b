"""Optimizers that keep their moments in a gradient's low-rank space: GaLore, and Q-GaLore with weights in 8 bits.

``galore_torch/{galore_projector,adamw8bit}.py`` (jiaweizzhao/GaLore, arXiv:2403.03507): weights of the blocks' linear
layers have an orthogonal basis of ``rank`` rows along their shorter side, from a decomposition in fp32 at the first
update, kept in the gradient's type; an update works on clones. ``q_galore_torch/{q_galore_adamw8bit,q_galore_projector,
utils/quantization}.py`` (VITA-Group/Q-GaLore, arXiv:2407.08296): the basis takes a byte a number though it has 4 bits,
the weight a byte, both with a scale and a zero for 256; the gradient is the layer's own and updates it inside backward.
cuSOLVER's workspace for the decomposition is not known here, and not counted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_GROUP = 256
_WHERE = ("attn", "mlp")


def projected(model: nn.Module) -> list[Tensor]:
    """The weights whose gradients are projected: of linear layers in attention and MLP, as both projects pick them."""
    kinds = (nn.Linear, TrainedInt8)
    return [m.weight for name, m in model.named_modules() if isinstance(m, kinds) and any(w in name for w in _WHERE)]


class LowRank:
    """An update through a basis of ``rank`` rows; ``moments`` makes the states of a tensor, ``packed``: Q-GaLore's."""

    def __init__(self, rank: int, packed: bool, moments: Callable[[Tensor], dict[str, Tensor]]) -> None:
        self.rank, self.packed, self.moments = rank, packed, moments

    def update(self, weight: Tensor, grad: Tensor, held: dict[str, Tensor]) -> None:
        """Take the gradient into the low-rank space, update there, bring the change back; ``held`` is kept.

        The weight is moved aside as a clone and takes the change; here the clone goes instead of what it stands for.
        """
        if "basis" not in held:
            held |= self._basis(grad)
        tall = grad.shape[0] >= grad.shape[1]
        basis = self._unpacked(held, grad.dtype)
        low = grad @ basis.t() if tall else basis.t() @ grad
        del basis
        aside = weight.detach().clone()
        change = low.clone()
        del aside, grad
        if not any(name[0].isdigit() for name in held):
            held |= self.moments(low)
        basis = self._unpacked(held, change.dtype)
        whole = change @ basis if tall else basis @ change
        scaled = whole * 0.25
        del scaled

    def _basis(self, grad: Tensor) -> dict[str, Tensor]:
        """Of the shorter side; ``torch.linalg.svd`` writes both bases whole, from a copy of the fp32 gradient."""
        rows, columns = grad.shape
        least = min(rows, columns)
        wide = grad.float()
        copied = wide.clone()
        left, right = wide.new_empty(rows, least), wide.new_empty(least, columns)
        del copied
        part = right[: self.rank] if rows >= columns else left[:, : self.rank]
        basis = part.contiguous().to(grad.dtype)
        del left, right, wide, part
        return packed_of(basis) if self.packed else {"basis": basis}

    def _unpacked(self, held: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        return unpacked(held["basis"], held["scale"], held["zero"], dtype) if self.packed else held["basis"]


def packed_of(tensor: Tensor) -> dict[str, Tensor]:
    """A byte a number, a scale and a zero in the tensor's type for each group."""
    scale, zero = (tensor.new_empty(tensor.numel() // _GROUP, 1) for _ in range(2))
    return {"basis": tensor.new_empty(tensor.shape, dtype=torch.uint8), "scale": scale, "zero": zero}


def unpacked(packed: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    wide = packed.to(dtype).reshape(-1, _GROUP)
    wide.sub_(zero).mul_(scale)
    return wide.reshape(packed.shape)


class TrainedInt8(nn.Module):
    """A linear layer that trains though its weight has 8 bits; ``update`` takes its gradient as soon as it is there."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale: Tensor
        self.zero: Tensor
        self.bias: Tensor | None
        whole = linear.weight
        self.weight = nn.Parameter(
            torch.empty(whole.shape, dtype=torch.uint8, device=whole.device), requires_grad=False
        )
        for name in ("scale", "zero"):
            made = torch.empty(whole.numel() // _GROUP, 1, dtype=whole.dtype, device=whole.device)
            setattr(self, name, nn.Parameter(made, requires_grad=False))
        self.bias = linear.bias
        self.update: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x, self)
        return out if self.bias is None else out + self.bias

    def dense(self, dtype: torch.dtype) -> Tensor:
        return unpacked(self.weight, self.scale, self.zero, dtype)

    def pack_again(self, whole: Tensor) -> None:
        """What stochastic rounding makes on the way from the updated weight to its bytes."""
        rows = whole.clone().reshape(-1, _GROUP)
        divided = rows / rows.amax(1, keepdim=True)
        above, below = torch.ceil(divided), torch.floor(divided)
        chance = divided - below
        rounded = torch.where(torch.rand_like(chance) < chance, above, below)
        wide = torch.clamp(rounded + self.zero, 0, 255)
        wide.to(torch.uint8)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: TrainedInt8) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return functional.linear(x, layer.dense(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,), layer, (grad,) = ctx.saved_tensors, ctx.layer, grads
        grad_input = grad @ layer.dense(grad.dtype)
        of_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if layer.update is not None:
            layer.update(of_weight)
        return grad_input, None


def in_8_bits(block: nn.Module) -> None:
    """Swap a block's linear layers, on the instance."""
    for parent in list(block.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, TrainedInt8(child))
