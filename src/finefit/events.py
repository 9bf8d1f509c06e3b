"""The run's only record: append-only JSON lines that the terminal, the page, the report and the tests all read.

One event is one line, ``{"v": 1, "t": <unix seconds>, "event": <name>, ...}``, written by a single ``os.write`` on a
file opened for appending. A line exists once its newline is there: a half line left by ``kill -9`` is cut off when the
log is opened again, and readers do not see it. Lines are flushed to the disk itself at ``save`` and ``end``.
Floats that JSON has no word for are written as the strings ``"nan"``, ``"inf"``, ``"-inf"`` (read them with `number`).

A disk that takes no more (full, gone, read-only) does not end a run: events wait, the observers are told once, and all are
written when it takes them again. What still waits when the log is closed is an error.

It declines to have state in it (that lives in checkpoints; the trainer asks it only what was told) and two writers.
"""

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import CheckpointError, FinefitError

VERSION = 1

#: Event -> the fields it must have; more are allowed and readers pass over what they do not know.
#: A *footprint* has witness, peak_bytes, peak_moment, reserved_bytes, moments: {moment: {component: bytes}}, and host.
FIELDS: dict[str, tuple[str, ...]] = {
    # plan: dict | model, data: names | steps: count | predicted: footprint | hardware: dict | worst: {"tokens","where"}
    "plan": ("plan", "model", "data", "steps", "predicted", "hardware", "worst"),
    # seconds | parameters, trainable: counts | techniques: [{"name", "says", "verified"}]
    "build": ("seconds", "parameters", "trainable", "techniques"),
    # step: from 1 | steps: count | loss per labelled token | learning_rate | grad_norm before clipping
    # tokens: real, unpadded | labelled_tokens | seconds | tokens_per_s | rss_bytes of the process
    # optional, of a GPU since the last such event: allocated_bytes, reserved_bytes at their highest
    "step": (
        "step", "steps", "loss", "learning_rate", "grad_norm", "tokens", "labelled_tokens", "seconds", "tokens_per_s",
        "rss_bytes",
    ),
    # measured, predicted: footprints of the same step
    "memory": ("step", "measured", "predicted"),
    # step: 0 before training | loss on held-out examples | optional sample: {"prompt", "reference", "answer"}
    "eval": ("step", "loss", "labelled_tokens", "seconds"),
    # scale: of the loss from now on | skipped: updates in a row, this one too | message: why
    "skip": ("step", "scale", "skipped", "message"),
    "save": ("step", "path", "bytes", "seconds"),
    # moment: load, resume, eval, save or merge, the first of each in a process | measured, predicted: {component: bytes}
    # on the device | host_bytes: resident at its peak, pages of mapped files too | predicted_host: {component: bytes}
    "phase": ("moment", "step", "measured", "predicted", "host_bytes", "predicted_host"),
    # kind: leak, fragmentation, data or spill | bytes: how much more than before | message | hint: its cure
    "growth": ("step", "kind", "bytes", "message", "hint"),
    # message: what the device refused, and where in the step | optional moment: of a footprint, where it was
    "out_of_memory": ("step", "message"),
    # plan: the new one | message: what was learnt | optional predicted: footprint
    "replan": ("step", "plan", "message"),
    "warn": ("message", "hint"),
    # status: finished, stopped or failed | loss_before, loss_after: held-out, or null
    "end": ("status", "step", "seconds", "loss_before", "loss_after"),
}  # fmt: skip

#: Fields that are figures wherever they stand, so that a reader may reckon with them; null where nothing is known.
_FIGURES = frozenset({
    "step", "steps", "seconds", "parameters", "trainable", "loss", "learning_rate", "grad_norm", "tokens",
    "labelled_tokens", "tokens_per_s", "rss_bytes", "allocated_bytes", "reserved_bytes", "bytes", "loss_before", "loss_after", "host_bytes", "scale", "skipped",
})  # fmt: skip
_COUNTS = frozenset({"step", "steps"})
_WORDS = (None, "nan", "inf", "-inf")

_FLUSHED = frozenset({"save", "end"})
_MOST_WAITING = 10_000  # lines, the newest ones
_BLOCK_BYTES = 1 << 16

Event = dict[str, Any]
Observer = Callable[[Event], None]


class EventLog:
    """Writes events to ``path`` and hands each, as written, to the observers (a terminal, a tracker).

    An observer that raises is dropped with one ``warn`` event: showing a run must never end it.
    """

    def __init__(
        self, path: Path, observers: Sequence[Observer] = (), *, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = Path(path)
        self._observers = list(observers)
        self._clock = clock
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._has_told = self._has_half = False
        self._lost = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            _cut_half_line(self._file)
        except OSError as error:
            raise _disk_error(self.path, error) from error

    def observe(self, observer: Observer) -> None:
        """Also hand every later event to ``observer``."""
        self._observers.append(observer)

    def write(self, event: str, **fields: Any) -> Event:
        """Append one event and return it as it stands in the file, or will."""
        missing = [name for name in _fields_of(event) if name not in fields]
        if missing:
            raise ValueError(f"event '{event}' lacks {', '.join(missing)}")
        record = _plain({"v": VERSION, "t": round(self._clock(), 3), "event": event, **fields})
        # ASCII only: no character inside a string can be taken for the end of a line.
        self._lost += len(self._waiting) == _MOST_WAITING
        self._waiting.append(json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        error = self._append(event in _FLUSHED)
        for observer in tuple(self._observers):
            self._tell(observer, record)
        if error and not self._has_told:
            self._has_told = True
            hint = "the run goes on, and events wait until there is room; checkpoints may not be written either"
            self.write("warn", message=f"cannot write {self.path}: {error.strerror or error}", hint=hint)
        if not error and self._lost:
            lost, self._lost = self._lost, 0
            self.write(
                "warn", message=f"{lost:,} events before this one were lost: the disk took none for too long", hint=""
            )
        return record  # type: ignore[no-any-return]

    def close(self) -> None:
        """CheckpointError where the disk did not take all to the end."""
        if self._file >= 0:
            error = self._append(flush=False)
            os.close(self._file)
            self._file = -1
            if error:
                raise _disk_error(self.path, error, f", {len(self._waiting) + self._lost:,} events of it") from error

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as lost:
            if error is None:
                raise
            if isinstance(error, FinefitError):  # what ended the run stands first
                error.message += f"; and {lost.message}"

    def _append(self, flush: bool) -> OSError | None:
        """Write what waits, a line at a time; why it could not be, the rest waiting on."""
        if self._file < 0:
            raise ValueError(f"the event log {self.path} is closed")
        while self._waiting:
            if error := self._written(self._waiting[0]):
                return error
            self._waiting.popleft()
        self._has_told = False
        try:
            if flush:
                os.fsync(self._file)
        except OSError as error:
            return error
        return None

    def _written(self, line: bytes) -> OSError | None:
        """Write a whole line; or nothing of it, and why."""
        size_bytes = -1
        try:
            if self._has_half:
                _cut_half_line(self._file)
                self._has_half = False
            size_bytes = os.fstat(self._file).st_size
            written = os.write(self._file, line)
            if written < len(line):  # the disk took a part: ask again for the rest, which names the reason
                written += os.write(self._file, line[written:])
            if written == len(line):
                return None
            reason = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            reason = error
        try:
            if size_bytes >= 0:
                os.ftruncate(self._file, size_bytes)
        except OSError:  # it cannot even shrink: it is put right before the next line, or when it is next opened
            self._has_half = True
        return reason

    def _tell(self, observer: Observer, record: Event) -> None:
        try:
            observer(record)
        except Exception as error:
            if observer in self._observers:
                self._observers.remove(observer)
            name = getattr(observer, "name", None) or getattr(observer, "__name__", type(observer).__name__)
            self.write("warn", message=f"{name} is switched off: {error!r}", hint=f"the run goes on; see {self.path}")


def read(path: Path) -> Iterator[Event]:
    """Every event of a log in the order it was written. A last line without its newline is passed over."""
    try:
        with open(path, "rb") as file:
            for number_of_line, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                yield _parse(line, f"{path}:{number_of_line}")
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no event log at {path}", hint="name a run folder, as runs/my-run") from error
    except OSError as error:
        raise CheckpointError(f"cannot read the event log: {error.strerror}", where=str(path)) from error


def steps(path: Path, event: str = "step") -> list[Event]:
    """The last record of every step, in the order of steps: what a resumed run trained again replaces what it lost."""
    return last_of_each_step(record for record in read(path) if record["event"] == event)


def last_of_each_step(records: Iterator[Event] | Sequence[Event]) -> list[Event]:
    """For every ``step`` the record written last, in the order of steps."""
    last = {int(record["step"]): record for record in records}
    return [last[step] for step in sorted(last)]


def number(value: Any) -> float:
    """A float of an event field: numbers, and the words ``"nan"`` and ``"inf"``; null is nan."""
    return math.nan if value is None else float(value)


def _fields_of(event: str) -> tuple[str, ...]:
    if event not in FIELDS:
        raise ValueError(f"no event is called '{event}'; there are {', '.join(FIELDS)}")
    return FIELDS[event]


def _plain(value: Any) -> Any:
    """The same value in JSON's own types."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _parse(line: bytes, where: str) -> Event:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("this line of the event log is damaged", where=where) from error
    if not isinstance(record, dict) or "event" not in record:
        raise CheckpointError("this line is not an event", where=where, hint="a run's log is its events.jsonl")
    if complaint := _complaint(record):
        raise CheckpointError(complaint, where=where, hint="the line was cut or edited; take it out to read the rest")
    return record


def _complaint(record: Event) -> str:
    """What keeps readers from this event, or an empty string; an event of a later version passes as it is."""
    event = record["event"]
    if not isinstance(event, str):
        return f"the name of an event is text, not {json.dumps(event)[:40]}"
    fields = FIELDS.get(event, ())
    if missing := [name for name in fields if name not in record]:
        return f"this '{event}' event lacks {', '.join(missing)}"
    wrong = next((name for name in fields if name in _FIGURES and not _is_figure(name, record[name])), "")
    return f"'{wrong}' of this '{event}' event must be a number, not {json.dumps(record[wrong])[:40]}" if wrong else ""


def _is_figure(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if name in _COUNTS:
        return isinstance(value, int)
    return isinstance(value, int | float) or (not isinstance(value, list | dict) and value in _WORDS)


def _cut_half_line(file: int) -> None:
    """Shorten the file to just after its last newline."""
    size_bytes = end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size_bytes:
        os.ftruncate(file, end)


def _disk_error(path: Path, error: OSError, what: str = "") -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(
            f"the disk is full: cannot write {path}{what}",
            hint="free some space, then finefit resume; nothing saved is lost",
        )
    return CheckpointError(f"cannot write {path}{what}: {error.strerror or error}")
