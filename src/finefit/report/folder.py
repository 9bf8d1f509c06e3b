"""A run folder's report: Markdown and its two figures."""

from pathlib import Path

from ..errors import CheckpointError
from .markdown import to_markdown
from .summary import summarize_run
from .svg import loss_curve, memory_bars


def write_report(folder: Path) -> Path:
    """Write ``report.md``, ``loss.svg`` and ``memory.svg`` into a run folder; the path of the report."""
    summary = summarize_run(folder)
    loss = loss_curve(summary.losses, summary.held_out)
    memory = memory_bars(summary.predicted, summary.measured, summary.plan.get("budget_bytes"))
    figures = [("Loss", "loss.svg"), ("Memory at the peak", "memory.svg")]
    report = Path(folder) / "report.md"
    files = {"loss.svg": loss, "memory.svg": memory, "report.md": to_markdown(summary, str(folder), figures)}
    for name, content in files.items():
        _replace(Path(folder) / name, content)
    return report


def _replace(path: Path, content: str) -> None:
    """Whole or not at all: a full disk must not leave half a report over a whole one."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(content, encoding="utf-8", errors="replace")
        beside.replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
