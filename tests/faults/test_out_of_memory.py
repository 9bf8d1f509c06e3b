"""Memory is refused at every moment of a run: it goes on by another plan, and its losses are those of the undisturbed one.

A dispatch mode refuses one allocation at a moment and step that a test names, as a device that is full does.
"""

import contextlib
import gc
import json
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny_run
from finefit import cap, recover, session, supervise
from finefit.errors import OutOfMemory
from finefit.events import EventLog
from tiny_run import events_of, losses

SHORT = {
    "method": "lora", "lora.rank": "4", "train.global_batch_size": "16", "train.max_length": "256", "train.steps": "6",
    "train.learning_rate": "1e-2", "train.save_every": "2", "train.eval_every": "3", "memory.precision": "fp32",
}  # fmt: skip
IN_STEP = ("forward_end", "loss", "backward_peak", "optimizer_step")


class Refusing(TorchDispatchMode):
    """Refuses one operator at each of the (moment, updates made, how many operators later) it is given, in their order;
    of those whose moment is of a rehearsal too only when that is over."""

    def __init__(self, attempts, faults):
        super().__init__()
        self.attempts, self.faults, self.seen, self.then = attempts, list(faults), 0, lambda: None

    @classmethod
    def is_infra_mode(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        attempt = self.attempts[-1] if self.attempts else None
        if self.faults and attempt and attempt.run is not None and self.is_at(attempt, *self.faults[0][:2]):
            self.seen += 1
            if self.seen > self.faults[0][2]:
                self.faults.pop(0)
                self.seen = 0
                self.then()
                raise torch.OutOfMemoryError("Tried to allocate 1.00 MiB")
        return func(*args, **(kwargs or {}))

    def is_at(self, attempt, moment, step):
        if moment.startswith("rehearsal "):
            return not attempt.has_begun and attempt.run.doing.moment == moment.partition(" ")[2]
        before = moment in ("load", "resume") or attempt.has_begun
        return before and (attempt.run.doing.moment, attempt.run.doing.step) == (moment, step)


def job_of(model, data, folder, name, **changes):
    return tiny_run.job_of(model, data, folder, {**SHORT, "name": name, **changes})


@pytest.fixture
def run_with(model, data, tmp_path, monkeypatch):
    """Carry out the short run with these faults; its folder, events by name, and status."""

    def carry_out(faults=(), limit=None, name="run", job=None, resumed=False, then=lambda: None, **changes):
        job = job or job_of(model, data, tmp_path, name, **changes)
        attempts, real = [], recover.Attempt
        models = []

        def attempt(*args, **others):
            gc.collect()
            assert all(model() is None for model in models), "an earlier attempt's model is still there"
            models.extend(weakref.ref(one.run.model) for one in attempts if one.run is not None)
            attempts.append(real(*args, **others))
            return attempts[-1]

        mode = Refusing(attempts, faults)
        mode.then = then

        @contextlib.contextmanager
        def capped(limit_bytes, device):
            with cap.capped(limit_bytes, device), mode:
                yield

        with monkeypatch.context() as patch:
            patch.setattr(recover, "Attempt", attempt)
            patch.setattr(recover, "capped", capped)
            try:
                with EventLog(job.folder / "events.jsonl", []) as log:
                    status = recover.carry_out(job, log, resumed, limit)
            finally:
                job.held.close()
        assert not mode.faults, f"{mode.faults} did not happen"
        return job, events_of(job.folder), status

    return carry_out


@pytest.fixture(scope="module")
def undisturbed(model, data, tmp_path_factory):
    job = job_of(model, data, tmp_path_factory.mktemp("whole"), "whole")
    with EventLog(job.folder / "events.jsonl", []) as log:
        recover.carry_out(job, log, False)
    job.held.close()
    return events_of(job.folder)


ONCE = [
    ("load", 0, 0),
    ("backward_peak", 3, 5),
    ("save", 2, 0),
]
MORE = [
    *((f"rehearsal {m}", 0, 3) for m in IN_STEP), ("forward_end", 3, 5), ("loss", 3, 5), ("optimizer_step", 3, 5), ("eval", 3, 2), *((m, s, 0) for m in IN_STEP for s in (0, 4)), ("eval", 0, 0),
    ("eval", 6, 0), ("save", 4, 1),
]  # fmt: skip
AT = [*ONCE, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)]


@pytest.mark.parametrize(("moment", "step", "later"), AT)
def test_a_run_goes_on_with_the_same_losses(run_with, undisturbed, moment, step, later):
    _, found, status = run_with([(moment, step, later)])
    assert status == "finished" and len(found["out_of_memory"]) == len(found["replan"]) == 1
    assert found["out_of_memory"][0]["moment"] == moment.removeprefix("rehearsal ")
    assert losses(found) == pytest.approx(losses(undisturbed), rel=1e-6)
    assert losses(found)[:step] == losses(undisturbed)[:step]
    assert losses(found, "eval") == pytest.approx(losses(undisturbed, "eval"), rel=1e-6)
    assert [(e["step"], e["loss_after"]) for e in found["end"]] == [(6, losses(found, "eval")[-1])]
    assert sorted(e["step"] for e in found["eval"]) == [0, 3, 6]


OTHERS = [
    {"method": "full", "memory.precision": "bf16_mixed"},
    {"memory.precision": "fp16"},
    {"method": "qlora", "memory.precision": "bf16"},
    {"method": "full", "train.optimizer": "adamw_8bit"},
    {"method": "full", "memory.optimizer_offload": "disk"},
    {"memory.checkpointing": "4", "memory.activation_offload": "disk"},
    {"memory.parameter_offload": "disk"},
    {"method": "full", "memory.fused_backward_step": "true", "train.max_grad_norm": "0"},
]


@pytest.mark.slow
@pytest.mark.parametrize("words", [pytest.param(w, id=", ".join(w.values())) for w in OTHERS])
def test_whatever_is_on(run_with, words):
    """Twice in one run; in 16 bits other micro-batches round otherwise."""
    _, whole, _ = run_with(name="whole", **words)
    _, found, _ = run_with([("backward_peak", 3, 40), ("forward_end", 4, 9)], **words)
    close = 1e-5 if words.get("memory.precision", "fp32") == "fp32" else 0.02
    assert losses(found) == pytest.approx(losses(whole), rel=close)
    assert losses(found, "eval") == pytest.approx(losses(whole, "eval"), rel=close)


def test_four_in_one_run(run_with, undisturbed):
    """At four moments; each plan needs less than the one before."""
    job, found, _ = run_with(
        [("rehearsal loss", 0, 3), ("backward_peak", 2, 1), ("optimizer_step", 4, 0), ("eval", 6, 0)]
    )
    assert losses(found) == pytest.approx(losses(undisturbed), rel=1e-6)
    peaks = [e["predicted"]["peak_bytes"] for e in (*found["plan"], *found["replan"])]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks) == 5
    assert json.loads((job.folder / "plan.json").read_text()) == found["replan"][-1]["plan"]


@pytest.mark.slow
def test_random_numbers_are_drawn_again_as_they_were(run_with):
    """With dropout, and with micro-batches of one example in either plan, so that masks are of the same shapes."""
    words = {"lora.dropout": "0.2", "memory.micro_batch_size": "1", "memory.checkpointing": "auto"}
    _, whole, _ = run_with(name="whole", **words)
    for number, fault in enumerate([("forward_end", 3, 90), ("backward_peak", 2, 0), ("eval", 3, 0), ("save", 4, 0)]):
        _, found, _ = run_with([fault], name=f"run{number}", **words)
        assert losses(found) == pytest.approx(losses(whole), rel=1e-6), fault


@pytest.mark.slow
def test_an_update_that_broke_off_is_made_again_from_the_last_checkpoint(run_with):
    """Some weights were stepped, some not: nothing of it stays."""
    used = {"train.optimizer": "adamw_8bit"}
    _, whole, _ = run_with(name="whole", **used)
    _, found, _ = run_with([("optimizer_step", 3, 100)], **used)
    assert any("broke off" in e["message"] and e["hint"] == "it is made again, from step 3 on" for e in found["warn"])
    assert losses(found) == pytest.approx(losses(whole), rel=1e-6)


def test_a_stop_that_was_asked_for_before_is_not_forgotten(run_with, model, data, tmp_path, undisturbed):
    """Nor are the updates made; the run goes on when it is resumed, where memory runs out again."""
    import signal

    job, found, status = run_with([("backward_peak", 3, 5)], then=lambda: signal.raise_signal(signal.SIGTERM))
    assert status == "stopped" == found["end"][-1]["status"] and found["end"][-1]["step"] == 3
    _, found, status = run_with([("loss", 4, 0)], job=session.again(job.folder), resumed=True)
    assert status == "finished" and losses(found) == pytest.approx(losses(undisturbed), rel=1e-6)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_never_fits_ends_with_an_argument(run_with):
    with pytest.raises(OutOfMemory, match=r"no plan is left: .* needs at least"):
        run_with(limit=60_000)


def test_it_ends_after_so_many_plans(run_with, monkeypatch):
    monkeypatch.setattr(supervise, "SMALLER", 0.97)
    with pytest.raises(OutOfMemory, match=f"memory ran out again with the plan made after {supervise.MOST} others"):
        run_with([("rehearsal forward_end", 0, 0)] * (supervise.MOST + 1))
