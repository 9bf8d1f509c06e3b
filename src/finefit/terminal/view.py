"""The live view of a run: a progress line, memory by component (predicted beside measured), the last events."""

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..report.palette import total_bytes
from ..report.tables import loss_text
from ..units import format_seconds
from .bars import capacity, component_table, stacked
from .state import RunState

_WIDEST_BAR = 72


def render(state: RunState, width: int, *, ascii_only: bool = False) -> RenderableType:
    """The view at ``width`` columns."""
    title = " on ".join(name for name in (state.model, state.data) if name) or "waiting for the plan"
    parts: list[RenderableType] = [Text.assemble((title, "bold"), f"  {state.status}"), _progress(state)]
    parts += _memory(state, max(20, min(_WIDEST_BAR, width - 12)), ascii_only)
    parts += [Text(f"· {line}" if not ascii_only else f"- {line}", style="dim") for line in state.last]
    return Group(*parts)


def _progress(state: RunState) -> RenderableType:
    if not state.steps:
        return Text("no step yet", style="dim")
    parts = [f"step {state.step}/{state.steps}"]
    if state.loss is not None:
        parts.append(f"loss {loss_text(state.loss)}")
    if state.held_out is not None:
        parts.append(f"held-out {loss_text(state.held_out)}")
    if state.learning_rate is not None:
        parts.append(f"lr {state.learning_rate:.3g}")
    if state.tokens_per_s is not None:
        parts.append(f"{state.tokens_per_s:,.0f} tokens/s")
    left = state.seconds_left()
    if left is not None:
        parts.append(f"{format_seconds(left)} left")
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(ProgressBar(total=state.steps, completed=state.step, width=20), Text("  ".join(parts)))
    return line


def _memory(state: RunState, width: int, ascii_only: bool) -> list[RenderableType]:
    shown = [(name, one) for name, one in (("predicted", state.predicted), ("measured", state.measured)) if one]
    if not shown:
        return []
    whole = max([*(total_bytes(one) for _, one in shown), state.budget_bytes or 0])
    rows = [Text.assemble((f"{name:<10}", "dim"), stacked(one, whole, width, ascii_only)) for name, one in shown]
    return [
        *rows,
        capacity(max(total_bytes(one) for _, one in shown), state.budget_bytes, ""),
        component_table(state.predicted, state.measured, ascii_only=ascii_only),
    ]
