"""A plan on the terminal: what it chose, where the memory goes, whether it fits, why, and what else there was."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..footprint import PHASES
from ..report.palette import COLOURS, LABELS, MOMENTS, moment_bytes, total_bytes, with_reserved
from ..units import format_bytes, format_seconds
from .bars import capacity, stacked

_WIDEST_BAR = 40
_WARNING = "warning: "  # how a plan's note begins that is to be shown


def plan_view(plan: Mapping[str, Any], console: Console | None = None, *, explain: bool = False) -> None:
    """Print a plan, given as its JSON dict; ``explain`` adds the plans beside it."""
    out = console or Console()
    out.print(plan_renderable(plan, out.width, ascii_only=out.options.ascii_only))
    if explain and plan.get("neighbours"):
        out.print(Group(Text(), _neighbours(plan)))


def plan_renderable(plan: Mapping[str, Any], width: int, *, ascii_only: bool = False) -> RenderableType:
    """A plan as tables, at ``width`` columns."""
    bar_width = max(10, min(_WIDEST_BAR, width - 48))
    parts: list[RenderableType] = [_head(plan), Text(), _memory(plan, bar_width, ascii_only), _capacity(plan)]
    if plan["predicted"].get("host"):
        parts += [Text(), _phases(plan["predicted"])]
    warnings = [str(note) for note in plan.get("notes", ()) if str(note).startswith(_WARNING)]
    parts += [Text(warning, style="bold red") for warning in warnings]
    if plan.get("techniques"):
        parts += [Text(), _techniques(plan)]
    if plan.get("reasons"):
        mark = "-" if ascii_only else "·"
        parts += [Text(), Text("why", style="bold"), *(Text(f"{mark} {reason}") for reason in plan["reasons"])]
    if notes := [note for note in plan.get("notes", ()) if note not in warnings]:
        mark = "-" if ascii_only else "·"
        parts += [Text(), Text("mind", style="bold"), *(Text(f"{mark} {note}") for note in notes)]
    if plan.get("alternatives"):
        parts += [Text(), _alternatives(plan, ascii_only)]
    return Group(*parts)


def _head(plan: Mapping[str, Any]) -> RenderableType:
    head = Table.grid(padding=(0, 2, 0, 0))
    head.add_row(Text("model", style="dim"), Text(_name(plan.get("model"))))
    head.add_row(Text("device", style="dim"), Text(_name(plan.get("hardware"))))
    head.add_row(Text("method", style="dim"), Text(str(plan.get("method", ""))))
    split = next((t["says"] for t in plan.get("techniques", ()) if t.get("name") == "accumulation"), "")
    if split:
        whole = f"{plan['global_batch_size']} examples a step: " if plan.get("global_batch_size") else ""
        head.add_row(Text("batch", style="dim"), Text(whole + split))
    if plan.get("seconds_per_step"):
        speed = f"about {format_seconds(float(plan['seconds_per_step']))} a step"
        if plan.get("tokens_per_s"):
            speed += f", {float(plan['tokens_per_s']):,.0f} tokens/s"
        head.add_row(Text("speed", style="dim"), Text(speed))
    return head


def _memory(plan: Mapping[str, Any], bar_width: int, ascii_only: bool) -> RenderableType:
    """A row a component, its bar on the scale of all that is needed."""
    predicted = plan["predicted"]
    moment = str(predicted.get("peak_moment", ""))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"memory at {MOMENTS.get(moment, moment) or 'the peak'}")
    table.add_column("predicted", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    whole_bytes = max(1, total_bytes(predicted))
    for component, n_bytes in with_reserved(predicted).items():
        if n_bytes:
            alone = {"peak_moment": "alone", "moments": {"alone": {component: n_bytes}}}
            table.add_row(
                Text(LABELS[component], style=COLOURS[component]),
                format_bytes(n_bytes),
                f"{100 * n_bytes / whole_bytes:.0f} %",
                stacked(alone, whole_bytes, bar_width, ascii_only),
            )
    table.add_row(
        "together", format_bytes(whole_bytes), "", stacked(predicted, whole_bytes, bar_width, ascii_only), style="bold"
    )
    return table


def _phases(predicted: Mapping[str, Any]) -> RenderableType:
    """What the device and the host must have in each phase; the step's is its highest moment."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("phase")
    for title in ("device", "host", "and of files"):
        table.add_column(title, justify="right")
    shown: dict[str, str] = {}
    for moment in (name for name in MOMENTS if moment_bytes(predicted, name) is not None):
        phase = MOMENTS[moment] if moment in PHASES else "step"
        if phase not in shown or (moment_bytes(predicted, moment) or 0) > (moment_bytes(predicted, shown[phase]) or 0):
            shown[phase] = moment
    for phase, moment in shown.items():
        tensors = moment_bytes(predicted, moment) or 0
        device = tensors + int(predicted.get("reserved_bytes", 0)) if tensors else 0  # a merge is the host's alone
        host = {component: int(n) for component, n in predicted["host"].get(moment, {}).items()}
        mapped = host.pop("mapped", 0)
        table.add_row(
            phase, format_bytes(device), format_bytes(sum(host.values())), format_bytes(mapped) if mapped else ""
        )
    return table


def _capacity(plan: Mapping[str, Any]) -> Text:
    return capacity(total_bytes(plan["predicted"]), plan.get("budget_bytes"), _name(plan.get("hardware")))


def _techniques(plan: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("technique", "settings", "what it does"):
        table.add_column(title, overflow="fold")
    for technique in plan["techniques"]:
        settings = {key: value for key, value in technique.items() if key not in ("name", "says")}
        words = ", ".join(f"{key} {_setting(value)}" for key, value in settings.items())
        table.add_row(Text(str(technique["name"])), Text(words), Text(str(technique.get("says", ""))))
    return table


def _alternatives(plan: Mapping[str, Any], ascii_only: bool) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("also looked at", overflow="fold")
    table.add_column("peak", justify="right")
    table.add_column("a step", justify="right")
    for one in plan["alternatives"]:
        seconds = one.get("seconds_per_step")
        mark = (">" if ascii_only else "▸") if one.get("chosen") else ""
        table.add_row(
            mark,
            Text(str(one["says"])),
            format_bytes(one["peak_bytes"]),
            format_seconds(float(seconds)) if seconds else "",
            style="bold" if one.get("chosen") else "",
        )
    return table


_VERDICTS = {"too large": "red", "slower": "yellow", "not allowed": "magenta"}


def _neighbours(plan: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("instead", "verdict", "why not"):
        table.add_column(title, overflow="fold")
    for one in plan["neighbours"]:
        verdict = str(one["verdict"])
        table.add_row(Text(str(one["says"])), Text(verdict, style=_VERDICTS.get(verdict, "")), Text(str(one["why"])))
    return table


def _name(value: Any) -> str:
    """A name, or the name of what is described by a dict."""
    return str(value.get("name", "")) if isinstance(value, Mapping) else str(value or "")


def _setting(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def diff_view(rows: Sequence[tuple[str, str, str]], names: Sequence[str], console: Console | None = None) -> None:
    """Print what differs between two plans, side by side."""
    out = console or Console()
    if not rows:
        out.print("the plans are the same")
        return
    table = Table("", *names, box=None, header_style="bold")
    for what, one, other in rows:
        table.add_row(what, one, other)
    out.print(table)
