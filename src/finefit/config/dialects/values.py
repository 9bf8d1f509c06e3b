"""The values of a foreign file, read by their keys: each of its kind, else an error at its place."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ...errors import ConfigError

#: Beyond these a size is a slip of the hand. Up to them no tensor of a step has more elements than torch can count.
MOST = {"micro_batch_size": 2**14, "accumulation": 10**6, "max_length": 2**24, "rank": 2**16}
_MOST_WHOLE = 10**9
LAST_SEED = 2**32 - 1  # numpy's


@dataclass
class Values:
    """One file as plain data; a value of null counts as not there, as it does in every tool."""

    tool: str
    path: Path
    values: dict[str, Any]
    places: dict[str, tuple[str, str]]
    """Key -> place of the key, place of its value."""
    seen: set[str] = field(default_factory=set)
    told: dict[str, tuple[str, str]] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is; reading it marks it as read."""
        self.seen.add(key)
        found: Any = self.values
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return default if found is None else found

    def has(self, key: str) -> bool:
        """Whether a value other than null is there, without counting as read."""
        was = key in self.seen
        found = self.get(key) is not None
        if not was:
            self.seen.discard(key)
        return found

    def whole(self, key: str, default: int, least: int = 1, most: int = _MOST_WHOLE) -> int:
        """A whole number of at least ``least``."""
        value = self.get(key, default)
        number = _number(value)
        if number is None or number != int(number) or number < least:
            self.wrong(key, f"must be a whole number of at least {least}, not {_shown(value)}")
        if number > most:
            self.wrong(key, f"must be at most {most:,}, not {_shown(value)}")
        return int(number)

    def size(self, what: str, key: str, default: int) -> int:
        """A whole number that the run's field ``what`` comes from."""
        self.tells(what, key)
        return self.whole(key, default, most=MOST[what])

    def share(self, key: str, default: float) -> float:
        """A number from 0 to 1."""
        number = self.number(key, default)
        if not 0 <= number <= 1:
            self.wrong(key, f"must be from 0 to 1, not {_shown(self.get(key))}")
        return number

    def sections(self, key: str) -> list[dict[str, Any]]:
        """A list of sections."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self.wrong(key, f"must be a list of sections, not {_shown(value)}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number; ``2e-5`` too, which YAML 1.1 takes for text."""
        value = self.get(key, default)
        number = _number(value)
        if number is None:
            self.wrong(key, f"must be a number, not {_shown(value)}")
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            self.wrong(key, f"must be true or false, not {_shown(value)}")
        return value

    def text(self, key: str, default: str = "") -> str:
        value = self.get(key, default)
        if isinstance(value, bool | dict | list):
            self.wrong(key, f"must be text, not {_shown(value)}")
        return str(value)

    def model(self, key: str) -> str:
        """The model's name as it is written."""
        name = self.text(key).strip()
        return name or self.wrong(key, "names no model")

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names, also written as one text with commas."""
        value = self.get(key, [])
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            self.wrong(key, f"must be a list of names, not {_shown(value)}")
        return tuple(item.strip() for item in items if item.strip())

    def section(self, key: str) -> dict[str, Any]:
        """A mapping read as a whole, or an empty one; transformers takes it as JSON text too."""
        value = self.get(key, {})
        if isinstance(value, str):
            value = _json_or_none(value)
        if not isinstance(value, dict):
            self.wrong(key, f"must be a section of keys, not {_shown(value)}")
        return value

    def choice(self, key: str, default: str, meanings: Mapping[str, Any]) -> Any:
        """What a word of a closed list stands for."""
        word = self.text(key, default).lower()
        if word not in meanings:
            self.wrong(key, f"must be one of {', '.join(meanings)}, not {_shown(word)}")
        return meanings[word]

    def wrong(self, key: str, message: str) -> NoReturn:
        """A value no reader could use: stop here."""
        raise ConfigError(f"'{key}' {message}", where=self.where(key, value=True))

    def where(self, key: str, value: bool = False) -> str:
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places[key][1 if value else 0] if key else str(self.path)

    def tells(self, what: str, key: str) -> None:
        """The run's field ``what`` comes from this key, if it is there."""
        if self.has(key):
            self.told[what] = (key, self.where(key, value=True))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < 1e30 else None


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _shown(value: Any) -> str:
    return reprlib.repr(value)
