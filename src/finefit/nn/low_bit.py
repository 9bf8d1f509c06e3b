"""Moments of an optimizer in 8 or 4 bits, a scale for each block.

8 bits: bitsandbytes' dynamic codes, of either sign for a first moment and of none for a second, 256 elements a block
(arXiv:2110.02861). 4 bits: arXiv:2309.01507 as torchao has it: dynamic codes of either sign, and sixteenths without zero
for a second moment, so that nothing is divided by it; 128 elements a block, two codes a byte, the first in the high half.

The code of a value is looked up by the 16 bits of its float16, so it may be the second nearest where the value is within
a rounding of float16 of the middle between two. The last block is filled up with zeros and kept whole.

Shapes: n elements, c with the last block filled up, b blocks of B.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..updating import ALIGNED, BLOCK
from .blockwise import DYNAMIC, dynamic_codes
from .optimizers import States
from .work import Work

# The values of the codes, by their bits and by which moment.
CODES: dict[tuple[int, int], Tensor] = {
    (8, 0): DYNAMIC,
    (8, 1): dynamic_codes(7, 1),
    (4, 0): dynamic_codes(3, 2),
    (4, 1): torch.linspace(0, 1, 17)[1:],
}
_TINY = torch.finfo(torch.float32).tiny


def encoding(values: Tensor) -> Tensor:
    """uint8 (65536,): the code nearest to each pattern of a float16; of what is no number any."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).double()
    bounds = (values[1:].double() + values[:-1].double()) / 2
    return torch.bucketize(numbers.nan_to_num(), bounds).to(torch.uint8)


def decoding(values: Tensor) -> Tensor:
    """The value of each code; of 16, both values of each byte side by side in 64 bits."""
    if len(values) == 256:
        return values.clone()
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], 1).view(torch.int64).flatten()


@dataclass(frozen=True, slots=True)
class Open:
    """A chunk of a moment in fp32, and where it is kept."""

    x_n: Tensor
    part: Tensor
    scale_b: Tensor | None = None


class Plain:
    """A moment as it is, in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def start(self, name: str, like: Tensor) -> States:
        return {name: torch.zeros_like(like, dtype=self.dtype, memory_format=torch.preserve_format)}

    def read(self, state: States, name: str, at: slice, work: Work, kept: tuple[str, float]) -> Open:
        """In the buffer ``kept`` names, if it needs one, and times the factor there."""
        part_n = state[name].view(-1)[at]
        x_n = work.writable(kept[0], part_n)
        return Open(x_n if kept[1] == 1 else x_n.mul_(kept[1]), part_n)

    def write(self, held: Open, work: Work) -> None:
        """What ``read`` gave, changed; it is worked in."""
        work.put(held.part, held.x_n, high=1)


class Coded:
    """A moment in codes, ``sign`` 0 one of either sign, 1 one of none. One object for all tensors of a run: it has the
    tables."""

    def __init__(self, bits: int, sign: int, device: torch.device) -> None:
        self.bits, self.sign, self.block = bits, sign, BLOCK[bits]
        values = CODES[bits, sign]
        self.values, self.codes = decoding(values).to(device), encoding(values).to(device)

    def start(self, name: str, like: Tensor) -> States:
        blocks = -(-like.numel() // self.block)
        return {
            name: torch.zeros(blocks * self.block * self.bits // 8, dtype=torch.uint8, device=like.device),
            f"{name}_scale": torch.zeros(blocks, dtype=torch.float32, device=like.device),
        }

    def read(self, state: States, name: str, at: slice, work: Work, kept: tuple[str, float]) -> Open:
        first, last = at.start // self.block, -(-at.stop // self.block)
        width, count = self.block * self.bits // 8, (last - first) * self.block
        codes, scale_b = state[name][first * width : last * width], state[f"{name}_scale"][first:last]
        index = work.word("scratch", (last - first) * width).copy_(codes)
        x_c = work.cut(kept[0], count)
        torch.index_select(self.values, 0, index, out=x_c.view(self.values.dtype))
        if kept[1] != 1:
            times_b = torch.mul(scale_b, kept[1], out=work.cut("inverse", last - first))
        else:
            times_b = scale_b
        x_c.view(-1, self.block).mul_(times_b[:, None])
        n = at.stop - at.start
        if n != count:  # what fills up the last block stays nothing, where nothing has no code too
            x_c[n:].zero_()
        return Open(x_c if n == count else x_c[:n], codes, scale_b)

    def write(self, held: Open, work: Work) -> None:
        """What ``read`` gave, changed; it is worked in."""
        scale_b = held.scale_b
        assert scale_b is not None
        blocks = scale_b.numel()
        count = blocks * self.block
        x_c = held.x_n if held.x_n.numel() == count else held.x_n.as_strided((count,), (1,))
        x_bB = x_c.view(blocks, self.block)
        above_bB = x_bB if self.sign else torch.abs(x_bB, out=work.cut("scratch", count).view(blocks, self.block))
        new_b = torch.amax(above_bB, 1, out=work.cut("scale", blocks))
        inverse_b = torch.clamp(new_b, min=_TINY, out=work.cut("inverse", blocks)).reciprocal_()
        x_bB.mul_(inverse_b[:, None])
        work.put(held.part, self._encoded(x_c, held.part, work))
        work.put(scale_b, new_b)

    def _encoded(self, x_c: Tensor, part: Tensor, work: Work) -> Tensor:
        """uint8 in the buffer of narrow numbers, or at once where they belong."""
        count = x_c.numel()
        narrow_c = work.cut("narrow", count).copy_(x_c)
        index_c = work.word("scratch", count).copy_(narrow_c.view(torch.uint16))
        bytes_2c = narrow_c.view(torch.uint8)
        at_once = work.skip is None and self.bits == 8
        codes_c = torch.index_select(self.codes, 0, index_c, out=part if at_once else bytes_2c[:count])
        if self.bits == 8:
            return codes_c
        # Of each pair, 16 bits whose low byte comes first, one word is made and its low byte kept.
        pairs, half = codes_c.view(torch.int16), count // 2
        words = torch.bitwise_left_shift(pairs, 4, out=index_c.view(torch.int16)[:half])
        words.bitwise_or_(pairs.bitwise_right_shift_(8))
        return bytes_2c[count : count + half].copy_(words)


assert all(ALIGNED % block == 0 for block in BLOCK.values())
