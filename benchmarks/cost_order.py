"""Predicted against measured order of plans: twelve ways to run the same job on this CPU, and Spearman's rank correlation.

    python benchmarks/cost_order.py --model MODEL [--job WORDS] [--rounds 3] [--add] [--out FILE]      writes benchmarks/results/cost-order-cpu.json

The job is LoRA on SmolLM2-135M with the built-in data (``--job "method=full train.max_length=256"`` is another); the plans differ in micro-batch, checkpointing, precision, loss
chunk, fused ops and packing. Each plan runs in a process of its own: one step to warm up, then two that are timed on the
same examples for every plan, against the predicted seconds of those two steps. All plans run in each of the rounds, and a
plan's fastest round is what is ranked: neighbours on a machine only ever add time, and plans 3 % apart are to be told
from each other. Run it on an otherwise idle machine, after `finefit doctor --probe`: rates nobody measured are guesses.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accuracy_cpu import commit, machine

HERE = Path(__file__).parent
JOB = ["method=lora", "train.max_length=512", "train.global_batch_size=16"]
PLANS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("512 tokens", ("micro_batch_tokens=512", "checkpointing=0")),
    ("1024 tokens", ("micro_batch_tokens=1024", "checkpointing=0")),
    ("4096 tokens", ("micro_batch_tokens=4096", "checkpointing=0")),
    ("1024 tokens, 15 blocks checkpointed", ("micro_batch_tokens=1024", "checkpointing=15")),
    ("1024 tokens, all checkpointed", ("micro_batch_tokens=1024", "checkpointing=all")),
    ("4096 tokens, all checkpointed", ("micro_batch_tokens=4096", "checkpointing=all")),
    ("1024 tokens, fp32", ("micro_batch_tokens=1024", "checkpointing=0", "precision=fp32")),
    ("1024 tokens, fp32, all checkpointed", ("micro_batch_tokens=1024", "checkpointing=all", "precision=fp32")),
    ("1024 tokens, loss in chunks of 32", ("micro_batch_tokens=1024", "checkpointing=0", "loss_chunk=32")),
    ("1024 tokens, whole logits", ("micro_batch_tokens=1024", "checkpointing=0", "loss_chunk=0")),
    ("1024 tokens, plain modules", ("micro_batch_tokens=1024", "checkpointing=0", "fused_ops=false")),
    ("4 examples, padded", ("micro_batch_size=4", "checkpointing=0", "packing=false")),
)
WARM, TIMED = 1, 2  # steps


def measure(model: str, job_words: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """One plan: predicted and measured seconds of the timed steps. In a process of its own."""
    import torch

    from finefit import assets, examples, models, planning
    from finefit.batches import FromOrder
    from finefit.build import build
    from finefit.candidates import Question, rewrite, splits, techniques_of
    from finefit.config import load
    from finefit.cost import seconds_per_step
    from finefit.loop import optimizer_step
    from finefit.nn.optimizers import Optimizing
    from finefit.spec import resolve_model

    words = [
        *job_words,
        "hardware.device=cpu",
        f"train.steps={WARM + TIMED}",
        *(f"memory.{setting}" for setting in settings),
    ]
    config = load(None, words, {"model": model, "data": "stdlib-docstrings"})
    folder = assets.model_folder(model).folder
    data = examples.read_data(config, examples.tokenizer_of(folder))
    hardware, spec = planning.hardware_of(config, None), resolve_model(str(folder))
    job = planning.job_of(config, data)
    steps = [data.batch(step) for step in range(1, WARM + TIMED + 1)]
    timed = FromOrder(steps[WARM:], data.store.lengths.tolist(), data.store.labelled.tolist())
    question = Question(spec, hardware, job, timed, planning.budget_of(config, hardware))
    ((size, tokens),) = splits(question)
    work = question.work(size, tokens)
    blocks = spec.num_hidden_layers if job.pin("checkpointing") == "all" else int(job.pin("checkpointing") or 0)
    techniques = techniques_of(question, size, tokens, work, blocks)
    predicted = seconds_per_step(rewrite(spec, work.largest[0], techniques), work, hardware)
    run = build(models.config_of(folder), techniques, models.fill_from(folder), torch.device("cpu"), Optimizing())
    seconds = []
    for rows in steps:
        examples = [tuple(data.store[row]) for row in rows]
        started = time.perf_counter()
        batches = [run.collate([examples[i] for i in group]) for group in run.split([len(ids) for ids, _ in examples])]
        optimizer_step(run, batches, 2e-4)
        seconds.append(time.perf_counter() - started)
    return {
        "settings": list(settings), "predicted_s": predicted, "measured_s": sum(seconds[WARM:]) / TIMED,
        "steps_s": seconds, "techniques": [t.describe() for t in techniques], "tokens": work.mean_tokens,
        "hardware": hardware.to_json(), "threads": torch.get_num_threads(),
    }  # fmt: skip


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson's correlation of the ranks; equal values share the mean of their ranks."""
    x, y = ranks(a), ranks(b)
    mean = (len(x) + 1) / 2
    both = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    return float(both / (sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y)) ** 0.5)


def ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < one for other in values) + (sum(other == one for other in values) + 1) / 2 for one in values]


def in_a_process(model: str, job_words: Sequence[str], number: int) -> dict[str, Any]:
    from finefit.environment import STEADY

    command = [sys.executable, __file__, "--model", model, "--job", " ".join(job_words), "--one", str(number)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **STEADY})
    if done.returncode:
        raise SystemExit(f"{PLANS[number][0]} failed:\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--job", type=str.split, default=JOB, help="settings of the run that all plans share")
    parser.add_argument("--plans", type=int, default=len(PLANS), help="only so many of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="to the rounds that the result file has, of this machine")
    parser.add_argument("--one", type=int, default=None, help="measure this one in this process and print it")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cost-order-cpu.json")
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(measure(given.model, given.job, PLANS[given.one][1])))
        return
    rows: list[dict[str, Any]] = json.loads(given.out.read_text())["plans"] if given.add else []
    for turn in range(given.rounds):
        for number, (says, _) in enumerate(PLANS[: given.plans]):
            row = {"plan": says, **in_a_process(given.model, given.job, number)}
            row["rounds_s"] = [*(rows[number]["rounds_s"] if number < len(rows) else []), row["measured_s"]]
            row["measured_s"] = min(row["rounds_s"])
            rows[number:] = [row, *rows[number + 1 :]]
            print(
                f"{turn}: {says}: predicted {row['predicted_s']:.2f} s, measured {row['measured_s']:.2f} s", flush=True
            )
    found = spearman([row["predicted_s"] for row in rows], [row["measured_s"] for row in rows])
    print(f"Spearman's rank correlation of {len(rows)} plans: {found:.3f}")
    result = {
        "spearman": found, "commit": commit(), "job": " ".join(given.job), "machine": machine(), "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("finefit", "torch", "transformers")}, "plans": rows,
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
