"""What a run survives: every fault at every moment, and a thousand steps without growing.

    python benchmarks/reliability.py [--steps 1000] [--faults REPORT]      writes benchmarks/results/reliability-cpu.json
                                       and the tables of docs/*/reliability.md

The faults are those of tests/faults, all of them; each is a whole run of a tiny model whose losses are compared with those
of the undisturbed one. ``--faults``: they ran already, by ``PYTEST_ADDOPTS=--junitxml=REPORT make test-faults``. The soak is
one run of that model: resident memory and bytes of live tensors after each step, and the slope of a line through them, once
as many steps have gone before: by then every number of rows has come up that a product is compiled for (in 16 bits on a CPU,
256 KiB each that stay).
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accuracy_cpu import commit, machine, put_measured

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "reliability-cpu.json"
MOST_KIB_A_STEP = 10
HEADS = {
    "en": (
        "| fault | survived |",
        "| the second thousand steps of a run | its first step | highest of the first hundred | of the last hundred | slope a step |",
    ),
    "zh": (
        "| 故障 | 存活 |",
        "| 一次运行的第二个一千步 | 整个运行的第一步 | 前一百步的最高 | 后一百步的最高 | 每步斜率 |",
    ),
}
NAMES = {
    "test_out_of_memory": ("memory refused, by moment and by technique", "按时刻、按技术拒绝内存"),
    "test_real_limits": (
        "memory limited by the system (RLIMIT_DATA), taken by another, the process killed for it",
        "系统限制内存（RLIMIT_DATA）、内存被别的占用者拿走、进程因此被杀",
    ),
    "test_kill": ("killed (SIGKILL) at a random moment", "在随机时刻被杀（SIGKILL）"),
    "test_disk": ("the disk full, read-only, failing or gone", "磁盘已满、只读、出错或消失"),
    "test_another_plan": ("another plan in the middle", "中途换计划"),
    "test_generated": ("kinds of generated files, {inputs:,} inputs each", "生成的文件种类，每种 {inputs:,} 个输入"),
}
INPUTS = 2500


def run_faults(report: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "", "tests/faults", f"--junitxml={report}"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "FINEFIT_GENERATED": str(INPUTS)})


def survived_of(report: Path) -> dict[str, dict[str, int]]:
    """(survived, of) by file of tests; what this machine cannot try is left out."""
    cases = [
        (case.get("classname", "").rpartition(".")[2], not len(case))
        for case in xml.parse(report).iter("testcase")
        if case.find("skipped") is None
    ]
    survived, total = Counter(name for name, passed in cases if passed), Counter(name for name, _ in cases)
    if unknown := sorted(total.keys() - NAMES.keys()):
        raise SystemExit(f"no words for {', '.join(unknown)}")
    return {name: {"survived": survived[name], "total": n} for name, n in total.items()}


def soak(steps: int) -> dict[str, Any]:
    """Resident bytes and bytes of live tensors after each of so many steps, and before them after the first of the run."""
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny_run
    from finefit import recover, session
    from finefit.cap import Cap
    from finefit.config import load
    from finefit.events import EventLog

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model, data = tiny_run.make_model(folder / "model"), tiny_run.make_data(folder / "chats.jsonl")
        words = ["method=lora", "lora.rank=4", "train.global_batch_size=8", "train.max_length=256", f"train.steps={2 * steps}",
                 "train.save_every=100", "train.eval_every=100", "name=run", f"output_dir={folder}"]  # fmt: skip
        job = session.new(load(None, words, {"model": str(model), "data": str(data)}), None)
        cap, seen = stack.enter_context(Cap(2**40)), []

        def look(event: Any) -> None:
            if event["event"] == "step":
                seen.append((event["step"], event["rss_bytes"], cap.live_bytes))

        log = stack.enter_context(EventLog(job.folder / "events.jsonl", [look]))
        recover.carry_out(job, log, False)
        job.held.close()
    found = {}
    for place, what in ((1, "resident"), (2, "live")):
        late = [(float(row[0]), float(row[place])) for row in seen if row[0] > steps]
        tenth = len(late) // 10
        ends = {"first_bytes": highest(late[:tenth]), "last_bytes": highest(late[-tenth:])}
        found[what] = {"before_bytes": seen[0][place], **ends, "bytes_a_step": slope(late)}
    return {"steps": steps, **found}


def highest(points: Sequence[tuple[float, float]]) -> int:
    """An evaluation gives memory back, and the steps after it take it again."""
    return int(max(n_bytes for _, n_bytes in points))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line of least squares."""
    mean = [sum(axis) / len(points) for axis in zip(*points, strict=True)]
    return sum((x - mean[0]) * (y - mean[1]) for x, y in points) / sum((x - mean[0]) ** 2 for x, _ in points)


def tell(result: dict[str, Any]) -> None:
    for place, (language, (of_faults, of_soak)) in enumerate(HEADS.items()):
        lines = ["`benchmarks/results/reliability-cpu.json`:", "", of_faults, "|---|---:|"]
        for name, row in result["faults"].items():
            words = NAMES[name][place].format(inputs=INPUTS)
            lines.append(f"| {words} | {row['survived']} / {row['total']} |")
        lines += ["", of_soak, "|---|---:|---:|---:|---:|"]
        for what, words in (("resident", ("resident memory", "常驻内存")), ("live", ("live tensors", "存活张量"))):
            row = result["soak"][what]
            amounts = [f"{row[key] / 2**20:,.2f} MiB" for key in ("before_bytes", "first_bytes", "last_bytes")]
            lines.append(f"| {words[place]} | {' | '.join(amounts)} | {row['bytes_a_step'] / 2**10:.2f} KiB |")
        page = ROOT / "docs" / language / "reliability.md"
        put_measured(page, "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--faults", type=Path, help="a JUnit report of tests/faults")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = given.faults or Path(folder) / "report.xml"
        if not given.faults:
            run_faults(report)
        found = survived_of(report)
    result = {
        "machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "soak": soak(given.steps), "faults": found,
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    tell(result)
    survived, total = (sum(row[key] for row in result["faults"].values()) for key in ("survived", "total"))
    print(f"survived {survived} of {total}; {result['soak']['resident']['bytes_a_step'] / 2**10:.2f} KiB a step")
    grows = result["soak"]["resident"]["bytes_a_step"] > MOST_KIB_A_STEP * 2**10
    raise SystemExit(survived < total or grows)


if __name__ == "__main__":
    main()
