"""A loss scaled on one device, gradients stepped on another: what the scaler knows is where it is read."""

import torch
from torch import nn

from finefit.engines.alone import Alone
from finefit.nn.optimizers import Optimizer, Optimizing
from finefit.nn.scaling import Scaler


class Noted:
    """A rule that notes where it was told of an overflow."""

    def __init__(self):
        self.devices = []

    def start(self, parameter):
        return {}

    def shared(self):
        return ()

    def update(self, parameters, states, at):
        self.devices.append(at["found_inf"].device.type)


def begun(parameter):
    optimizer = Optimizer()
    optimizer.rule = Noted()
    optimizer.begin([parameter], Optimizing())
    return optimizer


def test_an_overflow_is_told_where_the_step_is_made():
    """``meta`` stands for another device than the scaler's."""
    parameter = nn.Parameter(torch.zeros(2, 2, device="meta"))
    optimizer = begun(parameter)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert optimizer.rule.devices == ["meta"]


def test_gradients_are_unscaled_by_numbers_of_their_own_device(monkeypatch):
    seen = []

    def noting(self, optimizer, inv_scale, found_inf, allow_fp16):
        seen.append((inv_scale.device.type, found_inf.device.type))
        return {}

    monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", noting)
    parameter = nn.Parameter(torch.zeros(2, 2, device="meta"))
    optimizer = begun(parameter)
    parameter.grad = torch.zeros_like(parameter)
    scaler = Scaler("cpu", Alone())
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    assert seen == [("meta", "meta")]
