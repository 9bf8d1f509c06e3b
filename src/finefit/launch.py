"""A run as the command line begins it: options checked first, then the terminal, the log, and the run to its end."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from . import keeper
from .engines.local import Options, is_rank
from .errors import ConfigError, did_you_mean
from .events import EventLog
from .meshes import mesh_of
from .plan import Plan
from .session import Job
from .supervise import changed

LOG_FORMATS = ("auto", "live", "plain", "json")


def launch(begun: Callable[[], Job], how: Options, resumed: bool) -> None:
    """Carry out the job that ``begun`` gives, once the options are known to be right; SystemExit(130) where it was stopped."""
    from .terminal.live import reporter
    from .units import parse_bytes

    limit = None if how.memory_limit is None else parse_bytes(how.memory_limit)
    if how.log_format not in LOG_FORMATS:
        raise ConfigError(f"--log-format {how.log_format} is unknown", hint=did_you_mean(how.log_format, LOG_FORMATS))
    if is_rank():
        from .rank import run_rank

        leave(run_rank(begun, how))
    job = begun()
    keeper.tell(keeper.Told(str(job.folder.resolve()), job.hardware.kind, how.words()))
    if (devices := mesh_of(job.plan.techniques).devices) > 1:
        leave(_on_devices(job, devices, how, resumed))
    if why := keeper.why():
        job = replace(job, said=(why, *job.said))
    with reporter(how.log_format) as show, EventLog(job.folder / "events.jsonl", [show]) as log:  # type: ignore[arg-type]
        from .adapt import nothing_better, within
        from .recover import carry_out
        from .trainer import last_step

        status = carry_out(job, log, resumed, limit, within(limit) if how.adapt else nothing_better)
    if status == "stopped":
        print(f"stopped, saved after step {last_step(job)}; finefit resume {job.folder} goes on", file=sys.stderr)
        raise SystemExit(130)
    print(f"done: {job.folder}  (finefit report {job.folder}, finefit chat {job.folder})", file=sys.stderr)


def _on_devices(job: Job, devices: int, how: Options, resumed: bool) -> int:
    """The exit code of a run on several of this machine's devices."""
    from .engines.local import DEVICE, carry_out

    if how.adapt:
        raise ConfigError("--adapt is for one device", hint="leave it out: the plan stays as it is")
    folder, threads = job.folder, 0
    if job.hardware.kind == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wished = job.config.hardware.threads
        threads = max(cores // devices, 1) if wished == "auto" else wished
    if job.before:
        _tell_other_plan(job, job.before)
    with job.held:  # the first rank takes it
        pass
    os.environ[DEVICE] = job.hardware.kind
    words = [word for word in how.words() if word != "--adapt"]
    code = carry_out(folder, devices, threads, lambda again: ["--resumed" if again else "--new", *words], resumed)
    if not code:
        print(f"done: {folder}  (finefit report {folder}, finefit chat {folder})", file=sys.stderr)
    return code


def _tell_other_plan(job: Job, before: Plan) -> None:
    """Ranks go on with what is in the folder, and rehearse it where the log says that it is new."""
    step = int(keeper.newest(job.folder).removeprefix("step-") or 0)
    with EventLog(job.folder / "events.jsonl") as log:
        log.write(
            "replan", step=step, plan=job.plan.to_json(), predicted=job.plan.predicted.to_json(),
            message=f"as asked: {changed(before, job.plan)}",
        )  # fmt: skip


def leave(code: int) -> NoReturn:
    raise SystemExit(code)
