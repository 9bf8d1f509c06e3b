"""Compares ``finefit.stacks.litgpt`` with the real model code, by a fake step of three to five blocks.

Needs one of them importable: ``lit_gpt`` (Lightning-AI/litgpt at commit 069f6584, not on PyPI) or ``litgpt==0.4.12``,
and lightning. The 4-bit layers of both are bitsandbytes' and compared by closed forms in the tests.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from common import BLOCKS, compared, fake_run, finish, numbers

from finefit.foreign import ForeignRun
from finefit.stacks.base import Stepped
from finefit.stacks.litgpt import build

sys.path.append(sys.path.pop(0))  # the package of this file's name comes first
OLD = find_spec("lit_gpt") is not None
PACKAGE, TOOL = ("lit_gpt", "lit_gpt") if OLD else ("litgpt", "litgpt")

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 512,
}
GROUPED = {**LLAMA, "num_key_value_heads": 2}
PHI = {**LLAMA, "model_type": "phi", "intermediate_size": 1024, "partial_rotary_factor": 0.5}
NEOX = {**LLAMA, "model_type": "gpt_neox", "intermediate_size": 1024, "rotary_pct": 0.25}
FALCON = {**LLAMA, "model_type": "falcon", "intermediate_size": 1024, "multi_query": True}
GEMMA = {**LLAMA, "model_type": "gemma", "head_dim": 128, "num_key_value_heads": 1}

_KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "parallel_residual": False,
        "bias": False,
        "mlp": "LLaMAMLP",
        "norm": "RMSNorm",
        "rotary_percentage": 1.0,
    },
    "phi": {"shared_attention_norm": True, "lm_head_bias": True, "rotary_percentage": 0.5},
    "gpt_neox": {"rotary_percentage": 0.25},
    "falcon": {"shared_attention_norm": True, "bias": False, "rotary_percentage": 1.0, "n_query_groups": 1},
    "gemma": {
        "parallel_residual": False,
        "bias": False,
        "mlp": "GemmaMLP",
        "norm": "RMSNorm",
        "rotary_percentage": 1.0,
    },
}


def theirs(config: dict[str, Any], run: ForeignRun, depth: int) -> Stepped:
    """The real model under Fabric's conversions and the real loop's names."""
    model = _model(config, run, depth)
    for name, p in model.named_parameters():
        p.requires_grad_(run.method == "full" or _trained(run.method, name))
    blocks = model.transformer.h
    loop: dict[str, Any] = {}
    chunked_cross_entropy = import_module(f"{PACKAGE}.utils").chunked_cross_entropy

    def loss(ids: torch.Tensor, labels: torch.Tensor, ledger: Any) -> torch.Tensor:
        if OLD:  # the longest row comes first, and no other as long
            loop.clear()
        head = model.lm_head.register_forward_pre_hook(lambda *_: (ledger.mark("loss"), head.remove(), None)[2])
        out = model(ids) if run.method == "full" else model(ids, lm_head_chunk_size=128)
        if isinstance(out, list):
            loop["logits"] = [chunk.float() for chunk in out]
            del out
            loop["logits"][-1] = loop["logits"][-1][..., :-1, :]
            loop["loss"] = chunked_cross_entropy(loop["logits"], labels[..., 1:])
        else:
            loop["logits"] = out.float()
            del out
            size = {"chunk_size": 0} if OLD else {}
            loop["loss"] = chunked_cross_entropy(loop["logits"][..., :-1, :], labels[..., 1:], **size)
        return loop["loss"]

    return Stepped(model, blocks, loss)


def _trained(method: str, name: str) -> bool:
    words = {"lora": ("lora_",), "adapter": ("adapter_wte", "gating_factor")}
    words["adapter_v2"] = (*words["adapter"], "adapter_scale", "adapter_bias", "norm_1", "norm_2", "ln_f")
    return any(word in name for word in words[method])


def _model(config: dict[str, Any], run: ForeignRun, depth: int) -> Any:
    module = import_module(f"{PACKAGE}.{ {'full': 'model'}.get(run.method, run.method) }")
    kind = dict(_KINDS[config["model_type"]])
    mlp, norm = kind.pop("mlp", "GptNeoxMLP"), kind.pop("norm", "LayerNorm")
    kind |= {"_mlp_class": mlp, "_norm_class": norm} if OLD else {"mlp_class_name": mlp, "norm_class_name": norm}
    if config["model_type"] == "gemma":
        kind |= {"scale_embeddings": True, "name": "Gemma-x"}
    if "head_dim" in config:
        kind["head_size"] = config["head_dim"]
    if run.method == "lora":
        prefix = "to_" if OLD else "lora_"
        kind |= {f"{prefix}{part}": True for part in _parts(run)}
        names = ("r", "dropout") if OLD else ("lora_r", "lora_dropout")
        kind |= {names[0]: run.rank, names[1]: run.lora_dropout}
    kind.setdefault("n_query_groups", config.get("num_key_value_heads") or config["num_attention_heads"])
    torch.set_default_dtype(torch.bfloat16)
    model = module.GPT(
        module.Config(
            n_layer=depth, n_embd=config["hidden_size"], n_head=config["num_attention_heads"], block_size=2048,
            intermediate_size=config["intermediate_size"], padded_vocab_size=config["vocab_size"], **kind,
        )
    ) if run.method != "full" else module.GPT(
        import_module(f"{PACKAGE}.config").Config(
            n_layer=depth, n_embd=config["hidden_size"], n_head=config["num_attention_heads"], block_size=2048,
            intermediate_size=config["intermediate_size"], padded_vocab_size=config["vocab_size"], **kind,
        )
    )  # fmt: skip
    torch.set_default_dtype(torch.float32)
    if run.method.startswith("adapter"):  # the loop validates first, and that fills the cache of the prefix
        with torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.int64))
        for block in model.transformer.h:
            for i, cached in enumerate(getattr(block.attn, "adapter_kv_cache", None) or ()):
                block.attn.register_buffer(f"counted_{i}", cached)
    model.max_seq_length = run.max_length
    return model


def _parts(run: ForeignRun) -> list[str]:
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "projection", "down_proj": "mlp"}
    return [names.get(target, "head") for target in run.targets]


def main() -> int:
    cases: dict[str, tuple[dict[str, Any], ForeignRun, int]] = {}
    everything = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "lm_head")
    families = {"llama": LLAMA, "grouped": GROUPED, "phi": PHI, "neox": NEOX, **({} if OLD else {"falcon": FALCON})}
    for name, config in families.items():
        run = fake_run(tool=TOOL, rank=8, targets=("q_proj", "v_proj"), lora_dropout=0.05)
        cases[f"{name} lora"] = (config, run, BLOCKS)
    two = fake_run(tool=TOOL, rank=8, targets=("q_proj", "v_proj"), lora_dropout=0.05, micro_batch_size=2)
    cases["llama lora of two rows"] = (LLAMA, two, BLOCKS)
    cases["grouped lora everywhere"] = (GROUPED, fake_run(tool=TOOL, rank=8, targets=everything), BLOCKS)
    cases["llama full"] = (LLAMA, fake_run(tool=TOOL, method="full"), BLOCKS)
    cases["neox full of two rows"] = (NEOX, fake_run(tool=TOOL, method="full", micro_batch_size=2), BLOCKS)
    for method in ("adapter", "adapter_v2"):
        cases[f"neox {method}"] = (NEOX, fake_run(tool=TOOL, method=method), 5)
        cases[f"llama {method}"] = (LLAMA, fake_run(tool=TOOL, method=method), 5)
    if not OLD:
        cases["gemma lora"] = (GEMMA, fake_run(tool=TOOL, rank=8, targets=everything, lora_dropout=0.1), BLOCKS)
    worst = {}
    for name, (config, run, depth) in cases.items():
        ours = numbers(lambda c=config, r=run, d=depth: build(c, r, d), run)
        worst[name] = compared(name, ours, numbers(lambda c=config, r=run, d=depth: theirs(c, r, d), run))
    return finish(worst)


if __name__ == "__main__":
    sys.exit(main())
