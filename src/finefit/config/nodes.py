"""A YAML file as a tree of nodes, so that every complaint about it has ``file:line:column``; and the complaints.

Both our own run files and other tools' are read through here. Nothing is executed: only plain YAML types are made.
"""

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, did_you_mean

#: What yaml's constructors raise, without a place, for a scalar that only looks like a date, a number or a truth value.
BAD_SCALAR = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, where, and what to do about it."""

    where: str
    message: str
    hint: str = ""


@contextmanager
def mapping_of(path: Path, hint: str = "") -> Iterator[tuple[yaml.SafeLoader, yaml.MappingNode]]:
    """The loader and the root of a file of ``key: value`` lines. ConfigError for anything else, here or in the body."""
    loader = _loader(path, _text(path))
    try:
        root = _root(path, loader)
        if root is None:
            raise ConfigError("the file is empty", where=str(path), hint=hint)
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError("key: value lines are needed here", where=at(path, root), hint=hint)
        yield loader, root
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"this is not YAML: {error.problem or error.context}", where=where) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"this is not YAML: {error}", where=str(path)) from error
    except RecursionError as error:
        raise ConfigError("this is nested too deeply", where=str(path)) from error
    finally:
        loader.dispose()


def construct(path: Path, loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """The value of a node, and a place for yaml's plain ValueError at what looks like a date or a number and is none."""
    try:
        return loader.construct_object(node, deep=True)
    except BAD_SCALAR as error:
        shown = reprlib.repr(node.value) if isinstance(node, yaml.ScalarNode) else "something in here"
        kind = node.tag.rpartition(":")[2] if isinstance(node, yaml.ScalarNode) else "value"
        raise ConfigError(
            f"{shown} is not a valid {kind}", where=at(path, node), hint="put quotes around it if it is text"
        ) from error


def at(path: Path, node: yaml.Node) -> str:
    """``file:line:column`` of a node."""
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def as_one_error(problems: Sequence[Problem]) -> ConfigError:
    """One problem as it is; several in the order of the file, a line each."""
    if len(problems) == 1:
        return ConfigError(problems[0].message, where=problems[0].where, hint=problems[0].hint)
    ordered = sorted(problems, key=_position)
    lines = (f"{one.where}: {one.message}{f' ({one.hint})' if one.hint else ''}" for one in ordered)
    return ConfigError("\n".join([f"{len(problems)} problems", *lines]))


def _loader(path: Path, text: str) -> yaml.SafeLoader:
    """A loader of ``text``; YAML has no place for most control characters, and says so before it reads a line."""
    try:
        return yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        code = ord(text[error.position])
        raise ConfigError(
            f"this is not YAML: the character U+{code:04X} cannot stand here", where=f"{path}:{line}:{column}",
            hint="save the file as plain UTF-8 text",
        ) from error  # fmt: skip


def _root(path: Path, loader: yaml.SafeLoader) -> yaml.Node | None:
    try:
        return loader.get_single_node()
    except (ValueError, OverflowError) as error:  # an escape such as "\\U00110000", while the scanner stands at it
        mark = loader.get_mark()
        where = f"{path}:{mark.line + 1}:{mark.column + 1}"
        raise ConfigError(f"this is not YAML: {error}", where=where) from error


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        beside = sorted(file.name for file in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        hint = did_you_mean(path.name, beside) or (f"in that folder: {', '.join(beside[:5])}" if beside else "")
        raise ConfigError(f"there is no file '{path}'", hint=hint) from error
    except IsADirectoryError as error:
        inside = path / "config.yaml"
        hint = f"did you mean '{inside}'?" if inside.is_file() else "name the YAML file in it"
        raise ConfigError(f"'{path}' is a folder", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start} is not UTF-8 text", where=str(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", where=str(path)) from error


def _position(problem: Problem) -> tuple[int, int]:
    """Line and column; what has none (the command line, a missing key) comes last."""
    *_, line, column = ["", "", *problem.where.split(":")]
    return (int(line), int(column)) if line.isdigit() and column.isdigit() else (1 << 30, 0)
