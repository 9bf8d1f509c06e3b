"""When a streamed weight is in the arena: brought before its block needs it, forward and backward, one block ahead.

Hooks on the decoder blocks say where a step is. A block's forward waits for its own weights and lets the next block's come
meanwhile, into the slot that the block before has left; a gradient that reaches a block's output does the same towards the
first block, and what the block keeps, or computes again, is computed after that. The head is brought when the decoder is
through, over the blocks that are there, which come again when backward needs them; of the embedding only the rows of a
batch are read.

Whatever is brought into the place of a unit that is at work is an error of ours, and so are a unit that is not whole when
its work is over and a block that runs out of its turn: they are asserted, because nothing else would ever tell. Declines
groups of blocks that run again together (``nested``).
"""

import functools
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from torch import Tensor, nn

from .arena import Arena

BROUGHT = "units_brought"


class Schedule:
    """Follows one model's steps; ``evidence`` counts what is brought."""

    def __init__(self, arena: Arena, evidence: MutableMapping[str, int]) -> None:
        self.arena, self.evidence = arena, evidence
        self.last = len(arena.blocks) - 1
        self._coming: int | None = None
        self._at_work: int | None = None
        self._lowest: int | None = None  # the first block that a gradient will reach

    # --- what happens to the arena

    def bring(self, unit: int) -> None:
        """Have the unit there."""
        if unit not in self.arena.held:
            if self._coming != unit:
                self._land()
                self._begin(unit)
            self._land()

    def prefetch(self, unit: int) -> None:
        """Let the unit come while something else is at work."""
        if unit not in self.arena.held and self._coming != unit:
            self._land()
            self._begin(unit)

    def _begin(self, unit: int) -> None:
        units = self.arena.units
        gone = {i for i in self.arena.held if units[i].overlaps(units[unit])}
        if self._at_work is not None and units[self._at_work].overlaps(units[unit]):
            raise AssertionError(
                f"{self._says(unit)} would be brought over {self._says(self._at_work)}, which is at work"
            )
        self.arena.held -= gone
        self._coming = unit
        self.evidence[BROUGHT] = self.evidence.get(BROUGHT, 0) + 1
        self._store.begin(unit)

    def _land(self) -> None:
        """Wait for what is coming."""
        if self._coming is not None:
            self._store.finish()
            self.arena.held.add(self._coming)
            self._coming = None

    @property
    def _store(self) -> Any:
        return self.arena.store

    # --- where a step is

    def begins(self, unit: int) -> None:
        """The unit's forward."""
        if unit == 0:
            self._at_work, self._lowest = None, None  # a step may have been broken off
        if self._at_work is not None:
            raise AssertionError(f"{self._says(unit)} begins while {self._says(self._at_work)} is at work")
        self.bring(unit)
        self._at_work = unit
        if unit < self.last:
            self.prefetch(unit + 1)

    def ends(self, unit: int) -> None:
        """The unit's work is over, and its weights must have been there all the time."""
        if self._at_work != unit or unit not in self.arena.held:
            raise AssertionError(f"the weights of {self._says(unit)} were not there when it was at work")
        self._at_work = None

    def runs(self, block: int) -> None:
        """A part of the block runs, for the first time or again: only while the block is at work are its weights there."""
        if self._at_work != block:
            raise AssertionError(f"{self._says(block)} runs out of its turn")

    def awaits_gradient(self, block: int) -> None:
        """A gradient will reach the block's output."""
        self._lowest = block if self._lowest is None else min(self._lowest, block)

    def turns(self, block: int) -> None:
        """A gradient has reached the block's output: the next block's backward is over, its own begins."""
        if block < self.last and self._at_work is not None:
            if self._at_work != block + 1:
                raise AssertionError(
                    f"backward of {self._says(block)} begins while {self._says(self._at_work)} is at work"
                )
            self.ends(block + 1)
        self._at_work = None
        self.bring(block)
        self._at_work = block
        if self._lowest is not None and block > self._lowest:
            self.prefetch(block - 1)

    def _says(self, unit: int) -> str:
        names = list(self.arena.tables)
        return f"block {unit}" if unit <= self.last else names[unit - self.last - 1]


def stream(model: Any, blocks: Iterable[nn.Module], arena: Arena, evidence: MutableMapping[str, int]) -> Schedule:
    """Let the arena serve the model: hooks on its blocks and its decoder, and an embedding that reads rows."""
    model.add_module("streamed", arena)
    schedule = Schedule(arena, evidence)
    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(_before(schedule, i))
        block.register_forward_hook(_after(schedule, i))
        for part in block.children():  # a block that is computed again is not called itself
            part.register_forward_pre_hook(_running(schedule, i))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embedding, head = (names[id(m.weight)] for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    if head in arena.tables:
        number = arena.units.index(arena.tables[head])
        model.get_decoder().register_forward_hook(_through(schedule, number))
    if embedding in arena.tables:
        _read_rows(model.get_input_embeddings(), functools.partial(arena.rows, embedding))
    return schedule


def _before(schedule: Schedule, i: int) -> Callable[..., None]:
    return lambda *_: schedule.begins(i)


def _running(schedule: Schedule, i: int) -> Callable[..., None]:
    return lambda *_: schedule.runs(i)


def _after(schedule: Schedule, i: int) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        schedule.ends(i)
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            schedule.awaits_gradient(i)
            hidden.register_hook(lambda _grad: schedule.turns(i))

    return hook


def _through(schedule: Schedule, head: int) -> Callable[..., None]:
    """The decoder is through: the head is next, and its own backward is over when the hidden state has its gradient."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        schedule.begins(head)
        hidden = output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda _grad: schedule.ends(head))

    return hook


class _Rows(nn.Embedding):
    """Looks its rows up where they are kept; its weight is a view whose content is another's."""

    look_up: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return self.look_up(input)


def _read_rows(embedding: nn.Embedding, look_up: Callable[[Tensor], Tensor]) -> None:
    """Of this one module; what its family's class does to the rows, as to scale them, it still does."""
    kind = type(embedding)
    embedding.__class__ = _Rows if kind is nn.Embedding else type(kind.__name__, (kind, _Rows), {})
    embedding.look_up = look_up  # type: ignore[assignment]
