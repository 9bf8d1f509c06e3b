"""What islands of fp32 in a bf16 run cost and give: memory, time and how far gradients are from fp32's, on a CPU.

    python benchmarks/fp32_islands.py [--model MODEL] [--steps 6]      writes benchmarks/results/fp32_islands-cpu.json
                                       and the tables of docs/*/concepts/fp32_islands.md

Full fine-tuning of SmolLM2-135M in pure bf16 on the built-in data, the same examples for all, by the parts of finefit's
own loop. Peaks are the ledger's of one step of the first micro-batch, beside the prediction.
"""

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import fp16
from accuracy_cpu import commit, machine, put_measured
from finefit import models, predict, trace
from finefit.build import build
from finefit.candidates import rewrite
from finefit.layout import Micro
from finefit.ledger import Ledger
from finefit.nn.optimizers import Optimizing
from finefit.spec import resolve_model
from finefit.techniques import Accumulation, Clipping, Fp32Islands, FusedLoss, FusedOps, Packing, Precision

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PARTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "norms": ("norms",),
    "head": ("head",),
    "norms, head": ("head", "norms"),
}


WHAT = {
    "en": "Full fine-tuning of SmolLM2-135M on a CPU, AdamW, batches of four examples (`benchmarks/results/fp32_islands-cpu.json`):",
    "zh": "CPU 上全参数微调 SmolLM2-135M，AdamW，每批四个样本（`benchmarks/results/fp32_islands-cpu.json`）：",
}


def techniques_of(kind: str, parts: tuple[str, ...]) -> tuple[Any, ...]:
    islands = (Fp32Islands(parts),) if parts else ()
    return (Precision(kind), FusedOps(), *islands, Packing(), FusedLoss(256), Accumulation(16, 2048, 8), Clipping())  # type: ignore[arg-type]


def peaks(run: Any, used: tuple[Any, ...], folder: Path, batch: Any) -> dict[str, int]:
    """Of a step of two such micro-batches, so that there are gradients already; what is fed apart."""
    seen = Ledger()
    trace.run_step(run, batch, seen, 2)
    run.optimizer.zero_grad(set_to_none=True)
    longest = max(end - start for start, end in zip(batch.bounds, batch.bounds[1:], strict=False))
    told = predict.footprint(
        rewrite(resolve_model(str(folder)), Micro(batch.ids_bs.numel(), longest, len(batch.label_l)), used)
    )
    return {
        "peak_bytes": max(_without_input(parts) for parts in seen.moments().values()),
        "predicted_bytes": max(_without_input(told.moments[moment]) for moment in seen.moments()),
    }


def _without_input(parts: Any) -> int:
    return sum(n for component, n in parts.items() if component != "input")


def measure(kind: str, says: str, folder: Path, steps: list[list[Any]], exact: Any) -> tuple[dict[str, Any], Any]:
    used = techniques_of(kind, PARTS[says])
    run = build(models.config_of(folder), used, models.fill_from(folder), torch.device("cpu"), Optimizing(fp16.RATE))
    groups = [[run.collate([rows[i] for i in g]) for g in run.split([len(ids) for ids, _ in rows])] for rows in steps]
    found = fp16.gradient(run, groups[0]).float()
    exact = found if exact is None else exact
    off = float((found - exact).norm() / exact.norm())
    losses, started = [], time.perf_counter()
    for batches in groups:
        losses.append(fp16.step(run, batches))
    seconds = (time.perf_counter() - started) / len(steps)
    row = {"kind": kind, "parts": says, "gradient_error": off, "losses": losses, "seconds_per_step": seconds}
    return {**row, **peaks(run, used, folder, groups[0][0])}, exact


def tell(result: dict[str, Any]) -> None:
    """The tables of the pages."""
    heads = {
        "en": "| kind, in fp32 | predicted peak | measured | gradient from fp32's | last loss | time of a step |",
        "zh": "| 精度，fp32 部分 | 预测峰值 | 实测 | 梯度与 fp32 的差 | 最后一步损失 | 每步时间 |",
    }
    base = next(row for row in result["rows"] if row["kind"] == "bf16" and row["parts"] == "none")
    for language, head in heads.items():
        lines = [WHAT[language], "", head, "|---|---:|---:|---:|---:|---:|"]
        for row in result["rows"]:
            at = row["kind"] if row["parts"] == "none" else f"{row['kind']}, {row['parts']}"
            mib = [f"{row[key] / 2**20:.1f} MiB" for key in ("predicted_bytes", "peak_bytes")]
            times = row["seconds_per_step"] / base["seconds_per_step"]
            lines.append(
                f"| {at} | {mib[0]} | {mib[1]} | {row['gradient_error']:.2%} | {row['losses'][-1]:.4f} | {times:.2f} × |"
            )
        page = DOCS / language / "concepts" / "fp32_islands.md"
        put_measured(page, "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "fp32_islands-cpu.json")
    given = parser.parse_args()
    words, folder, steps = fp16.job_of(given.model, given.steps)
    rows, exact = [], None
    for kind, says in [("fp32", "none"), *(("bf16", says) for says in PARTS)]:
        row, exact = measure(kind, says, folder, steps, exact)
        rows.append(row)
        print(f"{kind}, {says}: {row['peak_bytes'] / 2**20:.1f} MiB ({row['predicted_bytes'] / 2**20:.1f} predicted), gradient "
              f"{row['gradient_error']:.2%} off, {row['seconds_per_step']:.1f} s a step, loss {row['losses'][-1]:.4f}", flush=True)  # fmt: skip
    result = {
        "job": " ".join(words), "learning_rate": fp16.RATE, "machine": machine(), "date": time.strftime("%Y-%m-%d"),
        "commit": commit(), "versions": {n: version(n) for n in ("finefit", "torch", "transformers")}, "rows": rows,
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    tell(result)


if __name__ == "__main__":
    main()
