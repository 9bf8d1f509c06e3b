"""The exception tree. Every one of these is the user's to act on: one message, one hint, exit code 2.

FinefitError
├── ConfigError      a key, a value or a file name that cannot be used
├── DataError        a training file whose content cannot be used
├── ModelError       a model folder that is missing, incomplete or of an unknown architecture
├── DoesNotFit       no plan fits; the message argues
├── OutOfMemory      the device ran out while training
├── Diverged         a loss or a gradient that is not a finite number
├── CheckpointError  saved state that is missing or damaged, or a disk that would not take it
└── EngineError      a needed package or device is not there

Our own mistakes are plain exceptions and keep their traceback.
"""

import difflib
from collections.abc import Iterable


class FinefitError(Exception):
    """What went wrong, where (``file:line:column``) and what to do about it."""

    exit_code = 2

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        self.message, self.where, self.hint = message, where, hint
        super().__init__(message)

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        return f"{head}\nhint: {self.hint}" if self.hint else head


class ConfigError(FinefitError):
    pass


class DataError(FinefitError):
    pass


class ModelError(FinefitError):
    pass


class DoesNotFit(FinefitError):
    pass


class OutOfMemory(FinefitError):
    pass


class Diverged(FinefitError):
    pass


class CheckpointError(FinefitError):
    pass


class EngineError(FinefitError):
    pass


def nearest(word: str, known: Iterable[str]) -> str:
    """The known spelling closest to ``word``, or an empty string. Case and ``-``/``_``/space are ignored."""
    plain = {_plain(name): name for name in known}
    found = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.6)
    return plain[found[0]] if found else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint ``did you mean 'x'?``, or an empty string when nothing is near."""
    close = nearest(word, known)
    return f"did you mean '{close}'?" if close else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "").replace(" ", "")
