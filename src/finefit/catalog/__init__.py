"""Data files about models and devices, read on first use: `models.json`, `gpus.json`.

Returns plain facts; `spec` and `hardware` make specs of them. Spelling is forgiving (case, spaces, hyphens, "NVIDIA
GeForce", "Tesla", "Generation"), meaning is not: another organisation's copy of a model is not assumed to be the same.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VENDOR_WORDS = re.compile(r"\b(nvidia|geforce|tesla|amd|instinct|radeon|generation|gpu)\b|\((r|tm)\)")


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One way to name a model: the hub id it means, its config fields, and its published size."""

    name: str
    config: Mapping[str, Any]
    parameters_b: float
    parameters: int | None
    """Exact count of the text model, where published."""


@dataclass(frozen=True, slots=True)
class CatalogGpu:
    """One device; units as in `gpus.json`. ``visible_mib`` is None where only the driver's number is known."""

    name: str
    memory_mib: int
    fp32_tflops: float
    fp16_tflops: float
    bf16_tflops: float
    bandwidth_gb_per_s: float
    link_gb_per_s: float
    supports_bf16: bool
    aliases: tuple[str, ...] = ()
    visible_mib: int | None = None
    note: str = ""


def find_model(text: str) -> CatalogModel | None:
    """The catalogued model of a name, an alias or a hub id, or None."""
    return _model_index().get(plain_name(text))


def find_gpu(text: str) -> CatalogGpu | None:
    """The catalogued device of a name as people write it or as its driver says it, or None."""
    return _gpu_index().get(_plain_gpu(text))


@functools.cache
def models() -> tuple[CatalogModel, ...]:
    """One entry for every catalogued hub id, the main one of each model first."""
    return tuple(variant for entry in _read("models.json")["models"].values() for variant in _variants(entry))


@functools.cache
def gpus() -> tuple[CatalogGpu, ...]:
    return tuple(CatalogGpu(**{**entry, "aliases": tuple(entry["aliases"])}) for entry in _read("gpus.json")["gpus"])


def model_names() -> tuple[str, ...]:
    """Spellings to suggest: short names and hub ids."""
    return (*_read("models.json")["models"], *(m.name for m in models()), *(_tail(m.name) for m in models()))


def gpu_names() -> tuple[str, ...]:
    """Spellings to suggest: names and aliases, and the number alone ("4090")."""
    names = tuple(name for gpu in gpus() for name in (gpu.name, *gpu.aliases))
    return names + tuple(_without_series(name) for name in names)


def plain_name(text: str) -> str:
    """A model's spelling without case, spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]+", "", text.lower())


@functools.cache
def _read(file_name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((Path(__file__).parent / file_name).read_text("utf-8"))
    return data


def _variants(entry: Mapping[str, Any]) -> list[CatalogModel]:
    hub_ids = {entry["hub_id"]: {}, **entry["variants"]}
    size, exact = entry["parameters_b"], entry.get("parameters")
    return [CatalogModel(hub_id, {**entry["config"], **own}, size, exact) for hub_id, own in hub_ids.items()]


@functools.cache
def _model_index() -> dict[str, CatalogModel]:
    """Hub ids win over the part after the slash, that over short names and aliases."""
    index = {plain_name(model.name): model for model in models()}
    for model in models():
        index.setdefault(plain_name(_tail(model.name)), model)
    by_hub_id = {model.name: model for model in models()}
    for name, entry in _read("models.json")["models"].items():
        for alias in (name, *entry["aliases"]):
            index.setdefault(plain_name(alias), by_hub_id[entry["hub_id"]])
    return index


@functools.cache
def _gpu_index() -> dict[str, CatalogGpu]:
    index = {_plain_gpu(gpu.name): gpu for gpu in gpus()}
    for gpu in gpus():
        for alias in (*gpu.aliases, *map(_without_series, (gpu.name, *gpu.aliases))):
            index.setdefault(_plain_gpu(alias), gpu)
    return index


def _plain_gpu(text: str) -> str:
    return plain_name(_VENDOR_WORDS.sub(" ", text.lower()))


def _without_series(name: str) -> str:
    return re.sub(r"^(GTX|RTX) ", "", name)


def _tail(hub_id: str) -> str:
    return hub_id.rpartition("/")[2]
