"""Events as ``key=value`` lines for files and pipes: one line for every event, but steps only each few seconds."""

import json
from datetime import UTC, datetime
from typing import Any

from ..events import Event, number
from ..report.tables import loss_text
from ..units import format_bytes, format_seconds
from .state import RunState

#: These come with every step or nearly: one of each an interval is enough.
_FREQUENT = frozenset({"step", "memory"})


class PlainLines:
    """Makes lines of events. The first step, the last before another event, and between one each ``interval_s``.

    Time is that of the events, so the lines of a finished log are the same whenever they are made.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._state = RunState()
        self._printed_at: dict[str, float] = {}
        self._held: Event | None = None

    def __call__(self, event: Event) -> list[str]:
        self._state.apply(event)
        name, now = event["event"], float(event["t"])
        if name in _FREQUENT and now < self._printed_at.get(name, -self._interval_s) + self._interval_s:
            self._held = event if name == "step" else self._held
            return []
        lines = [self._line(self._held)] if self._held and name not in _FREQUENT else []
        if lines or name == "step":
            self._held = None
        self._printed_at[name] = now
        return [*lines, self._line(event)]

    def _line(self, event: Event) -> str:
        time = datetime.fromtimestamp(float(event["t"]), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        fields = {"time": time, "event": event["event"], **_fields(event)}
        left = self._state.seconds_left()
        if event["event"] == "step" and left is not None:
            fields["left"] = format_seconds(left)
        return " ".join(f"{key}={_value(value)}" for key, value in fields.items() if value is not None)


def _fields(event: Event) -> dict[str, Any]:
    """The few fields of an event that a line shows."""
    match event["event"]:
        case "plan":
            predicted = format_bytes(event["predicted"]["peak_bytes"])
            return {**_of(event, "model", "data", "steps"), "predicted_peak": predicted}
        case "build":
            names = "+".join(str(one["name"]) for one in event["techniques"])
            return {**_of(event, "seconds", "parameters", "trainable"), "techniques": names}
        case "step":
            loss, rate = loss_text(number(event["loss"])), f"{number(event['learning_rate']):.3g}"
            speed = f"{number(event['tokens_per_s']):.0f}"
            return {**_of(event, "step", "steps"), "loss": loss, "learning_rate": rate, "tokens_per_s": speed}
        case "memory":
            peaks = {f"{key}_peak": format_bytes(event[key]["peak_bytes"]) for key in ("measured", "predicted")}
            return {**_of(event, "step"), **peaks, "moment": event["measured"]["peak_moment"]}
        case "phase":
            device = {key: format_bytes(sum(event[key].values())) for key in ("measured", "predicted")}
            return {**_of(event, "step", "moment"), **device, "host": format_bytes(event["host_bytes"])}
        case "eval":
            return {**_of(event, "step"), "loss": loss_text(number(event["loss"])), **_of(event, "seconds")}
        case "save":
            return {**_of(event, "step", "path"), "size": format_bytes(event["bytes"]), **_of(event, "seconds")}
        case "skip":
            return _of(event, "step", "scale", "skipped", "message")
        case "growth":
            return _of(event, "step", "kind", "bytes", "message", "hint")
        case "end":
            return _of(event, "status", "step", "seconds", "loss_before", "loss_after")
    return _of(event, "step", "message", "hint")


def _of(event: Event, *names: str) -> dict[str, Any]:
    return {name: event.get(name) for name in names}


def _value(value: Any) -> str:
    """Bare where it is one word, else quoted with its line ends escaped."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    bare = text and text.isprintable() and not set(text) & set(" =\"'\\")
    return text if bare else json.dumps(text, ensure_ascii=False)
