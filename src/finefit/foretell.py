"""What another tool's run would need, as it would run there, and what finefit makes of the same wish. Torch-free.

The run is simulated in a process of its own (``witness``); a model that cannot be simulated is an error that says so.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import planning
from .catalog import folders, structures
from .catalog.resolve import locate_model
from .config import load
from .config.dialects import Foreign
from .config.load import names_in
from .errors import ConfigError, DoesNotFit, FinefitError, did_you_mean
from .hardware import MOST_DEVICES, HardwareSpec
from .plan import Plan
from .spec import ModelSpec, resolve_model
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
#: Layers beside the blocks that PEFT adapts too.
_OUTSIDE = ("lm_head", "embed_tokens", "wte", "wpe", "embed_out", "word_embeddings")


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
    name = names_in(words)[0]
    if others := [word for word in words if word is not name]:
        hint = "change the file; --gpu and --devices are heard"
        raise ConfigError(f"'{others[0]}' beside another tool's run file", hint=hint)
    if options:
        hint = "; ".join(dict.fromkeys(_UNHEARD[option] for option in options))
        raise ConfigError(f"{', '.join(options)}: not for another tool's run file '{name}', which says what is run",
                          hint=hint)  # fmt: skip
    if devices is not None and not 1 <= devices <= MOST_DEVICES:
        raise ConfigError(f"--devices {devices}: a run has 1 to {MOST_DEVICES:,} devices")
    return Path(name)


def foretell(foreign: Foreign, hardware: HardwareSpec) -> Foretold:
    """Simulate the run there, and plan the same wish here."""
    config = config_json(foreign.run.model)
    foreign = _in_place(foreign, _known(foreign.run.model), config)
    with Simulator() as simulator:
        found = simulator.ask(config, foreign.run, workspace_bytes(hardware.name))
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


def _known(model: str) -> ModelSpec | None:
    """The model, or None where its family is not one of ours."""
    try:
        return resolve_model(model)
    except FinefitError:
        return None


def _in_place(foreign: Foreign, model: ModelSpec | None, config: Mapping[str, Any]) -> Foreign:
    """The run, with notes on what its model makes of it; ConfigError where its adapters have no place in that."""
    if model is None:
        return foreign
    notes = [*_targets(foreign, model), *_positions(foreign, model, config)]
    return replace(foreign, run=replace(foreign.run, notes=(*foreign.run.notes, *notes)))


def _targets(foreign: Foreign, model: ModelSpec) -> Iterator[str]:
    """What PEFT does with names that fit no layer: it passes over some, and refuses when none is left."""
    run, known = foreign.run, tuple(dict.fromkeys(p.short_name for p in model.linears()))
    if run.method != "lora" or run.tool == "torchtune":  # whose reader knows the few names there are
        return
    missing = [name for name in run.targets if name not in (*known, *_OUTSIDE)]
    if missing and not any(name in known for name in run.targets):
        hint = did_you_mean(missing[0], known) or f"its blocks have {', '.join(known)}"
        key, where = foreign.told.get("targets", ("PEFT's own targets", ""))
        raise ConfigError(f"'{key}': the model has no linear layer '{missing[0]}'", where=where, hint=hint)
    for name in missing:
        yield f"the model has no linear layer '{name}': PEFT passes over it"


def _positions(foreign: Foreign, model: ModelSpec, config: Mapping[str, Any]) -> Iterator[str]:
    run, most = foreign.run, _most_positions(model, config)
    if run.max_length <= most or "positions" in foreign.told:
        return
    what = f"rows of {run.max_length:,} tokens are longer than the {most:,} positions of the model's config"
    if _learns_positions(model):
        yield f"{what}, and it learns a vector for each of those: such a row ends the run with an error"
    elif run.tool == "torchtune":
        yield f"{what}: torchtune refuses rows beyond its builder's max_seq_len"
    else:
        yield f"{what}: it was not trained on them, and the tool does not say so"


def _most_positions(model: ModelSpec, config: Mapping[str, Any]) -> int:
    """What the config's own scaling of rotary positions makes of them is counted."""
    inner = config.get("text_config")
    said: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    scaling = said.get("rope_parameters") or said.get("rope_scaling")
    first = scaling.get("original_max_position_embeddings") if isinstance(scaling, Mapping) else None
    factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
    if isinstance(first, int) and isinstance(factor, int | float):
        return max(model.max_position_embeddings, int(first * factor))
    return model.max_position_embeddings


def _learns_positions(model: ModelSpec) -> bool:
    return bool(structures.entry_of(model.family)) and "max_position_embeddings" in structures.needed(model.family)


def _as_long(model: ModelSpec, length: int) -> ModelSpec:
    """The model, for rows that rotary positions reach beyond its config's; a plan is cut to what a config says."""
    if length <= model.max_position_embeddings:
        return model
    if _learns_positions(model):
        raise ConfigError(f"the model has {model.max_position_embeddings:,} positions, rows have {length:,}")
    return replace(model, max_position_embeddings=length)


def _ours(foreign: Foreign, hardware: HardwareSpec) -> tuple[Plan | None, str]:
    settings = [
        f"{key}={json.dumps(value) if isinstance(value, list | tuple) else value}" for key, value in foreign.wish
    ]
    try:
        config = load(
            None, [s for s in settings if not s.startswith(("model=", "data="))], {"model": foreign.run.model}
        )
        model = _as_long(resolve_model(foreign.run.model), config.train.max_length)
        return planning.make_plan(config, model, hardware, None), ""
    except DoesNotFit as error:
        return None, f"does not fit: {error.message}" + (f" ({error.hint})" if error.hint else "")
    except FinefitError as error:
        return None, error.message
