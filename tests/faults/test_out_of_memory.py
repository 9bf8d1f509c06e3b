"""Memory is refused at every moment of a run: it goes on by another plan, and its losses are those of the undisturbed one.

A dispatch mode refuses one allocation at a moment and step that a test names, as a device that is full does.
"""

import contextlib
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finefit import cap, config, session, supervise, trainer
from finefit.errors import OutOfMemory
from finefit.events import EventLog

SHORT = {
    "method": "lora", "lora.rank": "4", "train.global_batch_size": "16", "train.max_length": "256", "train.steps": "6",
    "train.learning_rate": "1e-2", "train.save_every": "2", "train.eval_every": "3", "memory.precision": "fp32",
}  # fmt: skip


class Refusing(TorchDispatchMode):
    """Refuses one operator at each of the (moment, updates made, how many operators later) it is given, in their order."""

    def __init__(self, attempts, faults):
        super().__init__()
        self.attempts, self.faults, self.seen = attempts, list(faults), 0

    @classmethod
    def is_infra_mode(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        run = self.attempts[-1].run if self.attempts else None
        if self.faults and run is not None and (run.doing.moment, run.doing.step) == self.faults[0][:2]:
            self.seen += 1
            if self.seen > self.faults[0][2]:
                self.faults.pop(0)
                self.seen = 0
                raise torch.OutOfMemoryError("Tried to allocate 1.00 MiB")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def run_with(model, data, tmp_path, monkeypatch):
    """Carry out the short run with these faults; its events by name."""

    def carry_out(faults=(), limit=None, name="run", **changes):
        words = {**SHORT, "name": name, "output_dir": str(tmp_path), **changes}
        job = session.new(
            config.load(None, [f"{k}={v}" for k, v in words.items()], {"model": str(model), "data": str(data)}), None
        )
        attempts, real = [], trainer.Attempt

        def attempt(*args):
            attempts.append(real(*args))
            return attempts[-1]

        mode = Refusing(attempts, faults)
        monkeypatch.setattr(trainer, "Attempt", attempt)

        @contextlib.contextmanager
        def capped(limit_bytes, device):
            with cap.capped(limit_bytes, device), mode:
                yield

        monkeypatch.setattr(trainer, "capped", capped)
        try:
            with EventLog(job.folder / "events.jsonl", []) as log:
                status = trainer.carry_out(job, log, False, limit)
        finally:
            monkeypatch.undo()
            job.held.close()
        assert status == "finished" and not mode.faults, f"{mode.faults} did not happen"
        found = [json.loads(line) for line in (job.folder / "events.jsonl").read_text().splitlines()]
        return job.folder, {kind: [e for e in found if e["event"] == kind] for kind in {e["event"] for e in found}}

    return carry_out


def losses(found, kind="step"):
    last = {event["step"]: event["loss"] for event in found[kind]}
    return [last[step] for step in sorted(last)]


@pytest.fixture(scope="module")
def undisturbed(model, data, tmp_path_factory):
    words = {**SHORT, "name": "whole", "output_dir": str(tmp_path_factory.mktemp("whole"))}
    job = session.new(
        config.load(None, [f"{k}={v}" for k, v in words.items()], {"model": str(model), "data": str(data)}), None
    )
    with EventLog(job.folder / "events.jsonl", []) as log:
        trainer.carry_out(job, log, False)
    job.held.close()
    found = [json.loads(line) for line in (job.folder / "events.jsonl").read_text().splitlines()]
    return {kind: [e for e in found if e["event"] == kind] for kind in {e["event"] for e in found}}


IN_STEP = ("forward_end", "loss", "backward_peak", "optimizer_step")
ONCE = [("load", 0, 0), *((moment, 3, 5) for moment in IN_STEP), ("eval", 3, 2), ("save", 2, 0)]
MORE = [*((m, s, 0) for m in IN_STEP for s in (0, 4)), ("eval", 0, 0), ("eval", 6, 0), ("save", 4, 1)]
AT = [*ONCE, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)]


@pytest.mark.parametrize(("moment", "step", "later"), AT)
def test_a_run_goes_on_with_the_same_losses(run_with, undisturbed, moment, step, later):
    _, found = run_with([(moment, step, later)])
    assert len(found["out_of_memory"]) == len(found["replan"]) == 1
    assert found["out_of_memory"][0]["moment"] == moment
    assert losses(found) == pytest.approx(losses(undisturbed), rel=1e-6)
    assert losses(found)[:step] == losses(undisturbed)[:step]
    assert losses(found, "eval") == pytest.approx(losses(undisturbed, "eval"), rel=1e-6)
    assert [e["step"] for e in found["end"]] == [6]


def test_four_in_one_run(run_with, undisturbed):
    """At four moments; each plan needs less than the one before."""
    folder, found = run_with([("forward_end", 0, 3), ("backward_peak", 2, 1), ("optimizer_step", 4, 0), ("eval", 6, 0)])
    assert losses(found) == pytest.approx(losses(undisturbed), rel=1e-6)
    peaks = [e["predicted"]["peak_bytes"] for e in (*found["plan"], *found["replan"])]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks) == 5
    assert json.loads((folder / "plan.json").read_text()) == found["replan"][-1]["plan"]


def test_an_update_that_broke_off_is_made_again_from_the_last_checkpoint(run_with):
    """Some weights were stepped, some not: nothing of it stays."""
    used = {"train.optimizer": "adamw_8bit"}
    _, whole = run_with(name="whole", **used)
    _, found = run_with([("optimizer_step", 3, 100)], **used)
    assert any("broke off" in e["message"] for e in found["warn"])
    assert losses(found) == pytest.approx(losses(whole), rel=1e-6)


def test_what_never_fits_ends_with_an_argument(run_with):
    with pytest.raises(OutOfMemory, match=r"no plan is left: .* needs at least"):
        run_with(limit=60_000)


def test_it_ends_after_so_many_plans(run_with):
    faults = [("load", 0, 0)] + [("forward_end", 0, 0)] * (supervise.MOST + 1)
    with pytest.raises(OutOfMemory):
        run_with(faults)
