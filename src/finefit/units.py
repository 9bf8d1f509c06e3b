"""Text of bytes, seconds and budgets. Bytes are integers everywhere else; GiB exists only in text."""

import re
from dataclasses import dataclass

from .errors import ConfigError, nearest

_FACTOR = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*$")
#: No device has more; a larger number is a slip of the hand, and one with 400 digits is no float at all.
MOST_BYTES = 2**60
_HINT = "say 8GiB, 24GB, 80%, -1GiB (leave that much) or 6GiB..8GiB"


def parse_bytes(text: str) -> int:
    """Bytes of ``8GiB`` (2^30), ``24GB`` (10^9), ``512MiB``, ``8G`` (2^30) or a plain number."""
    match = _NUMBER.match(text)
    if not match or match[2].lower() not in _FACTOR:
        raise ConfigError(f"'{text}' is not an amount of memory", hint=unit_meant(text) or _HINT)
    n_bytes = float(match[1]) * _FACTOR[match[2].lower()]
    if n_bytes > MOST_BYTES:
        raise ConfigError(f"'{text}' is more memory than any device has", hint=_HINT)
    return int(n_bytes)


def unit_meant(text: str) -> str:
    """A hint for an amount whose unit is misspelt (``24GBB``), or an empty string; a unit of bytes has a b in it."""
    match = _NUMBER.match(text)
    unit = match[2].lower() if match else ""
    if match is None or unit in _FACTOR or "b" not in unit:
        return ""
    near = nearest(unit, [known for known in _FACTOR if len(known) > 1])
    return f"did you mean '{match[1]}{near[:-1].upper().replace('I', 'i')}B'?" if near else ""


def format_bytes(n_bytes: float) -> str:
    """``1.91 GiB``; three significant digits, binary units."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.2f} GiB" if abs(size) < 100 else f"{size:.0f} GiB"


def format_seconds(seconds: float) -> str:
    """``850 ms``, ``12.3 s``, ``4 min 10 s``, ``3 h 05 min``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of a device a run may use. Plan for ``aim_bytes``; go up to ``limit_bytes`` only if nothing else fits."""

    aim_bytes: int
    limit_bytes: int
    text: str


def parse_budget(text: str, total_bytes: int) -> Budget:
    """Read a budget against a device of ``total_bytes``: ``8GiB``, ``24GB``, ``80%``, ``-1GiB``, ``6GiB..8GiB``."""
    low, dots, high = text.partition("..")
    aim = _amount(low, total_bytes)
    limit = _amount(high, total_bytes) if dots else aim
    for word, amount in ((low, aim), (high, limit)) if dots else ((low, aim),):
        if amount <= 0:
            raise ConfigError(_nothing(text, word.strip(), total_bytes), hint=_HINT)
    if limit < aim:
        raise ConfigError(f"the budget '{text}' ends below where it begins", hint=_HINT)
    return Budget(aim, limit, text)


def _nothing(text: str, word: str, total_bytes: int) -> str:
    """Why there is nothing to use; the device is only spoken of where the budget was measured against it."""
    if word.startswith("-"):
        return f"the budget '{text}' leaves nothing to use of {format_bytes(total_bytes)}"
    return f"the budget '{text}' is no memory at all"


def _amount(text: str, total_bytes: int) -> int:
    word = text.strip()
    if word.endswith("%"):
        share = _NUMBER.match(word[:-1])
        if not share or not 0 < float(share[1]) <= 100 or share[2]:
            raise ConfigError(f"'{text}' is not a share of memory", hint=_HINT)
        return int(total_bytes * float(share[1]) / 100)
    if word.startswith("-"):
        return total_bytes - parse_bytes(word[1:])
    return parse_bytes(word)
