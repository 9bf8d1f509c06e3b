"""Adapters of peft's own benchmark: what their adapter_config.json sets, by the end of the case's id.

From ``method_comparison/MetaMathQA/experiments/*/llama-3.2-3B-*/adapter_config.json`` of huggingface/peft.
"""

from typing import Any

_QV = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
_LLAMA_3B = {"num_attention_heads": 24, "num_layers": 28, "num_transformer_submodules": 1, "token_dim": 3072,
             "task_type": "CAUSAL_LM"}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "adalora-rank32": {"peft_type": "ADALORA", **_QV, "init_r": 64, "target_r": 32, "total_step": 5000, "tinit": 200,
                       "tfinal": 500},
    "c3a-default": {"peft_type": "C3A", **_QV, "block_size": 64},
    "fourierft-n-frequency-5000": {"peft_type": "FOURIERFT", **_QV, "n_frequency": 5000, "scaling": 300},
    "glora-default": {"peft_type": "GLORA", **_QV},
    "glora-vector-paths": {"peft_type": "GLORA", **_QV, "config_A_B": "vector", "config_C": "vector"},
    "gralora-rank32": {"peft_type": "GRALORA", **_QV, "r": 32},
    "lily-rank896-a2-b2-s2p0": {"peft_type": "LILY", **_QV, "r": 896, "scaling": 2.0, "stride_A": 14},
    "loha-rank32": {"peft_type": "LOHA", **_QV, "r": 32, "alpha": 64},
    "miss-default": {"peft_type": "MISS", **_QV, "r": 64},
    "miss-mini": {"peft_type": "MISS", **_QV, "r": 64, "init_weights": "mini", "mini_r": 64},
    "oft-rank32": {"peft_type": "OFT", **_QV, "r": 32, "oft_block_size": 0},
    "prefixtuning-lr-0p001": {"peft_type": "PREFIX_TUNING", **_LLAMA_3B, "num_virtual_tokens": 200,
                              "encoder_hidden_size": 3072},
    "prompt-tuning-sample-vocab-lr-0p001": {"peft_type": "PROMPT_TUNING", **_LLAMA_3B, "num_virtual_tokens": 200},
    "ptuning-default": {"peft_type": "P_TUNING", **_LLAMA_3B, "num_virtual_tokens": 20, "encoder_hidden_size": 3072},
    "pvera-default": {"peft_type": "PVERA", **_QV, "r": 256},
    "randlora-default": {"peft_type": "RANDLORA", **_QV, "r": 32},
    "tinylora-weight-tying": {"peft_type": "TINYLORA", **_QV, "r": 2, "weight_tying": 1.0},
    "unilora-default": {"peft_type": "UNILORA", **_QV, "r": 32},
    "waveft-n-frequency-5000": {"peft_type": "WAVEFT", **_QV, "n_frequency": 5000},
}  # fmt: skip


def adapter_of(case: str) -> dict[str, Any]:
    """The settings of a case that has some; nothing for all others."""
    return ADAPTERS.get(case.removeprefix("peft-mm-"), {})
