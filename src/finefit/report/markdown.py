"""``report.md`` of a run: what came of it, predicted beside measured memory, and how to go on."""

import re
from collections.abc import Sequence

from ..units import format_bytes
from . import tables
from .palette import MOMENTS
from .summary import Summary

#: A prompt longer than this is shown by its end, where the function to be described stands.
_PROMPT_CHARACTERS = 4000


def to_markdown(summary: Summary, folder: str, figures: Sequence[tuple[str, str]] = ()) -> str:
    """The report as Markdown. ``folder``: how commands name the run; ``figures``: (title, file) beside the report."""
    parts = [
        _title(summary),
        _table(("", ""), tables.facts(summary)),
        _losses(summary),
        *(f"![{title}]({file})" for title, file in figures),
        _memory(summary),
        _sample(summary),
        _techniques(summary),
        _list("Why this plan", [str(reason) for reason in summary.plan.get("reasons", ())]),
        _list("Warnings", list(summary.notes)),
        _commands(summary, folder),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(summary: Summary) -> str:
    names = " on ".join(name for name in (summary.model, summary.data) if name)
    title = f"# {names or 'A run without a plan'}"
    if summary.status == "unfinished":
        title += "\n\nThis run has not ended: it is still running, or it was killed. What follows is as far as it got."
    return title


def _losses(summary: Summary) -> str:
    rows = tables.losses(summary)
    if not rows:
        return "## Loss\n\nNo step is done yet."
    course = tables.loss_rows(summary)
    text = f"## Loss\n\n{_table(('loss per labelled token', 'before', 'after', 'change'), rows)}"
    if len(course) > 1:
        text += f"\n\n{_table(('step', 'training', 'held-out'), course)}"
    return text


def _memory(summary: Summary) -> str:
    rows = tables.components(summary)
    if not rows:
        return ""
    parts = ["## Memory: predicted and measured"]
    if summary.error_of_peak is not None and summary.predicted and summary.measured:
        parts.append(
            f"Predicted {format_bytes(summary.predicted['peak_bytes'])}, "
            f"{summary.measured.get('witness', 'measured')} {format_bytes(summary.measured['peak_bytes'])} "
            f"at step {summary.measured_at_step}, {_moment(summary.measured['peak_moment'])}: "
            f"{_verdict(summary.error_of_peak)}."
        )
    elif not summary.measured:
        parts.append("Nothing is measured yet.")
    budget = summary.plan.get("budget_bytes")
    if budget:
        parts.append(f"The budget was {format_bytes(budget)}.")
    parts.append(_table(("at the peak", "predicted", "measured", "difference"), rows))
    if by_moment := tables.moments(summary):
        parts.append(_table(("moment of the run", "predicted", "measured", "difference"), by_moment))
    if of_host := tables.hosts(summary):
        parts.append(_table(("host's memory", "predicted", "of it mapped files", "measured", "difference"), of_host))
    return "\n\n".join(parts)


def _verdict(error: float) -> str:
    size = f"{100 * abs(error):.1f} %"
    return (
        "the prediction is right"
        if size == "0.0 %"
        else f"the prediction is {size} too {'high' if error > 0 else 'low'}"
    )


def _moment(name: str) -> str:
    return MOMENTS.get(name, name)


def _sample(summary: Summary) -> str:
    before, after = summary.sample_before, summary.sample_after
    if before is None:
        return ""
    parts = [
        "## One held-out example",
        _fenced("Asked", _end_of(before.prompt)),
        _fenced("Before training", before.answer),
    ]
    if after is not None:
        parts.append(_fenced("After training", after.answer))
    parts.append(_fenced("Written by a person", (after or before).reference))
    return "\n\n".join(parts)


def _end_of(prompt: str) -> str:
    return prompt if len(prompt) <= _PROMPT_CHARACTERS else f"…{prompt[-_PROMPT_CHARACTERS:]}"


def _fenced(title: str, text: str) -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"**{title}**\n\n{fence}text\n{text.strip() or '(nothing)'}\n{fence}"


def _techniques(summary: Summary) -> str:
    rows = [(one.name, one.says, one.verified) for one in summary.techniques]
    return f"## Techniques\n\n{_table(('technique', 'what it does', 'verified'), rows)}" if rows else ""


def _list(title: str, items: list[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {_one_line(item)}" for item in items) if items else ""


def _commands(summary: Summary, folder: str) -> str:
    lines = [f"finefit chat {folder}"] if summary.saves or summary.status == "finished" else []
    if summary.status != "finished":
        lines.insert(0, f"finefit resume {folder}")
    return "## Go on\n\n```sh\n" + "\n".join(lines) + "\n```"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers (every column but the first of a table with a head) stand right."""
    numbers = bool(head[0] or any(head)) and head[0] != "technique"
    ruler = ["---", *(["---:" if numbers else "---"] * (len(head) - 1))]
    lines = [head, ruler, *(tuple(_cell(cell) for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(text.split())
