"""How the program ends: a reader that is gone, a disk that is full, words that name nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finefit import cli

VERBS = (("catalog", "hosts"), ("catalog", "gpus", "--json"), ("--help",))


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_reader_that_went_away_ends_it_as_its_signal_would(words):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "finefit", *words], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="stands for a full disk")
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_output_to_a_full_disk_is_one_message(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "finefit", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [
            "error: the output could not be written: No space left on device",
            "hint: free some space, or send it elsewhere",
        ],
    )


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("fits", ""), "the device has an empty name", "leave it out"),
        (("plan", "SmolLM2-135M", "--gpu", " "), "the device has an empty name", "leave it out"),
        (("plan", "nowhere/a-model", "nothere.jsonl"), "nothere.jsonl: no such data file", "give a file"),
        (("train", "nowhere/a-model", "stdlib-docstring"), "no such data file", "did you mean 'stdlib-docstrings'?"),
        (("plan", "nowhere/a-model", "lora.rank"), "'lora.rank' has no value", "say lora.rank=VALUE"),
        (("plan", "SmolLM2-135M", "lora.rank="), "'lora.rank' must be a whole number, but it is empty", ""),
        (("plan", "SmolLM2-135M", "--method", "\udcc3"), "must be text in the terminal's own encoding", ""),
    ],
)
def test_a_word_that_names_nothing_is_told_by_its_own_name(words, message, hint, monkeypatch):
    for restarts in ("steady_environment", "kept_process"):
        monkeypatch.setattr(cli, restarts, lambda: None)
    told = str(CliRunner().invoke(cli.app, words).exception)
    assert message in told and hint in told
