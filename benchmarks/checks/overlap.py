"""Whether copies hide behind kernels, whether segments grow, whether the ledger sees what the allocator does."""

import functools
from collections.abc import Iterable, Sequence

import torch

from checks.common import At, Check, Figures, Wrong, at_most, config_of, examples_of, forget, micro_batches, run_of
from checks.filling import fill_on_device
from finefit.build import build
from finefit.loop import optimizer_step
from finefit.nn.optimizers import Optimizing
from finefit.rehearse import rehearse
from finefit.techniques import (
    Accumulation,
    ActivationOffload,
    Allocator,
    Checkpointing,
    Clipping,
    FusedLoss,
    FusedOps,
    Lora,
    OptimizerOffload,
    Packing,
    ParameterOffload,
    Precision,
    Technique,
)  # fmt: skip

Span = tuple[float, float]
WIDE = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 32000}  # fmt: skip
COMMON = (FusedOps(), Packing(), FusedLoss(1024), Clipping(1.0))


def hidden_share(copies: Sequence[Span], kernels: Iterable[Span]) -> float:
    """The part of the copies' time during which a kernel runs."""
    merged: list[Span] = []
    for start, end in sorted(kernels):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    whole = sum(end - start for start, end in copies)
    hidden = sum(max(0.0, min(end, e) - max(start, s)) for start, end in copies for s, e in merged)
    return hidden / whole if whole else 0.0


def _profiled(step: object) -> list[tuple[str, Span]]:
    """(name, from and to in microseconds) of everything the device did in one call."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()  # type: ignore[operator]
        torch.cuda.synchronize()
    return [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in seen.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def overlap(techniques: tuple[Technique, ...], least: dict[str, float], at: At) -> Figures:
    """By direction: seconds of copies of the device in one step, and the part of them that runs beside kernels."""
    config = config_of(at, **WIDE)
    run = build(config, (*COMMON, *techniques), fill_on_device, at.device, Optimizing())
    examples = examples_of(at, config, lengths=(4096, 4096))
    batches = micro_batches(run, examples)
    for _ in range(2):
        optimizer_step(run, batches, 1e-5)
    events = _profiled(lambda: optimizer_step(run, batches, 1e-5))
    kernels = [span for name, span in events if not name.startswith(("Memcpy", "Memset", "Optimizer."))]
    found: Figures = {"kernels_s": sum(end - start for start, end in kernels) / 1e6}
    for way in ("HtoD", "DtoH"):
        copies = [span for name, span in events if name.startswith(f"Memcpy {way}")]
        pageable = sum("Pageable" in name for name, _ in events if name.startswith(f"Memcpy {way}"))
        share = hidden_share(copies, kernels)
        seconds = sum(end - start for start, end in copies) / 1e6
        found[way] = {"copies": len(copies), "pageable": pageable, "seconds": seconds, "hidden_share": share}
    for way, most in least.items():
        if not found[way]["copies"]:
            raise Wrong(f"nothing was copied {way}: {found}")
        at_most(f"share of copies {way} that nothing hides ({found})", 1 - found[way]["hidden_share"], 1 - most)
    return found


def segments_grow(at: At) -> Figures:
    """What is taken after the technique is applied lies in expandable segments."""
    import os

    said = [key for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if key in os.environ]
    if said:
        raise Wrong(f"{said[0]} is set, so finefit leaves the allocator as it is: unset it for this check")
    forget(at.device)
    run_of((Allocator("expandable"),), config_of(at), at.device)
    kept = torch.empty(64 * 2**20, dtype=torch.uint8, device=at.device)
    found = [
        s for s in torch.cuda.memory_snapshot() if s["address"] <= kept.data_ptr() < s["address"] + s["total_size"]
    ]
    growing = bool(found) and all(segment["is_expandable"] for segment in found)
    del kept
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    forget(at.device)
    if not growing:
        raise Wrong(f"a tensor of 64 MiB is in no expandable segment: {[s.get('is_expandable') for s in found]}")
    return {"segments": len(found)}


def counters(at: At) -> Figures:
    """The rehearsal's peak by the ledger beside the allocator's own: what it cannot see is what kernels take inside."""
    config = config_of(at, **WIDE) if at.is_cuda and not at.quick else config_of(at)
    techniques = (Precision("bf16"), *COMMON, Checkpointing(2), Accumulation(1))
    run = build(config, techniques, fill_on_device, at.device, Optimizing())
    examples = examples_of(at, config, lengths=() if at.quick else (4096,))
    optimizer_step(run, micro_batches(run, examples[:1]), 0.0)
    forget(at.device)
    seen = rehearse(run, examples[:1], [], techniques, 1).peak_bytes
    if not at.is_cuda:
        return {"ledger_bytes": seen}
    allocated = torch.cuda.max_memory_allocated()
    at_most("of the allocator's peak the ledger misses", abs(seen / allocated - 1), 0.03)
    return {"ledger_bytes": seen, "allocated_bytes": allocated, "error": seen / allocated - 1}


_ALL = Checkpointing(8)
_OVERLAPS: dict[str, tuple[tuple[Technique, ...], dict[str, float]]] = {
    "activation_offload host": ((Precision("bf16"), _ALL, ActivationOffload("host")), {"HtoD": 0.5, "DtoH": 0.5}),
    "activation_offload disk": ((Precision("bf16"), _ALL, ActivationOffload("disk")), {}),
    # Backward hides gradients on their way out; weights come back while the host steps, when the device has nothing to do.
    "optimizer_offload host": ((Precision("bf16_mixed"), OptimizerOffload("host", "host")), {"DtoH": 0.3}),
    "optimizer_offload disk": ((Precision("bf16_mixed"), OptimizerOffload("disk", "host")), {"DtoH": 0.3}),
    "parameter_offload host": ((Precision("bf16"), Lora(16), ParameterOffload("host")), {"HtoD": 0.4}),
    "parameter_offload disk": ((Precision("bf16"), Lora(16), ParameterOffload("disk")), {}),
}  # fmt: skip

CHECKS = {
    "allocator: segments grow": Check(segments_grow, cuda=True),
    "ledger beside the allocator": Check(counters),
    **{f"overlap, {name}": Check(functools.partial(overlap, techniques, least), cuda=True)
       for name, (techniques, least) in _OVERLAPS.items()},
}  # fmt: skip
