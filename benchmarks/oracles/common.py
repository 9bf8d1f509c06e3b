"""Holds a tool's real model and finefit's stand-in for it side by side: one fake step each, under the same ledger."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from finefit.foreign import ForeignRun
from finefit.ledger import Ledger
from finefit.simulate import STEADY, fake_world, step
from finefit.stacks.base import Stepped

BLOCKS = 3
Numbers = dict[str, int]


def numbers(make: Callable[[], Stepped], run: ForeignRun) -> Numbers:
    """Parameters, what each block keeps after its forward pass, and the highest point of each moment, in bytes."""
    ledger = Ledger()
    with fake_world():
        stepped = make()
        step(stepped, run, ledger, torch.device("cpu"))
    out = {"parameters": sum(p.numel() * p.element_size() for p in stepped.model.parameters())}
    steady = ledger.sections.index(STEADY)
    loss = ledger.sections.index("loss", steady)
    for i in range(len(stepped.blocks)):
        at = ledger.sections.index(f"forward {i}", steady)
        kept = [e for e in ledger.entries if e.section == at and (e.died_section >= loss or e.died < 0)]
        out[f"kept by block {i}"] = sum(e.n_bytes for e in kept)
    out |= {f"peak of {moment}": sum(parts.values()) for moment, parts in ledger.moments().items()}
    return out


def compared(name: str, ours: Numbers, theirs: Numbers) -> float:
    """Print both; the largest relative difference."""
    print(name)
    worst = 0.0
    for key in theirs:
        off = ours.get(key, 0) / theirs[key] - 1 if theirs[key] else 0.0
        worst = max(worst, abs(off))
        print(f"  {key:28} ours {ours.get(key, 0):>14,}  theirs {theirs[key]:>14,}  {off:+.3%}")
    return worst


def finish(worst: Mapping[str, float]) -> int:
    """The exit code: 1 where a case differs by more than 0.1 %."""
    for name, off in worst.items():
        print(f"{off:8.4%}  {name}")
    return int(any(off > 0.001 for off in worst.values()))


def fake_run(**fields: Any) -> ForeignRun:
    plain = {"model": "", "method": "lora", "micro_batch_size": 1, "max_length": 256, "accumulation": 2}
    return ForeignRun(**{**plain, "trained_dtype": "bfloat16", **fields})
