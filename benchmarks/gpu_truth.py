"""Real training steps on a CUDA device, to hold predictions against: peak allocated, peak reserved, driver view.

    python benchmarks/gpu_truth.py OUT.json [--only WORD] [--traces FOLDER]

Each case is a ``ForeignRun`` of a catalogued model with weights that mean nothing: memory does not depend on them.
``how: stack`` steps finefit's own stand-in for the tool (the code ``simulate`` steps on fake tensors), ``how: library``
the real peft and bitsandbytes. Traces are the allocator's own events, to replay the emulator on.
"""

import argparse
import dataclasses
import gc
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finefit.catalog import find_model
from finefit.foreign import ForeignRun
from finefit.ledger import NoLedger
from finefit.simulate import one_step
from finefit.stacks import builder_of
from finefit.stacks.optimizers import optimizer_of

BF16 = {"trained_dtype": "bfloat16", "optimizer_bits": 16}
MIXED = {"trained_dtype": "float32", "autocast": True}
CKPT = {"checkpointing": "full"}
QLORA = {"method": "lora", "rank": 16, "quantised": "nf4_double", **MIXED, **CKPT}
ATTN = ("q_proj", "k_proj", "v_proj", "o_proj")
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("Llama-3.2-1B", "stack", {"method": "full", **BF16, "foreach": False, "micro_batch_size": 2, "max_length": 2048}),
    ("Llama-3.2-1B", "stack", {"method": "full", **BF16, "micro_batch_size": 2, "max_length": 2048}),
    ("Llama-3.2-1B", "stack", {"method": "full", **MIXED, **CKPT, "micro_batch_size": 4, "max_length": 2048}),
    ("Llama-3.2-1B", "stack", {"method": "full", **MIXED, "micro_batch_size": 4, "max_length": 1024, "packed": False}),
    ("Llama-3.2-1B", "stack", {"method": "full", **BF16, **CKPT, "micro_batch_size": 8, "max_length": 4096,
                               "loss": "fused", "fused_kernels": True}),
    ("Llama-3.1-8B", "stack", {"method": "full", **BF16, **CKPT, "foreach": False, "micro_batch_size": 1,
                               "max_length": 8192}),
    ("Llama-3.1-8B", "stack", {"method": "full", **BF16, **CKPT, "micro_batch_size": 2, "max_length": 4096,
                               "loss": "kernel"}),
    ("Llama-3.1-8B", "stack", {"method": "lora", "rank": 16, **CKPT, "micro_batch_size": 4, "max_length": 2048}),
    ("Llama-3.1-8B", "stack", {"method": "lora", "rank": 16, "micro_batch_size": 1, "max_length": 2048}),
    ("Llama-3.1-8B", "stack", {"method": "lora", "rank": 64, **MIXED, "micro_batch_size": 2, "max_length": 2048,
                               "lora_dropout": 0.05, "targets": ATTN}),
    ("Llama-3.1-8B", "stack", {**QLORA, "micro_batch_size": 2, "max_length": 4096}),
    ("Llama-3.1-8B", "stack", {**QLORA, "raised": "all", "micro_batch_size": 4, "max_length": 1024, "packed": False}),
    ("Qwen2.5-7B", "stack", {"method": "lora", "rank": 8, **MIXED, **CKPT, "micro_batch_size": 4, "max_length": 2048}),
    ("Qwen2.5-7B", "stack", {"method": "full", **BF16, **CKPT, "micro_batch_size": 2, "max_length": 2048,
                             "accumulation": 4}),
    ("Qwen3-4B", "stack", {"method": "full", **MIXED, **CKPT, "micro_batch_size": 2, "max_length": 4096}),
    ("Phi-3-mini", "stack", {"method": "lora", "rank": 16, "micro_batch_size": 2, "max_length": 2048}),
    ("Gemma-2-9B", "stack", {"method": "lora", "rank": 16, **CKPT, "micro_batch_size": 2, "max_length": 2048,
                             "attention": "math"}),
    ("Llama-3.2-1B", "stack", {"method": "full", **BF16, "attention": "math", "micro_batch_size": 2,
                               "max_length": 1024}),
    ("Llama-3.2-1B", "stack", {"method": "full", "trained_dtype": "float32", "micro_batch_size": 2,
                               "max_length": 1024}),
    ("Mistral-7B", "stack", {"method": "full", **BF16, **CKPT, "optimizer_bits": 8, "micro_batch_size": 2,
                             "max_length": 2048}),
    ("Llama-3.1-8B", "library", {"method": "lora", "rank": 16, **CKPT, "micro_batch_size": 4, "max_length": 2048}),
    ("Llama-3.1-8B", "library", {"method": "lora", "rank": 64, **MIXED, "micro_batch_size": 2, "max_length": 2048,
                                 "lora_dropout": 0.05, "targets": ATTN}),
    ("Llama-3.1-8B", "library", {**QLORA, "micro_batch_size": 2, "max_length": 4096}),
    ("Llama-3.1-8B", "library", {**QLORA, "raised": "all", "micro_batch_size": 4, "max_length": 1024, "packed": False}),
    ("Llama-3.2-1B", "library", {"method": "lora", "rank": 16, "dora": True, "micro_batch_size": 2,
                                 "max_length": 2048}),
    ("Llama-3.2-1B", "library", {"method": "lora", "rank": 16, "quantised": "int8", **MIXED, **CKPT,
                                 "micro_batch_size": 4, "max_length": 2048}),
]  # fmt: skip
TRACED = (2, 8, 11, 13)


def run_of(model: str, settings: dict[str, Any]) -> ForeignRun:
    return ForeignRun(**{"tool": "transformers", "model": model, "packed": True, **settings})


def config_of(model: str) -> dict[str, Any]:
    found = find_model(model)
    assert found is not None, model
    return dict(found.config)


def library(config: dict[str, Any], run: ForeignRun, device: torch.device) -> Any:
    """The same run by the real peft and bitsandbytes."""
    import peft

    from finefit.stacks.transformers import build

    model = build(config, dataclasses.replace(run, rank=0, quantised=""), config["num_hidden_layers"], device).model
    if run.quantised:
        _quantise(model, run.quantised)
    if run.raised:
        model = peft.prepare_model_for_kbit_training(model, True, {"use_reentrant": False})
    targets = list(run.targets) or "all-linear"
    lora = peft.LoraConfig(r=run.rank, lora_alpha=2 * run.rank, lora_dropout=run.lora_dropout, target_modules=targets,
                           use_dora=run.dora, task_type="CAUSAL_LM")  # fmt: skip
    wrapped = peft.get_peft_model(model, lora)
    from finefit.stacks.base import Stepped
    from finefit.stacks.transformers import _stepper, blocks_of

    base = wrapped.get_base_model()
    return Stepped(wrapped, blocks_of(base), _stepper(base, run))


def _quantise(model: nn.Module, kind: str) -> None:
    import bitsandbytes as bnb

    from finefit.stacks.transformers import blocks_of

    for block in blocks_of(model):
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if not isinstance(child, nn.Linear):
                    continue
                rows, columns = child.weight.shape
                weight = child.weight.data.normal_().cpu()
                if kind == "int8":
                    new = bnb.nn.Linear8bitLt(columns, rows, child.bias is not None, has_fp16_weights=False)
                    new.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
                else:
                    new = bnb.nn.Linear4bit(columns, rows, child.bias is not None, compute_dtype=torch.bfloat16,
                                            compress_statistics=kind.endswith("double"), quant_type="nf4")  # fmt: skip
                    new.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4",
                                                   compress_statistics=kind.endswith("double"))  # fmt: skip
                setattr(parent, name, new.to("cuda"))


def measure(model: str, how: str, settings: dict[str, Any], trace: Path | None) -> dict[str, Any]:
    """Two steps; peaks of the second."""
    device, run, config = torch.device("cuda"), run_of(model, settings), config_of(model)
    depth = config["num_hidden_layers"]
    stepped = library(config, run, device) if how == "library" else builder_of(run.tool)(config, run, depth, device)
    optimizer = optimizer_of(stepped.model, run)
    batch = [torch.zeros(run.micro_batch_size, run.max_length, dtype=torch.int64, device=device) for _ in range(2)]
    if not run.packed:
        batch[0][:, -8:] = 1
    gc.collect()
    torch.cuda.empty_cache()
    built = torch.cuda.memory_allocated()
    one_step(stepped, run, optimizer, batch, NoLedger())
    torch.cuda.synchronize()
    first = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    if trace:
        torch.cuda.memory._record_memory_history(max_entries=400_000, context=None)
    started = time.perf_counter()
    one_step(stepped, run, optimizer, batch, NoLedger())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    if trace:
        _write_trace(trace)
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    return {
        "built_bytes": built, "resident_bytes": resident, "allocated_bytes": stats["allocated_bytes.all.peak"],
        "requested_bytes": stats["requested_bytes.all.peak"], "reserved_bytes": stats["reserved_bytes.all.peak"],
        "first_step_reserved_bytes": first, "driver_bytes": total - free, "reserved_now": stats["reserved_bytes.all.current"],
        "seconds": seconds,
    }  # fmt: skip


def _write_trace(path: Path) -> None:
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    kept = [(e["action"], e["addr"], e["size"]) for e in events]
    import gzip

    path.write_bytes(gzip.compress(json.dumps(kept).encode()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--traces", type=Path)
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    import transformers

    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__,
            "total_bytes": total, "context_bytes": context}  # fmt: skip
    rows = []
    for i, (model, how, settings) in enumerate(CASES):
        if options.only not in f"{model} {how} {settings}":
            continue
        trace = options.traces / f"trace{i}.json.gz" if options.traces and i in TRACED else None
        row: dict[str, Any] = {"case": i, "model": model, "how": how, "settings": settings}
        try:
            row |= measure(model, how, settings, trace)
        except Exception as error:  # the list goes on; what failed is in the file
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc(limit=-4)
        rows.append(row)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        print(
            i,
            model,
            how,
            row.get("error") or f"{row['allocated_bytes'] / 2**30:.3f} {row['seconds']:.2f} s",
            flush=True,
        )
        options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
