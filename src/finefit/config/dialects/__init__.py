"""Other tools' run files: which tool a file is for, how it would run there, and the same wish in our keys.

One file per tool. What is not supervised fine-tuning of a decoder-only text model, or needs a technique that
``ForeignRun`` has no word for, is refused with the key, its place and the reason.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from . import axolotl, llamafactory, llamafactory_v1, torchtune, trl
from .sheet import NAMES, Foreign, Sheet, open_sheet, resolved
from .tree import outline

__all__ = ["NAMES", "Foreign", "is_foreign", "read", "recognise"]

Reader = Callable[[Sheet, int | None], Foreign]
_READERS: dict[str, Reader] = {"axolotl": axolotl.read, "trl": trl.read, "torchtune": torchtune.read}
_NOT_READ = {
    "accelerate": "this is an accelerate launch file, not a run",
    "swift": "ms-swift's run files are not read",
    "unsloth": "Unsloth's run files are not read",
}

#: Both load their files with OmegaConf, whose loader refuses a key that stands twice; the others with PyYAML's own.
_OMEGACONF = ("llamafactory", "torchtune")
#: Keys that change how many positions a model has, as LLaMA-Factory, Axolotl and TRL spell them.
_STRETCHES = (
    "rope_scaling", "overrides_of_model_config.rope_scaling", "overrides_of_model_config.rope_parameters",
    "overrides_of_model_config.max_position_embeddings", "model_init_kwargs.rope_scaling",
    "model_init_kwargs.rope_parameters", "model_init_kwargs.max_position_embeddings",
)  # fmt: skip


def recognise(data: Mapping[str, Any]) -> str | None:
    """The tool a parsed YAML file is for, by its keys; None for our own run files and for what is no run file."""
    return next((tool for tool, has in _SIGNS if has(data)), None)


def read(path: Path, devices: int | None = None) -> Foreign:
    """A run file of another tool. ``devices``: how many it runs on; needed where the file does not say.

    ConfigError with ``file:line:column`` for what cannot be expressed, for wrong values and for misspelt keys.
    """
    sheet = open_sheet(path)
    tool = recognise(sheet.values)
    if tool is None:
        raise ConfigError(
            "this is no run file of LLaMA-Factory, Axolotl, TRL or torchtune", where=str(path)
        )  # fmt: skip
    if tool in _NOT_READ:
        raise ConfigError(_NOT_READ[tool], where=f"{path}:1:1")
    sheet.tool = tool
    sheet.tell_twice(refused=tool in _OMEGACONF)
    for key in _STRETCHES:
        sheet.tells("positions", key)
    if tool == "torchtune":
        resolved(sheet)
    if tool == "llamafactory":
        chosen = llamafactory.read if "model_name_or_path" in sheet.values else llamafactory_v1.read
        return chosen(sheet, devices)
    return _READERS[tool](sheet, devices)


def is_foreign(path: Path) -> bool:
    """Whether this YAML file is another tool's, by its keys alone where its values cannot be taken in; False for what
    is no YAML, which our own reader says as well."""
    try:
        keys = outline(path)
    except ConfigError:
        return False
    return recognise(keys) is not None or _is_read(path)


def _is_read(path: Path) -> bool:
    """Whether keys below the first sections, or that ``<<`` brings, are a tool's."""
    try:
        return recognise(open_sheet(path).values) is not None
    except ConfigError:
        return False


def _has_component(data: Any) -> bool:
    """Whether torchtune's word stands anywhere. What aliases repeat is looked at once."""
    waiting, known = [data], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in known or not isinstance(one, Mapping | list):
            continue
        known.add(id(one))
        if isinstance(one, Mapping) and "_component_" in one:
            return True
        waiting += one.values() if isinstance(one, Mapping) else one
    return False


def _among(first: str, *others: str) -> Callable[[Mapping[str, Any]], bool]:
    """``first`` and one of ``others``."""
    return lambda data: first in data and any(key in data for key in others)


#: In this order: the first that fits decides.
_SIGNS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool]], ...] = (
    ("torchtune", _has_component),
    ("axolotl", lambda data: "base_model" in data),
    ("llamafactory", _among("model_name_or_path", "finetuning_type", "stage", "cutoff_len", "template")),
    ("llamafactory", _among("model", "model_class", "peft_config", "train_dataset")),
    ("trl", _among("model_name_or_path", "dataset_name", "datasets")),
    ("swift", _among("model", "tuner_type")),
    ("unsloth", lambda data: "model" in data and isinstance(data.get("training"), Mapping) and "lora" in data),
    ("accelerate", _among("distributed_type", "compute_environment", "num_processes", "mixed_precision")),
)
