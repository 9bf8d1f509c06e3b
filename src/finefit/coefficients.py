"""Traced coefficients: shipped for the catalogue's families, derived once and cached for anything else. Torch-free.

A file holds, for a family, or for one model where a family's symbols do not explain its sizes, the sections of ``trace``
by the graph's key. ``derive`` runs the trace in a subprocess, because planning must not import torch; without torch it
says which extra to install.
"""

import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .catalog import structures
from .errors import EngineError, ModelError, did_you_mean
from .files import cache_folders, writable_cache, write_atomically
from .layout import Layout
from .reckoned import of_rank
from .spec import digest

SHIPPED = Path(__file__).parent / "catalog" / "coefficients"
_PART = "coefficients"  # of the user's cache: traces of their own
Sections = list[dict[str, Any]]
_DIVIDED = "tensor"
"""The word of a tensor-parallel rank's graph."""
FINER = ("attention", "mlp", "selective")
"""What is traced of a block that is not checkpointed as a whole."""


def key_of(layout: Layout) -> str:
    """The traced graph's name: what techniques changed in it, and whether the head is the embedding."""
    words = [*layout.graph, *(["tied"] if layout.model.tie_word_embeddings else [])]
    words += [word for word, on in (("bias", layout.model.attention_bias), ("mlp_bias", layout.model.mlp_bias)) if on]
    switches = structures.switches(layout.model.family) if structures.entry_of(layout.model.family) else ()
    words += [f"{key}={value}" for key, value in layout.model.options if key in switches]
    words += [
        word for word, on in (("partial", layout.model.rotary_dim), ("dense_first", layout.model.dense_first)) if on
    ]
    return " ".join(words)


def sections_for(layout: Layout, checkpointed: str) -> Sections:
    """Sections of the graph with no block (``plain``) or every block (``checkpointed``) checkpointed, or of ``eval``.

    Blocks that are checkpointed in another way are other kinds: those of ``FINER``.
    """
    key = _with_kind(key_of(layout), checkpointed)
    if (found := _at_hand(layout, key)) is None:
        _trace(layout, {key, *kinds_of(key_of(layout))})
        found = _at_hand(layout, key)
    assert found is not None
    return found


def is_reckoned(layout: Layout) -> bool:
    """Whether of its step, or its evaluation, there is only what is reckoned from that of a device alone."""
    return not _kinds(layout) <= _known(layout).keys() and all(_at_hand(layout, key) for key in _kinds(layout))


def trace_reckoned(layout: Layout) -> bool:
    """Trace what was only reckoned; whether there was anything."""
    if found := is_reckoned(layout):
        _trace(layout, _kinds(layout))
    return found


def _kinds(layout: Layout) -> set[str]:
    key = key_of(layout)
    return {*kinds_of(key), f"{key} {layout.recomputed}"}


def _trace(layout: Layout, keys: set[str]) -> None:
    """In one process all that the graph's runs come to, evaluation too: most of its time is its start."""
    _traced_for(layout, sorted(keys - _known(layout).keys()))
    read.cache_clear()
    _graphs.cache_clear()


def _at_hand(layout: Layout, key: str) -> Sections | None:
    """What is traced; of a tensor-parallel rank what is reckoned, where a device that has all is traced."""
    known = _known(layout)
    found: Sections | None = known.get(key)
    if found is None and f" {_DIVIDED} " in key:
        whole = known.get(key.replace(f" {_DIVIDED} ", " "))
        found = None if whole is None else _reckoned(key, id(whole), _Kept(whole))
    return found


@dataclass(frozen=True, slots=True)
class _Kept:
    """Sections that are told from others by their identity, and are there for as long as that is asked for."""

    sections: Sections = field(compare=False)


@functools.lru_cache(maxsize=256)
def _reckoned(key: str, _identity: int, whole: _Kept) -> Sections:
    return of_rank(whole.sections, key)


def kinds_of(key: str) -> set[str]:
    """What is traced of a graph: its step with no block and with every block checkpointed, and its evaluation."""
    return {_with_kind(key, kind) for kind in ("plain", "checkpointed", "eval")}


def _with_kind(key: str, kind: str) -> str:
    """The key of a trace; an evaluation is without dropout."""
    return f"{key.replace(' dropout', '')} eval" if kind == "eval" else f"{key} {kind}"


def is_traced(layout: Layout) -> bool:
    """Whether the layout's graph is at hand, plain and checkpointed, without a trace."""
    key = key_of(layout)
    return all(_at_hand(layout, f"{key} {kind}") for kind in ("plain", layout.recomputed))


def evaluation_is_traced(layout: Layout) -> bool:
    """Whether the graph of its evaluation is at hand: a plan does without rather than wait for a trace."""
    return _at_hand(layout, _with_kind(key_of(layout), "eval")) is not None


def _known(layout: Layout) -> Mapping[str, Any]:
    """Graphs at hand: the model's own before its family's, which only stand for what has the family's tensors."""
    model = layout.model
    return _graphs(model.family, model.config, not model.extra, cache_folders(_PART))


@functools.lru_cache(maxsize=256)
def _graphs(family: str, config: str, is_plain: bool, folders: tuple[Path, ...]) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for name in reversed(_names(family, config, is_plain)):
        for path in (*(_file(folder, name) for folder in folders), SHIPPED / f"{name}.json.gz"):
            found |= read(path)
    return found


def _names(family: str, config: str, is_plain: bool) -> list[str]:
    """What files may be called that hold the graphs of a model, the one of its own first."""
    names = [f"{family}-{digest(config)}"] if config else []
    return [*names, family] if (is_plain or not config) and structures.entry_of(family) else names


def _traced_for(layout: Layout, keys: list[str]) -> None:
    """Trace the family's graphs, or the model's where the family's sizes are not explained by symbols."""
    model = layout.model
    names = _names(model.family, model.config, not model.extra)
    why = EngineError(f"the step of a {model.family} model could not be traced: its config is not known")
    if model.family in names:
        try:
            return derive(model.family, keys)
        except EngineError as error:
            why = error
    if not model.config:
        raise why
    described = _cache(names[0]).with_suffix(".config.json")
    write_atomically(described, model.config.encode())
    return derive(str(described), keys, _cache(names[0]))


def derive(subject: str, keys: list[str], into: Path | None = None) -> None:
    """Trace ``keys`` of a family, or of a model by its config.json, in a subprocess.

    They are added to the file ``into``; of a family to the user's cache if none is named.
    """
    command = [sys.executable, "-m", "finefit.trace", subject, str(into or _cache(subject)), *keys]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        last = next((line for line in reversed(lines) if not line.startswith("hint: ")), lines[-1])
        if "Unrecognized model identifier" in last:
            hint = did_you_mean(subject, structures.families())
            hint = hint or "update transformers, or pick a model whose model_type it knows"
            raise ModelError(f"transformers does not know the architecture '{subject}'", hint=hint)
        if "finefit.errors.ModelError: " in last:
            hint = lines[-1].removeprefix("hint: ") if lines[-1].startswith("hint: ") else ""
            raise ModelError(last.removeprefix("finefit.errors.ModelError: "), hint=hint)
        hint = "pip install 'finefit[train]' (planning this combination needs one trace of the real model)"
        if "No module named" not in last:
            hint = f"these families are traced already: {', '.join(shipped())}"
        raise EngineError(f"the step of a {Path(subject).name} model could not be traced: {last}", hint=hint)


def shipped() -> tuple[str, ...]:
    """Families whose coefficients are shipped, of all their models or of some."""
    return tuple(sorted({path.name.removesuffix(".json.gz").partition("-")[0] for path in SHIPPED.glob("*.json.gz")}))


def write(path: Path, data: Mapping[str, Any]) -> None:
    """The same bytes for the same data, wherever and whenever: a compressed file has no date."""
    write_atomically(path, gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 9, mtime=0))


@functools.cache
def read(path: Path) -> Mapping[str, Any]:
    """Graphs of a coefficient file, by key; empty where there is none, or a damaged one that can be made again."""
    try:
        data: Mapping[str, Any] = json.loads(gzip.decompress(path.read_bytes()))["graphs"]
    except FileNotFoundError:
        return {}
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
        if path.parent == SHIPPED:
            raise
        return {}
    return data


def _cache(name: str) -> Path:
    """The file that a trace goes to."""
    return _file(writable_cache(_PART), name)


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}-{_fingerprint()}.json.gz"


@functools.cache
def _fingerprint() -> str:
    """What a trace depends on: the library that has the models, and our own modules and techniques."""
    here = Path(__file__).parent
    sources = [path for part in ("nn", "techniques") for path in sorted((here / part).glob("*.py"))]
    names = ("run.py", "evaluate.py", "trace.py", "ledger.py", "poly.py", "models.py", "build.py", "reading.py")
    sources += [here / name for name in names]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    try:
        digest.update(importlib.metadata.version("transformers").encode())
    except importlib.metadata.PackageNotFoundError:
        digest.update(b"none")
    return digest.hexdigest()[:12]
