"""Weights, gradients and states in shards among ranks, by FSDP2 (torch's ``fully_shard``): a unit a block, one for all else.

The model is sharded on meta, so no rank ever holds it whole: shards are given storage, and then their values. All that is
read outside the blocks (embedding, last norm, the head that the loss multiplies with by itself) is gathered by a module
around the model, whose forward is the step's. Gradients are summed, not averaged: the loss is already a part of the whole
global batch's. What is stepped are the shards as plain tensors, so that any rule of an optimizer takes them.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn import Parameter

from ..parts import local, rows_of
from ..run import Forward, Run, own_blocks
from .blockwise import Tables
from .optimizers import Home


class Whole(nn.Module):
    """Around a model: its forward is that of a step, with the loss."""

    def __init__(self, model: Any, run_through: Forward) -> None:
        super().__init__()
        self.model, self.run_through = model, run_through

    def forward(self, *args: Any) -> Tensor:
        return self.run_through(*args)


def half_of(run: Run) -> torch.dtype | None:
    """The type that autocast computes in, where it is on."""
    kind = run.device.type
    with run.context():
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def shard(run: Run, mesh: DeviceMesh, keeps_whole: bool) -> None:
    """``keeps_whole``: blocks stay gathered from their forward to the end of backward. ``mesh``: (shards,), or (replicas,
    shards)."""
    half = half_of(run)
    if half:
        run.context, run.passed = nullcontext, half  # what is gathered is cast, nothing else
    policy = MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False)
    offload = OffloadPolicy() if run.at_rest is None else CPUOffloadPolicy(pin_memory=run.device.type == "cuda")
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    whole = {p for m in run.model.modules() if isinstance(m, Tables) for p in m.parameters()}
    whole |= {p for p in run.model.parameters() if not p.dim()}
    for block in own_blocks(run.model):
        fully_shard(block, reshard_after_forward=not keeps_whole, ignored_params=whole, **how)
    root: Any = fully_shard(Whole(run.model, run.forward), ignored_params=whole, **how)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    run.optimizer.home = Shards(root, keeps_whole, run.device)
    run.forward = _Through(root)
    run.world.lockstep = True
    run.world.parts.append("shards")


class _Through:
    """A step's forward by the module around the model; without a backward to come, what was gathered is let go of."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def __call__(self, *args: Any) -> Tensor:
        total: Tensor = self.root(*args)
        if not torch.is_grad_enabled():
            _let_go(self.root)
        return total


def _let_go(root: Any) -> None:
    """Of all that was gathered."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Shards(Home):
    """What is stepped of each parameter is this rank's shard."""

    def __init__(self, root: Any, keeps_whole: bool, device: torch.device) -> None:
        self.root, self.keeps_whole, self.device = root, keeps_whole, device
        self.shards: dict[Parameter, Parameter] = {}

    def of(self, parameter: Parameter) -> Parameter:
        if not self.shards:  # shorter shards are padded once, which is not to happen when they are stepped already
            self.root.unshard()
            self.root.reshard()
        return self.shards.setdefault(parameter, Parameter(local(parameter.detach()), requires_grad=False))

    def computes_on(self, parameter: Parameter) -> torch.device:
        return self.device

    def rows(self, parameter: Parameter) -> tuple[int, int]:
        return rows_of(parameter)

    def before(self, is_last: bool) -> None:
        if self.keeps_whole:
            self.root.set_reshard_after_backward(is_last)

    def gather(self) -> None:
        for parameter, own in self.shards.items():
            own.grad = None if parameter.grad is None else local(parameter.grad)

    def cleared(self) -> None:
        for parameter in self.shards:
            parameter.grad = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Blocks are gathered as they are called; what is outside them has nobody else to do so."""
        self.root.unshard()
        try:
            yield
        finally:
            _let_go(self.root)
