"""A scaler of the loss whose gradients may be elsewhere than the loss: summed on the host of its device."""

from typing import Any

import torch
from torch import Tensor

from ..engines.alone import Alone


class Scaler(torch.amp.GradScaler):
    """torch's own copies its numbers to other devices without waiting for them, and a processor would read them too soon
    (``_MultiDeviceReplicator`` of torch/amp/grad_scaler.py): here they are there first. All gradients are on one device.
    What is not finite on one rank is so for all, or they would not make the same step.
    """

    def __init__(self, kind: str, world: Alone) -> None:
        super().__init__(kind)
        self.world = world

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        there: Any = next((gradient.device for gradient in gradients), inv_scale.device)
        found = super()._unscale_grads_(optimizer, inv_scale.to(there), found_inf.to(there), allow_fp16)
        for one in found.values():
            self.world.most(one)
        return found
