"""Predicted against measured peak memory on this CPU: the demo's run and full fine-tuning, row by row.

    python benchmarks/accuracy_cpu.py [--only WORD]      writes benchmarks/results/accuracy-cpu.json, docs/accuracy.svg
                                                     and the table of docs/en/accuracy.md and docs/zh/accuracy.md

Each row is a plan made by the planner for the real model and the built-in data, and the rehearsal of its largest
micro-batch under the ledger: live tensor bytes at each moment of two micro-batches and an update. ``max RSS`` is what
the operating system saw of the process beyond the loaded libraries, for orientation.
"""

import argparse
import gc
import json
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "accuracy-cpu.json"
ROWS = [
    ("demo: LoRA, bf16, 512", ["method=lora", "train.max_length=512"]),
    ("LoRA, bf16, 1024", ["method=lora", "train.max_length=1024"]),
    ("LoRA, bf16, 1024, checkpointed", ["method=lora", "train.max_length=1024", "memory.checkpointing=all"]),
    *(
        (f"full, {kind}, {length}{', checkpointed' if blocks == 'all' else ''}",
         ["method=full", f"train.max_length={length}", f"memory.precision={kind}", f"memory.checkpointing={blocks}"])
        for kind in ("fp32", "bf16_mixed", "bf16")
        for length in (512, 1024)
        for blocks in ("0", "all")
    ),
]  # fmt: skip
MOMENTS = ("forward_end", "loss", "backward_peak", "optimizer_step")


def measure(model: str, overrides: list[str]) -> dict[str, Any]:
    """One row: plan, build, rehearse."""
    import torch

    from finefit import assets, examples, models, planning, session, trainer
    from finefit.build import build
    from finefit.config import load
    from finefit.nn.optimizers import Optimizing
    from finefit.rehearse import rehearse
    from finefit.spec import resolve_model

    settings = [*overrides, "train.steps=20", "memory.micro_batch_size=2"]
    config = load(None, settings, {"model": model, "data": "stdlib-docstrings"})
    folder = assets.model_folder(model).folder
    tokenizer = examples.tokenizer_of(folder)
    data, hardware = examples.read_data(config, tokenizer), planning.hardware_of(config, None)
    plan = planning.make_plan(config, resolve_model(str(folder)), hardware, data)
    job = session.Job(config, plan, hardware, data, tokenizer, folder, Path("."))
    rows = trainer._worst_rows(job)
    predicted = plan.predicted
    run = build(models.config_of(folder), plan.techniques, models.fill_from(folder), torch.device("cpu"), Optimizing())
    started = time.perf_counter()
    examples = [tuple(data.store[row]) for row in rows]
    measured = rehearse(run, examples, [], plan.techniques, plan.gradient_accumulation_steps)
    seconds = time.perf_counter() - started
    del run
    gc.collect()
    return {
        "predicted": predicted.to_json(), "measured": measured.to_json(), "seconds": seconds,
        "tokens": int(sum(len(ids) for ids, _ in examples)), "techniques": [t.describe() for t in plan.techniques],
    }  # fmt: skip


def put_measured(page: Path, text: str) -> None:
    """Into the page, between its marks of what is measured."""
    marks = r"(<!-- measured -->\n).*?(\n<!-- /measured -->)"
    put = re.sub(marks, lambda found: found[1] + text + found[2], page.read_text("utf-8"), flags=re.DOTALL)
    page.write_text(put, "utf-8")


def error(row: dict[str, Any]) -> float:
    return row["predicted"]["peak_bytes"] / row["measured"]["peak_bytes"] - 1


def table(rows: list[dict[str, Any]]) -> str:
    from finefit.units import format_bytes

    lines = ["| run | tokens | predicted | measured | error | peak at |", "|---|---:|---:|---:|---:|---|"]
    for row in rows:
        one, other = row["predicted"]["peak_bytes"], row["measured"]["peak_bytes"]
        lines.append(
            f"| {row['job']} | {row['tokens']:,} | {format_bytes(one)} | {format_bytes(other)} "
            f"| {100 * error(row):+.3f} % | {row['measured']['peak_moment'].replace('_', ' ')} |"
        )
    return "\n".join(lines)


def picture(rows: list[dict[str, Any]]) -> str:
    """Two stacked bars a row, predicted above measured, in the colours of the reports."""
    from finefit.report.palette import COLOURS, LABELS
    from finefit.units import format_bytes

    width, left, height = 860, 250, 34
    scale = (width - left - 90) / max(r["measured"]["peak_bytes"] for r in rows)
    out = [f'<text x="{left - 8}" y="17" class="s" text-anchor="end">above: predicted, below: measured</text>']
    for i, row in enumerate(rows):
        top = 34 + i * height
        out.append(f'<text x="{left - 8}" y="{top + 18}" text-anchor="end">{row["job"]}</text>')
        for j, witness in enumerate(("predicted", "measured")):
            x = float(left)
            for component, n_bytes in row[witness]["moments"][row[witness]["peak_moment"]].items():
                part = n_bytes * scale
                out.append(
                    f'<rect x="{x:.1f}" y="{top + j * 13}" width="{part:.1f}" height="12" fill="{COLOURS[component]}"/>'
                )
                x += part
            out.append(
                f'<text x="{x + 5:.1f}" y="{top + j * 13 + 10}" class="s">{format_bytes(row[witness]["peak_bytes"])}</text>'
            )
    x = left
    for component in ("parameter", "gradient", "optimizer_state", "activation", "temporary"):
        out.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{COLOURS[component]}"/>')
        out.append(f'<text x="{x + 14}" y="17" class="s">{LABELS[component]}</text>')
        x += 115
    style = "<style>text{font:12px sans-serif;fill:#222}.s{font-size:10px}</style><rect width='100%' height='100%' fill='#fff'/>"
    total = 40 + len(rows) * height
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}">{style}{"".join(out)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--only", default="", help="rows whose name has this word; nothing is written")
    given = parser.parse_args()
    rows = []
    for job, overrides in ROWS:
        if given.only in job:
            rows.append({"job": job, "overrides": overrides, **measure(given.model, overrides)})
            print(f"{job}: {100 * error(rows[-1]):+.3f} %", flush=True)
    if given.only:
        return
    made = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d"), "machine": machine(),
        "versions": {name: version(name) for name in ("torch", "transformers")}, "python": sys.version.split()[0],
    }  # fmt: skip
    RESULTS.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n")
    (HERE.parent / "docs" / "accuracy.svg").write_text(picture(rows))
    for language in ("en", "zh"):
        page = HERE.parent / "docs" / language / "accuracy.md"
        marks = r"(<!-- table -->\n).*?\n?(<!-- /table -->)"
        page.write_text(re.sub(marks, lambda m: m[1] + table(rows) + "\n" + m[2], page.read_text(), flags=re.S))


def commit() -> str:
    """What a result was measured at."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=HERE, capture_output=True, text=True).stdout.strip()


def machine() -> str:
    """Processor's name and number of usable cores."""
    import os

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


if __name__ == "__main__":
    main()
