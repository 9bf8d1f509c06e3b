"""Every path of finefit that a CUDA device runs, checked in one call of some minutes, and predictions beside what is measured.

    python benchmarks/gpu_check.py                          writes benchmarks/results/gpu-check.json
    python benchmarks/gpu_check.py --device cpu --quick     what makes sense on a processor, with tiny shapes
    python benchmarks/gpu_check.py --list                   the checks' names

Needs no network: models are made from their shapes with random weights. A check that fails is told, with the end of its
traceback in the file, and the others go on. Exit code 1 if any failed, 2 if the device is not there.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
RESULTS = HERE / "results" / "gpu-check.json"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "triton", "peft", "numpy")


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return {**found, "python": sys.version.split()[0]}


def missing(device: str) -> str:
    """Why nothing can be checked there; empty if it can."""
    try:
        import torch
        import transformers  # noqa: F401 (whether it is there)
    except ImportError as error:
        return f"{error}: pip install torch transformers safetensors tokenizers jinja2"
    if device == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return f"torch {torch.__version__} ({built}) finds no CUDA device: --device cpu --quick checks what a CPU can"
    return ""


def head(device: str) -> dict[str, Any]:
    import torch

    from accuracy_cpu import commit, machine

    found: dict[str, Any] = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "versions": versions()}
    if device == "cuda":
        torch.zeros(1, device="cuda")
        free, total = torch.cuda.mem_get_info()
        return {
            **found, "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "total_bytes": total,
            "context_bytes": total - free - torch.cuda.memory_reserved(), "cores": len(os.sched_getaffinity(0)),
        }  # fmt: skip
    return {**found, "device": machine()}


def table(quick: bool) -> dict[str, Any]:
    """All checks in the order they are made: what tells most first."""
    from checks import grid, numbers, offloads, overlap, techniques, whole_run

    return {
        **numbers.CHECKS, **techniques.CHECKS, **offloads.CHECKS, **overlap.CHECKS, **whole_run.CHECKS,
        **grid.checks(quick),
    }  # fmt: skip


def one(check: Any, at: Any) -> dict[str, Any]:
    """The outcome of a check, whatever happens in it."""
    from checks.common import forget

    forget(at.device)
    started = time.perf_counter()
    try:
        row = {"passed": True, "figures": check.run(at)}
    except Exception as error:  # the others go on
        tail = "".join(traceback.format_exc().splitlines(keepends=True)[-14:])
        row = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000], "traceback": tail}
    return {**row, "seconds": round(time.perf_counter() - started, 3)}


def said(name: str, row: dict[str, Any]) -> str:
    """One line of a check."""
    if row["passed"] is None:
        return f"  --  {name}: {row['error']}"
    outcome = "  ok  " if row["passed"] else "WRONG "
    figures = {key: value for key, value in row.get("figures", {}).items() if not key.endswith(("_bytes", "_s"))}
    numbers = {key: value for key, value in figures.items() if isinstance(value, float | int)}
    told = " ".join(f"{key}={value:.3g}" for key, value in numbers.items()) if row["passed"] else row["error"][:300]
    return f"{outcome}{row['seconds']:6.1f} s  {name}: {told}".replace("\n", " ")


def grid_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    from checks.grid import summary

    return summary([row for row in rows if row["name"].startswith("grid")])


def checked(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All rows; the file is written after each, so that what is known stays known."""
    import torch

    from checks.common import At

    at = At(torch.device(options.device), options.quick, folder)
    rows: list[dict[str, Any]] = []
    begun, about = time.perf_counter(), head(options.device)
    for name, check in table(options.quick).items():
        if not all(any(word in name for word in some.split("|")) for some in options.only):
            continue
        if check.cuda and not at.is_cuda:
            row: dict[str, Any] = {"passed": None, "error": "says nothing without a CUDA device", "seconds": 0.0}
        elif time.perf_counter() - begun > options.seconds:
            row = {"passed": None, "error": f"not begun within {options.seconds:g} s", "seconds": 0.0}
        else:
            row = one(check, at)
        rows.append({"name": name, **row})
        print(said(name, row), flush=True)
        made = {**about, "seconds": round(time.perf_counter() - begun, 1), "grid": grid_of(rows), "rows": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(made, indent=1) + "\n")
    for key, found in grid_of(rows).items():
        print(
            f"{key}: median {100 * found['median']:+.2f} %, worst {100 * found['worst']:+.2f} % of {found['rows']} rows"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--only", action="append", default=[], metavar="WORD[|WORD]",
                        help="checks with one of these words in their name; said twice, with one of each")  # fmt: skip
    parser.add_argument(
        "--out", type=Path, help=f"default: {RESULTS.name} beside the other results, of a GPU's whole run"
    )
    parser.add_argument("--seconds", type=float, default=450, help="no check is begun after so many")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if why := missing(options.device if not options.list else "cpu"):
        print(f"gpu_check: {why}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(table(options.quick)))
        return 0
    whole = options.device == "cuda" and not options.only and not options.quick
    with tempfile.TemporaryDirectory() as folder:
        options.out = options.out or (RESULTS if whole else Path(tempfile.gettempdir()) / RESULTS.name)
        rows = checked(options, Path(folder))
    failed = [row["name"] for row in rows if row["passed"] is False]
    left = [row["name"] for row in rows if row["passed"] is None]
    print(f"{len(rows) - len(failed) - len(left)} passed, {len(failed)} failed, {len(left)} not made: {options.out}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
