"""A foreign run file on the table: its values with their places, which of them were read, and what cannot be read.

Keys of sections are written ``section.key``. What a reader never asks for ends in ``ignored`` by its name, so nothing
is dropped unseen; what it refuses is collected, so that one error lists everything at once.
"""

import difflib
import json
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from ...errors import ConfigError
from ...foreign import ForeignRun
from ..nodes import Problem, as_one_error
from .tree import Twice, take_in

NAMES = {
    "llamafactory": "LLaMA-Factory", "axolotl": "Axolotl", "trl": "TRL", "torchtune": "torchtune", "swift": "ms-swift",
    "unsloth": "Unsloth", "accelerate": "accelerate",
}  # fmt: skip
#: An unknown key this close to a known one is a slip of the pen, not a key of another version.
_SLIP = 0.88
#: Example files stand this deep in the tools' own repositories, whose top is where they are started.
_LEVELS = 5
#: Beyond these a size is a slip of the hand. Up to them no tensor of a step has more elements than torch can count.
_MOST = {"micro_batch_size": 2**14, "accumulation": 10**6, "max_length": 2**24, "rank": 2**16}
_MOST_TOKENS = 2**28  # of one micro-batch
_MOST_WHOLE = 10**9
LAST_SEED = 2**32 - 1  # numpy's
_DATA_ENDINGS = (".jsonl", ".json", ".csv", ".txt")


@dataclass(frozen=True)
class Foreign:
    """What a foreign run file says, twice: as it would run there, and as we would write the same wish."""

    tool: str
    run: ForeignRun
    wish: tuple[tuple[str, object], ...]
    """Keys of our run file (``lora.rank``) with their values, the tool's defaults among them."""
    ignored: tuple[str, ...]
    """Keys without effect on memory, and keys whose meaning our run file has no counterpart for."""
    told: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Field of ``run`` -> the key that tells it and the place of its value, where a model's config decides whether it is
    right."""


@dataclass
class Sheet:
    """One file. ``values`` is the file as plain data; a value of null counts as not there, as it does in every tool."""

    tool: str
    path: Path
    values: dict[str, Any]
    places: dict[str, tuple[str, str]]
    """Key -> place of the key, place of its value."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wish: dict[str, object] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    twice: list[Twice] = field(default_factory=list)
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
        return self.whole(key, default, most=_MOST[what])

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

    def refuse(self, key: str, reason: str, hint: str = "") -> None:
        """Something that neither a simulation nor a run of ours can express; told with all others by ``check``."""
        self.problems.append(Problem(self.where(key), f"'{key}': {reason}", hint))

    def refuse_set(self, reasons: Mapping[str, str]) -> None:
        """Refuse each of these keys that is there and not false, 0 or empty."""
        for key, reason in reasons.items():
            if self.get(key):
                self.refuse(key, reason)

    def check(self, known: Collection[str] = ()) -> None:
        """ConfigError with all that was refused, and keys that are slips of known ones."""
        if known:
            self._slips(known)
        if self.problems:
            raise as_one_error(self.problems)

    def tell_twice(self, refused: bool) -> None:
        """Keys that stand twice, as the tool's own parser has it: an error there, or the last one counts."""
        for one in self.twice:
            if refused:
                self.problems.append(Problem(one.second, f"key '{one.key}' stands here twice", f"first at {one.first}"))
            else:
                self.note(f"'{one.key}' stands twice, at {one.first} and {one.second}: the last one counts there")

    def where(self, key: str, value: bool = False) -> str:
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places[key][1 if value else 0] if key else str(self.path)

    def tells(self, what: str, key: str) -> None:
        """The run's field ``what`` comes from this key, if it is there."""
        if self.has(key):
            self.told[what] = (key, self.where(key, value=True))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def wants(self, key: str, value: object) -> None:
        """One of our keys that says the same; None says nothing."""
        if value is not None:
            self.wish[key] = value

    def loses(self, *keys: str) -> None:
        """Keys that change what is trained and that our run file has no counterpart for, where they are switched on."""
        self.lost += [key for key in keys if self.get(key)]

    def result(self, run: ForeignRun) -> Foreign:
        ignored = dict.fromkeys([*self._unread(), *self.lost])
        self._inner_slips(ignored)
        self.check()
        if run.max_length > _MOST["max_length"] or run.micro_batch_size * run.max_length > _MOST_TOKENS:
            key, where = self.told.get("max_length", self.told.get("micro_batch_size", ("max_length", str(self.path))))
            raise ConfigError(
                f"'{key}': {run.micro_batch_size:,} rows of {run.max_length:,} tokens are more than a step can have",
                where=where, hint=f"a micro-batch of at most {_MOST_TOKENS:,} tokens can be simulated",
            )  # fmt: skip
        told = replace(run, notes=tuple(self.notes))
        return Foreign(self.tool, told, tuple(self.wish.items()), tuple(ignored), self.told)

    def data_file(self, name: str) -> str | None:
        """A training file that finefit's readers open, looked for from the file's folder upwards; None if not there."""
        if not name or Path(name.removesuffix(".gz")).suffix.lower() not in _DATA_ENDINGS:
            return None
        found = self.find(name)
        return str(found) if found else None

    def find(self, name: str, *folders: str) -> Path | None:
        """A file named relative to where the tool is started: the working folder, or one of a few above this file."""
        above = self.path.resolve().parents[:_LEVELS]
        tries = [Path(name), *(up / name for up in above), *(up / f / Path(name).name for f in folders for up in above)]
        return next((one for one in tries if _is_file(one)), None)

    def _slips(self, known: Collection[str]) -> None:
        for key, value in self.values.items():
            if key in known or value is None:
                continue
            near = difflib.get_close_matches(key, known, n=1, cutoff=_SLIP)
            if near and near[0] not in self.values:
                self.refuse(key, f"unknown to {NAMES[self.tool]}", f"did you mean '{near[0]}'?")
            elif key not in self.seen:
                self.note(f"'{key}' is no key of {NAMES[self.tool]} that is known here")

    def _inner_slips(self, unread: Collection[str]) -> None:
        """Keys of a section nobody asked for that are nearly one that was asked for and is not there."""
        for key in unread:
            section, dot, leaf = key.rpartition(".")
            asked = [one.removeprefix(f"{section}.") for one in self.seen if dot and one.startswith(f"{section}.")]
            missing = [one for one in asked if one != leaf and not self.has(f"{section}.{one}")]
            if near := difflib.get_close_matches(leaf, missing, n=1, cutoff=_SLIP):
                self.refuse(key, f"unknown to {NAMES[self.tool]}", f"did you mean '{section}.{near[0]}'?")

    def _unread(self) -> Iterator[str]:
        for key, value in self.values.items():
            if value is None or key in self.seen:
                continue
            inner = [one for one in self.seen if one.startswith(f"{key}.")]
            if isinstance(value, dict) and inner:
                yield from (f"{key}.{part}" for part in value if _is_unread(f"{key}.{part}", value[part], inner))
            else:
                yield key


def open_sheet(path: Path) -> Sheet:
    """Read a YAML file; the tool is not known yet."""
    values, tree = take_in(path)
    return Sheet("", path, values, tree.places, twice=tree.twice)


def resolved(sheet: Sheet) -> None:
    """Replace ``${section.key}`` by what stands there, as OmegaConf does; its resolvers (``oc.env``) are not run."""
    sheet.values = {key: _resolve(sheet, key, value, 0) for key, value in sheet.values.items()}


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def _resolve(sheet: Sheet, key: str, value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        return {name: _resolve(sheet, f"{key}.{name}", inner, depth) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(sheet, key, inner, depth) for inner in value]
    if not isinstance(value, str) or not (found := _REFERENCE.search(value)):
        return value
    if depth > 10:
        sheet.wrong(key, f"refers to itself: {value}")
    target = _looked_up(sheet, key, found[1])
    if found[0] == value:
        return _resolve(sheet, key, target, depth + 1)
    return _resolve(sheet, key, value.replace(found[0], str(target)), depth + 1)


def _looked_up(sheet: Sheet, key: str, name: str) -> Any:
    found: Any = sheet.values
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            sheet.wrong(key, f"refers to '{name}', which is not in this file")
        found = found[part]
    return found


def _is_unread(key: str, value: Any, seen: list[str]) -> bool:
    return value is not None and not any(one == key or one.startswith(f"{key}.") for one in seen)


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


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for one
        return False


def _shown(value: Any) -> str:
    return reprlib.repr(value)
