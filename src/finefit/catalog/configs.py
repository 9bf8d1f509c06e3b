"""transformers' config.json -> the fields of a ModelSpec: other spellings, defaults of the classes, contradictions.

A key left out of config.json has its class's default in transformers; those that matter are in `structures.json`. A
family that the file does not have is built by transformers in a subprocess (`derived`); where torch is not installed it
is read as llama-shaped, with a note. Numbers that cannot be are refused here, each with one message.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ModelError, did_you_mean
from . import derived, structures

_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_LARGEST = {"num_hidden_layers": 2_000, "max_position_embeddings": 10**10}
_LARGEST_SIZE = 10**8  # no dimension of any model comes near; beyond it is a slip or a joke
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Keys that say which blocks have experts, and the least they may be.
_LAYER_RULES = {
    "first_k_dense_replace": 0, "decoder_sparse_step": 1, "moe_layer_interval": 1, "moe_layer_start_index": 0,
    "moe_layer_end_index": -1,
}  # fmt: skip
_OTHER_BLOCKS = {
    "num_experts": "a mixture of experts", "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts", "moe_intermediate_size": "a mixture of experts",
    "state_size": "a state-space model", "ssm_cfg": "a state-space model", "mamba_d_state": "a state-space model",
    "kv_lora_rank": "a model with latent attention",
}  # fmt: skip
# qkv_bias, use_bias, bias: how other families (Qwen 1, StableLM, InternLM) say attention_bias
_BIAS_KEYS = ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias")
_ALWAYS_BIASED = ("qwen2",)  # on q, k and v, without a key that says so
_SOFT = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
# The part of a head that rotary positions turn where the config does not say: the classes' defaults (transformers 5.24).
_TURNED = {"gpt_neox": 0.25, "stablelm": 0.25, **dict.fromkeys(("phi", "glm", "glm4", "glm4_moe", "nemotron"), 0.5)}
_TURNED_DIM = {"gptj": 64}
_BUILT_EXPERTS = {
    "num_experts": "num_experts", "experts_per_token": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
}  # fmt: skip
# What transformers 5.24 knows an activation by, and the keys that families name theirs under.
_ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu", "relu2",
    "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
)  # fmt: skip
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "activation")
# torch's names of what a checkpoint may be stored in, and its other names for three of them
_DTYPES = (
    "float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "uint8", "int8", "int16", "int32", "int64",
)  # fmt: skip
_DTYPE_ALIASES = {"float": "float32", "half": "float16", "double": "float64"}
_OWN = "its attention is its own and takes whole rows: examples are padded, not packed"
_MEND = "mend the config.json"
_INSTALL = "pip install 'finefit[train]'"


def fields_of_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Keyword arguments of ModelSpec, without its name; ``rows`` where the family has no template.

    ModelError names every missing key at once, else the first unusable or contradictory one.
    """
    text = _text_part(config, name)
    family = text.get("model_type")
    if not isinstance(family, str) or not family:
        raise ModelError(f"{name}: the config has no model_type", hint="is this a transformers config.json?")
    entry, built = structures.entry_of(family), {}
    if not _is_covered(entry, text):
        built, entry = _built(text, family, name), {}
        text = {**text, **built["config"]}
    values = _values(text, entry, name, is_nested=config.get("text_config") is not None)
    _check_activation(values, name)
    sizes = _sizes(values, entry, name)
    heads = _heads(values, entry, sizes, name)
    fields = {
        **sizes,
        **heads,
        **(_experts(values, entry, sizes, name) or built.get("experts", {})),
        "family": family,
        "tie_word_embeddings": _flag(values, "tie_word_embeddings", name),
        "attention_bias": _attention_bias(values, entry, family, name),
        "mlp_bias": _flag(values, "mlp_bias", name),
        "max_position_embeddings": _count(values, "max_position_embeddings", name, 4096),
        "dtype": _dtype(text, config, name),
        "sliding_window": _sliding_window(values, family, name),
        "attention_softcap": _softcap(values, "attn_logit_softcapping", name),
        "logit_softcap": _softcap(values, "final_logit_softcapping", name),
        "rotary_dim": _rotary_dim(values, family, heads["head_dim"], name),
        "options": _options(values, family, name) if entry else (),
        "notes": _notes(config, text, (built.get("source", ""), _OWN if family in structures.OWN_ATTENTION else "")),
    }
    return {**fields, "rows": built["rows"]} if built.get("rows") else fields


@contextmanager
def told_at(path: Path, name: str) -> Iterator[None]:
    """An error of a config says the file it is in, where it does not yet, rather than the model's name alone."""
    try:
        yield
    except ModelError as error:
        if error.where:
            raise
        raise ModelError(error.message.removeprefix(f"{name}: "), where=str(path), hint=error.hint) from error


class _Values(dict[str, Any]):
    """A config under ModelSpec's names; ``said`` is how the file itself calls those it spells otherwise."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.said: dict[str, str] = {}


def _said(values: Mapping[str, Any], key: str) -> str:
    return values.said.get(key, key) if isinstance(values, _Values) else key


def _text_part(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The language model's own keys: a multimodal config nests them and keeps dtype and tying outside."""
    nested = config.get("text_config")
    if nested is None:
        return dict(config)
    if not isinstance(nested, Mapping) or nested.get("text_config") is not None:
        raise ModelError(f"{name}: text_config must be an object with the language model's keys", hint=_MEND)
    outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    text = {**outer, **nested}
    text.setdefault("model_type", f"{config.get('model_type', '')}_text")
    return text


def _is_covered(entry: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether the family has a template that holds for this config: some hold for one value of a key only."""
    for key, (wanted,) in entry.get("only", {}).items():
        if text.get(key) is not None and text[key] != (text.get(wanted) if isinstance(wanted, str) else wanted):
            return False
    return bool(entry)


def depth_key(config: Mapping[str, Any]) -> str:
    """How this config.json calls its number of blocks; the usual word where it does not say."""
    return next((key for key in _LAYER_KEYS if key in config), _LAYER_KEYS[0])


def _built(text: Mapping[str, Any], family: str, name: str) -> dict[str, Any]:
    """Rows and sizes as transformers builds this config; without torch no rows: it is read as llama-shaped."""
    for key in _LAYER_KEYS:
        if key in text:
            _count(text, key, name)
    found = derived.built(text, name)
    if found:
        sizes: dict[str, Any] = dict(found["config"])
        sizes.setdefault("intermediate_size", 4 * sizes.get("hidden_size", 1))
        sizes.setdefault("head_dim", max(1, sizes.get("hidden_size", 1) // sizes.get("num_attention_heads", 1)))
        rows = tuple((row[0], tuple(row[1]), row[2]) for row in found["rows"])
        experts = {key: sizes.get(said, 0) for key, said in _BUILT_EXPERTS.items()}
        source = (
            f"family '{family}' is not catalogued: its tensors are those transformers {found['transformers']} builds"
        )
        return {"source": source, "config": sizes, "rows": rows, "experts": experts if all(experts.values()) else {}}
    for key, kind in _OTHER_BLOCKS.items():
        if text.get(key) not in (None, False, 0, 1):
            message = f"{name} is {kind} ('{family}', {key}: {_shown(text[key])}), which only transformers can read"
            raise ModelError(message, hint=_INSTALL)
    if structures.entry_of(family):
        raise ModelError(f"{name}: only transformers can read this form of a '{family}' config", hint=_INSTALL)
    source = f"family '{family}' is not verified: read as llama-shaped"
    return {"source": source, "config": {}, "rows": (), "experts": {}}


def _values(text: Mapping[str, Any], entry: Mapping[str, Any], name: str, *, is_nested: bool) -> _Values:
    """Keys under ModelSpec's names, with the class's defaults; a nested config leaves out sizes that are the default."""
    defaults = {**(entry.get("sizes", {}) if is_nested else {}), **entry.get("defaults", {})}
    values = _Values({**defaults, **{key: value for key, value in text.items() if value is not None}})
    for field, spellings in entry.get("keys", {}).items():
        there = [key for key in spellings if text.get(key) is not None]
        values[field] = text[there[0]] if there else defaults.get(field)
        if there:
            values.said[field] = there[0]
        if values[field] is None:
            del values[field]
    for key, value in text.items():
        # a null switches off what is on by default: Mistral v0.3 has "sliding_window": null
        if value is None and (key in _SOFT or key == "q_lora_rank"):
            values.pop(key, None)
    if values.get("intermediate_size") == "4*h" and "hidden_size" in values:
        values["intermediate_size"] = 4 * _count(values, "hidden_size", name)
    return values


def _sizes(values: Mapping[str, Any], entry: Mapping[str, Any], name: str) -> dict[str, int]:
    """The sizes every model has."""
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        keys = ", ".join(entry.get("keys", {}).get(key, [key])[0] for key in missing)
        known = "" if entry else ", and its family is not one finefit knows"
        hint = _MEND if entry else f"families that are known: {', '.join(structures.families())}"
        raise ModelError(f"{name}: the config lacks {keys}{known}", hint=hint)
    return {key: _count(values, key, name) for key in _NEEDED}


def _heads(values: Mapping[str, Any], entry: Mapping[str, Any], sizes: Mapping[str, int], name: str) -> dict[str, int]:
    """Key/value heads and the width of a head, free of contradictions."""
    hidden, heads, rule = sizes["hidden_size"], sizes["num_attention_heads"], entry.get("head_dim")
    if rule == "latent":
        width = sum(_count(values, key, name) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
        return {"num_key_value_heads": heads, "head_dim": width}
    groups = _count(values, "num_key_value_heads", name, heads)
    if "multi_query" in values and not values.get("new_decoder_architecture"):
        groups = 1 if _flag(values, "multi_query", name) else heads
    if groups > heads or heads % groups:
        message = f"{name}: {heads} attention heads cannot share {groups} key/value heads"
        raise ModelError(message, hint=f"{_MEND}: num_attention_heads is a multiple of num_key_value_heads")
    if hidden % heads and (rule == "hidden" or "head_dim" not in values):
        message = f"{name}: {_said(values, 'hidden_size')} {hidden} cannot be divided among {heads} attention heads"
        raise ModelError(message, hint=_MEND)
    width = _count(values, "head_dim", name, hidden // heads or 1)
    if rule == "hidden" and width * heads != hidden:
        message = f"{name}: {heads} heads of head_dim {width} contradict {_said(values, 'hidden_size')} {hidden}"
        raise ModelError(message, hint=f"{_MEND}: in this family the heads together are as wide as the hidden size")
    return {"num_key_value_heads": groups, "head_dim": width}


def _experts(
    values: Mapping[str, Any], entry: Mapping[str, Any], sizes: Mapping[str, int], name: str
) -> dict[str, Any]:
    """What a mixture of experts has besides; nothing for a dense model."""
    if "moe" not in entry:
        return {}
    missing = [key for key in ("num_experts", "experts_per_token") if key not in values]
    if missing:
        keys = ", ".join(entry["keys"].get(key, [key])[0] for key in missing)
        raise ModelError(f"{name}: the config lacks {keys}", hint=_MEND)
    experts, per_token = (_count(values, key, name) for key in ("num_experts", "experts_per_token"))
    if per_token > experts:
        raise ModelError(f"{name}: {per_token} experts a token, but there are {experts}", hint=_MEND)
    width = _count(values, "moe_intermediate_size", name, sizes["intermediate_size"])
    shared = _count(values, "shared_intermediate_size", name, 0, least=0)
    for key, least in _LAYER_RULES.items():
        _count(values, key, name, least, least)
    only = values.get("mlp_only_layers", [])
    if not isinstance(only, list) or not all(isinstance(layer, int) for layer in only):
        raise ModelError(f"{name}: mlp_only_layers must be a list of whole numbers, not {_shown(only)}", hint=_MEND)
    return {
        "num_experts": experts,
        "experts_per_token": per_token,
        "moe_intermediate_size": width,
        "shared_intermediate_size": shared * width if entry.get("counted_shared") else shared,
        "dense_layers": structures.dense_layers(str(entry.get("dense_by")), values, sizes["num_hidden_layers"]),
    }


def _options(values: Mapping[str, Any], family: str, name: str) -> tuple[tuple[str, int], ...]:
    """The config keys that the family's template names besides ModelSpec's own fields, as numbers."""
    others = sorted(structures.needed(family) - {*structures.SYMBOLS, *structures.FIELDS, "q", "k"})
    flags = structures.switches(family)
    return tuple(
        (key, int(_flag(values, key, name)) if key in flags else _count(values, key, name, 0, least=0))
        for key in others
    )


def _count(values: Mapping[str, Any], key: str, name: str, default: int | None = None, least: int = 1) -> int:
    """A whole number from ``least`` on; ModelError for anything else, and for what no model has."""
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = "a positive whole number" if least == 1 else f"a whole number from {least} on"
        raise ModelError(f"{name}: {_said(values, key)} must be {kind}, not {_shown(value)}", hint=_MEND)
    if value > _LARGEST.get(key, _LARGEST_SIZE):
        raise ModelError(f"{name}: {_said(values, key)} is {_shown(value)}, more than any model has", hint=_MEND)
    return value


def _flag(values: Mapping[str, Any], key: str, name: str) -> bool:
    value = values.get(key, False)
    if value not in (True, False):
        raise ModelError(f"{name}: {key} must be true or false, not {_shown(value)}", hint=_MEND)
    return bool(value)


def _shown(value: Any) -> str:
    """A value as a message can hold it: a number of a thousand digits would bury what is said about it."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"about {'-' if value < 0 else ''}10^{int(math.log10(abs(value)))}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _attention_bias(values: Mapping[str, Any], entry: Mapping[str, Any], family: str, name: str) -> bool:
    own = [key for key in _BIAS_KEYS if not entry or key in structures.needed(family)]
    return family in _ALWAYS_BIASED or any(_flag(values, key, name) for key in own)


def _check_activation(values: Mapping[str, Any], name: str) -> None:
    for key in _ACTIVATION_KEYS:
        said = values.get(key)
        if said is not None and (not isinstance(said, str) or said not in _ACTIVATIONS):
            hint = did_you_mean(str(said), _ACTIVATIONS) or f"known: {', '.join(_ACTIVATIONS)}"
            raise ModelError(f"{name}: {key} {_shown(said)} is no activation that transformers knows", hint=hint)


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any], name: str) -> str:
    """torch's name of the checkpoint's type; "auto" and types by part of the model name none."""
    for source in (text, config):
        for key in ("dtype", "torch_dtype"):
            said = source.get(key)
            if said in (None, "", "auto") or isinstance(said, Mapping):
                continue
            word = str(said).removeprefix("torch.")
            if word in _DTYPES or word in _DTYPE_ALIASES:
                return _DTYPE_ALIASES.get(word, word)
            hint = did_you_mean(word, _DTYPES) or f"one of {', '.join(_DTYPES)}"
            raise ModelError(f"{name}: {key} {_shown(said)} is no type that torch knows", hint=hint)
    return "float32"


def _sliding_window(values: Mapping[str, Any], family: str, name: str) -> int | None:
    """Tokens a windowed layer sees. Qwen and SmolLM3 name a window without using it unless a switch says so."""
    if "sliding_window" not in values:
        return None
    window = _count(values, "sliding_window", name, least=0) or None
    switched = family.startswith("qwen") or family == "smollm3"
    return None if switched and not values.get("use_sliding_window", False) else window


def _rotary_dim(values: Mapping[str, Any], family: str, head_dim: int, name: str) -> int:
    """Turned dimensions of a head, by a part of it or their number; 0 where all are, or a head's parts are its own."""
    rope = values.get("rope_parameters")
    said = [values.get("partial_rotary_factor"), values.get("rotary_pct") if family == "gpt_neox" else None]
    said += [rope.get("partial_rotary_factor")] if isinstance(rope, Mapping) else []
    part = next((number for number in said if number is not None), _TURNED.get(family, 1.0))
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise ModelError(f"{name}: the turned part of a head must be from 0 to 1, not {_shown(part)}", hint=_MEND)
    turned = int(head_dim * part)
    if part == 1 and ("rotary_dim" in values or family in _TURNED_DIM):
        turned = min(head_dim, _count(values, "rotary_dim", name, _TURNED_DIM.get(family)))
    return turned if turned < head_dim and values.get("qk_rope_head_dim") is None else 0


def _softcap(values: Mapping[str, Any], key: str, name: str) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{name}: {key} must be a positive number, not {_shown(value)}", hint=_MEND)
    return value


def _notes(config: Mapping[str, Any], text: Mapping[str, Any], said: tuple[str, ...]) -> tuple[str, ...]:
    notes = [note for note in said if note]
    if config.get("text_config") is not None:
        notes.append("multimodal model: only its text part is planned")
    quantised = text.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        notes.append(
            f"the checkpoint is quantised already ({method or 'an unnamed method'}): shapes come from config.json alone"
        )
    if not (text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")):
        notes.append("config.json names no dtype: float32 is assumed")
    return tuple(notes)
