"""Carrying a plan out: build, rehearse, evaluate, loop, export. The torch half of a session; functions, no class of deeds."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import adapter, checkpoint, evaluate, loop, models, phases, planning, shortage, supervise, watch
from .build import load, rewritten
from .candidates import rewrite
from .cap import capped
from .config import Config
from .data.order import spaced
from .errors import CheckpointError, DataError, Diverged, OutOfMemory
from .events import EventLog, number, steps
from .footprint import MOMENT_LABELS, STEP
from .layout import Micro
from .nn.optimizers import Optimizing
from .obey import worst_rows
from .predict import footprint
from .rehearse import rehearse
from .report.folder import write_report
from .run import Example, MicroBatch, Run, trainable
from .session import Job, peak_rate
from .spec import ModelSpec

SHORTEST_SAMPLE_S = 3.0  # an answer is shown for as long as its evaluation took, and no less
# Ctrl-C, a container's end, and what schedulers send before they take a node back (SLURM's --signal=USR1@60).
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
_UNCHANGED_LENGTH = 2  # examples used to check that packed neighbours do not see each other


@dataclass(slots=True)
class Attempt:
    """One plan being carried out, and what of it is needed where memory runs out."""

    number: int
    """0 for the plan the run began with."""
    goes_on: bool
    """Whether a checkpoint may be there."""
    has_begun: bool = False
    """Whether it is past the rehearsal."""
    run: Run | None = None
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of random numbers, as they were when the step began."""


def carry_out(job: Job, log: EventLog, resumed: bool, limit_bytes: int | None = None) -> str:
    """Train by the plan, and by another one where memory runs out; the run's status. Events tell everything that happens.

    ``limit_bytes`` of tensors is all that the device gives.
    """
    lesson, attempt = supervise.Lesson(), Attempt(0, resumed)
    while True:
        try:
            with capped(limit_bytes, _device(job)):
                return _carry_out(job, log, attempt, resumed)
        except Diverged as error:
            _tell_failed(job, log)
            error.where = str(job.folder)
            error.message = (
                f"stopped before an update that is not a number ({error.message}); the last checkpoint is kept"
            )
            raise
        except shortage.ERRORS as error:
            if not shortage.is_shortage(error):
                raise
            met = _met(job, attempt, error)
        # Out of the handler nothing holds what the step had made.
        try:
            lesson, job = _again(job, log, attempt, met, lesson)
        except OutOfMemory as error:
            _tell_failed(job, log)
            error.where = str(job.folder)
            raise
        attempt = Attempt(attempt.number + 1, True)


def _met(job: Job, attempt: Attempt, error: BaseException) -> shortage.Shortage:
    """What was refused, where; nothing of the step is held by it."""
    message, asked = str(error).partition("\n")[0], shortage.asked_bytes(error)
    if (run := attempt.run) is None:
        return shortage.Shortage("load", message, asked_bytes=asked)
    held = shortage.held_bytes(error, run.device)
    micro = None
    if run.doing.moment in STEP and attempt.has_begun:
        step = min(run.doing.step + 1, job.data.steps)
        examples = [_example(job.data.store, row) for row in job.data.batch(step)]
        groups = run.split([len(ids) for ids, _ in examples])
        micro = shortage.micro_of(run.collate([examples[i] for i in groups[min(run.doing.micro, len(groups) - 1)]]))
    return shortage.Shortage(run.doing.moment, message, run.doing.step, micro, held, asked)


def _again(
    job: Job, log: EventLog, attempt: Attempt, met: shortage.Shortage, lesson: supervise.Lesson
) -> tuple[supervise.Lesson, Job]:
    """The state saved, everything else let go, and a plan that needs less; OutOfMemory where there is none."""
    log.write("out_of_memory", step=met.step, message=f"{MOMENT_LABELS[met.moment]}: {met.message}", moment=met.moment)
    _rescue(job, log, attempt, met.moment)
    attempt.run = None
    shortage.let_go(_device(job))
    if attempt.number == supervise.MOST:
        raise OutOfMemory(
            f"memory ran out again with the plan made after {supervise.MOST} others ({met.message})",
            hint="something else uses the memory, or more and more of it is not given back; finefit resume goes on from the last checkpoint",
        )  # fmt: skip
    model = replace(ModelSpec.from_folder(job.model_folder), name=job.plan.model)
    question = planning.question_of(job.config, model, job.hardware, job.data)
    lesson = supervise.learnt(question, job.plan, met, lesson)
    plan = planning.foreseen(supervise.planned_again(question, job.plan, lesson), model, job.hardware, job.data)
    plan.save(job.folder / "plan.json")
    message = f"{lesson.says}; now {supervise.changed(job.plan, plan)}"
    log.write("replan", step=met.step, plan=plan.to_json(), message=message, predicted=plan.predicted.to_json())
    return lesson, replace(job, plan=plan)


def _rescue(job: Job, log: EventLog, attempt: Attempt, moment: str) -> None:
    """A checkpoint of all updates made so far, if there is not one and the state is whole; else the newest one counts."""
    run, folder = attempt.run, job.folder / "checkpoints"
    if run is None or not run.doing.step:
        return
    if run.optimizer.is_halfway:
        _warn(
            log, f"the update of step {run.doing.step + 1} broke off", "it is made again, from the last checkpoint on"
        )
        return
    run.optimizer.zero_grad(set_to_none=True)
    shortage.let_go(run.device)
    if _last_step(job) == run.doing.step:
        return
    if moment in STEP:  # the step is to be made again
        checkpoint.draw_from(attempt.generators)
    try:
        _save(job, run, log, {"save"}, run.doing.step)
    except (CheckpointError, *shortage.ERRORS) as error:
        if not isinstance(error, CheckpointError) and not shortage.is_shortage(error):
            raise
        _warn(
            log, f"the state of step {run.doing.step} was not saved to {folder}: {error}", "the last checkpoint counts"
        )


def _tell_failed(job: Job, log: EventLog) -> None:
    log.write("end", status="failed", step=_last_step(job), seconds=0.0, loss_before=None, loss_after=None)


def _carry_out(job: Job, log: EventLog, attempt: Attempt, resumed: bool) -> str:
    """``resumed``: the run is one that was begun before."""
    started = time.perf_counter()
    _set_threads(job.config)
    first = attempt.number == 0
    worst = [] if resumed and first else _worst_rows(job)
    if not resumed and first:
        _tell_plan(job, log, worst)
    run = _build(job, log, attempt)
    seconds = time.perf_counter() - started
    if worst:
        _rehearse(job, run, log, worst)
    done = _resume(job, run, log) if attempt.goes_on else 0
    if first:
        for sentence in job.said:
            log.write("warn", message=sentence, hint="")
    if resumed and first:
        log.write("warn", message=f"resumed after step {done} of {job.data.steps}", hint="")
    _tell_build(job, run, log, seconds, verified=bool(worst))
    attempt.has_begun = True
    held_out = [_example(job.data.held_out, row) for row in job.data.evaluated()]
    losses: list[float] = []
    watched: set[str] = set()
    evaluated = {int(event["step"]) for event in steps(job.folder / "events.jsonl", "eval")}
    if done == 0 and (first or 0 not in evaluated):
        losses.append(_evaluate(job, run, log, held_out, watched, 0))
    with stop_on_signals() as stop:
        hooks = loop.Hooks(
            feed=partial(_feed, job, run, attempt),
            evaluate=lambda step: losses.append(_evaluate(job, run, log, held_out, watched, step)),
            save=partial(_save, job, run, log, watched),
            stop=stop,
            blame=partial(_blame, job, run),
        )
        if not first and done and loop.evaluates(_pace(job), done) and done not in evaluated:
            hooks.evaluate(done)
        status = loop.train(run, _pace(job), hooks, log, done)
    if status == "finished":
        adapter.save_trained(run.model, job.folder, job.config.model)
        adapter.save_tokenizer(job.tokenizer, job.folder)
    before, after = _held_out_losses(job.folder, losses)
    step = job.data.steps if status == "finished" else _last_step(job)
    log.write(
        "end", status=status, step=step, seconds=time.perf_counter() - started, loss_before=before, loss_after=after
    )
    write_report(job.folder)
    return status


def _set_threads(config: Config) -> None:
    if config.hardware.threads != "auto":
        torch.set_num_threads(config.hardware.threads)


def _tell_plan(job: Job, log: EventLog, worst: list[int]) -> None:
    plan, data = job.plan, job.data
    log.write(
        "plan", plan=plan.to_json(), model=job.config.model, data=job.config.data, steps=data.steps,
        predicted=plan.predicted.to_json(), hardware=job.hardware.to_json(),
        worst={"tokens": int(sum(data.store.lengths[r] for r in worst)), "where": ", ".join(map(data.store.where, worst))},
    )  # fmt: skip


def _device(job: Job) -> torch.device:
    return torch.device("cpu" if job.hardware.kind == "cpu" else "cuda")


def _build(job: Job, log: EventLog, attempt: Attempt) -> Run:
    plan, device = job.plan, _device(job)
    at = job.config.train
    peak = peak_rate(job.config, plan.method)
    torch.manual_seed(job.config.seed)  # dropout draws from the global generator, which checkpoints keep
    run = attempt.run = rewritten(models.config_of(job.model_folder), plan.techniques, device)
    with watch.phase("load", run) as seen:
        load(run, models.fill_from(job.model_folder), job.config.seed)
    watch.tell(log, "load", 0, seen, plan.predicted)
    run.optimizer.begin(trainable(run.model), Optimizing(peak, at.weight_decay))
    return run


def _resume(job: Job, run: Run, log: EventLog) -> int:
    """The newest whole checkpoint's step, its state put back into the run; 0 where there is none yet."""
    run.doing.moment = "resume"
    if not checkpoint.is_there(job.folder / "checkpoints"):
        return 0
    with watch.phase("resume", run) as seen:
        done = checkpoint.load_newest(run, job.folder / "checkpoints", partial(_warn, log))
    watch.tell(log, "resume", done, seen, job.plan.predicted)
    return done


def _rehearse(job: Job, run: Run, log: EventLog, worst: list[int]) -> None:
    """The worst micro-batch, which the plan's prediction is for, first: measured beside it, and all post-conditions."""
    store = job.data.store
    short = sorted(job.data.rows, key=lambda row: int(store.lengths[row]))[:_UNCHANGED_LENGTH]
    _check_targets(job)
    measured = rehearse(
        run, [_example(store, row) for row in worst], [_example(store, row) for row in short], job.plan.techniques,
        job.plan.gradient_accumulation_steps,
    )  # fmt: skip
    log.write("memory", step=0, measured=measured.to_json(), predicted=job.plan.predicted.to_json())


def _tell_build(job: Job, run: Run, log: EventLog, seconds: float, verified: bool) -> None:
    log.write(
        "build", seconds=seconds, parameters=models.num_parameters(run.model),
        trainable=sum(p.numel() for p in trainable(run.model)),
        techniques=[{"name": t.name, "says": t.describe(), "verified": verified} for t in job.plan.techniques],
    )  # fmt: skip


def _check_targets(job: Job) -> None:
    """The end-of-turn token must be a target: a model that never learns to stop is the commonest silent mistake."""
    store, eos = job.data.store, job.tokenizer.eos_token_id
    cut = job.config.train.max_length  # a truncated example has lost its end
    whole = [row for row in spaced(len(store), 64) if store.lengths[row] < cut][:16]
    if not whole:
        return
    trained = {int(t) for row in whole for t, on in zip(*_example(store, row), strict=True) if on}
    if eos is not None and eos not in trained:
        hint = "the chat template does not end a turn with the tokenizer's end token"
        raise DataError(f"the end-of-turn token {eos} is never trained", hint=hint)


def _worst_rows(job: Job) -> list[int]:
    return worst_rows(job.plan, ModelSpec.from_folder(job.model_folder), job.hardware, job.data.batches())


def _example(store: Any, row: int) -> Example:
    ids, mask = store[row]
    return ids, mask


def _feed(job: Job, run: Run, attempt: Attempt, step: int) -> list[MicroBatch]:
    attempt.generators = checkpoint.generators()
    examples = [_example(job.data.store, row) for row in job.data.batch(step)]
    return [run.collate([examples[i] for i in group]) for group in run.split([len(ids) for ids, _ in examples])]


def _pace(job: Job) -> loop.Pace:
    at, steps = job.config.train, job.data.steps
    peak = peak_rate(job.config, job.plan.method)
    rate = loop.warmup_then_linear(peak, steps, at.warmup_steps)
    return loop.Pace(steps, rate, at.eval_every, at.save_every, at.log_every, at.max_skips)


def _blame(job: Job, run: Run, step: int) -> str:
    """What of a step is not finite: the examples whose own loss is not, else the weights whose gradients are not."""
    rows = job.data.batch(step)
    with torch.random.fork_rng(devices=[]):
        losses = [
            evaluate.unlearned_loss(run, run.collate([_example(job.data.store, row)]).to(run.device)) for row in rows
        ]
    if bad := [job.data.store.where(row) for row, loss in zip(rows, losses, strict=True) if not loss.isfinite()]:
        return f"the loss of {_few(bad)} alone is not finite"
    grads = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
    if bad := [name for name, grad in grads.items() if not grad.isfinite().all()]:
        return f"the gradient of {_few(bad)} is not finite"
    return f"of examples {_few([job.data.store.where(row) for row in rows])} together"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _evaluate(job: Job, run: Run, log: EventLog, held_out: list[Example], watched: set[str], step: int) -> float:
    loss, labelled, seconds = evaluate.held_out_loss(run, held_out, partial(_watch_batch, job, run, log, watched, step))
    fields: dict[str, Any] = {}
    if step in (0, job.data.steps):
        fields["sample"] = _sample(job, run, held_out, max(seconds, SHORTEST_SAMPLE_S))
    log.write("eval", step=step, loss=loss, labelled_tokens=labelled, seconds=seconds, **fields)
    return loss


def _sample(job: Job, run: Run, held_out: list[Example], most_s: float) -> dict[str, str]:
    """One held-out example answered greedily, as far as the time goes: the same one each time."""
    ids, mask = held_out[evaluate.sample_row(held_out)]
    stop = [job.tokenizer.eos_token_id]
    said = evaluate.answer(run.model, evaluate.prompt_of((ids, mask)), stop, 64, most_s)
    reference = [int(t) for t, on in zip(ids, mask, strict=True) if on]
    decode = partial(job.tokenizer.decode, skip_special_tokens=True)
    return {"prompt": decode(evaluate.prompt_of((ids, mask))), "reference": decode(reference), "answer": decode(said)}


@contextmanager
def _watch_batch(job: Job, run: Run, log: EventLog, watched: set[str], step: int, batch: MicroBatch) -> Iterator[None]:
    """Watch the evaluation's largest micro-batch once in a process, beside what is predicted for one of its size."""
    if "eval" in watched:
        yield
        return
    watched.add("eval")
    with watch.phase("eval", run, batch.tensors()) as seen:
        yield
    longest = max(end - start for start, end in zip(batch.bounds, batch.bounds[1:], strict=False))
    micro = Micro(batch.ids_bs.numel(), longest, len(batch.label_l))
    layout = rewrite(ModelSpec.from_folder(job.model_folder), micro, job.plan.techniques)
    said = footprint(layout, job.hardware)
    of_data = {c: n for c, n in job.plan.predicted.host.get("eval", {}).items() if c in ("data", "mapped")}
    host = phases.host(layout, {"eval": said.moments["eval"]}, job.hardware.kind)
    watch.tell(log, "eval", step, seen, replace(said, host={"eval": {**host["eval"], **of_data}}))


def _save(job: Job, run: Run, log: EventLog, watched: set[str], step: int) -> None:
    started, run.doing.moment = time.perf_counter(), "save"
    save = partial(checkpoint.save, run, step, job.folder / "checkpoints", job.config.model)
    keep = job.config.train.keep_checkpoints
    if "save" in watched:
        path, n_bytes = save(keep)
    else:
        watched.add("save")
        with watch.phase("save", run) as seen:
            path, n_bytes = save(keep)
        watch.tell(log, "save", step, seen, job.plan.predicted)
    log.write("save", step=step, path=str(path), bytes=n_bytes, seconds=time.perf_counter() - started)


def _warn(log: EventLog, message: str, hint: str) -> None:
    log.write("warn", message=message, hint=hint)


def _held_out_losses(folder: Path, losses: list[float]) -> tuple[float | None, float | None]:
    """First and last held-out loss; a resumed run finds the first in its log."""
    found = [event for event in steps(folder / "events.jsonl", "eval") if event["step"] == 0]
    first = number(found[0]["loss"]) if found else None
    return first, losses[-1] if losses else None


def _last_step(job: Job) -> int:
    folders = sorted((job.folder / "checkpoints").glob("step-*"))
    return int(folders[-1].name.removeprefix("step-")) if folders else 0


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """They ask for a stop at the next step boundary; a second SIGINT stops at once."""
    asked: list[int] = []
    before: dict[int, Any] = {}

    def ask(number: int, _frame: Any) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    before |= {number: signal.signal(number, ask) for number in STOPPING}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
