"""What computing again and offloading cost and save: memory and time of the 135M model on this CPU, by number and kind.

    python benchmarks/checkpointing.py [--model MODEL] [--rounds 10]      writes benchmarks/results/checkpointing-cpu.json,
                                       docs/checkpointing.svg and the tables of docs/*/concepts/{checkpointing,activation_offload}.md

Full fine-tuning in bf16 on one packed micro-batch of 1,024 tokens in five sequences, as the planner would train it. One
model is stepped in all ways in turn, and of a way's steps the one counts that took least processor time, of all threads:
neighbours on a machine add to it far less than to the time on the clock, which the result file has too. Memory is the ledger's peak of one step beside
the prediction; of the time all of a step is counted, the update too.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accuracy_cpu import commit, machine

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "checkpointing-cpu.json"
DOCS = HERE.parent / "docs"
LENGTHS = (500, 250, 150, 80, 44)
BLOCKS = (0, 5, 10, 15, 20, 25, 30)
WAYS: dict[str, tuple[int, str, str]] = {  # blocks, kind, place
    **{f"{k} blocks": (k, "block", "") for k in BLOCKS},
    "attention": (30, "attention", ""),
    "mlp": (30, "mlp", ""),
    "selective": (30, "selective", ""),
    "nested": (30, "nested", ""),
    "on disk": (30, "block", "disk"),
}
BASE = "0 blocks"


def measure(model: str, rounds: int) -> list[dict[str, Any]]:
    """Rows of all ways, in this process."""
    import torch

    from finefit import assets, ledger, loop, models, predict, trace
    from finefit.build import build
    from finefit.candidates import rewrite
    from finefit.layout import Micro
    from finefit.nn.optimizers import Optimizing
    from finefit.spec import resolve_model
    from finefit.techniques import (
        ActivationOffload,
        Checkpointing,
        Clipping,
        FusedLoss,
        FusedOps,
        Packing,
        Precision,
        Technique,
    )  # fmt: skip

    folder = assets.model_folder(model).folder
    spec, used = (
        resolve_model(str(folder)),
        (Precision("bf16"), FusedOps(), Packing(), FusedLoss(256), Clipping()),
    )
    run = build(models.config_of(folder), used, models.fill_from(folder), torch.device("cpu"), Optimizing())
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, spec.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    batch = run.collate([(row, [int(4 * i >= 3 * len(row)) for i in range(len(row))]) for row in ids])
    micro = Micro(batch.ids_bs.numel(), max(LENGTHS), len(batch.label_l))

    def on(techniques: Sequence[Technique]) -> None:
        """Forwards of all modules as they were, then these techniques."""
        for module in run.model.modules():
            module.__dict__.pop("forward", None)
        for technique in techniques:
            technique.apply(run)

    rows = []
    for says, (blocks, kind, place) in WAYS.items():
        way: list[Technique] = [Checkpointing(blocks, kind)] if blocks else []  # type: ignore[arg-type]
        way += [ActivationOffload(place)] if place else []  # type: ignore[arg-type]
        on(way)
        seen = ledger.Ledger()
        trace.run_step(run, batch, seen, 1)
        run.optimizer.zero_grad(set_to_none=True)
        found = seen.moments()
        peak = max(found, key=lambda moment: sum(found[moment].values()))
        told = predict.footprint(rewrite(spec, micro, (*used, *way)))
        rows.append({
            "way": says, "blocks": blocks, "kind": kind, "place": place, "techniques": [t.describe() for t in way],
            "peak_bytes": sum(n for c, n in found[peak].items() if c != "input"), "moment": peak,
            "predicted_bytes": sum(n for c, n in told.moments[told.peak_moment].items() if c != "input"),
            "steps_s": [], "processor_s": [], "way_of": way,
        })  # fmt: skip
    for turn in range(rounds + 1):  # the first warms up
        for row in rows if turn else rows[:1]:
            on(row["way_of"])
            started, busy = time.perf_counter(), time.process_time()
            loop.optimizer_step(run, [batch], 1e-4)
            row["steps_s"].append(time.perf_counter() - started)
            row["processor_s"].append(time.process_time() - busy)
            print(
                f"{row['way']}: {row['steps_s'][-1]:.2f} s, {row['processor_s'][-1]:.2f} s of processors, {row['peak_bytes'] / 2**20:.0f} MiB",
                file=sys.stderr,
                flush=True,
            )
    rows[0]["steps_s"], rows[0]["processor_s"] = rows[0]["steps_s"][1:], rows[0]["processor_s"][1:]
    base = next(min(row["processor_s"]) for row in rows if row["way"] == BASE)
    for row in rows:
        del row["way_of"]
        row["times"] = min(row["processor_s"]) / base
    return rows


# --- the figure and the tables


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Peak and time over the number of blocks, each against what it is without."""
    from finefit.report.svg import ticks

    curve = [row for row in rows if row["way"] in {f"{k} blocks" for k in BLOCKS}]
    width, height, left, bottom, top = 640, 320, 60, 44, 36
    most, deepest = max(row["times"] for row in curve) * 1.05, curve[-1]["blocks"]

    def x(blocks: float) -> float:
        return left + (width - left - 20) * blocks / deepest

    def y(share: float) -> float:
        return height - bottom - (height - top - bottom) * share / most

    style = (
        "<style>text{font:12px system-ui,sans-serif;fill:#24292f}</style><rect width='100%' height='100%' fill='#fff'/>"
    )
    out = [f"<line x1='{left}' x2='{width - 20}' y1='{y(t):.1f}' y2='{y(t):.1f}' stroke='#d0d7de'/>"
           f"<text x='{left - 8}' y='{y(t) + 4:.1f}' text-anchor='end'>{t:g}</text>" for t in ticks(0, most)]  # fmt: skip
    out += [f"<text x='{x(k):.1f}' y='{height - 24}' text-anchor='middle'>{k}</text>" for k in BLOCKS]
    out.append(f"<text x='{width / 2}' y='{height - 6}' text-anchor='middle'>blocks checkpointed of {deepest}</text>")
    kinds = (("processor time of a step", "#D55E00", lambda row: row["times"]),
             ("peak memory", "#0072B2", lambda row: row["peak_bytes"] / curve[0]["peak_bytes"]))  # fmt: skip
    for place, (says, colour, of) in enumerate(kinds):
        corners = " ".join(f"{x(row['blocks']):.1f},{y(of(row)):.1f}" for row in curve)
        out.append(f"<polyline points='{corners}' fill='none' stroke='{colour}' stroke-width='2'/>")
        out += [f"<circle cx='{x(row['blocks']):.1f}' cy='{y(of(row)):.1f}' r='3' fill='{colour}'/>" for row in curve]
        out.append(f"<text x='{left + 10 + 240 * place}' y='20' style='fill:{colour}'>{says}, none = 1</text>")
    return f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}'>{style}{''.join(out)}</svg>\n"


WORDS = {
    "en": ("| what | peak | predicted | processor time |", "none", "{k} of {n} blocks", {
        "attention": "attention of all", "mlp": "MLP of all", "selective": "selective, all", "nested": "nested, all",
        "on disk": "all, inputs on disk",
    }, "{machine}, {date}; {tokens:,} tokens, full fine-tuning in bf16; time against none, least of {n} interleaved steps; load of the machine {load}."),
    "zh": ("| 方式 | 峰值 | 预测 | 处理器时间 |", "不重算", "{k} / {n} 块", {
        "attention": "所有块的注意力", "mlp": "所有块的 MLP", "selective": "selective，所有块", "nested": "nested，所有块",
        "on disk": "所有块，输入在磁盘",
    }, "{machine}，{date}；{tokens:,} 个词元，bf16 全参数微调；时间与不重算相比，取 {n} 次交错步中最少的；机器负载 {load}。"),
}  # fmt: skip
SHOWN: dict[str, Callable[[dict[str, Any]], bool]] = {
    "checkpointing": lambda row: not row["place"],
    "activation_offload": lambda row: bool(row["place"]) or row["way"] in (BASE, "30 blocks", "nested"),
}


def table(made: dict[str, Any], page: str, language: str) -> str:
    """Rows of one page in one language, and what they were measured on."""
    head, none, some, finer, caption = WORDS[language]
    rows = [row for row in made["rows"] if SHOWN[page](row)]
    lines = [head, "|---|---:|---:|---:|"]
    for row in rows:
        says = finer.get(row["way"]) or (some.format(k=row["blocks"], n=BLOCKS[-1]) if row["blocks"] else none)
        peak, told = (f"{row[key] / 2**20:.1f} MiB" for key in ("peak_bytes", "predicted_bytes"))
        lines.append(f"| {says} | {peak} | {told} | {row['times']:.2f} |")
    about = {
        "machine": made["machine"],
        "date": made["date"],
        "tokens": sum(LENGTHS),
        "n": len(rows[0]["steps_s"]),
        "load": made["load"],
    }
    return "\n".join([*lines, "", caption.format(**about)])


def write(made: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(made, indent=1) + "\n")
    (DOCS / "checkpointing.svg").write_text(picture(made["rows"]))
    for language in WORDS:
        for name in SHOWN:
            page = DOCS / language / "concepts" / f"{name}.md"
            marks = r"<!-- measured -->\n.*?(<!-- /measured -->)"
            before, mark, after = re.split(marks, page.read_text(), maxsplit=1, flags=re.S)
            page.write_text(f"{before}<!-- measured -->\n{table(made, name, language)}\n{mark}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--one", action="store_true", help="measure in this process and print it")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.model, given.rounds)))
        return
    from finefit.environment import STEADY

    command = [sys.executable, __file__, "--model", given.model, "--rounds", str(given.rounds), "--one"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **STEADY})
    if done.returncode:
        raise SystemExit("the measurement failed")
    made = {
        "commit": commit(), "machine": machine(), "load": round(os.getloadavg()[2], 1), "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("torch", "transformers")}, "rows": json.loads(done.stdout),
    }  # fmt: skip
    write(made)


if __name__ == "__main__":
    main()
