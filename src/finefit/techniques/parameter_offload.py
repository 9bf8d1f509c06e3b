"""Frozen weights streamed: they are on the host or on a disk, and two blocks of them at a time on the device.

Each comes before its block needs it, forward and backward, while the block before is at work (as ZeRO-Infinity does it,
arXiv:2104.07857, section 5, and FlexGen in one direction); the head comes when its turn is, over the blocks, and of the
embedding the rows of the batch. Everything that does not train and is large goes: the blocks' frozen tensors, embedding
and head; what trains stays, with its states. Exact: the same tensors at the same addresses, only later. Declines weights
that train, several devices, and a host that is the device itself.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..layout import Layout, ParamGroup
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from ..ledger import Ledger
    from ..run import Run

ALIGNED = 64  # bytes: nn.arena's
STAGES = 2 * 2**26  # bytes: nn.side_stream's
Place = Literal["host", "disk"]
_SLOTS = 2
_SAYS = {"host": "the host's memory", "disk": "the disk"}


@dataclass(frozen=True, slots=True)
class ParameterOffload(Technique):
    name = "parameter_offload"
    exact = True

    place: Place = "disk"

    def rewrite(self, layout: Layout) -> Layout:
        model = layout.model
        if layout.mesh.devices > 1:
            raise Unsuitable(
                "weights are streamed to one device; of several, zero2 or zero3 with memory.optimizer_offload=host has them on the host"
            )
        if model.num_hidden_layers <= _SLOTS:
            raise Unsuitable(
                f"the model has {model.num_hidden_layers} blocks, and {_SLOTS} are on the device at a time"
            )
        groups = tuple(replace(g, place=self.place) if _is_streamed(layout, g) else g for g in layout.groups)
        gone = [g for g in groups if g.place]
        slot = max(sum(_aligned(g) for g in gone if kind.name in g.kinds) for kind in model.block_kinds())
        if not slot:
            raise Unsuitable("weights that train are not streamed, and none of the blocks' is frozen")
        tables = [_aligned(g) for g in gone if not g.kinds]
        return replace(layout, groups=groups, arena=max(_SLOTS * slot, *tables, 0))

    def apply(self, run: "Run") -> None:
        from ..nn.arena import Arena
        from ..nn.streamed import stream
        from ..run import blocks_of

        model, blocks, names = run.model, blocks_of(run.model), _frozen(run.model)
        ends = [module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings())]
        inside = [{names[id(p)]: p for p in block.parameters() if id(p) in names} for block in blocks]
        tables: dict[str, Tensor] = {names[id(p)]: p for p in ends if id(p) in names}
        stream(model, blocks, Arena(inside, tables, self.place), run.evidence)

    def setting(self) -> str:
        return self.place

    def describe(self) -> str:
        return f"frozen weights on {_SAYS[self.place]}, two blocks of them on the device, the next one on its way"

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        from ..nn.streamed import BROUGHT
        from ..run import blocks_of

        blocks = blocks_of(run.model)
        within = [list(block.parameters()) for block in blocks]
        names = _frozen(run.model)
        storages = {p.untyped_storage().data_ptr() for ps in within for p in ps if id(p) in names}
        if len(storages) > 1:
            raise NotAsPlanned(
                f"parameter_offload: frozen weights of the blocks are in {len(storages)} places, not in one"
            )
        trained = (i for i, ps in enumerate(within) if any(p.requires_grad for p in ps))
        both = 2 * len(blocks) - next(trained, 0)  # forward, and backward down to the first block that trains
        least = (both - 2 * _SLOTS) * run.evidence.get("micro_steps", 1)
        if (seen := run.evidence.get(BROUGHT, 0)) < least:
            raise NotAsPlanned(f"parameter_offload: weights were brought {seen} times, not {least} or more")


def _frozen(model: "Module") -> dict[int, str]:
    """What does not train, by identity, but the tables of codes that quantised weights share, which stay."""
    from ..nn.blockwise import Tables

    shared = {id(p) for module in model.modules() if isinstance(module, Tables) for p in module.parameters()}
    return {id(p): name for name, p in model.named_parameters() if not p.requires_grad and id(p) not in shared}


def _is_streamed(layout: Layout, group: ParamGroup) -> bool:
    """What does not train and is of a block, or is a table of the whole vocabulary outside them."""
    if group.trainable:
        return False
    whole = group.rows == layout.model.vocab_size and group.numel > group.rows
    return bool(group.kinds) or (group.role in ("embedding", "head") and whole)


def _aligned(group: ParamGroup) -> int:
    """Bytes that one of its tensors takes in the arena."""
    return -(-group.numel * group.bits // 8 // ALIGNED) * ALIGNED


def pinned_bytes(layout: Layout) -> int:
    """Bytes of the host beside a CUDA device that are pinned for good: all that is streamed from there, or the two pieces
    that files are read into."""
    places = {g.place for g in layout.groups}
    if layout.mesh.devices > 1:
        return sum(g.shard_bytes(layout.mesh.sharing) for g in layout.groups if g.place == "host")
    return STAGES if "disk" in places else sum(_aligned(g) * g.count for g in layout.groups if g.place == "host")
