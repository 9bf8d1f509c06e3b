"""Memory that grows from step to step, told apart by what grows with it.

Between steps as much is in use as after the first: whatever is more is a *leak*, and a census of live tensors, twice,
says which size there is more of and who holds it. Where what is in use stays and only the allocator holds more, that is
*fragmentation*, which giving back what is free cures; where steps got larger meanwhile it is the *data*. A driver that
moves a GPU's memory to the host rather than refuse it (Windows, WSL) makes steps many times slower: *spill*.

Of a GPU its allocator's counters are read; of a CPU those of the C library's heap (mallinfo2, glibc). A look costs
microseconds, a census one walk over what Python has made since the loop began, and there is none before memory grows.
"""

import ctypes
import gc
import platform
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .shortage import let_go
from .units import format_bytes

Kind = Literal["leak", "fragmentation", "data", "spill"]
Class = tuple[int, tuple[int, ...], str]
"""Bytes of the storage, shape, type."""

AT_LEAST = 16 * 2**20  # bytes: allocators round, and libraries keep something with every new length
SETTLED = 8  # samples before a run is what it stays
WINDOW = 24  # samples that a rise is read off
LARGER = 1.1  # times as many tokens
SLOWER = 4.0  # times the median step: a PCI bus is that much slower than any GPU's memory
_FREE = 64 * 2**20
_DEEP = 6  # holders of holders


@dataclass(frozen=True, slots=True)
class Sample:
    """After a step; bytes are 0 where nobody counts them."""

    step: int
    tokens: int
    seconds: float
    allocated: int
    reserved: int
    free: int = 2**62
    """Of the whole device, other processes' use off."""


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Kind
    n_bytes: int
    message: str
    hint: str


class Growth:
    """Looks after each step that is told; a finding once, and again only for a rise on top of it."""

    def __init__(self, model: nn.Module, device: torch.device, at_least: int = AT_LEAST) -> None:
        self.model, self.device, self.at_least = model, device, at_least
        self.samples: deque[Sample] = deque(maxlen=WINDOW)
        self.seen = 0
        self.before: Mapping[Class, int] | None = None  # the first census, of a rise that may be a leak
        self.read: Callable[[], tuple[int, int, int]] = reader(device)

    def look(self, step: int, tokens: int, seconds: float) -> Finding | None:
        """What there is to say after this step, if anything."""
        self.seen += 1
        if self.seen <= SETTLED:
            return None
        self.samples.append(Sample(step, tokens, seconds, *self.read()))
        if len(self.samples) < WINDOW:
            return None
        found = self._found()
        if found:
            self.samples.clear()
        return found

    def _found(self) -> Finding | None:
        samples = list(self.samples)
        if self.before is not None:
            return self._leak(samples)
        if spill := spilling(samples):
            return spill
        if rise([s.allocated for s in samples]) >= self.at_least:
            let_go(self.device)  # cycles are no leak
            self.before = census()
            self.samples.clear()
            return None
        by = rise([s.reserved for s in samples])
        if by < self.at_least:
            return None
        if grew(samples):
            message = f"the allocator holds {format_bytes(by)} more than {WINDOW} steps ago: the steps have more tokens"
            return Finding("data", by, message, "nothing needs to be done where the plan is for the longest examples")
        let_go(self.device)
        message = f"the allocator holds {format_bytes(by)} more than {WINDOW} steps ago, and no more of it is in use: it is in pieces"
        return Finding("fragmentation", by, message, "what was free of it is given back to the system")

    def _leak(self, samples: Sequence[Sample]) -> Finding | None:
        """The second census; nothing where what was in use did not rise on."""
        before, self.before = self.before or {}, None
        by = rise([s.allocated for s in samples])
        let_go(self.device)
        if by < self.at_least / 2:
            return None
        said = f"{format_bytes(by)} more are in use than {WINDOW} steps ago, between steps as large as those before"
        hint = "something keeps what a step has made; the run goes on, and plans again when memory runs out"
        return Finding("leak", by, f"{said}: {growing(before, census(), self.model)}", hint)


def rise(values: Sequence[int]) -> int:
    """Bytes from the first third to the last, where the least of the last is beyond the most of the first; else 0."""
    third = max(1, len(values) // 3)
    first, middle, last = values[:third], values[third:-third], values[-third:]
    if min(last) <= max(first) or statistics.fmean(middle) <= statistics.fmean(first):
        return 0
    return round(statistics.fmean(last) - statistics.fmean(first))


def grew(samples: Sequence[Sample]) -> bool:
    """Whether the largest of the later steps has more tokens than any before."""
    half = len(samples) // 2
    return max(s.tokens for s in samples[half:]) > LARGER * max(s.tokens for s in samples[:half])


def spilling(samples: Sequence[Sample]) -> Finding | None:
    """The last steps are many times slower, and the device is full."""
    if not may_spill():
        return None
    usual, last = statistics.median(s.seconds for s in samples[:-2]), samples[-2:]
    if min(s.seconds for s in last) < SLOWER * usual or max(s.free for s in last) > _FREE:
        return None
    message = f"steps take {min(s.seconds for s in last) / usual:.1f} times as long, and the GPU is full: its driver moves memory to the host"
    hint = (
        "close what else uses the GPU, or say a smaller memory.budget; the driver's sysmem fallback can be switched off"
    )
    return Finding("spill", samples[-1].reserved, message, hint)


def may_spill() -> bool:
    """Whether the GPU's driver rather uses the host's memory than refuses."""
    return sys.platform == "win32" or "microsoft" in platform.uname().release.lower()


def hold_to(device: torch.device) -> int:
    """Let the allocator refuse what the GPU has not free now, where its driver would not; bytes it is held to, or 0."""
    if device.type != "cuda" or not may_spill():
        return 0
    free, total = torch.cuda.mem_get_info(device)
    most = free + torch.cuda.memory_reserved(device)
    told = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)(device)
    torch.cuda.set_per_process_memory_fraction(min(most / total, told), device)
    return int(most)


def reader(device: torch.device) -> Callable[[], tuple[int, int, int]]:
    """What gives (bytes in use, bytes the allocator holds, bytes free of the device)."""
    if device.type == "cuda":
        return lambda: (
            torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0],
        )  # fmt: skip
    return _of_heap()


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def _of_heap() -> Callable[[], tuple[int, int, int]]:
    """The C library's heap; zeros where it does not count (musl, macOS, Windows, glibc before 2.33)."""
    try:
        call = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return lambda: (0, 0, 2**62)
    call.restype = _Mallinfo2

    def read() -> tuple[int, int, int]:
        held = call()
        return held.uordblks + held.hblkhd, held.arena + held.hblkhd, 2**62

    return read


@contextmanager
def _all_searched() -> Iterator[None]:
    """The collector looks at what a loop has put aside, too: a holder may be older than what it holds."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()


def census() -> dict[Class, int]:
    """How many live tensors there are of each size, of those that Python made since the collector was frozen."""
    found: dict[Class, int] = {}
    for one in _tensors():
        found[_class(one)] = found.get(_class(one), 0) + 1
    return found


def _tensors() -> list[Tensor]:
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor) and not one.is_meta]


def _class(tensor: Tensor) -> Class:
    try:
        n_bytes = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # without a storage, as sparse ones are
        n_bytes = 0
    return n_bytes, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def growing(before: Mapping[Class, int], after: Mapping[Class, int], model: nn.Module) -> str:
    """The size there is more and more of, and who holds the newest of it: itself, or by the graph of what it holds."""
    more = {one: n - before.get(one, 0) for one, n in after.items() if n > before.get(one, 0)}
    if not more:
        return "not in tensors that Python knows of"
    largest, *others = sorted(more, key=lambda one: (one[0] * more[one], more[one]), reverse=True)
    # In one walk, the last of each; while what is older than the loop is out of sight.
    newest = {which: one for one in _tensors() if (which := _class(one)) in more}
    names = _names(model)
    said = f"{after[largest]} tensors of {_says(largest)}"
    with _all_searched():
        if by := holder(newest[largest], names, newest):
            return f"{said}, held by {by}"
        for one in others:
            if newest[one].grad_fn is not None and (by := holder(newest[one], names, newest)):
                return f"{said}, held by the graphs of {after[one]} tensors of {_says(one)}, held by {by}"
    return f"{said}, held by something that Python does not follow"


def _names(model: nn.Module) -> dict[int, str]:
    """Of modules, by their own address and by that of what they hold."""
    named = [(module, name or "the model") for name, module in model.named_modules()]
    return {id(one): name for module, name in named for one in (module, vars(module))}


def _says(which: Class) -> str:
    n_bytes, shape, dtype = which
    return f"{format_bytes(n_bytes)} ({dtype}, {'×'.join(map(str, shape)) or 'one number'})"


def holder(tensor: Tensor, names: Mapping[int, str], ours: object) -> str:
    """The module of the model, else the object or Python module, that the nearest chain of references leads to; or none.
    ``ours`` is who asks."""
    level: list[Any] = [tensor]
    seen = {id(level), id(names), id(ours)}
    for _ in range(_DEEP):
        found = [one for one in gc.get_referrers(*level) if id(one) not in seen and not isinstance(one, FrameType)]
        for one in found:
            if id(one) in names:
                return names[id(one)]
        for one in found:
            if named := _named(one):
                return named
        seen |= {id(level), id(found), *map(id, found)}
        level = found
        if not level:
            break
    return ""


def _named(one: Any) -> str:
    """Of a module its name, of an object its class; nothing of lists, tuples and the like."""
    if isinstance(one, ModuleType):
        return one.__name__
    if isinstance(one, dict) and isinstance(one.get("__name__"), str) and "__builtins__" in one:
        return str(one["__name__"])
    if hasattr(one, "__dict__") and not isinstance(one, Tensor | type) and not callable(one):
        return f"{type(one).__module__}.{type(one).__qualname__}"
    return ""
