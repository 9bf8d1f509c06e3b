"""What the optimizer's step in backward saves and costs: full fine-tuning of the real model, one micro-batch a step.

    python benchmarks/fused_backward.py [--model MODEL] [--pairs 3] [--steps 3]
        writes benchmarks/results/fused-backward-cpu.json and the places ``fused backward`` of docs/*/concepts/

A micro-batch of four of the built-in data's examples of at most 128 tokens, weights in fp32, products in bf16, every
block checkpointed, with and without ``fused_backward_step`` by turns, each time a run of its own; the first step of each is not timed. Peaks: predicted, and
live tensor bytes of one step under the ledger. Two minutes.
"""

import argparse
import gc
import json
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from accuracy_cpu import commit, machine
from finefit import assets, candidates, examples, models, predict, trace
from finefit.build import build
from finefit.config import load
from finefit.layout import Micro
from finefit.ledger import Ledger
from finefit.loop import optimizer_step
from finefit.nn.optimizers import Optimizing
from finefit.run import MicroBatch, Run
from finefit.spec import resolve_model
from finefit.techniques import (
    Accumulation,
    Checkpointing,
    Clipping,
    FusedBackwardStep,
    FusedLoss,
    FusedOps,
    Packing,
    Precision,
    Technique,
)  # fmt: skip

HERE = Path(__file__).parent
RESULT, DOCS = HERE / "results" / "fused-backward-cpu.json", HERE.parent / "docs"
JOB = ("method=full", "train.max_length=128", "train.global_batch_size=4", "train.max_grad_norm=0")
USED = (Precision("bf16_mixed"), FusedOps(), Packing(), FusedLoss(256), Accumulation(4), Clipping(0.0),
        Checkpointing(30))  # fmt: skip
WAYS: dict[str, tuple[Technique, ...]] = {"after backward": (), "in backward": (FusedBackwardStep(),)}
HEAD = {
    "en": "| step | predicted peak | measured | seconds a step, median |",
    "zh": "| 更新 | 预测峰值 | 实测 | 每步秒数（中位数） |",
}


def seconds(run: Run, batch: MicroBatch, steps: int) -> list[float]:
    """Of each step but the first."""
    found = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        optimizer_step(run, [batch], 1e-6)
        found.append(time.perf_counter() - started)
    return found[1:]


def measured(folder: Path, rows: list[Any], extra: tuple[Technique, ...], steps: int) -> dict[str, Any]:
    """Seconds and peaks of a run of its own."""
    techniques = (*USED, *extra)
    run = build(models.config_of(folder), techniques, models.fill_from(folder), torch.device("cpu"), Optimizing())
    batch = run.collate(rows)
    times, ledger = seconds(run, batch, steps), Ledger()
    trace.run_step(run, batch, ledger, 1)
    longest = max(end - start for start, end in zip(batch.bounds, batch.bounds[1:], strict=False))
    micro = Micro(batch.ids_bs.numel(), longest, len(batch.label_l))
    said = predict.footprint(candidates.rewrite(resolve_model(str(folder)), micro, techniques))
    moments = [m for name, m in ledger.moments().items() if name != "eval"]
    return {
        "seconds": times, "predicted_bytes": said.peak_bytes, "measured_bytes": max(sum(m.values()) for m in moments),
        "tokens": micro.tokens,
    }  # fmt: skip


def table(rows: dict[str, Any], language: str) -> str:
    lines = [HEAD[language], "|---|---:|---:|---:|"]
    for way, row in rows.items():
        sizes = " | ".join(f"{row[key] / 2**20:.1f} MiB" for key in ("predicted_bytes", "measured_bytes"))
        lines.append(f"| {way} | {sizes} | {statistics.median(row['seconds']):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    config = load(None, list(JOB), {"model": given.model, "data": "stdlib-docstrings"})
    folder = assets.model_folder(given.model).folder
    data = examples.read_data(config, examples.tokenizer_of(folder))
    examples_of_step = [tuple(data.store[row]) for row in data.batch(1)]
    rows: dict[str, Any] = {}
    for _ in range(given.pairs):
        for way, extra in WAYS.items():
            found = measured(folder, examples_of_step, extra, given.steps)
            found["seconds"] = rows.get(way, {}).get("seconds", []) + found["seconds"]
            rows[way] = found
            gc.collect()
    made = {
        "job": " ".join(JOB), "machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit(),
        "versions": {name: version(name) for name in ("finefit", "torch", "transformers")}, "rows": rows,
    }  # fmt: skip
    RESULT.write_text(json.dumps(made, indent=1) + "\n")
    for language in HEAD:
        page = DOCS / language / "concepts" / "fused_backward_step.md"
        before, _, rest = page.read_text().partition("<!-- fused backward -->")
        _, _, after = rest.partition("<!-- /fused backward -->")
        text = f"{before}<!-- fused backward -->\n{table(rows, language)}\n<!-- /fused backward -->{after}"
        page.write_text(text)
    print(table(rows, "en"))


if __name__ == "__main__":
    main()
