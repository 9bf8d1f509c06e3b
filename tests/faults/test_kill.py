"""A run killed at any moment, a save too, goes on from its last whole checkpoint: its losses are to the bit those of the undisturbed one."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

WORDS = (
    "method=lora", "lora.rank=4", "lora.dropout=0.1", "train.global_batch_size=8", "train.max_length=256", "train.steps=24",
    "train.learning_rate=1e-2", "train.save_every=2", "train.eval_every=0", "memory.precision=fp32",
)  # fmt: skip
MOMENTS = 30


def command(*words):
    return [sys.executable, "-m", "finefit", *map(str, words), "--log-format", "json"]


def losses(folder):
    """Of each step the last, and how often each was told."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    return {event["step"]: event["loss"] for event in steps}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def whole(model, data, environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = ("train", model, data, *WORDS, "name=whole", f"output_dir={folder}")
    subprocess.run(command(*words), env=environment, check=True, capture_output=True)
    return losses(folder / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(MOMENTS))
def test_kill_9_at_a_random_moment(model, data, environment, whole, tmp_path, seed):
    """So many steps or a save after its beginning, and a few milliseconds more."""
    rng = random.Random(seed)
    words = ("train", model, data, *WORDS, "name=run", f"output_dir={tmp_path}")
    process = subprocess.Popen(command(*words), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder, told = tmp_path / "run", rng.randint(0, 30)
    deadline = time.time() + 120
    while process.poll() is None and time.time() < deadline and lines(folder) < told:
        time.sleep(0.002)
    time.sleep(rng.random() * 0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if (folder / "plan.json").is_file():
        again = command("resume", folder)
    else:  # it had not come to its folder yet
        again = command(*words)
    subprocess.run(again, env=environment, check=True, capture_output=True)
    assert losses(folder) == whole
    assert not [path for path in (folder / "checkpoints").iterdir() if not path.name.startswith("step-")]


def lines(folder):
    """Of steps and saves in a log that may end in half a line."""
    path = folder / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    return (
        text.count('"event":"step"')
        + text.count('"event": "step"')
        + text.count('"event":"save"')
        + text.count('"event": "save"')
    )
