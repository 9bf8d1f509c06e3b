"""Clipping of the global gradient norm, all tensors at once. Exact: it is part of the update the user asked for."""

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..layout import Layout
from .base import Technique

if TYPE_CHECKING:
    from ..run import Run


@dataclass(frozen=True, slots=True)
class Clipping(Technique):
    name = "clipping"
    exact = True

    max_norm: float = 1.0
    """0: gradients are not clipped."""

    def rewrite(self, layout: Layout) -> Layout:
        return replace(layout, clipped=self.max_norm > 0)

    def apply(self, run: "Run") -> None:
        from ..nn.gradients import clip

        if self.max_norm:
            run.clip = functools.partial(clip, max_norm=self.max_norm)

    def describe(self) -> str:
        if not self.max_norm:
            return "gradients are not clipped"
        return f"gradients clipped to a global norm of {self.max_norm:g}"
