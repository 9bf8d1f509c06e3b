"""What fits a device, as a table: a row a model, for each method the longest sequence and the speed. Sees plain values."""

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..units import format_bytes
from .listing import count_text

_USUAL = 2048
_LEGEND = (
    "length: tokens of the longest example that fits, k = 1,024; green: all the model's positions, yellow: 2k and more.\n"
    "tok/s: predicted at 2k tokens, or at the longest below it.  -: not 512 tokens fit.  ?: not known without a trace."
)


def show_fits(found: Mapping[str, Any], *, as_json: bool = False, console: Console | None = None) -> None:
    """Print what `fits.fits` found, or that as JSON."""
    out = console or Console()
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False), file=out.file)
        return
    used, whole = format_bytes(found["budget_bytes"]), format_bytes(found["memory_bytes"])
    out.print(Text(f"{found['device']}: {used} of {whole} used, one example at a time", style="bold"))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("model", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for method in found["methods"]:
        table.add_column(method, justify="right", no_wrap=True)
        table.add_column("tok/s", justify="right", no_wrap=True)
    for name, fits in by_model(found).items():
        cells = [part for method in found["methods"] for part in _cells(fits[method])]
        table.add_row(name, count_text(next(iter(fits.values()))["parameters"]), *cells)
    out.print(table)
    out.print(Text(_LEGEND, style="dim"))


def by_model(found: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Rows by model and method; models of which nothing fits or is known are left out."""
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in found["rows"]:
        rows.setdefault(row["model"], {})[row["method"]] = row
    return {name: fits for name, fits in rows.items() if any(fit["longest"] for fit in fits.values())}


def words(row: Mapping[str, Any]) -> tuple[str, str]:
    """Length and speed as text: ``32k``, ``1,234``; ``-`` where nothing fits, ``?`` where it is not known."""
    if not row["longest"]:
        return ("?" if row["why"] else "-"), ""
    speed = (row["usual"] or row["longest"])["tokens_per_s"]
    return f"{row['longest']['length'] / 1024:g}k", f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"


def _cells(row: Mapping[str, Any]) -> tuple[Text, Text]:
    length, speed = words(row)
    style = "dim"
    if row["longest"]:
        tokens = row["longest"]["length"]
        style = "green" if tokens > row["context"] - 512 else "yellow" if tokens >= _USUAL else "red"
    return Text(length, style=style), Text(speed, style="dim" if not speed else "")
