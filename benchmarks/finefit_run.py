"""finefit on the benchmark's job: one run, one result file with the same fields as the peers'.

    python benchmarks/finefit_run.py --model MODEL --data demo.jsonl --micro-batch-tokens 1024 --out finefit.json

Uses the same parts a run uses: token store, techniques, build, the loop's step. ``--checkpointing`` is the number of
blocks. ``--profile`` writes the share of each kind of operator instead of timing.
"""

import argparse
import ctypes
import gc
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
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
    from finefit.build import Optimizing, optimizer_of, reset_adapters, rewritten
    from finefit.data.order import InOrder
    from finefit.data.readers import open_source
    from finefit.data.tokens import prepare
    from finefit.loop import optimizer_step
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
    run.optimizer = optimizer_of(run, Optimizing(LEARNING_RATE))
    parameters = trainable(run.model)

    def feed(step: int) -> list[Any]:
        examples = [tuple(store[row]) for row in order.batch(step)]
        groups = run.split([len(ids) for ids, _ in examples])
        return [run.collate([examples[i] for i in group]) for group in groups]

    if given.profile:
        return profiled(lambda: optimizer_step(run, feed(1), parameters, LEARNING_RATE))
    steps = []
    for step in range(1, given.steps + 1):
        started = time.perf_counter()
        steps.append((*optimizer_step(run, feed(step), parameters, LEARNING_RATE), time.perf_counter() - started))
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


_KINDS = {
    "gemm": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::linear", "mkldnn"),
    "attention": ("aten::bmm", "aten::_softmax", "aten::_softmax_backward_data", "SegmentAttention"),
    "loss": ("aten::logsumexp", "aten::exp_", "aten::gather", "aten::scatter_add_", "ChunkedCrossEntropy"),
}


def profiled(step: Any) -> dict[str, Any]:
    """Share of a step's operator time by kind, after one step to warm up."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        step()
    times = {e.key: e.self_cpu_time_total for e in prof.key_averages()}
    total = sum(times.values())
    shares = {
        kind: sum(
            t for key, t in times.items() if any(key == name or (name[0].isupper() and name in key) for name in names)
        )
        / total
        for kind, names in _KINDS.items()
    }
    shares["rest"] = 1 - sum(shares.values())
    top = sorted(times.items(), key=lambda item: -item[1])[:20]
    return {"tool": "finefit", "shares": shares, "seconds": total / 1e6, "top": {k: t / total for k, t in top}}


if __name__ == "__main__":
    main()
