"""What a reader of events knows so far: the state the live view draws, and one sentence for each event."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ..events import Event, number
from ..report.tables import loss_text
from ..units import format_bytes, format_seconds

#: The time left is told from this many of the last steps.
_STEPS_OF_ETA = 20


@dataclass(slots=True)
class RunState:
    """Folded from events one by one; nothing in it is needed to fold the next."""

    model: str = ""
    data: str = ""
    status: str = "starting"
    step: int = 0
    steps: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    held_out: float | None = None
    predicted: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    budget_bytes: int | None = None
    last: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_OF_ETA))

    def apply(self, event: Event) -> None:
        """Take in one event."""
        match event["event"]:
            case "plan":
                self.model, self.data, self.steps = str(event["model"]), str(event["data"]), int(event["steps"])
                self.predicted, self.budget_bytes = event["predicted"], event["plan"].get("budget_bytes")
            case "replan":
                self.predicted = event.get("predicted", self.predicted)
                self.budget_bytes = event["plan"].get("budget_bytes", self.budget_bytes)
            case "step":
                self._step(event)
            case "memory":
                self._memory(event)
            case "eval":
                self.held_out = number(event["loss"])
            case "end":
                self.status = str(event["status"])
        if event["event"] not in ("step", "memory", "plan", "phase"):
            self.last.append(sentence(event))

    def seconds_left(self) -> float | None:
        """Time of the remaining steps at the pace of the last ones; None before the first."""
        if not self.seconds or self.status not in ("starting", "training"):
            return None
        return max(0, self.steps - self.step) * sum(self.seconds) / len(self.seconds)

    def _step(self, event: Event) -> None:
        self.status = "training"
        self.step, self.steps = int(event["step"]), int(event["steps"])
        self.loss, self.learning_rate = number(event["loss"]), number(event["learning_rate"])
        self.tokens_per_s = number(event["tokens_per_s"])
        self.seconds.append(number(event["seconds"]))

    def _memory(self, event: Event) -> None:
        """Keep the highest peak seen, with the prediction made for that step."""
        if self.measured is None or event["measured"]["peak_bytes"] >= self.measured["peak_bytes"]:
            self.measured, self.predicted = event["measured"], event["predicted"]


def sentence(event: Event) -> str:
    """One line about an event, as the live view lists the last of them."""
    match event["event"]:
        case "build":
            return f"built in {format_seconds(number(event['seconds']))}, trains {int(event['trainable']):,} parameters"
        case "eval":
            return f"step {event['step']}: held-out loss {loss_text(number(event['loss']))}"
        case "save":
            return f"step {event['step']}: saved {format_bytes(number(event['bytes']))} to {event['path']}"
        case "skip":
            scale = number(event["scale"])
            return f"step {event['step']}: update skipped, {event['message']}" + f"; loss scaled by {scale:g} now" * (
                scale != 1
            )
        case "out_of_memory":
            return f"step {event['step']}: out of memory, {event['message']}"
        case "replan":
            return f"step {event['step']}: planned again, {event['message']}"
        case "growth":
            return f"step {event['step']}: {event['kind']}, {event['message']}; {event['hint']}"
        case "warn":
            return f"warning: {event['message']}" + (f" ({event['hint']})" if event["hint"] else "")
        case "end":
            return f"{event['status']} at step {event['step']} after {format_seconds(number(event['seconds']))}"
    return str(event["event"])
