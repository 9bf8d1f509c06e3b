"""Whole runs on two real processes by the command: as one device would, and whatever happens to a rank."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

from tiny import relative_error
from tiny_run import data, events_of, losses, model  # noqa: F401 (fixtures)

SETTINGS = (
    "hardware.device=cpu", "method=full", "memory.precision=fp32", "train.global_batch_size=8", "train.save_every=2",
    "train.learning_rate=1e-3",
)  # fmt: skip
LIMIT_S = 100


def begin(folder, *words, env=()):
    command = [sys.executable, "-m", "finefit", *map(str, words), "--log-format", "plain"]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **dict(env)}
    )


def finish(process):
    """(exit code, what it printed, what it said of errors)."""
    out, error = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, error


def train(folder, model, data, *words, env=()):  # noqa: F811
    return begin(folder, "train", model, data, *SETTINGS, *words, env=env)


def wait_for(folder, step):
    until = time.monotonic() + LIMIT_S
    while not (folder / f"checkpoints/step-{step:06d}").is_dir():
        assert time.monotonic() < until
        time.sleep(0.05)


def pids_of(folder):
    """Of a run's ranks, by rank: the first was begun first."""
    found = subprocess.run(["pgrep", "-f", f"finefit.rank .*{folder.name}"], capture_output=True, text=True).stdout
    return sorted(map(int, found.split()))


def weights(folder, method="full"):
    return load_file(folder / ("model.safetensors" if method == "full" else "adapter_model.safetensors"))


def differ(one, other):
    assert one.keys() == other.keys()
    return max(relative_error(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model, data):  # noqa: F811
    folder = tmp_path_factory.mktemp("alone")
    code, _, error = finish(train(folder, model, data, "train.steps=8", "name=one"))
    assert code == 0, error
    return folder / "runs/one"


def test_two_devices_learn_what_one_does(tmp_path, alone, model, data):  # noqa: F811
    code, _, error = finish(
        train(tmp_path, model, data, "train.steps=8", "name=two", "hardware.devices=2", "memory.parallel=zero3")
    )
    assert code == 0, error
    run = tmp_path / "runs/two"
    assert differ(weights(run), weights(alone)) < 1e-6
    ours, theirs = events_of(run), events_of(alone)
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-6)
    assert losses(ours, "eval") == pytest.approx(losses(theirs, "eval"), rel=1e-6)
    assert [e["tokens"] for e in ours["step"]] == [e["tokens"] for e in theirs["step"]]
    of_second = [json.loads(line) for line in (run / "ranks/rank-1.jsonl").read_text().splitlines()]
    measured = [*ours["memory"], *(e for e in of_second if e["event"] == "memory")]
    assert len(measured) == 2
    for event in measured:
        assert event["measured"]["peak_bytes"] == pytest.approx(event["predicted"]["peak_bytes"], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_devices_that_share_every_matrix_learn_what_one_does(tmp_path, model, data, method):  # noqa: F811
    """One goes on where they were, and they where one was."""
    common = (f"method={method}", "train.learning_rate=1e-4")
    ways = {"one": ("hardware.devices=1",), "two": ("hardware.devices=2", "memory.parallel=tensor2")}
    for name, words in ways.items():
        code, _, error = finish(train(tmp_path, model, data, "train.steps=6", f"name={name}", *common, *words))
        assert code == 0, error
    one, two = tmp_path / "runs/one", tmp_path / "runs/two"
    for event in events_of(two)["memory"]:
        assert event["measured"]["peak_bytes"] == pytest.approx(event["predicted"]["peak_bytes"], rel=0.03)
    assert losses(events_of(two)) == pytest.approx(losses(events_of(one)), rel=1e-5)
    assert losses(events_of(two), "eval") == pytest.approx(losses(events_of(one), "eval"), rel=1e-5)
    found = {"one": weights(one, method), "two": weights(two, method)}
    assert differ(found["two"], found["one"]) < (1e-6 if method == "full" else 1e-3)
    for run, other in ((two, ("hardware.devices=1", "memory.parallel=auto")), (one, ways["two"])):
        shutil.rmtree(run / "checkpoints/step-000006")
        code, _, error = finish(begin(tmp_path, "resume", run, *other))
        assert code == 0, error
        assert differ(weights(run, method), found["one"]) < (1e-6 if method == "full" else 1e-3)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_all_and_loses_nothing(tmp_path, alone, model, data, rank):  # noqa: F811
    """Another number of devices goes on where it was."""
    process = train(
        tmp_path, model, data, "train.steps=8", "name=killed", "hardware.devices=2", "memory.parallel=zero2"
    )
    run = tmp_path / "runs/killed"
    wait_for(run, 2)
    os.kill(pids_of(run)[rank], signal.SIGKILL)
    killed = time.monotonic()
    code, _, error = finish(process)
    assert time.monotonic() - killed < 10
    assert code == 128 + signal.SIGKILL
    assert error.count("error:") == 1 and f"error: rank {rank} was killed (SIGKILL), so all ranks were ended" in error
    assert f"finefit resume {run.relative_to(tmp_path)}" in error
    assert pids_of(run) == []
    words = ("hardware.devices=1", "memory.parallel=auto") if rank else ()
    code, _, error = finish(begin(tmp_path, "resume", run, *words))
    assert code == 0, error
    assert differ(weights(run), weights(alone)) < 1e-6


def test_memory_that_runs_out_on_a_rank_is_planned_for_on_all(tmp_path, alone, model, data):  # noqa: F811
    limit = ("--memory-limit", "1700KiB")
    words = ("train.steps=8", "name=short", "hardware.devices=2", "memory.parallel=zero3")
    code, _, error = finish(train(tmp_path, model, data, *words, *limit))
    assert code == 0, error
    run = tmp_path / "runs/short"
    assert differ(weights(run), weights(alone)) < 1e-6
    found = events_of(run)
    assert len(found["out_of_memory"]) == len(found["replan"]) == 1
    assert found["replan"][0]["predicted"]["peak_bytes"] < found["plan"][0]["predicted"]["peak_bytes"]
    assert "all ranks go on together by a leaner plan" in error


def test_a_stop_is_agreed_on(tmp_path, model, data):  # noqa: F811
    process = train(tmp_path, model, data, "train.steps=4000", "name=stopped", "hardware.devices=2")
    run = tmp_path / "runs/stopped"
    wait_for(run, 2)
    os.kill(pids_of(run)[1], signal.SIGTERM)
    code, _, error = finish(process)
    assert code == 130 and "finefit resume" in error
    assert events_of(run)["end"][-1]["status"] == "stopped"


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path, model, data):  # noqa: F811
    words = ("train.steps=4000", "name=hung", "hardware.devices=2")
    process = train(tmp_path, model, data, *words, env={"FINEFIT_TIMEOUT_S": "5"}.items())
    run = tmp_path / "runs/hung"
    wait_for(run, 2)
    os.kill(pids_of(run)[1], signal.SIGSTOP)
    code, _, error = finish(process)
    assert code == 76
    assert "error: rank 1 did not answer the others any more" in error and "after step" in error


@pytest.mark.slow
def test_torchs_launcher_begins_ranks_too_and_begins_them_again(tmp_path, alone, model, data):  # noqa: F811
    words = ["train.steps=8", "name=elastic", "memory.parallel=zero3"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "--standalone",
               "-m", "finefit", "train", str(model), str(data), *SETTINGS, *words, "--log-format", "plain"]  # fmt: skip
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    run = tmp_path / "runs/elastic"
    wait_for(run, 2)
    found = subprocess.run(["pgrep", "-f", "finefit train .*name=elastic"], capture_output=True, text=True).stdout
    os.kill(max(map(int, found.split())), signal.SIGKILL)
    code, _, error = finish(process)
    assert code == 0, error
    assert differ(weights(run), weights(alone)) < 1e-6
    assert len(events_of(run)["end"]) == 1
