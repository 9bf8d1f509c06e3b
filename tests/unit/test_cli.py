"""How the program ends: a reader that is gone, a disk that is full."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
