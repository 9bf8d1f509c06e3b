"""The training loop. It names no technique: what is off is a null object in the run's slots.

The loss of a step is a sum over labelled tokens divided by the labelled tokens of the whole global batch, so the
gradient does not depend on how the batch was split.
"""

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import psutil
import torch
from torch import Tensor

from .errors import Diverged
from .events import EventLog
from .ledger import NoLedger
from .run import MicroBatch, Run

MOST_SKIPPED = 25  # in a row: the scale is down to 1/512 of 1 then, and range is not what is lacking


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps and what happens between them; an ``every`` of 0 is never. ``learning_rate`` is a function of the step."""

    steps: int
    learning_rate: Callable[[int], float]
    eval_every: int
    save_every: int
    log_every: int
    most_skips: int = 0
    """Updates in a row that may be skipped because a loss or a gradient is not finite."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the loop calls: the micro-batches of a step, an evaluation, a checkpoint, whether somebody wants to stop."""

    feed: Callable[[int], Sequence[MicroBatch]]
    evaluate: Callable[[int], None]
    save: Callable[[int], None]
    stop: Callable[[], bool]
    blame: Callable[[int], str] = lambda _step: ""
    """What of a step, whose gradients are still there, is not finite: which tensor, which examples."""
    grown: Callable[[int, int, float], None] = lambda _step, _tokens, _seconds: None
    """Told each step with its tokens and seconds, when nothing of it is left."""


def train(run: Run, pace: Pace, hooks: Hooks, log: EventLog, done: int) -> Literal["finished", "stopped"]:
    """Steps ``done + 1`` to ``pace.steps``. A checkpoint is saved at the end, and where it is stopped."""
    with _collecting_little():
        return _train(run, pace, hooks, log, done)


def _train(run: Run, pace: Pace, hooks: Hooks, log: EventLog, done: int) -> Literal["finished", "stopped"]:
    skipped, spikes = 0, Spikes()
    process = psutil.Process()
    run.doing.step = done
    for step in range(done + 1, pace.steps + 1):
        started = time.perf_counter()
        rate = pace.learning_rate(step)
        try:
            loss, norm, tokens, labelled = optimizer_step(run, hooks.feed(step), rate)
        except NotFinite as error:
            _skip(run, pace, hooks, log, error, skipped)
            loss, norm, tokens, labelled = error.made
        seconds = time.perf_counter() - started
        skipped = 0 if math.isfinite(loss + norm) else skipped + 1
        if skipped and run.scaler.is_enabled():
            _tell_skipped(run, log, step, skipped)
        if usual := spikes.usual(loss):
            said = f"the loss of step {step} is {loss:.3f}, of the {Spikes.BEFORE} before it {usual:.3f}"
            log.write("warn", message=said, hint="look at its examples, or try a smaller train.learning_rate")
        if step % pace.log_every == 0 or step == pace.steps:
            log.write(
                "step", step=step, steps=pace.steps, loss=loss, learning_rate=rate, grad_norm=norm, tokens=tokens,
                labelled_tokens=labelled, seconds=seconds, tokens_per_s=tokens / seconds,
                rss_bytes=process.memory_info().rss, **_of_device(run),
            )  # fmt: skip
        hooks.grown(step, tokens, seconds)
        stopping, last = hooks.stop(), step == pace.steps
        if last or stopping or (pace.save_every and step % pace.save_every == 0):
            hooks.save(step)
            stopping = stopping and hooks.stop()  # what was to be gone on from may not have been written
        if last or (not stopping and evaluates(pace, step)):
            hooks.evaluate(step)
        if stopping and not last:
            return "stopped"
    return "finished"


def _skip(run: Run, pace: Pace, hooks: Hooks, log: EventLog, error: "NotFinite", skipped: int) -> None:
    """Make no update of a step that is not finite, and say what of it is not; the error where it is one too many."""
    step = run.doing.step + 1
    why = hooks.blame(step)
    if skipped >= pace.most_skips or run.optimizer.is_halfway:
        error.message += f"; {why}" * bool(why)
        raise error
    run.optimizer.zero_grad(set_to_none=True)
    run.doing.step = step
    log.write("skip", step=step, scale=1.0, skipped=skipped + 1, message=f"{error.message}; {why}")


class Spikes:
    """Losses far above those before them."""

    BEFORE, TIMES, DEVIATIONS = 50, 1.5, 6.0

    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=self.BEFORE)

    def usual(self, loss: float) -> float:
        """Their mean before ``loss``, where it is far above; else 0. One that is far above does not count from then on."""
        if not math.isfinite(loss):
            return 0.0
        if len(self.before) == self.BEFORE:
            mean, deviation = statistics.fmean(self.before), statistics.pstdev(self.before)
            if loss > max(self.TIMES * mean, mean + self.DEVIATIONS * deviation):
                return mean
        self.before.append(loss)
        return 0.0


def evaluates(pace: Pace, step: int) -> bool:
    """Whether there is an evaluation after this step."""
    return step == pace.steps or bool(pace.eval_every and step % pace.eval_every == 0)


def _of_device(run: Run) -> dict[str, int]:
    """Since the last time, the most that tensors and their allocator held of a GPU; what is between them is in pieces."""
    if run.device.type != "cuda":
        return {}
    held = {
        "allocated_bytes": torch.cuda.max_memory_allocated(run.device),
        "reserved_bytes": torch.cuda.max_memory_reserved(run.device),
    }
    torch.cuda.reset_peak_memory_stats(run.device)
    return held


@contextmanager
def _collecting_little() -> Iterator[None]:
    """Python's collector does not look again at what is there before: the libraries' half a million objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _tell_skipped(run: Run, log: EventLog, step: int, skipped: int) -> None:
    """A gradient was not finite, so there was no update and the scale is halved; Diverged where it never helps."""
    scale = run.scaler.get_scale()
    log.write("skip", step=step, scale=scale, skipped=skipped, message="a gradient is beyond fp16's range")
    if skipped >= MOST_SKIPPED:
        hint = "memory.precision=fp32 has the range; a smaller train.learning_rate, or a look at the data, may help too"
        raise Diverged(f"{skipped} updates in a row were skipped, with the loss scaled by {scale:g} at last", hint=hint)


class NotFinite(Diverged):
    """What ``optimizer_step`` would have given is in ``made``; gradients are still there."""

    def __init__(self, made: tuple[float, float, int, int]) -> None:
        self.made = made
        hint = "try a smaller train.learning_rate, or look at the data"
        super().__init__(f"loss {made[0]}, norm {made[1]}", hint=hint)


def optimizer_step(run: Run, batches: Sequence[MicroBatch], learning_rate: float) -> tuple[float, float, int, int]:
    """One update from one global batch: (loss per labelled token, gradient norm, real tokens, labelled tokens).

    NotFinite, and no update, where the loss or the norm is not finite (a loss scaler has its own way with that).
    """
    mine = [sum(len(batch.label_l) for batch in batches), sum(batch.tokens for batch in batches)]
    labelled, tokens = map(int, run.world.summed(mine))
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    losses: list[Tensor] = []
    run.passes.learn(run, batches, labelled, losses.append, NoLedger())
    # Only now: a device would be waited for between micro-batches.
    (total,) = run.world.summed(run.world.from_last([sum(loss.item() for loss in losses)]))
    run.doing.moment = "optimizer_step"
    stepped = run.optimizer.gradients()
    run.scaler.unscale_(run.optimizer)
    norm = run.clip(stepped, run.world).item()
    if not (run.scaler.is_enabled() or math.isfinite(total + norm)):
        raise NotFinite((total, norm, tokens, labelled))
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    run.doing.step += 1
    return total, norm, tokens, labelled


def warmup_then_linear(peak: float, steps: int, warmup: float) -> Callable[[int], float]:
    """Learning rate by step (from 1): up over ``warmup`` steps (below 1: a share of ``steps``), then down to 0."""
    rising = round(warmup * steps) if warmup < 1 else int(warmup)

    def rate(step: int) -> float:
        if step <= rising:
            return peak * step / rising
        return peak * (steps - step + 1) / max(1, steps - rising)

    return rate
