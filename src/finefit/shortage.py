"""What a run was at when its memory was refused, and how much it had: read off the error and the process it came to.

Allocators say it in their own ways: CUDA by a class, a CPU's in a sentence, Python and the C++ library as MemoryError, the
system as ENOMEM where a file is mapped or a thread begins. Everything else is a mistake of ours and none of this.
"""

import contextlib
import ctypes
import errno
import gc
import re
from dataclasses import dataclass

import torch

from .errors import FinefitError
from .layout import Micro
from .run import MicroBatch

ERRORS = (RuntimeError, MemoryError, OSError, FinefitError)
# What the allocators of CPUs, of pinned memory, of cuBLAS, of mapped files and of threads say.
_SENTENCES = (
    "can't allocate memory", "Cannot allocate memory", "not enough memory", "std::bad_alloc", "could not create a memory object",
    "CUDA error: out of memory", "out of memory (2)", "CUBLAS_STATUS_ALLOC_FAILED", "can't start new thread",
)  # fmt: skip
_HELD = re.compile(r"allocated memory (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB) is allocated by PyTorch")
_ASKED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, slots=True)
class Shortage:
    """``moment`` is one of ``footprint.MOMENTS``; bytes are 0 where nobody knows."""

    moment: str
    message: str
    step: int = 0
    """Updates that were made before."""
    micro: Micro | None = None
    """What the micro-batch was that it came in."""
    held_bytes: int = 0
    """Of tensors in use on the device."""
    asked_bytes: int = 0
    is_of_host: bool = False
    """It was the memory beside the device's that was short."""


def is_shortage(error: BaseException) -> bool:
    """Whether an allocator refused."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, FinefitError) and isinstance(error.__cause__, OSError):  # what a write or a mapping came to
        return is_shortage(error.__cause__)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sentence in str(error) for sentence in _SENTENCES)


def asked_bytes(error: BaseException) -> int:
    """How much was refused, by the error."""
    if isinstance(said := getattr(error, "asked_bytes", None), int):
        return said
    return _amount(_ASKED, error)


def _amount(said: re.Pattern[str], error: BaseException) -> int:
    found = said.search(str(error))
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


def held_bytes(error: BaseException, device: torch.device) -> int:
    """What tensors had of the device when it was refused; 0 of a CPU, whose resident set is no measure of them."""
    if isinstance(said := getattr(error, "held_bytes", None), int):
        return said
    return _amount(_HELD, error) if device.type == "cuda" else 0


def is_of_host(error: BaseException, device: torch.device) -> bool:
    """Whether a GPU's host was short: Python's and the system's memory, and what is pinned."""
    of_device = isinstance(error, torch.OutOfMemoryError) or "CUBLAS" in str(error)
    return device.type == "cuda" and not of_device


def micro_of(batch: MicroBatch) -> Micro:
    longest = max((end - start for start, end in zip(batch.bounds, batch.bounds[1:], strict=False)), default=0)
    return Micro(batch.ids_bs.numel(), longest, len(batch.label_l))


def let_go(device: torch.device) -> None:
    """Give back what nothing refers to any more: cycles, the allocator's cache, the heap's free pages."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Give the system what the C library's heap only keeps."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
