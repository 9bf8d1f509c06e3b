"""Rules whose step of an element depends on that element alone, computed in fp32 a chunk at a time, whatever the type.

AdamW (arXiv:1711.05101), its moments as they are or in codes of 8 or 4 bits (``low_bit``); Lion (arXiv:2302.06675, its own
betas); SGD without momentum, as ``torch.optim.SGD`` is by default. Weight decay is decoupled: for SGD that is the same.
For moments in the parameter's own type AdamW is torch's fused kernel instead (``optimizers.AdamW``), unless it must round
by chance.

Shapes: n elements of a chunk.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ..updating import Update, together
from .low_bit import Coded, Plain
from .optimizers import States
from .work import Work, piece_of

At = Mapping[str, Any]
Kept = tuple[Plain | Coded, States, str]


class Formula(Protocol):
    moments: tuple[str, ...]

    def kept(self, at: At) -> tuple[float, ...]:
        """What is kept of each moment from a step to the next: ``step`` gets them times that."""
        ...

    def start(self, parameter: Parameter) -> States: ...

    def count(self, state: States, work: Work, at: At) -> None:
        """Before a tensor's chunks."""
        ...

    def step(self, w_n: Tensor, g_n: Tensor, moments: Sequence[Tensor], work: Work, at: At) -> None:
        """Weights and moments in place; ``moments`` are times what is kept of them."""
        ...


class Adam:
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def kept(self, at: At) -> tuple[float, ...]:
        return tuple(at["betas"])

    def start(self, parameter: Parameter) -> States:
        return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}

    def count(self, state: States, work: Work, at: At) -> None:
        """m / c₁ over √(v / c₂) + ε is m over √v · slope + floor, with slope c₁ / √c₂ and floor ε · c₁."""
        floor, slope, one = work.buffers["scalars"]
        work.count(state["step"], one)
        one.copy_(state["step"])
        for place, beta in zip((floor, slope), at["betas"], strict=True):
            torch.pow(beta, one, out=place).neg_().add_(1)
        torch.div(floor, slope.sqrt_(), out=slope)
        floor.mul_(at["eps"])

    def step(self, w_n: Tensor, g_n: Tensor, moments: Sequence[Tensor], work: Work, at: At) -> None:
        (first_n, second_n), (beta1, beta2), rate = moments, at["betas"], at["lr"]
        floor, slope, _ = work.buffers["scalars"]
        first_n.add_(g_n, alpha=1 - beta1)
        second_n.addcmul_(g_n, g_n, value=1 - beta2)
        under_n = torch.sqrt(second_n, out=work.cut("scratch", g_n.numel())).mul_(slope).add_(floor)
        _decay(w_n, at)
        w_n.addcdiv_(first_n, under_n, value=-rate)


class Lion:
    moments: tuple[str, ...] = ("exp_avg",)
    betas = (0.9, 0.99)

    def kept(self, at: At) -> tuple[float, ...]:
        return (1.0,)

    def start(self, parameter: Parameter) -> States:
        return {}

    def count(self, state: States, work: Work, at: At) -> None:
        return None

    def step(self, w_n: Tensor, g_n: Tensor, moments: Sequence[Tensor], work: Work, at: At) -> None:
        (first_n,), (beta1, beta2) = moments, self.betas
        sign_n = torch.lerp(first_n, g_n, 1 - beta1, out=work.cut("scratch", g_n.numel())).sign_()
        _decay(w_n, at)
        w_n.add_(sign_n, alpha=-at["lr"])
        first_n.lerp_(g_n, 1 - beta2)


class Descent:
    moments: tuple[str, ...] = ()

    def kept(self, at: At) -> tuple[float, ...]:
        return ()

    def start(self, parameter: Parameter) -> States:
        return {}

    def count(self, state: States, work: Work, at: At) -> None:
        return None

    def step(self, w_n: Tensor, g_n: Tensor, moments: Sequence[Tensor], work: Work, at: At) -> None:
        _decay(w_n, at)
        w_n.add_(g_n, alpha=-at["lr"])


def _decay(w_n: Tensor, at: At) -> None:
    if at["weight_decay"]:
        w_n.mul_(1 - at["lr"] * at["weight_decay"])


class Elementwise:
    """The rule of a formula and of how its moments are kept."""

    def __init__(self, formula: Formula, how: Update) -> None:
        self.formula, self.how = formula, how
        self.coded: list[Coded] = []

    def shared(self) -> list[Tensor]:
        return [table for form in self.coded for table in (form.values, form.codes)]

    def start(self, parameter: Parameter) -> States:
        state = self.formula.start(parameter)
        for name, form in self._forms(parameter):
            state |= form.start(name, parameter)
        return state

    def _forms(self, parameter: Parameter) -> list[tuple[str, Plain | Coded]]:
        """Each moment and how it is kept for a tensor of this size."""
        names = self.formula.moments
        if not self.how.codes(parameter.numel()):
            dtype = torch.float32 if self.how.coded_bits else parameter.dtype
            return [(name, Plain(dtype)) for name in names]
        if not self.coded:
            self.coded = [Coded(self.how.coded_bits, i, parameter.device) for i in range(len(names))]
        return list(zip(names, self.coded, strict=True))

    def update(self, parameters: Sequence[Parameter], states: Sequence[States], at: At) -> None:
        found_inf = at["found_inf"]
        buffers = self.how.buffers(together(map(piece_of, parameters)), skips=found_inf is not None)
        work = Work(buffers, parameters[0].device, found_inf, self.how.rounding)
        for parameter, state in zip(parameters, states, strict=True):
            work.begin()
            self.formula.count(state, work, at)
            forms = self._forms(parameter)
            for start in range(0, parameter.numel(), self.how.chunk):
                which = slice(start, min(start + self.how.chunk, parameter.numel()))
                self._chunk(parameter, [(form, state, name) for name, form in forms], which, work, at)

    # One chunk is one call, so that nothing of it is alive while the next is in hand.
    def _chunk(self, parameter: Parameter, forms: Sequence[Kept], which: slice, work: Work, at: At) -> None:
        assert parameter.grad is not None
        w_part = parameter.detach().view(-1)[which]
        g_n, w_n = work.wide("gradient", parameter.grad.reshape(-1)[which]), work.writable("weight", w_part)
        kept = [(f"moment {i}", share) for i, share in enumerate(self.formula.kept(at))]
        held = [form.read(state, name, which, work, how) for (form, state, name), how in zip(forms, kept, strict=True)]
        self.formula.step(w_n, g_n, [one.x_n for one in held], work, at)
        work.draw(which.start, which.stop - which.start)
        work.put(w_part, w_n)
        for (form, _, _), one in zip(forms, held, strict=True):
            form.write(one, work)
