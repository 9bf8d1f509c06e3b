"""The techniques, in the order they are applied. A new one is a file here and a place in this list."""

from collections.abc import Mapping
from typing import Any

from .accumulation import Accumulation
from .activation_offload import ActivationOffload
from .allocator import Allocator
from .base import NotAsPlanned, Technique, Unsuitable
from .checkpointing import Checkpointing
from .clipping import Clipping
from .context_parallel import ContextParallel
from .data_parallel import DataParallel
from .fp32_islands import Fp32Islands
from .fused_backward_step import FusedBackwardStep
from .fused_loss import FusedLoss
from .fused_ops import FusedOps
from .lora import Lora
from .optimizer_offload import OptimizerOffload
from .optimizer_states import OptimizerStates
from .packing import Packing
from .parameter_offload import ParameterOffload
from .pipeline_parallel import PipelineParallel
from .precision import Precision
from .quantized_base import QuantizedBase
from .tensor_parallel import TensorParallel
from .zero import Zero

TECHNIQUES: tuple[type[Technique], ...] = (
    Precision,
    QuantizedBase,
    Lora,
    PipelineParallel,
    ContextParallel,
    DataParallel,
    Zero,
    TensorParallel,  # around what the others do with gradients
    OptimizerStates,
    FusedOps,
    Fp32Islands,  # of the modules that are there at last
    ParameterOffload,
    Packing,
    Checkpointing,
    ActivationOffload,
    FusedLoss,
    Accumulation,
    Clipping,
    OptimizerOffload,
    FusedBackwardStep,  # around whatever rule the others chose
    Allocator,
)

DIVIDING = (ContextParallel, DataParallel, PipelineParallel, TensorParallel, Zero)

__all__ = [
    "DIVIDING", "TECHNIQUES", "Accumulation", "ActivationOffload", "Allocator", "Checkpointing", "Clipping", "ContextParallel", "DataParallel", "Fp32Islands", "FusedBackwardStep", "FusedLoss",
    "FusedOps", "Lora", "NotAsPlanned", "OptimizerOffload", "OptimizerStates", "Packing", "ParameterOffload", "PipelineParallel", "Precision", "QuantizedBase", "Technique", "TensorParallel",
    "Unsuitable", "Zero", "from_json", "in_order",
]  # fmt: skip


def from_json(data: Mapping[str, Any]) -> Technique:
    """The technique written by ``to_json``."""
    kind = {t.name: t for t in TECHNIQUES}[data["name"]]
    settings = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items() if key not in ("name", "says")}
    return kind(**settings)


def in_order(techniques: "list[Technique] | tuple[Technique, ...]") -> tuple[Technique, ...]:
    """Sorted into the order of application."""
    return tuple(sorted(techniques, key=lambda t: TECHNIQUES.index(type(t))))
