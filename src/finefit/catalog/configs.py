"""transformers' config.json -> the fields of a ModelSpec, for families whose shapes tests compare with transformers'.

Follows transformers 5's configuration classes: a key left out of config.json has its class's default there, so those
defaults that matter for shapes are repeated here. Another family that has the same keys is read as llama-shaped, with
a note. Declined: mixtures of experts and state-space models, whose blocks have other tensors than these.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError

# Defaults of transformers' configuration classes (5.24), only where hub configs leave the key out or it is seldom said.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"head_dim": 128},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "gemma2": {
        "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "tie_word_embeddings": True, "sliding_window": 4096, "max_position_embeddings": 131_072,
    },
    "phi3": {},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}  # fmt: skip
FAMILIES = tuple(DEFAULTS)
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OTHER_BLOCKS = {
    "num_experts": "a mixture of experts", "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts", "moe_intermediate_size": "a mixture of experts",
    "state_size": "a state-space model", "ssm_cfg": "a state-space model", "mamba_d_state": "a state-space model",
    "kv_lora_rank": "a model with latent attention",
}  # fmt: skip
# qkv_bias and use_bias: how other families (Qwen 1, StableLM, InternLM) say attention_bias
_BIAS_KEYS = ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias")


def fields_of_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Keyword arguments of ModelSpec, without its name. ModelError names every missing or unusable key at once."""
    text = _text_part(config)
    family = str(text.get("model_type", ""))
    if not family:
        raise ModelError(f"{name}: the config has no model_type", hint="is this a transformers config.json?")
    _decline_other_blocks(text, name, family)
    values = {**DEFAULTS.get(family, {}), **{key: value for key, value in text.items() if value is not None}}
    _explicit_none(values, text)
    whole = _whole_numbers(values, name, family)
    heads = whole["num_attention_heads"]
    return {
        **whole,
        "family": family,
        "num_key_value_heads": _count(values, "num_key_value_heads", heads, name),
        "head_dim": _count(values, "head_dim", whole["hidden_size"] // heads, name),
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "attention_bias": any(bool(values.get(key)) for key in _BIAS_KEYS),
        "mlp_bias": bool(values.get("mlp_bias", False)),
        "max_position_embeddings": _count(values, "max_position_embeddings", 4096, name),
        "dtype": _dtype(text, config),
        "sliding_window": _sliding_window(values, family),
        "attention_softcap": values.get("attn_logit_softcapping"),
        "logit_softcap": values.get("final_logit_softcapping"),
        "notes": _notes(config, text, family),
    }


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's own keys: a multimodal config nests them and keeps dtype and tying outside."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return dict(config)
    outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    text = {**outer, **nested}
    text.setdefault("model_type", f"{config.get('model_type', '')}_text")
    return text


def _decline_other_blocks(text: Mapping[str, Any], name: str, family: str) -> None:
    for key, kind in _OTHER_BLOCKS.items():
        value = text.get(key)
        if value and value != 1:
            raise ModelError(
                f"{name} is {kind} ('{family}', {key}: {value}), which cannot be planned yet",
                hint=f"dense decoders of these families can: {', '.join(FAMILIES)}",
            )


def _explicit_none(values: dict[str, Any], text: Mapping[str, Any]) -> None:
    """A null in the file switches a default off (Mistral v0.3 has ``"sliding_window": null``)."""
    for key in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        if key in text and text[key] is None:
            values.pop(key, None)


def _whole_numbers(values: Mapping[str, Any], name: str, family: str) -> dict[str, int]:
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        known = "" if family in FAMILIES else f"; the family '{family}' is not one finefit knows"
        raise ModelError(
            f"{name}: the config lacks {', '.join(missing)}{known}",
            hint=f"families whose shapes are verified: {', '.join(FAMILIES)}",
        )
    return {key: _count(values, key, 0, name) for key in _NEEDED}


def _count(values: Mapping[str, Any], key: str, default: int, name: str) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{name}: {key} must be a positive whole number, not {value!r}", hint="mend the config.json")
    return value


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    for source in (text, config):
        value = source.get("dtype") or source.get("torch_dtype")
        if isinstance(value, str):
            return value.removeprefix("torch.")
    return "float32"


def _sliding_window(values: Mapping[str, Any], family: str) -> int | None:
    """Tokens a windowed layer sees. Qwen and SmolLM3 name a window without using it unless a switch says so."""
    if family in ("qwen2", "qwen3", "smollm3") and not values.get("use_sliding_window", False):
        return None
    window = values.get("sliding_window")
    return window if isinstance(window, int) else None


def _notes(config: Mapping[str, Any], text: Mapping[str, Any], family: str) -> tuple[str, ...]:
    notes = []
    if family not in FAMILIES:
        notes.append(f"family '{family}' is not verified: read as llama-shaped")
    if isinstance(config.get("text_config"), Mapping):
        notes.append("multimodal model: only its text part is planned")
    if text.get("quantization_config"):
        method = text["quantization_config"].get("quant_method", "an unnamed method")
        notes.append(f"the checkpoint is quantised already ({method}): shapes come from config.json alone")
    if not (text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")):
        notes.append("config.json names no dtype: float32 is assumed")
    return tuple(notes)
