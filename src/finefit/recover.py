"""A run to its end: where memory runs out its state is kept, another plan made (``supervise``), and carried out from there."""

import time
from dataclasses import replace

from . import adapt, checkpoint, planning, shortage, supervise
from .cap import capped
from .errors import CheckpointError, ConfigError, Diverged, FinefitError, OutOfMemory
from .events import EventLog
from .footprint import MOMENT_LABELS, STEP
from .layout import Micro
from .plan import Plan
from .run import batches_of
from .session import Job
from .spec import ModelSpec
from .stopping import Stopping
from .trainer import (
    Attempt,
    attempted,
    device_of,
    example_of,
    last_step,
    save,
    tell_end,
    tell_replanned,
    warn,
)
from .units import format_bytes


class RanOut(Exception):
    """Memory ran out on one of several ranks: the others are in the middle of a step."""

    def __init__(self, met: shortage.Shortage) -> None:
        super().__init__(met.message)
        self.met = met


def carry_out(
    job: Job, log: EventLog, resumed: bool, limit_bytes: int | None = None, better: adapt.Better = adapt.nothing_better
) -> str:
    """Train by the plan, and by another one where memory runs out or ``better`` finds one; the run's status. Events tell
    everything that happens. ``limit_bytes`` of tensors is all that the device gives.
    """
    attempt = Attempt(0, resumed, Stopping(), better=better)
    try:
        return _carry_out(job, log, attempt, limit_bytes)
    except Diverged as error:
        tell_end(job, log, "failed", attempt.started)
        error.where = str(job.folder)
        error.message = f"stopped before an update that is not a number ({error.message}); the last checkpoint is kept"
        raise
    except FinefitError as error:
        tell_end(job, log, "failed", attempt.started)
        error.where = error.where or str(job.folder)
        raise
    finally:
        attempt.stopping.end()


def _carry_out(job: Job, log: EventLog, attempt: Attempt, limit_bytes: int | None) -> str:
    lesson = supervise.Lesson()
    while True:
        try:
            with capped(limit_bytes, device_of(job)):
                status = attempted(job, log, attempt)
            if attempt.then is None or status != "adapting":
                return status
            job, attempt = _adapted(job, log, attempt, attempt.then)
            continue
        except shortage.ERRORS as error:
            if not shortage.is_shortage(error):
                _note_where(error, attempt)
                raise
            met = _met(job, attempt, error)
            if job.world.size > 1:
                raise RanOut(replace(met, micro=_micro(job, attempt))) from error
        # Out of the handler nothing holds what the step had made.
        try:
            job, lesson = _again(job, log, attempt, met, lesson)
        except shortage.ERRORS as error:
            if isinstance(error, FinefitError) or not shortage.is_shortage(error):
                raise
            raise OutOfMemory(
                "memory ran out while another plan was made, too", hint="close what else uses it"
            ) from error
        if attempt.stopping():
            tell_end(job, log, "stopped", attempt.started)
            return "stopped"
        attempt = _next(attempt, attempt.better)


def replanned(
    job: Job, log: EventLog, met: shortage.Shortage, before: supervise.Lesson
) -> tuple[Job, supervise.Lesson]:
    """The job by a plan that needs less, after memory ran out on one of its ranks."""
    message = f"{MOMENT_LABELS[met.moment]}: {met.message}" if met.moment else met.message
    log.write("out_of_memory", step=met.step, message=message, moment=met.moment or None)
    started = time.perf_counter()
    try:
        return _leaner(job, log, met, before)
    except OutOfMemory as error:
        tell_end(job, log, "failed", started)
        error.where = str(job.folder)
        raise


def _note_where(error: BaseException, attempt: Attempt) -> None:
    """What an error of a library cannot say: where in the run it was."""
    if attempt.run is not None:
        doing = attempt.run.doing
        moment = MOMENT_LABELS.get(doing.moment, doing.moment)
        error.add_note(f" after step {doing.step}, at {moment}, micro-batch {doing.micro + 1}")


def _write_plan(job: Job, log: EventLog, plan: Plan) -> None:
    """A disk that does not take it ends nothing: the event has the plan."""
    try:
        plan.save(job.folder / "plan.json")
    except (CheckpointError, ConfigError) as error:
        warn(log, f"the new plan was not written: {error.message}", "resumed, the run would begin with the old one")


def _next(attempt: Attempt, better: adapt.Better) -> Attempt:
    return Attempt(attempt.number + 1, attempt.is_resumed, attempt.stopping, attempt.started, better=better)


def _adapted(job: Job, log: EventLog, attempt: Attempt, plan: Plan) -> tuple[Job, Attempt]:
    """The state is saved; all else is let go. Headroom is used once: what then runs out of memory does not grow again."""
    assert attempt.measured is not None
    step, message = last_step(job), adapt.says(job.plan, plan, attempt.measured)
    attempt.run = None
    shortage.let_go(device_of(job))
    _write_plan(job, log, plan)
    tell_replanned(log, step, plan, message)
    return replace(job, plan=plan), _next(attempt, adapt.nothing_better)


def _met(job: Job, attempt: Attempt, error: BaseException) -> shortage.Shortage:
    """What was refused, and where."""
    device, asked, run = device_of(job), shortage.asked_bytes(error), attempt.run
    moment, step = (run.doing.moment, run.doing.step) if run else ("load", 0)
    of_host, message = shortage.is_of_host(error, device), str(error).partition("\n")[0]
    return shortage.Shortage(moment, message, step, None, shortage.held_bytes(error, device), asked, of_host)


def _again(
    job: Job, log: EventLog, attempt: Attempt, met: shortage.Shortage, before: supervise.Lesson
) -> tuple[Job, supervise.Lesson]:
    """The state saved, everything else let go, and a plan that needs less; OutOfMemory where there is none."""
    log.write("out_of_memory", step=met.step, message=f"{MOMENT_LABELS[met.moment]}: {met.message}", moment=met.moment)
    shortage.let_go(device_of(job))
    _rescue(job, log, attempt)
    met = replace(met, micro=_micro(job, attempt))
    attempt.run = None
    shortage.let_go(device_of(job))
    if met.is_of_host:
        hint = "close what else uses it, or let less be offloaded: memory.optimizer_offload=none and its like"
        raise OutOfMemory(f"the host's memory ran out ({met.message})", hint=hint)
    if attempt.number == supervise.MOST:
        what = f"memory ran out again with the plan made after {supervise.MOST} others ({met.message})"
        hint = "something else uses the memory, or ever more is not given back; finefit resume goes on from the last checkpoint"
        raise OutOfMemory(what, hint=hint)
    return _leaner(job, log, met, before)


def _leaner(job: Job, log: EventLog, met: shortage.Shortage, before: supervise.Lesson) -> tuple[Job, supervise.Lesson]:
    model = replace(ModelSpec.from_folder(job.model_folder), name=job.plan.model)
    question = planning.question_of(job.config, model, job.hardware, job.data)
    lesson = supervise.learnt(question, job.plan, met, before)
    plan = supervise.planned_again(
        question, job.plan, lesson, before,
        lambda found, times: planning.foreseen(found, model, job.hardware, job.data, times),
    )  # fmt: skip
    _write_plan(job, log, plan)
    message = f"{lesson.says}; now {supervise.changed(job.plan, plan)}, {format_bytes(plan.predicted.total_bytes)}"
    tell_replanned(log, met.step, plan, message)
    for sentence in planning.warnings_of(plan):
        log.write("warn", message=sentence, hint="")
    return replace(job, plan=plan), lesson


def _micro(job: Job, attempt: Attempt) -> Micro | None:
    """What the micro-batch was that a step came to."""
    run = attempt.run
    if run is None or run.doing.moment not in STEP or not attempt.has_begun:
        return None
    examples = [example_of(job.data.store, row) for row in job.data.batch(min(run.doing.step + 1, job.data.steps))]
    batches = batches_of(run, examples)
    return shortage.micro_of(batches[min(run.doing.micro, len(batches) - 1)])


def _rescue(job: Job, log: EventLog, attempt: Attempt) -> None:
    """A checkpoint of all updates made so far, if there is not one and the state is whole; else the newest one counts."""
    run = attempt.run
    if run is None or not run.doing.step or not attempt.has_begun:
        return
    moment, step, last = run.doing.moment, run.doing.step, last_step(job)
    if run.optimizer.is_halfway:
        warn(log, f"the update of step {step + 1} broke off", f"it is made again, from step {last + 1} on")
        return
    run.optimizer.zero_grad(set_to_none=True)
    shortage.let_go(run.device)
    if last == step and checkpoint.is_whole(job.folder / "checkpoints", step):
        return
    if attempt.drawn_at == step:  # a step began that is to be made again
        checkpoint.draw_from(attempt.generators, run.device)
    try:
        save(job, run, log, {"save"}, step)
    except (CheckpointError, *shortage.ERRORS) as error:
        if not isinstance(error, CheckpointError) and not shortage.is_shortage(error):
            raise
        warn(log, f"the state after step {step} was not saved: {error}", f"it goes on from step {last}")
    run.doing.moment = moment
