"""What sharing the tokens of a micro-batch among ranks changes of a traced step (``nn.exchanged``). Torch-free.

A rank's activations are those of its share of the tokens: T and S of the traced sections stand for shares. In attention it
has all tokens of its share of the heads, which is as much, and blocks of scores of its heads alone. Before attention
queries, keys and values are there once more, one by one, as they are sent and received, and so is the output after it. Of
key/value heads that several ranks need each keeps its own; values that were a view of one product with queries and keys
are not any more, and that is let go of.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .coefficients import Sections
from .layout import Layout
from .poly import Poly, plus
from .techniques.fused_ops import ATTENTION

_ONE_PRODUCT = ("qkv_proj", "query_key_value")
"""What gives queries, keys and values together, in families that turn the first two."""
_MOST = 256
Mark = Mapping[str, Poly]


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """Bytes of one of a rank's tokens."""

    ranks: int
    copies: int
    """Ranks that need one key/value head."""
    queries: int
    kept: int
    """Of queries, keys and values from attention to its backward, beside a share of what is traced."""
    gradients: int
    """The same of the gradients of keys and values."""
    held: int
    """Queries, keys and values of its own tokens, where who calls attention holds them."""


_made: dict[tuple[int, str, _Exchanged], tuple[Sections, Sections]] = {}


def shared(sections: Sections, kind: str, layout: Layout) -> Sections:
    """The sections of one of the ranks that share tokens; ``kind`` is the graph's."""
    if layout.mesh.context == 1:
        return sections
    key = (id(sections), kind, of := _of(layout))
    if key not in _made:
        if len(_made) >= _MOST:
            _made.clear()
        # The source is kept, so that its identity is nobody else's.
        _made[key] = sections, [_of_rank(section, kind, of) for section in sections]
    return _made[key][1]


def _of(layout: Layout) -> _Exchanged:
    model, ranks, width = layout.model, layout.mesh.context, layout.element_bytes
    queries, keys = width * model.q_width, width * model.kv_width
    copies = max(ranks // model.num_key_value_heads, 1)
    is_one = any(part in g.name for g in layout.groups for part in _ONE_PRODUCT)
    ours = f"{model.family.removesuffix('_text')}attention" in map(str.lower, ATTENTION)
    more = 2 * keys * (copies - 1)
    held = 0 if ours and "fused_ops" in layout.graph else queries + 2 * keys
    return _Exchanged(ranks, copies, queries, more - (queries + keys) * is_one, more, held)


def _of_rank(section: Mapping[str, Any], kind: str, of: _Exchanged) -> dict[str, Any]:
    marks: list[Mark] = section["landmarks"]
    scores = [max((_scores(poly) for poly in mark.values()), default=0.0) for mark in marks]
    if not any(scores):
        return dict(section)
    plain, backward = kind == "plain", section["name"].startswith("backward")
    found: list[Mark] = []
    for i, (mark, n) in enumerate(zip(marks, scores, strict=True)):
        if plain:
            changed = _with(mark, "activation", of.kept * (_is_after(i, scores, backward) * (-1 if backward else 1)))
        else:
            there = _is_between(i, marks, scores, of) if backward else n > 0
            changed = _with(mark, "temporary", of.kept * there)
        if not n:
            found.append(changed)
            continue
        last = backward and (plain or n == max(scores))  # of the two runs of attention the one with gradients
        found.append(_among(_with(changed, "temporary", of.gradients if last else of.held), of))
        more = of.queries + max(of.kept, 0 if last else of.held, 0)
        found.append(_with(_without_scores(mark), "temporary", more))
    end = _with(section["end"], "activation", of.kept * plain * (-1 if backward else 1))
    return {**section, "end": end, "landmarks": found}


def _is_after(i: int, scores: list[float], backward: bool) -> bool:
    """Whether a plain block has, or in backward no longer has, what attention keeps."""
    attention = [j for j, n in enumerate(scores) if n]
    return i > attention[-1] if backward else i >= attention[0]


def _is_between(i: int, marks: list[Mark], scores: list[float], of: _Exchanged) -> bool:
    """Whether a block that is computed again in backward has what attention keeps. Where no landmark tells when attention
    was computed again, more is there from the start, and less from the MLP on."""
    attention = [j for j, n in enumerate(scores) if n]
    again = [j for j in attention if scores[j] < max(scores)]
    if again or i > attention[-1]:
        return again[0] <= i <= attention[-1] if again else False
    return of.kept > 0 or scores[i] > 0 or any("T*f" in poly or "T*w" in poly for poly in marks[i].values())


def _scores(poly: Poly) -> float:
    return sum(c for word, c in poly.items() if {"Q", "S"} <= set(word.split("*")))


def _among(mark: Mark, of: _Exchanged) -> Mark:
    """Of blocks of queries, keys and values there are those of a rank's heads; S stands for a share already."""

    def coefficient(word: str, c: float) -> float:
        factors = word.split("*")
        if "S" in factors:
            return c if "Q" in factors else c * of.copies
        return c / of.ranks if factors.count("Q") == 1 else c

    return {part: {word: coefficient(word, c) for word, c in poly.items()} for part, poly in mark.items()}


def _without_scores(mark: Mark) -> Mark:
    """Before and after attention."""
    return {
        part: {word: c for word, c in poly.items() if not {"Q", "S"} & set(word.split("*"))}
        for part, poly in mark.items()
    }


def _with(mark: Mark, component: str, more: int) -> Mark:
    """With so many bytes more of each token."""
    return {**mark, component: plus(mark.get(component, {}), {"T": more})} if more else mark
