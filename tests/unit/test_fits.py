"""`finefit fits`: the longest length is that, what is said of it is what a plan says, and the table and JSON show it."""

import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from finefit import cli, coefficients
from finefit.batches import Uniform
from finefit.candidates import Question, candidate
from finefit.errors import ConfigError
from finefit.fits import EXAMPLES, fits
from finefit.search import DEFAULT_BUDGET, search
from finefit.spec import HardwareSpec, JobSpec, resolve_model
from finefit.terminal.fitting import by_model, show_fits, words
from finefit.units import parse_budget

CARD = HardwareSpec.from_name("RTX 4090")


@pytest.fixture(scope="module")
def llamas():
    return fits(CARD, word="Llama-3")


def question_of(row, length, pins=(("micro_batch_size", "1"),)):
    method = row["method"]
    job = JobSpec(method=method, global_batch_size=EXAMPLES, max_length=length, longest=length, pins=pins)
    budget = parse_budget(DEFAULT_BUDGET["cuda"], CARD.memory_bytes)
    return Question(resolve_model(row["hub_id"]), CARD, job, Uniform(EXAMPLES, length), budget)


def needs(row, length, blocks):
    question = question_of(row, length)
    return candidate(question, 1, 0, question.batches.work(1, 0, False), blocks).predicted.total_bytes


def test_the_longest_fits_and_the_next_does_not(llamas):
    rows = [row for row in llamas["rows"] if row["longest"]]
    assert {row["method"] for row in rows} == {"lora", "qlora"}
    for row in rows:
        longest, depth = row["longest"]["length"], resolve_model(row["hub_id"]).num_hidden_layers
        assert longest % 512 == 0
        assert needs(row, longest, depth) <= llamas["budget_bytes"]
        if longest + 512 <= row["context"]:
            assert needs(row, longest + 512, depth) > llamas["budget_bytes"]


def test_no_more_blocks_are_checkpointed_than_needed(llamas):
    for row in llamas["rows"]:
        for at in (row["longest"], row["usual"]):
            if at:
                assert needs(row, at["length"], at["checkpointed"]) == at["needs_bytes"] <= llamas["budget_bytes"]
            if at and at["checkpointed"]:
                assert needs(row, at["length"], at["checkpointed"] - 1) > llamas["budget_bytes"]


def test_a_plan_says_the_same(llamas):
    row = next(r for r in llamas["rows"] if (r["model"], r["method"]) == ("Llama-3.1-8B", "lora"))
    plan = search(question_of(row, 2048))
    usual = row["usual"]
    blocks = plan.technique("checkpointing")
    assert (usual["needs_bytes"], usual["tokens_per_s"], usual["checkpointed"]) == (
        plan.predicted.total_bytes, plan.tokens_per_s, blocks.blocks if blocks else 0,
    )  # fmt: skip


def test_every_model_of_a_shipped_family_is_there_and_nothing_is_traced(monkeypatch):
    monkeypatch.setattr(coefficients, "derive", lambda *_: pytest.fail("fits must not trace"))
    found = fits(HardwareSpec.from_name("8GiB"), ["lora"])
    assert len(found["rows"]) >= 60
    assert all(bool(row["longest"]) <= (not row["why"]) for row in found["rows"])
    sizes = [row["parameters"] for row in found["rows"]]
    assert sizes == sorted(sizes)


def row(longest=None, usual=None, why="", possible=True):
    return {
        "longest": longest, "usual": usual, "why": why, "possible": possible, "parameters": 10**9, "context": 8192,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (row(), ("-", "")),
        (row(why="not traced"), ("?", "")),
        (row(why="no linear layers", possible=False), ("x", "")),
        (row({"length": 1536, "tokens_per_s": 3.14159}), ("1.5k", "3.1")),
        (row({"length": 131_072, "tokens_per_s": 100.0}, {"length": 2048, "tokens_per_s": 1234.5}), ("128k", "1,234")),
    ],
)
def test_length_and_speed_are_short(one, text):
    assert text == words(one)


def test_models_of_which_nothing_fits_are_left_out_of_the_table_only():
    rows = [{"model": "a", "method": "full", **row()}, {"model": "b", "method": "full", **row({"length": 512})}]
    assert list(by_model({"rows": rows})) == ["b"]


def test_the_table_is_readable_at_eighty_columns():
    out = Console(file=io.StringIO(), width=80)
    show_fits(fits(CARD), console=out)
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "RTX 4090: 23.03 GiB of 23.99 GiB used, one example at a time"
    assert lines[1].split() == ["model", "size", "full", "tok/s", "lora", "tok/s", "qlora", "tok/s"]
    assert any(re.match(r"Llama-3\.1-8B +8\.03B +- +[\d.]+k +[\d,]+ +[\d.]+k +[\d,]+", line) for line in lines)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def shown(found, width):
    out = Console(file=io.StringIO(), width=width)
    show_fits(found, console=out)
    return out.file.getvalue()


def test_a_narrow_terminal_has_whole_numbers():
    found = fits(CARD, word="Llama-3.")
    speeds = [words(row)[1] for row in found["rows"] if row["longest"]]
    for width, heads, lines in ((60, "qlora tok/s", None), (45, "lora qlora", None), (30, "full - lora", speeds)):
        text = shown(found, width)
        assert (width, heads in " ".join(text.split()), "…" in text) == (width, True, False)
        assert max(map(len, text.splitlines())) <= width
        assert all(speed in text for speed in lines or ())


def test_a_method_that_does_not_take_a_model_has_a_mark_of_its_own():
    text = shown(fits(CARD, word="gpt2"), 80)
    assert "x: the method does not take this model." in text
    assert "?: not known" not in text


def test_where_nothing_fits_there_is_a_sentence():
    found = fits(HardwareSpec.from_name("8GiB"), ["full"], "Llama-3.1-405B")
    assert shown(found, 80).splitlines()[1] == "not 512 tokens of Llama-3.1-405B fit"


@pytest.mark.parametrize(
    ("word", "hint"), [("zzz", "catalog models lists all"), ("Llamma-3.1-8B", "did you mean 'Llama-3.1-8B'?")]
)
def test_a_name_that_is_no_models_is_refused(word, hint):
    with pytest.raises(ConfigError, match=f"has '{word}' in it") as caught:
        fits(CARD, word=word)
    assert hint in caught.value.hint


def test_the_command_prints_json_in_seconds_without_torch():
    code = (
        "import sys, time; started = time.process_time(); sys.argv = ['finefit', 'fits', '24GB', '--json']\n"
        "from finefit import cli\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "heavy = [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules]\n"
        "print(time.process_time() - started, heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    took, heavy = done.stderr.split(maxsplit=1)
    assert (float(took) < 16, heavy) == (True, "[]\n")
    found = json.loads(done.stdout)
    assert (found["device"], found["memory_bytes"], found["methods"]) == (
        "GPU with 22.35 GiB", 24 * 10**9, ["full", "lora", "qlora"],
    )  # fmt: skip


def test_the_command_takes_a_method_and_suggests_one():
    done = CliRunner().invoke(cli.app, ["fits", "H100", "--method", "lora", "--model", "smollm2"])
    assert done.exit_code == 0
    assert done.output.splitlines()[1].split() == ["model", "size", "lora", "tok/s"]
    wrong = CliRunner().invoke(cli.app, ["fits", "H100", "--method", "lorra"])
    assert (str(wrong.exception.message), wrong.exception.hint) == (
        "there is no method 'lorra'", "did you mean 'lora'?",
    )  # fmt: skip
