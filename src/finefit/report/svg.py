"""Two figures as standalone SVG text, without a drawing library: the loss curve, and memory by component.

Colours and order come from `palette`. Both figures bring their own white ground, so they read on any page.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..units import format_bytes
from .palette import COLOURS, LABELS, total_bytes, with_reserved
from .summary import Point

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 36, 44
_INK, _FAINT, _TRAINING, _HELD_OUT = "#24292f", "#d0d7de", "#0072B2", "#D55E00"
_FONT = "font-family='system-ui, sans-serif' font-size='12'"
#: More points than this cannot be told apart at the figure's width.
_MOST_POINTS = 1400


def loss_curve(
    training: Sequence[Point], held_out: Sequence[Point] = (), title: str = "loss per labelled token"
) -> str:
    """Training loss as a line, held-out loss as dots; a loss that is not a number leaves a gap."""
    known = [point for point in (*training, *held_out) if math.isfinite(point.loss)]
    if not known:
        return _svg(_HEIGHT, title, [_text(_WIDTH / 2, _HEIGHT / 2, "no loss yet", "middle")])
    low, high = _padded(min(point.loss for point in known), max(point.loss for point in known))
    first, last = min(point.step for point in known), max(point.step for point in known)

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * ((step - first) / (last - first) if last > first else 0.5)

    def y(loss: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (loss - low) / (high - low)

    parts = [_text(_LEFT, 20, title, weight="bold"), *_legend_of_lines()]
    for tick in ticks(low, high):
        parts.append(_line(_LEFT, y(tick), _WIDTH - _RIGHT, y(tick), _FAINT))
        parts.append(_text(_LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    for tick in ticks(first, last):
        if tick == int(tick):
            parts.append(_text(x(tick), _HEIGHT - _BOTTOM + 18, f"{tick:g}", "middle"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "step", "middle"))
    for run in _runs(_thinned(training)):
        corners = " ".join(f"{x(point.step):.1f},{y(point.loss):.1f}" for point in run)
        parts.append(f"<polyline points='{corners}' fill='none' stroke='{_TRAINING}' stroke-width='1.5'/>")
        if len(run) == 1:
            parts.append(_dot(x(run[0].step), y(run[0].loss), 2, _TRAINING))
    parts += [_dot(x(one.step), y(one.loss), 4, _HELD_OUT) for one in held_out if math.isfinite(one.loss)]
    return _svg(_HEIGHT, title, parts)


def memory_bars(
    predicted: Mapping[str, Any] | None, measured: Mapping[str, Any] | None, budget_bytes: int | None = None
) -> str:
    """Footprints at their peaks as stacked bars, one below the other, with the budget as a line across both."""
    title = "memory at the peak, by component"
    bars = [(name, one) for name, one in (("predicted", predicted), ("measured", measured)) if one]
    if not bars:
        return _svg(120, title, [_text(_WIDTH / 2, 60, "no memory known yet", "middle")])
    whole = max([*(total_bytes(one) for _, one in bars), *([budget_bytes] if budget_bytes else []), 1])
    scale = (_WIDTH - 100 - 110) / whole
    parts = [_text(100, 20, title, weight="bold")]
    for row, (name, footprint) in enumerate(bars):
        parts += _bar(footprint, name, 40 + 44 * row, scale)
    bottom = 40 + 44 * len(bars)
    if budget_bytes:
        edge = 100 + budget_bytes * scale
        parts.append(_line(edge, 34, edge, bottom, _INK, "4 3"))
        parts.append(_text(edge, bottom + 12, f"budget {format_bytes(budget_bytes)}", "end"))
    shown = [component for component in COLOURS if any(with_reserved(one)[component] for _, one in bars)]
    parts += _legend(shown, bottom + 34)
    return _svg(bottom + 34 + 22 * math.ceil(len(shown) / 4), title, parts)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most about ``most``: 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _bar(footprint: Mapping[str, Any], name: str, top: float, scale: float) -> Iterable[str]:
    yield _text(92, top + 20, name, "end")
    left = 100.0
    for component, n_bytes in with_reserved(footprint).items():
        width = n_bytes * scale
        if n_bytes:
            says = escape(f"{LABELS[component]}: {format_bytes(n_bytes)}")
            yield (
                f"<rect x='{left:.1f}' y='{top}' width='{width:.1f}' height='30' fill='{COLOURS[component]}'>"
                f"<title>{says}</title></rect>"
            )
        left += width
    yield _text(left + 8, top + 20, format_bytes(total_bytes(footprint)))


def _legend(components: Sequence[str], top: float) -> Iterable[str]:
    for place, component in enumerate(components):
        left, line = 100 + 150 * (place % 4), top + 22 * (place // 4)
        yield f"<rect x='{left}' y='{line - 10}' width='12' height='12' fill='{COLOURS[component]}'/>"
        yield _text(left + 18, line, LABELS[component])


def _legend_of_lines() -> list[str]:
    return [
        _line(_WIDTH - 190, 16, _WIDTH - 170, 16, _TRAINING),
        _text(_WIDTH - 164, 20, "training"),
        _dot(_WIDTH - 92, 16, 4, _HELD_OUT),
        _text(_WIDTH - 82, 20, "held-out"),
    ]


def _runs(points: Iterable[Point]) -> Iterable[list[Point]]:
    """Stretches of points whose loss is a number."""
    run: list[Point] = []
    for point in points:
        if math.isfinite(point.loss):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Of every bundle of neighbours the lowest and the highest, so that no spike is lost."""
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    if size <= 2:
        return list(points)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        bundle = points[start : start + size]
        finite = [point for point in bundle if math.isfinite(point.loss)] or bundle[:1]
        ends = {min(finite, key=lambda one: one.loss), max(finite, key=lambda one: one.loss)}
        kept += sorted(ends, key=lambda one: one.step)
    return kept


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.05 * (high - low) or max(0.05 * abs(high), 0.5)
    return low - room, high + room


def _svg(height: float, title: str, parts: Iterable[str]) -> str:
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height:g}' role='img' {_FONT}>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{_WIDTH}' height='{height:g}' fill='#ffffff'/>",
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    bold = " font-weight='bold'" if weight == "bold" else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{_INK}'{bold}>{escape(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "") -> str:
    dashed = f" stroke-dasharray='{dashes}'" if dashes else ""
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}'{dashed}/>"


def _dot(x: float, y: float, radius: float, colour: str) -> str:
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius:g}' fill='{colour}'/>"
