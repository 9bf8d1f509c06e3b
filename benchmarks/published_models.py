"""Models of published cases that are not in the catalogue: facts of their config.json, in transformers' keys.

Where a model's own code is not part of transformers, the family that computes alike stands for it (said in ``AS``).
"""

from typing import Any

from finefit.catalog import find_model

ROW = 0
"""As many positions as a row has tokens."""


def _llama(h: int, f: int, depth: int, n: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": h, "intermediate_size": f, "num_hidden_layers": depth,
        "num_attention_heads": n, "num_key_value_heads": n, "vocab_size": vocab, "hidden_act": "silu",
        "tie_word_embeddings": False, "max_position_embeddings": 8192, **more,
    }  # fmt: skip


def _mpt(d: int, depth: int, n: int) -> dict[str, Any]:
    """MPT holds what GPT-2 does without dropout: one product for q, k and v, learned positions for just the row."""
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return {"model_type": "gpt2", "n_embd": d, "n_layer": depth, "n_head": n, "vocab_size": 50368, "n_positions": ROW,
            "activation_function": "gelu", "tie_word_embeddings": True, **none}  # fmt: skip


def _gpt2(d: int, depth: int, n: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": d, "n_layer": depth, "n_head": n, "vocab_size": 50304, "n_positions": 1024}


# Qwen 1 and ChatGLM 3 compute as Qwen 2 does: biases on q, k, v; Baichuan 2 as Llama, attention with a bias (ALiBi).
AS = "stands for a model whose code is not in transformers"
MODELS: dict[str, dict[str, Any]] = {
    "Qwen-1_8B-Chat": _llama(2048, 5504, 24, 16, 151936, model_type="qwen2"),
    "Qwen-7B-Chat": _llama(4096, 11008, 32, 32, 151936, model_type="qwen2"),
    "Qwen-14B-Chat": _llama(5120, 13696, 40, 40, 152064, model_type="qwen2"),
    "Qwen-72B-Chat": _llama(8192, 24576, 80, 64, 152064, model_type="qwen2"),
    "chatglm3-6b": _llama(4096, 13696, 28, 32, 65024, model_type="qwen2", num_key_value_heads=2),
    "Baichuan-7B": _llama(4096, 11008, 32, 32, 64000),
    "Baichuan2-7B-Chat": _llama(4096, 11008, 32, 32, 125696),
    "Baichuan2-13B-Chat": _llama(5120, 13696, 40, 40, 125696),
    "TinyLlama-1.1B-intermediate-step-1431k-3T": _llama(2048, 5632, 22, 32, 32000, num_key_value_heads=4),
    "AFM-4.5B": {**_llama(2560, 18432, 36, 20, 128000, num_key_value_heads=4, head_dim=128), "model_type": "arcee",
                 "hidden_act": "relu2"},
    "GPT-2 1.5B (48 layers, hidden 1600, 16 heads)": _gpt2(1600, 48, 16),
    "GPT-2 10B (50 layers, hidden 4096, 32 heads)": _gpt2(4096, 50, 32),
    "MPT-style 125m": _mpt(768, 12, 12), "MPT-style 350m": _mpt(1024, 24, 16), "MPT-style 760m": _mpt(1536, 24, 12),
    "MPT-style 1b": _mpt(2048, 24, 16), "MPT-style 3b": _mpt(2560, 32, 20), "MPT-style 7b": _mpt(4096, 32, 32),
    "MPT-style 13b": _mpt(5120, 40, 40), "MPT-style 30b": _mpt(7168, 48, 56), "MPT-style 70b": _mpt(8192, 80, 64),
    "BioGPT-Large": {"model_type": "biogpt", "hidden_size": 1600, "intermediate_size": 6400, "num_hidden_layers": 48,
                     "num_attention_heads": 25, "vocab_size": 57717, "max_position_embeddings": 2048},
    "codegen-2B-nl": {"model_type": "codegen", "n_embd": 2560, "n_layer": 32, "n_head": 32, "vocab_size": 51200,
                      "n_positions": 2048, "n_ctx": 2048, "rotary_dim": 64},
    "codegen-350M-mono": {"model_type": "codegen", "n_embd": 1024, "n_layer": 20, "n_head": 16, "vocab_size": 51200,
                          "n_positions": 2048, "n_ctx": 2048, "rotary_dim": 32},
    "gpt_bigcode-santacoder": {"model_type": "gpt_bigcode", "n_embd": 2048, "n_layer": 24, "n_head": 16,
                               "n_inner": 8192, "vocab_size": 49280, "n_positions": 2048, "multi_query": True},
    "gpt-neo-1.3B": {"model_type": "gpt_neo", "hidden_size": 2048, "num_layers": 24, "num_heads": 16,
                     "vocab_size": 50257, "max_position_embeddings": 2048, "window_size": 256,
                     "attention_types": [[["global", "local"], 12]]},
    "opt-350m": {"model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24,
                 "num_attention_heads": 16, "vocab_size": 50272, "word_embed_proj_dim": 512,
                 "do_layer_norm_before": False},
}  # fmt: skip
for _name in ("Devstral-Small-2507", "Magistral-Small-2506", "Magistral-Small-2507", "Mistral-Small-Instruct-2409"):
    MODELS[_name] = _llama(5120, 32768, 40, 32, 131072, model_type="mistral", num_key_value_heads=8, head_dim=128)
MODELS["Mistral-Small-Instruct-2409"] |= {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
                                          "num_attention_heads": 48, "vocab_size": 32768}  # fmt: skip


def config_of(name: str | None) -> dict[str, Any] | None:
    """The config of a published model's name: the catalogue's, or one of these."""
    if not name:
        return None
    base = name.split("/")[-1]
    for suffix in ("-unsloth-bnb-4bit", "-bnb-4bit", "-GPTQ", "-AWQ"):
        base = base.removesuffix(suffix)
    for text in (name, base, base.removesuffix("-hf")):
        found = find_model(text)
        if found is not None:
            return dict(found.config)
    own = MODELS.get(base) or MODELS.get(name)
    return dict(own) if own else None
