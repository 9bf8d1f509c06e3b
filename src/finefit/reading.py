"""Shapes of a trace read back as symbols: the sizes it runs at, what each size in it stands for, and what does not.

A *family's* trace has sizes that no two symbols share (``MARKERS``), so that what it reads holds for every model of the
family. A *model's* has its real sizes, which are numbers; symbols are only what a run brings: primes that divide none of
the model's sizes. In either a second trace at other sizes has to confirm what was read.

Symbols: as in ``poly``; of a partly turned head p dimensions are turned, X are a model's positions, B rows that are not packed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from .catalog import structures
from .poly import Poly, times
from .stream import Entry

# All distinct, also in the sums and products that occur. A chunk of a quantised weight is as large as the smallest weight
# there, h·k: a multiple of 16,384 that divides the others, so that no last chunk has a size of its own.
MARKERS = {
    "T": 257, "S": 256, "Q": 128, "L": 62, "C": 31, "h": 960, "n": 15, "m": 3, "d": 768, "f": 6912, "V": 211, "r": 17,
}  # fmt: skip
OTHERS = {
    "T": 385, "S": 384, "Q": 128, "L": 92, "C": 46, "h": 320, "n": 10, "m": 2, "d": 128, "f": 1408, "V": 1531, "r": 6,
}  # fmt: skip
_PARTLY = {"p": (192, 64)}
_MIXTURE = {"E": (104, 16), "K": (11, 5), "w": (416, 208), "s": (1248, 416)}
_POSITIONS = {"X": (4099, 4507)}
# Where a micro-batch is B rows of S tokens; kernels that share keys among heads take heads of up to 256.
_ROWS = {"B": (7, 3), "S": (320, 384), "T": (2240, 1152), "d": (256, 128), "p": (48, 32)}
# Slopes of alibi are of the next power of two of heads, and cut: the models' own heads are powers of two.
_SLOPES = {"n": (16, 8)}
_SLOPED = ("bloom", "mpt")
_ALIBI_POSITIONS = 2048  # MPT's table of distances: its max_seq_len
_HIDDEN = ("phi3", "helium")  # head size is hidden size / heads, always, though its config may say otherwise
# A rank of two: sizes are its part's, and its rows are U of T.
_DIVIDED = {"U": (129, 193), "T": (258, 386)}
RANKS = 2
_EXPERTS = ("num_experts", "experts_per_token", "moe_intermediate_size", "shared_intermediate_size")


def sizes_of_family(family: str, words: Iterable[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Two sets of sizes that a model of the family can have, for a graph with these words."""
    entry = structures.entry_of(family)
    used = structures.needed(family) if entry else frozenset("km")
    others = {**(_PARTLY if "partial" in words else {}), **(_MIXTURE if "moe" in entry else {})}
    others = {**others, **(_POSITIONS if "max_position_embeddings" in used else {})}
    if family in structures.OWN_ATTENTION:
        others |= {symbol: pair for symbol, pair in _ROWS.items() if symbol != "p" or "partial" in words}
    others |= _DIVIDED if "tensor" in words else {}
    others = {**others, **(_SLOPES if family in _SLOPED or "parallel_attn=0" in words else {})}
    both = []
    for i, given in enumerate((MARKERS, OTHERS)):
        sizes = {**given, **{symbol: pair[i] for symbol, pair in others.items()}}
        if not {"k", "m"} & used or "multi_query=0" in words:
            sizes["m"] = sizes["n"]  # every head has keys and values of its own
        if "multi_query=1" in words and "new_decoder_architecture=1" not in words:
            sizes["m"] = 1
        if entry.get("head_dim") == "hidden" or family in _HIDDEN:
            sizes["h"] = sizes["n"] * sizes["d"] * (RANKS if "tensor" in words else 1)
        if sizes["m"] == sizes["n"]:
            sizes["f"] = (5, 4)[i] * sizes["h"]
        if "w" in sizes and not _says(entry, "moe_intermediate_size"):
            sizes["w"] = sizes["f"]
        if "s" in sizes and not _says(entry, "shared_intermediate_size"):
            sizes["s"] = 0
        both.append(sizes)
    return both[0], both[1]


def _says(entry: Mapping[str, Any], field: str) -> bool:
    return field in entry.get("keys", {}) or field in entry.get("defaults", {})


def family_config(family: str, sizes: Mapping[str, int], words: Iterable[str], blocks: int) -> dict[str, Any]:
    """The config of a model of the family with these sizes, under the names the family's config.json has for them."""
    entry = structures.entry_of(family)
    if "tensor" in words:  # the sizes are a rank's
        sizes = {**sizes, **{symbol: RANKS * sizes[symbol] for symbol in "nmfV"}}
    config: dict[str, Any] = {
        "hidden_size": sizes["h"], "intermediate_size": sizes["f"], "num_attention_heads": sizes["n"],
        "num_key_value_heads": sizes["m"], "head_dim": sizes["d"], "vocab_size": sizes["V"],
        "num_hidden_layers": blocks, "max_position_embeddings": sizes.get("X", 4096), "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if entry.get("head_dim") == "hidden":
        del config["head_dim"]
    if sizes["m"] == sizes["n"]:
        del config["num_key_value_heads"]
    if "E" in sizes:
        shared = sizes["s"] // sizes["w"] if entry.get("counted_shared") else sizes["s"]
        config |= dict(zip(_EXPERTS, (sizes["E"], sizes["K"], sizes["w"], shared), strict=True))
        if not sizes["s"]:
            del config["shared_intermediate_size"]
        dense = 2 if "dense_first" in words else 0
        config |= {"first_k_dense_replace": dense, "moe_layer_start_index": dense, "moe_layer_end_index": blocks - 1}
    if "parallel_attn=0" in words:
        config["alibi"] = True  # Falcon-RW: no other Falcon has its two halves one after the other
    if "p" in sizes:
        part = sizes["p"] / sizes["d"]
        config |= {"partial_rotary_factor": part, "rotary_pct": part, "rotary_dim": sizes["p"]}
    renamed: dict[str, Any] = {}
    for key, size in config.items():
        renamed |= dict.fromkeys(entry.get("keys", {}).get(key, (key,)), size)
    return renamed


def derived(sizes: Mapping[str, int]) -> dict[str, int]:
    """All symbols from the independent ones."""
    width = sizes["m"] * sizes["d"]
    return {
        **sizes, "q": sizes["n"] * sizes["d"], "k": width, "g": sizes["n"] // sizes["m"], "W": sizes["h"] * width
    }  # fmt: skip


class Reader:
    """Reads a shape of a family's trace; a size that is no symbol, sum or product of them is an error of the trace."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        s = derived(sizes)
        same = {
            "q": s["q"] == s["h"],
            "k": s["k"] in (s["q"], s["d"]),
            "m": s["m"] in (s["n"], 1),
            "g": s["g"] in (1, s["n"]),
        }
        same |= {"f": s.get("w") == s["f"], "s": s.get("s") == 0}  # an expert may be narrower than the hidden size
        same |= {"Q": "B" in s, "P": True}
        words = [w for w in s if not same.get(w)]
        width = "h" if s["q"] == s["h"] else "q"
        pairs: list[tuple[int, Poly]]
        pairs = [(s[word], {word: 1}) for word in words]
        pairs += [(s["d"] // 2, {"d": 0.5}), (2 * s["f"], {"w" if same["f"] else "f": 2})]
        pairs += [(2 * s["r"], {"r": 2}), (3 * s["r"], {"r": 3})]  # layers that read one input share a product
        pairs += [(1, {"": 1}), (2, {"": 2}), (4, {"": 4})]
        pairs += [(s["W"] // 2, {"W": 1 / 2}), (s["W"] // 64, {"W": 1 / 64}), (64, {"": 64})]  # bytes, scales, blocks
        pairs += [(3, {"": 3})] if s["m"] == s["n"] else [(s["q"] + 2 * s["k"], {width: 1, "k": 2})]
        pairs += [] if s["g"] == 1 or "B" in s else [(s["g"] * s["Q"], {"Q*g": 1})]
        if "p" in s:
            pairs += [(s["p"] // 2, {"p": 0.5}), (s["d"] - s["p"], {"d": 1, "p": -1})]
        if "w" in s and not same["f"]:
            pairs += [(2 * s["w"], {"w": 2})]
        if "X" in s:
            pairs += [(s["X"] + 2, {"X": 1, "": 2})]  # OPT's table of positions begins with two that are never used
        if "B" in s:
            pairs += [
                (s["S"] + 1, {"S": 1, "": 1}),
                (_ALIBI_POSITIONS, {"": _ALIBI_POSITIONS}),
            ]  # a sink beside the keys
        self.table: dict[int, Poly] = dict(pairs)
        assert len(self.table) == len(pairs), "two symbols of the trace share a size"
        self.sizes: Mapping[str, int] = s

    def bytes_of(self, entry: Entry, section: str) -> Poly:
        if not entry.n_bytes:
            return {}
        if section == "optimizer" and not entry.shape:
            return {"P": entry.itemsize / self.sizes["P"]}  # a norm of each gradient, a scalar each
        if section == "optimizer" and entry.shape == (self.sizes["P"],):
            return {"P": entry.itemsize}  # the norms in one tensor
        numel = 1
        poly: Poly = {"": entry.itemsize}
        for size in entry.shape:
            numel *= size
            poly = times(poly, self.dimension(size))
        if numel * entry.itemsize == entry.n_bytes:
            return poly
        return times({"": entry.itemsize}, self.dimension(entry.n_bytes // entry.itemsize))

    def dimension(self, size: int) -> Poly:
        if size in self.table:
            return self.table[size]
        for known, poly in sorted(self.table.items(), reverse=True):
            if known > 4 and size % known == 0 and size // known in self.table:
                return times(poly, self.table[size // known])
        raise ValueError(f"a traced tensor has a size of {size}, which none of {self.sizes} explain")


# Twice the second and one is a prime too: tokens, their longest sequence, and rows of an attention block.
_QUERIES = (509, 491, 443, 431, 419, 359, 293, 281)
_CHUNKS = (211, 223, 227, 229, 233, 239, 241, 251)
_RANKS = (131, 137, 139, 149, 151, 157, 163, 167)
_DEQUANTISED = (127, 113, 109, 107, 103, 101, 97, 89)


def sizes_of_run(dimensions: Iterable[int]) -> tuple[dict[str, int], dict[str, int]]:
    """Two sets of what a run brings, for a model with these sizes: each is a prime, or twice one, that divides none."""
    of_model = set(dimensions)

    def two(primes: Iterable[int], also: int = 0) -> tuple[int, int]:
        fit = [p for p in primes if all(size % p and size % (2 * p + 1 if also else p) for size in of_model)]
        return fit[0], fit[1]

    picked = zip(two(_QUERIES, also=1), two(_CHUNKS), two(_RANKS), two(_DEQUANTISED), strict=True)
    first, second = (
        {"T": 2 * q + 1, "S": 2 * q, "Q": q, "L": 2 * c, "C": c, "r": r, "W": 16_384 * w} for q, c, r, w in picked
    )
    return first, second


class NumberReader(Reader):
    """Reads a shape of a model's trace: what a run's sizes divide is theirs, the rest is a number."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes

    def dimension(self, size: int) -> Poly:
        for word in ("T", "S", "Q", "L", "C", "r"):
            if size and size % self.sizes[word] == 0:
                return times({word: 1}, self.dimension(size // self.sizes[word]))
        if size and size % (self.sizes["W"] // 16_384) == 0:
            return {"W": size / self.sizes["W"]}
        return {"": size}
