"""The keeper of a run's process: what it goes on from, what it passes on, and that nothing outlives it."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from finefit import keeper, supervise

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts its kills on Linux alone")

# Appends its words to a file, tells a run, and ends as the next line of another file says.
CHILD = """
import json, os, sys, signal
from pathlib import Path
from finefit import keeper, supervise
place = Path(sys.argv[1])
with (place / "words").open("a") as file:
    file.write(json.dumps([*sys.argv[2:], keeper.why()]) + "\\n")
ends = (place / "ends").read_text().splitlines()
(place / "ends").write_text("\\n".join(ends[1:]))
how, _, device = ends[0].partition(" ")
if device:
    keeper.tell(keeper.Told(str(place), device, ["--log-format", "json"]))
if how == "saved":
    (place / "checkpoints" / f"step-{100 - len(ends):06}").mkdir(parents=True)
if how == "stopped":
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
sys.exit(int(how)) if how.isdigit() else os.kill(os.getpid(), signal.SIGKILL)
"""
FIRST = ["train", "m", "d", ""]


def kept(place, *ends, counted=True):
    """(exit code, words of every child) of a keeper whose children end so; the system counts kills among its own or not."""
    (place / "ends").write_text("\n".join(ends))
    if not (place / "plan.json").exists():
        plan = {"budget_bytes": 2**30, "predicted": {"peak_bytes": 400 * 2**20, "reserved_bytes": 0}}
        (place / "plan.json").write_text(json.dumps(plan))
    seen = iter(range(1000)) if counted else iter([0] * 1000)
    command = [sys.executable, "-c", CHILD, str(place)]
    code = keeper.keep(command, ["train", "m", "d"], lambda: next(seen))
    return code, [json.loads(line) for line in (place / "words").read_text().splitlines()]


def again(place, *less):
    return ["resume", str(place), *less, "--log-format", "json", keeper.KILLED]


@pytest.mark.parametrize("code", [0, 2, 130])
def test_an_exit_code_is_the_child_s(code, tmp_path):
    assert kept(tmp_path, str(code)) == (code, [FIRST])


def test_what_the_system_killed_goes_on_with_less(tmp_path, capfd):
    """0.8 of what the plan needs, which is less than its budget."""
    less = again(tmp_path, "memory.budget=320MiB")
    assert kept(tmp_path, "killed cpu", "killed cpu", "0") == (0, [FIRST, less, less])
    assert capfd.readouterr().err.count(keeper.KILLED) == 2


def test_a_gpu_s_plan_is_no_matter_of_the_host_s_memory(tmp_path):
    assert kept(tmp_path, "killed cuda", "0") == (0, [FIRST, again(tmp_path)])


def test_where_nothing_leaner_fits_it_goes_on_as_it_was(tmp_path):
    """It may have been another's memory; an end with 2 after a run was told is the run's own."""
    less = again(tmp_path, "memory.budget=320MiB")
    assert kept(tmp_path, "killed cpu", "2", "0") == (0, [FIRST, less, again(tmp_path)])
    (tmp_path / "words").unlink()
    assert kept(tmp_path, "killed cpu", "2 cpu") == (2, [FIRST, less])


@pytest.mark.parametrize(
    "plan", ["", "{}", "[]", '{"budget_bytes": 5, "predicted": {"peak_bytes": 9, "reserved_bytes": 0}}']
)
def test_a_plan_of_which_nothing_is_known_is_not_asked_to_be_less(plan, tmp_path):
    (tmp_path / "plan.json").write_text(plan)
    assert kept(tmp_path, "killed cpu", "0") == (0, [FIRST, again(tmp_path)])


def test_a_kill_that_is_somebody_s_wish_is_the_end(tmp_path):
    assert kept(tmp_path, "killed cpu", counted=False) == (137, [FIRST])


def test_a_run_that_was_told_to_stop_does_not_go_on(tmp_path, capfd):
    assert kept(tmp_path, "stopped cpu", "0") == (137, [FIRST])
    assert f"while it was being stopped\nhint: finefit resume {tmp_path}" in capfd.readouterr().err


def test_what_was_killed_before_it_had_a_plan_is_told(tmp_path, capfd):
    assert kept(tmp_path, "killed") == (137, [FIRST])
    assert "before it had a plan\nhint: memory.budget" in capfd.readouterr().err


def test_what_was_told_once_is_known(tmp_path):
    less = again(tmp_path, "memory.budget=320MiB")
    assert kept(tmp_path, "killed cpu", "killed", "0") == (0, [FIRST, less, less])


def test_it_gives_up_where_nothing_is_saved_between_kills(tmp_path, capfd):
    code, words = kept(tmp_path, *["killed cpu"] * 9)
    assert (code, len(words)) == (137, keeper.MOST + 1)
    assert "6 times without a checkpoint between" in capfd.readouterr().err


def test_it_goes_on_as_long_as_something_is_saved(tmp_path):
    code, words = kept(tmp_path, *["saved cpu"] * 9, "0")
    assert (code, len(words)) == (0, 10)


def test_it_gives_up_as_often_as_a_run_does():
    assert keeper.MOST == supervise.MOST


def test_kills_are_those_of_the_own_group():
    """Where groups count, another's is none of it."""
    assert keeper.system_kills() >= 0
    assert all(path.name in ("memory.events", "memory.oom_control") for path in keeper._groups())


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


def test_signals_of_children_that_somebody_ignored_are_waited_for():
    code = (
        f"import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n{KEEPER.replace(repr(LISTENER), repr('pass'))}"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
def test_a_closed_stream_is_no_matter(closed):
    """What the child tells does not take its place."""
    code = KEEPER.replace(repr(LISTENER), repr("import os; os.write(1, b'x')"))
    done = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -c "$0" {closed}', code], capture_output=True, timeout=20
    )
    assert (done.returncode, done.stderr) == (0, b"")


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
