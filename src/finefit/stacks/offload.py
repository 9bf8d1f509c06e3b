"""Saved tensors kept on the host between forward and backward, as torchtune's ``OffloadActivations`` does.

Follows ``torchtune/training/_activation_offloading.py`` 0.5 with streams: what is saved for backward and is neither a
parameter nor small leaves the device, the last few of them late; backward brings each back, and lets go of it one step
after it was used.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SMALLEST_BYTES, STASH = 1024, 5


@dataclass(slots=True)
class _Away:
    """A tensor on the host, by what it takes to bring it back."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Offloaded(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        self.count = 0
        self.leaving: dict[int, Tensor] = {}
        self.back: dict[int, Tensor] = {}

    def _pack(self, tensor: Tensor) -> Tensor | _Away:
        self.count += 1
        for number in [n for n in self.leaving if n <= self.count - STASH]:
            del self.leaving[number]
        small = tensor.numel() * tensor.element_size() < SMALLEST_BYTES
        if small or isinstance(tensor, nn.Parameter | nn.Buffer):
            return tensor
        self.leaving[self.count] = tensor
        return _Away(self.count, tensor.shape, tensor.stride(), tensor.dtype)

    def _unpack(self, held: Tensor | _Away) -> Tensor:
        if not isinstance(held, _Away):
            return held
        before = list(self.back)
        if held.number in self.leaving:
            tensor = self.leaving[held.number]
        else:
            tensor = torch.empty_strided(held.size, held.stride, dtype=held.dtype)
            self.back[held.number] = tensor
        node = torch._C._current_autograd_node()

        def done(*_: Any) -> None:
            self.leaving.clear()
            for number in before:
                self.back.pop(number, None)

        node.register_hook(done)
        return tensor


class Plain(torch.autograd.graph.saved_tensors_hooks):
    """Inside, tensors are saved as usual."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)
