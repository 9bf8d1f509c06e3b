"""The search: the fastest exact combination that fits, with reasons; DoesNotFit argues when there is none.

What the user fixed is a constraint. Free are the size of a micro-batch, how many blocks are checkpointed and how several
devices are divided; packing, fused loss and fused ops only save, so they are on unless switched off. Of the plans that
fit the fastest wins; within two per cent of it, the one that needs least memory.
"""

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

from .batches import Uniform
from .candidates import (
    ADAPTED,
    METHODS,
    Candidate,
    Question,
    candidate,
    candidates,
    most_blocks,
    over_devices,
    precision_of,
    smallest_of,
    splits,
)  # fmt: skip
from .errors import ConfigError, DoesNotFit, EngineError
from .footprint import LABELS, MOMENT_LABELS
from .hardware import STAND_IN, UNNAMED
from .ladder import rungs
from .mesh import Mesh
from .plan import WARNING, Alternative, Plan
from .spec import JobSpec, ModelSpec
from .techniques import Accumulation, Allocator, Technique, Unsuitable, in_order
from .traffic import MACHINE, NETWORK, bubble, per_machine
from .units import format_bytes, format_seconds
from .ways import Trials, hint

SLOWER = 1.02  # plans this close in time are told apart by memory
# Of the budget: above it a CPU's heap is told to keep nothing. It kept 12 to 16 % more than was alive, with the 135M model.
ROOMY = 0.8
# A GPU is the run's alone, and context and driver are reckoned with beside the tensors; a machine has others at work.
DEFAULT_BUDGET = {"cuda": "96%", "cpu": "90%"}


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
    unsuited: Unsuitable | None = None
    limits = dict.fromkeys((question.budget.aim_bytes, question.budget.limit_bytes))
    for rung, limit in itertools.product(rungs(job, question.hardware.kind), limits):
        for wish in _by_method(job):
            asked = replace(question, job=wish, turned_on=rung)
            try:
                looked_at = [c for divided in over_devices(asked) for c in candidates(divided, limit)]
            except Unsuitable as error:
                unsuited = unsuited or error  # the first: without anything turned on
                continue  # what was tried before it argues
            fitting = [c for c in looked_at if c.predicted.total_bytes <= limit]
            if fitting:
                return _plan(asked, fitting, looked_at, _preface(asked, tried, job.method, limit)), tried
            tried.append((wish.method, looked_at))
    if not tried and unsuited:
        raise _unsuitable(question, unsuited) from unsuited
    return None, tried


def _plan(question: Question, fitting: list[Candidate], looked_at: list[Candidate], preface: list[str]) -> Plan:
    fastest = min(c.seconds for c in fitting)
    close = [c for c in fitting if c.seconds <= SLOWER * fastest]
    best = min(close, key=lambda c: (c.predicted.total_bytes, c.seconds))
    techniques = _with_heap_trimmed(question, best)
    split = next(t for t in best.techniques if isinstance(t, Accumulation))
    notes = [*question.model.notes, *_caveats(question), *_uneven(question, best, split)]
    return Plan(
        model=question.model.name,
        hardware=question.hardware.says,
        method=question.job.method,
        global_batch_size=question.job.global_batch_size,
        micro_batch_size=split.micro_batch_size,
        gradient_accumulation_steps=best.work.most_steps,
        techniques=techniques,
        predicted=best.predicted,
        seconds_per_step=best.seconds,
        tokens_per_s=best.tokens_per_s,
        budget_bytes=question.budget.limit_bytes,
        reasons=(*preface, *_says(techniques), *_reasons(question, best, looked_at, fastest)),
        alternatives=_frontier(looked_at, best),
        notes=tuple(notes),
    )


def _with_heap_trimmed(question: Question, best: Candidate) -> tuple[Technique, ...]:
    """The techniques of ``best``, on a CPU with little room for what a heap keeps beside what is alive with one more."""
    tight = best.predicted.total_bytes > ROOMY * question.budget.limit_bytes
    if question.hardware.kind != "cpu" or not tight or question.setting("allocator") is not None:
        return best.techniques
    return in_order((*best.techniques, Allocator("trimmed")))


def _uneven(question: Question, best: Candidate, split: Accumulation) -> list[str]:
    """What of the examples does not come out even."""
    said, examples, ranks = [], question.job.global_batch_size, best.mesh.data
    if examples % ranks:
        said.append(
            f"{examples} examples over {ranks} ranks: {-(-examples // ranks)} for some, fewer for others, who wait"
        )
    longest = question.batches.longest
    if 0 < split.micro_batch_tokens < longest:
        said.append(
            f"an example over {split.micro_batch_tokens:,} tokens is a micro-batch alone; the longest has {longest:,}"
        )
    return said


def _attention_dropout(model: ModelSpec) -> float:
    """Of attention weights, as the families' own configs spell it; 0 where they say none."""
    stored = json.loads(model.config or "{}")
    rates = (stored.get(key) for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"))
    return next((float(rate) for rate in rates if isinstance(rate, int | float)), 0.0)


def _caveats(question: Question) -> list[str]:
    notes = ["predicted: traced activations and exact states; tensors, not what kernels take inside one operator"]
    if question.model.dtype == "float16" and precision_of(question).kind == "bf16":
        notes.append("stored in float16, held in bfloat16: matrix products are rounded to it anyway")
    if question.job.precision == "auto" and question.hardware.lacks_bf16:
        half = "fp16" if question.job.method in ADAPTED else "fp16_mixed"
        notes.append(
            f"the device has no bf16; memory.precision={half} computes in 16 bits, which is never chosen unasked"
        )
    if (rate := _attention_dropout(question.model)) and question.model.packs and question.job.pin("packing") != "false":
        said = f"the model's dropout of {rate:g} on attention weights is not applied in packed rows"
        notes.append(f"{WARNING}{said}; memory.packing=false does")
    if question.hardware.kind == "cuda":
        notes.append("attention is counted as it runs on a CPU, and no slack of the allocator: --verify simulates both")
    if question.hardware.name.startswith(UNNAMED):
        notes.append(f"of a size alone no rates are known: the seconds are those of an {STAND_IN}")
    if question.hardware.count > 1 and question.hardware.kind == "cuda":
        notes.append("several devices were tried as processes on a CPU, where they are exact; not with NCCL")
        if not question.hardware.network_bytes_per_s and question.hardware.count > per_machine(question.hardware):
            notes.append(f"taken as machines of {MACHINE} devices with {NETWORK / 1e9:.0f} GB/s between them")
    if isinstance(question.batches, Uniform):
        notes.append(f"without data every example counts as {question.batches.length} tokens, all of them labelled")
    return notes


def _preface(asked: Question, tried: list[tuple[str, list[Candidate]]], wished: str, limit: int) -> list[str]:
    """What the answer to ``asked`` begins with; ``wished`` is the user's word for the method."""
    method = asked.job.method
    said = [
        f"{name} does not fit: at least {format_bytes(least.predicted.total_bytes)}"
        for name, least in _smallest_by_method(tried).items()
        if name != method
    ]
    if wished == "auto":
        said.append(f"method {method}: the first of {', '.join(METHODS)} that fits")
    if asked.turned_on:
        said.append(f"nothing fits without {', '.join(key for key, _ in asked.turned_on)}, so it is turned on")
    if limit != asked.budget.aim_bytes:
        said.append(f"nothing fits {format_bytes(asked.budget.aim_bytes)}, so up to {format_bytes(limit)} is used")
    return said


def _says(techniques: Sequence[Technique]) -> list[str]:
    return [f"{t.name}: {t.describe()}" for t in techniques]


def _reasons(question: Question, best: Candidate, looked_at: list[Candidate], fastest: float) -> list[str]:
    said, budget = [], question.budget.limit_bytes
    bigger = [c for c in looked_at if c.seconds < best.seconds and c.predicted.total_bytes > budget]
    if bigger:
        quickest = min(bigger, key=lambda c: c.seconds)
        said.append(
            f"faster but too large: {quickest.says()} would take {format_seconds(quickest.seconds)} a step and needs "
            f"{format_bytes(quickest.predicted.total_bytes)} of {format_bytes(budget)}"
        )
    if best.mesh.stages > 1:
        share = bubble(best.mesh, best.work.mean_steps)
        said.append(
            f"each device of the pipeline waits {100 * share / (1 + share):.0f} % of forward and backward (its bubble)"
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


def _smallest_by_method(tried: list[tuple[str, list[Candidate]]]) -> dict[str, Candidate]:
    """Of all that was looked at, whatever was turned on."""
    names = dict.fromkeys(name for name, _ in tried)
    return {n: _smallest([c for name, looked_at in tried if name == n for c in looked_at]) for n in names}


def _smallest(looked_at: list[Candidate]) -> Candidate:
    return min(looked_at, key=lambda c: c.predicted.total_bytes)


def _does_not_fit(question: Question, tried: list[tuple[str, list[Candidate]]]) -> DoesNotFit:
    """Needed, had, what is already on, the largest part, and the cheapest ways out."""
    method = tried[-1][0]
    least = _smallest_by_method(tried)[method]
    budget = question.budget.limit_bytes
    parts = {**least.predicted.moments[least.predicted.peak_moment], "reserved": least.predicted.reserved_bytes}
    largest = max(parts, key=lambda component: parts[component])
    on = "; ".join(t.describe() for t in least.techniques)
    message = (
        f"{question.model.name} ({method}) needs at least {format_bytes(least.predicted.total_bytes)}, "
        f"{question.hardware.says} may use {format_bytes(budget)}{' each' * (question.hardware.count > 1)}.\n"
        f"  already on: {on}\n"
        f"  largest part: {LABELS[largest]}, {format_bytes(parts[largest])}, at {MOMENT_LABELS[least.predicted.peak_moment]}"
    )
    return DoesNotFit(message, hint=hint(question, Trials(_least, _best)) or "a device with more memory")


def _unsuitable(question: Question, error: Unsuitable) -> ConfigError:
    said = f"{question.model.name} cannot be trained with method={question.job.method}: {error}"
    return ConfigError(said, hint="method=lora leaves the base as it is" if question.job.method == "qlora" else "")


def _least(question: Question) -> int | None:
    """Bytes of the smallest combination; None where it cannot be used on this model, or not be planned here."""
    blocks = most_blocks(question)
    needed: list[int] = []
    for wish, rung in itertools.product(_by_method(question.job), rungs(question.job, question.hardware.kind)):
        asked = replace(question, job=wish, turned_on=rung)
        with contextlib.suppress(Unsuitable, EngineError, ConfigError):
            if asked.hardware.count > 1:
                needed += [smallest_of(divided).predicted.total_bytes for divided in over_devices(asked)]
                continue
            # A step of one micro-batch needs no gradients beside it, so all are asked; with something turned on the smallest.
            for size, tokens in list(splits(asked))[-1 if rung else 0 :]:
                work = asked.work(size, tokens)
                needed.append(candidate(asked, size, tokens, work, blocks).predicted.total_bytes)
    return min(needed, default=None)


def best_over(question: Question, mesh: Mesh, limit: int) -> Candidate | None:
    """The fastest combination within ``limit`` on devices divided so, else the smallest; None where that does not suit."""
    try:
        looked_at = list(candidates(question.over(mesh), limit))
    except Unsuitable:
        return None
    fitting = [c for c in looked_at if c.predicted.total_bytes <= limit]
    return min(fitting, key=lambda c: c.seconds) if fitting else _smallest(looked_at)


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
