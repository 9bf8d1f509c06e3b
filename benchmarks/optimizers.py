"""Optimizers on the real model: time of an update, bytes, and the held-out loss after a few steps of full fine-tuning.

    python benchmarks/optimizers.py [--model MODEL] [--steps 4]      writes benchmarks/results/optimizers-cpu.json

Times are processor time of one thread, the best of three updates of tensors of the shapes of the model's outer weights and
of every fourth block, in nanoseconds an element: other work on the machine matters little to them. bitsandbytes' AdamW8bit
too, where it is installed. Bytes are of the whole model. Losses are of the parts of finefit's own loop on the built-in data,
the same examples for each: Lion with a fifth of the learning rate, SGD with one whose steps are about as long as AdamW's at
first. In fp32, as products in bf16 do not see that a weight moved until it is by some of its bf16 steps; the rows in bf16
show what rounding loses. One run each, so what differs by little differs by nothing.
The file is written row by row, and one that was interrupted is gone on with.
"""

import argparse
import json
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
from torch.nn import Parameter

from accuracy_cpu import commit, machine
from finefit import assets, evaluate, examples, models
from finefit.build import build
from finefit.candidates import rewrite
from finefit.config import load
from finefit.layout import Micro
from finefit.loop import optimizer_step
from finefit.nn.optimizers import Optimizer, Optimizing
from finefit.nn.rules import rule_of
from finefit.predict import states
from finefit.spec import ModelSpec
from finefit.techniques import Accumulation, Clipping, FusedLoss, FusedOps, OptimizerStates, Packing, Precision
from finefit.updating import OptimizerKind, Rounding, Update

HERE = Path(__file__).parent
RATES = {"lion": 4e-6, "lion_8bit": 4e-6, "sgd": 0.1}
RATE = 2e-5
WAYS: tuple[tuple[OptimizerKind, str, Rounding], ...] = (
    *((kind, "fp32", "nearest") for kind in get_args(OptimizerKind)),
    ("adamw", "bf16", "nearest"), ("adamw", "bf16", "stochastic"), ("adamw_8bit", "bf16", "stochastic"),
)  # fmt: skip
UPDATES = 3
BEFORE: dict[str, float] = {}  # held-out loss of the untrained model, by precision


def drawn(shapes: list[torch.Size], dtype: torch.dtype) -> list[Parameter]:
    weights = [Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn(weight.shape).to(dtype)
    return weights


def best_of(step: Any) -> float:
    """Seconds of the fastest update, after one that is not counted."""
    threads, seconds = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for _ in range(UPDATES + 1):
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    torch.set_num_threads(threads)
    return min(seconds[1:])


def timed(how: Update, shapes: list[torch.Size], dtype: torch.dtype) -> float:
    """Nanoseconds an element of an update."""
    optimizer = Optimizer()
    optimizer.rule = rule_of(how)
    optimizer.begin(drawn(shapes, dtype), Optimizing(RATE, 0.01))
    elements = sum(shape.numel() for shape in shapes)
    return best_of(optimizer.step) / elements * 1e9


def kept(how: Update, model: ModelSpec, precision: str) -> int:
    """Bytes of the states of the whole model."""
    techniques = (Precision(precision), OptimizerStates(how.kind, how.rounding))  # type: ignore[arg-type]
    return states(rewrite(model, Micro(1, 1, 1), techniques))["optimizer_state"]


def of_bitsandbytes(shapes: list[torch.Size]) -> float | None:
    if find_spec("bitsandbytes") is None:
        return None
    import bitsandbytes

    optimizer = bitsandbytes.optim.AdamW8bit(drawn(shapes, torch.float32), lr=RATE, weight_decay=0.01)
    return best_of(optimizer.step) / sum(shape.numel() for shape in shapes) * 1e9


def trained(way: tuple[OptimizerKind, str, Rounding], folder: Path, steps: list[Any], held_out: list[Any]) -> Any:
    """Held-out losses before and after, and the training losses."""
    kind, precision, rounding = way
    rate = RATES.get(kind, RATE)
    techniques = (Precision(precision), OptimizerStates(kind, rounding), FusedOps(), Packing(), FusedLoss(256),  # type: ignore[arg-type]
                  Accumulation(16, 2048, 8), Clipping())  # fmt: skip
    torch.manual_seed(0)
    run = build(models.config_of(folder), techniques, models.fill_from(folder), torch.device("cpu"), Optimizing(rate))
    if precision not in BEFORE:
        BEFORE[precision] = evaluate.held_out_loss(run, held_out)[0]
    losses = []
    for rows in steps:
        batches = [run.collate([rows[i] for i in group]) for group in run.split([len(ids) for ids, _ in rows])]
        losses.append(optimizer_step(run, batches, rate)[0])
    return {"learning_rate": rate, "held_out_before": BEFORE[precision], "held_out_after": evaluate.held_out_loss(run, held_out)[0],
            "losses": losses}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "optimizers-cpu.json")
    given = parser.parse_args()
    words = ["method=full", "train.max_length=256", f"train.steps={given.steps}", "train.global_batch_size=4"]
    config = load(None, words, {"model": given.model, "data": "stdlib-docstrings"})
    folder = assets.model_folder(given.model).folder
    data = examples.read_data(config, examples.tokenizer_of(folder))
    steps = [[tuple(data.store[row]) for row in data.batch(step)] for step in range(1, given.steps + 1)]
    held_out = [tuple(data.held_out[row]) for row in data.evaluated()[:8]]
    model = ModelSpec.from_folder(folder)
    blocks = [p for i in range(0, model.num_hidden_layers, 4) for p in model.block_parameters(i)]
    shapes = [torch.Size(p.shape) for p in (*model.outer_parameters(), *blocks)]
    result: dict[str, Any] = {
        "job": " ".join(words), "machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit(),
        "versions": {n: version(n) for n in ("finefit", "torch", "transformers")},
        "parameters": model.num_parameters, "kinds": [],
    }  # fmt: skip
    begun = json.loads(given.out.read_text("utf-8")) if given.out.is_file() else {}
    if begun.get("job") == result["job"] and len(begun["kinds"]) < len(WAYS):
        result = begun  # where an interrupted one stopped
    else:
        result["bitsandbytes_adamw_8bit_ns_per_element"] = of_bitsandbytes(shapes)
    for kind, precision, rounding in WAYS[len(result["kinds"]) :]:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        how = Update(kind, rounding)
        ns, n_bytes = timed(how, shapes, dtype), kept(how, model, precision)
        row = {"kind": kind, "precision": precision, "rounding": rounding, "ns_per_element": ns, "state_bytes": n_bytes}
        row |= trained((kind, precision, rounding), folder, steps, held_out)
        result["kinds"].append(row)
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{kind}, {precision}, {rounding}: {ns:.1f} ns an element, {n_bytes / 2**20:,.0f} MiB, "
              f"{row['held_out_before']:.4f} to {row['held_out_after']:.4f}", flush=True)  # fmt: skip
    tell(result)


HEADS = {
    "en": "| optimizer | states, MiB | ns an element | held-out loss before | after |",
    "zh": "| 优化器 | 状态，MiB | 每元素 ns | 留出集损失 训练前 | 训练后 |",
}


def tell(result: dict[str, Any]) -> None:
    """Write the table into the pages of optimizer_states."""
    lines = [
        f"| {row['kind']}, {row['precision']}{', stochastic' * (row['rounding'] == 'stochastic')} "
        f"| {row['state_bytes'] / 2**20:,.1f} | {row['ns_per_element']:.1f} "
        f"| {row['held_out_before']:.3f} | {row['held_out_after']:.3f} |"
        for row in result["kinds"]
    ]
    for language, head in HEADS.items():
        page = HERE.parent / "docs" / language / "concepts" / "optimizer_states.md"
        before, _, rest = page.read_text("utf-8").partition("<!-- optimizers -->")
        _, _, after = rest.partition("<!-- /optimizers -->")
        table = "\n".join(["", head, "|---|---:|---:|---:|---:|", *lines, ""])
        page.write_text(f"{before}<!-- optimizers -->{table}<!-- /optimizers -->{after}", "utf-8")


if __name__ == "__main__":
    main()
