"""Memory as stacked bars of characters, in the colours of the report's figures."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from ..report.palette import COLOURS, LABELS, at_peak, with_reserved
from ..report.tables import compared, wholes
from ..units import format_bytes

_BLOCK, _ASCII_BLOCK = "█", "#"


def stacked(footprint: Mapping[str, Any], whole_bytes: int, width: int, ascii_only: bool) -> Text:
    """What a footprint needs at its peak, by component, on a scale of ``whole_bytes``; edges are rounded, not parts."""
    bar, done, total = Text(), 0, 0
    for component, n_bytes in with_reserved(footprint).items():
        total += n_bytes
        edge = min(width, round(total * width / max(1, whole_bytes)))
        bar.append((_ASCII_BLOCK if ascii_only else _BLOCK) * (edge - done), style=COLOURS[component])
        done = max(done, edge)
    return bar.append(" " * (width - done))


def component_table(
    predicted: Mapping[str, Any] | None, measured: Mapping[str, Any] | None, *, ascii_only: bool
) -> Table:
    """Component, predicted, measured and difference at the peak; the swatch is the component's colour in the bars."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    table.add_column("memory at the peak")
    for title in ("predicted", "measured", "difference"):
        table.add_column(title, justify="right")
    ours = at_peak(predicted) if predicted else None
    theirs = at_peak(measured) if measured else None
    swatch = _ASCII_BLOCK if ascii_only else "■"
    for component, colour in COLOURS.items():
        pair = (ours[component] if ours else None, theirs[component] if theirs else None)
        if any(pair):
            table.add_row(Text.assemble((swatch, colour), " ", LABELS[component]), *compared(*pair))
    for row in wholes(predicted, measured):
        table.add_row(f"  {row[0]}", *row[1:], style="bold")
    return table


def capacity(needed_bytes: int, budget_bytes: int | None, device: str) -> Text:
    """How much of the budget a run needs; red when it is more than there is."""
    on = f" on {device}" if device else ""
    if not budget_bytes:
        return Text(f"needs {format_bytes(needed_bytes)}{on}")
    share = needed_bytes / budget_bytes
    words = f"needs {format_bytes(needed_bytes)} of {format_bytes(budget_bytes)}{on}, {100 * share:.0f} %"
    return Text(words, style="bold red" if share > 1 else "bold green")
