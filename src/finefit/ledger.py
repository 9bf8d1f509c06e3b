"""Following live storages: every allocation a step makes, with its section, until it is freed.

A dispatch mode sees each operator's outputs; a storage seen for the first time is an entry, its finaliser closes it.
The same ledger runs over fake tensors (trace) and over real ones (the measured footprint). It sees tensors only:
buffers a kernel takes for itself inside one operator are not in it. Costs about half of a step's time again on a CPU,
so a run keeps it for its rehearsal and its first step.

What an entry *is* is decided afterwards from its whole life: parameters, gradients, optimizer states and inputs are
named by whoever owns them; of the rest, what was born in a forward section and outlived it is an activation, what died
where it was born is temporary.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .footprint import COMPONENTS


@dataclass(slots=True)
class Entry:
    """One storage: bytes, the section and event it was born in, and the event it died in (-1 while alive)."""

    n_bytes: int
    section: int
    born: int
    shape: tuple[int, ...]
    itemsize: int
    owner: str = ""
    died: int = -1
    died_section: int = -1


class Ledger(TorchDispatchMode):
    """Use as a context; ``mark(name)`` opens the next section. ``entries`` is in order of birth."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.sections: list[str] = ["start"]
        self.section_start: list[int] = [0]
        self.events: list[tuple[int, int]] = []  # (entry, +1 born or -1 died)
        self._live: dict[int, int] = {}  # storage key → entry
        self._coming = ""

    def mark(self, name: str) -> None:
        self.sections.append(name)
        self.section_start.append(len(self.events))
        self._coming = ""

    def mark_at_next_birth(self, name: str) -> None:
        """Open the section with the next allocation: what is let go until then belongs to the present one."""
        self._coming = name

    def own(self, tensors: Iterable[Tensor | None], owner: str) -> None:
        """Name what these tensors' storages are: a component other than activation or temporary."""
        assert owner in COMPONENTS
        for tensor in tensors:
            if tensor is not None:
                self.entries[self._see(tensor)].owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def _see(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return self._live[key]
        if self._coming:
            self.mark(self._coming)
        index, n_bytes = len(self.entries), storage.nbytes()
        shape = tuple(tensor.shape)
        self.entries.append(Entry(n_bytes, len(self.sections) - 1, len(self.events), shape, tensor.element_size()))
        self.events.append((index, 1))
        self._live[key] = index
        weakref.finalize(storage, self._gone, key, index)
        return index

    def _gone(self, key: int, index: int) -> None:
        self._live.pop(key, None)
        entry = self.entries[index]
        entry.died, entry.died_section = len(self.events), len(self.sections) - 1
        self.events.append((index, -1))

    def component(self, entry: Entry) -> str:
        if entry.owner:
            return entry.owner
        born_in = self.sections[entry.section]
        if born_in.startswith("forward") and entry.died_section != entry.section:
            return "activation"
        return "temporary"

    def curve(self) -> Iterator[tuple[int, int, str, dict[str, int]]]:
        """(event, section, moment of the section, live bytes by component) after each event that adds bytes."""
        live = dict.fromkeys(COMPONENTS, 0)
        section = 0
        for event, (index, sign) in enumerate(self.events):
            while section + 1 < len(self.sections) and self.section_start[section + 1] <= event:
                section += 1
            entry = self.entries[index]
            live[self.component(entry)] += sign * entry.n_bytes
            if sign > 0:
                yield event, section, moment_of(self.sections[section]), live

    def moments(self) -> dict[str, dict[str, int]]:
        """For each moment, the composition at its highest point."""
        best: dict[str, dict[str, int]] = {}
        tops: dict[str, int] = {}
        for _, _, moment, live in self.curve():
            total = sum(live.values())
            if moment and total > tops.get(moment, -1):
                tops[moment], best[moment] = total, {name: n for name, n in live.items() if n}
        return best


def moment_of(section: str) -> str:
    """The moment a section belongs to: its first word, in the names of ``footprint.MOMENTS``."""
    words = {"forward": "forward_end", "loss": "loss", "backward": "backward_peak", "optimizer": "optimizer_step"}
    return words.get(section.split(" ")[0], "")


class NoLedger:
    """Stands where a ledger may be and notes nothing."""

    def mark(self, name: str) -> None:
        return None


@contextmanager
def block_marks(ledger: Ledger, blocks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Sections by decoder block: ``forward i`` … and, as gradients reach a block's output, ``backward i``.

    A forward section lasts beyond its block: a block's input is let go when its caller has the output.
    """
    handles = []

    def entered(name: str) -> Any:
        return lambda *_: ledger.mark(name)

    def left(i: int) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _grad: ledger.mark(f"backward {i}"))
            ledger.mark_at_next_birth("forward after")

        return hook

    for i, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(entered(f"forward {i}")))
        handles.append(block.register_forward_hook(left(i)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
