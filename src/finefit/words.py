"""What the words of a command line mean: a model and its data or a run file, then settings; and options that are settings
by other names."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .hardware import HardwareSpec
from .planning import called


def config_of(words: list[str], options: list[str]) -> Any:
    """A run file or MODEL [DATA], then key=value overrides; options are overrides too."""
    from .config import load
    from .config.load import names_in
    from .planning import standing

    names = names_in(words)
    overrides = [word for word in words if word not in names]
    _agree(overrides, options)
    if names and names[0].endswith((".yaml", ".yml")):
        if len(names) > 1:
            raise ConfigError(f"'{names[1]}' after a run file is not a setting", hint="say key=value")
        return standing(load(Path(names[0]), [*overrides, *options], {}))
    if len(names) > 2:
        raise ConfigError(f"'{names[2]}' is not a setting", hint="say MODEL DATA, then key=value")
    return standing(load(None, [*overrides, *options], dict(zip(("model", "data"), names, strict=False))))


def _agree(overrides: list[str], options: list[str]) -> None:
    """Of one key said often the last word counts, as in other tools; an option beside it must say the same."""
    said = dict(word.split("=", 1) for word in overrides if "=" in word)
    for key, _, value in (option.partition("=") for option in options):
        if said.get(key, value) != value:
            raise ConfigError(f"{key} is said twice: {said[key]} and {value}", hint="leave one of them out")


def is_foreign(words: list[str]) -> bool:
    """Whether the first word that is no setting is another tool's run file."""
    from .config.load import names_in

    named = next((Path(name) for name in names_in(words)), None)
    if named is None or named.suffix not in (".yaml", ".yml") or not named.is_file():
        return False
    from .config import dialects

    return dialects.is_foreign(named)


def check_data(config: Any) -> None:
    """Data that is not there is told before a model is looked for, which takes long and may fail for its own reason."""
    from .data.readers import check_named

    for name in (config.data, config.eval_data):
        if name:
            check_named(name)


def of_devices(said: str | None) -> list[str]:
    """``4`` and ``cpu:4`` as settings."""
    if said is None:
        return []
    kind, _, count = said.rpartition(":")
    if not count.isdecimal() or kind not in ("", "cpu", "cuda", "gpu"):
        raise ConfigError(f"--devices {said} is no number of devices", hint="say 4, or cpu:4 for processes on this CPU")
    device = {"cpu": ["hardware.device=cpu"], "": []}.get(kind, ["hardware.device=cuda"])
    return [*device, f"hardware.devices={count}"]


def count_of(said: str | None) -> int | None:
    """``--devices`` of another tool's run file, which has a kind of its own."""
    settings = of_devices(said)
    return int(settings[-1].partition("=")[2]) if settings else None


def of_machines(gpu: str | None, devices: str | None, nodes: int | None) -> str | None:
    """``--gpu H100 --devices 8 --nodes 8`` as one name: 64 x H100."""
    if gpu is None or (devices is None and nodes is None):
        return gpu
    each = count_of(devices) or 1
    hardware = HardwareSpec.from_name(gpu)
    if hardware.count > 1 and devices is not None:
        raise ConfigError(f"--gpu {gpu} says how many there are, and so does --devices {devices}", hint="leave one out")
    return f"{each * hardware.count * (nodes or 1)} x {hardware.name}" if hardware.nodes == 1 else gpu


def over_nodes(hardware: HardwareSpec, nodes: int | None) -> HardwareSpec:
    """The same devices in so many machines."""
    if nodes is None:
        return hardware
    if nodes < 1 or hardware.count % nodes:
        raise ConfigError(f"{hardware.count} devices are not the same number in each of {nodes} machines",
                          hint="with --gpu, --devices says how many are in each")  # fmt: skip
    return replace(hardware, nodes=nodes)


def for_all(words: list[str]) -> list[str]:
    """The words of ``finefit train`` that every machine is given: they must agree on the run's folder."""
    config = config_of(words, [])
    if config.data is None:
        raise ConfigError("no data is named", hint="finefit launch --nodes 4 MODEL DATA, or data: in the run file")
    return words if config.name else [*words, f"name={called(config)}-{time.strftime('%Y%m%d-%H%M%S')}"]
