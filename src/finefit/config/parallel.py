"""The words of ``memory.parallel``: how several devices share a run."""

import re
from typing import Any

from ..errors import did_you_mean

_DEGREE = re.compile(r"(data|zero[123]|(?:tensor|pipeline|context)[1-9]\d*)")


def words_of(value: Any) -> Any:
    """Words joined by commas, spaces or x, each kind of them once."""
    if value in (None, False, "none", "off"):
        return "data"
    words = [word for word in re.split(r"[\s,x+]+", str(value).lower()) if word]
    for word in words:
        if word != "auto" and not _DEGREE.fullmatch(word):
            near = did_you_mean(word, ("data", "zero1", "zero2", "zero3", "tensor2", "pipeline2", "context2"))
            raise ValueError(
                f"'{word}' is no way to share a run; {near or 'say data, zero3, tensor2, pipeline2, context2'}"
            )
    kinds = [word.rstrip("0123456789") for word in words]
    if len(set(kinds) - {"data"}) + ("data" in kinds) != len(kinds) or {"data", "zero"} <= set(kinds):
        raise ValueError(f"'{value}' says one thing twice")
    return ",".join(words) or "auto"


def degrees(parallel: str) -> dict[str, str]:
    """The plan's constraints: ZeRO's stage, 0 of data, and how many devices share a matrix, the blocks, an example."""
    names = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel", "context": "context_parallel"}
    found: dict[str, str] = {}
    for word in parallel.split(",") if parallel != "auto" else ():
        kind = word.rstrip("0123456789")
        found[names.get(kind, "zero")] = word.removeprefix(kind) or "0"
    return found
