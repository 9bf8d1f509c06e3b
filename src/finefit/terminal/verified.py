"""Two witnesses side by side on the terminal: what was predicted and what was simulated, component by component."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..report.palette import LABELS, MOMENTS
from ..units import format_bytes


def verified_view(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what ``verify`` found, given as its JSON dict."""
    out = console or Console()
    predicted, simulated = found["predicted"], found["simulated"]
    if simulated is None:
        out.print(Text(f"\nnot verified: {found['why_not']}", style="yellow"))
        return
    micro = found["micro_batch"]
    moment = predicted["peak_moment"]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"{micro['tokens']:,} tokens, at {MOMENTS.get(moment, moment)}")
    for name in ("predicted", "simulated", "difference"):
        table.add_column(name, justify="right")
    ours, theirs = predicted["moments"][moment], simulated["moments"][moment]
    for component in dict.fromkeys((*ours, *theirs)):
        table.add_row(*_row(LABELS.get(component, component), ours.get(component, 0), theirs.get(component, 0)))
    table.add_row(*_row("peak", predicted["peak_bytes"], simulated["peak_bytes"]))
    out.print()
    out.print(table)
    out.print(Text(_reserved(found), style="dim"))


def _row(label: str, one: int, other: int) -> tuple[str, str, str, str]:
    share = f"{100 * (one / other - 1):+.3f} %" if other else "–"
    return label, format_bytes(one), format_bytes(other), share


def _reserved(found: Mapping[str, Any]) -> str:
    said = f"simulated in {found['seconds']:.1f} s on the real model"
    if found["reserved_bytes"] == found["allocated_bytes"]:
        return said
    return (
        f"{said}; the allocator would reserve {format_bytes(found['reserved_bytes'])}, "
        f"and go through with {format_bytes(found['capacity_bytes'])}"
    )
