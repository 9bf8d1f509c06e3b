"""Where the tensors of a checkpoint belong in transformers' model: `Places`.

transformers 5 keeps the experts of a mixture as one tensor and renames the modules of some families; files have each expert
alone and the older names, those of models that also see have a prefix. Its own tables say how one becomes the other
(transformers, conversion_mapping.py and core_model_loading.py). Of their operations stacking (MergeModulelist) and joining
(Concatenate) are followed, and in place: a stored tensor goes straight into its part, so nothing is held twice.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .catalog.folders import real_name
from .errors import ModelError
from .parts import local, put, rows_of


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the model by its name, and the part of it that a stored one is: all of it but for experts."""

    name: str
    expert: int | None = None
    join: tuple[int, int, int] | None = None
    """(which part, of how many, along which dimension of an expert)."""

    def of(self, whole: Tensor) -> Tensor:
        """The part, as a view of ``whole``."""
        part = whole if self.expert is None else whole[self.expert]
        if self.join is None:
            return part
        index, parts, dim = self.join
        return part.chunk(parts, dim)[index]

    def shape_of(self, whole: Tensor) -> torch.Size:
        return self.of(torch.empty(whole.shape, device="meta")).shape

    def put(self, into: Tensor, stored: Tensor) -> None:
        """Give a sharded tensor what it holds of the part."""
        if self.expert is None:
            put(into, stored)
            return
        start, stop = rows_of(into)
        if start <= self.expert < stop:
            replace(self, expert=self.expert - start).of(local(into)).copy_(stored)


class Places:
    """Of a transformers config; ``expected`` are the names of the model's tensors, or some of them."""

    def __init__(self, config: Any, expected: Mapping[str, Any]) -> None:
        from transformers import AutoModelForCausalLM, conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        mapping: Any = conversion_mapping.get_checkpoint_conversion_mapping
        transforms = [*(mapping(config.model_type) or ()), *(mapping("legacy") or ())]
        self._stacking = [t for t in transforms if isinstance(t, WeightConverter)]
        self._renaming = [t for t in transforms if not isinstance(t, WeightConverter)]
        kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
        self._prefix, self._expected, self._rename = kind.base_model_prefix, dict(expected), rename_source_key

    def of(self, stored: str) -> Place:
        """Where the tensor that a file calls ``stored`` belongs. ModelError for a layout that is not followed."""
        if stored in self._expected:
            return Place(stored)
        named = real_name(stored, self._expected)
        name, pattern = self._rename(named, self._renaming, self._stacking, self._prefix, self._expected)
        if pattern is None:
            return Place(name)
        before, _ = self._rename(named, self._renaming, [], None, None)
        return _part(name, before, pattern, next(t for t in self._stacking if pattern in t.source_patterns))


def _part(name: str, stored: str, pattern: str, converter: Any) -> Place:
    operations = [type(one).__name__ for one in converter.operations]
    if (
        operations[:1] != ["MergeModulelist"]
        or operations[1:] not in ([], ["Concatenate"])
        or converter.operations[0].dim
    ):
        hint = "save it once with transformers (from_pretrained, save_pretrained) and name that folder"
        raise ModelError(f"{stored} is stored in a way that is not read: {' then '.join(operations)}", hint=hint)
    found = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), stored)
    assert found, f"{pattern} does not match {stored}"
    sources = converter.source_patterns
    join = (sources.index(pattern), len(sources), converter.operations[1].dim - 1) if operations[1:] else None
    return Place(name, int(found[1]), join)


def portions(begins: Mapping[str, int], n_bytes: int) -> Iterator[list[str]]:
    """Names in the order of the file, so many at once that the last begins within ``n_bytes`` of the first."""
    names: list[str] = []
    for name in sorted(begins, key=lambda name: begins[name]):
        if names and begins[name] - begins[names[0]] > n_bytes:
            yield names
            names = []
        names.append(name)
    if names:
        yield names


def starts(path: Path) -> dict[str, int]:
    """Where each tensor's bytes begin in a safetensors file: after its header, whose length is the first 8 bytes."""
    with path.open("rb") as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(n_bytes))
    return {n: 8 + n_bytes + entry["data_offsets"][0] for n, entry in header.items() if n != "__metadata__"}
