"""float16 on the real model: losses with and without a scale of the loss against fp32's, and gradients that vanish.

    python benchmarks/fp16.py [--model MODEL] [--steps 8]      writes benchmarks/results/fp16-cpu.json

Full fine-tuning of SmolLM2-135M on the built-in data, the same examples each time, by the parts of finefit's own loop:
fp32, bf16_mixed, fp16_mixed as it is, and fp16_mixed with its scale off. Each step's examples stand for one of ``PARTS``
micro-batches of a global batch: its loss is divided by that batch's tokens, as in such a run, and AdamW does not mind.
Beside the losses, of each kind's first step: the share of gradient elements that are zero where fp32's are not, and how
far its gradient is from fp32's.
"""

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from accuracy_cpu import commit, machine
from finefit import assets, examples, models
from finefit.build import build
from finefit.config import load
from finefit.nn.optimizers import Optimizing
from finefit.run import Run, summed_loss, trainable
from finefit.techniques import Accumulation, Clipping, FusedLoss, FusedOps, Packing, Precision

HERE = Path(__file__).parent
KINDS = ("fp32", "bf16_mixed", "fp16_mixed", "fp16_mixed, not scaled")
RATE, PARTS = 2e-5, 512


def run_of(kind: str, folder: Path) -> Run:
    techniques = (Precision(kind.partition(",")[0]), FusedOps(), Packing(), FusedLoss(256),  # type: ignore[arg-type]
                  Accumulation(16, 2048, 8), Clipping())  # fmt: skip
    run = build(models.config_of(folder), techniques, models.fill_from(folder), torch.device("cpu"), Optimizing(RATE))
    if kind.endswith("not scaled"):
        run.scaler = torch.amp.GradScaler("cpu", enabled=False)
    return run


def backward(run: Run, batches: Any) -> float:
    """Gradients of a step's examples; their loss per labelled token."""
    labelled, total = sum(len(batch.label_l) for batch in batches), 0.0
    for batch in batches:
        loss = summed_loss(run, batch)
        run.scaler.scale(loss / (labelled * PARTS)).backward()
        total += loss.item() / labelled
    return total


def step(run: Run, batches: Any) -> float:
    """As ``loop.optimizer_step``, of gradients that are a part of what they are there."""
    assert run.optimizer is not None
    loss = backward(run, batches)
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    return loss


def gradient(run: Run, batches: Any) -> torch.Tensor:
    """All of it, as the first update would see it before it is clipped."""
    assert run.optimizer is not None
    backward(run, batches)
    run.scaler.unscale_(run.optimizer)
    found = torch.cat([p.grad.flatten() for p in trainable(run.model) if p.grad is not None])
    run.optimizer.zero_grad(set_to_none=True)
    run.scaler.update(run.scaler.get_scale())
    return found


def measure(kind: str, folder: Path, steps: list[list[Any]], exact: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
    run, losses, scales = run_of(kind, folder), [], []
    groups = [[run.collate([rows[i] for i in g]) for g in run.split([len(ids) for ids, _ in rows])] for rows in steps]
    first = gradient(run, groups[0])
    exact = first if exact is None else exact
    started = time.perf_counter()
    for batches in groups:
        losses.append(step(run, batches))
        scales.append(run.scaler.get_scale())
    moved = exact != 0
    return {
        "kind": kind, "losses": losses, "scales": scales, "seconds_per_step": (time.perf_counter() - started) / len(steps),
        "zero_where_fp32_is_not": float((first[moved] == 0).float().mean()),
        "gradient_error": float((first - exact).norm() / exact.norm()),
    }, exact  # fmt: skip


def job_of(model: str, count: int) -> tuple[list[str], Path, list[list[Any]]]:
    """Settings, the model's folder, and the examples of each step."""
    words = ["method=full", "train.max_length=512", f"train.steps={count}", "train.global_batch_size=4"]
    config = load(None, words, {"model": model, "data": "stdlib-docstrings"})
    folder = assets.model_folder(model).folder
    data = examples.read_data(config, examples.tokenizer_of(folder))
    return words, folder, [[tuple(data.store[row]) for row in data.batch(step)] for step in range(1, count + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "fp16-cpu.json")
    given = parser.parse_args()
    words, folder, steps = job_of(given.model, given.steps)
    rows, exact = [], None
    for kind in KINDS:
        row, exact = measure(kind, folder, steps, exact)
        rows.append(row)
        print(f"{kind}: {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}, {row['zero_where_fp32_is_not']:.1%} gone, "
              f"gradient {row['gradient_error']:.2%} off, {row['seconds_per_step']:.1f} s a step", flush=True)  # fmt: skip
    result = {
        "job": " ".join(words), "learning_rate": RATE, "parts": PARTS, "machine": machine(), "date": time.strftime("%Y-%m-%d"),
        "commit": commit(), "versions": {n: version(n) for n in ("finefit", "torch", "transformers")},
        "kinds": rows,
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
