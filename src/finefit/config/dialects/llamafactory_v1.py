"""LLaMA-Factory's v1 YAML (``model``, ``peft_config``, ``dist_config``): how it would run there.

Follows ``src/llamafactory/v1`` as of August 2026: ``core/model_engine.py`` (full fine-tuning casts all weights to
fp32), ``core/base_trainer.py`` (torch's AdamW; whole logits raised to fp32; no autocast), and
``plugins/trainer_plugins/distributed/fsdp2.py`` (weights gathered in bf16). Which stage a file is for is said on its
command line, so preference data is known by its name or its ``converter`` only.
"""

import re
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigError
from ...foreign import Dtype, ForeignRun, Quantised
from ..nodes import construct, mapping_of
from . import hf, optimizers
from .known import LLAMAFACTORY_V1
from .sharding import Degrees, Sharding, deepspeed, spread
from .sheet import Foreign, Sheet

_ENGINES = {
    "": "", "fsdp2": "", "deepspeed": "", "fsdpturbo": "expert parallelism is not expressed",
}  # fmt: skip
_METHODS = {"": "", "lora": "", "freeze": hf.PARTS}
_BATCHES = ("normal", "padding_free", "dynamic_batching", "dynamic_padding_free")
_NOT_TEXT = re.compile(r"multimodal|vision|image|audio|video")
_PAIRS = re.compile(r"dpo|pair|preference|reward|kto")


def read(sheet: Sheet, devices: int | None = None) -> Foreign:
    """One training file of v1."""
    _refusals(sheet)
    model = sheet.model("model")
    adapts = bool(sheet.text("peft_config.name"))
    method: Literal["full", "lora"] = "lora" if adapts else "full"
    how = _sharding(sheet)
    quantised = _quantised(sheet, model)
    optimizer = _optimizer(sheet)
    adapter = _adapter(sheet) if adapts else {}
    sheet.check(LLAMAFACTORY_V1)
    degrees, split = _degrees(sheet, how), sheet.text("batching_strategy", "normal")
    if split not in _BATCHES:
        sheet.wrong("batching_strategy", f"must be one of {', '.join(_BATCHES)}, not '{split}'")
    over = spread(sheet, how, devices, degrees)
    micro = sheet.size("micro_batch_size", "micro_batch_size", 1)
    total = sheet.whole("global_batch_size", micro * over.data)
    if total % (micro * over.data):
        sheet.wrong("global_batch_size", f"is no multiple of {micro} rows on {over.data} devices")
    compute = _compute(sheet, method, how)
    loss, kernels = _kernels(sheet)
    run = ForeignRun(
        tool="llamafactory", model=model, method=method, micro_batch_size=micro,
        max_length=sheet.size("max_length", "cutoff_len", 2048), accumulation=total // (micro * over.data),
        packed=split.endswith("padding_free"), lengths=hf.lengths(sheet, packs=split != "normal"), trained_dtype="float32", compute_dtype=compute, quantised=quantised,
        optimizer=optimizer.name, optimizer_bits=optimizer.bits_with("float32"), foreach=optimizer.foreach,
        clipped=hf.clip(sheet) > 0,
        checkpointing="full" if sheet.flag("enable_activation_checkpointing", True) else "none",
        attention=hf.attention(sheet, "flash_attn"), loss=loss, fused_kernels=kernels,
        optimizer_on_host=how.optimizer_on_host, parameters_on_host=how.parameters_on_host, spread=over, **adapter,
    )  # fmt: skip
    _wishes(sheet, run, total)
    return sheet.result(run)


def _refusals(sheet: Sheet) -> None:
    if sheet.has("peft_config.export_dir"):
        sheet.refuse("peft_config.export_dir", "the file exports a model, it trains nothing")
    if sheet.text("model_class", "llm") != "llm":
        sheet.refuse("model_class", hf.REWARD)
    for key, table in (("dist_config.name", _ENGINES), ("peft_config.name", _METHODS)):
        reason = table.get(sheet.text(key), "not one that is known here")
        if reason:
            sheet.refuse(key, f"{sheet.text(key)}: {reason}")
    hf.refuse_multimodal(sheet, "model", sheet.text("model"))
    data = sheet.text("train_dataset").lower()
    if _NOT_TEXT.search(Path(data).name):
        sheet.refuse("train_dataset", "its name says images, video or sound, which are not expressed")
    if _PAIRS.search(Path(data).name) or "pair" in _converters(sheet, data):
        sheet.refuse("train_dataset", hf.PREFERENCE)


def _converters(sheet: Sheet, name: str) -> set[str]:
    """How the sets of a data file are read, where that file is there."""
    found = sheet.find(name) if name.endswith((".yaml", ".yml")) else None
    if not found:
        return set()
    try:
        with mapping_of(found) as (loader, root):
            sets = construct(found, loader, root).values()
    except ConfigError:
        return set()
    return {str(one.get("converter")) for one in sets if isinstance(one, dict)}


def _sharding(sheet: Sheet) -> Sharding:
    name = sheet.text("dist_config.name")
    if name == "deepspeed" and sheet.has("dist_config.config_file"):
        return deepspeed(sheet, "dist_config.config_file")
    if name == "deepspeed":
        sheet.refuse("dist_config", "deepspeed needs a config_file")
    if name != "fsdp2":
        return Sharding()
    sheet.get("dist_config.dcp_path")
    offloads = sheet.flag("dist_config.offload_params")
    return Sharding("fsdp2", 3 if sheet.flag("dist_config.reshard_after_forward", True) else 2, offloads, offloads)


def _degrees(sheet: Sheet, how: Sharding) -> Degrees | None:
    """What the file fixes of the mesh; the default is all devices in one sharding group."""
    context, replicate = sheet.whole("cp_size", 1), sheet.whole("mp_replicate_size", 1)
    shard, data = sheet.whole("mp_shard_size", 1), sheet.whole("dp_size", 1)
    sheet.get("cp_mode")
    world = max(shard * replicate if sheet.has("mp_shard_size") else 1, data * context)
    if world == 1 and context == 1 and replicate == 1:
        return None if not how.tensor > 1 else Degrees(tensor=how.tensor)
    return Degrees(shard=max(world // (replicate * context), 1), replicate=replicate, context=context)


def _quantised(sheet: Sheet, model: str) -> Quantised:
    """``compute_dtype`` is float16 unless it is given; the products of the other weights are in bf16."""
    if not sheet.has("quant_config"):
        return hf.packed_weights(sheet, "model", model)
    name = sheet.text("quant_config.name", "bnb")
    bits = sheet.whole("quant_config.quantization_bit", 4)
    if name not in ("auto", "bnb") or bits not in (4, 8):
        sheet.refuse("quant_config", f"{bits}-bit weights of {name} are not expressed; bitsandbytes' 4 and 8 are")
    for part in ("compute_dtype", "quantization_type"):
        sheet.get(f"quant_config.{part}")
    if bits == 8:
        return "int8"
    return "nf4_double" if sheet.flag("quant_config.double_quantization", True) else "nf4"


def _compute(sheet: Sheet, method: str, how: Sharding) -> Dtype:
    half = sheet.flag("bf16", True) or how.bf16
    if how.engine and half:
        return "bfloat16"
    if method == "lora":
        sheet.note("weights are loaded in the checkpoint's own type: bfloat16 is assumed")
        return "bfloat16"
    return "float32"


def _optimizer(sheet: Sheet) -> optimizers.Optimizer:
    name = sheet.text("optim_config.name")
    if name == "muon":
        sheet.loses("optim_config")
        return optimizers.AXOLOTL["muon"]
    if name:
        sheet.refuse("optim_config.name", f"the optimizer {name} is not one that can be simulated")
    return optimizers.HF["adamw_torch"]


def _kernels(sheet: Sheet) -> tuple[hf.Loss, bool]:
    """Liger's kernels; training asks for the logits, so of its losses only the one on whole logits is used."""
    names = sheet.names("kernel_config.name")
    if "liger_kernel" in names:
        sheet.note("liger_kernel: logits are raised to fp32 before its cross-entropy")
        return "kernel", True
    return "plain", False


def _adapter(sheet: Sheet) -> dict[str, Any]:
    sheet.loses("peft_config.use_dora", "peft_config.use_rslora", "peft_config.modules_to_save")
    if sheet.has("peft_config.adapter_name_or_path"):
        sheet.note("training goes on from an adapter: its own rank and targets count, those here are shown")
        sheet.loses("peft_config.adapter_name_or_path")
    return {
        "rank": sheet.size("rank", "peft_config.r", 8), "targets": hf.targets(sheet, "peft_config.target_modules"),
        "lora_dropout": sheet.share("peft_config.lora_dropout", 0.05), "dora": sheet.flag("peft_config.use_dora"),
        "trained_modules": sheet.names("peft_config.modules_to_save"),
    }  # fmt: skip


def _wishes(sheet: Sheet, run: ForeignRun, total: int) -> None:
    sheet.wants("model", run.model)
    hf.method_wishes(sheet, run, sheet.number("peft_config.lora_alpha", 16) if run.rank else 0)
    sheet.wants("train.global_batch_size", total)
    sheet.wants("train.max_length", run.max_length)
    sheet.lost.append("train_dataset")
    sheet.note("'train_dataset' is not a file that can be read here: name one with data:")
    hf.wishes(sheet, epochs=3.0, learning_rate=1e-4)
