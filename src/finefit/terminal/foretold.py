"""Another tool's run on the terminal: what it needs there, and finefit's plan for the same wish beside it."""

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..report.palette import LABELS, MOMENTS
from ..units import format_bytes


def foretold_view(told: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what ``foretell`` found, given as its JSON dict."""
    (console or Console()).print(_renderable(told))


@contextlib.contextmanager
def waiting(after_s: float = 1.0) -> Iterator[None]:
    """One line on a terminal's stderr when what is done inside takes longer than this."""
    timer = threading.Timer(after_s, print, ("simulating a step of the run …",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _renderable(told: Mapping[str, Any]) -> RenderableType:
    run = told["run"]
    parts: list[RenderableType] = [_head(told, run), Text(), _memory(told), Text(), _verdict(told)]
    for title, lines in (("assumed", told["notes"]), ("without a counterpart here", told["ignored"])):
        if lines:
            parts += [Text(), Text(title, style="bold"), *(Text(f"· {line}") for line in lines)]
    parts += [Text(), Text("the same wish in finefit", style="bold"), _ours(told)]
    return Group(*parts)


def _head(told: Mapping[str, Any], run: Mapping[str, Any]) -> RenderableType:
    head = Table.grid(padding=(0, 2, 0, 0))
    method = run["method"] + (f" on a {run['quantised']} base" if run["quantised"] else "")
    rows = [
        ("run of", told["tool"]), ("model", run["model"]), ("device", told["hardware"]),
        ("method", method + (f", rank {run['rank']}" if run["rank"] else "")),
        ("batch", f"{run['micro_batch_size']} × {run['max_length']} tokens, {run['accumulation']} micro-batches a step"),
        ("types", _types(run)), ("loss, attention", f"{run['loss']}, {run['attention']}"),
        ("checkpointing", run["checkpointing"]),
    ]  # fmt: skip
    if run["spread"]["engine"]:
        spread = run["spread"]
        rows.append(("devices", f"{spread['data']} by {spread['engine']}, states in {spread['shards']} parts"))
    for key, value in rows:
        head.add_row(Text(key, style="dim"), Text(str(value)))
    return head


def _types(run: Mapping[str, Any]) -> str:
    words = [f"weights {run['frozen_dtype'] if run['method'] == 'lora' else run['trained_dtype']}"]
    if run["method"] == "lora":
        words.append(f"adapters {run['trained_dtype']}")
    words.append(f"computed in {run['compute_dtype']}" + (" by autocast" if run["autocast"] else ""))
    return ", ".join(words)


def _memory(told: Mapping[str, Any]) -> RenderableType:
    footprint = told["simulated"]
    moment = footprint["peak_moment"]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"memory at {MOMENTS.get(moment, moment)}, simulated in {told['seconds']:.1f} s")
    table.add_column("there", justify="right")
    for component, n_bytes in footprint["moments"][moment].items():
        table.add_row(LABELS.get(component, component), format_bytes(n_bytes))
    table.add_row("allocated at the peak", format_bytes(told["allocated_bytes"]))
    table.add_row("reserved by the allocator", format_bytes(told["reserved_bytes"]))
    table.add_row("smallest device it goes through on", format_bytes(told["needed_bytes"]))
    return table


def _verdict(told: Mapping[str, Any]) -> RenderableType:
    if told["fits"]:
        verdict = Text(f"fits {told['hardware']}", style="green")
    else:
        verdict = Text(f"does not fit {told['hardware']}: CUDA out of memory is to be expected", style="red")
    if told["reserved_bytes"] <= told["needed_bytes"]:
        return verdict
    why = "on a full device cached memory is given back: the smallest device decides"
    return Group(verdict, Text(why, style="dim"))


def _ours(told: Mapping[str, Any]) -> RenderableType:
    plan = told["finefit"]
    if plan is None:
        return Text(f"· {told['finefit_not']}")
    predicted = plan["predicted"]
    needed = format_bytes(predicted["peak_bytes"] + predicted["reserved_bytes"])
    lines = [f"· {technique['says']}" for technique in plan["techniques"]]
    return Text("\n".join([f"· needs {needed} of {format_bytes(plan['budget_bytes'])}", *lines]))
