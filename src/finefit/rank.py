"""One rank of a run on several devices: joins the others, and carries out with them what the run's folder says.

    python -m finefit.rank FOLDER [--resumed] [--log-format F] [--memory-limit N]

``engines.local`` begins it, or torch's launcher through ``finefit train``. Only the first rank writes the run's log and its
checkpoints' manifests, and shows them; each of the others has a log of its own in ``ranks``. What memory ran out on any
rank at the last time the first one learns from before all begin: one plan for all.
"""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from . import session
from .engines import local, world
from .engines.local import Options
from .errors import ConfigError, EngineError, FinefitError
from .events import EventLog
from .files import write_atomically
from .layout import Micro
from .meshes import mesh_of
from .recover import RanOut, carry_out, replanned
from .session import Job
from .shortage import Shortage
from .supervise import Lesson
from .trainer import last_step
from .units import parse_bytes

# What gloo and NCCL say where another rank does not answer, or has gone away.
_LOST = (
    "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Socket Timeout", "Connection refused",
    "Read error", "Write error", "Broken pipe", "wait timeout", "NCCL communicator was aborted", "remote process exited",
    "Watchdog caught collective operation timeout", "ncclRemoteError", "Connect timeout", "failed to recv",
    "Application timeout caused pair closure", "The client socket has timed out",
)  # fmt: skip


LESSON = "lesson.json"  # of all shortages of the run so far


def run_rank(begun: Callable[[], Job], how: Options) -> int:
    """The exit code of this rank. ``begun`` makes the run, or goes on with it, on the first one."""
    _tell_where_it_stands()
    kind = "cuda" if os.environ.get(local.DEVICE, "") == "cuda" else "cpu"
    world.begin(kind)
    try:
        job, resumed = _joined(begun)
        mesh = mesh_of(job.plan.techniques)
        if mesh.devices != dist.get_world_size():
            hint = f"start as many: torchrun --nproc-per-node {mesh.devices} -m finefit resume {job.folder}"
            raise ConfigError(
                f"the plan is for {mesh.devices} devices, {dist.get_world_size()} were started", hint=hint
            )
        job = replace(job, world=world.World(mesh, kind))
        status = _carried_out(job, how, resumed)
    except RanOut as short:
        _ran_out(job, short.met)
    except (RuntimeError, EngineError) as error:
        if not any(sentence in str(error) for sentence in _LOST):
            raise
        where = "".join(getattr(error, "__notes__", ()))
        _leave(f"rank {dist.get_rank()} lost the others{where} ({_said(error)})", local.LOST)
    _end_together()
    if status != "stopped":
        return 0
    if job.world.is_first:
        print(f"stopped, saved after step {last_step(job)}; finefit resume {job.folder} goes on", file=sys.stderr)
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else local.STOPPED  # torch's launcher would begin again


def _said(error: BaseException) -> str:
    """The library's sentence without its source file, and without its advice."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]


def _joined(begun: Callable[[], Job]) -> tuple[Job, bool]:
    """The job, and whether it was begun before: the first rank begins, the others go on with what it has written."""
    job, told = None, ("", False)
    if dist.get_rank() == 0:
        try:
            job = begun()
            told = str(job.folder), (job.folder / "events.jsonl").exists()
            job = _replanned(job)
        finally:
            dist.broadcast_object_list([told if job else ("", False)])
    else:
        said: list[Any] = [None]
        dist.broadcast_object_list(said)
        told = said[0]
    if not told[0]:
        _leave("the first rank could not begin", local.LOST)
    return job or session.again(Path(told[0]), holds=False), told[1]


def _replanned(job: Job) -> Job:
    """Less memory for all, where it ran out on any rank the last time; where on several, by the one that needed most."""
    folder = job.folder / local.LOGS
    paths = sorted(folder.glob(f"{local.SHORTAGE}*.json"))
    if not paths:
        return job
    met = max((_shortage(path) for path in paths), key=lambda one: one.held_bytes + one.asked_bytes)
    with EventLog(job.folder / "events.jsonl") as log:
        job, lesson = replanned(job, log, met, _lesson(folder))
    write_atomically(folder / LESSON, json.dumps(asdict(lesson)).encode())
    for path in paths:
        path.unlink()
    return job


def _shortage(path: Path) -> Shortage:
    said = json.loads(path.read_text())
    micro = said.pop("micro", None)
    return Shortage(**said, micro=Micro(**micro) if micro else None)


def _lesson(folder: Path) -> Lesson:
    """Of all times before."""
    path = folder / LESSON
    return Lesson(**json.loads(path.read_text())) if path.is_file() else Lesson()


def _carried_out(job: Job, how: Options, resumed: bool) -> str:
    from .terminal.live import reporter

    limit = None if how.memory_limit is None else parse_bytes(how.memory_limit)
    is_first = job.world.is_first
    path = job.folder / ("events.jsonl" if is_first else f"{local.LOGS}/rank-{job.world.rank}.jsonl")
    shown: Any = reporter(how.log_format) if is_first else nullcontext()  # type: ignore[arg-type]
    with shown as show, EventLog(path, [show] if show else []) as log:
        return carry_out(job, log, resumed, limit)


def _ran_out(job: Job, met: Shortage) -> NoReturn:
    """Write down what the others cannot know, and leave: they are in the middle of a step and cannot be told."""
    path = job.folder / local.LOGS / f"{local.SHORTAGE}{job.world.rank}.json"
    write_atomically(path, json.dumps(asdict(met)).encode())
    _leave(f"memory ran out ({met.message})", local.SHORT)


def _end_together() -> None:
    dist.barrier()
    world.end()


def _leave(why: str, code: int) -> NoReturn:
    """Without a word to the others, who may be gone: destructors of the group would wait for them."""
    print(why, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _tell_where_it_stands() -> None:
    if local.WHERE is not None:
        log = sys.stderr if os.environ.get("RANK") != "0" else None
        if log is not None:
            faulthandler.register(local.WHERE, file=log, all_threads=False)
        else:
            signal.signal(local.WHERE, signal.SIG_IGN)


def main() -> None:
    """The command's words are those of ``engines.local``: no user writes them."""
    folder, *words = sys.argv[1:]
    options = dict(zip(words[1::2], words[2::2], strict=True))
    how = Options(options["--log-format"], options.get("--memory-limit"), adapt=False)
    try:
        code = run_rank(lambda: session.again(Path(folder), is_new=words[0] != "--resumed"), how)
    except FinefitError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the group's threads are of no more use


if __name__ == "__main__":
    main()
