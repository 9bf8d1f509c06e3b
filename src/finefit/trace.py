"""The traced step: what a step of the real, rewritten model allocates, as exact polynomials in its sizes.

A shallow model of the family (three blocks: first, any, last) is built with sizes that no two symbols share, rewritten
by the real techniques and stepped under fake tensors while the ledger watches. Every allocation's shape is read back as
symbols, so one trace holds for every model of the family, every length and every depth: the middle block's sections
are repeated. What is kept of a section is its end and the landmarks inside it that no other landmark dominates.
A second trace at other sizes must equal the polynomials to the byte (``check``). An evaluation is traced in the same
way, of forward and loss alone.

Declines models whose blocks differ (they are traced at the real config), and what kernels hold inside one operator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from . import evaluate, models
from .build import Optimizing, optimizer_of, rewritten
from .files import write_atomically
from .layout import Micro
from .ledger import Ledger, NoLedger, block_marks
from .poly import Poly, dominates, plus, times, value
from .run import MicroBatch, Run, blocks_of, summed_loss, trainable
from .stream import Entry
from .techniques import (
    Checkpointing,
    Clipping,
    FusedLoss,
    FusedOps,
    Lora,
    Packing,
    Precision,
    QuantizedBase,
    Technique,
)  # fmt: skip
from .techniques.quantized_base import FORMS

BLOCKS = 3
TRACED = ("activation", "temporary", "gradient")
# Sizes to read symbols back from: all distinct, also in the sums and products that occur. A chunk of a quantised weight
# is as large as the smallest weight there, h·k: a multiple of 16,384 that divides the others, so that no last chunk has
# a size of its own.
MARKERS = {
    "T": 257, "S": 256, "Q": 128, "L": 62, "C": 31, "h": 960, "n": 15, "m": 3, "d": 768, "f": 6912, "V": 211, "r": 17,
}  # fmt: skip
OTHERS = {
    "T": 385, "S": 384, "Q": 128, "L": 92, "C": 46, "h": 320, "n": 10, "m": 2, "d": 128, "f": 1408, "V": 1531, "r": 6,
}  # fmt: skip
# Gemma 3 has two rotary tables, one for each kind of block: both kinds must be among the three.
_KINDS = {"gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}}


@dataclass(frozen=True, slots=True)
class Section:
    """Changes since the section's start: at its end, and at its landmarks (where the total may be highest)."""

    name: str
    end: dict[str, Poly]
    landmarks: list[dict[str, Poly]]


def derived(sizes: Mapping[str, int]) -> dict[str, int]:
    """All symbols from the independent ones."""
    width = sizes["m"] * sizes["d"]
    return {
        **sizes, "q": sizes["n"] * sizes["d"], "k": width, "g": sizes["n"] // sizes["m"], "W": sizes["h"] * width
    }  # fmt: skip


def config_for(family: str, sizes: Mapping[str, int], flags: Mapping[str, Any]) -> Any:
    """A transformers config of ``family`` with these sizes and three blocks."""
    from transformers import AutoConfig

    common = {
        "hidden_size": sizes["h"], "intermediate_size": sizes["f"], "num_attention_heads": sizes["n"],
        "num_key_value_heads": sizes["m"], "head_dim": sizes["d"], "vocab_size": sizes["V"],
        "num_hidden_layers": BLOCKS, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    return AutoConfig.for_model(family, **{**common, **_KINDS.get(family, {}), **flags})


def batch_of(micro: Micro) -> MicroBatch:
    """A packed row of that many tokens, in sequences of the longest's length and one of the rest; values do not matter."""
    bounds = (*range(0, micro.tokens, micro.longest), micro.tokens)
    zeros, index = torch.zeros(1, micro.tokens, dtype=torch.long), torch.zeros(micro.labelled, dtype=torch.long)
    return MicroBatch(zeros, zeros.clone(), bounds, index, index.clone(), micro.tokens)


def run_step(run: Run, batch: MicroBatch, ledger: Ledger, micro_steps: int = 2) -> None:
    """One optimizer step under the ledger: micro-batches, clip, update; the real code of the loop's parts."""
    own_state(run, batch, ledger)
    with ledger, block_marks(ledger, blocks_of(run.model)):
        for _ in range(micro_steps):
            ledger.mark("forward before")
            loss = summed_loss(run, batch, ledger) / 7
            ledger.mark("backward start")
            loss.backward()
            del loss
            ledger.mark("idle")
        ledger.own((p.grad for p in run.model.parameters()), "gradient")
        ledger.mark("optimizer")
        run.clip(trainable(run.model))
        assert run.optimizer is not None
        run.optimizer.step()
        ledger.mark("end")


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
    assert run.optimizer is not None
    blocks = [(f"own {i}", block) for i, block in enumerate(blocks_of(run.model))]
    for name, module in (*blocks, ("own rest", run.model)):
        ledger.mark(name)
        ledger.own(module.parameters(), "parameter")
        ledger.own((t for p in module.parameters() for t in run.optimizer.state[p].values()), "optimizer_state")
    ledger.own((p.grad for p in run.model.parameters()), "gradient")
    ledger.own((*batch.tensors(), *run.model.buffers()), "input")


def traced(
    config: Any,
    techniques: Sequence[Technique],
    sizes: Mapping[str, int],
    step: Callable[[Run, MicroBatch, Ledger], None] = run_step,
) -> Ledger:
    """The ledger of one fake step (or of one evaluation) at these sizes."""
    ledger = Ledger()
    run = rewritten(config, techniques, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        models.fill_empty(run.model, run.device)
        run.optimizer = optimizer_of(run, Optimizing())
        step(run, batch_of(Micro(sizes["T"], sizes["S"], sizes["L"])), ledger)
    return ledger


def sections(ledger: Ledger, sizes: Mapping[str, int]) -> list[Section]:
    """The ledger's sections with every allocation read back as symbols.

    What a block's forward made and a section outside the blocks frees grows with depth, and what came before the blocks
    is freed as the first block's kind has it: it stands apart, as the section ``late <block or before> <outer>``, to be
    applied once for each block of that kind.
    """
    gradients = sum(entry.owner == "gradient" for entry in ledger.entries)
    reader = _Reader({**sizes, "P": gradients})
    found: list[Section] = []
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
        found += [Section(apart, _without_empty(parts), []) for apart, parts in late.items()]
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


def graph(family: str, key: str) -> list[dict[str, Any]]:
    """The sections a key of ``coefficients`` stands for, as JSON, checked against a second trace at other sizes."""
    first, second = (_fitting(family, sizes) for sizes in (MARKERS, OTHERS))
    found = variants(sections(of_key(family, key, first), first))
    check(found, of_key(family, key, second), second)
    return found


def of_key(family: str, key: str, sizes: Mapping[str, int]) -> Ledger:
    """The ledger of what a key of ``coefficients`` stands for, at these sizes."""
    techniques, flags = _of_key(key)
    step = run_evaluation if key.endswith(" eval") else run_step
    return traced(config_for(family, sizes, flags), techniques(sizes), sizes, step)


def _fitting(family: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Phi-3's head size is hidden size / heads, always: there the query width is the hidden size."""
    return {**sizes, "h": sizes["n"] * sizes["d"]} if family == "phi3" else dict(sizes)


def variants(found: Sequence[Section]) -> list[dict[str, Any]]:
    """Sections as JSON; ``again`` tells the first micro-batch's from the second's, None what follows both."""
    out: list[dict[str, Any]] = []
    seen = 0
    for section in found:
        seen += section.name == "forward before"
        name = section.name
        again = None if name in ("optimizer", "end") or name.endswith(" end") or "eval" in name else seen > 1
        if _is_outside(name) or not (section.end or section.landmarks):
            continue
        if name.endswith(" after") and out and out[-1]["name"] == name:
            raise AssertionError("two sections after the blocks hold something")
        out.append({"name": name, "again": again, "end": section.end, "landmarks": section.landmarks})
    return out


def check(found: Sequence[Mapping[str, Any]], ledger: Ledger, at: Mapping[str, int]) -> None:
    """Every section's end and highest point at other sizes equal the polynomials, to the byte."""
    sizes = {**derived(at), "P": sum(entry.owner == "gradient" for entry in ledger.entries)}
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
        if not s["name"].startswith("late")
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
        chosen: list[Technique] = [Precision(words[0]), Packing(), Clipping()]  # type: ignore[arg-type]
        chosen += [QuantizedBase(*form, derived(sizes)["W"]) for word, form in FORMS.items() if word in words]
        if "lora" in words:
            chosen.append(Lora(sizes["r"], dropout=0.1 if "dropout" in words else 0.0, targets=targets))
        if "fused_ops" in words:
            chosen.append(FusedOps())
        if "fused_loss" in words:
            chosen.append(FusedLoss(sizes["C"]))
        if words[-1] == "checkpointed":
            chosen.append(Checkpointing(BLOCKS))
        return chosen

    return techniques, flags


class _Reader:
    """Reads a shape back as a polynomial; a size that is no symbol, sum or product of them is an error of the trace."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        s = derived(sizes)
        words = [w for w in s if w != "q" or s["q"] != s["h"]]
        width = "h" if s["q"] == s["h"] else "q"
        pairs: list[tuple[int, Poly]]
        pairs = [(s[word], {word: 1}) for word in words]
        pairs += [(s["g"] * s["Q"], {"Q*g": 1}), (s["d"] // 2, {"d": 0.5}), (2 * s["f"], {"f": 2})]
        pairs += [(2 * s["r"], {"r": 2}), (3 * s["r"], {"r": 3})]  # layers that read one input share a product
        pairs += [(s["q"] + 2 * s["k"], {width: 1, "k": 2}), (1, {"": 1}), (2, {"": 2}), (4, {"": 4})]
        pairs += [(s["W"] // 2, {"W": 1 / 2}), (s["W"] // 64, {"W": 1 / 64}), (64, {"": 64})]  # bytes, scales, blocks
        self.table: dict[int, Poly] = dict(pairs)
        assert len(self.table) == len(pairs), "two symbols of the trace share a size"
        self.sizes = s

    def bytes_of(self, entry: Entry, section: str) -> Poly:
        if not entry.n_bytes:
            return {}
        if section == "optimizer" and not entry.shape:
            return {"P": entry.itemsize / self.sizes["P"]}  # a norm of each gradient, a scalar each
        numel = 1
        poly: Poly = {"": entry.itemsize}
        for size in entry.shape:
            numel *= size
            poly = times(poly, self._dimension(size))
        if numel * entry.itemsize == entry.n_bytes:
            return poly
        return times({"": entry.itemsize}, self._dimension(entry.n_bytes // entry.itemsize))

    def _dimension(self, size: int) -> Poly:
        if size in self.table:
            return self.table[size]
        for known, poly in self.table.items():
            if known > 4 and size % known == 0 and size // known in self.table:
                return times(poly, self.table[size // known])
        raise ValueError(f"a traced tensor has a size of {size}, which none of {self.sizes} explain")


def main(family: str, path: str, *keys: str) -> None:
    """Add the graphs of ``keys`` to the coefficient file at ``path``."""
    import json
    from pathlib import Path

    import transformers

    file = Path(path)
    known = json.loads(file.read_text())["graphs"] if file.is_file() else {}
    for key in keys:
        known[key] = graph(family, key)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    write_atomically(file, json.dumps({"versions": versions, "graphs": known}, separators=(",", ":")).encode())


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
