"""A module that computes in fp32 in a run of fewer bits: what comes in is widened, what goes out is as it came.

Autocast is off inside. The norm of our own needs no wider copy of its input: it reduces in fp32 anyway, and rounds once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .norm import RMSNorm


class InFp32:
    """``run`` with floating-point inputs in fp32; results leave in ``leaves``, or else in the type of the first input."""

    def __init__(self, run: Callable[..., Any], leaves: torch.dtype | None) -> None:
        self.run, self.leaves = run, leaves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        leaves = self.leaves or next(t.dtype for t in given if t.is_floating_point())
        with torch.autocast(given[0].device.type, enabled=False):
            out = self.run(*_to(args, torch.float32), **_to(kwargs, torch.float32))
        return _to(out, leaves)


def island(module: nn.Module, leaves: torch.dtype | None = None) -> None:
    """Let the module compute in fp32; its weights are the caller's to widen."""
    if isinstance(module, RMSNorm):
        module.rounds_once = True
        return
    # The class is asked at each call: a technique that comes later may change it.
    forward = vars(module).get("forward") or (lambda *args, **kwargs: type(module).forward(module, *args, **kwargs))
    module.forward = InFp32(forward, leaves)


def is_island(module: nn.Module) -> bool:
    return isinstance(module.forward, InFp32) or (isinstance(module, RMSNorm) and module.rounds_once)


def _to(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
