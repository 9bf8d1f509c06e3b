"""Weights in 4 or 8 bits, a scale for each block of 64: QLoRA (arXiv:2305.14314, section 3 and appendix E).

4 bits: NF4, two codes a byte, the first in the high half. 8 bits: the linear grid −127 … 127 of the same blocks (not
LLM.int8's rows: a block's largest value is smaller than a row's). A scale is the block's largest absolute value, in
fp32, or quantised again: less their mean, by groups of 256, to the 8-bit dynamic codes of arXiv:1511.04561.

NF4 codes, scales and the values brought back are bitsandbytes' to the bit (0.50.2), but for the last block of a weight
whose size is no multiple of 64. Declines FP4, other sizes of blocks, and weights that train.

Shapes: N elements, b blocks of 64, g groups of 256 blocks.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

BLOCK, GROUP = 64, 256

# Appendix E: the quantiles of a normal distribution, scaled to [−1, 1], with an exact zero.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
# Both values of a byte, side by side in one element of 64 bits: a lookup a byte.
PAIRS = torch.stack([NF4.repeat_interleave(16), NF4.repeat(16)], 1).view(torch.int64).flatten()


def _dynamic_codes() -> Tensor:
    """256 values from −1 to 1, denser towards 0: a sign, a decimal exponent, the rest of the bits a fraction."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        means = 10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values))


DYNAMIC = _dynamic_codes()


class Tables(nn.Module):
    """The tables of codes a model's quantised weights share: frozen, so counted with the weights."""

    def __init__(self, pairs: bool, dynamic: bool, device: torch.device) -> None:
        super().__init__()
        self.pairs = _frozen(torch.empty_like(PAIRS, device=device)) if pairs else None
        self.dynamic = _frozen(torch.empty_like(DYNAMIC, device=device)) if dynamic else None

    @torch.no_grad()
    def reset(self) -> None:
        """Fill in the values, which no checkpoint has."""
        for table, values in ((self.pairs, PAIRS), (self.dynamic, DYNAMIC)):
            if table is not None:
                table.copy_(values)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Grid(Protocol):
    """How values of a block are codes: ``share`` codes an element of ``dtype``."""

    dtype: torch.dtype
    share: int

    def encode(self, x_b64: Tensor, scale_b: Tensor) -> Tensor: ...
    def decode(self, codes: Tensor, scale_b: Tensor, tables: Tables) -> Tensor: ...


class Nf4:
    dtype, share = torch.uint8, 2

    def encode(self, x_b64: Tensor, scale_b: Tensor) -> Tensor:
        """fp32 ``x_b64`` → uint8 ``(32·b,)``."""
        bounds = (NF4[1:] + NF4[:-1]).div_(2).to(x_b64.device)
        codes_n = torch.bucketize(_normal(x_b64, scale_b), bounds, out_int32=True).to(torch.uint8).view(-1)
        return (codes_n[::2] << 4).bitwise_or_(codes_n[1::2])

    def decode(self, codes: Tensor, scale_b: Tensor, tables: Tables) -> Tensor:
        """uint8 ``(32·b,)`` → fp32 ``(b, 64)``."""
        assert tables.pairs is not None
        x_b64 = tables.pairs.index_select(0, codes.int()).view(torch.float32).view(-1, BLOCK)
        return x_b64.mul_(scale_b[:, None])


class Int8:
    dtype, share = torch.int8, 1

    def encode(self, x_b64: Tensor, scale_b: Tensor) -> Tensor:
        """fp32 ``x_b64`` → int8 ``(64·b,)``."""
        return _normal(x_b64, scale_b).mul_(127).round_().to(torch.int8).view(-1)

    def decode(self, codes: Tensor, scale_b: Tensor, tables: Tables) -> Tensor:
        """int8 ``(64·b,)`` → fp32 ``(b, 64)``."""
        return codes.view(-1, BLOCK) * scale_b.div(127)[:, None]


GRIDS: dict[int, Grid] = {4: Nf4(), 8: Int8()}


def _normal(x_b64: Tensor, scale_b: Tensor) -> Tensor:
    """Each block over its largest absolute value; a block of zeros stays."""
    least = torch.finfo(torch.float32).tiny
    return (x_b64 * scale_b.clamp(min=least).reciprocal_()[:, None]).clamp_(-1, 1)


class PlainScales(nn.Module):
    """fp32, one a block."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        super().__init__()
        self.scale_b = _frozen(torch.empty(blocks, dtype=torch.float32, device=device))

    def put(self, scale_b: Tensor) -> None:
        self.scale_b.copy_(scale_b)

    def of(self, start: int, stop: int, tables: Tables) -> Tensor:
        """Scales of the blocks from ``start``, a multiple of 256, to ``stop``; not to be written to."""
        return self.scale_b[start:stop]


class DoubleScales(nn.Module):
    """8-bit codes, an fp32 scale for each group of them, and the mean that was taken off."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        super().__init__()
        self.code_b = _frozen(torch.empty(blocks, dtype=torch.uint8, device=device))
        self.scale_g = _frozen(torch.empty(-(-blocks // GROUP), dtype=torch.float32, device=device))
        self.mean = _frozen(torch.empty((), dtype=torch.float32, device=device))

    def put(self, scale_b: Tensor) -> None:
        self.mean.copy_(scale_b.mean())
        short = -len(scale_b) % GROUP
        rest_gn = nn.functional.pad(scale_b - self.mean, (0, short)).view(-1, GROUP)
        self.scale_g.copy_(rest_gn.abs().amax(1))
        bounds = (DYNAMIC[1:] + DYNAMIC[:-1]).div_(2).to(scale_b.device)
        codes_gn = torch.bucketize(_normal(rest_gn, self.scale_g), bounds, out_int32=True)
        self.code_b.copy_(codes_gn.view(-1)[: len(scale_b)])

    def of(self, start: int, stop: int, tables: Tables) -> Tensor:
        """Scales of the blocks from ``start``, a multiple of 256, to ``stop``; not to be written to."""
        assert tables.dynamic is not None
        scale_b = tables.dynamic.index_select(0, self.code_b[start:stop].int())
        scale_g = self.scale_g[start // GROUP : -(-stop // GROUP)]
        whole = (stop - start) // GROUP * GROUP
        scale_b[:whole].view(-1, GROUP).mul_(scale_g[: whole // GROUP, None])
        scale_b[whole:].mul_(scale_g[-1:])
        return scale_b.add_(self.mean)


SCALES: dict[str, type[PlainScales] | type[DoubleScales]] = {"plain": PlainScales, "double": DoubleScales}
