"""Axolotl's YAML: how it would run there. Jinja, environment variables and plugins are not executed.

Defaults and habits of ``src/axolotl`` as of July 2026: ``utils/schemas/*`` (length 512, micro-batch 1, checkpointing
off, ``adamw_torch_fused``), ``utils/config/__init__.py`` (``bf16: auto``), ``loaders/model.py`` (norms, embedding and
head in fp32 only for full fine-tuning with SDPA or eager attention), ``core/builders/{base,causal}.py`` (autocast,
padding to a multiple of 64), peft (adapters in fp32). A ``lora`` adapter ignores ``load_in_4bit``; ``qlora`` needs it.
"""

import re
from typing import Any, Literal

from ...foreign import Dtype, ForeignRun, Quantised
from . import hf, optimizers
from .known import AXOLOTL
from .sharding import Degrees, Sharding, deepspeed, fsdp, spread
from .sheet import Foreign, Sheet
from .values import LAST_SEED

_LORA_FREEZES = "layers that adapters skip are not expressed"
_EXPERTS = "packing or adapting fused expert weights is not expressed"
_UNEXPRESSED = {
    "rl": hf.PREFERENCE, "reward_model": hf.REWARD, "process_reward_model": hf.REWARD, "num_labels": hf.REWARD,
    "qat": hf.QAT, "fp8": hf.FP8, "relora": "restarting adapters (ReLoRA) is not expressed", "use_ray": hf.RAY,
    "ray_num_workers": hf.RAY, "unfrozen_parameters": hf.PARTS, "lisa_n_layers": "training layers by turns (LISA) is not expressed",
    "use_onebitllms": "1.58-bit training is not expressed", "quantize_moe_experts": _EXPERTS,
    "lora_target_parameters": _EXPERTS, "peft_layers_to_transform": _LORA_FREEZES, "tiled_mlp": "an MLP in tiles is not expressed",
    "peft_layer_replication": "repeated layers are not expressed", "use_eaft": hf.OWN_LOSS, "processor_type":
    "a model with an image or sound processor is not expressed", "max_memory": "weights placed by memory are not expressed",
    "gpu_memory_limit": "weights placed by memory are not expressed", "nvfp4_merge_aware": "NVFP4 weights are not expressed",
    "diffusion": "a diffusion language model is not expressed", "llmcompressor": "training sparse weights is not expressed",
    "flash_attn_fuse_mlp": "the fused MLP of flash-attn is not expressed",
    "ebft": hf.PREFERENCE,
}  # fmt: skip
_PLUGINS = {
    "diffusion": "a diffusion language model is not expressed", "llm_compressor": "training sparse weights is not expressed",
    "expert_parallel": "expert parallelism is not expressed", "kd": "distilling a teacher is not expressed",
    "spectrum": hf.PARTS, "densemixer": "routing to all experts is not expressed",
    "grokfast": "filtered gradients are not expressed", "nemo_gym": hf.PREFERENCE, "hatchery": "training elsewhere is not expressed",
}  # fmt: skip
_MODEL_CLASSES = re.compile(r"(Sequence|Token)Classification|Mamba|ImageTextToText|Seq2Seq|RewardModel")
_FLAGS = {
    "xformers_attention": "xformers", "sage_attention": "sage", "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip
_ADAPTERS = ("", "lora", "qlora")
_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_PAD = 64
_TOO_LONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}


def read(sheet: Sheet, devices: int | None = None) -> Foreign:
    """One training file."""
    _refusals(sheet)
    model = sheet.model("base_model")
    method: Literal["full", "lora"] = "lora" if sheet.get("adapter") else "full"
    how = _sharding(sheet)
    kind = _attention(sheet)
    quantised = _quantised(sheet, model)
    optimizer = optimizers.named(sheet, "optimizer", hf.DEFAULT_OPTIMIZER, optimizers.AXOLOTL)
    adapter = _adapter(sheet) if method == "lora" else {}
    adapter |= optimizers.of_whole(sheet, "optimizer", optimizer, method)
    types = _types(sheet, method, how, kind)
    sheet.check(AXOLOTL)
    micro, accumulation = _batch(sheet)
    kernels = {**_loss(sheet), **_checkpointing(sheet, how, method)}
    if method == "lora" and _lora_kernels(sheet, how):
        kernels["fused_kernels"] = True
    run = ForeignRun(
        tool="axolotl", model=model, method=method, micro_batch_size=micro, accumulation=accumulation,
        quantised=quantised, attention=kind, optimizer=optimizer.name,
        optimizer_bits=optimizer.bits_with(types["trained_dtype"]), foreach=optimizer.foreach, paged=optimizer.paged,
        clipped=hf.clip(sheet) > 0, compiled=str(sheet.get("torch_compile", False)).lower() in ("true", "auto"),
        optimizer_on_host=how.optimizer_on_host, load=how.load,
        parameters_on_host=how.parameters_on_host or bool(sheet.get("layer_offloading")),
        spread=spread(sheet, how, devices, _degrees(sheet, how)), **types, **adapter, **kernels, **_rows(sheet, kind),
    )  # fmt: skip
    _wishes(sheet, run)
    return sheet.result(run)


def _refusals(sheet: Sheet) -> None:
    sheet.refuse_set(_UNEXPRESSED)
    for plugin in sheet.names("plugins"):
        part = next((part for part in _PLUGINS if f"integrations.{part}." in plugin), "")
        if part:
            sheet.refuse("plugins", f"{plugin.rpartition('.')[2]}: {_PLUGINS[part]}")
        elif not plugin.startswith("axolotl.integrations."):
            sheet.note(f"what the plugin '{plugin}' does is not known here")
    if _MODEL_CLASSES.search(kind := sheet.text("model_type")):
        sheet.refuse("model_type", f"{kind} is no decoder-only text model")
    if sheet.text("adapter") not in _ADAPTERS:
        sheet.refuse("adapter", f"'{sheet.text('adapter')}' is not expressed; lora and qlora are")
    if sheet.whole("expert_parallel_size", 1) > 1:
        sheet.refuse("expert_parallel_size", "expert parallelism is not expressed")
    if not sheet.get("processor_type"):
        hf.refuse_multimodal(sheet, "base_model", sheet.text("base_model"))


def _sharding(sheet: Sheet) -> Sharding:
    if sheet.get("deepspeed"):
        return deepspeed(sheet, "deepspeed")
    if sheet.get("fsdp") or sheet.get("fsdp_config"):
        return fsdp(sheet, "fsdp", "fsdp_config", sheet.whole("fsdp_version", 1))
    return Sharding()


def _degrees(sheet: Sheet, how: Sharding) -> Degrees | None:
    context = sheet.whole("context_parallel_size", 1) * sheet.whole("sequence_parallel_degree", 1)
    shard, replicate = sheet.whole("dp_shard_size", 1), sheet.whole("dp_replicate_size", 1)
    tensor = sheet.whole("tensor_parallel_size", 1) * how.tensor
    if shard == replicate == 1:
        return Degrees(tensor=tensor, context=context) if tensor * context > 1 else None
    return Degrees(shard, replicate, tensor, context)


def _attention(sheet: Sheet) -> hf.Attention:
    flag = next((name for name in _FLAGS if sheet.get(name)), "")
    if sheet.get("gemma4_hybrid_attn_impl"):
        return "flash"
    if sheet.has("attn_implementation") or not flag:
        return hf.attention(sheet, "attn_implementation")
    return hf.ATTENTION[_FLAGS[flag]]


def _quantised(sheet: Sheet, model: str) -> Quantised:
    stored = hf.packed_weights(sheet, "base_model", model)
    adapter, four, eight = sheet.text("adapter"), sheet.flag("load_in_4bit"), sheet.flag("load_in_8bit")
    if not adapter and (four or eight):
        key = "load_in_4bit" if four else "load_in_8bit"
        sheet.refuse(key, "packed weights cannot be trained without an adapter; Axolotl refuses this too")
    if sheet.flag("gptq") or stored == "gptq4":
        sheet.loses("gptq")
        return "gptq4"
    if adapter == "qlora" and eight:
        sheet.refuse("load_in_8bit", "qlora packs in 4 bits; Axolotl refuses this too")
    if adapter == "qlora" and four:
        options = sheet.section("bnb_config_kwargs")
        return "nf4_double" if options.get("bnb_4bit_use_double_quant", True) else "nf4"
    if adapter == "qlora":
        sheet.refuse("adapter", "qlora needs load_in_4bit: true; Axolotl refuses this too")
    if adapter == "lora" and four:
        sheet.note("load_in_4bit has no effect with adapter: lora; adapter: qlora packs the weights")
    return "int8" if adapter == "lora" and eight else stored


def _types(sheet: Sheet, method: str, how: Sharding, kind: hf.Attention) -> dict[str, Any]:
    """Stored and computed types. Autocast comes with bf16 and fp16, not with ``float16``; not under DeepSpeed."""
    half = sheet.flag("fp16")
    told = sheet.get("bf16", "auto")
    bf16 = sheet.flag("bfloat16") or (not half if told == "auto" else sheet.flag("bf16"))
    if half and told is True:
        sheet.note("bf16 and fp16 are both on: Axolotl takes bf16")
    narrow = half or sheet.flag("load_in_8bit") or sheet.flag("float16")
    loads: Dtype = "bfloat16" if bf16 else "float16" if narrow else "float32"
    mixes = bf16 or half
    trained: Dtype = loads if method == "full" else "float32"
    if method == "lora" and sheet.has("peft_autocast_adapter_dtype") and not sheet.flag("peft_autocast_adapter_dtype"):
        trained = loads
    if how.engine and mixes:
        trained = "float32"
    raised = method == "full" and not how.engine and kind != "flash" and not _cuts(sheet) and loads != "float32"
    if raised:
        sheet.note("full fine-tuning without flash attention: norms, embedding and head are in fp32")
    return {
        "frozen_dtype": loads, "trained_dtype": trained, "compute_dtype": loads, "raised": "all" if raised else "",
        "autocast": mixes and how.engine != "deepspeed",
    }  # fmt: skip


def _adapter(sheet: Sheet) -> dict[str, Any]:
    if not sheet.has("lora_r"):
        sheet.refuse("adapter", "an adapter needs lora_r")
    if sheet.get("lora_model_dir"):
        sheet.note("training goes on from an adapter: its own rank and targets count, those here are shown")
    sheet.loses(
        "lora_model_dir", "peft_use_dora", "peft_use_rslora", "lora_modules_to_save", "loraplus_lr_ratio", "peft",
        "lora_rank_pattern", "lora_alpha_pattern", "peft_init_lora_weights", "peft_trainable_token_indices", "tokens",
    )  # fmt: skip
    everything = bool(sheet.get("lora_target_linear"))
    named = hf.targets(sheet, "lora_target_modules")
    if not everything and not sheet.has("lora_target_modules"):
        named = hf.peft_targets(sheet, sheet.text("base_model"))
    return {
        "rank": sheet.size("rank", "lora_r", 8), "targets": () if everything else named,
        "lora_dropout": sheet.share("lora_dropout", 0.0), "dora": sheet.flag("peft_use_dora"),
        "trained_modules": sheet.names("lora_modules_to_save"),
    }  # fmt: skip


def _batch(sheet: Sheet) -> tuple[int, int]:
    """``batch_size`` of one device stands for accumulation only where that is not given."""
    micro = sheet.size("micro_batch_size", "micro_batch_size", 1)
    total = sheet.whole("batch_size", micro)
    if sheet.has("batch_size") and not sheet.has("gradient_accumulation_steps"):
        sheet.note("batch_size without gradient_accumulation_steps: taken for the rows of one device and step")
    if sheet.get("auto_find_batch_size"):
        sheet.note("auto_find_batch_size: the micro-batch becomes smaller where it does not fit")
    return micro, sheet.size("accumulation", "gradient_accumulation_steps", max(total // micro, 1))


def _cuts(sheet: Sheet) -> bool:
    """Cut cross-entropy: on as soon as its plugin is listed."""
    listed = any("cut_cross_entropy" in name for name in sheet.names("plugins"))
    return listed and sheet.flag("cut_cross_entropy", True)


def _loss(sheet: Sheet) -> dict[str, Any]:
    """Loss and kernels; Liger's keys count only where its plugin is listed."""
    listed = any("integrations.liger" in name for name in sheet.names("plugins"))
    on = {k for k in ("fused_linear_cross_entropy", "cross_entropy", "rms_norm", "glu_activation", "swiglu", "rope")
          if sheet.get(f"liger_{k}") and listed}  # fmt: skip
    loss: hf.Loss = "plain"
    if "cross_entropy" in on or sheet.get("flash_attn_cross_entropy"):
        loss = "kernel"
    if sheet.flag("chunked_cross_entropy"):
        loss = "chunked"
    if _cuts(sheet) or "fused_linear_cross_entropy" in on:
        loss = "fused"
    kernels = bool(on & {"rms_norm", "glu_activation", "swiglu"})
    return {"loss": loss, "fused_kernels": kernels, "loss_chunks": sheet.whole("chunked_cross_entropy_num_chunks", 8)}


def _lora_kernels(sheet: Sheet, how: Sharding) -> bool:
    """Fused adapters of the MLP: on unless one of the kernels is set, 8-bit, remote code or FSDP 1 stand against it."""
    if any(sheet.has(name) for name in _KERNELS):
        for name in _KERNELS[1:]:
            sheet.get(name)
        return bool(sheet.get(_KERNELS[0]))
    against = sheet.get("load_in_8bit") and sheet.text("adapter") == "lora"
    if against or sheet.get("trust_remote_code") or how.engine == "fsdp1":
        return False
    sheet.note("Axolotl's fused adapter kernels are on by default: counted as fused kernels")
    return True


def _checkpointing(sheet: Sheet, how: Sharding, method: str) -> dict[str, Any]:
    """Offloading activations of an adapter run replaces recomputation; full fine-tuning offloads what is kept."""
    value = sheet.get("gradient_checkpointing", False)
    offload = sheet.get("activation_offloading", False) or value in ("offload", "offload_disk")
    on = how.checkpointing or (bool(value) and str(value).lower() != "false")
    options = sheet.section("gradient_checkpointing_kwargs")
    reentrant = bool(options.get("use_reentrant", not options)) and not how.checkpointing
    kind = "selective" if on and sheet.get("selective_checkpointing") else "full" if on else "none"
    if offload and method == "lora" and offload != "hidden_states" and not how.checkpointing:
        sheet.note("activation offloading of an adapter run: nothing is recomputed")
        kind = "none"
    return {
        "checkpointing": kind, "activations_on_host": bool(offload), "reentrant": reentrant and kind == "full",
    }  # fmt: skip


def _rows(sheet: Sheet, kind: hf.Attention) -> dict[str, Any]:
    length, multiple = sheet.size("max_length", "sequence_len", 512), sheet.whole("pad_to_multiple_of", _PAD)
    packs = sheet.flag("sample_packing")
    flattens = str(sheet.get("batch_flattening", False)).lower() in ("true", "auto") and kind == "flash"
    pads = sheet.flag("pad_to_sequence_len", True)
    if sheet.get("pretraining_dataset"):
        sheet.note("pre-training: every token is trained on, rows are full")
        packs = packs or sheet.flag("pretraining_sample_concatenation", True)
        sheet.lost.append("pretraining_dataset")
    marks = not sheet.flag("sdpa_varlen")
    long: Literal["cut", "dropped"] = "cut" if sheet.text("excess_length_strategy") == "truncate" else "dropped"
    return {
        "max_length": hf.rounded(length, multiple) if pads else length,
        "packed": flattens or hf.is_packed(sheet, packs, kind, marks),
        "lengths": hf.lengths(sheet, packs or pads or flattens, multiple, long),
    }  # fmt: skip


def _wishes(sheet: Sheet, run: ForeignRun) -> None:
    sheet.wants("model", run.model)
    sheet.wants("data", _data(sheet, "datasets"))
    sheet.wants("eval_data", _data(sheet, "test_datasets"))
    hf.method_wishes(sheet, run, sheet.number("lora_alpha", 2 * run.rank) if run.rank else 0)
    sheet.wants("train.global_batch_size", run.micro_batch_size * run.accumulation * run.spread.data)
    sheet.wants("train.max_length", sheet.whole("sequence_len", 512))
    if sheet.number("max_steps", -1) > 0:
        sheet.wants("train.steps", sheet.whole("max_steps", 1))
    sheet.wants("train.epochs", sheet.number("num_epochs", 1.0))
    sheet.wants("train.learning_rate", sheet.number("learning_rate", 5e-5))
    warmup = sheet.number("warmup_steps", 0) or sheet.number("warmup_ratio", 0.03)
    sheet.wants("train.warmup_steps", warmup)
    sheet.wants("train.weight_decay", sheet.number("weight_decay", 0.0))
    sheet.wants("train.max_grad_norm", hf.clip(sheet))
    sheet.wants("seed", sheet.whole("seed", 42, 0, LAST_SEED))
    sheet.wants("train.too_long", sheet.choice("excess_length_strategy", "drop", _TOO_LONG))
    hf.rhythm(sheet, {"save_steps": "save_every", "eval_steps": "eval_every", "logging_steps": "log_every"})
    if sheet.has("save_total_limit"):
        sheet.wants("train.keep_checkpoints", sheet.whole("save_total_limit", 4))
    if sheet.has("output_dir"):
        sheet.wants("output_dir", sheet.text("output_dir"))


def _data(sheet: Sheet, key: str) -> str | None:
    """One local file of a format that is recognised by itself; templates and field names of theirs are not read."""
    sets = sheet.sections(key)
    if len(sets) == 1:
        files = sets[0].get("data_files") or sets[0].get("path")
        name = files[0] if isinstance(files, list) and len(files) == 1 else files
        if isinstance(name, str) and (found := sheet.data_file(name)):
            return found
    if sets:
        sheet.lost.append(key)
        sheet.note(f"the data of '{key}' is not a file that can be read here: name one with data:")
    return None
