"""What sharing the tokens of a micro-batch among ranks changes of a traced step (``nn.exchanged``). Torch-free.

A rank's activations are those of its share of the tokens: T and S of the traced sections stand for shares. In attention it
has all tokens of its share of the heads, which is as much, and blocks of scores of its heads alone. Before attention
queries, keys and values are there once more, one by one, as they are sent and received, and so is the output after it. Of
key/value heads that several ranks need each keeps its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .coefficients import Sections
from .layout import Layout
from .poly import Poly, plus

_MOST = 256
Mark = Mapping[str, Poly]


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """Bytes of one of a rank's tokens."""

    ranks: int
    queries: int
    more: int
    """Of the keys and values it keeps, beside a share of all."""


_made: dict[tuple[int, str, _Exchanged], tuple[Sections, Sections]] = {}


def shared(sections: Sections, kind: str, layout: Layout) -> Sections:
    """The sections of one of the ranks that share tokens; ``kind`` is the graph's."""
    model, ranks = layout.model, layout.mesh.context
    if ranks == 1:
        return sections
    width, copies = layout.element_bytes, max(ranks // model.num_key_value_heads, 1)
    of = _Exchanged(ranks, width * model.q_width, 2 * width * model.kv_width * (copies - 1))
    key = (id(sections), kind, of)
    if key not in _made:
        if len(_made) >= _MOST:
            _made.clear()
        # The source is kept, so that its identity is nobody else's.
        _made[key] = sections, [_of_rank(section, kind, of) for section in sections]
    return _made[key][1]


def _of_rank(section: Mapping[str, Any], kind: str, of: _Exchanged) -> dict[str, Any]:
    marks: list[Mark] = section["landmarks"]
    attention = [i for i, mark in enumerate(marks) if any(_is_scores(word) for poly in mark.values() for word in poly)]
    if not attention:
        return dict(section)
    backward = section["name"].startswith("backward")
    after = attention[-1] + 1 if backward else attention[0]
    kept = {"activation": {"T": (-of.more if backward else of.more) * (kind == "plain")}}
    found: list[Mark] = []
    for i, mark in enumerate(marks):
        if kind == "plain" and i >= after:
            mark = _with(mark, kept)
        elif kind != "plain" and backward and attention[0] <= i < after:
            mark = _with(mark, {"temporary": {"T": of.more}})
        if i not in attention:
            found.append(mark)
            continue
        if backward or kind != "plain":  # gradients of keys and values, or themselves
            mark = _with(mark, {"temporary": {"T": of.more}})
        found.append(_among(mark, of.ranks))
        found.append(_with(_without_scores(mark), {"temporary": {"T": of.queries}}))
    return {**section, "end": _with(section["end"], kept), "landmarks": found}


def _is_scores(word: str) -> bool:
    return {"Q", "S"} <= set(word.split("*"))


def _among(mark: Mark, ranks: int) -> Mark:
    """Of blocks of queries there are those of a rank's heads; S stands for a share already, what is not of heads is whole."""

    def coefficient(word: str, c: float) -> float:
        factors = word.split("*")
        return c / ranks if factors.count("Q") == 1 and "S" not in factors else c

    return {part: {word: coefficient(word, c) for word, c in poly.items()} for part, poly in mark.items()}


def _without_scores(mark: Mark) -> Mark:
    """Before and after attention."""
    return {
        part: {word: c for word, c in poly.items() if not {"Q", "S"} & set(word.split("*"))}
        for part, poly in mark.items()
    }


def _with(mark: Mark, more: Mark) -> Mark:
    return {**mark, **{part: plus(mark.get(part, {}), poly) for part, poly in more.items()}}
