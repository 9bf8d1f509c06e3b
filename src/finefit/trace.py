"""The traced step: what a step of the real, rewritten model allocates, as exact polynomials in its sizes.

A shallow model (three blocks: first, any, last) is rewritten by the real techniques and stepped under fake tensors while
the ledger watches. Every allocation's shape is read back as symbols (``reading``), so one trace holds for every length
and every depth: the middle block's sections are repeated. A family's trace holds for every model of the family; where
its sizes are not enough to say what is there, a model is traced as it is, and only what a run brings is a symbol.
Mixtures whose first blocks are dense have two of them before the others. What is kept of a section is its end and the
landmarks inside it that no other landmark dominates. A second trace at other sizes must equal the polynomials to the
byte (``check``). An evaluation is traced in the same way, of forward and loss alone.

Declines what kernels hold inside one operator.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from . import coefficients, evaluate, models
from .build import rewritten
from .engines.world import pretended
from .fakes import query_block, without_values
from .layout import Micro
from .ledger import Ledger, NoLedger, block_marks
from .meshes import mesh_of
from .nn.optimizers import Optimizing
from .poly import Poly, dominates, plus, value
from .reading import RANKS, NumberReader, Reader, derived, family_config, sizes_of_family, sizes_of_run
from .run import MicroBatch, Run, blocks_of, filled, trainable
from .scratch import is_fake
from .spec import CheckpointingKind
from .techniques import (
    Checkpointing,
    Clipping,
    Fp32Islands,
    FusedLoss,
    FusedOps,
    Lora,
    Packing,
    Precision,
    QuantizedBase,
    Technique,
    TensorParallel,
)  # fmt: skip
from .techniques.quantized_base import FORMS

BLOCKS = 3
_RECOMPUTED: dict[str, CheckpointingKind] = {
    "checkpointed": "block", "attention": "attention", "mlp": "mlp", "selective": "selective",
}  # fmt: skip
TRACED = ("activation", "temporary", "gradient")
HELD = "own buffers"
# Gemma 3 has two rotary tables, one for each kind of block: both kinds must be among the three. Granite's factor on the
# logits is 1 where its config does not say one, and every model's says one.
_KINDS: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        "attention_types": [[["global", "local", "global"], 1]],
        "attention_layers": ["global", "local", "global"],
    },
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    **{family: {"logits_scaling": 8.0} for family in ("granite", "granitemoe")},
}


@dataclass(frozen=True, slots=True)
class Section:
    """Changes since the section's start: at its end, and at its landmarks (where the total may be highest)."""

    name: str
    end: dict[str, Poly]
    landmarks: list[dict[str, Poly]]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is traced: ``config`` makes its transformers config for given sizes and flags of the graph's key."""

    config: Callable[[Mapping[str, int], Mapping[str, Any]], Any]
    sizes: tuple[dict[str, int], dict[str, int]]
    """Of the first trace and of the one that checks it."""
    reader: type[Reader]


def subject_of(name: str, key: str) -> Subject:
    """A family by its name, or a model by the path of its config.json."""
    path = Path(name)
    return model_of(json.loads(path.read_text()), key) if path.suffix == ".json" else family_of(name, key)


def family_of(family: str, key: str) -> Subject:
    """Any model of a family; of one that is divided, the part of one of two ranks."""
    words = key.split()

    def config(sizes: Mapping[str, int], flags: Mapping[str, Any]) -> Any:
        from transformers import AutoConfig

        common = family_config(family, sizes, words, _blocks(words))
        return AutoConfig.for_model(family, **{**common, **_KINDS.get(family, {}), **flags})

    return Subject(config, sizes_of_family(family, words), Reader)


def model_of(described: Mapping[str, Any], key: str) -> Subject:
    """One model, by its config.json: its blocks are one of each kind that there is."""
    config = models.config_from(described)
    layers = models.sampled(config, _blocks(key.split()))
    with torch.device("meta"):
        shapes = [p.shape for p in models.on_meta(layers).parameters()]
    return Subject(lambda _sizes, _flags: models.sampled(config, _blocks(key.split())),
                   sizes_of_run(size for shape in shapes for size in shape), NumberReader)  # fmt: skip


def _blocks(words: Sequence[str]) -> int:
    return BLOCKS + ("dense_first" in words)


def batch_of(micro: Micro, columns: int = 0) -> MicroBatch:
    """A packed row of that many tokens, in sequences of the longest's length and one of the rest; values do not matter.

    Rows of so many columns, if that is said.
    """
    bounds = (*range(0, micro.tokens, micro.longest), micro.tokens)
    zeros, label = torch.zeros(1, micro.tokens, dtype=torch.long), torch.zeros(micro.labelled, dtype=torch.long)
    zeros = zeros.view(-1, columns or micro.tokens)
    return MicroBatch(zeros, zeros.clone(), bounds, filled(label), label, micro.tokens)


def run_step(run: Run, batch: MicroBatch, ledger: Ledger, micro_steps: int = 2) -> None:
    """One optimizer step under the ledger: micro-batches, clip, update; the real code of the loop's parts."""
    own_state(run, batch, ledger)
    with ledger, block_marks(ledger, blocks_of(run.model)):
        run.passes.learn(run, [batch] * micro_steps, 7, lambda _loss: None, ledger)
        ledger.own((p.grad for p in run.model.parameters()), "gradient")
        ledger.mark("optimizer")
        run.doing.moment = "optimizer_step"
        stepped = run.optimizer.gradients()
        run.scaler.unscale_(run.optimizer)
        if not _is_finite(run.clip(stepped, run.world)):
            for parameter in stepped:  # a rate of 0 times a nan is a nan; the step takes the same bytes without
                if parameter.grad is not None:
                    parameter.grad.zero_()
        run.scaler.step(run.optimizer)
        ledger.mark("end")


def _is_finite(norm: Tensor) -> bool:
    """Whether it is, or has no value."""
    return is_fake(norm) or norm.is_meta or math.isfinite(norm.item())


def run_evaluation(run: Run, batch: MicroBatch, ledger: Ledger) -> None:
    """The loss of one batch without gradients, under the ledger: nothing outlives it."""
    own_state(run, batch, ledger)
    with ledger, block_marks(ledger, blocks_of(run.model), "eval"):
        ledger.mark("eval before")
        evaluate.unlearned_loss(run, batch, _Within(ledger, "eval"))
        ledger.mark("end")


@dataclass(frozen=True, slots=True)
class _Within(NoLedger):
    """Marks sections of a moment of their own."""

    ledger: Ledger
    moment: str

    def mark(self, name: str) -> None:
        self.ledger.mark(f"{self.moment} {name}")


def own_state(run: Run, batch: MicroBatch, ledger: Ledger) -> None:
    """Name what is there before the step begins."""
    blocks = [(f"own {i}", block) for i, block in enumerate(blocks_of(run.model))]
    for name, module in (*blocks, ("own rest", run.model)):
        ledger.mark(name)
        ledger.own(module.parameters(), "parameter")
        ledger.own((t for p in module.parameters() for t in run.optimizer.held(p)), "optimizer_state")
    ledger.own(run.optimizer.all_held(), "optimizer_state")
    for owner, tensors in run.optimizer.own().items():
        ledger.own(tensors, owner)
    ledger.own((p.grad for p in run.model.parameters()), "gradient")
    ledger.own((*batch.tensors(), *run.optimizer.beside), "input")
    ledger.mark(HELD)
    ledger.own(run.model.buffers(), "input")


def traced(
    config: Any,
    techniques: Sequence[Technique],
    sizes: Mapping[str, int],
    step: Callable[[Run, MicroBatch, Ledger], None] = run_step,
) -> Ledger:
    """The ledger of one fake step (or of one evaluation) at these sizes."""
    ledger = Ledger()
    with ExitStack() as stack:
        world = stack.enter_context(pretended(mesh_of(techniques)))
        run = rewritten(config, techniques, torch.device("cpu"), world)
        for context in (FakeTensorMode(allow_non_fake_inputs=True), query_block(sizes["Q"]), without_values()):
            stack.enter_context(context)
        models.fill_empty(run.model, run.device)
        run.optimizer.begin(trainable(run.model), Optimizing())
        micro = Micro(sizes["T"], sizes["S"], sizes["L"])
        batch = batch_of(micro, sizes["S"] if "B" in sizes else 0)
        step(run, replace(batch, row_r=batch.row_r[: sizes["L"]]), ledger)  # a number of rows that only they have
    return ledger


def sections(ledger: Ledger, sizes: Mapping[str, int], reader_type: type[Reader] = Reader) -> list[Section]:
    """The ledger's sections with every allocation read back as symbols.

    What a block's forward made and a section outside the blocks frees grows with depth, and what came before the blocks
    is freed as the first block's kind has it: it stands apart, as the section ``late <block or before> <outer>``, to be
    applied once for each block of that kind.
    """
    gradients = sum(entry.owner == "gradient" for entry in ledger.entries)
    reader = reader_type({**sizes, "P": gradients})
    found: list[Section] = []
    held: Poly = {}  # tables a model has beside its parameters: of positions, of what attention sees
    for entry in ledger.entries:
        if ledger.sections[entry.section] == HELD and len(entry.shape) > 1:
            held = plus(held, reader.bytes_of(entry, HELD))
    if held:
        found.append(Section("held", {"input": held}, []))
    for name, events in ledger.by_section():
        now: dict[str, Poly] = {}
        landmarks: list[dict[str, Poly]] = []
        late: dict[str, dict[str, Poly]] = {}
        for entry, sign in ((ledger.entries[i], sign) for i, sign in events):
            component = ledger.component(entry)
            if component not in TRACED:
                continue
            poly, born = reader.bytes_of(entry, name), ledger.sections[entry.section]
            if sign < 0 and _is_late(born, name):
                apart = late.setdefault(f"late {born.split(' ')[-1]} {name}", {})
                apart[component] = plus(apart.get(component, {}), poly, sign)
                continue
            now = {**now, component: plus(now.get(component, {}), poly, sign)}
            if sign > 0:
                landmarks.append(now)
        found.append(Section(name, _without_empty(now), _undominated(landmarks)))
        found += [Section(apart, _without_empty(parts), []) for apart, parts in sorted(late.items())]
    return found


def _is_outside(section: str) -> bool:
    """Before, between and after what a step does."""
    return section in ("start", "idle", "end") or section.startswith("own ")


def _is_late(born: str, died: str) -> bool:
    """Whether what was born in a section may depend on another kind of block than the section it dies in."""
    return (born[-1].isdigit() or born.endswith(" before")) and not died[-1].isdigit() and born != died


def _without_empty(parts: Mapping[str, Poly]) -> dict[str, Poly]:
    return {component: poly for component, poly in parts.items() if poly}


def _undominated(landmarks: list[dict[str, Poly]]) -> list[dict[str, Poly]]:
    """Landmarks whose total no other landmark exceeds term by term, in order."""
    totals = [_total(mark) for mark in landmarks]
    kept: list[int] = []
    for i, total in enumerate(totals):
        if any(dominates(totals[j], total) for j in kept):
            continue
        kept = [j for j in kept if not dominates(total, totals[j])] + [i]
    return [landmarks[i] for i in kept]


def _total(parts: Mapping[str, Poly]) -> Poly:
    out: Poly = {}
    for poly in parts.values():
        out = plus(out, poly)
    return out


def graph(subject: Subject, key: str) -> list[dict[str, Any]]:
    """The sections a key of ``coefficients`` stands for, as JSON, checked against a second trace at other sizes."""
    found = first_trace(subject, key)
    check(found, _ledger_of(subject, key, subject.sizes[1]), subject.sizes[1])
    return found


def first_trace(subject: Subject, key: str) -> list[dict[str, Any]]:
    """The same, not checked."""
    first = subject.sizes[0]
    return variants(sections(_ledger_of(subject, key, first), first, subject.reader))


def _ledger_of(subject: Subject, key: str, sizes: Mapping[str, int]) -> Ledger:
    """What a key of ``coefficients`` stands for, at these sizes."""
    techniques, flags = _of_key(key)
    step = run_evaluation if key.endswith(" eval") else run_step
    return traced(subject.config(sizes, flags), techniques(sizes), sizes, step)


def variants(found: Sequence[Section]) -> list[dict[str, Any]]:
    """Sections as JSON; ``again`` tells the first micro-batch's from the second's, None what follows both."""
    out: list[dict[str, Any]] = []
    seen = 0
    for section in found:
        seen += section.name == "forward before"
        name = section.name
        again = None if name in ("held", "optimizer", "end") or name.endswith(" end") or "eval" in name else seen > 1
        if _is_outside(name) or not (section.end or section.landmarks):
            continue
        if name.endswith(" after") and out and out[-1]["name"] == name:
            raise AssertionError("two sections after the blocks hold something")
        out.append({"name": name, "again": again, "end": section.end, "landmarks": section.landmarks})
    return out


def check(found: Sequence[Mapping[str, Any]], ledger: Ledger, at: Mapping[str, int]) -> None:
    """Every section's end and highest point at other sizes equal the polynomials, to the byte."""
    sizes = {**(derived(at) if "h" in at else at), "P": sum(entry.owner == "gradient" for entry in ledger.entries)}
    numbers: list[tuple[str, int, int]] = []
    for name, events in ledger.by_section():
        now = top = 0
        for entry, sign in ((ledger.entries[i], sign) for i, sign in events):
            late = sign < 0 and _is_late(ledger.sections[entry.section], name)
            if ledger.component(entry) in TRACED and not late:
                now += sign * entry.n_bytes
                top = max(top, now)
        numbers.append((name, now, top))
    read = [
        (s["name"], value(_total(s["end"]), sizes), max((value(_total(m), sizes) for m in s["landmarks"]), default=0))
        for s in found
        if not s["name"].startswith(("late", "held"))
    ]
    kept = [n for n in numbers if not _is_outside(n[0]) and (n[1] or n[2])]
    for (name, end, top), (_, read_end, read_top) in zip(kept, read, strict=True):
        # A norm a gradient is counted by the tensor, all others by the byte.
        slack = 0 if name != "optimizer" else 8 * sizes["P"]
        if abs(end - read_end) > slack or abs(top - read_top) > slack:
            raise AssertionError(f"{name}: {end}, {top} bytes by a second trace, {read_end}, {read_top} by the first")


def _of_key(key: str) -> tuple[Any, dict[str, Any]]:
    """Techniques (for given sizes) and config flags that a key names."""
    words = key.split()
    flags: dict[str, Any] = {"tie_word_embeddings": "tied" in words}
    flags |= {flag: True for word, flag in (("bias", "attention_bias"), ("mlp_bias", "mlp_bias")) if word in words}
    switches = (word.partition("=") for word in words if word[-2:] in ("=0", "=1"))
    flags |= {name: value == "1" for name, _, value in switches}
    targets = next((tuple(w.removeprefix("targets=").split(",")) for w in words if w.startswith("targets=")), ())

    def techniques(sizes: Mapping[str, int]) -> list[Technique]:
        chosen: list[Technique] = [Precision(words[0]), Clipping()]  # type: ignore[arg-type]
        chosen += [] if "B" in sizes else [Packing()]
        chosen += [TensorParallel(RANKS)] if "tensor" in words else []
        chosen += [
            QuantizedBase(*form, sizes.get("W") or derived(sizes)["W"]) for word, form in FORMS.items() if word in words
        ]
        if "lora" in words:
            chosen.append(Lora(sizes["r"], dropout=0.1 if "dropout" in words else 0.0, targets=targets))
        if "fused_ops" in words:
            chosen.append(FusedOps())
        chosen += [Fp32Islands(tuple(w.removeprefix("fp32=").split(","))) for w in words if w.startswith("fp32=")]
        if "fused_loss" in words:
            chosen.append(FusedLoss(sizes["C"]))
        if words[-1] not in ("plain", "eval"):
            chosen.append(Checkpointing(_blocks(words), _RECOMPUTED[words[-1]]))
        return chosen

    return techniques, flags


def main(subject: str, path: str, *keys: str) -> None:
    """Add the graphs of ``keys`` to the coefficient file at ``path``; ``subject`` is a family or a model's config.json."""
    import transformers

    file = Path(path)
    known = dict(coefficients.read(file))
    for key in keys:
        known[key] = graph(subject_of(subject, key), key)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    coefficients.write(file, {"versions": versions, "graphs": known})


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
