"""What dividing a run over devices adds to a predicted step: stages of a pipeline, gathered weights, whole gradients.

As FSDP2 runs it (``torch/distributed/fsdp/_fully_shard``): a unit a block and one for all else, whose weights stay gathered
from the start of forward to the end of backward; of the blocks the one that runs and the next are whole (stage 3), or all
of them (stage 2). A block's gradients are whole until they are reduced; the reduction's fp32 input lives until the next
block's. A tensor-parallel rank's sections are traced as they are. Torch-free.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .layout import Layout, ParamGroup, traced_blocks
from .sections import Section

_FP32 = 4


@dataclass(frozen=True, slots=True)
class Part:
    """The blocks of one device: all of them, or those of the first or the last stage of a pipeline."""

    layout: Layout
    """With the groups this device has."""
    is_first: bool = True
    is_last: bool = True
    in_flight: int = 1
    """Micro-batches whose activations are held when the first backward begins (1F1B)."""

    @property
    def checkpointed(self) -> int:
        """Of the stage's blocks; of all stages alike."""
        k, depth, whole = self.layout.checkpointed, self.layout.depth, self.layout.model.num_hidden_layers
        return -(-k * depth // whole)


def parts(layout: Layout) -> tuple[Part, ...]:
    """The devices that may need most: of a pipeline the first (most micro-batches held) and the last (the head)."""
    stages = layout.mesh.stages
    if stages == 1:
        return (Part(layout),)
    first, last = _staged(layout.groups, stages, layout.model.tie_word_embeddings)
    return (
        Part(replace(layout, groups=first), is_last=False, in_flight=min(stages, layout.micro_steps)),
        Part(replace(layout, groups=last), is_first=False),
    )


# A search asks for the same groups with every micro-batch and number of checkpointed blocks.
@functools.lru_cache(maxsize=1024)
def _staged(
    groups: tuple[ParamGroup, ...], stages: int, tied: bool
) -> tuple[tuple[ParamGroup, ...], tuple[ParamGroup, ...]]:
    """Groups of the first and of the last stage."""
    cut = [replace(g, count=-(-g.count // stages)) if _is_block(g) else g for g in groups]
    first = tuple(g for g in cut if _is_block(g) or g.role == "embedding")
    return first, tuple(g for g in cut if _is_block(g) or g.role != "embedding" or tied)


def _is_block(group: ParamGroup) -> bool:
    return group.name.startswith("block.")


@dataclass(frozen=True, slots=True)
class _Sums:
    """Bytes as groups are computed with, and of the fp32 inputs of their reduction; of all blocks together."""

    blocks: int
    outer: int
    gradients: int
    trained: int
    reduced: int


@functools.lru_cache(maxsize=1024)
def _sums(groups: tuple[ParamGroup, ...], cast: bool) -> _Sums:
    inside = [(g, _computed(g, cast)) for g in groups if _is_block(g)]
    outer = [(g, _computed(g, cast)) for g in groups if not _is_block(g)]
    gradients = sum(n for g, n in inside if g.trainable)
    return _Sums(
        sum(n for _, n in inside), sum(n for _, n in outer), gradients,
        gradients + sum(n for g, n in outer if g.trainable),
        _FP32 * sum(g.numel * g.count for g, _ in inside if g.trainable),
    )  # fmt: skip


class Divided:
    """The sections of one device's step, made from those of a single device's."""

    def __init__(self, part: Part, fixed: Mapping[str, int]) -> None:
        layout, self.is_first = part.layout, part.is_first
        mesh = layout.mesh
        self.stage, self.depth = mesh.stage, layout.depth
        self.reduces = mesh.stage >= 2
        """Gradients are reduced to shards after every block's backward."""
        sums = _sums(layout.groups, layout.graph[0] == "bf16")
        self.block, self.outer = sums.blocks // layout.depth, sums.outer
        self.gradients, self.reduced = sums.gradients // layout.depth, sums.reduced // layout.depth
        self.last = f"backward {traced_blocks(layout)[-1][0]}"
        whole = sums.trained
        fresh = layout.micro_steps == 1
        # The last block's buffer is let go of when the forward of all is over. Of stage 2 only a step's first micro-batch
        # gathers, before there are gradients.
        self.lets_go = self.stage == 2 and mesh.stages == 1
        """Of blocks that stay gathered until backward, as that is through with them."""
        self.waiting = self.block if fresh or self.stage == 3 else max(self.block - fixed["gradient"], 0)
        self.kept = (fixed["gradient"] / whole if fresh else 0.0) if self.reduces and whole else 1.0

    def section(self, name: str, section: Section) -> Section:
        end, top = dict(section.end), dict(section.top)
        of_block = name[-1].isdigit()
        if name == "backward 0":
            self._embedding(end, top)
        if of_block and name.startswith("backward"):
            if "gradient" in end:
                end["gradient"] = round(end["gradient"] * self.kept)
            _add(end, "temporary", -self.block * self.lets_go)
        if held := self._held(name, of_block):
            top["temporary"] = top.get("temporary", 0) + held
        return Section(end, top, sum(top.values()))

    def _embedding(self, end: dict[str, int], top: dict[str, int]) -> None:
        """Its gradient comes last: on the first device, when those of the block are reduced and its weights let go."""
        table = max(end.get("gradient", 0) - self.gradients, 0)
        if self.is_first:
            there = min(table, self.gradients + self.block) if self.reduces else 0
        else:
            there = table
            _add(end, "gradient", -table)
        _add(top, "gradient", -min(there, top.get("gradient", 0)))

    @property
    def gathered(self) -> int:
        """Bytes of blocks that are whole when backward begins, and are let go of one by one."""
        return self.depth * self.block * self.lets_go

    def _held(self, name: str, of_block: bool) -> int:
        """Gathered weights, and what a reduction still reads, beside the section's own."""
        if not self.reduces or name == "optimizer":
            return 0
        backward = name.startswith("backward")
        if backward and self.lets_go:
            whole = 0  # they are reckoned with as they are let go of
        elif backward and self.stage == 3:
            whole = min(2, self.depth) * of_block * self.block
        elif of_block or name.endswith(("after", "loss")):  # what is gathered is copied out
            whole = (self.depth if self.stage == 2 else of_block) * self.block + self.waiting
        else:
            whole = (self.stage == 2) * self.depth * self.block
        follows = (
            of_block and backward and name != self.last
        )  # nothing is reduced before the last block, which is first
        return self.outer + whole + self.reduced * follows


def _add(parts: dict[str, int], component: str, n_bytes: int) -> None:
    if n_bytes:
        parts[component] = parts.get(component, 0) + n_bytes


def _computed(group: ParamGroup, cast: bool) -> int:
    """Bytes of the group as it is computed with: masters are cast when they are gathered, adapters are not."""
    is_cast = cast and ".lora_" not in group.name
    return group.numel * group.count * (min(group.bits, 16) if is_cast else group.bits) // 8
