"""Combinations of techniques drawn by chance, and what is looked at in each: tests and ``benchmarks/combinations.py`` share it.

A draw is what a user could write into a run file; ``candidates`` makes the techniques, on a split and a number of blocks
that the search would try too. What is refused is drawn again, and why it was refused is counted: by an error of finefit's
own, with a sentence, or the draw fails.
"""

import collections
import functools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finefit import models, predict
from finefit.batches import FromOrder, Work
from finefit.candidates import Question, fewest_blocks, judged, rewrite, splits, techniques_of
from finefit.coefficients import evaluation_is_traced, is_traced
from finefit.config import load as load_config
from finefit.errors import ConfigError
from finefit.footprint import STEP, Footprint
from finefit.hardware import HardwareSpec
from finefit.layout import Micro
from finefit.planning import job_of
from finefit.run import Example
from finefit.spec import ModelSpec
from finefit.techniques import (
    DIVIDING,
    TECHNIQUES,
    Technique,
    Unsuitable,
)  # fmt: skip
from finefit.units import parse_budget
from tiny import GEMMA, VOCAB, config_of

HARDWARE = HardwareSpec("a CPU", "cpu", 2**40, matmul_flops_per_s=(("float32", 1e11),), bandwidth_bytes_per_s=1e10)
ON_ONE_DEVICE = tuple(t for t in TECHNIQUES if t not in DIVIDING)

# key → (how often it is said, its values). What is not said is the plan's.
METHODS = ("full", "lora", "qlora")
KEYS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "lora.rank": (1.0, (2, 4, 8)),
    "lora.dropout": (0.15, (0.1,)),
    "lora.targets": (0.1, ("q_proj,v_proj", "all")),
    "qlora.bits": (0.8, (2, 3, 4, 8)),
    "qlora.scales": (0.3, ("plain", "double")),
    "train.optimizer": (0.6, ("adamw", "adamw_8bit", "adamw_4bit", "lion", "lion_8bit", "sgd", "adafactor", "apollo", "apollo_mini")),
    "train.max_grad_norm": (0.6, (0, 0, 0.05)),
    "memory.precision": (0.9, ("fp32", "bf16", "bf16_mixed", "fp16", "fp16_mixed")),
    "memory.fp32_islands": (0.15, ("norms", "head", "norms,head")),
    "memory.checkpointing": (0.6, (0, 1, 2, "all")),
    "memory.checkpointing_kind": (0.4, ("block", "nested", "attention", "mlp", "selective")),
    "memory.activation_offload": (0.35, ("disk", "none", "host")),
    "memory.packing": (0.4, (True, False)),
    "memory.micro_batch_size": (0.3, (1, 2, 3)),
    "memory.micro_batch_tokens": (0.2, (48, 96)),
    "memory.loss_chunk": (0.5, (16, 32, 64, 0)),
    "memory.fused_backward_step": (0.4, (True, True, False)),
    "memory.rounding": (0.3, ("stochastic", "nearest")),
    "memory.fused_ops": (0.15, (True, False)),
    "memory.allocator": (0.2, ("trimmed", "default", "expandable")),
    "memory.parameter_offload": (0.3, ("disk", "disk", "none", "host")),
    "memory.optimizer_offload": (0.3, ("disk", "disk", "none", "host")),
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A model, and batches of examples by length. ``config`` makes a transformers config anew."""

    name: str
    config: Callable[[], Any]
    fill: models.Fill
    vocabulary: int
    lengths: tuple[int, int]
    """Of the shortest and the longest example."""


def tiny_subjects() -> tuple[Subject, ...]:
    """Llama, Qwen 2 and Gemma 2 in shape, of two blocks and of three: fewer are not streamed."""
    shapes: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("llama", {"num_hidden_layers": 3}),
        "llama with a head of its own": ("llama", {"num_hidden_layers": 2, "tie_word_embeddings": False}),
        "qwen2": ("qwen2", {"num_hidden_layers": 2}),
        "gemma2": (
            "gemma2",
            {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "num_hidden_layers": 3},
        ),
    }
    return tuple(
        Subject(name, functools.partial(config_of, family, **changes), models.fill_random(0), VOCAB, (8, 80))
        for name, (family, changes) in shapes.items()
    )


def real_subject(folder: Path) -> Subject:
    """The model of a folder, with its weights, and short examples."""
    config = models.config_of(folder)
    return Subject(
        "real", functools.partial(models.config_of, folder), models.fill_from(folder), config.vocab_size, (24, 64)
    )


@dataclass(frozen=True)
class Drawn:
    """A combination that the planner could propose."""

    subject: Subject
    settings: Mapping[str, Any]
    techniques: tuple[Technique, ...]
    examples: tuple[Example, ...]
    steps: tuple[tuple[int, ...], ...]
    work: Work
    worst: tuple[int, ...]
    predicted: Footprint

    def says(self) -> str:
        said = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.subject.name}: {said} → {'; '.join(map(repr, self.techniques))}"

    def of_step(self, step: int) -> list[Example]:
        return [self.examples[row] for row in self.steps[step]]

    def layout(self) -> Any:
        return rewrite(spec_of(self.subject), self.work.largest[0], self.techniques)


@dataclass
class Draws:
    """Combinations from a seed. Of those whose graph is not at hand, ``most_traced`` are taken."""

    subjects: Sequence[Subject]
    seed: int
    most_traced: int
    steps: int = 2
    sizes: tuple[int, ...] = (2, 3)
    """Examples of a step."""

    def __post_init__(self) -> None:
        self.rng, self.refused, self.traced = random.Random(self.seed), collections.Counter[str](), 0

    def __iter__(self) -> Iterator[Drawn]:
        while True:
            try:
                yield self._drawn()
            except (Unsuitable, ConfigError) as error:
                sentence = str(error)
                assert len(sentence.split()) > 3, f"not a sentence: {error!r}"
                self.refused[_kind(sentence)] += 1

    def _drawn(self) -> Drawn:
        subject, method = self.rng.choice(self.subjects), self.rng.choice(METHODS)
        settings = {"method": method, "train.global_batch_size": self.rng.choice(self.sizes), **self._said(method)}
        config = load_config(None, [f"{key}={value}" for key, value in settings.items()], {"model": "tiny"})
        examples = self._examples(subject, self.steps * config.train.global_batch_size)
        size = config.train.global_batch_size
        rows = tuple(tuple(range(step * size, (step + 1) * size)) for step in range(self.steps))
        batches = FromOrder(rows, [len(ids) for ids, _ in examples], [sum(mask[1:]) for _, mask in examples])
        model = spec_of(subject)
        job = replace(job_of(config, None), longest=batches.longest, steps=self.steps)
        question = Question(model, HARDWARE, job, batches, parse_budget("1TiB", 2**40))
        split = self.rng.choice(list(splits(question)))
        work = question.work(*split)
        techniques = techniques_of(question, *split, work, self._blocks(question))
        self._at_hand(model, work.largest[0], techniques)
        made = judged(model, HARDWARE, techniques, work)
        padded = job.pin("packing") == "false"
        most = max(work.largest, key=lambda micro: peak(predict.footprint(rewrite(model, micro, techniques))))
        worst = tuple(batches.rows_of(most, *split, padded))
        return Drawn(subject, settings, made.techniques, examples, rows, work, worst, made.predicted)

    def _said(self, method: str) -> dict[str, Any]:
        of_method = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[method]
        said = {
            key: self.rng.choice(values)
            for key, (often, values) in KEYS.items()
            if self.rng.random() < often and key.partition(".")[0] not in of_method
        }
        if said.get("memory.fused_backward_step") and self.rng.random() < 0.8:  # else it is nearly always refused
            said["train.max_grad_norm"] = 0
        return said

    def _blocks(self, question: Question) -> int:
        """As many as were said, or that the search could come to."""
        depth, pinned = question.model.num_hidden_layers, question.job.pin("checkpointing")
        if pinned is None:
            return self.rng.randint(fewest_blocks(question), depth)
        return depth if pinned == "all" else int(pinned)

    def _examples(self, subject: Subject, count: int) -> tuple[Example, ...]:
        """Random tokens, of which a random part from a random place on is labelled."""
        found = []
        for _ in range(count):
            length = self.rng.randint(*subject.lengths)
            start = self.rng.randint(1, length - 1)
            ids = [self.rng.randrange(3, subject.vocabulary) for _ in range(length)]
            found.append((ids, [int(i >= start) for i in range(length)]))
        return tuple(found)

    def _at_hand(self, model: ModelSpec, micro: Micro, techniques: Sequence[Technique]) -> None:
        layout = rewrite(model, micro, techniques)
        if is_traced(layout) and evaluation_is_traced(layout):
            return
        if self.traced >= self.most_traced:
            raise Unsuitable("its graph is not at hand, and a trace takes seconds")
        self.traced += 1


def _kind(sentence: str) -> str:
    """What many refusals have in common: the sentence without its numbers and names."""
    return re.sub(r"\d+", "N", sentence)


def spec_of(subject: Subject) -> ModelSpec:
    return ModelSpec.from_config(subject.config().to_dict(), subject.name)


def peak(footprint: Footprint) -> int:
    """Of the moments of a step."""
    return max(footprint.at(moment) for moment in STEP)
