"""The words of ``memory.parallel``: how several devices share a run."""

import re
from typing import Any

from ..errors import did_you_mean

_DEGREE = re.compile(r"(data|zero[123]|(?:tensor|pipeline|context)[1-9]\d*)")
_ORDER = re.compile(r"(gpipe|1f1b|interleaved[2-9])")
_KNOWN = ("data", "zero1", "zero2", "zero3", "tensor2", "pipeline2", "context2", "gpipe", "1f1b", "interleaved2")
_KEYS = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel", "context": "context_parallel", "data": "zero"}


def words_of(value: Any) -> Any:
    """Words joined by commas, spaces or x, each kind of them once."""
    if value in (None, False, "none", "off"):
        return "data"
    words = [word for word in re.split(r"[\s,x+]+", str(value).lower()) if word]
    for word in words:
        if word != "auto" and not (_DEGREE.fullmatch(word) or _ORDER.fullmatch(word)):
            near = did_you_mean(word, _KNOWN)
            raise ValueError(
                f"'{word}' is no way to share a run; {near or 'say data, zero3, tensor2, pipeline2, context2'}"
            )
    kinds = [_kind(word) for word in words]
    if len(set(kinds)) != len(kinds):
        raise ValueError(f"'{value}' says one thing twice")
    if "pipeline_schedule" in kinds and "pipeline_parallel" not in kinds:
        raise ValueError(f"'{value}' has an order of a pipeline and no pipeline; say pipeline2,{words[-1]}")
    return ",".join(words) or "auto"


def degrees(parallel: str) -> dict[str, str]:
    """The plan's constraints: ZeRO's stage, 0 of data; how many devices share a matrix, the blocks, an example; the order of
    a pipeline."""
    words = parallel.split(",") if parallel != "auto" else ()
    return {_kind(w): w if _ORDER.fullmatch(w) else w.strip("abcdefghijklmnopqrstuvwxyz") or "0" for w in words}


def _kind(word: str) -> str:
    """What a word is about."""
    if _ORDER.fullmatch(word):
        return "pipeline_schedule"
    name = word.rstrip("0123456789")
    return _KEYS.get(name, name)
