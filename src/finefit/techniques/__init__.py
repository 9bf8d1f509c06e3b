"""The techniques, in the order they are applied. A new one is a file here and a place in this list."""

from collections.abc import Mapping
from typing import Any

from .accumulation import Accumulation
from .base import NotAsPlanned, Technique, Unsuitable
from .checkpointing import Checkpointing
from .clipping import Clipping
from .fused_loss import FusedLoss
from .fused_ops import FusedOps
from .lora import Lora
from .packing import Packing
from .precision import Precision
from .quantized_base import QuantizedBase

TECHNIQUES: tuple[type[Technique], ...] = (
    Precision,
    QuantizedBase,
    Lora,
    FusedOps,
    Packing,
    Checkpointing,
    FusedLoss,
    Accumulation,
    Clipping,
)

__all__ = [
    "TECHNIQUES", "Accumulation", "Checkpointing", "Clipping", "FusedLoss", "FusedOps", "Lora", "NotAsPlanned",
    "Packing", "Precision", "QuantizedBase", "Technique", "Unsuitable", "from_json", "in_order",
]  # fmt: skip


def from_json(data: Mapping[str, Any]) -> Technique:
    """The technique written by ``to_json``."""
    kind = {t.name: t for t in TECHNIQUES}[data["name"]]
    settings = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items() if key not in ("name", "says")}
    return kind(**settings)


def in_order(techniques: "list[Technique] | tuple[Technique, ...]") -> tuple[Technique, ...]:
    """Sorted into the order of application."""
    return tuple(sorted(techniques, key=lambda t: TECHNIQUES.index(type(t))))
