"""Combinations of techniques for a question: which there are, what each needs and how long it takes.

A micro-batch size is tried from the largest down; for each the fewest checkpointed blocks that fit are found by
bisection, since the peak falls with every block. Several devices are divided in every way of ``meshes``.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from .batches import Batches, Work
from .cost import seconds_per_step
from .errors import ConfigError
from .footprint import Footprint
from .ladder import Rung
from .layout import Layout, Micro, layout_of
from .mesh import Mesh
from .meshes import DEGREES, contexts, fewest_ranks, meshes, techniques_of_mesh
from .predict import footprint
from .spec import CheckpointingKind, HardwareSpec, JobSpec, ModelSpec
from .techniques import (
    Accumulation,
    ActivationOffload,
    Allocator,
    Checkpointing,
    Clipping,
    Fp32Islands,
    FusedBackwardStep,
    FusedLoss,
    FusedOps,
    Lora,
    OptimizerOffload,
    OptimizerStates,
    Packing,
    ParameterOffload,
    Precision,
    QuantizedBase,
    Technique,
    Unsuitable,
    in_order,
)  # fmt: skip
from .techniques.optimizer_offload import host_bytes
from .techniques.parameter_offload import pinned_bytes
from .techniques.quantized_base import CHUNK, Bits, Scales
from .traffic import per_machine
from .units import Budget, format_bytes
from .updating import CHUNK as STEPPED
from .updating import OptimizerKind, Rounding

LOSS_CHUNK = {"cpu": 256, "cuda": 1024}
Method = Literal["full", "lora", "qlora"]
_LATE = (
    Checkpointing,
    ActivationOffload,
    FusedLoss,
    Accumulation,
    Clipping,
    OptimizerOffload,
    FusedBackwardStep,
)  # techniques that say how a step runs, and add no tensors
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")  # what auto tries, in order
_HALVES = ("bfloat16", "float16")
ADAPTED = METHODS[1:]  # methods that train adapters on a frozen base


@dataclass(frozen=True, slots=True)
class Candidate:
    techniques: tuple[Technique, ...]
    work: Work
    predicted: Footprint
    seconds: float
    mesh: Mesh = field(default_factory=Mesh)

    def says(self) -> str:
        chosen = {t.name: t for t in self.techniques}
        split = chosen["accumulation"]
        k = chosen["checkpointing"].blocks if "checkpointing" in chosen else 0  # type: ignore[attr-defined]
        cap = f", {split.micro_batch_tokens} tokens" if split.micro_batch_tokens else ""  # type: ignore[attr-defined]
        mesh = f"{self.mesh.says()}, " if self.mesh.devices > 1 else ""
        return f"{mesh}micro-batch {split.micro_batch_size}{cap}, {k} blocks checkpointed"  # type: ignore[attr-defined]

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together, padding not counted."""
        return self.work.mean_real_tokens * self.mesh.data / self.seconds


@dataclass(frozen=True, slots=True)
class Question:
    """All that a search depends on."""

    model: ModelSpec
    hardware: HardwareSpec
    job: JobSpec
    batches: Batches
    """Of one data-parallel rank."""
    budget: Budget
    mesh: Mesh = field(default_factory=Mesh)
    learnt: tuple[tuple[str, float], ...] = ()
    """Moments, and how many times what is predicted of them they take: of runs that died there."""
    turned_on: Rung = ()
    """What the search turned on of what the user left open."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "job", self.job.suited_to(self.model))

    def setting(self, key: str) -> str | None:
        """What ``key`` of ``memory.*`` is, said by the user or turned on by the search; None where neither did."""
        said = self.job.pin(key)
        return dict(self.turned_on).get(key) if said is None else said

    def work(self, size: int, tokens: int) -> Work:
        """Of micro-batches of at most so many examples and tokens, in rectangles where packing is switched off."""
        return self.batches.work(size, tokens, self.job.pin("packing") == "false")

    def meshes(self) -> Iterator[Mesh]:
        """Ways to divide it over the devices."""
        longest, said, by = self.batches.longest, self.job.pin("context_parallel"), self.job.pin("deepspeed")
        return meshes(self.hardware, self.job.global_batch_size, contexts(self.hardware, longest, said), by)

    def over(self, mesh: Mesh) -> "Question":
        """The same, divided over devices so."""
        return replace(self, mesh=mesh, batches=self.batches.among(mesh.data))


def over_devices(question: Question) -> Iterator[Question]:
    """The question once for each way to divide it over the devices that suits the model."""
    found, why = 0, None
    for mesh in _wished(question):
        asked = question.over(mesh)
        try:
            size, tokens = next(splits(asked))
            work = asked.work(size, tokens)
            rewrite(asked.model, work.largest[0], techniques_of(asked, size, tokens, work, 0))
        except Unsuitable as error:
            why = error
            continue
        found += 1
        yield asked
    if not found:
        raise why or _indivisible(question)


def _wished(question: Question) -> Iterator[Mesh]:
    """The ways to divide it that are as the user said; ConfigError where there are some, and none of them is."""
    said = {key: int(word) for key in DEGREES if (word := question.job.pin(key)) is not None}
    if question.hardware.count == 1:
        said.pop("zero", None)  # shared out among one, everything is as it is
    found = list(question.meshes())
    kept = [mesh for mesh in found if all(getattr(mesh, DEGREES[key]) == degree for key, degree in said.items())]
    if found and not kept:
        words = ", ".join(f"{key} {degree}" for key, degree in said.items())
        there = "; ".join(dict.fromkeys(mesh.says() for mesh in found[:8]))
        raise ConfigError(
            f"{question.hardware.says} cannot be divided so: {words}",
            hint=f"memory.parallel may be auto; there are: {there}",
        )
    order = question.job.pin("pipeline_schedule")
    yield from kept if order is None else (mesh.ordered(order) for mesh in kept)


def _indivisible(question: Question) -> ConfigError:
    """More ranks than examples however the devices are divided."""
    hardware, examples = question.hardware, question.job.global_batch_size
    ranks = fewest_ranks(hardware)
    fewer = next(
        (n for n in range(hardware.count - 1, 0, -1) if fewest_ranks(replace(hardware, count=n)) <= examples), 1
    )
    return ConfigError(
        f"{hardware.count} devices cannot share a step of {examples} examples: tensor and pipeline parallel divide them "
        f"into at least {ranks} data-parallel ranks, each of which needs one",
        hint=f"say train.global_batch_size={ranks}, or {fewer} devices",
    )


def candidates(question: Question, limit: int) -> Iterator[Candidate]:
    """For each micro-batch size the least checkpointing that fits, and the most if none does."""
    depth = question.model.num_hidden_layers
    pinned = question.job.pin("checkpointing")
    if question.mesh.devices > 1:  # most ways of dividing are hopeless, and their smallest combination says so
        least = smallest_of(question)
        if least.predicted.total_bytes > limit:
            yield least
            return
    if pinned is not None:
        fixed = depth if pinned in ("all", "true") else int(pinned)
        if fixed > depth:
            raise ConfigError(
                f"memory.checkpointing: {fixed} blocks, the model has {depth}",
                hint=f"say a number up to {depth}, or all",
            )
        if fixed < fewest_blocks(question):
            raise Unsuitable("activation_offload keeps nothing less without checkpointed blocks")
    for size, tokens in splits(question):
        work = question.work(size, tokens)
        if pinned is not None:
            yield candidate(question, size, tokens, work, fixed)
            continue
        fewest = fewest_blocks(question)
        none, every = (candidate(question, size, tokens, work, k) for k in (fewest, depth))
        yield none
        if none.predicted.total_bytes <= limit:
            continue
        yield every
        low, high = fewest, depth
        while every.predicted.total_bytes <= limit and high - low > 1:
            middle = (low + high) // 2
            found = candidate(question, size, tokens, work, middle)
            low, high = (low, middle) if found.predicted.total_bytes <= limit else (middle, high)
        if high < depth:
            yield candidate(question, size, tokens, work, high)


def fewest_blocks(question: Question) -> int:
    """Blocks that must be checkpointed: one, where what is kept of such blocks is offloaded."""
    return int(question.setting("activation_offload") in ("host", "disk"))


def most_blocks(question: Question) -> int:
    """Blocks that may be checkpointed: as many as were said, else all."""
    depth, pinned = question.model.num_hidden_layers, question.job.pin("checkpointing")
    return depth if pinned in (None, "all", "true") else int(pinned)


def smallest_of(question: Question) -> Candidate:
    """The smallest micro-batch with every block checkpointed that may be."""
    *_, (size, tokens) = splits(question)
    work = question.work(size, tokens)
    return candidate(question, size, tokens, work, most_blocks(question))


def splits(question: Question) -> Iterator[tuple[int, int]]:
    """(examples, tokens) a micro-batch may hold, largest first; tokens are limited only where examples are packed."""
    job, batches = question.job, question.batches
    examples = -(-job.global_batch_size // question.mesh.data)
    size, tokens = job.pin("micro_batch_size"), job.pin("micro_batch_tokens")
    if size is not None and int(size) > job.global_batch_size:
        hint = f"say at most {job.global_batch_size}, or raise train.global_batch_size"
        raise ConfigError(f"memory.micro_batch_size {size} is larger than the global batch", hint=hint)
    if size is not None and int(size) > examples:
        raise Unsuitable(f"{size} examples a micro-batch, {examples} to a rank")
    if question.setting("fused_backward_step") == "true":  # of a whole batch, unless another size was said
        yield int(size or examples), int(tokens or 0)
        return
    if job.pin("packing") == "false" or size is not None:
        sizes = [int(size)] if size else list(_powers(examples))
        yield from ((n, int(tokens or 0)) for n in sizes)
        return
    if tokens is not None:
        yield examples, int(tokens)
        return
    longest, most = batches.longest, batches.most_tokens
    for factor in (64, 32, 16, 8, 6, 4, 3, 2, 1.5, 1):
        if longest * factor <= max(most, longest):
            yield examples, int(longest * factor)


def _powers(most: int) -> list[int]:
    """``most`` and the powers of two below it, largest first."""
    return sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)}, reverse=True)


def candidate(question: Question, size: int, tokens: int, work: Work, checkpointed: int) -> Candidate:
    """One combination, predicted for its worst micro-batch."""
    techniques = techniques_of(question, size, tokens, work, checkpointed)
    made = judged(question.model, question.hardware, techniques, work)
    return replace(made, predicted=made.predicted.corrected(dict(question.learnt)))


def judged(model: ModelSpec, hardware: HardwareSpec, techniques: tuple[Technique, ...], work: Work) -> Candidate:
    """Techniques on the work of a run: predicted for its worst micro-batch, timed for its mean."""
    layouts = [rewrite(model, micro, techniques) for micro in work.largest]
    ranks = min(layouts[0].mesh.devices, per_machine(hardware))  # whose host is the same
    _check_host(hardware, ranks * (pinned_bytes(layouts[0]) + host_bytes(layouts[0])))
    predicted = max((footprint(layout, hardware) for layout in layouts), key=lambda f: f.peak_bytes)
    return Candidate(techniques, work, predicted, seconds_per_step(layouts[0], work, hardware), layouts[0].mesh)


def _check_host(hardware: HardwareSpec, pinned: int) -> None:
    """Unsuitable where a GPU's host is known not to hold what is offloaded to it."""
    if hardware.kind == "cuda" and 0 < hardware.host_memory_bytes < pinned:
        has = format_bytes(hardware.host_memory_bytes)
        raise Unsuitable(f"what is offloaded takes {format_bytes(pinned)} of the host's memory, which is {has}")


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
    chosen: list[Technique] = [precision_of(question), *techniques_of_mesh(question.mesh, job.pin("deepspeed.offload"))]
    if job.method == "qlora":
        bits, scales = int(job.pin("qlora.bits") or 4), job.pin("qlora.scales") or "double"
        chosen.append(QuantizedBase(cast(Bits, bits), cast(Scales, scales), CHUNK[kind]))
    if job.method in ADAPTED:
        chosen.append(Lora(job.rank, job.alpha, job.dropout, job.targets))
    optimizer, rounding = job.pin("optimizer") or "adamw", job.pin("rounding") or "nearest"
    if (optimizer, rounding) != ("adamw", "nearest"):
        kinds = cast(OptimizerKind, optimizer), cast(Rounding, rounding)
        chosen.append(OptimizerStates(*kinds, STEPPED[kind]))
    if job.pin("fused_ops") != "false":
        chosen.append(FusedOps())
    if (islands := job.pin("fp32_islands")) and chosen[0] != Precision("fp32"):
        chosen.append(Fp32Islands(tuple(islands.split(","))))
    if place := offload_of(question, "parameter_offload"):
        chosen.append(ParameterOffload(place))
    if job.pin("packing") != "false":
        chosen.append(Packing())
    if checkpointed:
        chosen += _recomputing(question, checkpointed)
    chunk = int(job.pin("loss_chunk") or LOSS_CHUNK[kind])
    if chunk:
        chosen.append(FusedLoss(chunk))
    chosen.append(Accumulation(size, tokens, work.most_steps))
    chosen.append(Clipping(float(job.pin("max_grad_norm") or 1.0)))
    if wanted := allocator_of(question):
        chosen.append(Allocator(wanted))
    if place := offload_of(question, "optimizer_offload"):
        chosen.append(OptimizerOffload(place, _sums_on(question, place)))
    if question.setting("fused_backward_step") == "true":
        chosen.append(FusedBackwardStep())
    return in_order(chosen)


def _sums_on(question: Question, place: Literal["host", "disk"]) -> Literal["device", "host", "disk"]:
    """Where gradients are summed when states are elsewhere: nowhere, if each is stepped by as it appears."""
    if question.hardware.kind == "cuda":  # nothing on a host is stepped by a device
        return "host"
    is_disk = question.setting("gradients_on_disk") == "true" and question.setting("fused_backward_step") != "true"
    return "disk" if is_disk else "device"


def allocator_of(question: Question) -> Literal["expandable", "trimmed", "tight"] | None:
    """A GPU's segments grow, unless the user says otherwise; a CPU's heap is as it is until there is little room."""
    kind, wanted = question.hardware.kind, question.setting("allocator")
    if wanted == "default":
        return None
    if kind == "cuda" and wanted in (None, "expandable"):
        return "expandable"
    if kind == "cpu" and wanted in (None, "trimmed", "tight"):
        return cast(Literal["trimmed", "tight"] | None, wanted)
    here = {"cuda": "expandable", "cpu": "trimmed or tight"}[kind]
    raise Unsuitable(f"memory.allocator={wanted} is for another kind of device; here it may be {here}")


def offload_of(question: Question, key: str) -> Literal["host", "disk"] | None:
    """Where ``memory.key`` puts what it takes off the device; None where it takes nothing."""
    place = question.setting(key)
    if place == "host" and question.hardware.kind == "cpu":
        raise Unsuitable(f"a CPU's memory is the host's: memory.{key}=disk takes off it what the host would take")
    return cast(Literal["host", "disk"], place) if place in ("host", "disk") else None


def _recomputing(question: Question, blocks: int) -> Iterator[Technique]:
    """How so many blocks are checkpointed, and where what they keep is meanwhile."""
    yield Checkpointing(blocks, cast(CheckpointingKind, question.setting("checkpointing_kind") or "block"))
    if place := offload_of(question, "activation_offload"):
        yield ActivationOffload(place)


def precision_of(question: Question) -> Precision:
    """``auto``: frozen weights of 16 bits are held in bf16, trained ones have an fp32 master; fp32 without bf16.

    A frozen fp16 weight loses nothing by it that its product in bf16 would not lose.
    """
    job = question.job
    if job.precision != "auto":
        if job.precision.startswith("bf16") and question.hardware.lacks_bf16:
            half = "fp16" if job.precision == "bf16" and job.method in ADAPTED else "fp16_mixed"
            hint = f"say memory.precision={half} (products in 16 bits, the loss scaled) or fp32"
            raise ConfigError(f"{question.hardware.name} cannot compute in bf16", hint=hint)
        if job.precision == "fp16" and job.method not in ADAPTED:
            raise Unsuitable(
                "weights that train in fp16 lose small updates: memory.precision=fp16_mixed keeps them in fp32"
            )
        return Precision(job.precision)
    if not question.hardware.supports_bf16:
        return Precision("fp32")
    return Precision("bf16" if job.method in ADAPTED and question.model.dtype in _HALVES else "bf16_mixed")
