"""A rule around another: each parameter is stepped as soon as its gradient is whole, and the gradient freed at once.

As LOMO does with SGD (arXiv:2306.09782, section 3.1), torch's tutorial "how to save memory by fusing the optimizer step into
the backward pass" and torchtune's ``OptimizerInBackwardWrapper`` do with any optimizer: a hook that autograd calls when all uses
of a parameter have added to its gradient. That is after the last product that reads the parameter, so what is computed
later in backward never sees the new value.

The norm is gathered on the way, and with it whether it is finite: a gradient that is not, and all after it, are not
applied. Nothing of that asks the device for a number, and nothing is allocated. Declines what must know all gradients
first: clipping, a loss scaler, a sum over micro-batches or ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..engines.alone import Alone
from .optimizers import Optimizer, States


class StepInBackward:
    """Stands around ``optimizer.rule``; ``norm`` ends a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.rule = optimizer, optimizer.rule
        self.groups: dict[Parameter, dict[str, Any]] = {}
        self.stepped: set[Parameter] = set()
        self.parts: dict[torch.dtype, Tensor] = {}
        """The norm of the gradient in hand, in its own type: a reduction into a wider one copies it first."""

    def start(self, parameter: Parameter) -> States:
        if not self.parts:
            self.total, self.rest = (torch.zeros((), dtype=torch.float32, device=parameter.device) for _ in range(2))
            self.optimizer.found_inf = torch.zeros_like(self.total)
            self.optimizer.beside += [self.total, self.rest, self.optimizer.found_inf]
        if parameter.dtype not in self.parts:
            part = self.parts[parameter.dtype] = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            self.optimizer.beside.append(part)
        parameter.register_post_accumulate_grad_hook(self._step)
        return self.rule.start(parameter)

    def shared(self) -> Sequence[Tensor]:
        return self.rule.shared()

    def update(self, parameters: Sequence[Parameter], states: Sequence[States], at: Mapping[str, Any]) -> None:
        self.rule.update(parameters, states, at)

    @torch.no_grad()
    def _step(self, parameter: Parameter) -> None:
        """Called by autograd with the whole gradient in place."""
        if parameter in self.stepped:
            raise RuntimeError("a parameter was stepped in backward and has a second gradient in the same step")
        self.stepped.add(parameter)
        part = self.parts[parameter.dtype]
        assert parameter.grad is not None
        torch.linalg.vector_norm(parameter.grad, out=part)
        self.total.hypot_(part)
        torch.sub(self.total, self.total, out=self.rest)  # 0, or no number where the norm is not finite
        torch.ne(self.rest, self.rest, out=self.optimizer.found_inf)
        self.optimizer.update(self._group(parameter), [parameter])
        parameter.grad = None

    def _group(self, parameter: Parameter) -> dict[str, Any]:
        """The group itself, so that its settings are this step's."""
        if not self.groups:
            self.groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        return self.groups[parameter]

    def norm(self, parameters: Sequence[Parameter], world: Alone) -> Tensor:
        """2-norm of all gradients since the last call."""
        norm = self.total.clone()
        self.total.zero_()
        self.optimizer.found_inf.zero_()
        self.stepped.clear()
        return norm
