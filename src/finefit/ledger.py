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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .footprint import COMPONENTS
from .parts import Following, local
from .scratch import is_mapped
from .stream import Entry, Stream, block_of

Workspace = Callable[[Sequence[Any], Any], int]
"""(arguments, result) of an operator → bytes."""


# What first makes a state from a parameter.
_ALIKE = tuple(getattr(torch.ops.aten, op).default for op in ("zeros_like", "empty_like", "new_empty"))


class Ledger(Stream, Following):
    """Use as a context; ``mark(name)`` opens the next section. ``entries`` is in order of birth.

    ``workspaces`` says, by operator, how many bytes its kernel takes while it runs: for fake tensors that stand for
    those of another device. Of a GPU's step what lies on the host takes nothing; nor do, anywhere, pages of a file.
    """

    def __init__(self, workspaces: Mapping[Any, Workspace] | None = None, device: str = "cpu") -> None:
        Stream.__init__(self)
        Following.__init__(self, self._resized)
        self.workspaces, self.device = workspaces or {}, device
        self._live: dict[int, int] = {}  # storage key → entry
        self._coming = ""

    def mark(self, name: str) -> None:
        self.opened(name)
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

    def leave_whole(self, tensors: Iterable[Tensor]) -> None:
        """Say that no engine cuts these tensors."""
        for tensor in tensors:
            self.entries[self._see(tensor)].whole = True

    def _resized(self, storage: torch.UntypedStorage, n_bytes: int) -> None:
        if storage._cdata in self._live:
            self.died(self._live[storage._cdata])
            held = n_bytes if storage.device.type in (self.device, "meta") else 0  # a fake tensor's is on meta
            self._live[storage._cdata] = self.born(Entry(held, 0, 0, (n_bytes,), 1, "temporary"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        if func in self.workspaces:
            self._pass(self.workspaces[func](args, out))
        if isinstance(out, list | tuple) and args and isinstance(args[0], list | tuple):
            self.inherit(out, args[0])
        elif func in _ALIKE:
            self.inherit([out], args[:1])
        return out

    def _pass(self, n_bytes: int) -> None:
        """Bytes that were there while one operator ran, beside its results."""
        if n_bytes:
            self.died(self.born(Entry(n_bytes, 0, 0, (n_bytes,), 1)))

    def inherit(self, made: Sequence[Any], sources: Sequence[Any]) -> None:
        """What is made of a tensor outside the blocks belongs to the block of that tensor, one by one."""
        if len(made) != len(sources):
            return
        for one, source in zip(made, sources, strict=True):
            if isinstance(one, Tensor) and isinstance(source, Tensor):
                origin, entry = self.entries[self._see(source)], self.entries[self._see(one)]
                if entry is not origin and entry.block < 0:
                    block = block_of(self.sections[origin.section])
                    entry.block = origin.block if block is None else block

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def _see(self, tensor: Tensor) -> int:
        tensor = local(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return self._live[key]
        if self._coming:
            self.mark(self._coming)
        n_bytes = storage.nbytes() if tensor.device.type == self.device and not is_mapped(tensor) else 0
        index = self.born(Entry(n_bytes, 0, 0, tuple(tensor.shape), tensor.element_size()))
        self._live[key] = index
        weakref.finalize(storage, self._gone, key, index)
        return index

    def _gone(self, key: int, index: int) -> None:
        self.died(self._live.pop(key, index))


class NoLedger:
    """Stands where a ledger may be and notes nothing."""

    def mark(self, name: str) -> None:
        return None


@contextmanager
def block_marks(ledger: Ledger, blocks: Iterable[torch.nn.Module], word: str = "forward") -> Iterator[None]:
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
            ledger.mark_at_next_birth(f"{word} after")

        return hook

    for i, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(entered(f"{word} {i}")))
        handles.append(block.register_forward_hook(left(i)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
