"""Whether somebody asked a run to stop: by a signal, or by another rank's being asked."""

import signal
import time
from typing import Any

# Ctrl-C, a container's end, and what schedulers send before they take a node back (SLURM's --signal=USR1@60).
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

# What is sent to a group of processes comes to a run twice, once through its keeper.
_SAME_WISH_S = 0.3


class Stopping:
    """Whether somebody asked for a stop at the next step boundary; from ``begin`` on signals ask. A second SIGINT stops at
    once, as the first does before: nothing is lost then.
    """

    def __init__(self) -> None:
        self.asked, self.since = False, 0.0
        self.before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.asked

    def begin(self) -> None:
        if not self.before:
            self.before |= {which: signal.signal(which, self._ask) for which in STOPPING}

    def end(self) -> None:
        for which, handler in self.before.items():
            signal.signal(which, handler)
        self.before.clear()

    def _ask(self, number: int, _frame: Any) -> None:
        first, self.asked = not self.asked, True
        if first:
            self.since = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self.since > _SAME_WISH_S:
            signal.signal(signal.SIGINT, self.before[signal.SIGINT])
            signal.raise_signal(signal.SIGINT)
