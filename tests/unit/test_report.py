"""Reports from hand-made events: every number in them is one that was written."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from finefit import footprint
from finefit.errors import CheckpointError
from finefit.events import EventLog
from finefit.report import tables
from finefit.report.folder import write_report
from finefit.report.markdown import to_markdown
from finefit.report.palette import COLOURS, LABELS, MOMENTS
from finefit.report.summary import Point, Sample, summarize, summarize_run
from finefit.report.svg import loss_curve, memory_bars, ticks
from finefit.report.tables import compared, percent, sparse
from finefit.report.text import to_text

MIB = 2**20
SVG = "{http://www.w3.org/2000/svg}"


def shape(witness: str, activation: int, reserved: int = 0) -> dict[str, Any]:
    moments = {
        "load": {"parameter": 200 * MIB},
        "backward_peak": {"parameter": 200 * MIB, "gradient": 10 * MIB, "activation": activation},
    }
    peak_bytes = 210 * MIB + activation
    return {
        "witness": witness, "peak_bytes": peak_bytes, "peak_moment": "backward_peak", "reserved_bytes": reserved,
        "moments": moments,
    }  # fmt: skip


PREDICTED, MEASURED = shape("predicted", 90 * MIB, 40 * MIB), shape("measured", 100 * MIB)
PLAN = {
    "method": "lora", "micro_batch_size": 4, "gradient_accumulation_steps": 2, "budget_bytes": 512 * MIB,
    "reasons": ["full needs\n2.00 GiB"],
}  # fmt: skip


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "t": 0.0, "event": name, **fields}


def plan() -> dict[str, Any]:
    return event(
        "plan", plan=PLAN, model="m", data="d", steps=3, predicted=PREDICTED, hardware={"name": "a GPU"}, worst={}
    )


def build() -> dict[str, Any]:
    techniques = [{"name": "lora", "says": "trains a | b", "verified": True}]
    return event("build", seconds=1.0, parameters=1000, trainable=25, techniques=techniques)


def step(number: int, loss: float | str, seconds: float = 0.5) -> dict[str, Any]:
    return event(
        "step", step=number, steps=3, loss=loss, learning_rate=1e-4, grad_norm=1.0, tokens=100, labelled_tokens=25,
        seconds=seconds, tokens_per_s=200.0, rss_bytes=1,
    )  # fmt: skip


def held_out(number: int, loss: float, answer: str) -> dict[str, Any]:
    sample = {"prompt": "def f(): ...", "reference": "Does f.", "answer": answer}
    return event("eval", step=number, loss=loss, labelled_tokens=9, seconds=0.1, sample=sample)


def end(status: str = "finished") -> dict[str, Any]:
    return event("end", status=status, step=3, seconds=2.0, loss_before=2.5, loss_after=1.25)


def whole_run() -> list[dict[str, Any]]:
    memory = event("memory", step=2, measured=MEASURED, predicted=PREDICTED)
    smaller = event("memory", step=1, measured=shape("measured", 0), predicted=PREDICTED)
    save = event("save", step=3, path="c/step-000003", bytes=5, seconds=0.1)
    warn = event("warn", message="odd", hint="even it")
    steps = [step(1, 2.0), smaller, step(2, "nan"), memory, step(3, 1.0), warn]
    return [plan(), build(), held_out(0, 2.5, "```\nno"), *steps, held_out(3, 1.25, "Does f well."), save, end()]


def test_summary_of_a_whole_run() -> None:
    summary = summarize(whole_run())
    assert (summary.model, summary.data, summary.status) == ("m", "d", "finished")
    assert (summary.steps_done, summary.steps_planned, summary.resumes) == (3, 3, 0)
    assert (summary.tokens, summary.labelled_tokens, summary.seconds, summary.tokens_per_s) == (300, 75, 1.5, 200.0)
    assert [summary.losses[0], summary.losses[2]] == [Point(1, 2.0), Point(3, 1.0)]
    assert math.isnan(summary.losses[1].loss)
    assert (summary.loss_before, summary.loss_after) == (2.5, 1.25)
    assert summary.sample_before == Sample("def f(): ...", "Does f.", "```\nno")
    assert summary.sample_after is not None and summary.sample_after.answer == "Does f well."
    assert (summary.measured, summary.measured_at_step, summary.predicted) == (MEASURED, 2, PREDICTED)
    assert summary.error_of_peak == 300 / 310 - 1
    assert (summary.notes, summary.saves) == (("odd (even it)",), ("c/step-000003",))


def test_report_word_for_word() -> None:
    expected = """\
# m on d

|  |  |
| --- | --- |
| status | finished, 3 of 3 steps |
| trained parameters | 25 of 1,000 (2.5 %) |
| method | lora |
| device | a GPU |
| tokens | 300, 75 of them trained on |
| time in steps | 1.5 s |
| speed | 200 tokens/s, median step 500 ms |

## Loss

| loss per labelled token | before | after | change |
| --- | ---: | ---: | ---: |
| held-out examples | 2.5000 | 1.2500 | -1.2500 |
| training, first and last step | 2.0000 | 1.0000 | -1.0000 |

| step | training | held-out |
| --- | ---: | ---: |
| 0 | – | 2.5000 |
| 1 | 2.0000 | – |
| 2 | nan | – |
| 3 | 1.0000 | 1.2500 |

![Loss](loss.svg)

## Memory: predicted and measured

Predicted 300 MiB, measured 310 MiB at step 2, peak of backward: the prediction is 3.2 % too low.

The budget was 512 MiB.

| at the peak | predicted | measured | difference |
| --- | ---: | ---: | ---: |
| weights | 200 MiB | 200 MiB | 0.0 % |
| gradients | 10 MiB | 10 MiB | 0.0 % |
| activations | 90 MiB | 100 MiB | -10.0 % |
| peak | 300 MiB | 310 MiB | -3.2 % |
| reserved beside it | 40 MiB | – | – |
| needed on the device | 340 MiB | – | – |

| moment of the run | predicted | measured | difference |
| --- | ---: | ---: | ---: |
| weights loaded | 200 MiB | 200 MiB | 0.0 % |
| peak of backward (peak, predicted and measured) | 300 MiB | 310 MiB | -3.2 % |

## One held-out example

**Asked**

```text
def f(): ...
```

**Before training**

````text
```
no
````

**After training**

```text
Does f well.
```

**Written by a person**

```text
Does f.
```

## Techniques

| technique | what it does | verified |
| --- | --- | --- |
| lora | trains a \\| b | yes |

## Why this plan

- full needs 2.00 GiB

## Warnings

- odd (even it)

## Go on

```sh
finefit chat runs/x
```
"""
    assert to_markdown(summarize(whole_run()), "runs/x", [("Loss", "loss.svg")]) == expected


def test_text_word_for_word() -> None:
    expected = """\
m on d
status              finished, 3 of 3 steps
trained parameters  25 of 1,000 (2.5 %)
method              lora
device              a GPU
tokens              300, 75 of them trained on
time in steps       1.5 s
speed               200 tokens/s, median step 500 ms

loss                           before   after   change
held-out examples              2.5000  1.2500  -1.2500
training, first and last step  2.0000  1.0000  -1.0000

memory at the peak    predicted  measured  difference
weights                 200 MiB   200 MiB       0.0 %
gradients                10 MiB    10 MiB       0.0 %
activations              90 MiB   100 MiB     -10.0 %
peak                    300 MiB   310 MiB      -3.2 %
reserved beside it       40 MiB         –           –
needed on the device    340 MiB         –           –

held-out example:
  def f(): ...

its own answer:
  Does f.

answer before training:
  ```
  no

answer after training:
  Does f well.

warnings:
  odd (even it)

go on: finefit chat runs/x
"""
    assert to_text(summarize(whole_run()), "runs/x") == expected


def test_an_unfinished_run_says_so_and_how_to_go_on() -> None:
    summary = summarize([plan(), build(), step(1, 2.0)])
    text = to_markdown(summary, "runs/x")
    assert summary.status == "unfinished"
    assert "This run has not ended" in text
    assert "| status | unfinished, 1 of 3 steps |" in text
    assert "Nothing is measured yet." in text
    assert "| peak | 300 MiB | – | – |" in text
    assert text.endswith("## Go on\n\n```sh\nfinefit resume runs/x\n```\n")
    assert to_text(summary, "runs/x").endswith("go on: finefit resume runs/x\n")


def test_a_run_killed_while_planning_has_a_report() -> None:
    text = to_markdown(summarize([event("warn", message="slow disk", hint="")]), "r")
    assert text.startswith("# A run without a plan\n")
    assert "No step is done yet." in text and "- slow disk" in text and "Memory" not in text
    assert to_text(summarize([event("warn", message="slow disk", hint="")]), "r").startswith("a run without a plan\n")


def test_a_resumed_run_counts_each_step_once_and_is_not_over_until_it_ends_again() -> None:
    first = [plan(), build(), step(1, 2.0), step(2, 9.0), end("stopped")]
    again = [build(), step(2, 1.5), step(3, 1.0)]
    assert summarize(first).status == "stopped"
    going = summarize([*first, *again])
    assert (going.status, going.resumes, going.tokens) == ("unfinished", 1, 300)
    assert going.losses == (Point(1, 2.0), Point(2, 1.5), Point(3, 1.0))
    assert summarize([*first, *again, end()]).status == "finished"


def test_skipped_updates_are_counted() -> None:
    skips = [event("skip", step=i, scale=2.0 ** (16 - i), skipped=i, message="beyond") for i in (1, 2)]
    assert summarize([plan(), build(), *skips]).notes == (
        "2 updates skipped: beyond; the loss was scaled by 16384 after the last",
    )


def test_a_plan_made_again_replaces_the_first_and_is_told() -> None:
    smaller = {**PLAN, "micro_batch_size": 2}
    events = [
        plan(), build(), event("out_of_memory", step=1, message="9 MiB refused"),
        event("replan", step=1, plan=smaller, message="half the micro-batch"), build(), step(1, 2.0),
    ]  # fmt: skip
    summary = summarize(events)
    assert summary.plan == smaller
    assert summary.resumes == 0
    assert summary.notes == (
        "step 1: out of memory, 9 MiB refused",
        "step 1: planned again, half the micro-batch",
    )


def test_missing_and_empty_logs_are_the_users_to_know(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no event log at"):
        write_report(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"half')
    with pytest.raises(CheckpointError) as caught:
        write_report(tmp_path)
    assert str(caught.value) == f"{tmp_path}/events.jsonl: the event log is empty: the run has not begun"


def test_write_report_from_a_real_log(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        for one in whole_run():
            log.write(one["event"], **{key: value for key, value in one.items() if key not in ("v", "t", "event")})
    report = write_report(tmp_path)
    assert report == tmp_path / "report.md"
    figures = [("Loss", "loss.svg"), ("Memory at the peak", "memory.svg")]
    assert report.read_text() == to_markdown(summarize_run(tmp_path / "events.jsonl"), str(tmp_path), figures)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["events.jsonl", "loss.svg", "memory.svg", "report.md"]
    for figure in tmp_path.glob("*.svg"):
        assert ElementTree.parse(figure).getroot().tag == f"{SVG}svg"


def test_loss_curve_leaves_a_gap_where_the_loss_is_no_number() -> None:
    points = [Point(i, math.nan if i == 4 else 3.0 / i) for i in range(1, 9)]
    root = ElementTree.fromstring(loss_curve(points, [Point(0, 3.1), Point(8, 0.4)], "loss <of> m & n"))
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [3, 4]
    held_out_dots = [dot for dot in root.iter(f"{SVG}circle") if dot.attrib["r"] == "4"]
    assert len(held_out_dots) == 3, "two points and the legend"
    assert root.findtext(f"{SVG}title") == "loss <of> m & n"


@pytest.mark.parametrize("points", [[], [Point(1, math.nan)], [Point(1, 2.0)], [Point(1, 2.0), Point(2, 2.0)]])
def test_loss_curve_of_almost_nothing_is_a_figure(points: list[Point]) -> None:
    text = loss_curve(points)
    ElementTree.fromstring(text)
    assert "nan" not in text and "inf" not in text
    assert ("no loss yet" in text) == (not any(math.isfinite(point.loss) for point in points))


def test_a_long_curve_is_thinned_without_losing_its_spike() -> None:
    points = [Point(i, 50.0 if i == 12_345 else 1.0 + 1e-3 * (i % 7)) for i in range(1, 20_001)]
    root = ElementTree.fromstring(loss_curve(points))
    [line] = root.iter(f"{SVG}polyline")
    corners = line.attrib["points"].split()
    assert 1000 < len(corners) <= 1400
    top = min(float(corner.split(",")[1]) for corner in corners)
    assert top < 60


def test_memory_bars_add_up_to_what_is_needed() -> None:
    root = ElementTree.fromstring(memory_bars(PREDICTED, MEASURED, 680 * MIB))
    bars: dict[str, list[tuple[str, float]]] = {}
    for rect in root.iter(f"{SVG}rect"):
        if rect.attrib.get("height") == "30":
            bars.setdefault(rect.attrib["y"], []).append((rect.attrib["fill"], float(rect.attrib["width"])))
    predicted, measured = bars["40"], bars["84"]
    names = {colour: name for name, colour in COLOURS.items()}
    assert [names[colour] for colour, _ in predicted] == ["parameter", "gradient", "activation", "reserved"]
    assert [names[colour] for colour, _ in measured] == ["parameter", "gradient", "activation"]
    assert sum(width for _, width in predicted) == pytest.approx(510 / 2, abs=0.3), "340 of the budget's 680 MiB"
    assert "budget 680 MiB" in "".join(root.itertext())
    assert "no memory known yet" in memory_bars(None, None)


def test_palette_names_what_the_footprint_names() -> None:
    assert tuple(COLOURS) == footprint.COMPONENTS == tuple(LABELS)
    assert tuple(MOMENTS) == footprint.MOMENTS
    assert len(set(COLOURS.values())) == 7


def test_small_things() -> None:
    assert compared(None, 2) == ("–", "2 B", "–")
    assert compared(3, 0) == ("3 B", "0 B", "–")
    assert (percent(0.00001), percent(-0.00001), percent(0.123)) == ("0.0 %", "0.0 %", "+12.3 %")
    assert [point.step for point in sparse([Point(i, 0.0) for i in range(1, 101)], most=4)] == [1, 34, 67, 100]
    assert ticks(0, 1) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(3, 47) == [10, 20, 30, 40]
    assert ticks(5, 5) == [5]


def phase(moment: str, measured: int, host_bytes: int, predicted_host: dict[str, int]) -> dict[str, Any]:
    parts = {"parameter": measured}
    return event("phase", moment=moment, step=0, measured=parts, predicted={"parameter": 400 * MIB},
                 host_bytes=host_bytes, predicted_host=predicted_host)  # fmt: skip


def test_phases_beside_the_step_are_told_on_device_and_host() -> None:
    told = [phase("eval", 250 * MIB, 600 * MIB, {"program": 500 * MIB}),
            phase("load", 210 * MIB, 900 * MIB, {"program": 500 * MIB, "mapped": 300 * MIB})]  # fmt: skip
    summary = summarize([*whole_run()[:-1], *told, end()])
    assert summary.measured is not None and summary.measured["peak_moment"] == "backward_peak"
    assert tables.beside(summary) == [
        ("weights loaded", "400 MiB", "210 MiB", "800 MiB", "900 MiB"),
        ("evaluation", "400 MiB", "250 MiB", "500 MiB", "600 MiB"),
    ]
    assert tables.hosts(summary)[0] == ("weights loaded", "800 MiB", "300 MiB", "900 MiB", "-11.1 %")
    assert "evaluation          400 MiB   250 MiB         500 MiB   600 MiB" in to_text(summary, "runs/x")
    assert "| evaluation | 500 MiB | – | 600 MiB | -16.7 % |" in to_markdown(summary, "runs/x")


def test_a_phase_above_the_step_is_the_peak() -> None:
    summary = summarize([*whole_run(), phase("eval", 350 * MIB, 1, {})])
    assert summary.measured is not None and summary.predicted is not None
    assert (summary.measured["peak_moment"], summary.measured["peak_bytes"]) == ("eval", 350 * MIB)
    assert (summary.predicted["peak_moment"], summary.predicted["peak_bytes"]) == ("eval", 400 * MIB)


def test_a_log_of_an_older_version_has_no_phases() -> None:
    summary = summarize(whole_run())
    assert (summary.hosts, tables.beside(summary), tables.hosts(summary)) == ((), [], [])
