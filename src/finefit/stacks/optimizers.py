"""Optimizers by what they hold: torch's own, and states in fewer bits as bitsandbytes and torchao keep them.

bitsandbytes ``optim/optimizer.py`` (Optimizer2State): two uint8 tensors and two scales a block of 256 elements (2,048
before 0.44); tensors under 4,096 elements keep fp32. Its kernels update in place. Moments in a gradient's low-rank
space: ``low_rank``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..foreign import ForeignRun
from .low_rank import LowRank, TrainedInt8, projected

_SMALLEST_PACKED = 4096
_BLOCK = 256


def optimizer_of(model: nn.Module, run: ForeignRun) -> "Optimizers":
    """One optimizer, or one for each tensor where the step is taken inside backward."""
    trained = [p for p in model.parameters() if p.requires_grad]
    ids = {id(w) for w in projected(model)} if run.optimizer == "galore_adamw" else set()

    def make(parameters: list[nn.Parameter]) -> Any:
        return Projected(parameters, run, ids) if ids else _one(parameters, run)

    packed = _taking(model, run, ids)
    if not run.step_in_backward:
        return Optimizers([make(trained), *packed])
    single = {p: make([p]) for p in trained}

    def update(p: Tensor) -> None:
        single[p].step()  # type: ignore[index]
        p.grad = None

    for p in trained:
        p.register_post_accumulate_grad_hook(update)
    return Optimizers([*single.values(), *packed])


def _taking(model: nn.Module, run: ForeignRun, ids: set[int]) -> "list[Projected]":
    """One for each layer of trained bytes, which hands its gradient over itself."""
    out = []
    for layer in model.modules():
        if isinstance(layer, TrainedInt8):
            out.append(Projected([layer.weight], run, ids))
            layer.update = out[-1].taking(layer)
    return out


class Optimizers(list[Any]):
    """Steps as one."""

    def step(self) -> None:
        for one in self:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self:
            one.zero_grad(set_to_none=set_to_none)


def _one(parameters: list[nn.Parameter], run: ForeignRun) -> Any:
    how: dict[str, Any] = {"foreach": run.foreach}
    if run.optimizer in ("adamw", "adam") and not run.paged and run.optimizer_bits in (16, 32):
        if not run.foreach:
            how = {"fused": True}
        if run.optimizer_bits == 32 and any(p.dtype is not torch.float32 for p in parameters):
            return Packed(parameters, bits=32, moments=2)
        return torch.optim.AdamW(parameters, lr=1e-4, **how)
    if run.optimizer.startswith("sgd"):
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9 if "momentum" in run.optimizer else 0.0, **how)
    if run.optimizer == "adafactor":
        return Factored(parameters)
    moments = 1 if run.optimizer in ("lion", "muon", "adagrad", "rmsprop") else 2
    return Packed(parameters, bits=0 if run.paged else run.optimizer_bits, moments=moments)


class Packed(torch.optim.Optimizer):
    """``moments`` states of ``bits`` a parameter, updated in place; 0 bits: states that are not on the device."""

    def __init__(self, parameters: list[nn.Parameter], bits: int, moments: int) -> None:
        super().__init__(parameters, {})
        self.bits, self.moments = bits, moments

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and not self.state[p] and self.bits:
                self.state[p] = self._named(p)

    def _named(self, p: Tensor) -> dict[str, Tensor]:
        return {f"{i} {j}": t for i in range(self.moments) for j, t in enumerate(self._state(p))}

    def _state(self, p: Tensor) -> list[Tensor]:
        n = p.numel()
        if self.bits >= 16 or n < _SMALLEST_PACKED:
            dtype = torch.float32 if self.bits != 16 else p.dtype
            return [p.new_empty(n, dtype=dtype)]
        packed = p.new_empty(n * self.bits // 8, dtype=torch.uint8)
        return [packed, p.new_empty(-(-n // _BLOCK), dtype=torch.float32)]


class Projected(Packed):
    """Packed moments, of the low-rank gradient for the weights with these ids."""

    def __init__(self, parameters: list[nn.Parameter], run: ForeignRun, weights: set[int]) -> None:
        super().__init__(parameters, run.optimizer_bits, moments=2)
        self.weights = weights
        self.low = LowRank(run.rank, run.quantised == "int8", self._named)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One tensor after another; each lets go of its gradient for the low-rank one."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and id(p) in self.weights:
                grad, p.grad = p.grad, None
                self.low.update(p, grad, self.state[p])
        super().step()

    def taking(self, layer: TrainedInt8) -> Any:
        """What a layer of bytes does with its gradient: the weight is unpacked for the update and packed again."""

        def update(grad: Tensor) -> None:
            whole = layer.dense(grad.dtype)
            self.low.update(whole, grad, self.state[layer.weight])
            layer.pack_again(whole)

        return update


class Factored(torch.optim.Optimizer):
    """Adafactor without momentum (arXiv:1804.04235): rows and columns of the second moment; works on one tensor's fp32
    copy, update and square at a time (``transformers.optimization.Adafactor``)."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            grad = p.grad.float()
            if not self.state[p]:
                sizes = [p.shape[:-1], p.shape[:-2] + p.shape[-1:]] if p.dim() > 1 else [p.shape]
                names = ("row", "column")
                self.state[p] = {n: p.new_empty(s, dtype=torch.float32) for n, s in zip(names, sizes, strict=False)}
            copy = p.float() if p.dtype is not torch.float32 else p
            update = grad**2 + 1e-30
            update = update * grad
            del copy, update, grad
