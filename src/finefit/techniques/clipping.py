"""Clipping of the global gradient norm, all tensors at once. Exact: it is part of the update the user asked for."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Technique

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..run import Run


@dataclass(frozen=True, slots=True)
class Clipping(Technique):
    name = "clipping"
    exact = True

    max_norm: float = 1.0
    """0: gradients are not clipped."""

    def apply(self, run: "Run") -> None:
        if self.max_norm:
            run.clip = functools.partial(clip, max_norm=self.max_norm)

    def describe(self) -> str:
        if not self.max_norm:
            return "gradients are not clipped"
        return f"gradients clipped to a global norm of {self.max_norm:g}"


def clip(parameters: Sequence["nn.Parameter"], max_norm: float) -> "Tensor":
    """Scale all gradients so that their common 2-norm is at most ``max_norm``; the norm before that is returned."""
    import torch

    from ..run import global_norm

    norm = global_norm(parameters)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm
