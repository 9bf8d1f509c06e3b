"""Weights for checks in which their values do not matter: drawn where they are, which takes no time."""

import math
from typing import Any

import torch

from finefit import models
from finefit.nn.arena import home_of


def fill_on_device(model: Any, device: torch.device) -> None:
    """As ``models.fill_random``, by the device's own generator."""
    models.fill_empty(model, device)
    home = home_of(model)
    with torch.no_grad():
        for name, weight in sorted(models.stored_weights(model).items()):
            if len(weight.shape) == 1:
                value = torch.ones(weight.shape, device=device)
            else:
                value = torch.randn(weight.shape, device=device).mul_(1 / math.sqrt(weight.shape[-1]))
            home.put(name, weight, value)
            del value  # or it would be there while the next one is drawn
