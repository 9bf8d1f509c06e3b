"""A frozen linear layer whose weight is kept in 8, 4, 3 or 2 bits and is a matrix again only for the product that needs it.

Forward and backward each bring the weight back in the product's type and let go of it at once (QLoRA, arXiv:2305.14314,
equation 5), so nothing of its size is ever saved: what backward needs of a frozen layer is the weight itself, and that is
held by the model. Adapters and the gated MLP take a ``QuantisedWeight`` wherever they take a tensor, through ``dense``.
Declines weights that train and kernels that multiply packed codes.

Shapes: T tokens, i inputs, o outputs, N = o·i.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parts import is_sharded, put
from .blockwise import BLOCK, GRIDS, GROUP, SCALES, Tables


class QuantisedWeight(nn.Module):
    """Stands where a linear layer's ``weight`` (o, i) stood; ``copy_`` quantises one, ``dense`` brings it back.

    ``chunk`` elements are in hand at once, so that what is beside the matrix stays small and in cache.
    """

    def __init__(self, weight: Tensor, bits: int, scales: str, chunk: int, tables: Tables) -> None:
        super().__init__()
        assert chunk % (BLOCK * GROUP) == 0, "a chunk must be whole groups of blocks"
        self.shape, self.bits, self.grid, self.step = weight.shape, bits, GRIDS[bits], chunk // BLOCK
        self.blocks = -(-weight.numel() // BLOCK)
        codes = torch.empty(self.blocks * sum(self.grid.planes), dtype=self.grid.dtype, device=weight.device)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.form, self.scales = scales, SCALES[scales](self.blocks, weight.device)
        self.tables = tables

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def numel(self) -> int:
        """Elements of the matrix."""
        return self.shape.numel()

    def dense(self, dtype: torch.dtype) -> Tensor:
        """A new ``(o, i)`` matrix."""
        out_oi = torch.empty(self.shape, dtype=dtype, device=self.device)
        for start in range(0, self.blocks, self.step):
            self._decode(out_oi.view(-1), start, min(start + self.step, self.blocks))
        return out_oi

    # One chunk is one call, here and below, so that nothing of it is alive while the next is in hand.
    def _decode(self, out_n: Tensor, start: int, stop: int) -> None:
        scale_b = self.scales.of(start, stop, self.tables)
        x_b64 = self.grid.decode(self._planes(start, stop), scale_b, self.tables)
        out = out_n[start * BLOCK : stop * BLOCK]
        out.copy_(x_b64.view(-1)[: out.numel()])

    @torch.no_grad()
    def copy_(self, weight_oi: Tensor) -> None:
        """Quantise ``weight_oi``, of any floating type; whole, where this rank keeps a shard of what comes of it."""
        if is_sharded(self.codes):
            whole = QuantisedWeight(weight_oi, self.bits, self.form, self.step * BLOCK, self.tables)
            whole.copy_(weight_oi)
            for own, value in zip(self._own(), whole._own(), strict=True):
                put(own, value)
            return
        x_n = weight_oi.to(self.device).reshape(-1)
        scale_b = torch.empty(self.blocks, dtype=torch.float32, device=self.device)
        for start in range(0, self.blocks, self.step):
            self._encode(x_n, scale_b, start)
        self.scales.put(scale_b)

    def _own(self) -> list[Tensor]:
        """Its codes and scales, without the tables."""
        return [self.codes, *self.scales.parameters()]

    def _encode(self, x_n: Tensor, scale_b: Tensor, start: int) -> None:
        part_n = x_n[start * BLOCK : (start + self.step) * BLOCK].float()
        if short := -len(part_n) % BLOCK:
            part_n = F.pad(part_n, (0, short))
        x_b64 = part_n.view(-1, BLOCK)
        part_b = scale_b[start : start + self.step]
        torch.amax(x_b64.abs(), 1, out=part_b)
        for plane, codes in zip(self._planes(start, start + len(x_b64)), self.grid.encode(x_b64, part_b), strict=True):
            plane.copy_(codes)

    def _planes(self, start: int, stop: int) -> list[Tensor]:
        """Codes of the blocks from ``start`` to ``stop``: a view of each plane, which lie one behind the other."""
        before, found = 0, []
        for each in self.grid.planes:
            found.append(self.codes[before + each * start : before + each * stop])
            before += each * self.blocks
        return found

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, {type(self.grid).__name__}"


def dense(weight: Tensor | QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix of a weight of either kind."""
    return weight.dense(dtype) if isinstance(weight, QuantisedWeight) else weight.to(dtype)


def product(x_ti: Tensor, weight: Tensor | QuantisedWeight, bias_o: Tensor | None) -> Tensor:
    """``x W^T + b`` in the type of ``x``, for autograd."""
    if isinstance(weight, QuantisedWeight):
        y_to: Tensor = _Product.apply(x_ti, weight, bias_o)
        return y_to
    return F.linear(x_ti, weight.to(x_ti.dtype), None if bias_o is None else bias_o.to(x_ti.dtype))


class _Product(torch.autograd.Function):
    """Keeps nothing: the weight is held by the model, and a frozen weight's gradient is not wanted."""

    @staticmethod
    def forward(ctx: Any, x_ti: Tensor, weight: QuantisedWeight, bias_o: Tensor | None) -> Tensor:
        ctx.weight, ctx.bias_dtype = weight, None if bias_o is None else bias_o.dtype
        return F.linear(x_ti, weight.dense(x_ti.dtype), None if bias_o is None else bias_o.to(x_ti.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (dy_to,) = grads
        dx_ti = dy_to.mm(ctx.weight.dense(dy_to.dtype)) if ctx.needs_input_grad[0] else None
        dbias = dy_to.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx_ti, None, dbias


class QuantisedLinear(nn.Linear):
    """Takes over the shape and bias of ``linear``, which may be on meta; its weight is filled by ``copy_``."""

    weight: QuantisedWeight  # type: ignore[assignment]

    def __init__(self, linear: nn.Linear, bits: int, scales: str, chunk: int, tables: Tables) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = QuantisedWeight(linear.weight, bits, scales, chunk, tables)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        x_ti, kind = x.flatten(0, -2), x.device.type
        if torch.is_autocast_enabled(kind):
            x_ti = x_ti.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            return product(x_ti, self.weight, self.bias).view(*x.shape[:-1], -1)
