"""Predicted against published memory: every case that can be expressed, by source, grade and technique.

    python benchmarks/accuracy.py [--cases FILE.jsonl] [--out PREDICTIONS.jsonl] [--only WORD]

Without ``--cases`` it takes the project's copy of the facts, benchmarks/published.jsonl. It writes a line a case to
``--out``: ``{"id", "peak_bytes", "fits", "footprint", "refused"}``, the peak in the reading the case published.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from finefit.errors import FinefitError
from finefit.foreign import ForeignRun
from finefit.hardware import CONTEXT_BYTES
from finefit.witness import Simulated, Simulator, nccl_bytes, workspace_bytes

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from published import Refused, run_of  # noqa: E402
from published_models import ROW, config_of  # noqa: E402

GIB = 2**30
CASES = HERE / "published.jsonl"


def predict(record: Mapping[str, Any], ask: Any) -> dict[str, Any]:
    """One line of the output."""
    line: dict[str, Any] = {"id": record["id"], "peak_bytes": None, "fits": None, "footprint": None, "refused": None}
    try:
        config = config_of(record["model"])
        if config is None:
            raise Refused(f"no config of {record['model']} is known")
        run = run_of(record, config)
        if config.get("n_positions") == ROW:
            config["n_positions"] = run.max_length
        found: Simulated = ask(config, run, workspace_bytes(record["gpu"] or ""))
    except (Refused, FinefitError, ValueError, KeyError, TypeError) as error:
        return {**line, "refused": f"{error}" or type(error).__name__}
    # An allocator that the device refuses gives back what it keeps: it never holds more than there is.
    room = round((record["gpu_total_gib"] or 1024) * GIB) - CONTEXT_BYTES - nccl_bytes(run.spread.devices)
    reserved = min(found.reserved_bytes, max(room, found.capacity_bytes))
    driver = reserved + CONTEXT_BYTES + nccl_bytes(run.spread.devices)
    readings = {"max_allocated": found.allocated_bytes, "active (peak)": found.allocated_bytes,
                "max_reserved": reserved, "nvidia_smi": driver}  # fmt: skip
    kind = record["memory_kind"] or "max_allocated"
    line["peak_bytes"] = readings.get(kind, reserved)
    total = record["gpu_total_gib"]
    needed = found.needs(CONTEXT_BYTES, run.spread.devices)
    line["fits"] = None if not total else needed <= total * GIB
    line["needed_bytes"] = needed
    line["footprint"] = found.footprint.to_json()
    line["readings"] = {"allocated": found.allocated_bytes, "reserved": reserved,
                        "capacity": found.capacity_bytes, "driver": driver}  # fmt: skip
    line["seconds"] = round(found.seconds, 2)
    line["assumed"] = list(run.notes)
    return line


def predict_all(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with Simulator() as simulator:
        ask = Asked(simulator)
        lines = []
        for record in records:
            lines.append(predict(record, ask))
            print(".", end="", file=sys.stderr, flush=True)
        return lines


class Asked:
    """Answers of a simulator, each question once; runs that differ in words only are one."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator, self.known = simulator, {}

    def __call__(self, config: Mapping[str, Any], run: ForeignRun, workspace: int) -> Simulated:
        run = replace(run, model="", notes=(), accumulation=min(run.accumulation, 3))
        key = json.dumps([config, run.to_json(), workspace], sort_keys=True)
        if key not in self.known:
            try:
                self.known[key] = self.simulator.ask(config, run, workspace)
            except FinefitError as error:
                self.known[key] = error
        found = self.known[key]
        if isinstance(found, FinefitError):
            raise found
        return found


def error_of(record: Mapping[str, Any], line: Mapping[str, Any]) -> float | None:
    """Signed distance from the published band, over the published peak; None where there is nothing to compare."""
    if record["peak_gib"] is None or line["peak_bytes"] is None or record["scope"] != "step-peak":
        return None
    ours, low, high = line["peak_bytes"] / GIB, record["peak_gib_min"], record["peak_gib_max"]
    low, high = (x if x is not None else record["peak_gib"] for x in (low, high))
    return (ours - high if ours > high else ours - low if ours < low else 0.0) / record["peak_gib"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    records = [json.loads(line) for line in options.cases.read_text().splitlines() if line.strip()]
    records = [r for r in records if options.only in f"{r['id']} {r['group']} {r['grade']}"]
    started = time.perf_counter()
    shares = [records[i :: options.jobs] for i in range(options.jobs)]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = {line["id"]: line for lines in pool.map(predict_all, shares) for line in lines}
    lines = [found[record["id"]] for record in records]
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summarise(records, lines)
    if options.cases == CASES and not options.only:
        from accuracy_report import write

        write(list(zip(records, lines, strict=True)))
    print(f"{len(records)} cases in {time.perf_counter() - started:.0f} s")


def summarise(records: list[dict[str, Any]], lines: list[dict[str, Any]]) -> None:
    pairs = list(zip(records, lines, strict=True))
    for grade in "ABC":
        errors = [e for r, line in pairs if r["grade"] == grade and (e := error_of(r, line)) is not None]
        if errors:
            print(f"grade {grade}: {_spread(errors)}")
        right, wrong = verdicts((r, line) for r, line in pairs if r["grade"] == grade)
        if right + len(wrong):
            print(f"   verdicts {right} of {right + len(wrong)} right; wrong: {wrong[:12]}")
    for group in sorted({r["group"] for r in records}):
        errors = [e for r, line in pairs if r["group"] == group and r["grade"] in "AB"
                  and (e := error_of(r, line)) is not None]  # fmt: skip
        refused = sum(line["refused"] is not None for r, line in pairs if r["group"] == group)
        print(f"{group:22} {_spread(errors) if errors else '–'}  refused {refused}")


def is_right(record: Mapping[str, Any], line: Mapping[str, Any]) -> bool | None:
    """Whether fits or not was said right; every published step peak is a fit on its card. None: nothing was said."""
    if line["fits"] is None or record["scope"] not in ("verdict", "step-peak"):
        return None
    return bool(line["fits"] != bool(record["oom"]))


def verdicts(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> tuple[int, list[str]]:
    said = [(record["id"], is_right(record, line)) for record, line in pairs]
    return sum(right is True for _, right in said), [name for name, right in said if right is False]


def _spread(errors: list[float]) -> str:
    sizes = sorted(abs(e) for e in errors)
    within = sum(e <= 0.08 for e in sizes) / len(sizes)
    return (
        f"n {len(sizes)}, median {statistics.median(sizes):.1%}, mean signed {statistics.mean(errors):+.1%}, "
        f"within 8 %: {within:.0%}, worst {sizes[-1]:.0%}"
    )


if __name__ == "__main__":
    main()
