"""Tensor parallel (arXiv:1909.08053) with sequence parallel (arXiv:2205.05198): weights, and the rows between them, in parts.

Each device has some heads, some of the MLP's width and some of the vocabulary; between the sub-layers each has some of the
rows. The rows are gathered before attention, the MLP and the loss, and what these make is summed and scattered: four
collectives a block that nothing hides. Norms are held whole, and of an adapter the half that is not cut.

Declines weights that do not divide or are quantised, mixtures of experts, and families whose layers have other names than
Llama's: what is cut by columns and what by rows is known by name alone.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..data.micro import ALIGNMENT
from ..layout import Layout, ParamGroup
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

COLUMNS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
"""Linear layers of which a device has some outputs: heads, or features of the MLP."""
ROWS = ("o_proj", "down_proj")
"""Those of which it has the inputs that it makes itself."""


@dataclass(frozen=True, slots=True)
class TensorParallel(Technique):
    name = "tensor_parallel"
    exact = True

    ranks: int

    def rewrite(self, layout: Layout) -> Layout:
        model, n = layout.model, self.ranks
        if layout.mesh.context > 1:
            raise Unsuitable("context parallel is planned with data parallel and sharded ranks only")
        for size, what in (
            (model.num_key_value_heads, "key/value heads"), (model.num_attention_heads, "heads"),
            (model.intermediate_size, "columns of the MLP"), (ALIGNMENT, "rows, of which all batches have a multiple,"),
        ):  # fmt: skip
            if size % n:
                raise Unsuitable(f"{size} {what} do not divide among {n} devices")
        if model.num_experts:
            raise Unsuitable("a mixture's experts are not divided by rows and columns yet")
        if model.extra or not model.packs:
            raise Unsuitable(
                f"the layers of this '{model.family}' model are its own, and where to cut them is not known"
            )
        if layout.dequantised:
            raise Unsuitable("blocks of quantised weights do not divide by rows and columns")
        groups = tuple(self._part(g, model.head_dim) for g in layout.groups)
        return replace(layout, groups=groups, mesh=replace(layout.mesh, tensor=n)).with_word("tensor")

    def _part(self, group: ParamGroup, head_dim: int) -> ParamGroup:
        """What a device has of it; Unsuitable where that is not known."""
        if not group.kinds and "lora_" not in group.name:
            return group if group.role == "norm" else self._rows(group)
        path, _, leaf = group.name.removesuffix(".lora_A").removesuffix(".lora_B").rpartition(".")
        layer, half = path.rpartition(".")[2], group.name[-1] if "lora_" in group.name else ""
        if layer in COLUMNS:
            return group if half == "A" else self._rows(group)
        if layer in ROWS and leaf == "weight":
            return (
                group
                if half == "B"
                else replace(group, numel=group.numel // self.ranks, columns=group.columns // self.ranks)
            )
        is_of_heads = ".self_attn." in group.name
        if group.role in ("norm", "bias") and layer not in ROWS and (not is_of_heads or group.numel == head_dim):
            return group
        raise Unsuitable(f"how {group.name} is to be divided among devices is not known")

    def _rows(self, group: ParamGroup) -> ParamGroup:
        """With its part of the first dimension; the largest, where it does not divide evenly."""
        rows = -(-group.rows // self.ranks)
        return replace(group, numel=group.numel // group.rows * rows, rows=rows)

    def apply(self, run: "Run") -> None:
        import torch.distributed as dist

        from ..nn.tensor_parallel import cut_weights

        place = dist.get_rank(run.world.group("tensor")), self.ranks
        cut_weights(run.model, place, COLUMNS, ROWS)

    def divide(self, run: "Run") -> None:
        from ..nn.tensor_parallel import divide_rows

        divide_rows(run, run.world.group("tensor"))

    def describe(self) -> str:
        return f"every weight matrix, and the rows between them, divided among {self.ranks} devices"

    def setting(self) -> str:
        return str(self.ranks)

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        from ..parts import all_cuts

        if (ranks := run.world.mesh.tensor) != self.ranks:
            raise NotAsPlanned(f"tensor_parallel: {ranks} ranks share the weights, not {self.ranks}")
        cuts = all_cuts(run.model)
        large = [
            name for name, p in run.model.named_parameters() if p.dim() > 1 and name not in cuts and "lora_" not in name
        ]
        if large:
            raise NotAsPlanned(f"tensor_parallel: {len(large)} matrices are whole on each rank: {large[:3]}")
