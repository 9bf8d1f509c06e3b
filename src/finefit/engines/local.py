"""The ranks of one machine: begun, watched and ended together. Torch-free, as it does nothing but wait.

Each rank is a process with torch's variables in its environment (RANK, WORLD_SIZE, MASTER_ADDR ...). What the first one
says goes to the terminal, what the others say to ``ranks/rank-N.log`` of the run's folder. As soon as one ends badly the
others are asked where they stand, then ended, and the first to have died is named with its last words: a rank that lost
the others says so by its exit code and is not to blame. Two ends are no failures: all memory of a rank was used up, which
the run has written down, so all begin again by a leaner plan; and the system killed one for the same reason.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import keeper
from ..files import write_atomically

SHORT, LOST, STOPPED = 75, 76, 130
"""Exit codes of a rank whose memory ran out, of one that others did not answer, of one that was asked to stop."""
MOST = keeper.MOST  # times that all begin again without a checkpoint between
LOGS = "ranks"  # of the run's folder
DEVICE = "FINEFIT_DEVICE"  # in a rank's environment: the kind of its device
SHORTAGE = "shortage-"  # begins the name of a file there that says how much memory a rank had when it ran out
WHERE = signal.SIGUSR2 if hasattr(signal, "SIGUSR2") else None
"""Makes a rank write to its log where it stands."""
_GRACE_S, _POLL_S, _TELLS_S = 3.0, 0.1, 0.5
_LAST_WORDS = 8  # lines
_DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True, slots=True)
class Options:
    """Of a run's command, as they were given."""

    log_format: str
    memory_limit: str | None
    adapt: bool

    def words(self) -> list[str]:
        limit = [] if self.memory_limit is None else ["--memory-limit", self.memory_limit]
        return ["--log-format", self.log_format, *limit, *(["--adapt"] if self.adapt else [])]


@dataclass(frozen=True, slots=True)
class Failure:
    """Of the rank that ended first: its exit code, negative by a signal."""

    rank: int
    code: int
    by_system: bool = False

    def says(self) -> str:
        if self.code == LOST:
            return f"rank {self.rank} did not answer the others any more"
        if self.by_system:
            return f"rank {self.rank} was killed by the system for want of memory"
        if self.code < 0:
            return f"rank {self.rank} was killed ({signal.Signals(-self.code).name})"
        return f"rank {self.rank} ended with code {self.code}"


def is_rank() -> bool:
    """Whether this process was begun as one of several, by torch's launcher or by this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def log_of(folder: Path, rank: int) -> Path:
    return folder / LOGS / f"rank-{rank}.log"


def carry_out(folder: Path, size: int, threads: int, words: Callable[[bool], Sequence[str]], resumed: bool) -> int:
    """Run ``size`` ranks of the run in ``folder`` to its end; the exit code. ``words`` of a rank's command, by whether the
    run was begun before. ``threads`` are those of each; 0 leaves them as they are.
    """
    newest, tries = "", 0
    while True:
        failure = _together(folder, size, threads, words(resumed))
        if failure is None:
            return 0
        if failure.code == STOPPED or (failure.code, failure.rank) == (keeper.CANNOT, 0):  # it has said so itself
            return failure.code
        if not (failure.code == SHORT or failure.by_system):
            return _told(folder, failure)
        saved = keeper.newest(folder)
        newest, tries = saved, tries + 1 if saved == newest else 1
        if tries > MOST:
            return _told(folder, failure)
        if failure.by_system:
            _note_kill(folder, failure)
        print(f"{failure.says() if failure.by_system else 'memory ran out'}; all ranks go on together by a leaner plan",
              file=sys.stderr, flush=True)  # fmt: skip
        resumed = True


def _note_kill(folder: Path, failure: Failure) -> None:
    """As a rank would have, had it been asked; nobody knows how much it had."""
    said = {"moment": "", "message": failure.says()}
    write_atomically(folder / LOGS / f"{SHORTAGE}{failure.rank}.json", json.dumps(said).encode())


def _told(folder: Path, failure: Failure) -> int:
    log = log_of(folder, failure.rank)
    said = _last_words(log) if failure.rank else []
    words = "".join(f"\n  {line}" for line in said) or "\n  (nothing in its log)" * bool(failure.rank)
    where = f"\n{log}:{words}" if failure.rank else ""
    print(f"error: {failure.says()}, so all ranks were ended{where}\nhint: finefit resume {folder} goes on from the last "
          f"checkpoint; where the others stood is in {folder / LOGS}", file=sys.stderr, flush=True)  # fmt: skip
    return failure.code if failure.code > 0 else 128 - failure.code


def _last_words(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    before, _, _ = text.partition("\nCurrent thread")  # where it stood is no word of it
    return [line for line in before.splitlines() if line.strip()][-_LAST_WORDS:]


def _together(folder: Path, size: int, threads: int, words: Sequence[str]) -> Failure | None:
    """The first failure; None where all ended well."""
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    kills = keeper.system_kills()
    port = _free_port()
    ranks = [_begun(folder, rank, size, _environment(folder, rank, size, port, threads), words) for rank in range(size)]
    asked = _Forwarding(ranks)
    try:
        failure = _first_failure(ranks)
    finally:
        asked.end()
        _end(ranks)
    if failure and failure.code == -signal.SIGKILL and keeper.system_kills() > kills:
        return Failure(failure.rank, failure.code, by_system=True)
    return failure


def _first_failure(ranks: list[subprocess.Popen[bytes]]) -> Failure | None:
    """Wait for all; of those that ended badly when the first was seen, the one to blame."""
    while True:
        ended = {rank: process.poll() for rank, process in enumerate(ranks)}
        bad = {rank: code for rank, code in ended.items() if code}
        stopped = set(bad.values()) == {STOPPED}  # by a wish they agreed on: each has something to say yet
        if bad and not (stopped and None in ended.values()):
            if all(code == LOST for code in bad.values()):  # whom it lost is about to be seen
                time.sleep(_TELLS_S)
                bad |= {rank: code for rank, p in enumerate(ranks) if (code := p.poll())}
            hung = [rank for rank, process in enumerate(ranks) if process.poll() is None]
            if hung and all(code == LOST for code in bad.values()):
                return Failure(hung[0], LOST)
            return _blamed(bad)
        if all(code == 0 for code in ended.values()):
            return None
        time.sleep(_POLL_S)


def _blamed(bad: Mapping[int, int]) -> Failure:
    """A signal before an exit code, and one that lost others last."""
    rank = min(bad, key=lambda rank: (bad[rank] == LOST, bad[rank] not in (SHORT,) and bad[rank] > 0, rank))
    return Failure(rank, bad[rank])


def _begun(
    folder: Path, rank: int, size: int, environment: Mapping[str, str], words: Sequence[str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "finefit.rank", str(folder), *words]
    parent = os.getpid()

    def dies_with_parent() -> None:
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    before = dies_with_parent if sys.platform == "linux" else None
    if rank == 0:
        return subprocess.Popen(command, env=environment, preexec_fn=before)
    with log_of(folder, rank).open("wb") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=before
        )


def _environment(folder: Path, rank: int, size: int, port: int, threads: int) -> dict[str, str]:
    found = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if found.get(DEVICE) == "cuda":  # NCCL's flight recorder, whose file says which collective each rank was at
        found |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
        found |= {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder.resolve() / LOGS / "nccl-rank-")}
    if sys.platform == "linux":
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")  # or the host's name is looked up, which a container may not know
    if threads:
        found |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Forwarding:
    """What this process is asked its ranks are asked, too. What a terminal sends they have themselves."""

    def __init__(self, ranks: list[subprocess.Popen[bytes]]) -> None:
        self.ranks = ranks
        names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
        self.before = {number: signal.signal(number, self._pass_on) for number in (getattr(signal, n) for n in names)}

    def _pass_on(self, number: int, _frame: object) -> None:
        for process in self.ranks:
            if process.poll() is None and not (number == signal.SIGINT and sys.stdin.isatty()):
                process.send_signal(number)

    def end(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Those that still run write down where they stand, may end by themselves for a moment, and are killed."""
    left = [process for process in ranks if process.poll() is None]
    for number in (WHERE, signal.SIGTERM) if left else ():
        for process in left:
            if number is not None and process.poll() is None:
                process.send_signal(number)
        time.sleep(_TELLS_S)
    until = time.monotonic() + _GRACE_S
    while any(process.poll() is None for process in left) and time.monotonic() < until:
        time.sleep(_POLL_S)
    for process in left:
        if process.poll() is None:
            process.kill()
        process.wait()
