"""Memory that the system itself refuses, in a process of its own: malloc fails as it does on a full machine, or the kernel
kills the process."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import limited
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


@pytest.fixture
def group():
    """A control group of this test's own, and its files of what its processes may use of memory, and use."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    one, two = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    place, (limit, used) = (v1, one) if v1.is_dir() else (v2, two)
    folder = place / f"finefit-test-{os.getpid()}"
    try:
        folder.mkdir()
        if not (folder / limit).exists():
            raise OSError("memory is not controlled here")
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group can be made: {error}")
    yield folder, folder / limit, folder / used
    for _ in range(100):  # until its last process is gone
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_that_the_system_kills_goes_on(place, environment, whole, group):
    """By itself, from its last checkpoint, with a plan that needs less."""
    folder, limit, used = group
    words = [*limited.WORDS, "train.save_every=1", "name=killed", f"output_dir={place}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "finefit", "train", place / "model", place / "chats.jsonl", *words],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: (folder / "cgroup.procs").write_text(str(os.getpid())),
    )  # fmt: skip
    log = place / "killed" / "events.jsonl"
    while process.poll() is None and not (log.is_file() and f'"step":{limited.SHORT_STEPS},"steps"' in log.read_text()):
        time.sleep(0.005)
    limit.write_text(str(int(used.read_text()) + limited.MARGIN))
    said = process.communicate()[1]
    assert process.returncode == 0, said[-3000:]
    assert (
        "the system killed the run for want of memory; it goes on from its last checkpoint with memory.budget=" in said
    )
    found = tiny_run.events_of(place / "killed")
    assert len(found["replan"]) >= 1
    assert tiny_run.losses(found) == pytest.approx([whole[step] for step in sorted(whole)], rel=1e-6)
