"""The allocator's settings, chosen before the first tensor: what is freed is to be of use to what comes next.

``expandable``: segments of a GPU's memory grow by pages (c10/cuda/CUDACachingAllocator.cpp, ``expandable_segments``), so rows
of ever new lengths leave no gaps between blocks of fixed segments. ``trimmed``: a CPU's heap (glibc) gives each tensor's
pages back when it is freed (mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD), so that what is resident is what is alive; each
tensor then begins on fresh pages, which takes time: so only large ones are, and with ``tight`` small ones too. Tensors are the same either way. Declines other C libraries' heaps, where
nothing is set.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..layout import Layout
from .base import NotAsPlanned, Technique

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

# Bytes from which on what is freed is given back at once. From 64 KiB on a step takes twice as long; from 4 MiB on it takes no
# longer than with none of this (135M model, 2 cores, 2026-11-30).
_FROM = {"trimmed": 2**22, "tight": 2**16}
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_SAID = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # what the user says there stands


@dataclass(frozen=True, slots=True)
class Allocator(Technique):
    name = "allocator"
    exact = True

    kind: Literal["expandable", "trimmed", "tight"] = "expandable"

    def rewrite(self, layout: Layout) -> Layout:
        return layout

    def apply(self, run: "Run") -> None:
        if self.kind in _FROM:
            run.evidence["heap_trimmed"] = _trim_heap(_FROM[self.kind])
        elif run.device.type == "cuda" and not any(key in os.environ for key in _SAID):
            import torch

            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")

    def setting(self) -> str:
        return self.kind

    def describe(self) -> str:
        if self.kind == "tight":
            return "what is freed, small tensors too, goes back to the system at once: slow"
        if self.kind == "trimmed":
            return "what is freed goes back to the system at once, as there is little room"
        return "segments of the device's memory grow by pages, so that changing lengths leave no gaps"

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        if self.kind in _FROM and run.evidence["heap_trimmed"] == 0:
            raise NotAsPlanned("allocator: the C library refused to give freed memory back")


def _trim_heap(n_bytes: int) -> int:
    """1 where the C library's heap now gives back at once, 0 where it refused, 2 where it has no such settings."""
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no such function, or no such way to ask
        return 2
    return int(all(mallopt(key, n_bytes) for key in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)))
