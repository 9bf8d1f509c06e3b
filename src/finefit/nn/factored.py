"""Adafactor (arXiv:1804.04235) as transformers' trainer runs it: the second moment of a matrix as its rows' and columns'
means, no first moment, a given learning rate (scale_parameter and relative_step off).

A tensor is passed three times in chunks of whole rows: for the means, for the size of the update, to make it. A stack of
matrices is factored matrix by matrix and clipped as one, a vector keeps its second moment whole.

Shapes: m matrices (a, b), in chunks of r rows, so n = r·b elements at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ..updating import Update
from .optimizers import States
from .work import Work, piece_of

# transformers 5.24 optimization.py, Adafactor's defaults: added to a square, β₂'s decay. The update's most is 1.
_ADDED, _DECAY = 1e-30, -0.8


class Adafactor:
    def __init__(self, how: Update) -> None:
        self.how = how

    def shared(self) -> Sequence[Tensor]:
        return ()

    def start(self, parameter: Parameter) -> States:
        def zeros(*shape: int) -> Tensor:
            return parameter.detach().new_zeros(shape, dtype=torch.float32)

        shape = parameter.shape
        if parameter.dim() < 2:
            return {"step": zeros(), "exp_avg_sq": zeros(*shape)}
        return {"step": zeros(), "exp_avg_sq_row": zeros(*shape[:-1]), "exp_avg_sq_col": zeros(*shape[:-2], shape[-1])}

    def update(self, parameters: Sequence[Parameter], states: Sequence[States], at: Mapping[str, Any]) -> None:
        for parameter, state in zip(parameters, states, strict=True):
            self._step(parameter, state, at)

    def _step(self, parameter: Parameter, state: States, at: Mapping[str, Any]) -> None:
        buffers = self.how.buffers(piece_of(parameter), skips=at["found_inf"] is not None)
        work = Work(buffers, parameter.device, at["found_inf"], self.how.rounding)
        work.begin()
        share, size, factor, number = work.buffers["scalars"]
        work.count(state["step"], number)
        torch.pow(state["step"], _DECAY, out=share)  # 1 − β₂ of this step
        moment: _Moment = (_Factored if parameter.dim() > 1 else _Whole)(parameter, state, work, self.how.chunk)
        moment.learn(share, number)
        size.zero_()
        for _, direction_n in moment.directions(number):
            size.add_(torch.dot(direction_n, direction_n, out=number))
        # The update's root mean square is at most 1.
        torch.sqrt(size.div_(parameter.numel()), out=factor).clamp_(min=1.0).reciprocal_().mul_(-at["lr"])
        w = parameter.detach().view(-1)
        for start, direction_n in moment.directions(number):
            w_part = w[start : start + len(direction_n)]
            w_n = work.writable("weight", w_part)
            if at["weight_decay"]:
                w_n.mul_(1 - at["lr"] * at["weight_decay"])
            w_n.add_(direction_n.mul_(factor))
            work.draw(start, len(w_n))
            work.put(w_part, w_n)


class _Moment(Protocol):
    def learn(self, share: Tensor, number: Tensor) -> None:
        """Take in the gradient; ``number`` is one to work in."""

    def directions(self, number: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first element, the gradient over the root of its second moment) of each chunk, in the scratch."""
        ...


class _Whole:
    def __init__(self, parameter: Parameter, state: States, work: Work, chunk: int) -> None:
        assert parameter.grad is not None
        self.g, self.held, self.work = parameter.grad, state["exp_avg_sq"], work
        self.chunks = [slice(i, min(i + chunk, len(self.g))) for i in range(0, len(self.g), chunk)]

    def _gradient(self, which: slice) -> tuple[Tensor, Tensor]:
        """It in fp32, and as much to work in."""
        g_n = self.work.wide("gradient", self.g[which])
        return g_n, self.work.cut("scratch", len(g_n))

    def learn(self, share: Tensor, number: Tensor) -> None:
        for which in self.chunks:
            g_n, scratch_n = self._gradient(which)
            square_n = torch.mul(g_n, g_n, out=scratch_n).add_(_ADDED)
            self.work.put(self.held[which], torch.lerp(self.held[which], square_n, share, out=square_n))

    def directions(self, number: Tensor) -> Iterator[tuple[int, Tensor]]:
        for which in self.chunks:
            g_n, scratch_n = self._gradient(which)
            yield which.start, torch.rsqrt(self.held[which], out=scratch_n).mul_(g_n)


class _Factored:
    def __init__(self, parameter: Parameter, state: States, work: Work, chunk: int) -> None:
        assert parameter.grad is not None
        *_, a, b = parameter.shape
        self.g_mab, self.work = parameter.grad.reshape(-1, a, b), work
        self.row_ma, self.column_mb = state["exp_avg_sq_row"].view(-1, a), state["exp_avg_sq_col"].view(-1, b)
        step = max(1, chunk // b)
        self.chunks = [slice(i, min(i + step, a)) for i in range(0, a, step)]

    def _gradient(self, i: int, which: slice) -> tuple[Tensor, Tensor]:
        """Rows of one matrix in fp32, and as much to work in."""
        part_rb = self.g_mab[i, which]
        g_n = self.work.wide("gradient", part_rb.reshape(-1))
        return g_n.view(part_rb.shape), self.work.cut("scratch", len(g_n)).view(part_rb.shape)

    def learn(self, share: Tensor, number: Tensor) -> None:
        row_a, column_b, part_b = (self.work.buffers[name] for name in ("rows", "columns", "part"))
        for i in range(len(self.g_mab)):
            column_b.zero_()
            for which in self.chunks:
                g_rb, scratch_rb = self._gradient(i, which)
                square_rb = torch.mul(g_rb, g_rb, out=scratch_rb).add_(_ADDED)
                torch.mean(square_rb, 1, out=row_a[which])
                column_b.add_(torch.sum(square_rb, 0, out=part_b))
            column_b.div_(len(row_a))
            for held, new in ((self.row_ma[i], row_a), (self.column_mb[i], column_b)):
                self.work.put(held, torch.lerp(held, new, share, out=new))

    def directions(self, number: Tensor) -> Iterator[tuple[int, Tensor]]:
        row_a, column_b = self.work.buffers["rows"], self.work.buffers["columns"]
        for i in range(len(self.g_mab)):
            torch.mean(self.row_ma[i], 0, out=number)
            torch.div(self.row_ma[i], number, out=row_a).rsqrt_()
            torch.rsqrt(self.column_mb[i], out=column_b)
            for which in self.chunks:
                g_rb, scratch_rb = self._gradient(i, which)
                direction_rb = torch.mul(g_rb, row_a[which, None], out=scratch_rb).mul_(column_b)
                yield (i * len(row_a) + which.start) * len(column_b), direction_rb.view(-1)
