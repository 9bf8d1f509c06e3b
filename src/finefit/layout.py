"""The symbolic twin of the training state: parameter groups and what the step's activations depend on.

Techniques rewrite it on paper; ``predict.footprint`` is its only reader of bytes. It computes none itself.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from .mesh import Mesh
from .spec import ModelSpec, Parameter, Role
from .updating import Piece, Update

BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """``count`` tensors of ``numel`` elements each, alike in type and in what happens to them."""

    name: str
    numel: int
    count: int
    bits: int
    trainable: bool
    role: Role | Literal["scale"]
    rows: int = 0
    """The first dimension of each, along which shards are cut; 0 where it is flat."""
    kinds: tuple[str, ...] = ()
    """The kinds of blocks that have one each; none outside the blocks."""
    place: Literal["", "host", "disk"] = ""
    """Where it is while the device does not need it; empty where it stays on the device."""
    columns: int = 0
    """The last dimension of each; 0 of a vector and where it is flat."""
    is_island: bool = False
    """Whether it computes in fp32 where the others do in fewer bits."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of it: single numbers, and tables that the weights of all blocks share."""
        return self.numel == 1 or self.name.startswith("tables.")

    def shard(self, ranks: int) -> int:
        """Elements of the largest of ``ranks`` shards of one tensor."""
        if self.is_whole:
            return self.numel
        rows = self.rows or self.numel
        return -(-rows // ranks) * (self.numel // rows)

    def shard_bytes(self, ranks: int) -> int:
        """Of the largest of ``ranks`` shards of each, together."""
        return self.shard(ranks) * self.count * self.bits // 8

    def piece(self, ranks: int = 1) -> Piece:
        """One tensor, or the largest of ``ranks`` shards of it, as an optimizer sees it."""
        return Piece(self.shard(ranks), -(-self.rows // ranks), self.columns, self.bits)


@dataclass(frozen=True, slots=True)
class Micro:
    """The micro-batch the layout is sized for: all tokens (padding too), the longest sequence, the labelled tokens."""

    tokens: int
    longest: int
    labelled: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What is held and how the step runs. ``graph`` names the traced step: the ordered words techniques added."""

    model: ModelSpec
    groups: tuple[ParamGroup, ...]
    micro: Micro
    graph: tuple[str, ...] = ()
    half: str = "bfloat16"
    """What 16 bits are, where products are in them."""
    rank: int = 0
    checkpointed: int = 0
    """Decoder blocks, counted from the first, that keep their input only."""
    recomputed: str = "checkpointed"
    """What is traced of a checkpointed block: a kind of ``coefficients.sections_for``."""
    nested: int = 1
    """Checkpointed blocks of which one keeps its input, from which those of the others come."""
    offloaded: str = ""
    """Where the inputs of checkpointed blocks are until their backward: host or disk; else with the rest."""
    loss_chunk: int = 0
    """Rows of the vocabulary head computed at once; 0 when all logits exist together."""
    micro_steps: int = 1
    """Micro-batches of one optimizer step: from the second on, gradients are there already."""
    clipped: bool = False
    """Whether the update waits for the norm of all gradients."""
    steps_in_backward: bool = False
    """Each parameter is stepped as its gradient appears: none is kept."""
    dequantised: int = 0
    """Elements of a quantised weight that are brought back at once."""
    in_flight: int = 0
    """Bytes that a weight takes beside itself and the parameters while it is quantised; 0 where none is."""
    states_on: Literal["device", "host", "disk"] = "device"
    """Where the optimizer's states are, but for step counts where it is the device that steps."""
    gradients_on: Literal["device", "host", "disk"] = "device"
    """Where gradients are summed: what is not the device's goes there as it appears."""
    arena: int = 0
    """Bytes of the one storage on the device in which the groups that are elsewhere take turns."""
    update: Update = field(default_factory=Update)
    """The optimizer: what it keeps of what trains, and takes while it steps."""
    mesh: Mesh = field(default_factory=Mesh)
    """How it is divided over devices; bytes are of one of them."""
    own_blocks: int = 0
    """Of a pipeline's device that is looked at; 0 is the one that has most."""

    @property
    def element_bytes(self) -> int:
        """Of an activation, as the blocks compute."""
        return 4 if self.graph[0] == "fp32" else 2

    @property
    def share(self) -> Micro:
        """What one of the ranks that share the micro-batch's tokens has of it, and how many of its labels it may have."""
        tokens = self.micro.tokens // self.mesh.context
        return Micro(tokens, self.micro.longest, min(self.micro.labelled, tokens))

    @property
    def keeps_gradients(self) -> bool:
        """Whether the device has them from backward to the update; else each is there for a moment."""
        return self.gradients_on == "device" and not self.steps_in_backward

    def with_word(self, word: str) -> Self:
        return replace(self, graph=(*self.graph, word))

    @property
    def depth(self) -> int:
        """Blocks of one device."""
        mesh = self.mesh
        each, left = divmod(self.model.num_hidden_layers, mesh.stages * mesh.stages_a_rank)
        return self.own_blocks or each * mesh.stages_a_rank - (-left // mesh.stages)


def layout_of(model: ModelSpec, micro: Micro) -> Layout:
    """The plain fp32 full fine-tuning of ``model``: everything trains, nothing is saved on."""
    within = {p: tuple(k.name for k in model.block_kinds() if p in k.parameters) for p, _ in model.block_tensors()}
    blocks = (_group("block.", p, count, within[p]) for p, count in model.block_tensors())
    return Layout(model, (*blocks, *(_group("", p, 1) for p in model.outer_parameters())), micro)


def _group(prefix: str, p: Parameter, count: int, kinds: tuple[str, ...] = ()) -> ParamGroup:
    columns = p.shape[-1] if len(p.shape) > 1 else 0
    return ParamGroup(prefix + p.name, p.numel, count, 32, True, p.role, p.shape[0], kinds, columns=columns)


def traced_blocks(layout: Layout) -> list[tuple[int, int]]:
    """(traced block, how many are like it): first, any and last; two kinds of first ones where a mixture is dense there."""
    depth = layout.depth
    if depth == 1:
        return [(0, 1)]
    if not layout.model.dense_first:
        return [(0, 1), (1, depth - 2), (2, 1)]
    dense = min(len(layout.model.dense_layers), depth - 1)
    return [(0, 1), (1, dense - 1), (2, depth - dense - 1), (3, 1)]
