"""Models that are larger than the memory they may use, trained: what the process really takes, and what was planned.

    python benchmarks/big_model.py [CASE] [--steps 4] [--keep] [--tiny] [--out FOLDER]

Cases, each written to benchmarks/results/big_model-CASE.json:

- 7b-nf4: Llama 2 7B's shape, random weights made and quantised tensor by tensor, QLoRA, at most 6 GiB resident;
- 8b-stream: Llama 3.1 8B's shape in bf16, random weights written once as safetensors shards into the user's cache (and
  deleted, unless --keep), streamed from there, LoRA, at most 3 GiB resident.

The planner is asked for a plan within 92 % of that, less what the program takes beside its tensors (of what kernels take
for themselves no plan knows), and its techniques are carried out by the parts of finefit's own loop, in a process of its own whose highest resident memory (VmHWM) is read: one
batch of 512 random tokens, again and again, so the loss must fall. Weights of the second case are pieces of one pool of
random numbers: nothing else is as fast. --tiny is for the tests.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accuracy_cpu import commit, machine
from finefit import phases
from finefit.batches import Uniform
from finefit.candidates import Question, rewrite
from finefit.environment import STEADY
from finefit.files import user_cache
from finefit.hardware import HardwareSpec
from finefit.plan import Plan
from finefit.search import search
from finefit.spec import JobSpec, ModelSpec
from finefit.techniques import from_json
from finefit.units import format_bytes, parse_budget

HERE = Path(__file__).parent
GIB, MIB = 2**30, 2**20
SHARD = 2**30  # bytes of weights to a file, at most one tensor more
HEADROOM = 0.08
# What is freed goes back to the system at once (mallopt(3)): glibc's heap would keep gradients and activations side by side.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
RATE = 1e-3
LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
SEVEN = {
    **LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 32_000,
}  # fmt: skip
EIGHT = {**SEVEN, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128_256}
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 1000,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    config: dict[str, Any]
    method: str
    limit_bytes: int
    """Resident, program and all."""
    length: int = 512
    from_files: bool = False

    @property
    def tiny(self) -> "Case":
        """The same of a model that has a hundredth of a percent of it, in as little beside the program."""
        limit = round((PROGRAM + (26 if self.from_files else 28) * MIB) / (1 - HEADROOM))
        return replace(self, config={**self.config, **SMALL}, limit_bytes=limit, length=64)


PROGRAM = phases.PROGRAM + phases.WARM
CASES = {
    "7b-nf4": Case(SEVEN, "qlora", 6 * GIB),
    "8b-stream": Case(EIGHT, "lora", 3 * GIB, from_files=True),
}


def planned(case: Case, name: str) -> tuple[Plan, int]:
    """The plan, and the bytes it foresees for the process."""
    model = ModelSpec.from_config(case.config, name)
    hardware = HardwareSpec.of_cpu()
    pins = (("parameter_offload", "disk"),) if case.from_files else ()  # what is measured, whatever else would do
    job = JobSpec(method=case.method, global_batch_size=1, max_length=case.length, longest=case.length, pins=pins)  # type: ignore[arg-type]
    tensors = int(case.limit_bytes * (1 - HEADROOM)) - PROGRAM
    budget = parse_budget(f"{tensors // MIB}MiB", hardware.memory_bytes)
    batches = Uniform(1, case.length)
    plan = search(Question(model, hardware, job, batches, budget))
    layout = rewrite(model, batches.work(1, 0, False).largest[0], plan.techniques)
    moments = {moment: parts for moment, parts in plan.predicted.moments.items() if moment != "merge"}
    return plan, phases.needed(phases.host(layout, moments, "cpu"))[1]


def written(case: Case, folder: Path) -> None:
    """Shards of random weights of the case's shape in ``folder``, with its config."""
    from finefit.adapter import write_tensors

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.config, indent=1))
    for i, tensors in enumerate(_shards(case)):
        write_tensors(folder / f"model-{i:05d}.safetensors", tensors)


def _shards(case: Case) -> Iterator[dict[str, Any]]:
    import torch

    pool = torch.randn(2**22 + 3, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()  # an odd length
    shard: dict[str, Any] = {}
    taken = n_bytes = 0
    for p in ModelSpec.from_config(case.config, "written").parameters():
        if p.role == "norm":
            shard[p.name] = torch.ones(p.shape, dtype=torch.bfloat16)
        else:
            times = -(-(taken + p.numel) // len(pool))
            shard[p.name] = pool.repeat(times)[taken : taken + p.numel].view(p.shape).clone()
            taken = (taken + p.numel) % len(pool)
        n_bytes += 2 * p.numel
        if n_bytes >= SHARD:
            yield shard
            shard, n_bytes = {}, 0
    if shard:
        yield shard


def child(asked: dict[str, Any]) -> dict[str, Any]:
    """Train by the techniques; what one process saw of it."""
    import torch

    from finefit import models
    from finefit.build import build
    from finefit.loop import optimizer_step
    from finefit.nn.optimizers import Optimizing

    config, fill = models.config_from(asked["config"]), models.fill_random(0)
    if asked["folder"]:
        folder = Path(asked["folder"])
        config, fill = models.config_of(folder), models.fill_from(folder)
    started = time.perf_counter()
    techniques = [from_json(t) for t in asked["techniques"]]
    run = build(config, techniques, fill, torch.device("cpu"), Optimizing(RATE))
    loaded, at_load = time.perf_counter() - started, resident()
    ids = torch.randint(config.vocab_size, (asked["length"],), generator=torch.Generator().manual_seed(1)).tolist()
    batches = [run.collate([(ids, [1] * len(ids))])]
    losses, seconds = [], []
    for step in range(asked["steps"]):
        started = time.perf_counter()
        losses.append(optimizer_step(run, batches, RATE)[0])
        seconds.append(time.perf_counter() - started)
        print(
            f"step {step + 1}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s, {format_bytes(resident())}", file=sys.stderr
        )
    return {
        "parameters": models.num_parameters(run.model), "losses": losses, "step_s": seconds, "load_s": loaded,
        "load_peak_resident_bytes": at_load, "peak_resident_bytes": resident(), "evidence": run.evidence,
    }  # fmt: skip


def resident() -> int:
    """The highest there was of this process, pages of files that it mapped too (proc(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measured(case: Case, name: str, steps: int, keep: bool) -> dict[str, Any]:
    plan, predicted = planned(case, name)
    folder = user_cache("benchmarks") / name
    asked = {
        "config": case.config, "techniques": [t.to_json() for t in plan.techniques], "length": case.length, "steps": steps,
        "folder": str(folder) if case.from_files else "",
    }  # fmt: skip
    try:
        if case.from_files and not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            written(case, folder)
            (folder / "whole").touch()
        done = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(asked)], env={**os.environ, **STEADY, **RETURNING}, stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    found = json.loads(done.stdout)
    if not all(map(math.isfinite, found["losses"])) or found["losses"][-1] >= found["losses"][0]:
        raise SystemExit(f"{name}: the loss does not fall: {found['losses']}")
    step = sorted(found["step_s"])[len(found["step_s"]) // 2]
    return {
        "method": case.method, "streamed": plan.technique("parameter_offload") is not None, "length": case.length, "limit_bytes": case.limit_bytes,
        "techniques": [{"name": t.name, "says": t.describe()} for t in plan.techniques],
        "predicted_peak_bytes": predicted, "predicted_step_s": plan.seconds_per_step, "steps_per_hour": 3600 / step, **found,
    }  # fmt: skip


HEADS = {
    "en": "| model | method | resident at most | measured | predicted | loss, first → last step | steps an hour |",
    "zh": "| 模型 | 方法 | 常驻上限 | 实测 | 预测 | 损失，第一步 → 最后一步 | 每小时步数 |",
}


def into_pages(results: Path) -> None:
    """The table of the results into the concept's pages, between its markers."""
    rows = [json.loads(path.read_text("utf-8")) for path in sorted(results.glob("big_model-*.json"))]
    for language, head in HEADS.items():
        lines = [head, "|---|---|---:|---:|---:|---|---:|"]
        for row in rows:
            limit, peak, said = (
                format_bytes(row[key]) for key in ("limit_bytes", "peak_resident_bytes", "predicted_peak_bytes")
            )
            first, last = row["losses"][0], row["losses"][-1]
            name, method = row["case"], f"{row['method']}, {'disk' if row['streamed'] else '-'}"
            lines.append(
                f"| {name} | {method} | {limit} | {peak} | {said} | {first:.2f} → {last:.2f} | {row['steps_per_hour']:.0f} |"
            )
        page = HERE.parent / "docs" / language / "concepts" / "parameter_offload.md"
        place = "<!-- big -->\n" + "\n".join(lines) + "\n<!-- /big -->"
        text = re.sub(r"<!-- big -->.*?<!-- /big -->", lambda _: place, page.read_text("utf-8"), flags=re.DOTALL)  # noqa: B023
        page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--keep", action="store_true", help="leave the files of random weights in the cache")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(json.loads(given.child))))
        return
    for name in given.cases:
        case = CASES[name].tiny if given.tiny else CASES[name]
        row = measured(case, f"{name}-tiny" if given.tiny else name, given.steps, given.keep)
        result = {
            "case": name, "machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit(),
            "versions": {n: version(n) for n in ("finefit", "torch", "transformers")}, "environment": {**STEADY, **RETURNING}, **row,
        }  # fmt: skip
        (given.out / f"big_model-{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        peak, said = (format_bytes(row[key]) for key in ("peak_resident_bytes", "predicted_peak_bytes"))
        print(f"{name}: {peak} resident, {said} predicted, loss {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}, "
              f"{row['steps_per_hour']:.0f} steps an hour", flush=True)  # fmt: skip
    if given.out == HERE / "results":
        into_pages(given.out)


if __name__ == "__main__":
    main()
