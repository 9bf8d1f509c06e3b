"""What a run looks like on a terminal, in a file and to a machine; and that showing it never harms it."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finefit.events import read
from finefit.terminal.bars import stacked
from finefit.terminal.lines import PlainLines
from finefit.terminal.live import LineReporter, LiveReporter, json_lines, reporter
from finefit.terminal.planned import plan_renderable, plan_view
from finefit.terminal.state import RunState
from finefit.terminal.view import render

MIB = 2**20


def shape(witness: str, activation: int, reserved: int = 0) -> dict[str, Any]:
    return {
        "witness": witness, "peak_bytes": 200 * MIB + activation, "peak_moment": "backward_peak",
        "reserved_bytes": reserved, "moments": {"backward_peak": {"parameter": 200 * MIB, "activation": activation}},
    }  # fmt: skip


PLAN: dict[str, Any] = {
    "model": {"name": "SmolLM2"}, "hardware": {"name": "RTX 4090"}, "method": "lora", "micro_batch_size": 4,
    "gradient_accumulation_steps": 2, "predicted": shape("predicted", 100 * MIB, 100 * MIB),
    "techniques": [{"name": "checkpointing", "blocks": 10, "says": "recomputes 10 blocks"},
                   {"name": "lora", "rank": 16, "targets": ["q_proj", "v_proj"], "says": "trains [two] matrices"}],
    "seconds_per_step": 1.5, "tokens_per_s": 1234.0, "budget_bytes": 500 * MIB,
    "reasons": ["full needs 2.00 GiB", "10 blocks are enough"],
    "alternatives": [{"says": "full", "peak_bytes": 2048 * MIB, "seconds_per_step": 1.0, "chosen": False},
                     {"says": "lora", "peak_bytes": 400 * MIB, "seconds_per_step": 1.5, "chosen": True}],
}  # fmt: skip


def event(name: str, t: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "t": t, "event": name, **fields}


def planned() -> dict[str, Any]:
    return event(
        "plan", plan=PLAN, model="SmolLM2", data="my docs", steps=10, predicted=PLAN["predicted"], hardware={}, worst={}
    )


def step(number: int, t: float = 0.0, loss: float | str = 2.0, seconds: float = 2.0) -> dict[str, Any]:
    return event(
        "step", t, step=number, steps=10, loss=loss, learning_rate=1e-4, grad_norm=1.0, tokens=100, labelled_tokens=25,
        seconds=seconds, tokens_per_s=812.4, rss_bytes=1,
    )  # fmt: skip


def memory(number: int, t: float = 0.0, activation: int = 90 * MIB) -> dict[str, Any]:
    return event("memory", t, step=number, measured=shape("measured", activation), predicted=PLAN["predicted"])


def end(t: float = 0.0) -> dict[str, Any]:
    return event("end", t, status="finished", step=10, seconds=21.0, loss_before=2.5, loss_after=1.25)


def plain_text(renderable: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_plain_lines_word_for_word() -> None:
    lines = PlainLines(interval_s=10)
    build = event(
        "build", 1.0, seconds=2.5, parameters=1000, trainable=10,
        techniques=[{"name": "lora"}, {"name": "checkpointing"}],
    )  # fmt: skip
    events = [
        planned(), build, event("eval", 2.0, step=0, loss=2.5, labelled_tokens=9, seconds=0.25),
        step(1, 3.0), memory(1, 3.0), step(2, 5.0), memory(2, 5.0), step(3, 12.9), step(4, 13.0, "nan"), step(5, 14.0),
        event("save", 15.0, step=5, path="a b/c", bytes=3 * MIB, seconds=0.5),
        event("warn", 16.0, message='say "x"\nnow', hint=""), step(6, 24.0), step(10, 25.0), end(26.0),
    ]  # fmt: skip
    expected = """\
time=1970-01-01T00:00:00Z event=plan model=SmolLM2 data="my docs" steps=10 predicted_peak="300 MiB"
time=1970-01-01T00:00:01Z event=build seconds=2.5 parameters=1000 trainable=10 techniques=lora+checkpointing
time=1970-01-01T00:00:02Z event=eval step=0 loss=2.5000 seconds=0.25
time=1970-01-01T00:00:03Z event=step step=1 steps=10 loss=2.0000 learning_rate=0.0001 tokens_per_s=812 left="18.0 s"
time=1970-01-01T00:00:03Z event=memory step=1 measured_peak="290 MiB" predicted_peak="300 MiB" moment=backward_peak
time=1970-01-01T00:00:13Z event=step step=4 steps=10 loss=nan learning_rate=0.0001 tokens_per_s=812 left="12.0 s"
time=1970-01-01T00:00:14Z event=step step=5 steps=10 loss=2.0000 learning_rate=0.0001 tokens_per_s=812 left="10.0 s"
time=1970-01-01T00:00:15Z event=save step=5 path="a b/c" size="3 MiB" seconds=0.5
time=1970-01-01T00:00:16Z event=warn message="say \\"x\\"\\nnow" hint=""
time=1970-01-01T00:00:24Z event=step step=6 steps=10 loss=2.0000 learning_rate=0.0001 tokens_per_s=812 left="8.0 s"
time=1970-01-01T00:00:25Z event=step step=10 steps=10 loss=2.0000 learning_rate=0.0001 tokens_per_s=812
time=1970-01-01T00:00:26Z event=end status=finished step=10 seconds=21 loss_before=2.5 loss_after=1.25"""
    assert [line for one in events for line in lines(one)] == expected.splitlines()


def test_live_view_word_for_word() -> None:
    state = RunState()
    for one in [planned(), step(3, 1.0), memory(3), memory(4, activation=10 * MIB)]:
        state.apply(one)
    state.apply(event("save", step=3, path="c", bytes=3 * MIB, seconds=0.5))
    expected = """\
SmolLM2 on my docs  training
━━━━━━                step 3/10  loss 2.0000  lr 0.0001  812 tokens/s  14.0 s left
predicted █████████████████████████████████
measured  ████████████████████████
needs 400 MiB of 500 MiB, 80 %
memory at the peak      predicted  measured  difference
■ weights                 200 MiB   200 MiB       0.0 %
■ activations             100 MiB    90 MiB     +11.1 %
  peak                    300 MiB   290 MiB      +3.4 %
  reserved beside it      100 MiB         –           –
  needed on the device    400 MiB         –           –
· step 3: saved 3 MiB to c"""
    width = 41 + 12  # a bar of 41 columns for the budget's 500 MiB
    shown = plain_text(render(state, width))
    assert shown == expected


def test_live_view_before_anything_is_known() -> None:
    assert plain_text(render(RunState(), 80)) == "waiting for the plan  starting\nno step yet"


def test_live_view_lists_the_last_three_events() -> None:
    state = RunState()
    for one in [
        event("out_of_memory", step=2, message="9 MiB refused"),
        event("replan", step=2, plan={}, message="half the micro-batch"),
        event("warn", message="odd", hint="even it"),
        end(),
    ]:
        state.apply(one)
    assert list(state.last) == [
        "step 2: planned again, half the micro-batch", "warning: odd (even it)", "finished at step 10 after 21.0 s",
    ]  # fmt: skip
    assert state.status == "finished"


def test_view_in_ascii_has_only_ascii_of_its_own() -> None:
    state = RunState()
    for one in [planned(), step(3), memory(3), event("warn", message="odd", hint="")]:
        state.apply(one)
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace"), width=80)
    assert console.options.ascii_only
    console.print(render(state, 80, ascii_only=True))
    console.file.flush()
    shown = console.file.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "########" in shown and "- warning: odd" in shown


def test_stacked_bar_is_as_wide_as_its_share_and_in_stack_order() -> None:
    footprint = {"peak_moment": "p", "moments": {"p": {"activation": 25, "parameter": 50}}, "reserved_bytes": 10}
    bar = stacked(footprint, 100, 20, False)
    assert bar.plain == "█" * 17 + " " * 3
    assert [(span.end - span.start, str(span.style)) for span in bar.spans if span.end > span.start] == [
        (10, "#0072B2"), (5, "#D55E00"), (2, "#999999"),
    ]  # fmt: skip


def test_plan_view_says_how_the_batch_is_split() -> None:
    split = {
        "name": "accumulation",
        "micro_batch_size": 4,
        "says": "micro-batches of at most 4 examples, up to 2 to a step",
    }
    plan = {**PLAN, "global_batch_size": 8, "techniques": [split]}
    assert "batch   8 examples a step: micro-batches of at most 4 examples, up to 2 to a step" in plain_text(
        plan_renderable(plan, 120)
    )


def test_plan_view_word_for_word() -> None:
    expected = """\
model   SmolLM2
device  RTX 4090
method  lora
speed   about 1.5 s a step, 1,234 tokens/s

memory at peak of backward  predicted  share
weights                       200 MiB   50 %  ████████████████████
activations                   100 MiB   25 %  ██████████
reserved                      100 MiB   25 %  ██████████
together                      400 MiB         ████████████████████████████████████████
needs 400 MiB of 500 MiB on RTX 4090, 80 %

technique      settings                        what it does
checkpointing  blocks 10                       recomputes 10 blocks
lora           rank 16, targets q_proj v_proj  trains [two] matrices

why
· full needs 2.00 GiB
· 10 blocks are enough

   also looked at      peak  a step
   full            2.00 GiB   1.0 s
▸  lora             400 MiB   1.5 s"""
    assert plain_text(plan_renderable(PLAN, 100)) == expected


def test_plan_view_of_the_least_a_plan_can_be() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    plan_view({"model": "m", "method": "full", "predicted": shape("predicted", 0)}, console)
    assert isinstance(console.file, io.StringIO)
    assert "needs 200 MiB\n" in console.file.getvalue()


def test_json_reporter_prints_the_events_themselves() -> None:
    out = io.StringIO()
    events = [planned(), step(1), end()]
    with reporter("json", out) as show:
        for one in events:
            show(one)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == events


def test_auto_on_a_file_is_plain_without_colours_or_carriage_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    with reporter("auto", out) as show:
        assert isinstance(show, LineReporter)
        for one in [planned(), step(1), memory(1), end()]:
            show(one)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == [
        "event=plan", "event=step", "event=memory", "event=end",
    ]  # fmt: skip
    assert not {"\r", "\x1b"} & set(out.getvalue())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_auto_on_a_terminal_is_live_and_dumb_ones_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with reporter("auto", Terminal()) as show:
        assert isinstance(show, LiveReporter)
    monkeypatch.setenv("TERM", "dumb")
    with reporter("auto", Terminal()) as show:
        assert isinstance(show, LineReporter)


INTO_HEAD = """
import pathlib, sys, time
from finefit.events import EventLog
from finefit.terminal.live import reporter
with reporter("plain") as show, EventLog(pathlib.Path(sys.argv[1]), [show]) as log:
    for i in range(100):
        log.write("eval", step=i, loss=1.0, labelled_tokens=1, seconds=0.1)
        time.sleep(0.003)
"""


def test_a_broken_pipe_switches_the_view_off_with_one_warning_and_training_goes_on(tmp_path: Path) -> None:
    """As in ``finefit train … | head``: nothing is lost, nothing is complained of on standard error."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", INTO_HEAD, str(tmp_path / "e.jsonl")]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    events = list(read(tmp_path / "e.jsonl"))
    warnings = [one["message"] for one in events if one["event"] == "warn"]
    assert warnings == ["the line log is switched off: BrokenPipeError(32, 'Broken pipe')"]
    assert [one["step"] for one in events if one["event"] == "eval"] == list(range(100))


class Stuck(io.StringIO):
    """A terminal that somebody stopped with Ctrl-S."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.go.wait()
        return super().write(text)


def test_a_stopped_terminal_does_not_hold_up_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.terminal.live._PATIENCE_S", 0.05)
    out = Stuck()
    show = LineReporter(out, json_lines)
    began = time.monotonic()
    for i in range(1, 1001):
        show(step(i))
    show.close()
    assert time.monotonic() - began < 1.0
    out.go.set()


LIVE_RUN = """
import signal, sys, time
from finefit.terminal.live import reporter
signal.signal(signal.SIGINT, signal.default_int_handler)
plan = {"plan": {}, "model": "m", "data": "d", "steps": 9, "predicted": None}
try:
    with reporter("auto") as show:
        show({"v": 1, "t": 0, "event": "plan", **plan})
        time.sleep(0.4)
        print("a library says this", flush=True)
        show({"v": 1, "t": 0, "event": "warn", "message": "now", "hint": ""})
        time.sleep(20)
except KeyboardInterrupt:
    print("stopped by hand", flush=True)
"""


def test_ctrl_c_gives_the_terminal_back() -> None:
    """In a real pseudo-terminal: the cursor is visible after, and the alternate screen was never used."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    run = subprocess.Popen(
        [sys.executable, "-c", LIVE_RUN], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    shown = b""
    while b"warning: now" not in shown:
        shown += os.read(controller, 65536)
    run.send_signal(signal.SIGINT)
    try:
        while b"stopped by hand" not in shown:
            shown += os.read(controller, 65536)
        code = run.wait(10)
    finally:
        run.kill()
        os.close(controller)
    assert code == 0
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert b"\x1b[?1049h" not in shown
    assert b"a library says this" in shown


def test_plan_view_tells_each_phase_on_device_and_host() -> None:
    moments = {"load": {"parameter": 200 * MIB}, "loss": {"parameter": 250 * MIB},
               **PLAN["predicted"]["moments"], "eval": {"parameter": 210 * MIB}}  # fmt: skip
    host = {"load": {"program": 50 * MIB, "mapped": 70 * MIB}, "loss": {"program": 60 * MIB},
            "backward_peak": {"program": 61 * MIB}, "eval": {"program": 62 * MIB}}  # fmt: skip
    predicted = {**PLAN["predicted"], "moments": moments, "host": host}
    notes = ["predicted: so and so", "warning: load needs 120 MiB of the host's memory, which is 100 MiB"]
    shown = plain_text(plan_renderable({**PLAN, "predicted": predicted, "notes": notes}, 100))
    expected = """\
phase            device    host  and of files
weights loaded  300 MiB  50 MiB        70 MiB
step            400 MiB  61 MiB
evaluation      310 MiB  62 MiB
warning: load needs 120 MiB of the host's memory, which is 100 MiB
"""
    assert expected in shown


def test_a_phase_is_a_line_and_not_among_the_last_of_the_live_view() -> None:
    told = event("phase", moment="load", step=0, measured={"parameter": MIB}, predicted={"parameter": 2 * MIB},
                 host_bytes=3 * MIB, predicted_host={})  # fmt: skip
    (line,) = PlainLines(10.0)(told)
    assert line.endswith('event=phase step=0 moment=load measured="1 MiB" predicted="2 MiB" host="3 MiB"')
    state = RunState()
    state.apply(told)
    assert list(state.last) == []
