"""Rows of the catalogue as tables: models, GPUs, machines. Sees rows of plain values (`inventory`), nothing else."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..units import format_bytes

Row = Mapping[str, Any]
Column = tuple[str, bool, Callable[[Row], str]]  # title, whether numbers stand in it, the text of a row


def show(kind: str, rows: Sequence[Row], *, as_json: bool = False, console: Console | None = None) -> None:
    """Print rows of a kind (models, gpus, hosts) as a table, or as JSON with full names and exact numbers."""
    out = console or Console()
    if as_json:
        print(json.dumps(list(rows), indent=1, ensure_ascii=False), file=out.file)
        return
    columns = [column for column in _COLUMNS[kind] if any(column[2](row) for row in rows)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for title, is_number, _ in columns:
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(text(row) for _, _, text in columns))
    if is_room(out, table):
        out.print(table)
        return
    for row in rows:
        cells = [(title, text(row)) for title, _, text in columns]
        show_stacked(out, cells[0][1], [", ".join(f"{title} {text}" for title, text in cells[1:] if text)])


def is_room(console: Console, table: Table) -> bool:
    """Whether the table can be shown without a cut through its numbers."""
    return Measurement.get(console, console.options.update(max_width=1000), table).maximum <= console.width


def show_stacked(console: Console, name: str, lines: Sequence[str]) -> None:
    """A row on a terminal that is too narrow for the table: its name, and under it the rest, broken between words."""
    console.print(Text(name))
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2)))


def count_text(n: float) -> str:
    """``671B``, ``8.03B``, ``135M``: three digits."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if n >= factor:
            digits = f"{n / factor:.3g}"
            return f"{float(digits):.0f}{unit}" if n / factor >= 100 else f"{digits}{unit}"
    return str(int(n))


def _giga(key: str) -> Callable[[Row], str]:
    """A rate in 10^9 a second; nothing where there is none."""
    return lambda row: f"{row[key] / 1e9:,.0f}" if row[key] else ""


def _network(row: Row) -> str:
    if not row["network_bytes_per_s"]:
        return ""
    return f"{'up to ' if 'up to' in row['note'] else ''}{row['network_bytes_per_s'] / 1e9:.3g} GB/s"


_COLUMNS: dict[str, tuple[Column, ...]] = {
    "models": (
        ("model", False, lambda row: row["name"]),
        ("parameters", True, lambda row: count_text(row["parameters"])),
        ("active", True, lambda row: count_text(row["active_parameters"]) if "active_parameters" in row else ""),
        ("context", True, lambda row: f"{row['context']:,}"),
        ("family", False, lambda row: row["family"]),
    ),
    "gpus": (
        ("GPU", False, lambda row: row["name"]),
        ("memory", True, lambda row: format_bytes(row["memory_bytes"])),
        ("bf16 TFLOP/s", True, lambda row: f"{row['bf16_flops_per_s'] / 1e12:,.0f}" if row["supports_bf16"] else "no"),
        ("fp8", False, lambda row: "yes" if row["supports_fp8"] else ""),
        ("GB/s", True, _giga("bandwidth_bytes_per_s")),
        ("to peers", True, _giga("peer_bytes_per_s")),
    ),
    "hosts": (
        ("machine", False, lambda row: row["name"]),
        ("GPUs", False, lambda row: f"{row['count']} x {row['gpu']}"),
        ("host memory", True, lambda row: format_bytes(row["host_memory_bytes"])),
        ("network", True, _network),
    ),
}
