"""The report for a terminal: the same tables as ``report.md``, aligned, without colour, and short."""

from collections.abc import Sequence

from . import tables
from .summary import Summary

_MOST_CHARACTERS = 900


def to_text(summary: Summary, folder: str) -> str:
    """The report as plain lines. ``folder`` is how commands name the run."""
    names = " on ".join(name for name in (summary.model, summary.data) if name) or "a run without a plan"
    parts = [names, *_aligned(tables.facts(summary))]
    if rows := tables.losses(summary):
        parts += ["", *_aligned([("loss", "before", "after", "change"), *rows])]
    if rows := tables.components(summary):
        parts += ["", *_aligned([("memory at the peak", "predicted", "measured", "difference"), *rows])]
    if rows := tables.beside(summary):
        parts += ["", *_aligned([("beside the steps", "predicted", "measured", "host predicted", "measured"), *rows])]
    shown = summary.sample_after or summary.sample_before
    if shown is not None:
        parts += ["", "held-out example:", *_indented(shown.prompt), "", "its own answer:", *_indented(shown.reference)]
    for title, sample in (("before training", summary.sample_before), ("after training", summary.sample_after)):
        if sample is not None:
            parts += ["", f"answer {title}:", *_indented(sample.answer)]
    if summary.notes:
        parts += ["", "warnings:", *(f"  {note}" for note in summary.notes)]
    verb = "chat" if summary.status == "finished" else "resume"
    return "\n".join([*parts, "", f"go on: finefit {verb} {folder}"]) + "\n"


def _indented(text: str) -> list[str]:
    whole = text.strip("\n") or "(nothing)"
    cut = whole if len(whole) <= _MOST_CHARACTERS else f"{whole[:_MOST_CHARACTERS]}…"
    return [f"  {line}".rstrip() for line in cut.splitlines()]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Two columns as they are; more with the numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = len(widths) > 2
    return [
        "  ".join(
            cell.rjust(width) if numbers and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
