"""The keeper of a run's process: what it goes on from, what it passes on, and that nothing outlives it."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from finefit import keeper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts its kills on Linux alone")

# Appends its words to a file, tells a run, and ends as the next line of another file says.
CHILD = """
import json, os, sys, signal
from pathlib import Path
from finefit import keeper
place = Path(sys.argv[1])
with (place / "words").open("a") as file:
    file.write(json.dumps(sys.argv[2:]) + "\\n")
ends = (place / "ends").read_text().splitlines()
(place / "ends").write_text("\\n".join(ends[1:]))
how, _, device = ends[0].partition(" ")
if device:
    keeper.tell(place, device, ["--log-format", "json"])
os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else sys.exit(int(how))
"""


def kept(place, *ends, counted=True):
    """(exit code, words of every child) of a keeper whose children end so; the system counts kills among its own or not."""
    (place / "ends").write_text("\n".join(ends))
    (place / "plan.json").write_text(
        json.dumps({"budget_bytes": 2**30, "predicted": {"peak_bytes": 400 * 2**20, "reserved_bytes": 0}})
    )
    seen = iter(range(100)) if counted else iter([0] * 100)
    command = [sys.executable, "-c", CHILD, str(place)]
    code = keeper.keep(command, ["train", "m", "d"], lambda: next(seen))
    return code, [json.loads(line) for line in (place / "words").read_text().splitlines()]


@pytest.mark.parametrize("code", [0, 2, 130])
def test_an_exit_code_is_the_child_s(code, tmp_path):
    assert kept(tmp_path, str(code)) == (code, [["train", "m", "d"]])


def test_what_the_system_killed_goes_on_with_less(tmp_path, capfd):
    """0.8 of what the plan needs, which is less than its budget."""
    again = ["resume", str(tmp_path), "memory.budget=320MiB", "--log-format", "json"]
    assert kept(tmp_path, "killed cpu", "killed cpu", "0") == (0, [["train", "m", "d"], again, again])
    assert capfd.readouterr().err.count("the system killed the run for want of memory") == 2


def test_a_gpu_s_plan_is_no_matter_of_the_host_s_memory(tmp_path):
    again = ["resume", str(tmp_path), "--log-format", "json"]
    assert kept(tmp_path, "killed cuda", "0") == (0, [["train", "m", "d"], again])


def test_a_kill_that_is_somebody_s_wish_is_the_end(tmp_path):
    assert kept(tmp_path, "killed cpu", counted=False) == (137, [["train", "m", "d"]])


def test_what_was_killed_before_it_had_a_plan_is_told(tmp_path, capfd):
    assert kept(tmp_path, "killed") == (137, [["train", "m", "d"]])
    assert "before it had a plan\nhint: memory.budget" in capfd.readouterr().err


def test_it_ends_after_so_many(tmp_path):
    code, words = kept(tmp_path, *["killed cpu"] * 9)
    assert (code, len(words)) == (137, keeper.MOST + 1)


# --- signals

# Says that it is there, and each signal that comes; ends at SIGTERM.
LISTENER = """
import signal, sys
def told(number, _):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(7)
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(one, told)
print(__import__("os").getpid(), flush=True)
while True:
    signal.pause()
"""
KEEPER = f"import sys; from finefit import keeper; sys.exit(keeper.keep([sys.executable, '-c', {LISTENER!r}], []))"


@pytest.fixture
def listened():
    keeper_of = subprocess.Popen([sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, text=True)
    child = int(keeper_of.stdout.readline())
    yield keeper_of, child
    keeper_of.kill()
    keeper_of.wait()
    keeper_of.stdout.close()


def test_what_is_sent_to_the_keeper_comes_to_the_child(listened):
    process, _ = listened
    for one in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(one)
        assert process.stdout.readline().strip() == one.name
    assert process.wait(10) == 7


def test_a_child_does_not_outlive_its_keeper(listened):
    process, child = listened
    process.kill()
    process.wait()
    assert gone(child)


def gone(pid):
    """Within two seconds."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def test_ctrl_c_at_a_terminal_comes_once():
    """The terminal sends it to both."""
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", KEEPER])
    said = read_until(terminal, b"\r\n")
    os.write(terminal, b"\x03")
    said += read_until(terminal, b"SIGINT\r\n")
    time.sleep(0.1)
    os.kill(pid, signal.SIGTERM)
    said += read_until(terminal, b"SIGTERM\r\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert said.count(b"SIGINT") == 1
    os.close(terminal)


def read_until(terminal, end):
    said = b""
    while not said.endswith(end):
        said += os.read(terminal, 1)
    return said


def test_it_is_small():
    """Nothing of finefit's but itself."""
    code = "import sys; import finefit.keeper; print(*(m for m in sys.modules if m.startswith('finefit')))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["finefit", "finefit.keeper"]
