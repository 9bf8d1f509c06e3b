"""A run as the command line begins it: options checked first, then the terminal, the log, and the run to its end."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from . import keeper
from .errors import ConfigError, did_you_mean
from .session import Job

LOG_FORMATS = ("auto", "live", "plain", "json")


@dataclass(frozen=True, slots=True)
class Options:
    """As they were given."""

    log_format: str
    memory_limit: str | None
    adapt: bool

    def words(self) -> list[str]:
        limit = [] if self.memory_limit is None else ["--memory-limit", self.memory_limit]
        return ["--log-format", self.log_format, *limit, *(["--adapt"] if self.adapt else [])]


def launch(begun: Callable[[], Job], how: Options, resumed: bool) -> None:
    """Carry out the job that ``begun`` gives, once the options are known to be right; SystemExit(130) where it was stopped."""
    from .events import EventLog
    from .terminal.live import reporter
    from .units import parse_bytes

    limit = None if how.memory_limit is None else parse_bytes(how.memory_limit)
    if how.log_format not in LOG_FORMATS:
        raise ConfigError(f"--log-format {how.log_format} is unknown", hint=did_you_mean(how.log_format, LOG_FORMATS))
    job = begun()
    keeper.tell(keeper.Told(str(job.folder.resolve()), job.hardware.kind, how.words()))
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
