"""finefit on the benchmark's job: one run, one result file with the same fields as the peers'.

    python benchmarks/finefit_run.py --model MODEL --data demo.jsonl --micro-batch-tokens 1024 --out finefit.json

Uses the same parts a run uses: token store, techniques, build, the loop's step. ``--checkpointing`` is the number of
blocks. ``--profile`` writes the share of each kind of operator instead of timing.
"""

import argparse
import ctypes
import gc
import json
import math
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from accuracy_cpu import machine
from job import (
    ALPHA,
    GLOBAL_BATCH,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MAX_LENGTH,
    RANK,
    SEED,
    _restart_with_environment,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--checkpointing", type=int, default=0, help="blocks that are computed again")
    parser.add_argument("--measure", choices=("memory", "speed"), default="memory")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "64"  # as the command line sets it
    _restart_with_environment(given.measure)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(run(given), indent=1) + "\n", encoding="utf-8")


def run(given: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoTokenizer

    from finefit import models
    from finefit.build import reset_adapters, rewritten
    from finefit.data.order import InOrder
    from finefit.data.readers import open_source
    from finefit.data.tokens import prepare
    from finefit.loop import optimizer_step
    from finefit.nn.optimizers import Optimizing
    from finefit.run import trainable
    from finefit.techniques import (
        Accumulation,
        Checkpointing,
        Clipping,
        FusedLoss,
        FusedOps,
        Lora,
        Packing,
        Precision,
    )  # fmt: skip

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = prepare(open_source(given.data), AutoTokenizer.from_pretrained(given.model), max_length=MAX_LENGTH)
    order = InOrder(len(store), GLOBAL_BATCH)
    techniques = [
        Precision("bf16"), Lora(RANK, ALPHA), FusedOps(), Packing(), FusedLoss(256),
        Accumulation(GLOBAL_BATCH, given.micro_batch_tokens, GLOBAL_BATCH), Clipping(MAX_GRAD_NORM),
    ]  # fmt: skip
    if given.checkpointing:
        techniques.append(Checkpointing(given.checkpointing))
    run = rewritten(models.config_of(given.model), techniques, torch.device("cpu"))
    models.fill_from(given.model)(run.model, run.device)
    reset_adapters(run.model, SEED)
    loaded = _settled()
    run.optimizer.begin(trainable(run.model), Optimizing(LEARNING_RATE))

    def feed(step: int) -> list[Any]:
        examples = [tuple(store[row]) for row in order.batch(step)]
        groups = run.split([len(ids) for ids, _ in examples])
        return [run.collate([examples[i] for i in group]) for group in groups]

    if given.profile:
        return profiled(lambda: optimizer_step(run, feed(1), LEARNING_RATE))
    steps = []
    for step in range(1, given.steps + 1):
        started = time.perf_counter()
        steps.append((*optimizer_step(run, feed(step), LEARNING_RATE), time.perf_counter() - started))
    losses, norms, tokens, labelled, seconds = (list(column) for column in zip(*steps, strict=True))
    warm = slice(1, None) if len(steps) > 1 else slice(None)
    memory = given.measure == "memory"
    peak = _status_bytes("VmHWM")
    return {
        "tool": "finefit", "tool_version": version("finefit"),
        "packages": {name: version(name) for name in ("torch", "transformers")},
        "setting": {
            "micro_batch_tokens": given.micro_batch_tokens, "packing": "block-diagonal",
            "checkpointing": given.checkpointing, "measure": given.measure, "threads": torch.get_num_threads(),
        },
        "losses": losses, "grad_norms": norms, "seconds_per_step": seconds, "real_tokens_per_step": tokens,
        "labelled_tokens_per_step": labelled, "real_tokens_per_s": sum(tokens[warm]) / sum(seconds[warm]),
        "rss_model_loaded": loaded if memory else None, "peak_rss": peak if memory else None,
        "peak_above_model_bytes": peak - loaded if memory else None,
    }  # fmt: skip


def _settled() -> int:
    """Resident bytes with the model loaded and nothing else; the high-water mark starts again here."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


_PARTS = {"SegmentAttention": "attention", "ChunkedCrossEntropy": "loss"}  # with all that runs inside them
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::bmm": 0}  # position of the first factor


def profiled(step: Any) -> dict[str, Any]:
    """Shares of one step's operator time, and the rate of its matrix products, after one step to warm up.

    Products outside attention and loss are ``gemm``. ``flops`` are those of all products, as executed.
    """
    from torch.profiler import ProfilerActivity, profile

    from finefit import probe

    peak = probe.measured()["cpu"]["matmul_flops_per_s"]["bfloat16"]
    step()
    started = time.perf_counter()
    step()
    seconds = time.perf_counter() - started
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        step()
    times: dict[str, float] = dict.fromkeys(("gemm", "attention", "loss", "rest"), 0.0)
    flops = 0
    for event in prof.events() or ():
        times[_part_of(event)] += event.self_cpu_time_total
        if event.name in _PRODUCTS:
            left, right = event.input_shapes[_PRODUCTS[event.name] :][:2]
            flops += 2 * math.prod(left) * right[-1]
    total = sum(times.values())
    return {
        "tool": "finefit", "tool_version": version("finefit"), "machine": machine(), "date": time.strftime("%Y-%m-%d"),
        "shares": {part: spent / total for part, spent in times.items()}, "seconds": seconds, "flops": flops,
        "flops_per_s": flops / seconds, "measured_bf16_flops_per_s": peak,
    }  # fmt: skip


def _part_of(event: Any) -> str:
    above = event
    while above is not None:
        for word, part in _PARTS.items():
            if word in above.name:
                return part
        above = above.cpu_parent
    return "gemm" if event.name in _PRODUCTS else "rest"


if __name__ == "__main__":
    main()
