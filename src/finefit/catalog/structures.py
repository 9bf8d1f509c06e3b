"""Parameter lists by family: the templates of `structures.json`, filled in with a model's sizes. Torch-free.

The file is transformers' own modelling code read back (``scripts/derive_structures.py``); its ``about`` says what a row
is. Declines families whose blocks differ in more than having experts: those are built as they are (`derived`).
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .data import read_data

PATH = Path(__file__).parent / "structures.json"
Row = tuple[str, tuple[int, ...], str]
Values = tuple[tuple[str, int], ...]
_PARTS = ("before", "dense", "moe", "after")
_WORD = re.compile(r"[A-Za-z_]\w*")
#: Symbols of the templates by ModelSpec's fields, and fields that are switches of their own name.
SYMBOLS = {
    "h": "hidden_size", "f": "intermediate_size", "n": "num_attention_heads", "m": "num_key_value_heads",
    "d": "head_dim", "V": "vocab_size", "E": "num_experts", "K": "experts_per_token", "w": "moe_intermediate_size",
    "s": "shared_intermediate_size",
}  # fmt: skip
#: Families whose attention cannot be told where a packed row's sequences begin (transformers 5.24): it is not called
#: through the registry, adds sinks to it (gpt_oss), or is called without what a forward was given besides (nemotron).
OWN_ATTENTION = ("bloom", "falcon", "gpt_neo", "gpt_oss", "mpt", "nemotron", "stablelm")
FIELDS = (*SYMBOLS.values(), "tie_word_embeddings", "attention_bias", "mlp_bias", "max_position_embeddings")


@dataclass(frozen=True, slots=True)
class Filled:
    """A family's list with numbers in it; ``kinds`` are rows of a block, named relative to it, by kind."""

    prefix: str
    before: tuple[Row, ...]
    kinds: Mapping[str, tuple[Row, ...]]
    after: tuple[Row, ...]


def families() -> tuple[str, ...]:
    return tuple(_entries())


def entry_of(family: str) -> Mapping[str, Any]:
    """What the file says of a family besides its rows too: spellings, defaults; empty for one it does not have."""
    found: Mapping[str, Any] = _entries().get(family, {})
    return found


@functools.cache
def needed(family: str) -> frozenset[str]:
    """Names that the family's rows use: symbols, and keys of its config."""
    return frozenset(word for row in _rows(family) for text in (row[1], *row[3:]) for word in _WORD.findall(text))


@functools.cache
def switches(family: str) -> tuple[str, ...]:
    """Config keys on whose truth alone rows depend, in the alphabet's order."""
    sizes = {word for row in _rows(family) for word in _WORD.findall(row[1])}
    found = {word for row in _rows(family) for word in _WORD.findall("".join(row[3:]))}
    return tuple(sorted(found - sizes))


@functools.lru_cache(maxsize=64)
def filled(family: str, values: Values) -> Filled:
    """The rows that are there with these values (of symbols and config keys), with their shapes."""
    entry, numbers = _entries()[family], dict(values)
    parts = {part: tuple(_row(row, numbers) for row in entry.get(part, ()) if _is_on(row, numbers)) for part in _PARTS}
    kinds = {kind: parts[kind] for kind in ("dense", "moe") if kind in entry}
    return Filled(entry["prefix"], parts["before"], kinds, parts["after"])


def number(expression: str, values: Mapping[str, int]) -> int:
    """The value of a sum of products: ``q+2*k``."""
    total = 0
    for term in expression.split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor) if factor.isdigit() else values[factor]
        total += product
    return total


def dense_layers(dense_by: str, values: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    """Blocks without experts, as the modelling code decides that reads the config key ``dense_by``."""
    match dense_by:
        case "first_k_dense_replace":
            return tuple(range(min(depth, values["first_k_dense_replace"])))
        case "mlp_only_layers":
            only, step = values.get("mlp_only_layers") or (), values["decoder_sparse_step"]
            return tuple(i for i in range(depth) if i in only or (i + 1) % step)
        case "moe_layer_start_index":
            last = values.get("moe_layer_end_index", -1)
            sparse = range(values["moe_layer_start_index"], depth if last == -1 else last + 1)
            return tuple(i for i in range(depth) if i not in sparse or (i + 1) % values["moe_layer_interval"])
    return ()


def _entries() -> Mapping[str, Any]:
    entries: Mapping[str, Any] = read_data(PATH.name)["families"]
    return entries


def _rows(family: str) -> list[list[str]]:
    return [row for part in _PARTS for row in _entries()[family].get(part, ())]


def _row(row: list[str], numbers: Mapping[str, int]) -> Row:
    return row[0], tuple(number(size, numbers) for size in row[1].split(",")), row[2]


def _is_on(row: list[str], numbers: Mapping[str, int]) -> bool:
    """Whether the row's switches are as it wants them: ``attention_bias&!multi_query``, ``!parallel_attn|bias``."""
    if len(row) < 4:
        return True
    return any(
        all(bool(numbers[word.removeprefix("!")]) is not word.startswith("!") for word in words.split("&"))
        for words in row[3].split("|")
    )
