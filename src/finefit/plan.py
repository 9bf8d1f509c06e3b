"""Plan: what will run and why; JSON both ways. Made by ``search``, never edited afterwards."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from .errors import ConfigError
from .files import write_atomically
from .footprint import Footprint
from .techniques import Technique, from_json
from .units import format_bytes, format_seconds

VERSION = 1


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another combination the search looked at."""

    says: str
    peak_bytes: int
    seconds_per_step: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    hardware: str
    method: str
    global_batch_size: int
    """Examples of one optimizer step."""
    micro_batch_size: int
    gradient_accumulation_steps: int
    techniques: tuple[Technique, ...]
    predicted: Footprint
    seconds_per_step: float
    tokens_per_s: float
    budget_bytes: int
    reasons: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()

    def technique(self, name: str) -> Technique | None:
        return next((t for t in self.techniques if t.name == name), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "model": self.model, "hardware": self.hardware, "method": self.method,
            "global_batch_size": self.global_batch_size, "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "techniques": [{**t.to_json(), "says": t.describe()} for t in self.techniques],
            "predicted": self.predicted.to_json(),
            "seconds_per_step": self.seconds_per_step, "tokens_per_s": self.tokens_per_s,
            "budget_bytes": self.budget_bytes, "reasons": list(self.reasons),
            "alternatives": [
                {"says": a.says, "peak_bytes": a.peak_bytes, "seconds_per_step": a.seconds_per_step, "chosen": a.chosen}
                for a in self.alternatives
            ],
            "notes": list(self.notes),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        if data.get("version") != VERSION:
            raise ConfigError(f"this plan is of version {data.get('version')}", hint="make it again: finefit plan")
        given = {key: data[key] for key in cls.__dataclass_fields__ if key in data}
        return cls(**{
            **given,
            "techniques": tuple(from_json(t) for t in data["techniques"]),
            "predicted": Footprint.from_json(data["predicted"]),
            "alternatives": tuple(Alternative(**a) for a in data["alternatives"]),
            "reasons": tuple(data["reasons"]),
            "notes": tuple(data["notes"]),
        })  # fmt: skip

    def save(self, path: Path) -> None:
        write_atomically(path, (json.dumps(self.to_json(), indent=1) + "\n").encode())


def load(path: Path) -> Plan:
    """Read a plan file, or ConfigError saying where it is wrong."""
    try:
        return Plan.from_json(json.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"cannot read the plan: {error.strerror}", where=str(path)) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"not a plan: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}") from error
    except (KeyError, TypeError, AttributeError) as error:
        hint = "make it again: finefit plan MODEL -o FILE"
        raise ConfigError(f"not a plan of this version: {error}", where=str(path), hint=hint) from error


def diff(a: Plan, b: Plan) -> list[tuple[str, str, str]]:
    """(what, in a, in b) for everything that differs: settings, techniques, bytes by component at the peak, time."""
    rows = [
        ("model", a.model, b.model),
        ("hardware", a.hardware, b.hardware),
        ("method", a.method, b.method),
        ("global batch", str(a.global_batch_size), str(b.global_batch_size)),
        ("micro-batch", str(a.micro_batch_size), str(b.micro_batch_size)),
        ("accumulation", str(a.gradient_accumulation_steps), str(b.gradient_accumulation_steps)),
        ("budget", format_bytes(a.budget_bytes), format_bytes(b.budget_bytes)),
    ]
    for name in dict.fromkeys(t.name for t in (*a.techniques, *b.techniques)):
        one, other = a.technique(name), b.technique(name)
        rows.append((name, one.describe() if one else "off", other.describe() if other else "off"))
    rows.append(("peak", format_bytes(a.predicted.total_bytes), format_bytes(b.predicted.total_bytes)))
    rows.append(("moment of the peak", a.predicted.peak_moment, b.predicted.peak_moment))
    ours, theirs = (p.predicted.moments[p.predicted.peak_moment] for p in (a, b))
    for component in dict.fromkeys((*ours, *theirs)):
        rows.append((component, format_bytes(ours.get(component, 0)), format_bytes(theirs.get(component, 0))))
    rows.append(("time per step", format_seconds(a.seconds_per_step), format_seconds(b.seconds_per_step)))
    return [row for row in rows if row[1] != row[2]]
