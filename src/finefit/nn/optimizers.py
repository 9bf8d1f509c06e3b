"""The optimizer of a run: which tensors are stepped and when; the *rule* says what a step is.

A rule starts each parameter's states at once, so that memory is the same from the rehearsal on, and steps any set of
parameters, so that they may be stepped together, or one by one as their gradients appear. Rules stand around others:
one that keeps the states elsewhere steps by the rule inside it. The *home* says where parameters are stepped. Declines closures and parameters that come later.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from ..scratch import is_mapped

States = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Optimizing:
    """The user's settings; ``learning_rate`` is the peak of the schedule."""

    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


class Rule(Protocol):
    """One way to make a step of gradients."""

    def start(self, parameter: Parameter) -> States:
        """The states of a parameter before its first step, in their final storage."""
        ...

    def update(self, parameters: Sequence[Parameter], states: Sequence[States], at: Mapping[str, Any]) -> None:
        """One step of these parameters, which have gradients; ``at`` is their group: lr, weight_decay, betas, eps.

        ``at["found_inf"]`` is a tensor that is 1 where a loss scaler found a gradient that is not finite, so that
        nothing must change; None without a scaler.
        """
        ...

    def shared(self) -> Sequence[Tensor]:
        """Tables that the states of all parameters share; there from the first ``start`` on, and in no checkpoint."""
        ...


class AdamW:
    """Two moments in the parameter's own type and a step count, by torch's fused kernel (arXiv:1711.05101)."""

    def start(self, parameter: Parameter) -> States:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }

    def shared(self) -> Sequence[Tensor]:
        return ()

    def update(self, parameters: Sequence[Parameter], states: Sequence[States], at: Mapping[str, Any]) -> None:
        first, second, count = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        grads = [p.grad for p in parameters if p.grad is not None]
        beta1, beta2 = at["betas"]
        adamw(list(parameters), grads, first, second, [], count, fused=True, found_inf=at["found_inf"], amsgrad=False,
              beta1=beta1, beta2=beta2, lr=at["lr"], weight_decay=at["weight_decay"], eps=at["eps"], maximize=False)  # fmt: skip


class Home:
    """Where parameters are stepped: here, where the model has them, each by itself."""

    def of(self, parameter: Parameter) -> Parameter:
        """What is stepped in place of a parameter of the model."""
        return parameter

    def computes_on(self, parameter: Parameter) -> torch.device:
        """Where the model needs the parameter."""
        return parameter.device

    def rows(self, parameter: Parameter) -> tuple[int, int]:
        """Which rows of the whole parameter are stepped here."""
        return 0, parameter.shape[0] if parameter.dim() else 1

    def before(self, is_last: bool) -> None:
        """A micro-batch begins, which is the step's last one or not."""

    def gather(self) -> None:
        """Wait until the gradients of all that is stepped are whole."""

    def back(self, parameters: Sequence[Parameter]) -> None:
        """Give the model what was stepped."""

    def over(self) -> None:
        """All is stepped."""

    def cleared(self) -> None:
        """The gradients are used up."""

    def whole(self) -> AbstractContextManager[None]:
        """While it lasts the model may be called by itself."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where in a flat tensor, of this rank's, elements of a parameter lie one after the other: ``numel`` from ``at`` on, which
    are those from ``start`` on of the whole parameter."""

    flat: Parameter
    place: str
    """Which flat tensor it is, and whose."""
    at: int
    start: int
    numel: int
    shape: tuple[int, ...]


class Optimizer(torch.optim.Optimizer):
    """Empty until ``begin``; techniques set ``rule`` and ``home`` before."""

    found_inf: Tensor  # there for the time of a scaler's step, or where the step is in backward
    _step_supports_amp_scaling = True  # the scaler hands over found_inf instead of asking the device for it

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})
        self.rule: Rule = AdamW()
        self.home = Home()
        self.at_once = 2**62  # elements stepped together
        self.completing: list[Callable[[Mapping[Parameter, Parameter]], None]] = []
        """What else makes gradients of all that is stepped whole, once their home has gathered them."""
        self.stepped: dict[Parameter, Parameter] = {}  # by the model's
        self.updated: set[Parameter] = set()
        """Of what is stepped, all that has had a gradient: wherever that was, and however soon it was gone."""
        self.is_halfway = False
        """Whether some of what is stepped has been, and the step is not over."""
        self.beside: list[Tensor] = []
        """Single numbers that a rule keeps of no parameter, from ``begin`` on; no checkpoint has them."""

    def begin(self, parameters: Sequence[Parameter], optimizing: Optimizing) -> None:
        """Take on ``parameters``, their states in place; no decay on norms and biases."""
        settings = {"lr": optimizing.learning_rate, "betas": optimizing.betas, "eps": optimizing.eps}
        self.param_groups.clear()
        self.stepped = {p: self.home.of(p) for p in parameters}
        for matrices, decay in ((True, optimizing.weight_decay), (False, 0.0)):
            if found := [one for p, one in self.stepped.items() if (p.dim() > 1) is matrices]:
                self.add_param_group({"params": found, "weight_decay": decay, **settings})
        for one in self.stepped.values():
            self.state[one] = self.rule.start(one)

    def states_of(self, parameter: Parameter) -> States:
        """Of a parameter of the model; empty where it does not train."""
        one = self.stepped.get(parameter)
        return self.state[one] if one is not None else {}

    def kept_in(self, parameter: Parameter) -> torch.dtype:
        """The type in which its updates are added up."""
        return parameter.dtype

    def stretch(self, parameter: Tensor) -> Stretch | None:
        """Of a parameter of the model that is stepped in a flat tensor; of any other None."""
        return None

    def restored(self) -> None:
        """What is stepped has other values: if that is a copy of the model's, give it to the model."""

    def held(self, parameter: Parameter) -> list[Tensor]:
        """Its states that take memory of its device: not what is on a host beside it, or mapped from a disk."""
        states, device = self.states_of(parameter).values(), self.home.computes_on(parameter)
        return [t for t in states if t.device == device and not is_mapped(t)]

    def has_updated(self, parameter: Parameter) -> bool:
        """Whether a parameter of the model has had a gradient that it was stepped by."""
        one = self.stepped.get(parameter)
        return one in self.updated or (one is not None and not one.numel())  # another rank has its rows

    def gradients(self) -> list[Parameter]:
        """What has a gradient to clip and to step by, when backward is over."""
        self.home.gather()
        for complete in self.completing:
            complete(self.stepped)
        return [one for one in self.stepped.values() if one.grad is not None]

    def all_held(self) -> list[Tensor]:
        """The same of all parameters, and the tables they share."""
        return [*self.rule.shared(), *(t for parameter in self.stepped for t in self.held(parameter))]

    def own(self) -> dict[str, list[Tensor]]:
        """What an engine holds between steps that is in no parameter's name, by component."""
        return {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for some in _batches([p for p in group["params"] if p.grad is not None and p.numel()], self.at_once):
                self.update(group, some)
                self.home.back(some)
        self.home.over()

    def update(self, group: Mapping[str, Any], parameters: Sequence[Parameter]) -> None:
        """One step of some parameters of a group."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:  # the scaler's is on the model's device, which may not be where steps are made
            found_inf = found_inf.to(parameters[0].device)
        at = {**group, "found_inf": found_inf}
        self.updated.update(parameters)
        self.is_halfway = True
        self.rule.update(parameters, [self.state[p] for p in parameters], at)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.home.cleared()
        self.is_halfway = False


def _batches(parameters: Sequence[Parameter], most: int) -> Iterator[list[Parameter]]:
    """In order, as many together as have that many elements; a larger one is alone."""
    some: list[Parameter] = []
    for p in parameters:
        if some and sum(q.numel() for q in some) + p.numel() > most:
            yield some
            some = []
        some.append(p)
    if some:
        yield some
