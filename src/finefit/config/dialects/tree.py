"""A foreign YAML file as a tree: where its keys and values stand, keys that stand twice, and what no reader can take.

Values are made one by one, so that a wrong one has its place. Aliases can make a tree endless or very large: either is
refused, as are tags that would make more than plain data.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...errors import ConfigError
from ..nodes import at, construct, mapping_of

#: Aliases can make a small file a very large tree.
_MOST_NODES = 20_000
_PLAIN = "write it as plain text, numbers, lists and sections"


@dataclass(frozen=True, slots=True)
class Twice:
    """A key that stands twice in one section; YAML's parsers disagree on what that means."""

    key: str
    first: str
    second: str


@dataclass(slots=True)
class Tree:
    path: Path
    loader: yaml.SafeLoader
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Key -> place of the key, place of its value."""
    twice: list[Twice] = field(default_factory=list)
    _top: str = ""
    """Place of the key at the left margin that is being taken in."""
    _visits: int = 0
    _around: list[yaml.Node] = field(default_factory=list)
    _flat: set[int] = field(default_factory=set)

    def visit(self, prefix: str, node: yaml.Node, where: str) -> None:
        """Take in what is below ``node``; ``where`` is the place of what refers to it."""
        self._visits += 1
        if self._visits > _MOST_NODES:
            raise ConfigError(
                "this is too large for a run file",
                where=self._top or where,
                hint="aliases (*name) repeat what they stand for",
            )
        if any(node is one for one in self._around):
            raise ConfigError(f"'{prefix.replace('-.', '').strip('.')}' contains itself", where=where, hint=_PLAIN)
        if node.tag not in self.loader.yaml_constructors:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise ConfigError(f"the tag '{tag}' makes no plain value", where=at(self.path, node), hint=_PLAIN)
        self._around.append(node)
        if isinstance(node, yaml.MappingNode):
            self._mapping(prefix, node)
        elif isinstance(node, yaml.SequenceNode):
            for one in node.value:
                self.visit(f"{prefix}-.", one, at(self.path, one))
        else:
            construct(self.path, self.loader, node)
        self._around.pop()

    def _mapping(self, prefix: str, node: yaml.MappingNode) -> None:
        if id(node) not in self._flat:
            self._flat.add(id(node))
            self.twice += self._repeated(prefix, node)
            self.loader.flatten_mapping(node)
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                kind = "list" if isinstance(key_node, yaml.SequenceNode) else "section"
                raise ConfigError(f"a {kind} cannot be a key", where=at(self.path, key_node), hint=_PLAIN)
            self._top = self._top if prefix else at(self.path, key_node)
            self.visit(prefix, key_node, at(self.path, key_node))
            key = f"{prefix}{construct(self.path, self.loader, key_node)}"
            self.places[key] = (at(self.path, key_node), at(self.path, value_node))
            self.visit(f"{key}.", value_node, at(self.path, key_node))

    def _repeated(self, prefix: str, node: yaml.MappingNode) -> Iterator[Twice]:
        first: dict[str, str] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                place = at(self.path, key_node)
                if first.setdefault(key_node.value, place) != place:
                    yield Twice(f"{prefix}{key_node.value}", first[key_node.value], place)


def take_in(path: Path) -> tuple[dict[str, Any], Tree]:
    """The file as plain data and its tree."""
    with mapping_of(path) as (loader, root):
        tree = Tree(path, loader)
        tree.visit("", root, at(path, root))
        values = construct(path, loader, root)
    if not isinstance(values, dict):
        raise ConfigError("key: value lines are needed here", where=at(path, root))
    return {str(key): value for key, value in values.items()}, tree


def outline(path: Path) -> dict[str, Any]:
    """The keys of a file and of its sections, without a value: for a file whose values cannot be made."""
    with mapping_of(path) as (_, root):
        return {key: {inner: None for inner, _ in _keys(node)} or None for key, node in _keys(root)}


def _keys(node: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            yield key.value, value
