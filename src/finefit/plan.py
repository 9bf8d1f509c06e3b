"""Plan: what will run and why; JSON both ways. Made by ``search``, never edited afterwards."""

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from .errors import CheckpointError, ConfigError
from .files import replaceable, write_atomically
from .footprint import LABELS, MOMENT_LABELS, Footprint
from .techniques import TECHNIQUES, Technique, from_json
from .units import format_bytes, format_seconds

VERSION = 1
_LATER = ("neighbours",)  # fields that plan files of this version have only since they were added
WARNING = "warning: "  # how a note begins that is to be shown before the plan runs
_AGAIN = "make it again: finefit plan MODEL -o FILE"


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another combination the search looked at."""

    says: str
    peak_bytes: int
    seconds_per_step: float
    chosen: bool


Verdict = Literal["too large", "slower", "no better", "not allowed"]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A plan that differs in one thing, and why it is not this one; zeros where it was not predicted."""

    says: str
    verdict: Verdict
    why: str
    peak_bytes: int = 0
    tokens_per_s: float = 0.0


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
    neighbours: tuple[Neighbour, ...] = ()

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
            "neighbours": [dataclasses.asdict(neighbour) for neighbour in self.neighbours],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        if not isinstance(data, Mapping):
            raise ConfigError(f"not a plan: it must be an object, not {_shown(data)}", hint=_AGAIN)
        if data.get("version") != VERSION:
            raise ConfigError(f"this plan is of version {data.get('version')}", hint="make it again: finefit plan")
        _check_plan(cls, data)
        given = {key: data[key] for key in cls.__dataclass_fields__ if key in data}
        return cls(**{
            **given,
            "techniques": tuple(from_json(t) for t in data["techniques"]),
            "predicted": Footprint.from_json(data["predicted"]),
            "alternatives": tuple(Alternative(**a) for a in data["alternatives"]),
            "reasons": tuple(data["reasons"]),
            "notes": tuple(data["notes"]),
            "neighbours": tuple(Neighbour(**n) for n in data.get("neighbours", ())),
        })  # fmt: skip

    def save(self, path: Path) -> None:
        """Write to ``path``, in a folder that is there: a new file, or over an earlier plan; ConfigError otherwise."""
        _check_place(path)
        write_atomically(path, (json.dumps(self.to_json(), indent=1) + "\n").encode())


def load(path: Path) -> Plan:
    """Read a plan file, or ConfigError saying where it is wrong."""
    try:
        return Plan.from_json(json.loads(path.read_bytes().decode("utf-8-sig")))
    except OSError as error:
        raise ConfigError(f"cannot read the plan: {error.strerror}", where=str(path)) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"not a plan: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"not a plan: byte {error.start} is not UTF-8 text", where=str(path), hint=_AGAIN) from error
    except (ValueError, RecursionError) as error:  # JSON by its grammar, with a number or a nesting beyond all measure
        raise ConfigError(f"not a plan: {error}", where=str(path), hint=_AGAIN) from error
    except ConfigError as error:
        raise ConfigError(error.message, where=str(path), hint=error.hint) from error


def _check_place(path: Path) -> None:
    if not path.name:
        what = "a folder is there" if path.parts else "the plan needs the name of a file"
        raise ConfigError(what, where=str(path), hint="-o plan.json")
    try:
        real = replaceable(path)
        if not real.parent.is_dir():
            raise ConfigError("there is no such folder for the plan", where=str(path), hint=f"mkdir -p {path.parent}")
        if real.exists() and not _is_plan(real.read_bytes()):
            raise ConfigError("the file there is not a plan", where=str(path), hint="give another name, or delete it")
    except CheckpointError as error:
        raise ConfigError(error.message, where=str(path), hint=f"{error.hint}; --json prints the plan") from error
    except OSError as error:
        raise ConfigError(f"could not write: {error.strerror}", where=str(path), hint="give another name") from error


def _is_plan(content: bytes) -> bool:
    """Whether a file may be replaced by a plan: it is one, of any version, or has nothing in it."""
    if not content.strip():
        return True
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and {"version", "techniques", "predicted"} <= data.keys()


def _check_plan(kind: type[Plan], data: Mapping[str, Any]) -> None:
    """Every field is there and of its type, before anything is made of it; what is written next to it is left alone."""
    techniques = data.get("techniques")
    _check_fields(kind, {**data, "techniques": []} if "techniques" in data else data, "")
    if not isinstance(techniques, list):
        raise _unlike("techniques", "a list", techniques)
    for at, one in enumerate(techniques):
        _check_technique(one, f"techniques[{at}]")
    names = [one["name"] for one in techniques]
    for name in ("accumulation", *names):
        if names.count(name) != 1:
            raise _unlike("techniques", f"one technique '{name}'", names.count(name))
    if not data["predicted"]["moments"]:
        raise _unlike("predicted.moments", "at least one moment", {})
    for name in ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps"):
        if data[name] < 1:
            raise _unlike(name, "at least 1", data[name])


def _check_technique(data: Any, where: str) -> None:
    if not isinstance(data, Mapping):
        raise _unlike(where, "an object", data)
    kinds = {kind.name: kind for kind in TECHNIQUES}
    name = data.get("name")
    if not isinstance(name, str) or name not in kinds:
        raise _unlike(f"{where}.name", f"one of {', '.join(kinds)}", name)
    settings = {key: value for key, value in data.items() if key not in ("name", "says")}
    _check_fields(kinds[name], settings, f"{where}.")


def _check_fields(kind: type[Any], data: Mapping[str, Any], prefix: str) -> None:
    """``data`` has every field of the dataclass that needs a value, all of their types; ``prefix`` is where it stands."""
    types, fields = get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    for name, field in fields.items():
        if name in data:
            _check_value(types[name], data[name], f"{prefix}{name}")
        elif field.default is field.default_factory is dataclasses.MISSING or (kind is Plan and name not in _LATER):
            raise ConfigError(f"not a plan of this version: '{prefix}{name}' is missing", hint=_AGAIN)
    if kind in (Plan, Footprint):  # beside their fields stand what follows from them and what later versions may add
        return
    if unknown := [key for key in data if key not in fields]:
        raise ConfigError(f"not a plan of this version: it knows no '{prefix}{unknown[0]}'", hint=_AGAIN)


def _check_value(kind: Any, value: Any, where: str) -> None:
    """The JSON ``value`` is one of the type ``kind``: a dataclass, a tuple, a mapping, words or a plain type."""
    inner, origin = get_args(kind), get_origin(kind)
    if origin is Literal:
        if value not in inner or isinstance(value, float):  # 4.0 is 4 in Python, and no number of bits
            raise _unlike(where, " or ".join(map(str, inner)), value)
    elif origin is tuple:
        if not isinstance(value, list):
            raise _unlike(where, "a list", value)
        for at, one in enumerate(value):
            _check_value(inner[0], one, f"{where}[{at}]")
    elif origin is Mapping or dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise _unlike(where, "an object", value)
        if origin is not Mapping:
            _check_fields(kind, value, f"{where}.")
            return
        for key, one in value.items():
            _check_value(inner[1], one, f"{where}.{key}")
    elif not _is_plain(kind, value):
        raise _unlike(where, _PLAIN[kind], value)


_PLAIN = {int: "a whole number, 0 or more", float: "a number", bool: "true or false", str: "text"}


def _is_plain(kind: Any, value: Any) -> bool:
    """Counts and bytes are never negative; JSON has one kind of number, so 32 is a float as well; true is no number."""
    if isinstance(value, bool):
        return kind is bool
    if kind is int:
        return isinstance(value, int) and value >= 0
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def _unlike(where: str, expected: str, found: Any) -> ConfigError:
    return ConfigError(f"not a plan of this version: '{where}' must be {expected}, not {_shown(found)}", hint=_AGAIN)


def _shown(found: Any) -> str:
    return "null" if found is None else str(found).lower() if isinstance(found, bool) else reprlib.repr(found)


def diff(a: Plan, b: Plan) -> list[tuple[str, str, str]]:
    """(what, in a, in b) for everything that differs: settings, techniques, bytes by component at the peak, time."""
    rows = [
        ("model", a.model, b.model),
        ("hardware", a.hardware, b.hardware),
        ("method", a.method, b.method),
        ("global batch", str(a.global_batch_size), str(b.global_batch_size)),
        ("micro-batch", str(a.micro_batch_size), str(b.micro_batch_size)),
        ("micro-batches a step", str(a.gradient_accumulation_steps), str(b.gradient_accumulation_steps)),
        ("budget", format_bytes(a.budget_bytes), format_bytes(b.budget_bytes)),
    ]
    for name in dict.fromkeys(t.name for t in (*a.techniques, *b.techniques)):
        in_a, in_b = a.technique(name), b.technique(name)
        rows.append((name, in_a.describe() if in_a else "off", in_b.describe() if in_b else "off"))
    rows.append(("peak", format_bytes(a.predicted.total_bytes), format_bytes(b.predicted.total_bytes)))
    one, other = (MOMENT_LABELS[p.predicted.peak_moment] for p in (a, b))
    rows.append(("moment of the peak", one, other))
    ours, theirs = (p.predicted.moments[p.predicted.peak_moment] for p in (a, b))
    for component in dict.fromkeys((*ours, *theirs)):
        rows.append((LABELS[component], format_bytes(ours.get(component, 0)), format_bytes(theirs.get(component, 0))))
    rows.append(("time per step", format_seconds(a.seconds_per_step), format_seconds(b.seconds_per_step)))
    return [row for row in rows if row[1] != row[2]]
