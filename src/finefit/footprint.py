"""Bytes by component and moment: one type for what is predicted, simulated and measured.

Components are the categories of PyTorch's memory profiler (``torch.profiler._memory_profiler.Category``), so figures
line up with its own. A peak is a maximum over moments, never a sum of everything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

COMPONENTS = ("parameter", "gradient", "optimizer_state", "activation", "temporary", "input", "reserved")
STEP = ("forward_end", "loss", "backward_peak", "optimizer_step")
PHASES = ("load", "resume", "eval", "save", "merge")  # what is done beside a run's steps
MOMENTS = ("load", "resume", *STEP, "eval", "save", "merge")
# What is in a host's memory; pages of mapped files are the system's to take back.
HOST = ("program", "tensors", "copies", "data", "mapped")

# How people call them.
LABELS: dict[str, str] = {
    "parameter": "weights",
    "gradient": "gradients",
    "optimizer_state": "optimizer states",
    "activation": "activations",
    "temporary": "temporaries",
    "input": "inputs",
    "reserved": "reserved",
}

MOMENT_LABELS: dict[str, str] = {
    "load": "weights loaded",
    "resume": "resuming",
    "forward_end": "end of forward",
    "loss": "loss",
    "backward_peak": "peak of backward",
    "optimizer_step": "optimizer step",
    "eval": "evaluation",
    "save": "saving",
    "merge": "merging",
}

Witness = Literal["predicted", "simulated", "measured"]
Bytes = dict[str, int]


@dataclass(frozen=True, slots=True)
class Footprint:
    """``moments[moment][component]`` in bytes: the composition at the highest point of each moment on the device.

    ``host`` is the same of the host's memory, by the components of ``HOST``; empty where nobody has asked.
    """

    witness: Witness
    moments: Mapping[str, Mapping[str, int]]
    reserved_bytes: int = 0
    notes: tuple[str, ...] = field(default=())
    host: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def at(self, moment: str) -> int:
        """Bytes at the highest point of ``moment``, without the reserved part."""
        return sum(self.moments.get(moment, {}).values())

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=self.at)

    @property
    def peak_bytes(self) -> int:
        """Bytes of live tensors at the highest moment."""
        return self.at(self.peak_moment)

    @property
    def total_bytes(self) -> int:
        """What the device must have: live tensors and what is reserved beside them."""
        return self.peak_bytes + self.reserved_bytes

    def corrected(self, times: Mapping[str, float]) -> "Footprint":
        """With activations and temporaries of each of these moments so many times as large."""
        moments = {
            moment: {
                c: round(n * times.get(moment, 1.0)) if c in ("activation", "temporary") else n
                for c, n in parts.items()
            }
            for moment, parts in self.moments.items()
        }
        return replace(self, moments=moments) if times else self

    def to_json(self) -> dict[str, Any]:
        return {
            "witness": self.witness,
            "peak_bytes": self.peak_bytes,
            "peak_moment": self.peak_moment,
            "reserved_bytes": self.reserved_bytes,
            "moments": {moment: dict(parts) for moment, parts in self.moments.items()},
            "notes": list(self.notes),
            "host": {moment: dict(parts) for moment, parts in self.host.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Footprint":
        notes, host = tuple(data.get("notes", ())), data.get("host", {})
        return cls(data["witness"], data["moments"], data["reserved_bytes"], notes, host)


def highest(witness: Witness, *parts: Mapping[str, Mapping[str, int]]) -> Footprint:
    """One footprint from several: for each moment the composition with the larger sum."""
    moments: dict[str, Mapping[str, int]] = {}
    for part in parts:
        for moment, components in part.items():
            if sum(components.values()) >= sum(moments.get(moment, {}).values()):
                moments[moment] = components
    return Footprint(witness, moments)
