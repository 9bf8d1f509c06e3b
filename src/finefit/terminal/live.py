"""Showing a run while it trains: a `Reporter` is handed every event as it is written to the log.

Three of them: ``live`` (a rich view redrawn at most four times a second), ``plain`` (``key=value`` lines for files and
pipes: no carriage returns, no colours) and ``json`` (the events themselves, for machines). Each draws in a thread of
its own, so a slow or stopped terminal never holds up training. When its terminal or pipe is gone, the next call raises
once, and the `EventLog` drops it with a warning. It declines to be complete when its reader stalls for thousands
of events: the file is.
"""

import abc
import atexit
import contextlib
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Literal, Protocol, Self, TextIO

from rich.console import Console
from rich.live import Live

from ..events import Event
from .lines import PlainLines
from .state import RunState
from .view import render

Kind = Literal["auto", "live", "plain", "json"]

#: nvitop and rich's own default refresh faster; 4 Hz cost 2 % of one core where 10 Hz cost 4.4 %.
_PERIOD_S = 0.25
#: A step this long changes nothing four times a second.
_SLOW_STEP_S = 1.0
#: How long the end of a run waits for a terminal that does not take its last lines.
_PATIENCE_S = 2.0
_MOST_WAITING = 10_000


class Reporter(Protocol):
    """Shows events to somebody. Calling it never blocks; closing it leaves the terminal as it was found."""

    name: str

    def __call__(self, event: Event, /) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


def reporter(kind: Kind = "auto", stream: TextIO | None = None, interval_s: float = 10.0) -> Reporter:
    """The reporter of a kind on a stream (standard output when None). ``auto``: live on a terminal, else plain."""
    out = sys.stdout if stream is None else stream
    _tolerate_any_character(out)
    if kind == "auto":
        kind = "live" if out.isatty() and os.environ.get("TERM") != "dumb" else "plain"
    if kind == "live":
        return LiveReporter(out)
    return LineReporter(out, PlainLines(interval_s) if kind == "plain" else json_lines)


class Formatter(Protocol):
    """The lines to print for an event, none or several."""

    def __call__(self, event: Event, /) -> list[str]: ...


def json_lines(event: Event) -> list[str]:
    """The event as it stands in the log."""
    return [json.dumps(event, separators=(",", ":"))]


class _Background(abc.ABC):
    """Hands events to a thread that shows them. Subclasses say how: `_start`, `_show` some events, `_stop`."""

    name = "the terminal view"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: deque[Event] = deque(maxlen=_MOST_WAITING)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="finefit-reporter", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __call__(self, event: Event) -> None:
        if self._broken is not None:
            raise self._broken
        self._waiting.append(event)
        self._wake.set()

    def close(self) -> None:
        """Show what is waiting and give the terminal back."""
        atexit.unregister(self.close)
        self._closing.set()
        self._wake.set()
        self._thread.join(_PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        try:
            self._start()
            while not self._closing.is_set():
                self._wake.wait()
                self._wake.clear()
                self._show(list(self._taken()))
                self._closing.wait(self._pause_s())
            self._show(list(self._taken()))
            self._stop()
        except Exception as error:  # kept, and raised by the next call: the log turns it into a warning
            self._broken = error
            self._give_up()

    def _taken(self) -> Iterator[Event]:
        while self._waiting:
            yield self._waiting.popleft()

    def _give_up(self) -> None:
        """Leave the terminal alone; a pipe nobody reads must not complain again when Python exits."""
        with contextlib.suppress(OSError, ValueError):  # it is broken already, and that is told
            self._stop()
        if isinstance(self._broken, BrokenPipeError) and self._stream is sys.stdout:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def _pause_s(self) -> float:
        return 0.0

    def _start(self) -> None:  # noqa: B027 (a reporter may have nothing to do)
        """Nothing to prepare."""

    @abc.abstractmethod
    def _show(self, events: list[Event]) -> None:
        """Draw what happened since the last call."""

    def _stop(self) -> None:  # noqa: B027 (a reporter may have nothing to do)
        """Nothing to put back."""


class LineReporter(_Background):
    """Prints the lines a formatter makes of each event."""

    name = "the line log"

    def __init__(self, stream: TextIO, lines: Formatter) -> None:
        self._lines = lines
        super().__init__(stream)

    def _show(self, events: list[Event]) -> None:
        text = "".join(f"{line}\n" for event in events for line in self._lines(event))
        if text:
            self._stream.write(text)
            self._stream.flush()


class LiveReporter(_Background):
    """A view at the bottom of the terminal; what others print scrolls above it. The last view stays."""

    def __init__(self, stream: TextIO) -> None:
        self._state = RunState()
        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False)
        super().__init__(stream)

    def _pause_s(self) -> float:
        seconds = self._state.seconds
        return _SLOW_STEP_S if seconds and seconds[-1] > _SLOW_STEP_S else _PERIOD_S

    def _start(self) -> None:
        self._live.start()
        self._console.show_cursor(True)  # rich hides it; so even a killed run leaves the terminal usable

    def _show(self, events: list[Event]) -> None:
        for event in events:
            self._state.apply(event)
        width = self._console.width
        self._live.update(render(self._state, width, ascii_only=self._console.options.ascii_only), refresh=True)

    def _stop(self) -> None:
        self._live.stop()


def _tolerate_any_character(stream: TextIO) -> None:
    """On a stream that is not UTF-8, print ``?`` for what it cannot show rather than fail."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
