"""The search: the fastest exact combination that fits, with reasons; DoesNotFit argues when there is none.

What the user fixed is a constraint. Free are the size of a micro-batch and how many blocks are checkpointed; packing,
fused loss and fused ops only save, so they are on unless switched off. A micro-batch size is tried from the largest
down; for each the fewest checkpointed blocks that fit are found by bisection, since the peak falls with every block.
Of the plans that fit the fastest wins; within two per cent of it, the one that needs least memory.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from .batches import Batches, Uniform, Work
from .cost import seconds_per_step
from .errors import ConfigError, DoesNotFit, EngineError
from .footprint import Footprint
from .layout import Layout, Micro, layout_of
from .plan import Alternative, Plan
from .predict import footprint
from .spec import HardwareSpec, JobSpec, ModelSpec
from .techniques import (
    Accumulation,
    Checkpointing,
    Clipping,
    FusedLoss,
    FusedOps,
    Lora,
    Packing,
    Precision,
    QuantizedBase,
    Technique,
    Unsuitable,
    in_order,
)  # fmt: skip
from .techniques.quantized_base import CHUNK, Bits, Scales
from .units import Budget, format_bytes, format_seconds
from .ways import Trials, hint

SLOWER = 1.02  # plans this close in time are told apart by memory
# A GPU is the run's alone, and context and driver are reckoned with beside the tensors; a machine has others at work.
DEFAULT_BUDGET = {"cuda": "96%", "cpu": "90%"}
LOSS_CHUNK = {"cpu": 256, "cuda": 1024}
Method = Literal["full", "lora", "qlora"]
_LATE = (Checkpointing, FusedLoss, Accumulation, Clipping)  # techniques that say how a step runs, and add no tensors
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")  # what auto tries, in order
ADAPTED = METHODS[1:]  # methods that train adapters on a frozen base


@dataclass(frozen=True, slots=True)
class Candidate:
    techniques: tuple[Technique, ...]
    work: Work
    predicted: Footprint
    seconds: float

    def says(self) -> str:
        chosen = {t.name: t for t in self.techniques}
        split = chosen["accumulation"]
        k = chosen["checkpointing"].blocks if "checkpointing" in chosen else 0  # type: ignore[attr-defined]
        cap = f", {split.micro_batch_tokens} tokens" if split.micro_batch_tokens else ""  # type: ignore[attr-defined]
        return f"micro-batch {split.micro_batch_size}{cap}, {k} blocks checkpointed"  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Question:
    """All that a search depends on."""

    model: ModelSpec
    hardware: HardwareSpec
    job: JobSpec
    batches: Batches
    budget: Budget


def search(question: Question) -> Plan:
    """The best plan, or DoesNotFit with an argument. ``method`` auto is the first of full, lora, qlora that fits."""
    found, tried = _search(question)
    if found is None:
        raise _does_not_fit(question, tried)
    return found


def _search(question: Question) -> tuple[Plan | None, list[tuple[str, list[Candidate]]]]:
    """The best plan, or None and what was tried."""
    job = question.job
    tried: list[tuple[str, list[Candidate]]] = []
    for limit in dict.fromkeys((question.budget.aim_bytes, question.budget.limit_bytes)):
        for wish in _by_method(job):
            asked = replace(question, job=wish)
            try:
                candidates = list(_candidates(asked, limit))
            except Unsuitable as error:
                if job.method != "auto":
                    raise _unsuitable(question, error) from error
                continue  # what was tried before it argues
            fitting = [c for c in candidates if c.predicted.total_bytes <= limit]
            if fitting:
                return _plan(asked, fitting, candidates, _preface(question, tried, wish.method, limit)), tried
            tried.append((wish.method, candidates))
    return None, tried


def _candidates(question: Question, limit: int) -> Iterator[Candidate]:
    """For each micro-batch size the least checkpointing that fits, and the most if none does."""
    depth = question.model.num_hidden_layers
    pinned = question.job.pin("checkpointing")
    if pinned is not None:
        fixed = depth if pinned in ("all", "true") else int(pinned)
        if fixed > depth:
            raise ConfigError(
                f"memory.checkpointing: {fixed} blocks, the model has {depth}",
                hint=f"say a number up to {depth}, or all",
            )
    for size, tokens in splits(question):
        work = question.batches.work(size, tokens, question.job.pin("packing") == "false")
        if pinned is not None:
            yield candidate(question, size, tokens, work, fixed)
            continue
        none, every = (candidate(question, size, tokens, work, k) for k in (0, depth))
        yield none
        if none.predicted.total_bytes <= limit:
            continue
        yield every
        low, high = 0, depth
        while every.predicted.total_bytes <= limit and high - low > 1:
            middle = (low + high) // 2
            found = candidate(question, size, tokens, work, middle)
            low, high = (low, middle) if found.predicted.total_bytes <= limit else (middle, high)
        if high < depth:
            yield candidate(question, size, tokens, work, high)


def splits(question: Question) -> Iterator[tuple[int, int]]:
    """(examples, tokens) a micro-batch may hold, largest first; tokens are limited only where examples are packed."""
    job, batches = question.job, question.batches
    size, tokens = job.pin("micro_batch_size"), job.pin("micro_batch_tokens")
    if size is not None and int(size) > job.global_batch_size:
        hint = f"say at most {job.global_batch_size}, or raise train.global_batch_size"
        raise ConfigError(f"memory.micro_batch_size {size} is larger than the global batch", hint=hint)
    if job.pin("packing") == "false" or size is not None:
        sizes = [int(size)] if size else list(_powers(job.global_batch_size))
        yield from ((n, int(tokens or 0)) for n in sizes)
        return
    if tokens is not None:
        yield job.global_batch_size, int(tokens)
        return
    longest, most = batches.longest, batches.most_tokens
    for factor in (64, 32, 16, 8, 6, 4, 3, 2, 1.5, 1):
        if longest * factor <= max(most, longest):
            yield job.global_batch_size, int(longest * factor)


def _powers(most: int) -> list[int]:
    """``most`` and the powers of two below it, largest first."""
    return sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)}, reverse=True)


def candidate(question: Question, size: int, tokens: int, work: Work, checkpointed: int) -> Candidate:
    """One combination, predicted for its worst micro-batch."""
    techniques = techniques_of(question, size, tokens, work, checkpointed)
    return judged(question.model, question.hardware, techniques, work)


def judged(model: ModelSpec, hardware: HardwareSpec, techniques: tuple[Technique, ...], work: Work) -> Candidate:
    """Techniques on the work of a run: predicted for its worst micro-batch, timed for its mean."""
    layouts = [rewrite(model, micro, techniques) for micro in work.largest]
    predicted = max((footprint(layout, hardware) for layout in layouts), key=lambda f: f.peak_bytes)
    return Candidate(techniques, work, predicted, seconds_per_step(layouts[0], work, hardware))


def rewrite(model: ModelSpec, micro: Micro, techniques: Sequence[Technique]) -> Layout:
    """The layout of ``model`` after all techniques, in order."""
    ordered = in_order(tuple(techniques))
    late = next((i for i, t in enumerate(ordered) if isinstance(t, _LATE)), len(ordered))
    layout = replace(_held(model, ordered[:late]), micro=micro)
    for technique in ordered[late:]:
        layout = technique.rewrite(layout)
    return layout


@functools.lru_cache(maxsize=256)
def _held(model: ModelSpec, techniques: tuple[Technique, ...]) -> Layout:
    """The layout after the techniques that say what is held. None of them looks at the micro-batch, so any will do."""
    layout = layout_of(model, Micro(1, 1, 1))
    for technique in techniques:
        layout = technique.rewrite(layout)
    return layout


def techniques_of(question: Question, size: int, tokens: int, work: Work, checkpointed: int) -> tuple[Technique, ...]:
    job, kind = question.job, question.hardware.kind
    chosen: list[Technique] = [precision_of(question)]
    if job.method == "qlora":
        bits, scales = int(job.pin("qlora.bits") or 4), job.pin("qlora.scales") or "double"
        chosen.append(QuantizedBase(cast(Bits, bits), cast(Scales, scales), CHUNK[kind]))
    if job.method in ADAPTED:
        chosen.append(Lora(job.rank, job.alpha, job.dropout, job.targets))
    if job.pin("fused_ops") != "false":
        chosen.append(FusedOps())
    if job.pin("packing") != "false":
        chosen.append(Packing())
    if checkpointed:
        chosen.append(Checkpointing(checkpointed))
    chunk = int(job.pin("loss_chunk") or LOSS_CHUNK[kind])
    if chunk:
        chosen.append(FusedLoss(chunk))
    chosen.append(Accumulation(size, tokens, work.most_steps))
    max_norm = float(job.pin("max_grad_norm") or 1.0)
    chosen.append(Clipping(max_norm if max_norm > 0 else float("inf")))
    return in_order(chosen)


def precision_of(question: Question) -> Precision:
    """``auto``: frozen weights stay in the checkpoint's bf16, trained ones have an fp32 master; fp32 without bf16."""
    job = question.job
    if job.precision != "auto":
        if job.precision != "fp32" and not question.hardware.supports_bf16 and question.hardware.kind == "cuda":
            hint = "say memory.precision=fp32"
            raise ConfigError(f"{question.hardware.name} cannot compute in bf16", hint=hint)
        return Precision(job.precision)
    if not question.hardware.supports_bf16:
        return Precision("fp32")
    return Precision("bf16" if job.method in ADAPTED and question.model.dtype == "bfloat16" else "bf16_mixed")


def _plan(question: Question, fitting: list[Candidate], looked_at: list[Candidate], preface: list[str]) -> Plan:
    fastest = min(c.seconds for c in fitting)
    close = [c for c in fitting if c.seconds <= SLOWER * fastest]
    best = min(close, key=lambda c: (c.predicted.total_bytes, c.seconds))
    split = next(t for t in best.techniques if isinstance(t, Accumulation))
    notes = [*question.model.notes, *_caveats(question)]
    return Plan(
        model=question.model.name,
        hardware=question.hardware.name,
        method=question.job.method,
        global_batch_size=question.job.global_batch_size,
        micro_batch_size=split.micro_batch_size,
        gradient_accumulation_steps=best.work.most_steps,
        techniques=best.techniques,
        predicted=best.predicted,
        seconds_per_step=best.seconds,
        tokens_per_s=best.work.mean_real_tokens / best.seconds,
        budget_bytes=question.budget.limit_bytes,
        reasons=(*preface, *_reasons(question, best, looked_at, fastest)),
        alternatives=_frontier(looked_at, best),
        notes=tuple(notes),
    )


def _caveats(question: Question) -> list[str]:
    notes = ["predicted: traced activations and exact states; tensors, not what kernels take inside one operator"]
    if question.hardware.kind == "cuda":
        notes.append("on CUDA no measurement of ours backs this yet: allow 10 % on activations and for fragmentation")
    if isinstance(question.batches, Uniform):
        notes.append(f"without data every example counts as {question.batches.length} tokens, all of them labelled")
    return notes


def _preface(question: Question, tried: list[tuple[str, list[Candidate]]], method: str, limit: int) -> list[str]:
    said = [
        f"{name} does not fit: at least {format_bytes(_smallest(candidates).predicted.total_bytes)}"
        for name, candidates in dict(tried).items()
        if name != method
    ]
    if question.job.method == "auto":
        said.append(f"method {method}: the first of {', '.join(METHODS)} that fits")
    if limit != question.budget.aim_bytes:
        said.append(f"nothing fits {format_bytes(question.budget.aim_bytes)}, so up to {format_bytes(limit)} is used")
    return said


def _reasons(question: Question, best: Candidate, looked_at: list[Candidate], fastest: float) -> list[str]:
    said = [f"{t.name}: {t.describe()}" for t in best.techniques]
    budget = question.budget.limit_bytes
    bigger = [c for c in looked_at if c.seconds < best.seconds and c.predicted.total_bytes > budget]
    if bigger:
        quickest = min(bigger, key=lambda c: c.seconds)
        said.append(
            f"faster but too large: {quickest.says()} would take {format_seconds(quickest.seconds)} a step and needs "
            f"{format_bytes(quickest.predicted.total_bytes)} of {format_bytes(budget)}"
        )
    if best.seconds > fastest:
        said.append(f"within {100 * (SLOWER - 1):.0f} % of the fastest that fits, this one needs least memory")
    return said


def _frontier(looked_at: list[Candidate], best: Candidate) -> tuple[Alternative, ...]:
    """Plans that no other beats in both memory and time, least memory first; the chosen one is always among them."""
    kept: list[Candidate] = []
    for c in sorted(looked_at, key=lambda c: (c.predicted.total_bytes, c.seconds)):
        if c is best or not kept or c.seconds < min(k.seconds for k in kept):
            kept.append(c)
    return tuple(Alternative(c.says(), c.predicted.total_bytes, c.seconds, c is best) for c in kept)


def _smallest(candidates: list[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: c.predicted.total_bytes)


def _does_not_fit(question: Question, tried: list[tuple[str, list[Candidate]]]) -> DoesNotFit:
    """Needed, had, what is already on, the largest part, and the cheapest ways out."""
    method, candidates = tried[-1]
    least = _smallest(candidates)
    budget = question.budget.limit_bytes
    parts = {**least.predicted.moments[least.predicted.peak_moment], "reserved": least.predicted.reserved_bytes}
    largest = max(parts, key=lambda component: parts[component])
    on = "; ".join(t.describe() for t in least.techniques)
    message = (
        f"{question.model.name} ({method}) needs at least {format_bytes(least.predicted.total_bytes)}, "
        f"{question.hardware.name} may use {format_bytes(budget)}.\n"
        f"  already on: {on}\n"
        f"  largest part: {largest.replace('_', ' ')}, {format_bytes(parts[largest])}, at {least.predicted.peak_moment}"
    )
    return DoesNotFit(message, hint=hint(question, Trials(_least, _best)) or "a device with more memory")


def _unsuitable(question: Question, error: Unsuitable) -> ConfigError:
    said = f"{question.model.name} cannot be trained with method={question.job.method}: {error}"
    return ConfigError(said, hint="method=lora leaves the base as it is" if question.job.method == "qlora" else "")


def _least(question: Question) -> int | None:
    """Bytes of the smallest combination; None where it cannot be used on this model, or not be planned here."""
    depth = question.model.num_hidden_layers
    pinned = question.job.pin("checkpointing")
    blocks = depth if pinned in (None, "all", "true") else int(pinned)
    needed: list[int] = []
    for wish in _by_method(question.job):
        asked = replace(question, job=wish)
        with contextlib.suppress(Unsuitable, EngineError, ConfigError):
            for size, tokens in splits(asked):  # a step of one micro-batch needs no gradients beside it: all are asked
                work = asked.batches.work(size, tokens, wish.pin("packing") == "false")
                needed.append(candidate(asked, size, tokens, work, blocks).predicted.total_bytes)
    return min(needed, default=None)


def best_of(question: Question) -> tuple[int, float]:
    """Bytes and tokens per second of the plan, or of the smallest combination, at no speed, where none fits."""
    return _best(question) or (_least(question) or 0, 0.0)


def _best(question: Question) -> tuple[int, float] | None:
    """Bytes and tokens per second of the plan, if there is one."""
    try:
        found, _ = _search(question)
    except (EngineError, ConfigError):
        return None
    return (found.predicted.total_bytes, found.tokens_per_s) if found else None


def _by_method(job: JobSpec) -> list[JobSpec]:
    """The wish once for each method it allows, in order of preference."""
    methods = METHODS if job.method == "auto" else (job.method,)
    return [replace(job, method=method) for method in methods]
