"""The second witness beside the first: a plan's largest micro-batch predicted, and simulated on the real model. Torch-free.

A simulation that fails leaves a sentence, not an error: the plan stands on its prediction then.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .batches import Batches
from .candidates import rewrite
from .errors import EngineError
from .footprint import Footprint
from .hardware import HardwareSpec
from .layout import Micro
from .plan import Plan
from .predict import footprint
from .spec import ModelSpec
from .techniques import Accumulation, Packing
from .witness import Simulated, Simulator, workspace_bytes


@dataclass(frozen=True, slots=True)
class Verified:
    micro: Micro
    predicted: Footprint
    simulated: Simulated | None
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        found = self.simulated
        return {
            "micro_batch": {"tokens": self.micro.tokens, "longest": self.micro.longest, "labelled": self.micro.labelled},
            "predicted": self.predicted.to_json(), "simulated": found.footprint.to_json() if found else None,
            "allocated_bytes": found.allocated_bytes if found else None,
            "reserved_bytes": found.reserved_bytes if found else None,
            "capacity_bytes": found.capacity_bytes if found else None,
            "seconds": found.seconds if found else None, "why_not": self.why_not,
        }  # fmt: skip


def verify(
    plan: Plan, config: Mapping[str, Any], model: ModelSpec, batches: Batches, hardware: HardwareSpec
) -> Verified:
    """Both witnesses of the micro-batch that needs most; ``config`` is the model's config.json."""
    split = next(t for t in plan.techniques if isinstance(t, Accumulation))
    padded = not any(isinstance(t, Packing) for t in plan.techniques)
    work = batches.work(split.micro_batch_size, split.micro_batch_tokens, padded)
    both = [(footprint(rewrite(model, micro, plan.techniques)), micro) for micro in work.largest]
    predicted, micro = max(both, key=lambda pair: pair[0].peak_bytes)
    workspace = workspace_bytes(hardware.name) if hardware.kind == "cuda" else 0
    question = {
        "config": dict(config), "techniques": [t.to_json() for t in plan.techniques],
        "micro": [micro.tokens, micro.longest, micro.labelled], "kind": hardware.kind, "workspace_bytes": workspace,
    }  # fmt: skip
    with Simulator() as simulator:
        try:
            return Verified(micro, predicted, simulator.answered(question))
        except EngineError as error:
            return Verified(micro, predicted, None, error.message)
