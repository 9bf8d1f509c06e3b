"""Plan to run: the model on meta, techniques applied in order, weights filled in, the optimizer's states in place.

Optimizer states exist before the first step, so memory is the same from the rehearsal on and a resumed run starts
from the same shape as a fresh one.
"""

from collections.abc import Sequence
from typing import Any

import torch

from . import models
from .engines.alone import Alone
from .nn.optimizers import Optimizing
from .parts import cuts_of, local, put
from .run import Run, trainable
from .techniques import Technique, in_order


def build(
    config: Any, techniques: Sequence[Technique], fill: models.Fill, device: torch.device, optimizing: Optimizing,
    seed: int = 0, world: Alone | None = None,
) -> Run:  # fmt: skip
    """A run ready for its first micro-batch."""
    run = rewritten(config, techniques, device, world)
    load(run, fill, seed)
    run.optimizer.begin(trainable(run.model), optimizing)
    return run


def load(run: Run, fill: models.Fill, seed: int = 0) -> None:
    """Give every weight its value: those of the base by ``fill``, the adapters' as they start."""
    fill(run.model, run.at_rest or run.device)
    if run.at_rest not in (None, run.device):
        models.move_whole(run.model, run.device)
    reset_adapters(run.model, seed)


def rewritten(config: Any, techniques: Sequence[Technique], device: torch.device, world: Alone | None = None) -> Run:
    """The model on meta with all techniques applied; nothing has a storage yet."""
    run = Run(models.on_meta(config), device, world or Alone())
    ordered = in_order(tuple(techniques))
    for technique in ordered:
        technique.apply(run)
    for technique in ordered:
        technique.divide(run)
    return run


def reset_adapters(model: Any, seed: int) -> None:
    """Draw the adapters' start, the same on every machine for a seed: on the CPU, in the order of the modules."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for module in model.modules():
        for shape in getattr(module, "adapters_elsewhere", ()):
            torch.nn.init.kaiming_uniform_(torch.empty(shape), a=5**0.5, generator=generator)  # as if they were here
        if hasattr(module, "lora_A"):
            with torch.no_grad():
                cut = cuts_of(module).get("lora_A")
                drawn = torch.empty(cut.shape if cut else module.lora_A.shape)
                torch.nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator)
                put(module.lora_A, cut.of(drawn) if cut else drawn)
                del drawn  # or it would be there while the next one is drawn
                local(module.lora_B).zero_()
