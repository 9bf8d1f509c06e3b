"""The process that a run's process is a child of: where the system kills it for want of memory, the run goes on.

No allocator refuses anything then and nothing can be caught: the kernel takes the process away. What is left is its last
checkpoint; `finefit resume` goes on from there, on a CPU with a smaller budget, at most five times. A kill that the kernel
does not count among its own is somebody's wish. Imports next to nothing: it takes 10 MB, and waits.

    python -m finefit.keeper WORDS …      Linux alone: elsewhere nothing counts such kills.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

MOST = 5  # times a run is begun again: supervise.MOST
LESS = 0.8  # of the budget, or of what the plan needs where that is less
TELL_TO = "FINEFIT_TELL_TO"
"""In a kept process's environment: the file descriptor that it tells its run to."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def tell(folder: Path, device: str, options: Sequence[str]) -> None:
    """What to go on with: the run's folder, the kind of its device, and the options that stay."""
    if told := os.environ.pop(TELL_TO, ""):
        with open(int(told), "w", encoding="utf-8") as file:
            json.dump({"folder": str(folder.resolve()), "device": device, "options": list(options)}, file)


def system_kills() -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def keep(command: list[str], words: Sequence[str], kills: Callable[[], int] = system_kills) -> int:
    """Carry out ``command`` with ``words``, and with those that go on; the last one's exit code, 128 + n by a signal n."""
    for _ in range(MOST):
        before = kills()
        code, told = _carried_out([*command, *words])
        if code != 128 + signal.SIGKILL or kills() == before:
            return code
        said = "the system killed the run for want of memory"
        if not told:
            print(f"error: {said}, before it had a plan\nhint: memory.budget=… plans for less", file=sys.stderr)
            return code
        less = _less(Path(told["folder"])) if told["device"] == "cpu" else []
        by = f" with {less[0]}" if less else ""
        print(f"{said}; it goes on from its last checkpoint{by}", file=sys.stderr, flush=True)
        words = ["resume", told["folder"], *less, *told["options"]]
    return _carried_out([*command, *words])[0]


def _less(run: Path) -> list[str]:
    """The word that asks for a leaner plan than the run's."""
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    needs = plan["predicted"]["peak_bytes"] + plan["predicted"]["reserved_bytes"]
    return [f"memory.budget={int(LESS * min(plan['budget_bytes'], needs)) >> 20}MiB"]


def _carried_out(command: list[str]) -> tuple[int, dict[str, Any]]:
    """The exit code of a child of this command, and what it told."""
    sys.stdout.flush()
    ours, theirs = os.pipe()
    waited = signal.pthread_sigmask(signal.SIG_BLOCK, [*_FORWARDED, signal.SIGCHLD])
    pid = os.fork()
    if not pid:
        _become(command, theirs, waited)
    os.close(theirs)
    try:
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            _pass_on(pid)
        with open(ours, encoding="utf-8") as file:
            said = file.read()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, waited)
    code = os.waitstatus_to_exitcode(ended[1])
    return code if code >= 0 else 128 - code, json.loads(said) if said else {}


def _become(command: list[str], tell_to: int, signals: Iterable[int]) -> NoReturn:
    """The child: it dies with its parent, and takes signals as it would without one."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    os.set_inheritable(tell_to, True)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    os.execve(command[0], command, {**os.environ, TELL_TO: str(tell_to)})


def _pass_on(pid: int) -> None:
    """Wait for one signal. What a terminal sends its foreground processes the child has, too; what somebody sends it has not."""
    came = signal.sigwaitinfo([*_FORWARDED, signal.SIGCHLD])
    if came.si_signo != signal.SIGCHLD and came.si_code <= 0:
        os.kill(pid, came.si_signo)


if __name__ == "__main__":
    sys.exit(keep([sys.executable, "-P", "-m", "finefit"], sys.argv[1:]))
