"""What a tensor-parallel rank's step comes to where it was not traced, from the traced sections of a device that has all.

Heads, the MLP's width and the vocabulary are a rank's by their symbols (``predict.sizes_of``); rows between the sub-layers
(what has the hidden size and no other) are U of T. All of them are gathered before attention, the MLP and the loss: a plain
block keeps both inputs for backward, and sums of terms are there in all rows until they are scattered. It says a little
too much: what a block keeps of the rows beside these inputs is in the traced sections, too. Torch-free.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .poly import Poly, plus

Sections = Sequence[Mapping[str, Any]]
_INPUTS = 2  # of attention, of the MLP
_TERMS = {"forward": 1, "eval": 1, "backward": 2}  # sums in all rows at a block's top
_HIDDEN = {"T*h": "U*h", "T": "U"}


def of_rank(sections: Sections, graph: str) -> list[dict[str, Any]]:
    """The sections of one of several ranks; ``graph`` is the key of the whole's."""
    words = graph.split()
    width = 4 if words[0] == "fp32" else 2
    others: Poly = {"T*h": width, "U*h": -width}
    keeps = words[-1] not in ("checkpointed", "eval")  # or some of it, where halves of blocks are computed again
    return [_of_rank(section, keeps, others) for section in sections]


def _of_rank(section: Mapping[str, Any], keeps: bool, others: Poly) -> dict[str, Any]:
    name = str(section["name"])
    end, marks = _cut(section["end"]), [_cut(mark) for mark in section["landmarks"]]
    moment, _, place = name.partition(" ")
    if moment in _TERMS and (place.isdigit() or place.endswith("before")):
        embedded = not place.isdigit()
        marks = [_with(mark, "temporary", others, 1 if embedded else _TERMS[moment]) for mark in marks]
        if not embedded and keeps:
            end = _with(end, "activation", others, -_INPUTS if moment == "backward" else _INPUTS)
        if not embedded and (moment != "backward" or not keeps):
            marks = [_with(mark, "activation" if keeps else "temporary", others, _INPUTS) for mark in marks]
    elif name in ("loss", "eval loss"):
        marks = [_with(mark, "temporary", others, 1) for mark in marks]
    return {**section, "end": end, "landmarks": marks}


def _cut(parts: Mapping[str, Poly]) -> dict[str, Poly]:
    """With a rank's rows in place of all."""
    return {component: {_HIDDEN.get(word, word): c for word, c in poly.items()} for component, poly in parts.items()}


def _with(parts: Mapping[str, Poly], component: str, rows: Poly, times: int) -> dict[str, Poly]:
    return {**parts, component: plus(parts.get(component, {}), {word: c * times for word, c in rows.items()})}
