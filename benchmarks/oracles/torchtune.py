"""Compares ``finefit.stacks.torchtune`` with the real model code and recipes' loss step, by a fake step of three layers.

Needs torchtune 0.4.0 or 0.5.0, and torchao 0.7, importable. Compiled layers go through AOTAutograd only: of them what each keeps
is compared, as fused temporaries are not made there; so are those of quantised weights, whose subclass a ledger takes
for the whole. Activation offloading needs CUDA and is not compared.
"""

import os
import sys
from typing import Any

import torch
from common import BLOCKS, Numbers, compared, fake_run, finish, numbers

from finefit.foreign import ForeignRun
from finefit.stacks.base import Stepped
from finefit.stacks.torchtune import Flex, build

sys.path.append(sys.path.pop(0))  # the package of this file's name comes first
os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager_decomp_partition"

TIED = {
    "model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 704, "vocab_size": 1024, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
UNTIED = {**TIED, "tie_word_embeddings": False, "num_key_value_heads": 8}
WIDE = {**UNTIED, "intermediate_size": 1024}  # NF4 shares a scale of scales among 16,384 weights
TARGETS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}


def _composite_norm(x: Any, normalized_shape: Any, weight: Any, eps: float) -> Any:
    """``rms_norm`` of PyTorch before 2.8, operator by operator (``aten/src/ATen/native/layer_norm.cpp``)."""
    root = torch.rsqrt(torch.pow(x, 2).mean(-1, keepdim=True).add_(eps))
    return x.mul(root).type_as(x).mul(weight)


def theirs(config: dict[str, Any], run: ForeignRun, depth: int) -> Stepped:
    from torchtune import modules, training
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    torch.nn.functional.rms_norm = _composite_norm
    torch.set_default_dtype(torch.bfloat16)
    model = _model(config, run, depth)
    torch.set_default_dtype(torch.float32)
    if run.method == "lora":
        set_trainable_params(model, get_adapter_params(model))
    loss_fn: Any = CEWithChunkedOutputLoss() if run.loss == "chunked" else torch.nn.CrossEntropyLoss()
    if run.loss == "chunked":
        model.set_num_output_chunks(loss_fn.num_output_chunks)
    if run.packed:
        for layer in model.layers:
            layer.attn._attention_call = torch.compiler.disable(lambda q, k, v, **_: Flex.apply(q, k, v))
    elif run.compiled:
        for layer in model.layers:
            layer.attn._attention_call = lambda q, k, v, **_: torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, True
            )[0]
    for i, layer in enumerate(model.layers):  # its rotary table belongs to no layer but is registered in each
        if i:
            layer.attn.pos_embeddings = model.layers[0].attn.pos_embeddings
    layers = model.layers
    if run.compiled:
        training.compile_model(model, verbose=False)
        loss_fn = training.compile_loss(loss_fn, verbose=False)
    if run.checkpointing == "full":
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})

    def loss(ids: torch.Tensor, labels: torch.Tensor, ledger: Any) -> torch.Tensor:
        hook = model.norm.register_forward_hook(lambda *_: ledger.mark("loss"))
        logits = model(ids, input_pos=torch.zeros_like(ids) if run.packed else None)
        hook.remove()
        labels = torch.hstack((labels[..., 1:], torch.full((labels.shape[0], 1), -100)))
        if not isinstance(logits, list):
            labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
        value = loss_fn(logits, labels)
        del logits
        return value

    return Stepped(model, layers, loss)


def _model(config: dict[str, Any], run: ForeignRun, depth: int) -> Any:
    from torchtune.models import llama3_1, llama3_2

    # Reads values one by one, which fake tensors have not.
    llama3_1.Llama3ScaledRoPE.apply_scaling = lambda self, freqs, *_: freqs
    tied = bool(config["tie_word_embeddings"])
    sizes = {
        "vocab_size": config["vocab_size"], "num_layers": depth, "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"], "embed_dim": config["hidden_size"],
        "max_seq_len": config["max_position_embeddings"], "intermediate_dim": config["intermediate_size"],
    }  # fmt: skip
    if run.method == "full":
        return llama3_2.llama3_2(**sizes) if tied else llama3_1.llama3_1(**sizes)
    adapters = {
        "lora_attn_modules": [TARGETS[t] for t in run.targets if t in TARGETS],
        "apply_lora_to_mlp": "down_proj" in run.targets, "lora_rank": run.rank, "lora_alpha": 16,
        "quantize_base": run.is_quantised,
    }  # fmt: skip
    return llama3_2.lora_llama3_2(**sizes, **adapters) if tied else llama3_1.lora_llama3_1(**sizes, **adapters)


def main() -> int:
    full = {"tool": "torchtune", "method": "full", "micro_batch_size": 2}
    some = {"tool": "torchtune", "rank": 8, "targets": ("q_proj", "v_proj"), "micro_batch_size": 2}
    most = {**some, "targets": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}
    cases = {
        "full": (TIED, full), "full, chunked loss": (TIED, {**full, "loss": "chunked"}),
        "full, untied": (UNTIED, full), "full, packed": (TIED, {**full, "packed": True}),
        "full, checkpointed": (TIED, {**full, "loss": "chunked", "checkpointing": "full"}),
        "lora": (UNTIED, some), "lora on most": (TIED, {**most, "loss": "chunked"}),
        "lora, checkpointed": (UNTIED, {**some, "loss": "chunked", "checkpointing": "full"}),
        "qlora": (WIDE, {**most, "loss": "chunked", "quantised": "nf4_double"}),
        "full, compiled": (TIED, {**full, "compiled": True}),
        "full, compiled, packed": (TIED, {**full, "compiled": True, "packed": True}),
        "lora on most, compiled, packed": (TIED, {**most, "compiled": True, "packed": True}),
    }  # fmt: skip
    from torchtune import __version__

    builtin = __version__.startswith(("0.5", "0.6"))
    worst = {}
    for name, (config, fields) in cases.items():
        run = fake_run(**fields)
        ours = numbers(lambda c=config, r=run: build(c, r, BLOCKS, builtin_norm=builtin), run)
        real = numbers(lambda c=config, r=run: theirs(c, r, BLOCKS), run)
        worst[name] = compared(name, ours, _kept(real) if run.compiled or run.is_quantised else real)
    return finish(worst)


def _kept(real: Numbers) -> Numbers:
    return {key: n for key, n in real.items() if key.startswith("kept")}


if __name__ == "__main__":
    sys.exit(main())
