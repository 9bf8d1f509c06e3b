"""finefit against TRL + PEFT and LLaMA-Factory on one job, in paired runs: the result file the README quotes.

    python benchmarks/speed.py --model MODEL --data demo.jsonl --python TRL=PATH --python LLaMA-Factory=PATH [--rounds 3]

Each tool runs in its own environment (the interpreter given) at its best setting of micro-batch, packing and
checkpointing, in turn, round by round, so a drifting machine drifts for all. Seconds and memory are taken in runs of
their own: reading the resident set truthfully needs an allocator that gives memory back at once, which costs time; both
kinds of run use the same allocator settings for every tool. Writes benchmarks/results/speed-cpu.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from accuracy_cpu import commit, machine

HERE = Path(__file__).parent
JOB = "SmolLM2-135M-Instruct, LoRA r16 on all linears, 512 stdlib-docstrings, global batch 16, max length 1024, bf16"
SETTINGS = {
    "finefit": [HERE / "finefit_run.py", "--micro-batch-tokens", "1024"],
    "TRL": [HERE / "peers" / "trl_run.py", "--micro-batch", "1"],
    "TRL padding-free": [HERE / "peers" / "trl_run.py", "--micro-batch", "2", "--packing", "padding_free"],
    "LLaMA-Factory": [HERE / "peers" / "llamafactory_run.py", "--micro-batch", "1"],
    "LLaMA-Factory packing": [HERE / "peers" / "llamafactory_run.py", "--micro-batch", "1", "--packing", "packing"],
}


def one(tool: str, python: str, given: argparse.Namespace, measure: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [python, *map(str, SETTINGS[tool]), "--model", given.model, "--data", given.data]
        command += ["--measure", measure, "--steps", str(steps), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{tool} failed:\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--python", action="append", default=[], metavar="TOOL=PATH", help="a peer's interpreter")
    parser.add_argument("--tools", default=",".join(SETTINGS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "speed-cpu.json")
    given = parser.parse_args()
    pythons = {"finefit": sys.executable, **dict(word.split("=", 1) for word in given.python)}
    tools = [tool for tool in given.tools.split(",") if tool.partition(" ")[0] in pythons]
    speeds: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools}
    for number in range(given.rounds):
        for tool in tools:
            speeds[tool].append(one(tool, pythons[tool.partition(" ")[0]], given, "speed", given.steps))
            print(f"round {number + 1}: {tool}: {speeds[tool][-1]['real_tokens_per_s']:.0f} tokens/s", flush=True)
    rows = []
    for tool in tools:
        memory = one(tool, pythons[tool.partition(" ")[0]], given, "memory", given.steps)
        print(f"{tool}: {memory['peak_above_model_bytes'] / 1e6:.0f} MB above the loaded model", flush=True)
        rows.append(row(tool, speeds[tool], memory))
    given.out.write_text(json.dumps(rows, indent=1) + "\n")


def row(tool: str, speeds: list[dict[str, Any]], memory: dict[str, Any]) -> dict[str, Any]:
    rates = sorted(s["real_tokens_per_s"] for s in speeds)
    return {
        "job": JOB, "tool": tool.partition(" ")[0], "tool_version": speeds[0]["tool_version"],
        "packages": speeds[0]["packages"], "setting": speeds[0]["setting"],
        "real_tokens_per_s": {"min": rates[0], "median": statistics.median(rates), "max": rates[-1]},
        "real_tokens_per_s_of_rounds": [s["real_tokens_per_s"] for s in speeds],
        "peak_above_model_bytes": memory["peak_above_model_bytes"], "losses": speeds[0]["losses"],
        "machine": machine(), "commit": commit(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


if __name__ == "__main__":
    main()
