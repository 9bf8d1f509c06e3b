"""A run file, overrides and defaults become one `Config`, or one `ConfigError` that lists everything wrong at once.

Precedence: defaults < file < positional arguments < ``section.key=value`` overrides. The file is read as a tree of YAML
nodes, so every complaint has ``file:line:column``. It declines includes, interpolation and several documents in a file.
"""

import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..errors import did_you_mean, nearest
from .nodes import BAD_SCALAR, Problem, as_one_error, at, construct, mapping_of
from .schema import FOREIGN, FOREIGN_NOTES, SECTIONS, Config

_COMMAND_LINE = "command line"
_KEYS = tuple(f"{section}.{key}" if section else key for section, keys in SECTIONS.items() for key in keys)
_EXAMPLE = "start with two lines, model: <folder or name> and data: <file or name>"


@dataclass(frozen=True, slots=True)
class _Given:
    """One value somebody gave, and where."""

    value: Any
    where: str


def names_in(words: Iterable[str]) -> list[str]:
    """Words of a command line that name something (a model, a file) rather than set a key."""
    return [word for word in words if "=" not in word or os.path.exists(word)]


def load(path: Path | None, overrides: Sequence[str] = (), positional: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a run. ``positional`` maps keys to what stood on the command line; None means not given."""
    problems: list[Problem] = []
    given: dict[str, _Given] = {}
    if path is not None:
        given.update(_from_file(Path(path), problems))
    for key, value in (positional or {}).items():
        if value in _KEYS and not os.path.exists(value):  # where a model or data is named
            problems.append(Problem(_COMMAND_LINE, f"'{value}' has no value", f"say {value}=VALUE"))
        elif value is not None:
            _take(key, _Given(value, _COMMAND_LINE), given, problems)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            problems.append(Problem(_COMMAND_LINE, f"'{text}' is not key=value", "as in lora.rank=32"))
        else:
            _take(key.strip(), _Given(_scalar(value), _COMMAND_LINE), given, problems)
    config = _validate(given, str(path) if path is not None else _COMMAND_LINE, problems)
    if config is None:
        raise as_one_error(problems)
    return config


def dump(config: Config) -> str:
    """The resolved configuration as YAML; `load` of it gives the same configuration."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def json_schema() -> dict[str, Any]:
    """JSON Schema of a run file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def _from_file(path: Path, problems: list[Problem]) -> dict[str, _Given]:
    with mapping_of(path, _EXAMPLE) as (loader, root):
        return dict(_walk(path, loader, root, problems))


def _walk(
    path: Path, loader: yaml.SafeLoader, root: yaml.MappingNode, problems: list[Problem]
) -> Iterator[tuple[str, _Given]]:
    """Every known key of the file with its value; what is not known goes to ``problems``."""
    for key_node, value_node in _pairs(path, loader, root, "", problems):
        key = str(construct(path, loader, key_node))
        if key in SECTIONS and key:
            if isinstance(value_node, yaml.MappingNode):
                yield from _walk_section(path, loader, key, value_node, problems)
            elif construct(path, loader, value_node) is not None:
                problems.append(_section_problem(key, at(path, value_node)))
        elif key in SECTIONS[""]:
            yield key, _Given(construct(path, loader, value_node), at(path, value_node))
        else:
            problems.append(_unknown(key, at(path, key_node)))


def _walk_section(
    path: Path, loader: yaml.SafeLoader, section: str, node: yaml.MappingNode, problems: list[Problem]
) -> Iterator[tuple[str, _Given]]:
    for key_node, value_node in _pairs(path, loader, node, section, problems):
        key = f"{section}.{construct(path, loader, key_node)}"
        if key in _KEYS:
            yield key, _Given(construct(path, loader, value_node), at(path, value_node))
        else:
            problems.append(_unknown(key, at(path, key_node)))


def _pairs(
    path: Path, loader: yaml.SafeLoader, node: yaml.MappingNode, section: str, problems: list[Problem]
) -> list[tuple[yaml.Node, yaml.Node]]:
    """Key and value nodes, after noting keys that stand twice and applying YAML's own ``<<``."""
    first: dict[str, str] = {}
    for key_node, _ in node.value:
        name = str(key_node.value)
        if name in first:
            full = f"{section}.{name}" if section else name
            problems.append(Problem(at(path, key_node), f"key '{full}' stands here twice", f"first at {first[name]}"))
        elif isinstance(key_node, yaml.ScalarNode):
            first[name] = at(path, key_node)
    loader.flatten_mapping(node)
    return list(node.value)


def _take(key: str, given: _Given, all_given: dict[str, _Given], problems: list[Problem]) -> None:
    """One command-line value: a key, or a whole section as a mapping."""
    if key in SECTIONS and isinstance(given.value, dict):
        for inner, value in given.value.items():
            _take(f"{key}.{inner}", _Given(value, given.where), all_given, problems)
    elif key in SECTIONS:
        problems.append(_section_problem(key, given.where))
    elif key in _KEYS:
        all_given[key] = given
    else:
        problems.append(_unknown(key, given.where))


def _validate(given: Mapping[str, _Given], file: str, problems: list[Problem]) -> Config | None:
    if garbled := {key: one.where for key, one in given.items() if not _is_text(one.value)}:
        problems += [Problem(where, f"'{key}' must be {_text_of(where)}") for key, where in garbled.items()]
        return None
    nested: dict[str, Any] = {}
    for key, one in given.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = one.value
    try:
        config = Config.model_validate(nested)
    except ValidationError as error:
        problems += _wrong_values(error.errors(), given, file)
        return None
    return None if problems else config


def _text_of(where: str) -> str:
    if where == _COMMAND_LINE:
        return "text in the terminal's own encoding (LANG=C.UTF-8 reads any)"
    return "text: it has halves of characters"


def _is_text(value: object) -> bool:
    """Whether every string in it can be written: bytes of a command line that are no UTF-8 come as halves of characters."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return all(map(_is_text, value))
    if not isinstance(value, str):
        return True
    with suppress(UnicodeEncodeError):
        value.encode()
        return True
    return False


def _wrong_values(errors: Iterable[ErrorDetails], given: Mapping[str, _Given], file: str) -> Iterator[Problem]:
    """One problem a key: the alternatives of a key such as ``auto`` or a number are told together."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        depth = 2 if error["loc"][0] in SECTIONS else 1
        by_key.setdefault(".".join(map(str, error["loc"][:depth])), []).append(error)
    for key, found in by_key.items():
        if found[0]["type"] == "missing":
            yield Problem(file, f"'{key}' is missing", f"say {key}: <folder or name>")
            continue
        one = given[key]
        plain = [error["ctx"]["error"] for error in found if error["type"] == "value_error"]
        if plain and len(found) == 1:
            yield Problem(one.where, f"'{key}': {plain[0]}")
        else:
            wanted = " or ".join(dict.fromkeys(map(_wanted, found)))
            found_instead = "but it is empty" if one.value is None else f"not {reprlib.repr(one.value)}"
            yield Problem(one.where, f"'{key}' must be {wanted}, {found_instead}", _near(found, one.value))


def _wanted(error: ErrorDetails) -> str:
    """What a value should have been, in words."""
    context = error.get("ctx", {})
    match error["type"]:
        case "literal_error":
            return str(context["expected"]).replace("'", "")
        case "int_type" | "int_parsing" | "int_from_float":
            return "a whole number"
        case "float_type" | "float_parsing" | "finite_number" | "value_error":
            return "a number"
        case "greater_than_equal":
            return f"at least {context['ge']:g}"
        case "greater_than":
            return f"more than {context['gt']:g}"
        case "less_than":
            return f"less than {context['lt']:g}"
        case "bool_type" | "bool_parsing":
            return "true or false"
        case "string_type":
            return "text"
        case "string_too_short":
            return "a name"
        case "tuple_type":
            return "a list of names"
        case "string_pattern_mismatch":
            return "auto, cpu, cuda or cuda:<number>"
    return error["msg"].removeprefix("Input should be ")


def _near(errors: Sequence[ErrorDetails], value: Any) -> str:
    words = [word.strip("' ") for error in errors if error["type"] == "literal_error" for word in _split(error)]
    return did_you_mean(value, words) if isinstance(value, str) else ""


def _split(error: ErrorDetails) -> list[str]:
    return str(error["ctx"]["expected"]).replace(" or ", ",").split(",")


def _unknown(key: str, where: str) -> Problem:
    """An unknown key: first its exact name elsewhere, then other tools' spelling of it, then near names."""
    section, _, name = key.rpartition(".")
    home = next((known for known in _KEYS if known.rpartition(".")[2] == name), "")
    if home:
        hint = f"it belongs at {home}"
    elif name in SECTIONS and name:
        hint = f"'{name}' is a section of its own, at the left margin"
    elif name in FOREIGN:
        hint = FOREIGN_NOTES.get(name) or f"it is called {FOREIGN[name]} here"
    else:
        near = _nearest_key(section, name)
        hint = f"did you mean '{near}'?" if near else ""
    return Problem(where, f"unknown key '{key}'", hint)


def _nearest_key(section: str, name: str) -> str:
    """The full name of the nearest key: of the same section first, then of any, then by another tool's spelling."""
    beside = [*SECTIONS.get(section, ()), *(() if section else (known for known in SECTIONS if known))]
    if near := nearest(name, beside):
        return f"{section}.{near}" if section else near
    if near := nearest(name, [known.rpartition(".")[2] for known in _KEYS]):
        return next(known for known in _KEYS if known.rpartition(".")[2] == near)
    return FOREIGN.get(nearest(name, FOREIGN), "")


def _section_problem(section: str, where: str) -> Problem:
    keys = ", ".join(SECTIONS[section][:3])
    return Problem(
        where, f"'{section}' is a section of keys, not a value", f"its keys are {keys}, …, indented below it"
    )


def _scalar(text: str) -> Any:
    """The value of an override as YAML reads it; what is not YAML is text."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, *BAD_SCALAR):
        return text
