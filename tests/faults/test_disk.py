"""A disk that is full, read-only or gone, at every write of a save: the run goes on, and says what was not written."""

import contextlib
import errno
import os
import subprocess

import pytest

import tiny_run
from finefit import checkpoint, files, phases, recover, session
from finefit.candidates import rewrite
from finefit.errors import CheckpointError
from finefit.events import EventLog
from finefit.layout import Micro
from finefit.spec import ModelSpec
from tiny_run import events_of, losses

WORDS = {
    "method": "lora", "lora.rank": "4", "train.global_batch_size": "8", "train.max_length": "256", "train.steps": "6",
    "train.learning_rate": "1e-2", "train.save_every": "1", "train.eval_every": "0", "memory.precision": "fp32",
}  # fmt: skip
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EIO, errno.ENOENT)


def job_of(model, data, folder, **changes):
    return tiny_run.job_of(model, data, folder, {**WORDS, "name": "run", **changes})


def carried_out(job, observers=(), resumed=False):
    """Status, events by name; the error instead of a status where there was one."""
    try:
        with EventLog(job.folder / "events.jsonl", list(observers)) as log:
            status = recover.carry_out(job, log, resumed)
    except CheckpointError as error:
        status = error
    finally:
        job.held.close()
    return status, events_of(job.folder)


@pytest.fixture(scope="module")
def undisturbed(model, data, tmp_path_factory):
    status, found = carried_out(job_of(model, data, tmp_path_factory.mktemp("whole")))
    assert status == "finished"
    return losses(found)


class Disk:
    """Fails the n-th flush or rename of the save of each step it is given; each is (step, n, errno)."""

    def __init__(self, faults):
        self.faults, self.step, self.calls, self.failed = {step: rest for step, *rest in faults}, 0, 0, []

    def saving(self, real):
        def save(run, step, *others):
            self.step, self.calls = step, 0
            try:
                return real(run, step, *others)
            finally:
                self.step = 0

        return save

    def failing(self, real):
        def call(*args):
            self.calls += 1
            if self.step and self.step in self.faults and self.calls > self.faults[self.step][0]:
                number = self.faults.pop(self.step)[1]
                self.failed.append(self.step)
                raise OSError(number, os.strerror(number))
            return real(*args)

        return call

    def patched(self, patch):
        patch.setattr(checkpoint, "save", self.saving(checkpoint.save))
        for name in ("fsync", "replace"):
            patch.setattr(files.os, name, self.failing(getattr(os, name)))


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 10))])
def test_training_goes_on_past_saves_that_fail(model, data, tmp_path, monkeypatch, undisturbed, first):
    """At another write of each save, each for another reason."""
    disk = Disk([(step, first + step - 1, ERRORS[(first + step) % len(ERRORS)]) for step in range(1, 6)])
    with monkeypatch.context() as patch:
        disk.patched(patch)
        status, found = carried_out(job_of(model, data, tmp_path))
    assert status == "finished" and losses(found) == undisturbed
    assert disk.failed and len(disk.failed) >= (5 if first == 0 else 1)
    told = [event["message"] for event in found["warn"] if "was not written" in event["message"]]
    assert [f"the checkpoint of step {step} " in said for step, said in zip(disk.failed, told, strict=True)]
    assert [event["step"] for event in found["save"]] == [s for s in range(1, 7) if s not in disk.failed]
    folder = tmp_path / "run" / "checkpoints"
    assert all(path.name.startswith("step-") and checkpoint.damage(path) == "" for path in folder.iterdir())


@pytest.mark.slow
def test_a_last_save_that_fails_is_an_error_and_resume_makes_it_up(model, data, tmp_path, monkeypatch, undisturbed):
    disk = Disk([(6, 2, errno.ENOSPC)])
    with monkeypatch.context() as patch:
        disk.patched(patch)
        status, found = carried_out(job_of(model, data, tmp_path))
    assert status.message == "the checkpoint of step 6 was not written: No space left on device"
    assert found["end"][-1]["status"] == "failed"
    status, found = carried_out(session.again(tmp_path / "run"), resumed=True)
    assert status == "finished" and losses(found) == undisturbed


@pytest.fixture
def disk(tmp_path):
    """A disk of 8 MiB, to be filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], stderr=subprocess.DEVNULL)


def full(folder):
    """Fill the disk to the last byte."""
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 2**16)
    with contextlib.suppress(OSError), (folder / "ballast").open("ab", buffering=0) as file:
        while file.write(b"\0"):
            pass


def test_a_full_disk_loses_no_event_and_no_state(model, data, disk, undisturbed):
    """Full from step 2 to step 4."""

    def look(event):
        if event["event"] == "step" and event["step"] == 2:
            full(disk)
        if event["event"] == "step" and event["step"] == 4:
            (disk / "ballast").unlink()

    status, found = carried_out(job_of(model, data, disk), [look])
    assert status == "finished" and losses(found) == undisturbed
    assert [event["step"] for event in found["save"]] == [1, 4, 5, 6]
    told = [event["message"] for event in found["warn"]]
    assert any("the checkpoint of step 2 was not written: it takes" in said for said in told)


@pytest.mark.parametrize(
    ("keep", "saved", "said"),
    [
        pytest.param(1, [3], "the checkpoint of step 6 was not written: it takes", marks=pytest.mark.slow),
        (2, [5, 6], "No space left on device"),
    ],
)
def test_a_disk_that_stays_full_ends_with_what_was_not_written(model, data, disk, undisturbed, keep, saved, said):
    """Of two checkpoints the older one makes room for the next; the trained weights then have none."""
    job = job_of(model, data, disk, **{"train.keep_checkpoints": str(keep)})
    status, _ = carried_out(job, [lambda event: event["event"] == "step" and event["step"] == 4 and full(disk)])
    assert said in status.message
    assert sorted(path.name for path in (disk / "run" / "checkpoints").iterdir()) == [f"step-{n:06d}" for n in saved]
    (disk / "ballast").unlink()
    status, found = carried_out(session.again(disk / "run"), resumed=True)
    lost = (
        [5, 6] if keep == 2 else []
    )  # their events, which the message says: the steps themselves are in the checkpoint
    assert status == "finished" and losses(found) == undisturbed[: 6 - len(lost)]


@pytest.mark.slow
def test_a_disk_that_vanishes(model, data, disk, undisturbed):
    """An unmounted network folder: what is written goes where it is let, and the run is not lost."""

    def look(event):
        if event["event"] == "step" and event["step"] == 3:
            subprocess.run(["umount", "-l", disk], check=True)

    job, seen = job_of(model, data, disk), []
    with EventLog(job.folder / "events.jsonl", [look, seen.append]) as log:
        status = recover.carry_out(job, log, False)
    job.held.close()
    assert (
        status == "finished" and losses({"step": [event for event in seen if event["event"] == "step"]}) == undisturbed
    )
    assert any(event["message"].startswith("the report was not written") for event in seen if event["event"] == "warn")
    assert checkpoint.damage(disk / "run" / "checkpoints" / "step-000006") == ""


def test_too_small_a_disk_is_said_before_anything_is_trained(model, data, disk):
    full(disk)
    with pytest.raises(CheckpointError, match=r"2 checkpoints of .* and the trained weights of .* do not fit in"):
        job_of(model, data, disk)


@pytest.mark.parametrize(
    "words",
    [{}, {"method": "full", "memory.precision": "bf16_mixed"}, {"method": "full", "train.optimizer": "adamw_8bit"},
     {"method": "full", "memory.optimizer_offload": "disk", "memory.precision": "bf16"}],
)  # fmt: skip
def test_what_a_checkpoint_takes_is_known_before(model, data, tmp_path, words):
    job = job_of(model, data, tmp_path, **{**words, "train.steps": "1"})
    layout = rewrite(ModelSpec.from_folder(job.model_folder), Micro(1, 1, 1), job.plan.techniques)
    carried_out(job)
    folder = job.folder / "checkpoints" / "step-000001"
    kept = {path.name: tensor_bytes(path) for path in folder.glob("*.safetensors") if path.name != "random.safetensors"}
    optimizer = kept.pop("optimizer.safetensors")
    assert (*kept.values(), optimizer) == phases.checkpoint_bytes(layout)


def tensor_bytes(path):
    """Of a safetensors file, less its header."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
