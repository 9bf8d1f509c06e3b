"""Carrying one plan out: build, rehearse, evaluate, loop, export. The torch half of a session; functions, no class of deeds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from . import adapt, adapter, checkpoint, evaluate, growth, loop, models, phases, shortage, supervise, watch
from .build import load, rewritten
from .candidates import rewrite
from .config import Config
from .data.order import spaced
from .errors import CheckpointError, DataError
from .events import EventLog, number, read, steps
from .nn.optimizers import Optimizing
from .obey import worst_rows
from .plan import Plan
from .predict import footprint
from .rehearse import rehearse
from .report.folder import write_report
from .run import Example, MicroBatch, Run, batches_of, trainable
from .session import Job, peak_rate
from .spec import ModelSpec
from .stopping import Stopping
from .units import format_bytes

SHORTEST_SAMPLE_S = 3.0  # an answer is shown for as long as its evaluation took, and no less
_UNCHANGED_LENGTH = 2  # examples used to check that packed neighbours do not see each other


@dataclass(slots=True)
class Attempt:
    """One plan being carried out, and what of it is needed where memory runs out."""

    number: int
    """0 for the plan the run began with."""
    is_resumed: bool
    """Whether the run was begun before."""
    stopping: Stopping
    started: float = field(default_factory=time.perf_counter)
    run: Run | None = None
    has_begun: bool = False
    """Whether it is past the rehearsal."""
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of random numbers, as they were when a step began, after ``drawn_at`` updates."""
    drawn_at: int = -1
    better: adapt.Better = adapt.nothing_better
    measured: adapt.Measured | None = None
    """By the rehearsal."""
    then: Plan | None = None
    """The plan to go on with, found while this one ran."""

    @property
    def is_first(self) -> bool:
        return self.number == 0


def attempted(job: Job, log: EventLog, attempt: Attempt) -> str:
    """Train by the plan; the run's status, "adapting" where another plan shall go on. Events tell everything that happens."""
    _set_threads(job.config)
    new = attempt.is_first and not attempt.is_resumed
    stays = attempt.is_first and attempt.is_resumed and not job.before and attempt.better is adapt.nothing_better
    worst = [] if stays and _is_rehearsed(job) else _worst_rows(job)
    if new:
        _tell_plan(job, log, worst)
    _tell_said(job, log, attempt)
    run = _build(job, log, attempt)
    seconds = time.perf_counter() - attempt.started
    if worst:
        attempt.measured = _rehearse(job, run, log, worst)
    done = run.doing.step = 0 if new else _resume(job, run, log)
    if attempt.is_first and attempt.is_resumed:
        warn(log, f"resumed after step {done} of {job.data.steps}", "")
    _tell_build(job, run, log, seconds, verified=bool(worst))
    attempt.has_begun = True
    evaluated = set() if new else {int(event["step"]) for event in steps(job.folder / "events.jsonl", "eval")}
    hooks = _hooks(job, run, log, attempt)
    if done not in evaluated and (not done or loop.evaluates(_pace(job), done)):
        hooks.evaluate(done)
    attempt.stopping.begin()
    status = loop.train(run, _pace(job), hooks, log, done)
    if status == "stopped" and not attempt.stopping():
        return "adapting"
    if status == "finished":
        run.doing.moment = "save"
        if job.world.size > 1:
            job.world.wait()
        if job.world.is_first:
            _write_result(job, run)
    tell_end(job, log, status, attempt.started)
    if not job.world.is_first:
        return status
    try:
        write_report(job.folder)
    except CheckpointError as error:  # what was trained is written
        warn(log, f"the report was not written: {error.message}", f"finefit report {job.folder} makes it")
    return status


def _write_result(job: Job, run: Run) -> None:
    """The trained weights, which several ranks have in parts and the last checkpoint whole."""
    if run.world.size > 1:
        checkpoint.consolidate(checkpoint.newest_whole(job.folder / "checkpoints"), run, job.folder, job.config.model)
    else:
        adapter.save_trained(run.model, job.folder, job.config.model)
    adapter.save_tokenizer(job.tokenizer, job.folder)


def _hooks(job: Job, run: Run, log: EventLog, attempt: Attempt) -> loop.Hooks:
    watched: set[str] = set()
    held_out = [example_of(job.data.held_out, row) for row in job.data.evaluated()]
    return loop.Hooks(
        feed=partial(_feed, job, run, attempt),
        evaluate=partial(_evaluate, job, run, log, held_out, watched),
        save=partial(_save, job, run, log, watched, attempt),
        stop=partial(_stops, job, run, attempt, run.doing.step),
        blame=partial(_blame, job, run),
        grown=partial(_tell_growth, log, growth.Growth(run.model, run.device)),
    )


def _stops(job: Job, run: Run, attempt: Attempt, begun_at: int) -> bool:
    """At a step's end: somebody asked for it, or another plan is better."""
    if run.world.size > 1:
        attempt.stopping.asked = run.world.any(attempt.stopping())
        return attempt.stopping()
    is_time = attempt.then is None and run.doing.step - begun_at == adapt.AFTER  # it is asked again when all is saved
    if is_time and attempt.measured and not attempt.stopping():
        attempt.then = attempt.better(job, attempt.measured)
    return attempt.stopping() or attempt.then is not None


def _tell_growth(log: EventLog, seen: growth.Growth, step: int, tokens: int, seconds: float) -> None:
    if found := seen.look(step, tokens, seconds):
        log.write("growth", step=step, kind=found.kind, bytes=found.n_bytes, message=found.message, hint=found.hint)


def tell_end(job: Job, log: EventLog, status: str, started: float) -> None:
    """How it ended, with the first and the last held-out loss that were told."""
    try:
        told = sorted(steps(job.folder / "events.jsonl", "eval"), key=lambda event: int(event["step"]))
    except CheckpointError:  # the disk is gone, and the log with it: the end is told all the same
        told = []
    before, after = (number(told[i]["loss"]) if told else None for i in (0, -1))
    seconds = time.perf_counter() - started
    log.write("end", status=status, step=last_step(job), seconds=seconds, loss_before=before, loss_after=after)


def _is_rehearsed(job: Job) -> bool:
    """Whether the plan's rehearsal was passed: a run may have been ended by it."""
    try:
        told = [
            event["event"]
            for event in read(job.folder / "events.jsonl")
            if event["event"] in ("plan", "replan", "memory")
        ]
    except CheckpointError:
        return False
    return told[-1:] == ["memory"]


def _tell_said(job: Job, log: EventLog, attempt: Attempt) -> None:
    """What there is to say once, before anything can fail."""
    if not attempt.is_first:
        return
    if job.before:
        tell_replanned(log, last_step(job), job.plan, f"as asked: {supervise.changed(job.before, job.plan)}")
    for sentence in job.said:
        warn(log, sentence, "")


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


def device_of(job: Job) -> torch.device:
    if job.hardware.kind == "cuda" and job.world.size > 1:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu" if job.hardware.kind == "cpu" else "cuda")


def _build(job: Job, log: EventLog, attempt: Attempt) -> Run:
    plan, device = job.plan, device_of(job)
    at = job.config.train
    peak = peak_rate(job.config, plan.method)
    if held := growth.hold_to(device):
        warn(
            log,
            f"the GPU's memory is held to the {format_bytes(held)} that are free",
            "its driver would not refuse more, and slow down",
        )
    # Dropout draws from the global generator, which checkpoints keep: other numbers for other examples.
    torch.manual_seed(job.config.seed + job.world.data_rank)
    run = attempt.run = rewritten(models.config_of(job.model_folder), plan.techniques, device, job.world)
    with watch.phase("load", run) as seen:
        load(run, models.fill_from(job.model_folder), job.config.seed)
    watch.tell(log, "load", 0, seen, plan.predicted)
    run.evidence["parameters"] = models.num_parameters(run.model)  # an engine may have nothing whole from now on
    run.evidence["trainable"] = models.num_trainable(run.model)
    run.optimizer.begin(trainable(run.model), Optimizing(peak, at.weight_decay))
    return run


def _resume(job: Job, run: Run, log: EventLog) -> int:
    """The newest whole checkpoint's step, its state put back into the run; 0 where there is none yet."""
    run.doing.moment = "resume"
    if not checkpoint.is_there(job.folder / "checkpoints"):
        return 0
    with watch.phase("resume", run) as seen:
        done = checkpoint.load_newest(run, job.folder / "checkpoints", partial(warn, log))
    watch.tell(log, "resume", done, seen, job.plan.predicted)
    return done


def _rehearse(job: Job, run: Run, log: EventLog, worst: list[int]) -> adapt.Measured:
    """The worst micro-batch, which the plan's prediction is for, first: measured beside it, and all post-conditions."""
    store = job.data.store
    short = sorted(job.data.rows, key=lambda row: int(store.lengths[row]))[:_UNCHANGED_LENGTH]
    _check_targets(job)
    examples = [example_of(store, row) for row in worst]
    measured = rehearse(
        run,
        examples,
        [example_of(store, row) for row in short],
        job.plan.techniques,
        job.plan.gradient_accumulation_steps,
    )
    log.write("memory", step=0, measured=measured.to_json(), predicted=job.plan.predicted.to_json())
    return adapt.Measured(shortage.micro_of(run.collate(examples)), measured)


def _tell_build(job: Job, run: Run, log: EventLog, seconds: float, verified: bool) -> None:
    log.write(
        "build", seconds=seconds, parameters=run.evidence["parameters"], trainable=run.evidence["trainable"],
        techniques=[{"name": t.name, "says": t.describe(), "verified": verified} for t in job.plan.techniques],
    )  # fmt: skip


def _check_targets(job: Job) -> None:
    """The end-of-turn token must be a target: a model that never learns to stop is the commonest silent mistake."""
    store, eos = job.data.store, job.tokenizer.eos_token_id
    cut = job.config.train.max_length  # a truncated example has lost its end
    whole = [row for row in spaced(len(store), 64) if store.lengths[row] < cut][:16]
    if not whole:
        return
    trained = {int(t) for row in whole for t, on in zip(*example_of(store, row), strict=True) if on}
    if eos is not None and eos not in trained:
        hint = "the chat template does not end a turn with the tokenizer's end token"
        raise DataError(f"the end-of-turn token {eos} is never trained", hint=hint)


def _worst_rows(job: Job) -> list[int]:
    batches = job.data.batches().among(job.world.data_size)
    return worst_rows(job.plan, ModelSpec.from_folder(job.model_folder), job.hardware, batches)


def example_of(store: Any, row: int) -> Example:
    ids, mask = store[row]
    return ids, mask


def _feed(job: Job, run: Run, attempt: Attempt, step: int) -> list[MicroBatch]:
    attempt.generators, attempt.drawn_at = checkpoint.generators(run.device), run.doing.step
    examples = [example_of(job.data.store, row) for row in job.data.batch(step)]
    return batches_of(run, examples)


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
            evaluate.unlearned_loss(run, run.collate([example_of(job.data.store, row)]).to(run.device)) for row in rows
        ]
    if bad := [job.data.store.where(row) for row, loss in zip(rows, losses, strict=True) if not loss.isfinite()]:
        return f"the loss of {_few(bad)} alone is not finite"
    stepped = {name: run.optimizer.stepped.get(p, p).grad for name, p in run.model.named_parameters()}
    if bad := [name for name, grad in stepped.items() if grad is not None and not grad.isfinite().all()]:
        return f"the gradient of {_few(bad)} is not finite"
    return f"of examples {_few([job.data.store.where(row) for row in rows])} together"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _evaluate(job: Job, run: Run, log: EventLog, held_out: list[Example], watched: set[str], step: int) -> None:
    loss, labelled, seconds = evaluate.held_out_loss(run, held_out, partial(_watch_batch, job, run, log, watched, step))
    fields: dict[str, Any] = {}
    if step in (0, job.data.steps) and run.world.answers:
        fields["sample"] = _sample(job, run, held_out, max(seconds, SHORTEST_SAMPLE_S))
    log.write("eval", step=step, loss=loss, labelled_tokens=labelled, seconds=seconds, **fields)


def _sample(job: Job, run: Run, held_out: list[Example], most_s: float) -> dict[str, str]:
    """One held-out example answered greedily, as far as the time goes: the same one each time."""
    ids, mask = held_out[evaluate.sample_row(held_out)]
    stop = [job.tokenizer.eos_token_id]
    said = evaluate.answer(run, evaluate.prompt_of((ids, mask)), stop, 64, most_s)
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
    layout = rewrite(ModelSpec.from_folder(job.model_folder), shortage.micro_of(batch), job.plan.techniques)
    said = footprint(layout, job.hardware)
    of_data = {c: n for c, n in job.plan.predicted.host.get("eval", {}).items() if c in ("data", "mapped")}
    host = phases.host(layout, {"eval": said.moments["eval"]}, job.hardware.kind)
    watch.tell(log, "eval", step, seen, replace(said, host={"eval": {**host["eval"], **of_data}}))


def _save(job: Job, run: Run, log: EventLog, watched: set[str], attempt: Attempt, step: int) -> None:
    """A checkpoint. Where the disk does not take it and there are steps to come, that is told, and training goes on, by
    the same plan."""
    try:
        save(job, run, log, watched, step)
    except CheckpointError as error:
        if step == job.data.steps or attempt.stopping() or shortage.is_shortage(error):
            raise
        attempt.then = attempt.measured = None
        warn(log, error.message, f"{error.hint}; training goes on, and the next one is tried in its time")


def save(job: Job, run: Run, log: EventLog, watched: set[str], step: int) -> None:
    started, run.doing.moment = time.perf_counter(), "save"
    write = partial(checkpoint.save, run, step, job.folder / "checkpoints", job.config.model)
    keep = job.config.train.keep_checkpoints
    if "save" in watched:
        path, n_bytes = write(keep)
    else:
        watched.add("save")
        with watch.phase("save", run) as seen:
            path, n_bytes = write(keep)
        watch.tell(log, "save", step, seen, job.plan.predicted)
    log.write("save", step=step, path=str(path), bytes=n_bytes, seconds=time.perf_counter() - started)


def tell_replanned(log: EventLog, step: int, plan: Plan, message: str) -> None:
    log.write("replan", step=step, plan=plan.to_json(), message=message, predicted=plan.predicted.to_json())


def warn(log: EventLog, message: str, hint: str) -> None:
    log.write("warn", message=message, hint=hint)


def last_step(job: Job) -> int:
    return checkpoint.last_step(job.folder / "checkpoints")
