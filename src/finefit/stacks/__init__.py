"""Foreign tools' model code by what it allocates: which builder steps which tool's run."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

_OWN = {"litgpt": "litgpt", "lit_gpt": "litgpt", "torchtune": "torchtune", "torchtitan": "titan"}


def builder_of(tool: str) -> Callable[..., Any]:
    """``build(config, run, depth)`` of the tool: its own model code, or transformers'."""
    found: Callable[..., Any] = import_module(f".{_OWN.get(tool, 'transformers')}", __name__).build
    return found
