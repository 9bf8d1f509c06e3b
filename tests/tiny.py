"""Tiny models, examples and runs that tests of the technical core share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from finefit import models, predict, trace
from finefit.build import build
from finefit.layout import Layout, Micro, layout_of
from finefit.ledger import Ledger
from finefit.nn.optimizers import Optimizing
from finefit.run import Example, MicroBatch, Run, summed_loss
from finefit.spec import ModelSpec
from finefit.techniques import Precision, Technique, in_order

CPU = torch.device("cpu")
VOCAB = 211


def config_of(family: str = "llama", **changes: Any) -> Any:
    """Four blocks of width 64; ``changes`` are the family's own config keys."""
    shape = {
        "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "vocab_size": VOCAB, "max_position_embeddings": 1024, "tie_word_embeddings": True,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if family in OWN_HEADS:
        del shape["head_dim"]
    return AutoConfig.for_model(family, **{**shape, **changes})


# Windows smaller than the tests' sequences, soft caps that bite, blocks of every kind a family mixes.
GEMMA = {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24, "hidden_activation": "gelu_pytorch_tanh"}
EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1}
LATENT = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with scaled rotary": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen2": {},
    "qwen2 with windows": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 20},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "gemma3_text": {**GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": 20},
    "smollm3": {"no_rope_layer_interval": 2},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "cohere": {"logit_scale": 0.25},
    "cohere with norms of heads": {"use_qk_norm": True},
    "deepseek_v2": {**LATENT, **EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, **EXPERTS, "q_lora_rank": 40, "first_k_dense_replace": 1},
    "dots1": {**EXPERTS, "first_k_dense_replace": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_end_index": 2},
    "exaone": {},
    "exaone4": {"sliding_window": 20, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "gemma": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {**EXPERTS, "first_k_dense_replace": 1, "use_qk_norm": True},
    "gpt_bigcode": {**NO_DROPOUT, "multi_query": True},
    "gpt_neox": {},
    "gptj": {**NO_DROPOUT, "rotary_dim": 8},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2, "logits_scaling": 4.0},
    "helium": {},
    "internlm3": {},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 20},
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "opt": {"dropout": 0.0, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {},
    "phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2, "lm_head_bias": True},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "bloom": {},
    "falcon": {},
    "falcon with alibi": {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
    "falcon with groups": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2},
    "gpt2": NO_DROPOUT,
    "gpt_neo": {
        "attention_types": [[["global", "local", "global"], 1]], "attention_layers": ["global", "local", "global"],
        "window_size": 20, "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0,
    },
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 20},
    "mpt": {},
    "nemotron": {},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {"sliding_window": 20, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}  # fmt: skip
OWN_HEADS = (  # no head_dim
    "bloom", "deepseek_v2", "deepseek_v3", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "olmoe",
    "opt", "phi", "stablelm",
)  # fmt: skip


def family_config(name: str) -> Any:
    """Three blocks of a key of ``FAMILIES``; its first word is the family."""
    return config_of(name.split(" ")[0], **{"num_hidden_layers": 3, **FAMILIES[name]})


def spec_of(config: Any) -> ModelSpec:
    return ModelSpec.from_config(config.to_dict(), "tiny")


def examples_of(lengths: Sequence[int], seed: int = 0) -> list[Example]:
    """Random tokens; the second half of each example is labelled."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [(row, [int(2 * i >= len(row)) for i in range(len(row))]) for row in ids]


def run_of(techniques: Sequence[Technique] = (), config: Any = None, seed: int = 0) -> Run:
    """A run of a tiny model with small random weights; fp32 unless a Precision is among the techniques."""
    if not any(isinstance(t, Precision) for t in techniques):
        techniques = (Precision("fp32"), *techniques)
    return build(config or config_of(), techniques, models.fill_random(seed), CPU, Optimizing(), seed)


def micro_of(batch: MicroBatch) -> Micro:
    longest = max(end - start for start, end in zip(batch.bounds, batch.bounds[1:], strict=False))
    return Micro(batch.ids_bs.numel(), longest, len(batch.label_l))


def layout_for(config: Any, techniques: Sequence[Technique], batch: MicroBatch) -> Layout:
    """The paper half: the layout after all techniques."""
    layout = layout_of(spec_of(config), micro_of(batch))
    for technique in in_order(tuple(techniques)):
        layout = technique.rewrite(layout)
    return layout


def measured(run: Run, batch: MicroBatch, micro_steps: int = 1) -> Ledger:
    """The real half: one step on real tensors under a ledger."""
    ledger = Ledger()
    trace.run_step(run, batch, ledger, micro_steps)
    return ledger


def predicted(config: Any, techniques: Sequence[Technique], batch: MicroBatch, micro_steps: int = 1) -> Any:
    return predict.footprint(replace(layout_for(config, techniques, batch), micro_steps=micro_steps))


def loss_and_gradients(run: Run, batches: Sequence[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
    """Loss per labelled token and all gradients, as the training loop forms them."""
    run.model.zero_grad(set_to_none=True)
    labelled = sum(len(batch.label_l) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = summed_loss(run, batch) / labelled
        loss.backward()
        total += loss.item()
    return total, gradients(run.model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def stock(config: Any, run: Run | None = None, attention: str = "eager") -> nn.Module:
    """Transformers' own model, untouched, with the weights of ``run``."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_dict()), attn_implementation=attention)
    if run is not None:
        model.load_state_dict(run.model.state_dict(), strict=False)
    return model.train()


def stock_loss_and_gradients(model: nn.Module, examples: Sequence[Example]) -> tuple[float, dict[str, Tensor]]:
    """Each example alone through the stock model: cross-entropy of its full logits per labelled token of all."""
    model.zero_grad(set_to_none=True)
    total, count = 0.0, sum(sum(mask[1:]) for _, mask in examples)
    for ids, mask in examples:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        labelled = torch.tensor(mask[1:], dtype=torch.bool)
        target = torch.tensor(ids[1:], dtype=torch.long).masked_fill(~labelled, -100)
        loss = nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of any tensor, and its name; both sides must have the same tensors."""
    assert found.keys() == expected.keys()
    errors = ((relative_error(found[name], expected[name]), name) for name in expected)
    return max(errors)


def relative_error(found: Tensor, expected: Tensor) -> float:
    reference = expected.double()
    return float((found.double() - reference).norm() / reference.norm().clamp_min(1e-30))
