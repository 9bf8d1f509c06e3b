"""The leanest run of each: transformers' Trainer and finefit, SmolLM2-135M at 1,024 tokens, global batch 16, on a CPU.

    python benchmarks/lean.py [--rounds 2] [--steps 2]

Both train all weights in bf16 with AdamW, the update clipped to a norm of 1, on the same rows of 1,024 tokens, all
labelled. Trainer's leanest setting: micro-batches of one row, every block checkpointed, torch's fused AdamW; no Adafactor.
finefit's: what its planner chooses within the budget that is given. finefit also trains QLoRA. Memory is the process's
highest resident set beyond what it is with all libraries loaded and no model; memory and seconds are of the same run, and of
several the middle one counts. Writes results/lean-cpu.json and the tables of docs/*/concepts/optimizer_offload.md.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accuracy_cpu import commit, machine

HERE = Path(__file__).parent
ROWS, LENGTH = 16, 1024
MIB = 2**20
WAYS: dict[str, tuple[str, ...]] = {
    "Trainer, full": (),
    "finefit, full": ("method=full", "memory.precision=bf16", "memory.rounding=stochastic", "memory.budget=560MiB"),
    "finefit, full, resident states": ("method=full", "memory.precision=bf16", "memory.optimizer_offload=none",
                                       "memory.checkpointing=all", "memory.micro_batch_size=1"),
    "finefit, qlora": ("method=qlora", "memory.budget=260MiB", "memory.allocator=tight"),
}  # fmt: skip


def resident_at_most() -> int:
    """VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def rows_of(steps: int) -> list[list[int]]:
    """The same token ids for every tool."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 49_000, (LENGTH,), generator=generator).tolist() for _ in range(ROWS * steps)]


def trainer(model: Path, steps: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.at: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.at.append(time.perf_counter())

    before, clock = resident_at_most(), Clock()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    rows = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in rows_of(steps)]
    arguments = TrainingArguments(
        output_dir="lean-trainer", per_device_train_batch_size=1, gradient_accumulation_steps=ROWS, max_steps=steps,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, optim="adamw_torch_fused",
        learning_rate=2e-5, max_grad_norm=1.0, use_cpu=True, bf16=False, save_strategy="no", report_to=[],
        logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    started = time.perf_counter()
    Trainer(model=loaded, args=arguments, train_dataset=rows, callbacks=[clock]).train()
    marks = [started, *clock.at]
    return {
        "before_bytes": before, "peak_bytes": resident_at_most(),
        "steps_s": [b - a for a, b in itertools.pairwise(marks)],
        "techniques": ["bf16", "every block checkpointed", "fused AdamW", "micro-batches of one row"],
    }  # fmt: skip


def finefit(model: Path, steps: int, words: tuple[str, ...]) -> dict[str, Any]:
    import torch

    from finefit import models, planning
    from finefit.build import build
    from finefit.config import load
    from finefit.loop import optimizer_step
    from finefit.nn.optimizers import Optimizing
    from finefit.spec import resolve_model

    settings = (*words, f"train.max_length={LENGTH}", f"train.global_batch_size={ROWS}", "hardware.device=cpu")
    config = load(None, list(settings), {"model": str(model)})
    plan = planning.make_plan(config, resolve_model(str(model)), planning.hardware_of(config, None), None)
    models.on_meta(models.config_of(model))  # with it come the libraries that the other tools import at once
    before = resident_at_most()
    run = build(
        models.config_of(model), plan.techniques, models.fill_from(model), torch.device("cpu"), Optimizing(2e-5)
    )
    seconds = []
    for step in range(steps):
        examples = [(ids, [1] * LENGTH) for ids in rows_of(steps)[step * ROWS : (step + 1) * ROWS]]
        started = time.perf_counter()
        batches = [run.collate([examples[i] for i in group]) for group in run.split([LENGTH] * ROWS)]
        optimizer_step(run, batches, 2e-5)
        seconds.append(time.perf_counter() - started)
    return {
        "before_bytes": before, "peak_bytes": resident_at_most(), "steps_s": seconds,
        "predicted_peak_bytes": plan.predicted.peak_bytes, "techniques": [t.describe() for t in plan.techniques],
    }  # fmt: skip


def one(way: str, given: argparse.Namespace) -> dict[str, Any]:
    from finefit.environment import STEADY

    command = [sys.executable, __file__, "--one", way, "--model", str(given.model), "--steps", str(given.steps)]
    environment = {**os.environ, **STEADY}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    above = (found["peak_bytes"] - found["before_bytes"]) / MIB
    print(f"{way}: {above:.0f} MiB, {min(found['steps_s']):.1f} s a step", file=sys.stderr, flush=True)
    return found


HEADS = {
    "en": "| full fine-tuning of the 135M in bf16, 16 rows of 1,024 tokens | above the libraries | tokens/s |",
    "zh": "| 135M 全参数微调，bf16，16 行 × 1,024 token | 库之上的常驻内存 | tokens/s |",
}


def tell(rows: list[dict[str, Any]]) -> None:
    """Write the table into the pages of optimizer_offload."""
    lines = [
        f"| {row['way']} | {row['peak_above_libraries_bytes'] / MIB:,.0f} MiB | {row['tokens_per_s']:,.0f} |"
        for row in rows
    ]
    for language, head in HEADS.items():
        page = HERE.parent / "docs" / language / "concepts" / "optimizer_offload.md"
        before, _, rest = page.read_text().partition("<!-- lean -->")
        _, _, after = rest.partition("<!-- /lean -->")
        table = "\n".join(["", "", head, "|---|---:|---:|", *lines, ""])
        page.write_text(f"{before}<!-- lean -->{table}<!-- /lean -->{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", choices=WAYS, default=None, help="in this process")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "lean-cpu.json")
    given = parser.parse_args()
    if given.model is None:
        from finefit import assets

        given.model = assets.model_folder("SmolLM2-135M-Instruct").folder
    if given.one:
        words = WAYS[given.one]
        found = finefit(given.model, given.steps, words) if words else trainer(given.model, given.steps)
        print(json.dumps(found))
        return
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(given.rounds):
        for way, found in runs.items():
            found.append(one(way, given))
    rows = []
    for way, found in runs.items():
        seconds = [s for one in found for s in one["steps_s"][1:]]
        rows.append({
            "way": way, "settings": list(WAYS[way]), "techniques": found[0]["techniques"],
            "peak_above_libraries_bytes": statistics.median_high(one["peak_bytes"] - one["before_bytes"] for one in found),
            "predicted_peak_bytes": found[0].get("predicted_peak_bytes"), "steps_s": seconds,
            "tokens_per_s": ROWS * LENGTH / statistics.median(seconds),
        })  # fmt: skip
    tell(rows)
    given.out.write_text(json.dumps({
        "machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")}, "rows": rows,
    }, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
