"""TRL's YAML (``trl sft --config``): how it would run there.

Defaults of July 2026: ``trainer/{base,sft,model}_config.py`` (checkpointing on, bf16 unless fp16, weights loaded in
float32, length 1024, ``chunked_nll``) and ``trainer/sft_trainer.py`` (adapters of packed weights in bf16; head and loss
by 256 labelled tokens, recomputed in backward, so that logits never are whole). Which of TRL's commands a file is for
is not said in it: keys that only the other trainers have are refused.
"""

import math
from typing import Any, Literal

from ...foreign import Dtype, ForeignRun, Quantised
from . import hf, optimizers
from .known import TRL
from .sharding import Sharding, spread
from .sheet import Foreign, Sheet

_OTHER_TRAINERS = (
    "beta", "loss_weights", "precompute_ref_log_probs", "reference_free", "num_generations", "num_generations_eval",
    "max_completion_length", "max_prompt_length", "reward_funcs", "reward_weights", "reward_model_name_or_path",
    "desirable_weight", "undesirable_weight", "center_rewards_coefficient", "epsilon", "epsilon_high", "kl_coef",
    "use_vllm", "vllm_mode", "temperature", "scale_rewards", "num_ppo_epochs", "rloo_k", "ref_model_init_kwargs",
    "f_divergence_type", "use_weighting", "sync_ref_model", "steps_per_generation", "num_iterations", "cpo_alpha",
)  # fmt: skip
_OF_OTHERS = "a key of another TRL trainer; only trl sft can be read"
_LOSSES = {"nll": "plain", "chunked_nll": "fused", "dft": "plain"}
_DTYPES: dict[str, Dtype] = {
    "auto": "bfloat16", "bfloat16": "bfloat16", "float16": "float16", "float32": "float32",
}  # fmt: skip
#: ``trl/accelerate_configs``, which ``accelerate_config`` names, all for 8 processes.
_LAUNCHES = {
    "fsdp1": Sharding("fsdp1", 3, load="first"), "fsdp2": Sharding("fsdp2", 3), "multi_gpu": Sharding("ddp"),
    "single_gpu": Sharding(), "zero1": Sharding("deepspeed", 1), "zero2": Sharding("deepspeed", 2),
    "zero3": Sharding("deepspeed", 3),
}  # fmt: skip
_PROCESSES = 8
_CHUNK_TOKENS = 256
#: Stands for "as long as the longest example".
LONGEST = 2048


def read(sheet: Sheet, devices: int | None = None) -> Foreign:
    """One file for ``trl sft``."""
    sheet.refuse_set(dict.fromkeys(_OTHER_TRAINERS, _OF_OTHERS))
    sheet.refuse_set({"parallelism_config": "a mesh of devices given as an object is not expressed"})
    model = sheet.model("model_name_or_path")
    hf.refuse_multimodal(sheet, "model_name_or_path", model)
    if sheet.text("lora_task_type", "CAUSAL_LM") != "CAUSAL_LM":
        sheet.refuse("lora_task_type", hf.REWARD)
    method: Literal["full", "lora"] = "lora" if sheet.flag("use_peft") else "full"
    how, devices = _sharding(sheet, devices)
    quantised = _quantised(sheet, model, method)
    optimizer = optimizers.named(sheet, "optim", hf.DEFAULT_OPTIMIZER)
    adapter = _adapter(sheet, model) if method == "lora" else {}
    adapter |= optimizers.of_whole(sheet, "optim", optimizer, method)
    loss, kernels = _loss(sheet)
    sheet.check(TRL)
    sheet.note("the file does not say which trl command it is for: read as trl sft")
    rows, types, length = hf.batch(sheet), _types(sheet, how, method, bool(quantised)), _length(sheet)
    multiple, fills = sheet.whole("pad_to_multiple_of", 1), sheet.flag("packing") or sheet.flag("padding_free")
    kind = hf.attention(sheet, "attn_implementation")
    chunks = math.ceil(rows.micro * length / _CHUNK_TOKENS) if loss == "fused" and not kernels else 8
    run = ForeignRun(
        tool="trl", model=model, method=method, micro_batch_size=rows.micro, accumulation=rows.accumulation,
        max_length=hf.rounded(length, multiple), lengths=hf.lengths(sheet, fills, multiple), packed=_packed(sheet, kind),
        quantised=quantised, optimizer=optimizer.name, optimizer_bits=optimizer.bits_with(types["trained_dtype"]),
        foreach=optimizer.foreach, paged=optimizer.paged, clipped=hf.clip(sheet) > 0, attention=kind, loss=loss,
        loss_chunks=chunks, fused_kernels=kernels, compiled=sheet.flag("torch_compile"),
        optimizer_on_host=how.optimizer_on_host, parameters_on_host=how.parameters_on_host,
        load=how.load, spread=spread(sheet, how, devices), **types, **adapter, **_checkpointing(sheet, how),
    )  # fmt: skip
    _wishes(sheet, run)
    return sheet.result(run)


def _sharding(sheet: Sheet, devices: int | None) -> tuple[Sharding, int | None]:
    """The Trainer's own keys, or the launch file that ``accelerate_config`` names, with its 8 processes."""
    name = sheet.text("accelerate_config")
    if not name:
        return hf.sharding(sheet), devices
    if name not in _LAUNCHES:
        sheet.refuse("accelerate_config", f"'{name}' is not one of {', '.join(_LAUNCHES)}")
    processes = 1 if name == "single_gpu" else sheet.whole("num_processes", _PROCESSES)
    if not devices and name != "single_gpu":
        sheet.note(f"accelerate_config {name}: {processes} devices")
    return _LAUNCHES.get(name, Sharding()), devices or processes


def _quantised(sheet: Sheet, model: str, method: str) -> Quantised:
    four, eight = sheet.flag("load_in_4bit"), sheet.flag("load_in_8bit")
    if (four or eight) and method == "full":
        sheet.refuse("load_in_4bit" if four else "load_in_8bit", "packed weights cannot be trained without use_peft")
    if four and eight:
        sheet.refuse(
            "load_in_8bit", "weights in 4 and in 8 bits at once; TRL refuses this too", "switch one of them off"
        )
    sheet.get("bnb_4bit_quant_type")
    sheet.get("bnb_4bit_quant_storage")
    if four:
        return "nf4_double" if sheet.flag("use_bnb_nested_quant") else "nf4"
    return "int8" if eight else hf.packed_weights(sheet, "model_name_or_path", model)


def _types(sheet: Sheet, how: Sharding, method: str, packs: bool) -> dict[str, Any]:
    key = "torch_dtype" if sheet.has("torch_dtype") else "dtype"
    if sheet.text(key) == "auto":
        sheet.note("weights are loaded in the checkpoint's own type: bfloat16 is assumed")
    loads: Dtype = sheet.choice(key, "float32", _DTYPES)
    compute, autocast = hf.mixed(sheet, how, default=True)
    trained: Dtype = loads if method == "full" else "bfloat16" if packs else "float32"
    raises = how.engine in ("fsdp1", "deepspeed") or (how.engine == "fsdp2" and not packs)
    if raises and compute:
        trained = "float32"
    return {
        "frozen_dtype": loads, "trained_dtype": trained, "compute_dtype": compute or loads, "autocast": autocast,
    }  # fmt: skip


def _adapter(sheet: Sheet, model: str) -> dict[str, Any]:
    sheet.refuse_set({"lora_target_parameters": "adapting fused expert weights is not expressed"})
    sheet.loses("use_dora", "use_rslora", "lora_modules_to_save")
    named = hf.targets(sheet, "lora_target_modules")
    if not sheet.has("lora_target_modules"):
        named = hf.peft_targets(sheet, model)
    return {
        "rank": sheet.size("rank", "lora_r", 16), "targets": named, "lora_dropout": sheet.share("lora_dropout", 0.05),
        "dora": sheet.flag("use_dora"), "trained_modules": sheet.names("lora_modules_to_save"),
    }  # fmt: skip


def _loss(sheet: Sheet) -> tuple[hf.Loss, bool]:
    """``chunked_nll`` unless Liger is on; its words of the other trainers' losses are refused."""
    uses_liger = sheet.flag("use_liger_kernel") or sheet.flag("use_liger")
    word = sheet.text("loss_type", "nll" if uses_liger else "chunked_nll")
    if word not in _LOSSES:
        sheet.refuse("loss_type", f"'{word}' is a loss of another TRL trainer; only trl sft can be read")
    if word == "dft":
        sheet.refuse("loss_type", hf.OWN_LOSS)
    if uses_liger:
        return hf.liger(sheet)
    return ("plain" if word == "nll" else "fused"), False


def _length(sheet: Sheet) -> int:
    key = next((name for name in ("max_length", "max_seq_length") if name in sheet.values), "max_length")
    if key in sheet.values and sheet.get(key) is None:
        sheet.note(f"{key} is null, rows are as long as the longest example: {LONGEST} is assumed")
        return LONGEST
    return sheet.size("max_length", key, 1024)


def _packed(sheet: Sheet, kind: hf.Attention) -> bool:
    """Best-fit packing marks where examples end; ``wrapped`` fills rows without."""
    packs, wraps = sheet.flag("packing"), sheet.text("packing_strategy", "bfd") == "wrapped"
    return hf.is_packed(sheet, packs or sheet.flag("padding_free"), kind, marks_ends=not (packs and wraps))


def _checkpointing(sheet: Sheet, how: Sharding) -> dict[str, Any]:
    key = "activation_checkpointing" if sheet.has("activation_checkpointing") else "gradient_checkpointing"
    on = sheet.flag(key, True) or how.checkpointing
    options = {**sheet.section("gradient_checkpointing_kwargs"), **sheet.section("activation_checkpointing_kwargs")}
    some = on and isinstance(every := options.get("every_n_layers", 1), int) and every > 1
    offloads = sheet.flag("activation_offloading") or (on and bool(options.get("offload")))
    return {
        "checkpointing": "selective" if some else "full" if on else "none", "activations_on_host": offloads,
        "reentrant": on and bool(options.get("use_reentrant", False)) and not how.checkpointing,
    }  # fmt: skip


def _wishes(sheet: Sheet, run: ForeignRun) -> None:
    sheet.wants("model", run.model)
    name = sheet.text("dataset_name")
    sheet.sections("datasets")
    sheet.wants("data", found := sheet.data_file(name))
    if not found:
        sheet.lost += [key for key in ("dataset_name", "datasets") if sheet.get(key)]
        sheet.note("the data is not a file that can be read here: name one with data:")
    hf.method_wishes(sheet, run, sheet.number("lora_alpha", 32) if run.rank else 0)
    sheet.wants("train.global_batch_size", run.micro_batch_size * run.accumulation * run.spread.data)
    sheet.wants("train.max_length", _length(sheet))
    hf.wishes(sheet, epochs=3.0, learning_rate=2e-5)
