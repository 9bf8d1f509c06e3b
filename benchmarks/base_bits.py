"""What a quantised base costs and saves: the demo's job with each method, its result file and the table of the docs.

    python benchmarks/base_bits.py --model MODEL --runs FOLDER

Trains SmolLM2-135M-Instruct on 18 steps of the demo's data by full, lora and qlora (8 and 4 bits), the same examples in the
same order and micro-batches of the same size, and writes results/base-bits-cpu.json and the places ``bits`` of
docs/*/concepts/quantized_base.md. A run that is there already is read and not made again. One run each: an indication.
Declines to time them: that needs a quiet machine and pairs.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accuracy_cpu import machine

HERE = Path(__file__).parent
RESULT = HERE / "results" / "base-bits-cpu.json"
DOCS = HERE.parent / "docs"
JOB = (
    "train.max_length=512", "train.too_long=drop", "train.steps=18", "train.warmup_steps=2", "train.eval_every=0",
    "train.save_every=0", "memory.micro_batch_tokens=1024", "memory.checkpointing=none",
)  # fmt: skip
# Full fine-tuning diverges at the adapters' rate; each has a rate that is usual for it.
KINDS = {
    "full": ("method=full", "train.learning_rate=1e-4"),
    "lora": ("method=lora", "train.learning_rate=1e-3"),
    "qlora-8": ("method=qlora", "qlora.bits=8", "train.learning_rate=1e-3"),
    "qlora-4": ("method=qlora", "qlora.bits=4", "train.learning_rate=1e-3"),
}
HEAD = {
    "en": "| method | held-out loss before → after | predicted peak | measured | weights |",
    "zh": "| 方法 | 留出集损失 训练前 → 训练后 | 预测峰值 | 实测 | 权重 |",
}


def trained(model: Path, runs: Path, kind: str) -> Path:
    """The folder of the run of this kind, made unless it is there."""
    folder = runs / kind
    if not (folder / "report.md").is_file():
        words = [*JOB, *KINDS[kind], f"name={kind}", f"output_dir={runs}"]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    given = parser.parse_args()
    rows = {kind: figures(trained(given.model, given.runs, kind)) for kind in KINDS}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout
    made = {
        "job": " ".join(JOB), "machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit.strip(),
        "packages": {name: version(name) for name in ("torch", "transformers")},
        "settings": {kind: " ".join(words) for kind, words in KINDS.items()}, "rows": rows,
    }  # fmt: skip
    RESULT.write_text(json.dumps(made, indent=1) + "\n")
    for language in HEAD:
        page = DOCS / language / "concepts" / "quantized_base.md"
        place = f"<!-- bits -->\n{table(rows, language)}\n<!-- /bits -->"
        page.write_text(re.sub(r"<!-- bits -->.*?<!-- /bits -->", lambda _: place, page.read_text(), flags=re.DOTALL))  # noqa: B023


if __name__ == "__main__":
    main()
