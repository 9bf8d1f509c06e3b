"""Optimizer states on a disk: pages of a file, mapped, so that they are tensors as others and their memory the system's.

A rule stands inside and makes the steps, one parameter at a time: its pages are called for while the one before it is
stepped, and let go after, with its gradient's where that is mapped too. Scalars stay where they are. Exact: the same kernels on the same numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..scratch import Scratch, call_for, let_go
from .optimizers import Rule, States


class Mapped:
    """``rule`` with its states on ``scratch``."""

    def __init__(self, rule: Rule, scratch: Scratch) -> None:
        self.rule, self.scratch = rule, scratch

    def start(self, parameter: Parameter) -> States:
        return {
            key: self.scratch.mapped(tensor) if tensor.dim() else tensor
            for key, tensor in self.rule.start(parameter).items()
        }

    def shared(self) -> Sequence[Tensor]:
        return self.rule.shared()

    def update(self, parameters: Sequence[Parameter], states: Sequence[States], at: Mapping[str, Any]) -> None:
        for i, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
            for tensor in _tensors(states[i + 1 : i + 2]):
                call_for(tensor)
            self.rule.update([parameter], [state], at)
            for tensor in (*_tensors([state]), *([] if parameter.grad is None else [parameter.grad])):
                let_go(tensor)


def _tensors(states: Sequence[States]) -> list[Tensor]:
    return [tensor for state in states for tensor in state.values()]
