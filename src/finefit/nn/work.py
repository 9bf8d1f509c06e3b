"""What a rule works in while it steps: buffers made once a call, fp32 copies, and how values are written back.

A value that is kept in bfloat16 is written to the nearest one or, to keep in expectation what is smaller than half a step
of it, to one of its two neighbours by chance: 16 random bits are added below those that stay and cut off (arXiv:2010.06192,
section 3.1). The bits are a hash of the element's number and of a number drawn for each tensor from torch's
own generator, so a resumed run draws what an undisturbed one does.

Where a loss scaler found a gradient that is not finite every write leaves what was there, and the device is not asked.
"""

import torch
from torch import Tensor

from ..updating import Buffers, Piece, Rounding

_TYPES = {1: torch.bool, 2: torch.float16, 4: torch.float32, 8: torch.float64}
_LOW = 0xFFFF
# lowbias32, whose output bits each depend on every input bit: https://github.com/skeeto/hash-prospector
_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1))


def piece_of(parameter: Tensor) -> Piece:
    """The paper's view of a tensor."""
    rows, columns = (parameter.shape[0], parameter.shape[-1]) if parameter.dim() > 1 else (parameter.numel(), 0)
    return Piece(parameter.numel(), rows, columns, 8 * parameter.element_size())


def mixed(x_n: Tensor, turn_n: Tensor) -> Tensor:
    """int32 ``x_n`` hashed in place; ``turn_n`` is int32 to work in."""
    for shift, factor in _MIX:
        torch.bitwise_right_shift(x_n, shift, out=turn_n)
        x_n.bitwise_xor_(turn_n.bitwise_and_(2 ** (32 - shift) - 1))
        if factor != 1:
            x_n.mul_(factor)
    return x_n


class Work:
    """The buffers of one call of a rule, by the names ``updating`` gives them."""

    def __init__(self, buffers: Buffers, device: torch.device, found_inf: Tensor | None, rounding: Rounding) -> None:
        self.found_inf = found_inf
        self.buffers = {
            name: torch.empty(count, dtype=_TYPES[width], device=device) for name, (count, width) in buffers.items()
        }
        self.sizes = {name: count for name, (count, _) in buffers.items()}
        names: list[str] = [name for name in ("scratch", "noise") if name in buffers]
        self.words = {name: self.buffers[name].view(torch.int32) for name in names}
        """The same memory as integers."""
        self.skip = None if found_inf is None else torch.ne(found_inf, 0, out=self.buffers["skip"][0])
        self.rounds = rounding == "stochastic"

    def cut(self, name: str, n: int) -> Tensor:
        """The first ``n`` elements of a buffer."""
        return self.buffers[name] if n == self.sizes[name] else self.buffers[name][:n]

    def word(self, name: str, n: int) -> Tensor:
        """The same as int32."""
        return self.words[name] if n == self.sizes[name] else self.words[name][:n]

    def begin(self) -> None:
        """Another tensor: other random bits."""
        if self.rounds:
            self.buffers["seed"].view(torch.int32).random_()

    def draw(self, start: int, n: int) -> None:
        """Random bits for elements from ``start`` on; the scratch is worked in."""
        if self.rounds and "noise" in self.buffers:
            noise_n = torch.arange(start, start + n, out=self.word("noise", n))
            mixed(noise_n.add_(self.buffers["seed"].view(torch.int32)), self.word("scratch", n))

    def count(self, step: Tensor, place: Tensor) -> None:
        """One more step, if it is one; ``place`` is a number to work in."""
        if self.found_inf is None:
            step.add_(1)
        else:
            step.add_(torch.mul(self.found_inf, -1, out=place).add_(1))

    def wide(self, name: str, part_n: Tensor) -> Tensor:
        """``part_n`` in fp32, to be read: itself or a copy in the buffer ``name``."""
        return part_n if part_n.dtype is torch.float32 else self.cut(name, part_n.numel()).copy_(part_n)

    def writable(self, name: str, part_n: Tensor) -> Tensor:
        """``part_n`` in fp32, to be changed and then ``put`` back: itself where that is its final value."""
        if part_n.dtype is torch.float32 and self.skip is None:
            return part_n
        return self.cut(name, part_n.numel()).copy_(part_n)

    def put(self, part_n: Tensor, x_n: Tensor, high: int = 0) -> None:
        """Write fp32 ``x_n``, which is worked in, where it belongs; ``high``: which half of the random bits is taken."""
        if part_n is x_n:
            return
        if self.rounds and part_n.dtype is torch.bfloat16:
            self._round(x_n, high)
        if self.skip is None:
            part_n.copy_(x_n)
            return
        if part_n.dtype is not x_n.dtype:
            x_n = self.cut("narrow", x_n.numel()).view(part_n.dtype).copy_(x_n)
        torch.where(self.skip, part_n, x_n, out=part_n)

    def _round(self, x_n: Tensor, high: int) -> None:
        n = x_n.numel()
        turn_n = torch.bitwise_right_shift(self.word("noise", n), 16 * high, out=self.word("scratch", n))
        x_n.view(torch.int32).add_(turn_n.bitwise_and_(_LOW)).bitwise_and_(~_LOW)
