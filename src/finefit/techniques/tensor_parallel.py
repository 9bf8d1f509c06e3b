"""Tensor parallel (arXiv:1909.08053) with sequence parallel (arXiv:2205.05198), as DTensor's styles run them.

Each device has some heads, some of the MLP's width and some of the vocabulary; between the matrices each has some of the
rows. The rows are gathered before attention and before the MLP, and their sums scattered after: four collectives a block
that nothing hides. Norms are held whole. Declines weights that do not divide, and quantised ones.
"""

from dataclasses import dataclass, replace

from ..layout import Layout, ParamGroup
from .base import Technique, Unsuitable

_WHOLE = ("norm", "scale")


@dataclass(frozen=True, slots=True)
class TensorParallel(Technique):
    name = "tensor_parallel"
    exact = True

    ranks: int

    def rewrite(self, layout: Layout) -> Layout:
        model, n = layout.model, self.ranks
        for size, what in (
            (model.num_key_value_heads, "key/value heads"), (model.num_attention_heads, "heads"),
            (model.intermediate_size, "columns of the MLP"), (model.moe_intermediate_size, "columns of an expert"),
        ):  # fmt: skip
            if size % n:
                raise Unsuitable(f"{size} {what} do not divide among {n} devices")
        if layout.dequantised:
            raise Unsuitable("blocks of quantised weights do not divide by rows and columns")
        groups = tuple(g if self._is_whole(g) else replace(g, numel=-(-g.numel // n), rows=0) for g in layout.groups)
        return replace(layout, groups=groups, mesh=replace(layout.mesh, tensor=n))

    @staticmethod
    def _is_whole(group: ParamGroup) -> bool:
        """Norms are; of an adapter's two matrices one is, and both are small: they are reckoned as whole."""
        return group.role in _WHOLE or ".lora_" in group.name

    def describe(self) -> str:
        return f"every weight matrix, and the rows between them, divided among {self.ranks} devices"
