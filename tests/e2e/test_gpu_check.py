"""The check of a GPU's paths runs, on a processor: some of its checks, a file with them, and what is said without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow  # minutes of a benchmark, whose parts have tests of their own

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"
FEW = (
    "packing, alone|attention in segments|values in 3 bits|rule of adafactor|rounding by chance|flash attention"
    "|grid, full fp32|clipping by the norm"
)


def gpu_check(*words, environment):
    return subprocess.run([sys.executable, SCRIPT, *words], env=environment, capture_output=True, text=True)


def test_checks_run_on_a_processor_and_leave_a_file(environment, tmp_path):
    out = tmp_path / "made.json"
    done = gpu_check("--device", "cpu", "--quick", "--only", FEW, "--out", out, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(out.read_text())
    passed = {row["name"]: row["passed"] for row in made["rows"]}
    assert passed.pop("flash attention, bf16") is None and passed.pop("flash attention, fp16") is None
    assert len(passed) == 9 and all(passed.values()), passed
    assert made["versions"]["torch"] and made["grid"]["error"]["rows"] == 1
    assert len(done.stdout.splitlines()) >= len(made["rows"])


def test_a_check_that_fails_is_told_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check as script
    from checks.common import Check, Wrong

    def wrong(at):
        raise Wrong("is not what it should be")

    table = {"first": Check(wrong), "second": Check(lambda at: {"error": 0.0})}
    monkeypatch.setattr(script, "table", lambda quick: table)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--out", str(tmp_path / "made.json")])
    assert script.main() == 1
    first, second = json.loads((tmp_path / "made.json").read_text())["rows"]
    assert first["passed"] is False and "is not what it should be" in first["error"] and "wrong" in first["traceback"]
    assert second["passed"] is True
    assert "1 passed, 1 failed" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing(environment):
    done = gpu_check(environment=environment)
    assert done.returncode == 2 and "finds no CUDA device" in done.stderr


def test_hidden_share_is_the_part_of_copies_beside_kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from checks.overlap import hidden_share

    kernels = [(0.0, 4.0), (3.0, 5.0), (8.0, 9.0)]
    assert hidden_share([(4.0, 8.0)], kernels) == 1 / 4
    assert hidden_share([(1.0, 3.0), (4.0, 6.0)], kernels) == 3 / 4
    assert hidden_share([], kernels) == 0
