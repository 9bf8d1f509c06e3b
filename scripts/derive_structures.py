"""Derive catalog/structures.json: for every family of the catalogue its parameter list, as templates in symbols.

    python scripts/derive_structures.py [FAMILY ...]

transformers builds each family at two sets of sizes that no symbols share; every dimension is read back as the simplest
sum of products that gives both, and must give a third. Switches are the config's booleans that change the list: it is
built for each combination of them, and a row says under which it is there. About two seconds a family.
"""

import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers
from huggingface_hub.errors import StrictDataclassError

from finefit import catalog
from finefit.catalog.structures import PATH
from finefit.skeleton import config_of, rows_of

# What a symbol is called by the configuration classes; the first that a class has is set.
SYMBOLS = {
    "h": ("hidden_size",),
    "f": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "n": ("num_attention_heads",),
    "m": ("num_key_value_heads", "num_kv_heads"),
    "d": ("head_dim",),
    "V": ("vocab_size",),
    "E": ("num_experts", "num_local_experts", "n_routed_experts"),
    "K": ("num_experts_per_tok",),
    "w": ("moe_intermediate_size",),
    "s": ("shared_expert_intermediate_size", "shared_intermediate_size", "n_shared_experts", "moe_num_shared_experts"),
}
FIELDS = {
    "h": "hidden_size", "f": "intermediate_size", "n": "num_attention_heads", "m": "num_key_value_heads",
    "d": "head_dim", "V": "vocab_size", "E": "num_experts", "K": "experts_per_token", "w": "moe_intermediate_size",
    "s": "shared_intermediate_size",
}  # fmt: skip
COUNTED_SHARED = ("n_shared_experts", "moe_num_shared_experts")  # so many experts of width w, not a width
OTHER_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
               "max_position_embeddings")  # fmt: skip
MAY_BE_NONE = ("q_lora_rank", *SYMBOLS["s"])
# Three sets of sizes: distinct within a set, and in the sums and products that occur.
SETS: tuple[dict[str, int], ...] = (
    {"n": 6, "m": 3, "d": 22, "width": 34, "f": 152, "V": 422, "E": 10, "w": 38, "s": 5, "q_lora_rank": 26,
     "kv_lora_rank": 52, "qk_nope_head_dim": 18, "qk_rope_head_dim": 14, "v_head_dim": 46,
     "max_position_embeddings": 514},
    {"n": 10, "m": 2, "d": 26, "width": 14, "f": 118, "V": 662, "E": 14, "w": 58, "s": 3, "q_lora_rank": 44,
     "kv_lora_rank": 62, "qk_nope_head_dim": 20, "qk_rope_head_dim": 34, "v_head_dim": 38,
     "max_position_embeddings": 302},
    {"n": 8, "m": 4, "d": 38, "width": 18, "f": 206, "V": 334, "E": 18, "w": 42, "s": 7, "q_lora_rank": 50,
     "kv_lora_rank": 66, "qk_nope_head_dim": 24, "qk_rope_head_dim": 10, "v_head_dim": 74,
     "max_position_embeddings": 410},
)  # fmt: skip
BLOCKS = 3
# Which blocks have no experts: the keys that say it, and their values here, so that both kinds are there.
DENSE_BY = {
    "first_k_dense_replace": {"first_k_dense_replace": 1},
    "mlp_only_layers": {"mlp_only_layers": [0], "decoder_sparse_step": 1},
    "moe_layer_start_index": {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
}
# Values without which these classes cannot be built so small; none changes a shape.
NEEDED: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global"], BLOCKS]]},
    "deepseek_v3": {"n_group": 1, "topk_group": 1},
}
# What a config must say for the template to hold (another key's name: to be equal to it); else it is built as it is.
ONLY: dict[str, dict[str, Any]] = {
    "opt": {"word_embed_proj_dim": ["hidden_size"]},
    "falcon": {"num_ln_in_parallel_attn": [2]},
    "stablelm": {"qk_layernorm": [False]},
}
# Classes that reckon with hidden_size / heads in some places and with a head_dim of its own in others.
HEAD_FROM_HIDDEN = ("phi", "olmoe", "stablelm")
# Spellings that classes take as well without an attribute_map.
TAKEN_TOO = {"bloom": {"hidden_size": "n_embed"}}
NO_SWITCH = ("add_cross_attention", "is_decoder", "_remove_final_layer_norm", "return_dict", "use_cache")
#: Defaults of the classes that finefit reads though no shape depends on them.
ALSO_READ = ("sliding_window", "use_sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
Combination = tuple[tuple[str, bool], ...]
Entry = tuple[str, str, str]  # name, dimensions, role
Part = dict[str, list[Entry]]  # "before", "after", or a kind of block


class Family:
    """What a configuration class is like: the names of its sizes, its switches, whether head_dim is its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        default = config_of({"model_type": name})
        self.keys: dict[str, Any] = default.to_dict()
        self.map: dict[str, str] = dict(default.attribute_map)
        has = {*self.keys, *self.map, *self.map.values()}
        named = {symbol: next((k for k in keys if k in has), None) for symbol, keys in SYMBOLS.items()}
        if not isinstance(getattr(type(default), "head_dim", None), property):
            named["d"] = "head_dim"  # read by many classes that do not declare it
        self.named: dict[str, str] = {symbol: key for symbol, key in named.items() if key}
        self.others = [key for key in OTHER_SIZES if key in has]
        self.dense_by = next((key for key in DENSE_BY if key in self.keys and "E" in self.named), None)
        self.has_own_head = False
        if "d" in self.named and name not in HEAD_FROM_HIDDEN and "kv_lora_rank" not in self.others:
            own = dict(zip(("one", "other"), (self.rows(SETS[0], d=d) for d in (22, 44)), strict=True))
            self.has_own_head = own["one"] != own["other"]
        self.switches = self._switches()

    def sizes(self, at: Mapping[str, int]) -> dict[str, int]:
        """Values of all symbols at a set; where the head's size follows from the hidden size, so here."""
        own = self.has_own_head or "kv_lora_rank" in self.others
        found = {"h": at["n"] * (at["width"] if own else at["d"]), "K": 2, **at}
        found |= {"q": at["n"] * at["d"], "k": at["m"] * at["d"]}
        if self.named.get("s") in COUNTED_SHARED:
            found["s"] = at["s"] * at["w"]
        known = {*self.named, *self.others, "d", *("qk" if "m" in self.named else "")}
        return {symbol: n for symbol, n in found.items() if symbol in known}

    def rows(
        self, at: Mapping[str, int], d: int | None = None, **changes: Any
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Rows of the real model at a set of sizes."""
        sizes = {**self.sizes(at), **({"d": d} if d else {})}
        values: dict[str, Any] = {key: sizes[symbol] for symbol, key in self.named.items()}
        values |= {key: at[key] for key in self.others}
        if self.named.get("s") in COUNTED_SHARED:
            values[self.named["s"]] = at["s"]
        if self.dense_by:
            values |= DENSE_BY[self.dense_by]
        values |= {"num_hidden_layers": BLOCKS, "pad_token_id": 0, **NEEDED.get(self.name, {})}
        if "word_embed_proj_dim" in self.keys:
            values["word_embed_proj_dim"] = sizes["h"]
        return rows_of(config_of({"model_type": self.name, **values, **changes}))

    def _switches(self) -> tuple[str, ...]:
        plain, found = self.rows(SETS[0]), []
        optional = [key for key in (*self.others, *self.named.values()) if key in MAY_BE_NONE]
        for key in [key for key, value in self.keys.items() if isinstance(value, bool)] + optional:
            other = None if key in optional else not self.keys[key]
            held = key in NO_SWITCH or key in ONLY.get(self.name, {})
            if not held and self._can(plain, {key: other}):
                found.append(key)
        return tuple(found)

    def _can(self, plain: list[Any], changes: dict[str, Any]) -> bool:
        """Whether the list differs with these changes; a class that cannot be built with them has no such switch."""
        try:
            return self.rows(SETS[0], **changes) != plain
        except (TypeError, ValueError, AttributeError, ZeroDivisionError, StrictDataclassError):
            return False

    def symbol_of(self, switch: str) -> str:
        return next((symbol for symbol, key in self.named.items() if key == switch), switch)


def expressions(sizes: Sequence[Mapping[str, int]]) -> dict[tuple[int, ...], str]:
    """Values at all sets -> the simplest expression that gives them."""
    symbols = sorted(sizes[0], key=lambda s: (len(s), "hqkfVEwsnmd".find(s)))
    single: dict[tuple[int, ...], str] = {}
    words = [(s,) for s in symbols] + list(itertools.combinations_with_replacement(symbols, 2))
    for word in words:
        for factor in (1, 2, 3, 4):
            text = "*".join([*([str(factor)] if factor > 1 else []), *word])
            single.setdefault(tuple(factor * functools.reduce(lambda a, s: a * at[s], word, 1) for at in sizes), text)
    found = dict(single)
    for n in (1, 2):
        found.setdefault(tuple(n for _ in sizes), str(n))
        for value, text in single.items():
            found.setdefault(tuple(v + n for v in value), f"{text}+{n}")
    for (one, a), (other, b) in itertools.combinations(list(single.items()), 2):
        found.setdefault(tuple(x + y for x, y in zip(one, other, strict=True)), f"{a}+{b}")
    return found


def entries(family: Family, switched: Combination) -> Part:
    """The parts of the list for one combination of switches, with dimensions as expressions."""
    changes = {key: on if key not in MAY_BE_NONE else None for key, on in switched if key not in MAY_BE_NONE or not on}
    lists = [family.rows(at, **changes) for at in SETS]
    if len({tuple((name, role) for name, _, role in rows) for rows in lists}) != 1:
        raise ValueError(f"{family.name}: names depend on sizes")
    table = expressions([family.sizes(at) for at in SETS])
    parts: Part = {"before": []}
    blocks: dict[int, list[Entry]] = {}
    for same in zip(*lists, strict=True):
        name, role = same[0][0], same[0][2]
        dims = [table.get(values) for values in zip(*(shape for _, shape, _ in same), strict=True)]
        if None in dims:
            raise ValueError(f"{family.name}: {name} {[shape for _, shape, _ in same]} is not explained")
        match = re.match(r"(.*?\.)(\d+)\.(.*)", name)
        if match:
            blocks.setdefault(int(match[2]), []).append((match[3], ",".join(map(str, dims)), role))
            parts.setdefault("prefix", [(match[1], "", "")])
        else:
            parts.setdefault("after" if blocks else "before", []).append((name, ",".join(map(str, dims)), role))
    for rows in blocks.values():
        kind = "moe" if any(role == "expert" for *_, role in rows) else "dense"
        if parts.setdefault(kind, rows) != rows:
            raise ValueError(f"{family.name}: blocks of one kind differ")
    return parts


def merged(lists: Iterable[Sequence[Entry]]) -> list[Entry]:
    """One order in which every list's order holds."""
    order: list[Entry] = []
    for rows in lists:
        place = 0
        for row in rows:
            if row in order:
                if order.index(row) < place:
                    raise ValueError(f"no common order: {row}")
                place = order.index(row) + 1
            else:
                order.insert(place, row)
                place += 1
    return order


def condition(present: set[Combination], everywhere: Sequence[Combination]) -> str:
    """Under which switches a row is present, as ``a&!b`` or ``a|b``; "" when it always is."""
    within: dict[str, set[Combination]] = {}
    switches = [key for key, _ in everywhere[0]]
    for size in range(len(switches) + 1):
        for keys in itertools.combinations(switches, size):
            for signs in itertools.product((True, False), repeat=size):
                wanted = dict(zip(keys, signs, strict=True))
                true = {c for c in everywhere if all(dict(c)[key] == on for key, on in wanted.items())}
                if true and true <= present:
                    within["&".join(key if on else f"!{key}" for key, on in wanted.items())] = true
    for several in (1, 2):
        for words in itertools.combinations(within, several):
            if set.union(*(within[word] for word in words)) == present:
                return "|".join(words)
    raise ValueError("no simple condition on the switches explains where a row is present")


def template(family: Family) -> dict[str, Any]:
    """The family's entry of structures.json."""
    everywhere: list[Combination] = [
        tuple(zip(family.switches, signs, strict=True))
        for signs in itertools.product((True, False), repeat=len(family.switches))
    ]
    built = {switched: entries(family, switched) for switched in everywhere}
    out: dict[str, Any] = {"prefix": built[everywhere[0]]["prefix"][0][0]}
    for part in ("before", "dense", "moe", "after"):
        lists = {switched: parts.get(part, []) for switched, parts in built.items()}
        rows = []
        for row in merged(sorted(lists.values(), key=len, reverse=True)):
            when = condition({switched for switched, rows in lists.items() if row in rows}, everywhere)
            for switch in family.switches:
                when = re.sub(rf"\b{switch}\b", family.symbol_of(switch), when)
            rows.append([*row, when] if when else [*row])
        if rows:
            out[part] = rows
    return out


def defaults(family: Family, rows: str) -> dict[str, Any]:
    """The class's values of what a config may leave out; nothing where they follow from the other sizes."""
    plain = {
        "model_type": family.name,
        "num_attention_heads": 12,
        "hidden_size": 12 * 34,
        **NEEDED.get(family.name, {}),
    }
    if family.name in NEEDED:
        plain["num_hidden_layers"] = BLOCKS
    small = config_of(plain).to_dict()
    names = {FIELDS[symbol]: key for symbol, key in family.named.items() if symbol in "mdfEKws"}
    others = [key for key in family.others if key in rows]
    names |= {key: key for key in (*others, *family.switches, *ALSO_READ, "multi_query")}
    if "kv_lora_rank" in family.others:
        del names["head_dim"]  # the class puts the rotary part's width there
    names |= {key: key for by in (DENSE_BY[family.dense_by] if family.dense_by else {},) for key in by}
    found: dict[str, Any] = {} if "f" in family.named else {"intermediate_size": "4*h"}
    for name, key in names.items():
        value = small.get(key, small.get(family.map.get(key, key)))
        follows = {"num_key_value_heads": 12, "head_dim": 34}.get(name)
        if name == "intermediate_size":
            found |= {name: "4*h"} if value in (None, 4 * 12 * 34) else {}
        elif (
            value is not None
            and value is not False
            and value != follows
            and value != []
            and name != "moe_layer_end_index"
        ):
            found[name] = value
    return found


def spellings(family: Family) -> dict[str, list[str]]:
    """Names in config.json of ModelSpec's fields, where they are not the fields' own names alone."""
    names = {FIELDS[symbol]: {key} for symbol, key in family.named.items()}
    names |= {key: {key} for key in ("num_hidden_layers", "max_position_embeddings")}
    for field, keys in names.items():
        keys |= {TAKEN_TOO.get(family.name, {}).get(field, min(keys))}
        for one, other in family.map.items():
            if keys & {one, other}:
                keys |= {one, other}
    return {
        field: sorted(keys, key=lambda key: (key == field, key)) for field, keys in names.items() if keys != {field}
    }


def derived(name: str) -> dict[str, Any]:
    """All that structures.json says of a family."""
    family = Family(name)
    made = template(family)
    small = {key: family.keys.get(family.map.get(key, key)) for key in SIZES}
    head = "latent" if "kv_lora_rank" in family.others else "own" if family.has_own_head else "hidden"
    entry = {
        "keys": spellings(family), "head_dim": head, "dense_by": family.dense_by, "only": ONLY.get(name, {}),
        "counted_shared": family.named.get("s") in COUNTED_SHARED,
        "defaults": defaults(family, json.dumps(made)), "sizes": {key: value for key, value in small.items() if value},
    }  # fmt: skip
    return {key: value for key, value in entry.items() if value} | made


def lines(value: Mapping[str, Any], depth: int = 1) -> Iterator[str]:
    """JSON with a row a line, so that a change is seen in a diff."""
    for i, (key, inner) in enumerate(value.items()):
        comma = "," if i + 1 < len(value) else ""
        rows = isinstance(inner, list) and inner and isinstance(inner[0], list)
        if rows or (isinstance(inner, dict) and depth < 3):
            brackets = "[]" if rows else "{}"
            yield f"{' ' * depth}{json.dumps(key)}: {brackets[0]}"
            if rows:
                yield ",\n".join(f"{' ' * (depth + 1)}{json.dumps(row)}" for row in inner)
            else:
                yield from lines(inner, depth + 1)
            yield f"{' ' * depth}{brackets[1]}{comma}"
        else:
            yield f"{' ' * depth}{json.dumps(key)}: {json.dumps(inner)}{comma}"


ABOUT = (
    "Parameter lists by family, written by scripts/derive_structures.py. A row: name, dimensions, role, and the switches "
    "under which it is there. Symbols: h hidden size, f MLP width, n heads, m key/value heads, d head_dim, q = n*d, "
    "k = m*d, V vocabulary, E experts, w width of an expert, s width of the shared experts together; else a config key. "
    "before and after the blocks; dense and moe are kinds of blocks, dense_by the key that says which are dense."
)


def main() -> None:
    wanted = sys.argv[1:] or sorted({str(model.config["model_type"]) for model in catalog.models()})
    known = json.loads(PATH.read_text("utf-8"))["families"] if PATH.is_file() and sys.argv[1:] else {}
    for name in wanted:
        known[name] = derived(name)
        print(name, ", ".join(part for part in ("dense", "moe") if part in known[name]), flush=True)
    data = {"about": ABOUT, "transformers": transformers.__version__, "families": dict(sorted(known.items()))}
    PATH.write_text("\n".join(["{", *lines(data), "}"]) + "\n", "utf-8")


if __name__ == "__main__":
    main()
