"""A run goes on by another plan: asked for when it is resumed, or found while there is memory left."""

import dataclasses

import pytest

import tiny_run
from finefit import adapt, checkpoint, config, recover, session, trainer
from finefit.errors import CheckpointError, ConfigError, DataError
from finefit.events import EventLog
from tiny_run import events_of, losses

WORDS = {
    "method": "lora", "lora.rank": "4", "train.global_batch_size": "8", "train.max_length": "256", "train.steps": "10",
    "train.learning_rate": "1e-2", "train.save_every": "4", "train.eval_every": "0", "memory.precision": "fp32",
}  # fmt: skip
SMALL = {"memory.micro_batch_size": "1", "memory.checkpointing": "all"}


def job_of(model, data, folder, name="run", **changes):
    return tiny_run.job_of(model, data, folder, {**WORDS, "name": name, **changes})


def carried_out(job, resumed=False, better=adapt.nothing_better, stop_after=None):
    """Status and events by name."""

    def look(event):
        if event["event"] == "step" and event["step"] == stop_after:
            import signal

            signal.raise_signal(signal.SIGTERM)

    with EventLog(job.folder / "events.jsonl", [look]) as log:
        try:
            status = recover.carry_out(job, log, resumed, better=better)
        finally:
            job.held.close()
    return status, events_of(job.folder)


@pytest.fixture(scope="module")
def undisturbed(model, data, tmp_path_factory):
    _, found = carried_out(job_of(model, data, tmp_path_factory.mktemp("whole")))
    return losses(found)


def test_it_is_resumed_by_the_plan_that_is_asked_for(model, data, tmp_path, undisturbed):
    """Other micro-batches and more checkpointing: the order of the data, and so every loss, stays."""
    status, _ = carried_out(job_of(model, data, tmp_path), stop_after=4)
    assert status == "stopped"
    job = session.again(tmp_path / "run", [f"{key}={word}" for key, word in SMALL.items()])
    status, found = carried_out(job, resumed=True)
    assert status == "finished" and losses(found) == pytest.approx(undisturbed, rel=1e-6)
    assert losses(found)[:4] == undisturbed[:4]
    (event,) = found["replan"]
    assert event["step"] == 4 and event["message"].startswith("as asked: ")
    assert (event["plan"]["micro_batch_size"], event["plan"]["gradient_accumulation_steps"]) == (1, 8)
    assert config.load(tmp_path / "run" / "config.yaml").memory.micro_batch_size == 1
    assert len(found["memory"]) == 2, "the new plan is rehearsed"


@pytest.mark.parametrize("word", ["method=full", "train.learning_rate=1", "memory.precision=bf16", "lora.rank=8"])
def test_what_is_learnt_cannot_change_in_the_middle(model, data, tmp_path, word):
    job = job_of(model, data, tmp_path)
    job.held.close()
    with pytest.raises(ConfigError, match="cannot change in the middle of a run"):
        session.again(job.folder, [word])


def test_memory_that_turns_out_to_be_free_is_used(model, data, tmp_path, undisturbed):
    """A plan from a file for a smaller device: after a few steps one that takes less time goes on."""
    small = job_of(model, data, tmp_path, "small", **SMALL)
    small.held.close()
    words = [f"{key}={word}" for key, word in {**WORDS, "name": "run", "output_dir": str(tmp_path)}.items()]
    wish = config.load(None, words, {"model": str(model), "data": str(data)})
    status, found = carried_out(session.new(wish, small.folder / "plan.json"), better=adapt.within(None))
    assert status == "finished" and losses(found) == pytest.approx(undisturbed, rel=1e-6)
    (event,) = found["replan"]
    assert event["step"] == adapt.AFTER
    assert event["plan"]["seconds_per_step"] < adapt.FASTER * found["plan"][0]["plan"]["seconds_per_step"]
    assert event["predicted"]["peak_bytes"] > found["plan"][0]["predicted"]["peak_bytes"]
    assert [e["step"] for e in found["save"]] == [4, adapt.AFTER, 8, 10]


def test_a_plan_is_not_gone_on_with_where_the_state_could_not_be_saved(model, data, tmp_path, undisturbed, monkeypatch):
    """The disk is full when another plan is found: nothing is let go of, and it stays with the one it has."""
    small = job_of(model, data, tmp_path, "small", **SMALL)
    small.held.close()
    words = [f"{key}={word}" for key, word in {**WORDS, "name": "run", "output_dir": str(tmp_path)}.items()]
    wish, real = config.load(None, words, {"model": str(model), "data": str(data)}), checkpoint.save

    def save(run, step, *others):
        if step == adapt.AFTER:
            raise CheckpointError("full")
        return real(run, step, *others)

    monkeypatch.setattr(checkpoint, "save", save)
    status, found = carried_out(session.new(wish, small.folder / "plan.json"), better=adapt.within(None))
    assert status == "finished" and losses(found) == pytest.approx(undisturbed, rel=1e-6)
    assert "replan" not in found and [e["step"] for e in found["step"]] == list(range(1, 11))


def test_a_plan_whose_rehearsal_was_not_passed_is_rehearsed_when_it_is_resumed(model, data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_check_targets", refuse)
        with pytest.raises(DataError):
            carried_out(job_of(model, data, tmp_path))
        with pytest.raises(DataError):
            carried_out(session.again(tmp_path / "run"), resumed=True)
    status, found = carried_out(session.again(tmp_path / "run"), resumed=True)
    assert status == "finished" and len(found["memory"]) == 1


def refuse(_job):
    raise DataError("never trained")


@pytest.mark.slow
def test_a_plan_that_is_the_best_one_stays(model, data, tmp_path):
    status, found = carried_out(job_of(model, data, tmp_path), better=adapt.within(None))
    assert status == "finished" and "replan" not in found


@pytest.mark.slow
def test_a_limit_is_not_outgrown(model, data, tmp_path):
    """What is allowed is no more than what is in use."""
    job = job_of(model, data, tmp_path, **SMALL)
    free = {"micro_batch_size": "auto", "checkpointing": "auto"}
    job = dataclasses.replace(
        job, config=job.config.model_copy(update={"memory": job.config.memory.model_copy(update=free)})
    )
    measured = []

    def look(job, found):
        measured.append(adapt.within(int(found.footprint.total_bytes * 1.05))(job, found))
        return measured[-1]

    status, _ = carried_out(job, better=look)
    assert status == "finished" and measured == [None]
