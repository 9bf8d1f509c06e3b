"""The benchmark of models larger than their memory, at a tiny shape: planned, carried out in a process, written down."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # minutes of a benchmark, whose parts have tests of their own

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "big_model.py"


@pytest.fixture(scope="module")
def results(environment, tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(SCRIPT), "--tiny", "--steps", "3", "--out", str(out)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return {path.stem.removeprefix("big_model-"): json.loads(path.read_text()) for path in out.iterdir()}


def test_both_cases_are_within_their_limit_and_near_what_was_predicted(results):
    assert set(results) == {"7b-nf4", "8b-stream"}
    for row in results.values():
        assert row["predicted_peak_bytes"] <= row["limit_bytes"]
        assert row["peak_resident_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.25)
        assert row["peak_resident_bytes"] >= row["load_peak_resident_bytes"] > 0


def test_the_loss_of_one_batch_falls(results):
    for row in results.values():
        assert len(row["losses"]) == len(row["step_s"]) == 3
        assert row["losses"] == sorted(row["losses"], reverse=True)


def test_the_planner_streams_what_does_not_fit_and_quantises_what_was_asked_for(results):
    techniques = {name: {t["name"] for t in row["techniques"]} for name, row in results.items()}
    assert "quantized_base" in techniques["7b-nf4"] and "quantized_base" not in techniques["8b-stream"]
    assert "parameter_offload" in techniques["8b-stream"]
    assert [row["streamed"] for row in (results["7b-nf4"], results["8b-stream"])] == [False, True]


def test_nothing_is_left_in_the_cache(results, home):
    assert list((home / "cache" / "finefit" / "benchmarks").glob("*")) == []
