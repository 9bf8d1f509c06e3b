"""A foreign run file on the table: its values with their places, which of them were read, and what cannot be read.

Keys of sections are written ``section.key``. What a reader never asks for ends in ``ignored`` by its name, so nothing
is dropped unseen; what it refuses is collected, so that one error lists everything at once.
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...foreign import ForeignRun
from ..nodes import Problem, as_one_error
from .tree import Twice, take_in
from .values import MOST, Values

NAMES = {
    "llamafactory": "LLaMA-Factory", "axolotl": "Axolotl", "trl": "TRL", "torchtune": "torchtune", "swift": "ms-swift",
    "unsloth": "Unsloth", "accelerate": "accelerate",
}  # fmt: skip
#: An unknown key this close to a known one is a slip of the pen, not a key of another version.
_SLIP = 0.88
#: Example files stand this deep in the tools' own repositories, whose top is where they are started.
_LEVELS = 5
_MOST_TOKENS = 2**28  # of one micro-batch
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
class Sheet(Values):
    """One file: what it says, what of it was read, and what is said about it."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wish: dict[str, object] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    twice: list[Twice] = field(default_factory=list)

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
        if run.max_length > MOST["max_length"] or run.micro_batch_size * run.max_length > _MOST_TOKENS:
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


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for one
        return False
