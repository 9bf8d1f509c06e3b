"""Traced sections with numbers in them: what each adds for good, and the highest point it reaches on the way.

A plan differs from its neighbours in how many blocks are checkpointed, which no coefficient depends on, so the numbers of
a graph are kept by its sizes. Each product of symbols is worked out once for all polynomials of the graph it stands in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from .coefficients import Sections

_Terms = tuple[tuple[float, int], ...]  # coefficient, number of the product
_Parts = tuple[tuple[str, _Terms], ...]  # by component
_MOST_TABLES = 1024


@dataclass(frozen=True, slots=True)
class Section:
    """Bytes by component: ``end`` stays when the section is over, ``top`` is there at its highest landmark."""

    end: Mapping[str, int]
    top: Mapping[str, int]
    top_bytes: int


@dataclass(frozen=True, slots=True)
class _Graph:
    """The polynomials of one variant of a graph, taken apart: ``words`` are the products of symbols in them."""

    source: Sections
    """Kept, so that its identity is nobody else's."""
    words: tuple[tuple[str, ...], ...]
    parts: tuple[tuple[str, _Parts, tuple[_Parts, ...]], ...]
    """(name, end, landmarks) of each section."""


_graphs: dict[tuple[int, bool], _Graph] = {}
_tables: dict[tuple[int, bool, tuple[float, ...]], dict[str, Section]] = {}


def numbers(sections: Sections, again: bool, sizes: Mapping[str, float]) -> dict[str, Section]:
    """Each section of the variant in use, the first micro-batch's or a later one's, at ``sizes``; not to be changed."""
    graph = _graphs.get((id(sections), again))
    if graph is None:
        graph = _graphs[id(sections), again] = _apart(sections, again)
    key = (id(sections), again, tuple(sizes.values()))
    table = _tables.get(key)
    if table is None:
        if len(_tables) >= _MOST_TABLES:
            _tables.clear()
        table = _tables[key] = _filled(graph, sizes)
    return table


def _apart(sections: Sections, again: bool) -> _Graph:
    words: dict[str, int] = {}

    def parts(polynomials: Mapping[str, Mapping[str, float]]) -> _Parts:
        return tuple(
            (component, tuple((c, words.setdefault(word, len(words))) for word, c in polynomial.items()))
            for component, polynomial in polynomials.items()
        )

    found = tuple(
        (str(s["name"]), parts(s["end"]), tuple(map(parts, s["landmarks"])))
        for s in sections
        if s["again"] in (again, None)
    )
    return _Graph(sections, tuple(tuple(word.split("*")) if word else () for word in words), found)


def _filled(graph: _Graph, sizes: Mapping[str, float]) -> dict[str, Section]:
    products = [prod([sizes[symbol] for symbol in word]) for word in graph.words]

    def bytes_of(parts: _Parts) -> dict[str, int]:
        return {component: round(sum([c * products[i] for c, i in terms])) for component, terms in parts}

    table: dict[str, Section] = {}
    for name, end, landmarks in graph.parts:
        marks: list[dict[str, Any]] = [bytes_of(mark) for mark in landmarks]
        top: dict[str, int] = max(marks, key=lambda mark: sum(mark.values()), default={})
        table[name] = Section(bytes_of(end), top, sum(top.values()))
    return table
