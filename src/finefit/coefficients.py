"""Traced coefficients: shipped for the catalogue's families, derived once and cached for anything else. Torch-free.

A file holds, for a family, the sections of ``trace`` by the graph's key. ``derive`` runs the trace in a subprocess,
because planning must not import torch; without torch it says which extra to install.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .catalog import structures
from .errors import EngineError, ModelError, did_you_mean
from .layout import Layout

SHIPPED = Path(__file__).parent / "catalog" / "coefficients"
EVALUATIONS = SHIPPED / "evaluation"
Sections = list[dict[str, Any]]


def key_of(layout: Layout) -> str:
    """The traced graph's name: what techniques changed in it, and whether the head is the embedding."""
    words = [*layout.graph, *(["tied"] if layout.model.tie_word_embeddings else [])]
    words += [word for word, on in (("bias", layout.model.attention_bias), ("mlp_bias", layout.model.mlp_bias)) if on]
    switches = structures.switches(layout.model.family) if structures.entry_of(layout.model.family) else ()
    words += [f"{key}={value}" for key, value in layout.model.options if key in switches]
    return " ".join(words)


def sections_for(layout: Layout, checkpointed: str) -> Sections:
    """Sections of the graph with no block (``plain``) or every block (``checkpointed``) checkpointed, or of ``eval``."""
    family, key = layout.model.family, _with_kind(key_of(layout), checkpointed)
    if (found := _shipped(family).get(key)) is not None:
        return found  # type: ignore[no-any-return]
    if (found := _read(_cache(family)).get(key)) is not None:
        return found  # type: ignore[no-any-return]
    derive(family, [key])
    _read.cache_clear()
    return _read(_cache(family))[key]  # type: ignore[no-any-return]


def kinds_of(key: str) -> set[str]:
    """What is traced of a graph: its step with no block and with every block checkpointed, and its evaluation."""
    return {_with_kind(key, kind) for kind in ("plain", "checkpointed", "eval")}


def _with_kind(key: str, kind: str) -> str:
    """The key of a trace; an evaluation is without dropout."""
    return f"{key.replace(' dropout', '')} eval" if kind == "eval" else f"{key} {kind}"


def is_traced(layout: Layout) -> bool:
    """Whether the layout's graph is at hand, all kinds of it, without a trace."""
    family, all_kinds = layout.model.family, kinds_of(key_of(layout))
    known = _shipped(family).keys()
    return all_kinds <= known or all_kinds <= known | _read(_cache(family)).keys()


def derive(family: str, keys: list[str], into: Path | None = None) -> None:
    """Trace ``keys`` of ``family`` in a subprocess and add them to the file ``into`` (default: the user's cache)."""
    command = [sys.executable, "-m", "finefit.trace", family, str(into or _cache(family)), *keys]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        last = next((line for line in reversed(lines) if not line.startswith("hint: ")), lines[-1])
        known = sorted(path.stem for path in SHIPPED.glob("*.json"))
        if "Unrecognized model identifier" in last:
            hint = did_you_mean(family, known) or "update transformers, or pick a model whose model_type it knows"
            raise ModelError(f"transformers does not know the architecture '{family}'", hint=hint)
        hint = "pip install 'finefit[train]' (planning this combination needs one trace of the real model)"
        if "No module named" not in last:
            hint = f"these families are traced already: {', '.join(known)}"
        reason = last.removeprefix("finefit.errors.ModelError: ")
        raise EngineError(f"the step of a {family} model could not be traced: {reason}", hint=hint)


def _cache(family: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "finefit" / "coefficients" / f"{family}-{_fingerprint()}.json"


@functools.cache
def _fingerprint() -> str:
    """What a trace depends on: the library that has the models, and our own modules and techniques."""
    here = Path(__file__).parent
    sources = [path for part in ("nn", "techniques") for path in sorted((here / part).glob("*.py"))]
    names = ("run.py", "evaluate.py", "trace.py", "ledger.py", "poly.py", "models.py", "build.py")
    sources += [here / name for name in names]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    try:
        digest.update(importlib.metadata.version("transformers").encode())
    except importlib.metadata.PackageNotFoundError:
        digest.update(b"none")
    return digest.hexdigest()[:12]


@functools.cache
def _shipped(family: str) -> Mapping[str, Any]:
    return {**_read(SHIPPED / f"{family}.json"), **_read(EVALUATIONS / f"{family}.json")}


@functools.lru_cache(maxsize=16)
def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    data: Mapping[str, Any] = json.loads(path.read_text())["graphs"]
    return data
