"""Rows of the reports as text, shared by Markdown and the terminal so that both say the same."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..units import format_bytes, format_seconds
from .palette import COLOURS, LABELS, MOMENTS, at_peak, moment_bytes, total_bytes
from .summary import Point, Summary

Rows = list[tuple[str, ...]]

UNKNOWN = "–"


def facts(summary: Summary) -> Rows:
    """(what, value): the run in a few lines."""
    rows: Rows = [("status", status(summary))]
    if summary.parameters:
        share = f" ({100 * summary.trainable / summary.parameters:.3g} %)" if summary.trainable else ""
        rows.append(("trained parameters", f"{summary.trainable or 0:,} of {summary.parameters:,}{share}"))
    if method := summary.plan.get("method"):
        rows.append(("method", str(method)))
    split = next((t["says"] for t in summary.plan.get("techniques", ()) if t.get("name") == "accumulation"), "")
    if split:
        whole = f"{summary.plan['global_batch_size']} examples a step: " if "global_batch_size" in summary.plan else ""
        rows.append(("batch", whole + split))
    if hardware := summary.hardware.get("name"):
        rows.append(("device", str(hardware)))
    if summary.losses:
        rows.append(("tokens", f"{summary.tokens:,}, {summary.labelled_tokens:,} of them trained on"))
        rows.append(("time in steps", format_seconds(summary.seconds)))
    if summary.tokens_per_s and summary.step_seconds is not None:
        speed = f"{summary.tokens_per_s:,.0f} tokens/s, median step {format_seconds(summary.step_seconds)}"
        rows.append(("speed", speed))
    return rows


def status(summary: Summary) -> str:
    steps = f"{summary.steps_done} of {summary.steps_planned} steps"
    resumed = f", resumed {summary.resumes} ×" if summary.resumes else ""
    return f"{summary.status}, {steps}{resumed}"


def losses(summary: Summary) -> Rows:
    """(loss of, before, after, change): held-out and training."""
    rows: Rows = []
    if summary.loss_before is not None:
        rows.append(("held-out examples", *_change(summary.loss_before, summary.loss_after)))
    if summary.losses:
        after = summary.losses[-1].loss if len(summary.losses) > 1 else None
        rows.append(("training, first and last step", *_change(summary.losses[0].loss, after)))
    return rows


def components(summary: Summary) -> Rows:
    """(component, predicted, measured, difference) at the peak, then the whole; empty components are left out."""
    predicted = at_peak(summary.predicted) if summary.predicted else None
    measured = at_peak(summary.measured) if summary.measured else None
    rows: Rows = []
    for component in COLOURS:
        pair = (predicted[component] if predicted else None, measured[component] if measured else None)
        if any(pair):
            rows.append((LABELS[component], *compared(*pair)))
    if rows:
        rows += wholes(summary.predicted, summary.measured)
    return rows


def wholes(predicted: Mapping[str, Any] | None, measured: Mapping[str, Any] | None) -> Rows:
    """Rows below the components: their sum, and where anything is reserved beside it, that and what the device needs.

    A measurement without a reserved part did not see it (a CPU has no caching allocator), so it is not compared.
    """
    rows: Rows = [("peak", *compared(*_both(predicted, measured, "peak_bytes")))]
    kept = [n_bytes or None for n_bytes in _both(predicted, measured, "reserved_bytes")]
    if any(kept):
        rows.append(("reserved beside it", *compared(kept[0], kept[1])))
        pair = (predicted if kept[0] else None, measured if kept[1] else None)
        rows.append(("needed on the device", *compared(*(total_bytes(one) if one else None for one in pair))))
    return rows


def moments(summary: Summary) -> Rows:
    """(moment, predicted, measured, difference) in the order of a step; the moments of the peaks are marked."""
    rows: Rows = []
    for moment, label in MOMENTS.items():
        pair = [moment_bytes(one, moment) if one else None for one in (summary.predicted, summary.measured)]
        if any(value is not None for value in pair):
            rows.append((label + _peak_mark(summary, moment), *compared(pair[0], pair[1])))
    return rows


def hosts(summary: Summary) -> Rows:
    """(moment, predicted, of it files, resident, difference) of the host's memory beside the steps."""
    rows: Rows = []
    for moment, parts, resident in _hosts(summary):
        predicted, measured, difference = compared(sum(map(int, parts.values())) or None, resident)
        files = format_bytes(parts["mapped"]) if parts.get("mapped") else UNKNOWN
        rows.append((MOMENTS[moment], predicted, files, measured, difference))
    return rows


def beside(summary: Summary) -> Rows:
    """(moment, predicted, measured, predicted, measured): device and host in what a run does beside its steps."""
    rows: Rows = []
    for moment, parts, resident in _hosts(summary):
        device = [moment_bytes(one, moment) if one else None for one in (summary.predicted, summary.measured)]
        host = compared(sum(map(int, parts.values())) or None, resident)
        rows.append((MOMENTS[moment], *compared(device[0], device[1])[:2], *host[:2]))
    return rows


def _hosts(summary: Summary) -> list[tuple[str, Mapping[str, int], int]]:
    """Those of known moments, in the order of a run."""
    found = {moment: (moment, parts, resident) for moment, parts, resident in summary.hosts}
    return [found[moment] for moment in MOMENTS if moment in found]


def sparse(points: Sequence[Point], most: int = 12) -> list[Point]:
    """At most ``most`` points: the first, the last, and evenly between."""
    if len(points) <= most:
        return list(points)
    picked = sorted({round(i * (len(points) - 1) / (most - 1)) for i in range(most)})
    return [points[i] for i in picked]


def loss_rows(summary: Summary) -> Rows:
    """(step, training loss, held-out loss), sparsely; every step with a held-out loss that is shown has its row."""
    held_out = {point.step: point.loss for point in sparse(summary.held_out)}
    training = {point.step: point.loss for point in sparse(summary.losses)}
    return [
        (str(step), loss_text(training.get(step)), loss_text(held_out.get(step)))
        for step in sorted(training.keys() | held_out.keys())
    ]


def compared(predicted: int | None, measured: int | None) -> tuple[str, str, str]:
    """Predicted, measured and their difference in percent of the measured."""
    texts = [UNKNOWN if value is None else format_bytes(value) for value in (predicted, measured)]
    if predicted is None or not measured:
        return texts[0], texts[1], UNKNOWN
    return texts[0], texts[1], percent(predicted / measured - 1)


def percent(share: float) -> str:
    """``+1.2 %``; a difference that rounds to nothing is ``0.0 %``."""
    text = f"{100 * share:+.1f}"
    return "0.0 %" if text in ("+0.0", "-0.0") else f"{text} %"


def loss_text(loss: float | None) -> str:
    if loss is None:
        return UNKNOWN
    return f"{loss:.4f}" if math.isfinite(loss) else str(loss)


def _change(before: float, after: float | None) -> tuple[str, str, str]:
    if after is None:
        return loss_text(before), UNKNOWN, UNKNOWN
    change = after - before
    return loss_text(before), loss_text(after), f"{change:+.4f}" if math.isfinite(change) else UNKNOWN


def _both(
    predicted: Mapping[str, Any] | None, measured: Mapping[str, Any] | None, key: str
) -> tuple[int | None, int | None]:
    ours, theirs = (int(one.get(key, 0)) if one else None for one in (predicted, measured))
    return ours, theirs


def _peak_mark(summary: Summary, moment: str) -> str:
    named = [
        word
        for word, footprint in (("predicted", summary.predicted), ("measured", summary.measured))
        if footprint and footprint.get("peak_moment") == moment
    ]
    return f" (peak, {' and '.join(named)})" if named else ""
