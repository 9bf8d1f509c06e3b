"""What another tool's run would need, as it would run there, and what finefit makes of the same wish. Torch-free.

The run is simulated in a process of its own (``witness``); a model that cannot be simulated is an error that says so.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import planning
from .catalog import folders
from .catalog.resolve import locate_model
from .config import load
from .config.dialects import Foreign
from .errors import ConfigError, DoesNotFit, FinefitError
from .hardware import HardwareSpec
from .plan import Plan
from .spec import resolve_model
from .witness import Simulated, Simulator, workspace_bytes

#: Options of ``plan`` that say something of finefit's own runs -> what to do where the run is another tool's.
_UNHEARD = {
    "--budget": "for a device of less memory say --gpu 20GiB",
    "--method": "change the method in the file",
    "--max-length": "change the length in the file",
    "-o": "only finefit's own plans are obeyed; --json prints what is found here",
    "--explain": "leave it out; finefit plan MODEL --explain tells of finefit's own plans",
    "--verify": "leave it out: another tool's run is always simulated",
}
_MOST_DEVICES = 100_000


@dataclass(frozen=True, slots=True)
class Foretold:
    foreign: Foreign
    hardware: HardwareSpec
    simulated: Simulated
    needed_bytes: int
    """The smallest memory of a device in which it goes through, the process's context included."""
    ours: Plan | None
    ours_not: str
    """Why finefit has no plan for the same wish; empty where it has one."""

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.hardware.memory_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "tool": self.foreign.tool, "run": self.foreign.run.to_json(), "ignored": list(self.foreign.ignored),
            "hardware": self.hardware.says, "fits": self.fits, "needed_bytes": self.needed_bytes,
            "allocated_bytes": self.simulated.allocated_bytes, "reserved_bytes": self.simulated.reserved_bytes,
            "simulated": self.simulated.footprint.to_json(), "seconds": self.simulated.seconds,
            "notes": [*self.foreign.run.notes, *self.simulated.notes],
            "finefit": self.ours.to_json() if self.ours else None, "finefit_not": self.ours_not,
        }  # fmt: skip


def asked(words: Sequence[str], devices: int | None, options: Sequence[str]) -> Path:
    """The file, after refusing what a run that is described by it alone does not hear."""
    name = next(word for word in words if "=" not in word or Path(word).exists())
    if others := [word for word in words if word is not name]:
        hint = "change the file; --gpu and --devices are heard"
        raise ConfigError(f"'{others[0]}' beside another tool's run file", hint=hint)
    if options:
        hint = "; ".join(dict.fromkeys(_UNHEARD[option] for option in options))
        raise ConfigError(f"{', '.join(options)}: not for another tool's run file '{name}', which says what is run",
                          hint=hint)  # fmt: skip
    if devices is not None and not 1 <= devices <= _MOST_DEVICES:
        raise ConfigError(f"--devices {devices}: a run has 1 to {_MOST_DEVICES:,} devices")
    return Path(name)


def foretell(foreign: Foreign, hardware: HardwareSpec) -> Foretold:
    """Simulate the run there, and plan the same wish here."""
    with Simulator() as simulator:
        found = simulator.ask(config_json(foreign.run.model), foreign.run, workspace_bytes(hardware.name))
    devices = foreign.run.spread.devices
    needed = found.needs(hardware.context_bytes, devices)
    if hardware.kind == "cuda" and hardware.nodes == 1:
        hardware = replace(hardware, count=devices)
    return Foretold(foreign, hardware, found, needed, *_ours(foreign, hardware))


def config_json(model: str) -> dict[str, Any]:
    """The model's config.json as a dict: from the catalogue, a folder, or the hub."""
    found = locate_model(model)
    if isinstance(found, Path):
        return dict(folders.read_config(found / "config.json" if found.is_dir() else found))
    return dict(found.config)


def _ours(foreign: Foreign, hardware: HardwareSpec) -> tuple[Plan | None, str]:
    settings = [
        f"{key}={json.dumps(value) if isinstance(value, list | tuple) else value}" for key, value in foreign.wish
    ]
    try:
        config = load(
            None, [s for s in settings if not s.startswith(("model=", "data="))], {"model": foreign.run.model}
        )
        return planning.make_plan(config, resolve_model(foreign.run.model), hardware, None), ""
    except DoesNotFit as error:
        return None, f"does not fit: {error.message}" + (f" ({error.hint})" if error.hint else "")
    except FinefitError as error:
        return None, error.message
