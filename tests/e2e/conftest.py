"""The command line in a process of its own, on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_run import data, model  # noqa: F401


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def environment(home):
    return {
        **os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "default",
    }  # fmt: skip


@pytest.fixture(scope="session")
def finefit(environment, tmp_path_factory):
    """One command, its exit code checked; gives what it printed."""
    folder = tmp_path_factory.mktemp("printed")
    out, err = folder / "out", folder / "err"
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forked.py"))],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def run(*words, cwd=None, expect=0):
        asked = {"words": [*map(str, words)], "cwd": cwd and str(cwd), "out": str(out), "err": str(err)}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        done = subprocess.CompletedProcess(words, int(server.stdout.readline()), out.read_text(), err.read_text())
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    yield run
    server.stdin.close()
    server.stdout.close()
    assert server.wait(10) == 0
