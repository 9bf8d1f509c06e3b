"""Data files about models and devices, read on first use: `models.json` here, `gpus.json` and `hosts.json` in `devices`,
families' tensors in `structures`.

Returns plain facts; `spec` and `hardware` make specs of them. Spelling is forgiving (case, spaces, hyphens), meaning is
not: another organisation's copy of a model is not assumed to be the same, but for those of `MIRRORS`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .data import plain_name, read_data
from .devices import CatalogGpu, CatalogHost, find_gpu, find_host, gpu_names, gpus, hosts, whole_gpus

__all__ = [
    "CatalogGpu", "CatalogHost", "CatalogModel", "find_gpu", "find_host", "find_mirrored", "find_model", "gpu_names", "gpus", "hosts",
    "main_models", "model_names", "models", "plain_name", "whole_gpus",
]  # fmt: skip

#: Organisations that put up others' models again under the last part of their names, for those who may not have them
#: from the first: their own models have names of their own.
MIRRORS = ("unsloth", "NousResearch", "LLM-Research", "AI-ModelScope")


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One way to name a model: the hub id it means, its config fields, and its published size."""

    name: str
    config: Mapping[str, Any]
    parameters_b: float
    parameters: int | None
    """Exact count of the text model, where published."""
    note: str = ""
    """What a plan should say of where this is from."""


def find_model(text: str) -> CatalogModel | None:
    """The catalogued model of a name, an alias or a hub id, or None."""
    return _model_index().get(plain_name(text))


def find_mirrored(hub_id: str) -> CatalogModel | None:
    """The catalogued model that ``hub_id`` of one of `MIRRORS` is a copy of, under its own name and with a note."""
    organisation, slash, name = hub_id.partition("/")
    first = find_model(name) if slash and organisation.lower() in map(str.lower, MIRRORS) else None
    if first is None:
        return None
    return replace(first, name=hub_id, note=f"read as the model it is a copy of: {first.name}")


@functools.cache
def models() -> tuple[CatalogModel, ...]:
    """One entry for every catalogued hub id, the main one of each model first."""
    return tuple(variant for entry in read_data("models.json")["models"].values() for variant in _variants(entry))


def main_models() -> tuple[tuple[str, CatalogModel, tuple[str, ...]], ...]:
    """Every model once: its short name, its main entry, and the other names it answers to."""
    return tuple(
        (name, _variants(entry)[0], (entry["hub_id"], *entry["variants"], *entry["aliases"]))
        for name, entry in read_data("models.json")["models"].items()
    )


def model_names() -> tuple[str, ...]:
    """Spellings to suggest: short names and hub ids."""
    return (*read_data("models.json")["models"], *(m.name for m in models()), *(_tail(m.name) for m in models()))


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
    for name, entry in read_data("models.json")["models"].items():
        for alias in (name, *entry["aliases"]):
            index.setdefault(plain_name(alias), by_hub_id[entry["hub_id"]])
    return index


def _tail(hub_id: str) -> str:
    return hub_id.rpartition("/")[2]
