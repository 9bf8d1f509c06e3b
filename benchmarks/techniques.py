"""What each technique of a plan costs and saves by itself: memory and time of the 135M model on a CPU, setting by setting.

    python benchmarks/techniques.py [--model MODEL] [--rounds 3] [--only PAGE]     writes benchmarks/results/techniques-cpu.json
                                       and the tables between <!-- measured --> of docs/*/concepts

One job, LoRA of rank 16 in bf16 (full fine-tuning where a row says so) on the built-in data, examples of at most 512
tokens, 16 to a step; a row changes one key of it. Each row is a process of its own: the plan, the rehearsal of its
largest micro-batch under the ledger, then whole steps, of which the one counts that took least processor time of all
threads. ``resident`` is what the process has beyond the loaded libraries at its peak, in those steps.
"""

import argparse
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accuracy_cpu import commit, machine, put_measured
from lean import resident_at_most

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "techniques-cpu.json"
DOCS = HERE.parent / "docs"
MIB = 2**20
JOB = (
    "method=lora", "memory.precision=bf16", "memory.checkpointing=none", "memory.allocator=default",
    "train.max_length=512", "train.global_batch_size=16", "train.steps=20", "hardware.device=cpu",
)  # fmt: skip
PACKED = "memory.micro_batch_tokens=2048"
FULL = "method=full"
# Of a page: the rows of its table, as the settings that differ; the first is what times are told against.
PAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "accumulation": tuple((f"memory.micro_batch_tokens={n}",) for n in (8192, 4096, 2048, 1024, 512)),
    "packing": (("memory.packing=false", "memory.micro_batch_size=16"), ("memory.packing=false", "memory.micro_batch_size=4"),
                (PACKED,)),
    "fused_loss": tuple((PACKED, f"memory.loss_chunk={n}") for n in (0, 1024, 256, 64)),
    "fused_ops": ((PACKED, "memory.fused_ops=false"), (PACKED, "memory.fused_ops=true")),
    "lora": ((FULL, PACKED), *((PACKED, f"lora.rank={rank}") for rank in (64, 16, 4)), (PACKED, "lora.targets=q_proj,v_proj")),
    "clipping": ((FULL, PACKED, "train.max_grad_norm=0"), (FULL, PACKED, "train.max_grad_norm=1")),
    "allocator": ((PACKED,), (PACKED, "memory.allocator=trimmed")),
}  # fmt: skip
JOBS = {
    "en": "LoRA of rank 16 in bf16 on 16 examples of at most 512 tokens a step, or as a row says, on a CPU (`benchmarks/results/techniques-cpu.json`):",
    "zh": "CPU，bf16，秩 16 的 LoRA，每步 16 个至多 512 token 的样本，或如各行所写（`benchmarks/results/techniques-cpu.json`）：",
}
HEADS = {
    "en": "| setting | predicted peak | measured | resident | processor time of a step |",
    "zh": "| 设置 | 预测峰值 | 实测 | 常驻 | 每步处理器时间 |",
}


def measure(model: str, words: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """One row, in this process."""
    import torch

    from finefit import assets, examples, loop, models, planning, session, trainer
    from finefit.build import build
    from finefit.config import load
    from finefit.nn.optimizers import Optimizing
    from finefit.rehearse import rehearse
    from finefit.spec import resolve_model

    said = {word.partition("=")[0]: word for word in (*JOB, *words)}
    config = load(None, list(said.values()), {"model": model, "data": "stdlib-docstrings"})
    folder = assets.model_folder(model).folder
    data, hardware = examples.read_data(config, examples.tokenizer_of(folder)), planning.hardware_of(config, None)
    plan = planning.make_plan(config, resolve_model(str(folder)), hardware, data)
    job = session.Job(config, plan, hardware, data, examples.tokenizer_of(folder), folder, Path("."), None)
    before = resident_at_most()
    run = build(models.config_of(folder), plan.techniques, models.fill_from(folder), torch.device("cpu"), Optimizing())
    steps: list[tuple[float, float]] = []
    rows = [tuple(data.store[row]) for row in data.batch(1)]
    for _ in range(rounds + 1):  # the first warms up
        batches = [run.collate([rows[i] for i in group]) for group in run.split([len(ids) for ids, _ in rows])]
        started, busy = time.perf_counter(), time.process_time()
        loop.optimizer_step(run, batches, 1e-5)
        steps.append((time.perf_counter() - started, time.process_time() - busy))
    resident = resident_at_most() - before
    worst = [tuple(data.store[row]) for row in trainer._worst_rows(job)]
    measured = rehearse(run, worst, [], plan.techniques, plan.gradient_accumulation_steps)
    return {
        "settings": list(words), "predicted_bytes": _step(plan.predicted), "measured_bytes": _step(measured), "resident_bytes": resident,
        "steps_s": [s for s, _ in steps[1:]], "processor_s": [s for _, s in steps[1:]],
        "tokens": sum(len(ids) for ids, _ in rows), "techniques": [t.describe() for t in plan.techniques],
    }  # fmt: skip


def _step(footprint: Any) -> int:
    """Peak of the moments of a step."""
    from finefit.footprint import STEP

    return max(footprint.at(moment) for moment in STEP)


def one(model: str, words: tuple[str, ...], rounds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", model, "--rounds", str(rounds), "--one", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{words} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(language: str, rows: list[dict[str, Any]]) -> str:
    base = min(rows[0]["processor_s"])
    lines = [JOBS[language], "", HEADS[language], "|---|---:|---:|---:|---:|"]
    for row in rows:
        words = [word for word in row["settings"] if len(row["settings"]) == 1 or word != PACKED]
        mib = [f"{row[key] / MIB:,.1f} MiB" for key in ("predicted_bytes", "measured_bytes")]
        lines.append(
            f"| `{' '.join(words)}` | {mib[0]} | {mib[1]} | {row['resident_bytes'] / MIB:,.0f} MiB | {min(row['processor_s']) / base:.2f} × |"
        )
    return "\n".join(lines)


def tell(pages: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in pages.items():
        for language in HEADS:
            page = DOCS / language / "concepts" / f"{name}.md"
            put_measured(page, table(language, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", choices=["", *PAGES], help="one page; nothing is written")
    parser.add_argument("--one", nargs="*", default=None, help="settings of a row, in this process")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(measure(given.model, tuple(given.one), given.rounds)))
        return
    pages: dict[str, list[dict[str, Any]]] = {}
    for name, settings in PAGES.items():
        for words in settings if given.only in ("", name) else ():
            pages.setdefault(name, []).append(row := one(given.model, words, given.rounds))
            print(f"{name}: {' '.join(words)}: {row['predicted_bytes'] / MIB:.1f} of {row['measured_bytes'] / MIB:.1f} MiB, "
                  f"{row['resident_bytes'] / MIB:.0f} resident, {min(row['processor_s']):.2f} s of processors", flush=True)  # fmt: skip
    if given.only:
        return
    given.out.write_text(json.dumps({
        "job": list(JOB), "machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit(),
        "versions": {name: version(name) for name in ("torch", "transformers")}, "pages": pages,
    }, indent=1) + "\n")  # fmt: skip
    tell(pages)


if __name__ == "__main__":
    main()
