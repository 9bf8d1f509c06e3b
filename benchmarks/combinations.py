"""Combinations of techniques drawn by chance: do they run, are they exact, what was predicted and what was measured.

    python benchmarks/combinations.py [--count 60] [--model FOLDER]        writes benchmarks/results/combinations-cpu.json

The draw of ``tests/memory/test_combinations.py``: tiny models in the shapes of three families, two steps each, and ten of the
real model where its folder is given, one step each (their bytes alone: the plain run would not tell more). ``gradients``
is the largest relative error of any tensor, in fp32 against the plain run, in fewer bits against the plain run in fp32;
``gradients_of_plain`` is what the plain run in the same types is off by. ``off`` is the predicted peak beyond that of the
rehearsed worst micro-batch, ``off_in_steps`` beyond that of the steps themselves.
"""

import argparse
import json
import sys
import time
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from accuracy_cpu import commit, machine  # noqa: E402

RESULTS = HERE / "results" / "combinations-cpu.json"
REAL, OFTEN = 10, 0.95


def row(one: Any) -> dict[str, Any]:
    import looked_at

    exact = looked_at.exactness(one)
    return {
        **bytes_of(one), "loss": exact.loss, "gradients": exact.gradients, "gradients_of_plain": exact.of_plain,
        "weights": exact.weights,
    }  # fmt: skip


def bytes_of(one: Any) -> dict[str, Any]:
    import looked_at

    found = looked_at.bytes_of(one)
    return {
        "model": one.subject.name, "settings": dict(one.settings), "techniques": [t.to_json() for t in one.techniques],
        "states_exact": found.predicted_states == found.measured_states, "predicted_peak": found.predicted_peak,
        "measured_peak": found.measured_peak, "off": found.off, "off_in_steps": found.off_in_steps,
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "count": len(rows), "states_exact": sum(r["states_exact"] for r in rows),
        "peak_within_3_percent": sum(abs(r["off"]) <= 0.03 for r in rows), "lowest": min(r["off"] for r in rows),
        "highest": max(r["off"] for r in rows), "lowest_in_steps": min(r["off_in_steps"] for r in rows),
    }  # fmt: skip


def main() -> None:
    import drawn

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--model", type=Path, help="the real model's folder")
    given = parser.parse_args()
    draws = drawn.Draws(drawn.tiny_subjects(), given.seed, most_traced=5)
    rows = []
    for number, one in enumerate(islice(draws, given.count)):
        rows.append(row(one))
        print(f"{number}: {100 * rows[-1]['off']:+.3f} %, gradients {rows[-1]['gradients']:.1e}", flush=True)
    found = {"tiny": summary(rows)}
    found["tiny"]["gradients_in_fp32"] = max((r["gradients"] for r in rows if not r["gradients_of_plain"]), default=0.0)
    if given.model:
        of_real = drawn.Draws((drawn.real_subject(given.model),), given.seed, 0, steps=1, sizes=(1,))
        real = [bytes_of(one) for one in islice(of_real, REAL)]
        found["real"], rows = summary(real), rows + real
    made = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d"), "machine": machine(), "seed": given.seed,
        "versions": {name: version(name) for name in ("torch", "transformers")}, "python": sys.version.split()[0],
    }  # fmt: skip
    refused = dict(draws.refused.most_common())
    RESULTS.write_text(json.dumps({**made, "summary": found, "refused": refused, "rows": rows}, indent=1) + "\n")
    whole = all(one["states_exact"] == one["count"] for one in found.values())
    near = all(one["peak_within_3_percent"] >= OFTEN * one["count"] for one in found.values())
    raise SystemExit(not (whole and near))


if __name__ == "__main__":
    main()
