"""The event log: what is written is what is read, whatever kills the writer."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finefit.errors import CheckpointError
from finefit.events import FIELDS, EventLog, number, read, steps

STEP = {
    "steps": 3, "loss": 1.5, "learning_rate": 1e-4, "grad_norm": 0.5, "tokens": 10, "labelled_tokens": 4,
    "seconds": 0.1, "tokens_per_s": 100.0, "rss_bytes": 1 << 20,
}  # fmt: skip


def test_line_is_exactly_as_documented(tmp_path: Path) -> None:
    with EventLog(tmp_path / "run" / "events.jsonl", clock=lambda: 12.3456) as log:
        log.write("warn", message="低\u2028", hint="")
    expected = b'{"v":1,"t":12.346,"event":"warn","message":"\\u4f4e\\u2028","hint":""}\n'
    assert expected == (tmp_path / "run" / "events.jsonl").read_bytes()


def test_a_missing_field_and_an_unknown_event_are_our_mistakes(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e.jsonl") as log:
        with pytest.raises(ValueError, match=r"^event 'save' lacks bytes, seconds$"):
            log.write("save", step=1, path="x")
        with pytest.raises(ValueError, match=r"^no event is called 'sav'"):
            log.write("sav")
    assert (tmp_path / "e.jsonl").read_bytes() == b""


def test_every_event_of_the_table_can_be_written_and_read(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e.jsonl") as log:
        written = [log.write(event, **dict.fromkeys(fields, 1)) for event, fields in FIELDS.items()]
    assert written == list(read(tmp_path / "e.jsonl"))
    assert list(FIELDS) == [
        "plan",
        "build",
        "step",
        "memory",
        "eval",
        "skip",
        "save",
        "phase",
        "growth",
        "out_of_memory",
        "replan",
        "warn",
        "end",
    ]


def test_floats_without_a_json_word_are_strings(tmp_path: Path) -> None:
    values = {"loss": math.nan, "grad_norm": math.inf, "tokens_per_s": -math.inf}
    with EventLog(tmp_path / "e.jsonl") as log:
        log.write("step", step=1, extra=[math.nan, (1, 2)], **{**STEP, **values})
    json.loads((tmp_path / "e.jsonl").read_text(), parse_constant=pytest.fail)
    [record] = read(tmp_path / "e.jsonl")
    assert [record[key] for key in ("loss", "grad_norm", "tokens_per_s", "extra")] == [
        "nan",
        "inf",
        "-inf",
        ["nan", [1, 2]],
    ]
    assert math.isnan(number(record["loss"])) and math.inf == number(record["grad_norm"])
    assert math.isnan(number(None))


@pytest.mark.parametrize("half", [b'{"v":1,"event":"st', b"x" * 200_000, b"{}"])
def test_a_half_last_line_is_not_seen_and_is_cut_off_when_opened_again(tmp_path: Path, half: bytes) -> None:
    path = tmp_path / "e.jsonl"
    with EventLog(path) as log:
        log.write("warn", message="first", hint="")
    whole = path.read_bytes()
    path.write_bytes(whole + half)
    assert [record["message"] for record in read(path)] == ["first"]
    EventLog(path).close()
    assert whole == path.read_bytes()


def test_a_file_that_is_one_half_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b"x" * 100_000)
    EventLog(path).close()
    assert path.read_bytes() == b""


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    good = '{"event":"warn","message":"","hint":""}'
    path.write_text(f"{good}\nnonsense\n{good}\n")
    with pytest.raises(CheckpointError) as caught:
        list(read(path))
    assert f"{path}:2: this line of the event log is damaged" == str(caught.value)
    path.write_text("[]\n")
    with pytest.raises(CheckpointError, match="this line is not an event"):
        list(read(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"event": "step"}, "this 'step' event lacks step, steps, loss, "),
        ({"event": "warn", "message": ""}, "this 'warn' event lacks hint"),
        ({"event": "step", **STEP, "step": "x"}, "'step' of this 'step' event must be a number, not \"x\""),
        ({"event": "step", **STEP, "step": None}, "'step' of this 'step' event must be a number, not null"),
        ({"event": "step", **STEP, "step": 1, "loss": []}, "'loss' of this 'step' event must be a number, not []"),
        ({"event": "step", **STEP, "step": 1, "loss": "low"}, "'loss' of this 'step' event must be a number"),
        ({"event": []}, "the name of an event is text, not []"),
    ],
)
def test_a_line_that_is_not_the_event_it_says_is_named(tmp_path: Path, line: dict[str, object], message: str) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text('{"event":"of a later version"}\n' + json.dumps(line) + "\n")
    with pytest.raises(CheckpointError) as caught:
        list(read(path))
    assert str(caught.value).startswith(f"{path}:2: {message}")


def test_a_missing_log_is_the_users_to_know(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        list(read(tmp_path / "none.jsonl"))
    assert f"there is no event log at {tmp_path}/none.jsonl\nhint: name a run folder, as runs/my-run" == str(
        caught.value
    )


def test_steps_after_a_resume_replace_those_lost(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e.jsonl") as log:
        for step, loss in [(1, 3.0), (2, 2.0), (3, 9.0), (2, 2.5), (3, 1.0)]:
            log.write("step", step=step, **{**STEP, "loss": loss})
    assert [(one["step"], one["loss"]) for one in steps(tmp_path / "e.jsonl")] == [(1, 3.0), (2, 2.5), (3, 1.0)]


def test_kill_9_while_writing_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    code = (
        "import sys, pathlib; from finefit.events import EventLog; log = EventLog(pathlib.Path(sys.argv[1]))\n"
        "while True: log.write('warn', message='x' * 5000, hint='')"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (path.exists() and path.stat().st_size > 100_000):
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    before = len(list(read(path)))
    assert before > 10
    with EventLog(path) as log:
        log.write("warn", message="again", hint="")
    assert before + 1 == len(list(read(path)))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_path(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.symlink_to("/dev/full")
    seen = []
    with pytest.raises(CheckpointError) as caught, EventLog(path, [seen.append]) as log:
        log.write("warn", message="x", hint="")
        log.write("warn", message="y", hint="")
    assert f"the disk is full: cannot write {path}, 3 events of it" == caught.value.message
    assert [event["message"] for event in seen] == ["x", f"cannot write {path}: No space left on device", "y"]


def test_what_ended_a_run_is_told_before_events_that_were_not_written(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(ZeroDivisionError), EventLog(path) as log:
        log.write("warn", message="x", hint="")
        raise ZeroDivisionError
    with pytest.raises(CheckpointError) as caught, EventLog(path) as log:
        log.write("warn", message="x", hint="")
        raise CheckpointError("first")
    assert f"first; and the disk is full: cannot write {path}, 2 events of it" == caught.value.message


def test_a_disk_that_takes_half_a_line_is_left_with_whole_lines(tmp_path: Path) -> None:
    """A real limit (RLIMIT_FSIZE) in a process of its own: the second line would cross it."""
    path = tmp_path / "e.jsonl"
    code = (
        "import resource, sys, pathlib\n"
        "from finefit.events import EventLog; from finefit.errors import CheckpointError\n"
        "log = EventLog(pathlib.Path(sys.argv[1])); log.write('warn', message='x' * 500, hint='')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "log.write('warn', message='y' * 500, hint='')\n"
        "try: log.close()\n"
        "except CheckpointError as error: print(error.message)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert f"cannot write {path}, 2 events of it: File too large\n" == done.stdout
    assert [record["message"] for record in read(path)] == ["x" * 500]
    assert path.read_bytes().endswith(b"\n")


def test_only_save_and_end_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    with EventLog(tmp_path / "e.jsonl") as log:
        counts = []
        for event, fields in FIELDS.items():
            log.write(event, **dict.fromkeys(fields, 1))
            counts.append((event, len(flushed)))
    assert [one for one, before in zip(counts[1:], counts, strict=False) if one[1] > before[1]] == [
        ("save", 1),
        ("end", 2),
    ]


def test_observers_get_the_event_as_written_and_a_failing_one_is_dropped_with_one_warning(tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []

    def broken(event: dict[str, object]) -> None:
        raise BrokenPipeError("nobody reads")

    with EventLog(tmp_path / "e.jsonl", [broken, seen.append], clock=lambda: 1.0) as log:
        log.write("save", step=1, path=Path("a/b"), bytes=3, seconds=0.5)
        log.write("save", step=2, path="c", bytes=3, seconds=0.5)
    events = list(read(tmp_path / "e.jsonl"))
    assert [event["event"] for event in events] == ["save", "warn", "save"]
    assert events[1]["message"] == "broken is switched off: BrokenPipeError('nobody reads')"
    assert events[0]["path"] == "a/b"
    assert sorted(map(str, events)) == sorted(map(str, seen))


def test_an_observer_can_join_later_and_a_closed_log_refuses(tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []
    log = EventLog(tmp_path / "e.jsonl")
    log.write("warn", message="before", hint="")
    log.observe(seen.append)
    log.write("warn", message="after", hint="")
    log.close()
    log.close()
    assert [event["message"] for event in seen] == ["after"]
    with pytest.raises(ValueError, match="is closed"):
        log.write("warn", message="x", hint="")
