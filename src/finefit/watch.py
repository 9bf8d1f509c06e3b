"""Peaks of what happens beside the step: a phase (load, eval, save, resume, merge), watched from its start to its end.

On a CPU the ledger follows the storages that operators make; on a CUDA device the allocator's own counters tell the
peak, which is read against what is known to be held. Of the host the kernel's own mark of the process is read
(VmHWM, set back through clear_refs; proc(5)), which has the pages of mapped files in it; where there is no such mark
(not Linux), what is resident when the phase ends. Costs nothing outside a phase.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from .events import EventLog
from .footprint import Footprint
from .ledger import Ledger
from .run import Run
from .shortage import trim_heap
from .stream import Entry

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK_OF_RSS = "5"  # what clear_refs takes to set the mark back to what is resident now


@dataclass(slots=True)
class Seen:
    """Filled in when the phase is over: bytes by component at its peak on the device, and the process's on the host."""

    device: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 0


class PhaseLedger(Ledger):
    """Follows what operators make. A storage that was there before it, as a file's mapping is, takes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._was_there(leaf.untyped_storage())
            elif isinstance(leaf, UntypedStorage):  # what a file's mapping is made a tensor of
                self._was_there(leaf)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _was_there(self, storage: UntypedStorage) -> None:
        if storage._cdata not in self._live:
            index = self._live[storage._cdata] = self.born(Entry(0, 0, 0, (), 1))
            weakref.finalize(storage, self._gone, storage._cdata, index)


@contextmanager
def phase(name: str, run: Run, inputs: Sequence[Tensor] = ()) -> Iterator[Seen]:
    """Watch the block as the phase ``name``, a moment of ``footprint``; ``inputs`` are there before it."""
    seen = Seen()
    _forget_peak()
    with _on_cuda(run, inputs, seen) if run.device.type == "cuda" else _on_cpu(name, run, inputs, seen):
        yield seen
    seen.host_bytes = _peak_of_rss()


@contextmanager
def _on_cpu(name: str, run: Run, inputs: Sequence[Tensor], seen: Seen) -> Iterator[None]:
    ledger = PhaseLedger()
    _own(ledger, run, inputs)
    ledger.mark(name)
    ledger.born(Entry(0, 0, 0, (), 1))  # so that what is held is a point of the curve, though nothing should be made
    with ledger:
        yield
        ledger.mark("own")
    _own(ledger, run, ())  # what the phase itself made
    seen.device |= ledger.moments()[name]


def _own(ledger: Ledger, run: Run, inputs: Sequence[Tensor]) -> None:
    for component, tensors in _held(run, inputs).items():
        ledger.own(tensors, component)


@contextmanager
def _on_cuda(run: Run, inputs: Sequence[Tensor], seen: Seen) -> Iterator[None]:
    torch.cuda.init()  # the counters are there from then on, and a run's first phase is its first use of the device
    torch.cuda.reset_peak_memory_stats(run.device)
    yield
    held = {component: _bytes(tensors) for component, tensors in _held(run, inputs).items()}
    rest = torch.cuda.max_memory_allocated(run.device) - sum(held.values())
    seen.device |= {component: n for component, n in {**held, "temporary": max(0, rest)}.items() if n}


def tell(log: EventLog, moment: str, step: int, seen: Seen, predicted: Footprint) -> None:
    """The event of a phase that is over: what was seen beside what is predicted of it."""
    log.write(
        "phase", moment=moment, step=step, measured=seen.device, predicted=predicted.moments.get(moment, {}),
        host_bytes=seen.host_bytes, predicted_host=predicted.host.get(moment, {}),
    )  # fmt: skip


def _held(run: Run, inputs: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Tensors of the run by component, those that have a storage."""
    states = run.optimizer.all_held()
    buffers = [tensor for tensor in run.model.buffers() if not tensor.is_meta]
    parameters = [tensor for tensor in run.model.parameters() if tensor.device.type == run.device.type]
    parameters += run.optimizer.own().get("parameter", [])
    return {"parameter": parameters, "optimizer_state": states, "input": [*inputs, *buffers]}


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _forget_peak() -> None:
    """Set the mark back, and give the system what the C library's heap only keeps: it is not this phase's."""
    trim_heap()
    with contextlib.suppress(OSError):  # not Linux, or not allowed: then the mark is that of the process's whole life
        _CLEAR.write_text(_PEAK_OF_RSS)


def _peak_of_rss() -> int:
    try:
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return psutil.Process().memory_info().rss
