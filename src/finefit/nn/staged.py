"""A model of which a process has some of the blocks: the others are gone, and their names with them.

Blocks are consecutive in a stage; a process may have several stages. What is before the blocks (embeddings) belongs to the
first, what is after them (last norm, head) to the last. A stage's forward is the decoder's own: modules of other stages
are replaced, for the time of it, by some that pass on what they are given, and what was received takes the place of what
the block before would have given. Where embedding and head share a weight both ends have it.

Shapes: T tokens of a row, h hidden.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..parts import cuts_of
from ..run import blocks_of


class Passing(nn.Module):
    """In place of a block, or of a norm: gives what it is given. ``adapters_elsewhere`` are shapes of each A of a block's."""

    def __init__(self, block: nn.Module | None = None) -> None:
        super().__init__()
        found = [module for module in block.modules() if hasattr(module, "lora_A")] if block is not None else []
        self.adapters_elsewhere = tuple(
            part.shape if (part := cuts_of(module).get("lora_A")) else module.lora_A.shape for module in found
        )

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states


class Received(nn.Module):
    """In place of the block before a stage's first: gives what that one gave where it is."""

    hidden_1th: Tensor | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor | None:
        return self.hidden_1th


class NoEmbedding(nn.Module):
    """In place of an embedding: rows of zeros that take no memory, for what reads their shape and type."""

    def __init__(self, received: Received) -> None:
        super().__init__()
        self.beside = (received,)  # not a part of it

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        hidden_1th = self.beside[0].hidden_1th
        assert hidden_1th is not None
        return hidden_1th.detach().new_zeros(1).expand(hidden_1th.shape)


class Stage:
    """Modules in place of others while a stage runs."""

    def __init__(self, blocks: Sequence[nn.Module], own: range, received: Received) -> None:
        self.is_first, self.is_last = own.start == 0, own.stop == len(blocks)
        self.received = received
        chosen = [block if i in own else Passing() for i, block in enumerate(blocks)]
        if not self.is_first:
            chosen[own.start - 1] = received
        self.blocks = nn.ModuleList(chosen)
        self.others: dict[tuple[nn.Module, str], nn.Module] = {}
        """By the parent and the name of what they stand for."""

    @contextmanager
    def running(self, hidden_1th: Tensor | None) -> Iterator[None]:
        """What is given by the stage before, as its forward is made."""
        before = {(parent, name): parent._modules[name] for parent, name in self.others}
        self.received.hidden_1th = hidden_1th
        try:
            for (parent, name), module in self.others.items():
                parent._modules[name] = module
            yield
        finally:
            self.received.hidden_1th = None
            for (parent, name), found in before.items():
                parent._modules[name] = found


def cut(model: Any, slices: Sequence[range], own: Sequence[int]) -> list[Stage]:
    """The stages ``own`` of ``slices`` of the blocks; all that belongs to none of them is taken out of the model."""
    decoder, blocks, received = model.get_decoder(), blocks_of(model), Received()
    stages = [Stage(list(blocks), slices[i], received) for i in own]
    here = {i for number in own for i in slices[number]}
    place = next(name for name, module in decoder.named_children() if module is blocks)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head.weight is embedding.weight
    before, after = _outside(decoder, blocks)
    for stage in stages:
        stage.others[decoder, place] = stage.blocks
        if not stage.is_first:
            stage.others |= {(decoder, name): NoEmbedding(received) for name in before}
        if not stage.is_last:
            stage.others |= {(decoder, name): Passing() for name in after}
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    for i in set(range(len(blocks))) - here:
        blocks[i] = Passing(blocks[i])
    for name, module in before.items():
        if not is_first and not (is_last and is_tied and module is embedding):
            setattr(decoder, name, NoEmbedding(received))
    if not is_last:
        for name in after:
            setattr(decoder, name, Passing())
        model.set_output_embeddings(Passing())
        model.tie_weights = lambda *_args, **_kwargs: None  # there is nothing to tie
    return stages


def _outside(decoder: Any, blocks: nn.ModuleList) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the decoder has beside its blocks that has weights: before them and after them."""
    found = {
        name: module
        for name, module in decoder.named_children()
        if module is not blocks and any(True for _ in module.parameters())
    }
    before = {name: module for name, module in found.items() if isinstance(module, nn.Embedding)}
    return before, {name: module for name, module in found.items() if name not in before}
