"""Memory that the system itself refuses, in a process of its own: malloc fails as it does on a full machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model whose long steps take some hundred MiB, and data whose long examples come late."""
    folder = tmp_path_factory.mktemp("limits")
    tiny_run.make_model(folder / "model", hidden_size=512, intermediate_size=2048, head_dim=128, num_hidden_layers=6)
    short = [tiny_run.chat(f"Count from {i}.", " ".join(str(n) for n in range(i, i + 5))) for i in range(24)]
    long = [tiny_run.chat(f"Count from {i}.", " ".join(str(n) for n in range(i, i + 200))) for i in range(24)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*short, *long)))
    return folder


def losses_of(place, kind, environment):
    script = Path(__file__).with_name("limited.py")
    done = subprocess.run(
        [sys.executable, script, place / "model", place / "chats.jsonl", place, kind],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "finished", done.stderr[-3000:]
    found = [json.loads(line) for line in (place / kind / "events.jsonl").read_text().splitlines()]
    return {e["step"]: e["loss"] for e in found if e["event"] == "step"}, [
        e for e in found if e["event"] == "out_of_memory"
    ]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What is freed goes back to the system, so that the limit is met by what is in use."""
    heap = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**18), "MALLOC_TRIM_THRESHOLD_": str(2**18)}
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "HF_HUB_OFFLINE": "1", **heap}


@pytest.fixture(scope="module")
def whole(place, environment):
    losses, refused = losses_of(place, "whole", environment)
    assert refused == []
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["limited", "taken"])
def test_a_run_goes_on_within_what_the_system_gives(place, environment, whole, kind):
    """A long example late in the epoch needs what is not there any more."""
    losses, refused = losses_of(place, kind, environment)
    assert refused, "nothing was refused: this test would show nothing"
    assert all("memory" in event["message"] or "alloc" in event["message"] for event in refused)
    assert losses == pytest.approx(whole, rel=1e-6)
