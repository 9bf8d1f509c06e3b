"""The process that a run's process is a child of: where the system kills it for want of memory, the run goes on.

No allocator refuses anything then and nothing can be caught: the kernel takes the process away. What is left is its last
checkpoint; `finefit resume` goes on from there, on a CPU with a smaller budget where a plan fits it. A kill that the kernel
does not count among its own of the last seconds is somebody's wish, and one of a run that was told to stop is its end.
Imports next to nothing: it takes 12 MB, and waits.

    python -m finefit.keeper WORDS …      Linux alone: elsewhere nothing counts such kills.
"""

import ctypes
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

MOST = 5  # kills in a row without a checkpoint between them
LESS = 0.8  # of the budget, or of what the plan needs where that is less; supervise has both from here
CANNOT = 2  # the exit code of what cannot be done as it is asked
TELL_TO, WHY = "FINEFIT_TELL_TO", "FINEFIT_WHY"
"""In a kept process's environment: the file descriptor that it tells its run to; why it was begun again."""
KILLED = "the system killed the run for want of memory"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_SECONDS = 10  # a large process takes some to die


@dataclass(frozen=True, slots=True)
class Told:
    """A run's folder, the kind of its device, and the options that stay."""

    folder: str
    device: str
    options: Sequence[str] = ()


@dataclass(slots=True)
class Ended:
    """How a child ended: its exit code, 128 + n by a signal n; what it told; whether it was asked to stop; whether the system
    counted kills of its own in the last seconds."""

    code: int = 0
    told: Told | None = None
    asked: bool = False
    counts: deque[int] = field(default_factory=lambda: deque(maxlen=_SECONDS))

    @property
    def by_system(self) -> bool:
        return self.code == 128 + signal.SIGKILL and self.counts[-1] > self.counts[0]


def tell(told: Told) -> None:
    """What the keeper goes on with, if there is one."""
    if to := os.environ.pop(TELL_TO, ""):
        with open(int(to), "w", encoding="utf-8") as file:
            json.dump([told.folder, told.device, list(told.options)], file)


def why() -> str:
    """Why this process was begun again; empty where it was not."""
    return os.environ.pop(WHY, "")


def system_kills() -> int:
    """Processes that the kernel has killed for want of memory, of this one's control group where that is counted, else of the
    machine; 0 where it does not say."""
    for path in (*_groups(), Path("/proc/vmstat")):
        with suppress(OSError, ValueError, IndexError):
            words = [line.split() for line in path.read_text().splitlines()]
            if found := [int(line[1]) for line in words if line[0] == "oom_kill"]:
                return found[0]
    return 0


def _groups() -> list[Path]:
    """Where the process's control group counts, version 2 and 1."""
    with suppress(OSError):
        of = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        top = Path("/sys/fs/cgroup")
        files = {
            "": top / of.get("", "/")[1:] / "memory.events",
            "memory": top / "memory" / of.get("memory", "/")[1:] / "memory.oom_control",
        }
        return [file for name, file in files.items() if name in of]
    return []


def keep(command: list[str], words: Sequence[str], kills: Callable[[], int] = system_kills) -> int:
    """Carry out ``command`` with ``words``, and with those that go on; the last one's exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one that is ignored never comes
    ended, told, saved, tries = _carried_out([*command, *words], {}, kills), None, "", 0
    while ended.by_system:
        told = ended.told or told
        if told is None:
            return _given_up(ended, "before it had a plan", "memory.budget=… plans for less")
        if ended.asked:
            return _given_up(
                ended, "while it was being stopped", f"finefit resume {told.folder} goes on from its last checkpoint"
            )
        before, saved = saved, newest(Path(told.folder))
        tries = tries + 1 if saved == before else 1
        if tries > MOST:
            return _given_up(ended, f"{tries} times without a checkpoint between", "something else takes the memory")
        ended = _again(command, told, kills)
    return ended.code


def _given_up(ended: Ended, when: str, hint: str) -> int:
    print(f"error: {KILLED}, {when}\nhint: {hint}", file=sys.stderr)
    return ended.code


def newest(run: Path) -> str:
    """The name of the newest checkpoint."""
    return max((path.name for path in (run / "checkpoints").glob("step-*")), default="")


def _again(command: list[str], told: Told, kills: Callable[[], int]) -> Ended:
    """With less where a plan fits that, else as it was: the memory may have been another's."""
    less = _less(Path(told.folder)) if told.device == "cpu" else []
    by = f" with {less[0]}" if less else ""
    print(f"{KILLED}; it goes on from its last checkpoint{by}", file=sys.stderr, flush=True)
    ended = _carried_out([*command, "resume", told.folder, *less, *told.options], {WHY: KILLED}, kills)
    if not less or ended.code != CANNOT or ended.told:
        return ended
    print("no leaner plan fits; it goes on with the plan it had", file=sys.stderr, flush=True)
    return _carried_out([*command, "resume", told.folder, *told.options], {WHY: KILLED}, kills)


def _less(run: Path) -> list[str]:
    """The word that asks for a leaner plan than the run's."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # `finefit resume` says what is wrong with it
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        needs = plan["predicted"]["peak_bytes"] + plan["predicted"]["reserved_bytes"]
        if mib := int(LESS * min(plan["budget_bytes"], needs)) >> 20:
            return [f"memory.budget={mib}MiB"]
    return []


def _carried_out(command: list[str], more: Mapping[str, str], kills: Callable[[], int]) -> Ended:
    """How a child of this command ended."""
    _fill_in_descriptors()
    ours, theirs = os.pipe()
    libc, parent, ended = ctypes.CDLL(None), os.getpid(), Ended()
    waited = signal.pthread_sigmask(signal.SIG_BLOCK, [*_FORWARDED, signal.SIGCHLD])
    pid = os.fork()
    if not pid:
        libc.prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before that
            os._exit(128 + signal.SIGKILL)
        _become(command, theirs, more, waited)
    os.close(theirs)
    try:
        ended.counts.append(kills())
        while not (done := os.waitpid(pid, os.WNOHANG))[0]:
            ended.asked |= _passed_on(pid)
            ended.counts.append(kills())
        with open(ours, encoding="utf-8") as file:
            said = file.read()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, waited)
    code = os.waitstatus_to_exitcode(done[1])
    ended.code, ended.told = code if code >= 0 else 128 - code, Told(*json.loads(said)) if said else None
    return ended


def _fill_in_descriptors() -> None:
    """A pipe must not take the place of a closed standard stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _become(command: list[str], tell_to: int, more: Mapping[str, str], signals: Iterable[int]) -> NoReturn:
    """The child takes signals as it would without a keeper."""
    os.set_inheritable(tell_to, True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    os.execve(command[0], command, {**os.environ, **more, TELL_TO: str(tell_to)})


def _passed_on(pid: int) -> bool:
    """Wait a second for a signal; whether it asks for a stop. What a terminal sends its foreground processes the child has,
    too; what somebody sends it may not have."""
    came: Any = signal.sigtimedwait([*_FORWARDED, signal.SIGCHLD], 1.0)
    if came is None or came.si_signo == signal.SIGCHLD:
        return False
    if came.si_code <= 0:
        with suppress(ProcessLookupError):
            os.kill(pid, came.si_signo)
    return bool(came.si_signo != signal.SIGUSR2)


if __name__ == "__main__":
    sys.exit(keep([sys.executable, "-P", "-m", "finefit"], sys.argv[1:]))
