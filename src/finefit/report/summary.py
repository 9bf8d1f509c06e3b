"""A run's events become one frozen `Summary`, which the three reports (Markdown, terminal text, figures) only print.

It knows resumes (steps trained again replace those lost), re-plans (the last plan counts) and runs that never ended.
It declines to open checkpoints or weights: the events are the only record.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..events import Event, last_of_each_step, number, read

EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True, slots=True)
class Sample:
    """One held-out example and what the model made of it."""

    prompt: str
    reference: str
    answer: str


@dataclass(frozen=True, slots=True)
class Point:
    """A loss at a step."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Technique:
    name: str
    says: str
    verified: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run was, what it did and what it took. None is *not known*: the run did not get there."""

    model: str
    data: str
    plan: Mapping[str, Any]
    hardware: Mapping[str, Any]
    worst: Mapping[str, Any]
    parameters: int | None
    trainable: int | None
    techniques: tuple[Technique, ...]
    status: str
    """finished, stopped, failed, or unfinished: still running, or killed."""
    steps_planned: int
    losses: tuple[Point, ...]
    held_out: tuple[Point, ...]
    loss_before: float | None
    loss_after: float | None
    sample_before: Sample | None
    sample_after: Sample | None
    predicted: Mapping[str, Any] | None
    measured: Mapping[str, Any] | None
    measured_at_step: int | None
    hosts: tuple[tuple[str, Mapping[str, int], int], ...]
    """(moment, predicted by component, resident at the peak) of the host's memory."""
    tokens: int
    labelled_tokens: int
    seconds: float
    tokens_per_s: float | None
    step_seconds: float | None
    saves: tuple[str, ...]
    resumes: int
    notes: tuple[str, ...]
    """Warnings, times the memory ran out, and plans made again, in the order they came."""

    @property
    def steps_done(self) -> int:
        return self.losses[-1].step if self.losses else 0

    @property
    def error_of_peak(self) -> float | None:
        """(predicted - measured) / measured of the peak."""
        if not self.predicted or not self.measured or not self.measured["peak_bytes"]:
            return None
        return float(self.predicted["peak_bytes"] / self.measured["peak_bytes"] - 1)


def summarize_run(folder: Path) -> Summary:
    """The summary of a run folder, or of an event log named directly."""
    path = Path(folder)
    log = path / EVENTS_FILE if path.is_dir() else path
    events = list(read(log))
    if not events:
        raise CheckpointError("the event log is empty: the run has not begun", where=str(log))
    return summarize(events)


def summarize(events: Iterable[Event]) -> Summary:
    """The summary of events in the order they were written."""
    by_name: dict[str, list[Event]] = {}
    order = list(events)
    for event in order:
        by_name.setdefault(event["event"], []).append(event)
    plan = _last(by_name, "plan")
    build = _last(by_name, "build")
    replanned = _last(by_name, "replan")
    steps = last_of_each_step(by_name.get("step", []))
    evals = last_of_each_step(by_name.get("eval", []))
    end = _last(by_name, "end") if _is_over(order) else {}
    memory = max(by_name.get("memory", []), key=lambda one: int(one["measured"]["peak_bytes"]), default=None)
    seconds = [number(step["seconds"]) for step in steps]
    samples = [event for event in evals if event.get("sample")]
    phases = {str(event["moment"]): event for event in by_name.get("phase", [])}
    predicted = memory["predicted"] if memory else replanned.get("predicted") or plan.get("predicted")
    return Summary(
        model=str(plan.get("model", "")),
        data=str(plan.get("data", "")),
        plan=_newer_plan(order) or {},
        hardware=plan.get("hardware") or {},
        worst=plan.get("worst") or {},
        parameters=build.get("parameters"),
        trainable=build.get("trainable"),
        techniques=tuple(
            Technique(str(one["name"]), str(one.get("says", "")), _verified(one.get("verified")))
            for one in build.get("techniques", ())
        ),
        status=str(end.get("status", "unfinished")),
        steps_planned=int(steps[-1]["steps"] if steps else plan.get("steps") or 0),
        losses=tuple(Point(int(step["step"]), number(step["loss"])) for step in steps),
        held_out=tuple(Point(int(event["step"]), number(event["loss"])) for event in evals),
        loss_before=_first_known(end.get("loss_before"), evals[0]["loss"] if evals else None),
        loss_after=_first_known(end.get("loss_after"), evals[-1]["loss"] if len(evals) > 1 else None),
        sample_before=_sample(samples[0]) if samples else None,
        sample_after=_sample(samples[-1]) if len(samples) > 1 else None,
        predicted=_with_phases(predicted, {name: one["predicted"] for name, one in phases.items()}),
        measured=_with_phases(
            memory["measured"] if memory else None, {name: one["measured"] for name, one in phases.items()}
        ),
        hosts=tuple((name, one["predicted_host"], int(one["host_bytes"])) for name, one in phases.items()),
        measured_at_step=int(memory["step"]) if memory else None,
        tokens=sum(int(step["tokens"]) for step in steps),
        labelled_tokens=sum(int(step["labelled_tokens"]) for step in steps),
        seconds=sum(seconds),
        tokens_per_s=sum(int(step["tokens"]) for step in steps) / sum(seconds) if sum(seconds) > 0 else None,
        step_seconds=statistics.median(seconds) if seconds else None,
        saves=tuple(str(event["path"]) for event in last_of_each_step(by_name.get("save", []))),
        resumes=_resumes(order),
        notes=(
            *(_note(event) for event in order if event["event"] in ("warn", "growth", "out_of_memory", "replan")),
            *_skipped(by_name.get("skip", [])),
        ),
    )


def _with_phases(
    footprint: Mapping[str, Any] | None, phases: Mapping[str, Mapping[str, int]]
) -> Mapping[str, Any] | None:
    """A footprint with what is known of moments beside the step; the peak may be one of them."""
    known = {name: parts for name, parts in phases.items() if parts}
    if footprint is None or not known:
        return footprint
    moments = {**footprint.get("moments", {}), **known}
    sums = {name: sum(map(int, parts.values())) for name, parts in moments.items()}
    peak = max(sums, key=lambda name: sums[name])
    if sums[peak] <= int(footprint["peak_bytes"]):
        peak = str(footprint["peak_moment"])
    return {
        **footprint,
        "moments": moments,
        "peak_moment": peak,
        "peak_bytes": max(sums[peak], int(footprint["peak_bytes"])),
    }


def _last(by_name: Mapping[str, list[Event]], name: str) -> Event:
    return by_name[name][-1] if by_name.get(name) else {}


def _newer_plan(events: Iterable[Event]) -> Mapping[str, Any] | None:
    """The plan in force at the end: of the last ``plan`` or ``replan``, whichever came later."""
    plans = [event["plan"] for event in events if event["event"] in ("plan", "replan")]
    return plans[-1] if plans else None


def _is_over(events: list[Event]) -> bool:
    """Whether the last thing that happened was the end: a resumed run goes on after it, a merge is no part of it."""
    own = (one for one in reversed(events) if one["event"] != "warn" and one.get("moment") != "merge")
    return next((one["event"] for one in own), "") == "end"


def _resumes(events: Iterable[Event]) -> int:
    """How often the run was built again, not counting what a new plan after running out of memory built."""
    builds, planned_again = 0, False
    for event in events:
        builds += event["event"] == "build" and not planned_again
        if event["event"] in ("build", "replan"):
            planned_again = event["event"] == "replan"
    return max(0, builds - 1)


def _first_known(*values: Any) -> float | None:
    return next((number(value) for value in values if value is not None), None)


def _sample(event: Event) -> Sample:
    sample = event["sample"]
    return Sample(*(str(sample.get(key) or "") for key in ("prompt", "reference", "answer")))


def _verified(value: Any) -> str:
    """``verified`` of a build event: a sentence, or yes and no."""
    if isinstance(value, bool) or value is None:
        return "yes" if value else "no"
    return str(value)


def _skipped(events: list[Event]) -> list[str]:
    if not events:
        return []
    why: dict[str, list[Event]] = {}
    for event in events:
        why.setdefault(str(event["message"]), []).append(event)
    said = []
    for message, alike in why.items():
        scale = number(alike[-1]["scale"])
        scaled = f"; the loss was scaled by {scale:g} after the last" * (scale != 1)
        said.append(f"{len(alike)} updates skipped: {message}{scaled}")
    return said


def _note(event: Event) -> str:
    match event["event"]:
        case "growth":
            return f"step {event['step']}: {event['kind']}, {event['message']}; {event['hint']}"
        case "out_of_memory":
            return f"step {event['step']}: out of memory, {event['message']}"
        case "replan":
            return f"step {event['step']}: planned again, {event['message']}"
    return f"{event['message']} ({event['hint']})" if event.get("hint") else str(event["message"])
