"""What a quantised base costs and saves: the demo's job with each method, its result file and the table of the docs.

    python benchmarks/base_bits.py --model MODEL --runs FOLDER [--steps N] [--only KIND ...]
    python benchmarks/base_bits.py --model MODEL --rounding

Trains SmolLM2-135M-Instruct on 18 steps of the demo's data by full, lora and qlora (8, 4, 3 and 2 bits), the same examples
in the same order and micro-batches of the same size, and writes results/base-bits-cpu.json and the places ``bits`` of
docs/*/concepts/quantized_base.md. A run that is there already is read and not made again. One run each: an indication.
With other steps or some kinds only the table is printed. Declines to time them: that needs a quiet machine and pairs.

``--rounding`` trains nothing: how far each form is from the model's own weights, beside levels made as NF4's are, by
quantiles; results/base-rounding.json and the places ``rounding`` (half a minute).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accuracy_cpu import commit, machine

HERE = Path(__file__).parent
RESULT, ROUNDING = HERE / "results" / "base-bits-cpu.json", HERE / "results" / "base-rounding.json"
DOCS = HERE.parent / "docs"
JOB = (
    "train.max_length=512", "train.too_long=drop", "train.warmup_steps=2", "train.eval_every=0", "train.save_every=0",
    "memory.micro_batch_tokens=1024", "memory.checkpointing=none",
)  # fmt: skip
# Full fine-tuning diverges at the adapters' rate; each has a rate that is usual for it.
KINDS = {
    "full": ("method=full", "train.learning_rate=1e-4"),
    "lora": ("method=lora", "train.learning_rate=1e-3"),
    "qlora-8": ("method=qlora", "qlora.bits=8", "train.learning_rate=1e-3"),
    **{f"qlora-{n}": ("method=qlora", f"qlora.bits={n}", "train.learning_rate=1e-3") for n in (4, 3, 2)},
}
STEPS = 18
# NF4's construction with fewer levels (arXiv:2305.14314, appendix E): quantiles from 0.9677083 on, a zero, both ends.
QUANTILES = {
    3: (-1.0, -0.4786, -0.2171, 0.0, 0.1609, 0.3379, 0.5626, 1.0),
    2: (-1.0, 0.0, 0.3379, 1.0),
}
HEAD = {
    "en": "| method | held-out loss before → after | predicted peak | measured | weights |",
    "zh": "| 方法 | 留出集损失 训练前 → 训练后 | 预测峰值 | 实测 | 权重 |",
}


def trained(model: Path, runs: Path, kind: str, steps: int) -> Path:
    """The folder of the run of this kind, made unless it is there."""
    folder = runs / kind
    if not (folder / "report.md").is_file():
        words = [*JOB, *KINDS[kind], f"train.steps={steps}", f"name={kind}", f"output_dir={runs}"]
        command = [sys.executable, "-m", "finefit", "train", str(model), "stdlib-docstrings", *words]
        subprocess.run([*command, "--log-format", "plain"], check=True)
    return folder


def figures(folder: Path) -> dict[str, Any]:
    """What a run's log says of it."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    end, memory = ([e for e in events if e["event"] == name][-1] for name in ("end", "memory"))
    return {
        "loss_before": end["loss_before"], "loss_after": end["loss_after"], "steps": end["step"],
        "predicted_bytes": memory["predicted"]["peak_bytes"], "measured_bytes": memory["measured"]["peak_bytes"],
        "parameter_bytes": memory["measured"]["moments"]["forward_end"]["parameter"],
    }  # fmt: skip


def table(rows: Mapping[str, Mapping[str, Any]], language: str) -> str:
    lines = [HEAD[language], "|---|---|---:|---:|---:|"]
    for kind, row in rows.items():
        sizes = [f"{row[key] / 2**20:.1f} MiB" for key in ("predicted_bytes", "measured_bytes", "parameter_bytes")]
        loss = f"{row['loss_before']:.3f} → {row['loss_after']:.3f}"
        lines.append(f"| {kind} | {loss} | {' | '.join(sizes)} |")
    return "\n".join(lines)


def rounding(model: Path) -> dict[str, float]:
    """Relative error of all linear weights of the blocks, by form."""
    from finefit.models import _stored
    from finefit.nn.blockwise import BLOCK, GRIDS, Tables
    from finefit.nn.quantised_linear import QuantisedWeight

    weights = [w.float() for name, w in _stored(model) if w.dim() == 2 and ".layers." in name]
    whole = sum(float(w.square().sum()) for w in weights) ** 0.5

    def error(back: Callable[[Tensor], Tensor]) -> float:
        return sum(float((back(w) - w).square().sum()) for w in weights) ** 0.5 / whole

    def through(bits: int) -> Callable[[Tensor], Tensor]:
        def back(weight: Tensor) -> Tensor:
            tables = Tables(bits, "double", weight.device)
            tables.reset()
            made = QuantisedWeight(weight, bits, "double", 2**19, tables)
            made.copy_(weight)
            return made.dense(torch.float32)

        return back

    def nearest(levels: Tensor) -> Callable[[Tensor], Tensor]:
        def back(weight: Tensor) -> Tensor:
            x_b64 = weight.view(-1, BLOCK)
            scale_b1 = x_b64.abs().amax(1, keepdim=True).clamp(min=1e-38)
            return (levels[torch.bucketize(x_b64 / scale_b1, (levels[1:] + levels[:-1]) / 2)] * scale_b1).view_as(
                weight
            )

        return back

    found = {f"{bits} bits": error(through(bits)) for bits in sorted(GRIDS, reverse=True)}
    return found | {f"{n} bits, quantiles": error(nearest(torch.tensor(levels))) for n, levels in QUANTILES.items()}


def rounding_table(rows: Mapping[str, float], language: str) -> str:
    head = {"en": "| form | relative error of the weights |", "zh": "| 格式 | 权重的相对误差 |"}
    return "\n".join([head[language], "|---|---:|", *(f"| {form} | {100 * off:.2g} % |" for form, off in rows.items())])


def put(place: str, tables: Mapping[str, str]) -> None:
    """Each language's table into its page."""
    for language, text in tables.items():
        page = DOCS / language / "concepts" / "quantized_base.md"
        before, _, rest = page.read_text().partition(f"<!-- {place} -->")
        after = rest.partition(f"<!-- /{place} -->")[2]
        page.write_text(f"{before}<!-- {place} -->\n{text}\n<!-- /{place} -->{after}")


def about() -> dict[str, Any]:
    return {
        "machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit(),
        "packages": {name: version(name) for name in ("torch", "transformers")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rounding", action="store_true")
    given = parser.parse_args()
    if given.rounding:
        rows = rounding(given.model)
        ROUNDING.write_text(json.dumps({**about(), "relative_error": rows}, indent=1) + "\n")
        put("rounding", {language: rounding_table(rows, language) for language in HEAD})
        return
    if given.runs is None:
        parser.error("--runs: a folder for the runs is needed")
    found = {kind: figures(trained(given.model, given.runs, kind, given.steps)) for kind in given.only}
    print(table(found, "en"))
    if given.steps != STEPS or given.only != list(KINDS):
        return
    settings = {kind: " ".join(words) for kind, words in KINDS.items()}
    made = {"job": " ".join((*JOB, f"train.steps={STEPS}")), **about(), "settings": settings, "rows": found}
    RESULT.write_text(json.dumps(made, indent=1) + "\n")
    put("bits", {language: table(found, language) for language in HEAD})


if __name__ == "__main__":
    main()
