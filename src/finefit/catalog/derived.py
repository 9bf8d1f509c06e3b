"""Tensors of families that `structures.json` does not have: transformers builds the config, once, in a subprocess.

Planning must not import torch, and a wrong guess must not take this process down. What comes back is kept in the user's
cache, by config and by transformers' version. Without torch there is nothing to ask: the caller decides.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelError, did_you_mean
from ..files import cache_folders, writable_cache
from . import structures

_PART = "structures"  # of the user's cache
_LIMIT_S = 300  # building the largest known model on meta takes seconds
_HINT = "update transformers, or pick a model whose model_type it knows"


def built(text: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """``rows`` and the class's own sizes (``config``) of a config's text part; None where torch is not installed.

    ModelError when transformers does not know the family, or cannot build this config.
    """
    if not _can_build():
        return None
    file = _file_of(text)
    for folder in cache_folders(_PART):
        if (found := _read(folder / file)) is not None:
            return found
    path = writable_cache(_PART) / file
    _build(text, path, name)
    made: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
    return made


def _read(path: Path) -> Mapping[str, Any] | None:
    """What was built before, or None: a file that is damaged or not to be read is built again."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _can_build() -> bool:
    return bool(importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"))


def _build(text: Mapping[str, Any], path: Path, name: str) -> None:
    family = str(text["model_type"])
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "config.json"
        source.write_text(json.dumps(text), "utf-8")
        command = [sys.executable, "-P", "-m", "finefit.skeleton", str(source), str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise ModelError(
                f"{name}: building a '{family}' model took longer than {_LIMIT_S} s", hint=_HINT
            ) from error
    if done.returncode:
        raise _told(family, name, (done.stderr.strip().splitlines() or ["no message"])[-1], done.stderr)


def _told(family: str, name: str, last: str, everything: str) -> ModelError:
    """What the subprocess died of, as one message."""
    if "Unrecognized model identifier" in everything:
        hint = did_you_mean(family, structures.families()) or _HINT
        return ModelError(f"transformers does not know the architecture '{family}'", hint=hint)
    if "for this kind of AutoModel" in everything:
        return ModelError(f"{name}: '{family}' is not a language model that transformers can train", hint=_HINT)
    return ModelError(f"{name}: transformers cannot build this '{family}' config: {last}", hint="mend the config.json")


def _file_of(text: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(text, sort_keys=True).encode() + _version().encode()).hexdigest()
    return f"{digest[:16]}.json"


@functools.cache
def _version() -> str:
    source = Path(__file__).parent.parent / "skeleton.py"
    return importlib.metadata.version("transformers") + hashlib.sha256(source.read_bytes()).hexdigest()
