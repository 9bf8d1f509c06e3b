"""Weights in 8, 4, 3 or 2 bits, a scale for each block of 64: QLoRA (arXiv:2305.14314, section 3 and appendix E).

4 bits: NF4, two codes a byte, the first in the high half. 8 bits: the linear grid −127 … 127 of the same blocks (not
LLM.int8's rows: a block's largest value is smaller than a row's). 3 and 2 bits: levels that make the squared error of
normally distributed weights least (Lloyd, "Least squares quantization in PCM", 1982), which quantiles with a zero and
both ends, as NF4 has them, are far from with so few levels: of the weights of SmolLM2-135M 18 and 36 % are lost, by
quantiles 20 and 57 %. Four codes of 2 bits are a byte; eight of 3 bits are three, in two planes. A scale is the block's largest absolute value, in
fp32, or quantised again: less their mean, by groups of 256, to the 8-bit dynamic codes of arXiv:1511.04561.

NF4 codes, scales and the values brought back are bitsandbytes' to the bit (0.50.2), but for the last block of a weight
whose size is no multiple of 64. Declines FP4, other sizes of blocks, and weights that train.

Shapes: N elements, b blocks of 64, g groups of 256 blocks.
"""

from collections.abc import Sequence
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

# Each is the mean of what is nearest to it, for normal weights over the largest of their block, weighted by its square;
# tests/numerics/test_quantised.py works that out. Largest values are rounded too: few of a block's are near them.
_HALF3 = torch.tensor([0.09235550463199615, 0.2860028147697449, 0.5126684904098511, 0.8311933875083923])
_HALF2 = torch.tensor([0.1730506420135498, 0.5886238813400269])
LLOYD3, LLOYD2 = (torch.cat([-half.flip(0), half]) for half in (_HALF3, _HALF2))


def _fours(levels: Tensor, bits: int) -> Tensor:
    """The four values of an index of four codes, the first in its highest bits, side by side in one element."""
    index = torch.arange(2 ** (4 * bits))
    codes = torch.stack([index >> bits * place & 2**bits - 1 for place in (3, 2, 1, 0)], 1)
    return levels[codes].view(torch.complex128).flatten()


FOURS3, FOURS2 = _fours(LLOYD3, 3), _fours(LLOYD2, 2)
# The upper four bits of two indices of 12, by the byte that holds both, side by side.
_BYTE = torch.arange(256)
UPPER = torch.stack([(_BYTE & 15) << 8, (_BYTE >> 4) << 8], 1).view(torch.complex128).flatten()


def dynamic_codes(exponents: int, signs: int) -> Tensor:
    """Values from −1 to 1, denser towards 0: a sign, a decimal exponent, the rest of the bits a fraction.

    With two ``signs`` there are 2^(exponents + 1) of them; with one, as many from 0 to 1.
    """
    values = [0.0, 1.0]
    for exponent in range(exponents):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + 2 - signs) + 1)
        means = 10.0 ** (exponent + 1 - exponents) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()] if signs == 2 else means.tolist()
    return torch.tensor(sorted(values))


DYNAMIC = dynamic_codes(7, 2)


class Tables(nn.Module):
    """The tables of codes a model's quantised weights share: frozen, so counted with the weights."""

    pairs: Tensor
    fours: Tensor
    upper: Tensor
    dynamic: Tensor

    def __init__(self, bits: int, scales: str, device: torch.device) -> None:
        super().__init__()
        self.values = {**GRIDS[bits].tables, **({"dynamic": DYNAMIC} if scales == "double" else {})}
        for name, values in self.values.items():
            self.register_parameter(name, _frozen(torch.empty_like(values, device=device)))

    @torch.no_grad()
    def reset(self) -> None:
        """Fill in the values, which no checkpoint has."""
        for name, values in self.values.items():
            self.get_parameter(name).copy_(values)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Grid(Protocol):
    """How values of a block are codes: planes of ``dtype``, of each so many elements a block."""

    dtype: torch.dtype

    @property
    def planes(self) -> tuple[int, ...]: ...

    @property
    def tables(self) -> dict[str, Tensor]: ...

    def encode(self, x_b64: Tensor, scale_b: Tensor) -> tuple[Tensor, ...]:
        """fp32 ``x_b64`` → the elements of each plane."""
        ...

    def decode(self, planes: Sequence[Tensor], scale_b: Tensor, tables: Tables) -> Tensor:
        """The elements of each plane → fp32 ``(b, 64)``."""
        ...


class Nf4:
    dtype, planes, tables = torch.uint8, (32,), {"pairs": PAIRS}

    def encode(self, x_b64: Tensor, scale_b: Tensor) -> tuple[Tensor]:
        codes_n = _nearest(x_b64, scale_b, NF4)
        return ((codes_n[::2] << 4).bitwise_or_(codes_n[1::2]),)

    def decode(self, planes: Sequence[Tensor], scale_b: Tensor, tables: Tables) -> Tensor:
        x_b64 = tables.pairs.index_select(0, planes[0].int()).view(torch.float32).view(-1, BLOCK)
        return x_b64.mul_(scale_b[:, None])


class Int8:
    dtype, planes, tables = torch.int8, (64,), dict[str, Tensor]()

    def encode(self, x_b64: Tensor, scale_b: Tensor) -> tuple[Tensor]:
        return (_normal(x_b64, scale_b).mul_(127).round_().to(torch.int8).view(-1),)

    def decode(self, planes: Sequence[Tensor], scale_b: Tensor, tables: Tables) -> Tensor:
        return planes[0].view(-1, BLOCK) * scale_b.div(127)[:, None]


# Indices of 64 bits: what is in hand is then the same as for 4 bits, byte by byte, and so is the traced graph.
class Lloyd2:
    dtype, planes, tables = torch.uint8, (16,), {"fours": FOURS2}

    def encode(self, x_b64: Tensor, scale_b: Tensor) -> tuple[Tensor]:
        first, second, third, last = _nearest(x_b64, scale_b, LLOYD2).view(-1, 4).unbind(1)
        return ((first << 6).bitwise_or_(second << 4).bitwise_or_(third << 2).bitwise_or_(last),)

    def decode(self, planes: Sequence[Tensor], scale_b: Tensor, tables: Tables) -> Tensor:
        return _looked_up(planes[0].long(), scale_b, tables)


class Lloyd3:
    """Four codes are an index of 12 bits: its lower eight are a byte of the first plane, its upper four half a byte of
    the second, the low half that of the first of two."""

    dtype, planes, tables = torch.uint8, (16, 8), {"fours": FOURS3, "upper": UPPER}

    def encode(self, x_b64: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third, last = _nearest(x_b64, scale_b, LLOYD3).view(-1, 4).unbind(1)
        upper = (first << 1).bitwise_or_(second >> 2)
        lower = ((second & 3) << 6).bitwise_or_(third << 3).bitwise_or_(last)
        return lower, (upper[1::2] << 4).bitwise_or_(upper[::2])

    def decode(self, planes: Sequence[Tensor], scale_b: Tensor, tables: Tables) -> Tensor:
        lower, upper = planes
        index = tables.upper.index_select(0, upper.int()).view(torch.int64)
        return _looked_up(index.add_(lower), scale_b, tables)


def _looked_up(index: Tensor, scale_b: Tensor, tables: Tables) -> Tensor:
    """The four values of each index, times their scale: fp32 ``(b, 64)``."""
    x_b64 = tables.fours.index_select(0, index).view(torch.float32).view(-1, BLOCK)
    return x_b64.mul_(scale_b[:, None])


def _nearest(x_b64: Tensor, scale_b: Tensor, levels: Tensor) -> Tensor:
    """Code of the level that is nearest to each value over its block's scale: uint8 ``(64·b,)``."""
    bounds = (levels[1:] + levels[:-1]).div_(2).to(x_b64.device)
    return torch.bucketize(_normal(x_b64, scale_b), bounds, out_int32=True).to(torch.uint8).view(-1)


GRIDS: dict[int, Grid] = {2: Lloyd2(), 3: Lloyd3(), 4: Nf4(), 8: Int8()}


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
        scale_b = tables.dynamic.index_select(0, self.code_b[start:stop].int())
        scale_g = self.scale_g[start // GROUP : -(-stop // GROUP)]
        whole = (stop - start) // GROUP * GROUP
        scale_b[:whole].view(-1, GROUP).mul_(scale_g[: whole // GROUP, None])
        scale_b[whole:].mul_(scale_g[-1:])
        return scale_b.add_(self.mean)


SCALES: dict[str, type[PlainScales] | type[DoubleScales]] = {"plain": PlainScales, "double": DoubleScales}
