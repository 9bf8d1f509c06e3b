"""What fits a device, as a table: a row a model, for each method the longest sequence and the speed. Sees plain values."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..units import format_bytes
from .listing import count_text, is_room, show_stacked

Row = Mapping[str, Any]
_USUAL = 2048
_LEGEND = (
    "length: tokens of the longest example that fits, k = 1,024; green: all the model's positions, yellow: 2k and more."
)
_SPEEDS = "tok/s: predicted at 2k tokens, or at the longest below it."
_MARKS = {"-": "not 512 tokens fit.", "?": "not known without a trace.", "x": "the method does not take this model."}


def show_fits(found: Mapping[str, Any], *, as_json: bool = False, console: Console | None = None) -> None:
    """Print what `fits.fits` found, or that as JSON."""
    out = console or Console()
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False), file=out.file)
        return
    used, whole = format_bytes(found["budget_bytes"]), format_bytes(found["memory_bytes"])
    out.print(Text(f"{found['device']}: {used} of {whole} used, one example at a time", style="bold"))
    if not (rows := by_model(found)):
        out.print(Text(_nothing(found["rows"])))
        return
    tables = (_table(found["methods"], rows, speeds=speeds) for speeds in (True, False))
    table = next((table for table in tables if is_room(out, table)), None)
    if table:
        out.print(table)
    else:
        for name, fits in rows.items():
            size = count_text(next(iter(fits.values()))["parameters"])
            show_stacked(out, f"{name} {size}", [_line(method, fits[method]) for method in found["methods"]])
    shown = [words(fit)[0] for fits in rows.values() for fit in fits.values()]
    marks = "  ".join(f"{mark}: {says}" for mark, says in _MARKS.items() if mark in shown)
    speeds = _SPEEDS if table is None or len(table.columns) > 2 + len(found["methods"]) else ""
    out.print(Text("\n".join(filter(None, (_LEGEND, speeds, marks))), style="dim"))


def _table(methods: Sequence[str], rows: Mapping[str, Mapping[str, Row]], *, speeds: bool) -> Table:
    """A row a model; without the speeds it is narrower."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("model", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for method in methods:
        for title in (method, "tok/s") if speeds else (method,):
            table.add_column(title, justify="right", no_wrap=True)
    for name, fits in rows.items():
        cells = [part for method in methods for part in _cells(fits[method])[: 2 if speeds else 1]]
        table.add_row(name, count_text(next(iter(fits.values()))["parameters"]), *cells)
    return table


def _line(method: str, row: Row) -> str:
    length, speed = words(row)
    return f"{method} {length}, {speed} tok/s" if speed else f"{method} {length}"


def _nothing(rows: Sequence[Row]) -> str:
    """Why there is no table."""
    count = len({row["model"] for row in rows})
    subject = next(iter(rows))["model"] if count == 1 else f"any of {count} models"
    if whys := {row["why"] for row in rows if row["why"]}:
        return f"not 512 tokens of {subject} fit, or they cannot be trained so: {'; '.join(sorted(whys))}"
    return f"not 512 tokens of {subject} fit"


def by_model(found: Mapping[str, Any]) -> dict[str, dict[str, Row]]:
    """Rows by model and method; models of which nothing fits or is known are left out."""
    rows: dict[str, dict[str, Row]] = {}
    for row in found["rows"]:
        rows.setdefault(row["model"], {})[row["method"]] = row
    return {name: fits for name, fits in rows.items() if any(fit["longest"] for fit in fits.values())}


def words(row: Row) -> tuple[str, str]:
    """Length and speed as text: ``32k``, ``1,234``; in place of a length a mark of ``_MARKS``."""
    if not row["longest"]:
        return ("x" if not row["possible"] else "?" if row["why"] else "-"), ""
    speed = (row["usual"] or row["longest"])["tokens_per_s"]
    return f"{row['longest']['length'] / 1024:g}k", f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"


def _cells(row: Row) -> tuple[Text, Text]:
    length, speed = words(row)
    style = "dim"
    if row["longest"]:
        tokens = row["longest"]["length"]
        style = "green" if tokens > row["context"] - 512 else "yellow" if tokens >= _USUAL else "red"
    return Text(length, style=style), Text(speed, style="dim" if not speed else "")
