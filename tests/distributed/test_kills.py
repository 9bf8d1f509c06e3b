"""Each rank killed in turn at random moments, whatever it does then: nothing that was saved is lost."""

import os
import random
import signal
import time

import pytest
from test_runs import LIMIT_S, begin, differ, finish, pids_of, train, weights

from tiny_run import data, events_of, model  # noqa: F401 (fixtures)

KILLS, STEPS = 10, 60


@pytest.mark.slow
def test_ten_kills_at_random_moments_lose_nothing(tmp_path, model, data):  # noqa: F811
    words = (f"train.steps={STEPS}", "train.save_every=1", "train.eval_every=0")
    code, _, error = finish(train(tmp_path, model, data, *words, "name=one"))
    assert code == 0, error
    drawn, run, kills, before = random.Random(0), tmp_path / "runs/two", 0, 0
    for attempt in range(3 * KILLS):
        if (run / "plan.json").exists():
            process = begin(tmp_path, "resume", run)
        else:
            process = train(tmp_path, model, data, *words, "name=two", "hardware.devices=2", "memory.parallel=zero3")
        if kills == KILLS:
            code, _, error = finish(process)
            assert code == 0, error
            break
        rank = wait_for_ranks(run, process, attempt % 2)
        time.sleep(drawn.uniform(0, 9))
        if process.poll() is None and rank in pids_of(run):
            os.kill(rank, signal.SIGKILL)
            kills += 1
        code, _, error = finish(process)
        assert code == 128 + signal.SIGKILL and f"rank {attempt % 2} was killed" in error, error
        newest = max((int(p.name[5:]) for p in (run / "checkpoints").glob("step-*")), default=0)
        assert newest >= before
        before = newest
    assert differ(weights(run), weights(tmp_path / "runs/one")) < 1e-6
    assert events_of(run)["end"][-1]["status"] == "finished"


def wait_for_ranks(run, process, rank):
    until = time.monotonic() + LIMIT_S
    while len(found := pids_of(run)) < 2:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    return found[rank]
