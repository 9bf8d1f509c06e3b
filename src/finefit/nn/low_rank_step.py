"""APOLLO (arXiv:2412.05270): a gradient scaled channel by channel as AdamW would in a random low-rank space of it.

The moments are of P·G with P (r, a) of normal numbers with variance 1/r, drawn again every 200 steps from the tensor's own
number and never kept. A channel, of the matrix's longer side, is scaled by how much AdamW changes its norm there; the
rank-1 kind (APOLLO-Mini) scales the whole matrix so, and by √128. The norm of an update grows by at most 1 % a step. The
numbers are those of the authors' example (rank 256, scale 1; rank 1, scale 128). Other tensors, and matrices with a side
of no more than the rank, are stepped by AdamW.

Moments are corrected for their start before the norms are taken, the update's growth is limited after.

Shapes: G (a, b) with s = min(a, b), l = max(a, b), rank r; in chunks of rows, n elements at once.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..updating import RANK, Update
from .elementwise import Adam, Elementwise
from .optimizers import AdamW, Rule, States
from .work import Work, mixed, piece_of

GAP, GROWTH = 200, 1.01
_SCALE = {"apollo": 1.0, "apollo_mini": math.sqrt(128)}
_LEAST, _TINY = 1e-8, torch.finfo(torch.float32).tiny  # beside a norm that is divided by; the least one
_APART = 0x9E3779B1 - 2**32  # between the numbers of two tensors, of two draws


class Apollo:
    def __init__(self, how: Update) -> None:
        self.how, self.rank = how, RANK[how.kind]
        plain = Update("adamw", how.rounding, how.chunk)
        self.others: Rule = AdamW() if plain.is_fused else Elementwise(Adam(), plain)
        self.numbers: dict[Parameter, int] = {}
        """Of each projected tensor, in the order they are started: what its projections are drawn from."""

    def shared(self) -> Sequence[Tensor]:
        return self.others.shared()

    def start(self, parameter: Parameter) -> States:
        if not self.how.projects(piece_of(parameter)):
            return self.others.start(parameter)
        self.numbers.setdefault(parameter, len(self.numbers))
        long = max(parameter.shape)
        low = (self.rank, long) if _is_wide(parameter) else (long, self.rank)
        zeros = parameter.detach().new_zeros
        return {
            "step": zeros((), dtype=torch.float32), "norm": zeros((), dtype=torch.float32),
            "exp_avg": zeros(low, dtype=torch.float32), "exp_avg_sq": zeros(low, dtype=torch.float32),
        }  # fmt: skip

    def update(self, parameters: Sequence[Parameter], states: Sequence[States], at: Mapping[str, Any]) -> None:
        both = list(zip(parameters, states, strict=True))
        if others := [(p, state) for p, state in both if p not in self.numbers]:
            self.others.update([p for p, _ in others], [state for _, state in others], at)
        for p, state in both:
            if p in self.numbers:
                self._step(p, state, at)

    # One tensor is one call, so that its buffers are gone when the next one's are made.
    def _step(self, parameter: Parameter, state: States, at: Mapping[str, Any]) -> None:
        buffers = self.how.buffers(piece_of(parameter), skips=at["found_inf"] is not None)
        work = Work(buffers, parameter.device, at["found_inf"], self.how.rounding)
        work.begin()
        _Step(parameter, state, work, self.how).take(self.numbers[parameter], at)


def _is_wide(parameter: Tensor) -> bool:
    """Whether rows are projected away, so that a channel is a column."""
    return parameter.shape[0] <= parameter.shape[1]


class _Step:
    def __init__(self, parameter: Parameter, state: States, work: Work, how: Update) -> None:
        assert parameter.grad is not None
        self.w_ab, self.g_ab, self.state, self.work = parameter.detach(), parameter.grad, state, work
        self.wide, self.rank, self.kind = _is_wide(parameter), RANK[how.kind], how.kind
        a, b = parameter.shape
        rows = max(1, how.chunk // b)
        self.chunks = [slice(i, min(i + rows, a)) for i in range(0, a, rows)]
        self.low = work.buffers["low"].view(state["exp_avg"].shape)
        self.direction = work.buffers["direction"].view(state["exp_avg"].shape)
        self.over = 0 if self.wide else 1  # the dimension of the low-rank space

    def take(self, number: int, at: Mapping[str, Any]) -> None:
        first, second, size, factor, free = self.work.buffers["scalars"]
        self.work.count(self.state["step"], free)
        self._project(self._projection(number, free))
        self._adam(first, second, at)
        self._scale(size, factor, free)
        factor.mul_(-at["lr"] * _SCALE[self.kind])
        channel_l = self.work.buffers["channels"].mul_(factor)
        for which in self.chunks:
            self._apply(which, channel_l, at)

    def _projection(self, number: int, free: Tensor) -> Tensor:
        """P, as (r, s) or, from the right, (s, r), by Box and Muller from 16 bits twice."""
        bits, turn, p = (self.work.buffers[name] for name in ("bits", "turn", "projection"))
        x, free_bits = bits.view(torch.int32), turn.view(torch.int32)
        torch.arange(len(bits), out=x)
        # Draws are counted from the first step on, which is the first of its count.
        torch.sub(self.state["step"], 1, out=free).div_(GAP).floor_().clamp_(min=0)
        free_bits.copy_(free).add_(number % 2**15 * 2**16).mul_(_APART)
        mixed(x.add_(free_bits), free_bits)
        angle = p.copy_(torch.bitwise_and(x, 0xFFFF, out=free_bits)).mul_(2 * math.pi / 2**16).cos_()
        uniform = turn.copy_(x.bitwise_right_shift_(16).bitwise_and_(0xFFFF)).add_(0.5).div_(2**16)
        angle.mul_(uniform.log_().mul_(-2 / self.rank).sqrt_())
        return angle.view((self.rank, -1) if self.wide else (-1, self.rank))

    def _rows(self, which: slice) -> Tensor:
        """The gradient's in fp32."""
        part_ab = self.g_ab[which]
        return self.work.wide("gradient", part_ab.reshape(-1)).view(part_ab.shape)

    def _project(self, projection: Tensor) -> None:
        """The low-rank gradient, and the squared norms of its channels as they are."""
        norm_l = self.work.buffers["norms"]
        if self.wide:
            part_l = self.work.buffers["part"]
            self.low.zero_()
            norm_l.zero_()
            for which in self.chunks:
                g_nb = self._rows(which)
                self.low.addmm_(projection[:, which], g_nb)
                torch.linalg.vector_norm(g_nb, 2, 0, out=part_l)
                norm_l.addcmul_(part_l, part_l)
            return
        for which in self.chunks:
            g_nb = self._rows(which)
            torch.mm(g_nb, projection, out=self.low[which])
            torch.linalg.vector_norm(g_nb, 2, 1, out=norm_l[which])
        norm_l.mul_(norm_l)

    def _adam(self, first: Tensor, second: Tensor, at: Mapping[str, Any]) -> None:
        """What AdamW makes of the low-rank gradient, in ``direction``."""
        step, low = self.state["step"], self.low.view(-1)
        for place, beta in zip((first, second), at["betas"], strict=True):
            torch.pow(beta, step, out=place).neg_().add_(1)
        beta1, beta2 = at["betas"]
        held, out = self.state["exp_avg_sq"].view(-1), self.direction.view(-1)
        x = self.work.writable("moment", held).mul_(beta2).addcmul_(low, low, value=1 - beta2)
        torch.div(x, second, out=out).sqrt_().add_(at["eps"])
        self.work.put(held, x)
        held = self.state["exp_avg"].view(-1)
        x = self.work.writable("moment", held).lerp_(low, 1 - beta1)
        torch.div(x, out, out=out).div_(first)
        self.work.put(held, x)

    def _scale(self, size: Tensor, factor: Tensor, free: Tensor) -> None:
        """What each channel is scaled by, and in ``factor`` what all are so that the update does not grow too much."""
        channel_l, square_l = self.work.buffers["channels"], self.work.buffers["norms"]
        free_l = self.direction.view(-1)[: len(channel_l)]
        if self.kind == "apollo_mini":
            torch.linalg.vector_norm(self.direction, out=factor)
            torch.linalg.vector_norm(self.low, out=size)
            channel_l.copy_(factor.div_(size.add_(_LEAST)))
        else:
            torch.linalg.vector_norm(self.direction, 2, self.over, out=channel_l)
            torch.linalg.vector_norm(self.low, 2, self.over, out=free_l)
            channel_l.div_(free_l.add_(_LEAST))
        torch.dot(torch.mul(channel_l, channel_l, out=free_l), square_l, out=size).sqrt_().clamp_(min=_TINY)
        before = self.state["norm"]
        torch.eq(before, 0, out=free)  # the first update may have any norm
        torch.mul(before, GROWTH, out=factor).div_(size).add_(free).clamp_(max=1.0)
        self.work.put(before, size.mul_(factor))

    def _apply(self, which: slice, channel_l: Tensor, at: Mapping[str, Any]) -> None:
        w_part, g_nb = self.w_ab[which].view(-1), self._rows(which)
        w_n = self.work.writable("weight", w_part)
        if at["weight_decay"]:
            w_n.mul_(1 - at["lr"] * at["weight_decay"])
        w_n.view(g_nb.shape).addcmul_(g_nb, channel_l if self.wide else channel_l[which, None])
        self.work.draw(which.start * g_nb.shape[1], len(w_n))
        self.work.put(w_part, w_n)
