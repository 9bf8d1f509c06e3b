"""LLaMA-Factory's YAML (``llamafactory-cli train``): how it would run there.

Defaults and habits of ``src/llamafactory`` as of August 2026: ``hparams/*_args.py``, ``model/adapter.py`` (trainable
weights are raised to fp32 unless pure_bf16 or unquantised ZeRO-3), ``model/model_utils/checkpointing.py`` (on unless
disabled), ``train/sft/workflow.py`` (rows padded to a multiple of 8). Files for its v1 have a reader of their own.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from ...foreign import Dtype, ForeignRun, Quantised
from . import hf, optimizers
from .known import LLAMAFACTORY
from .sharding import Sharding, spread
from .sheet import Foreign, Sheet

_STAGES = {"sft": "", "pt": "", "rm": hf.REWARD, "ppo": hf.PREFERENCE, "dpo": hf.PREFERENCE, "kto": hf.PREFERENCE}
_METHODS = {"full": "", "lora": "", "freeze": hf.PARTS, "oft": "orthogonal fine-tuning is not expressed"}
_BLOCKS = "an optimizer that updates one block at a time is not expressed"
_LOW_RANK = "gradients projected to a low rank are not expressed"
_MEGATRON = "a run on Megatron is not expressed"
_UNEXPRESSED = {
    "use_apollo": _LOW_RANK, "use_badam": _BLOCKS, "use_adam_mini": "Adam-mini is not expressed",
    "use_llama_pro": hf.PARTS, "mixture_of_depths": "mixture of depths is not expressed",
    "shift_attn": "shifted sparse attention is not expressed", "fp8": hf.FP8, "use_kt": "experts on the CPU are not expressed",
    "use_dft_loss": hf.OWN_LOSS, "use_asft_loss": "a loss against a second model is not expressed",
    "use_eaft_loss": hf.OWN_LOSS, "use_mca": _MEGATRON, "use_megatron_bridge": _MEGATRON,
    "use_hyper_parallel": "HyperParallel is not expressed", "ray_num_workers": hf.RAY, "ray_run_name": hf.RAY,
    "tensor_model_parallel_size": _MEGATRON, "pipeline_model_parallel_size": _MEGATRON,
    "expert_model_parallel_size": _MEGATRON,
}  # fmt: skip
_PIXELS = (
    "image_max_pixels",
    "image_min_pixels",
    "video_max_pixels",
    "video_maxlen",
    "video_fps",
    "audio_sampling_rate",
)
_VISUAL_TEMPLATE = re.compile(
    r"vl\b|vl_|llava|pixtral|video|audio|omni|internvl|intern_vl|mllama|paligemma|mossvl|_v\b"
)
_ATTENTION: dict[str, hf.Attention] = {
    "auto": "sdpa", "sdpa": "sdpa", "disabled": "math", "fa2": "flash", "fa3": "flash"
}  # fmt: skip
_PAD = 8


@dataclass(frozen=True, slots=True)
class _Precision:
    trained: Dtype
    compute: Dtype
    autocast: bool


def read(sheet: Sheet, devices: int | None = None) -> Foreign:
    """One training file; whether it trains at all is asked first, as the same keys also chat, export and evaluate."""
    _refusals(sheet)
    model = sheet.model("model_name_or_path")
    method: Literal["full", "lora"] = "full" if sheet.text("finetuning_type", "lora") == "full" else "lora"
    how = hf.sharding(sheet)
    quantised = _quantised(sheet, model)
    precision = _precision(sheet, method, how)
    optimizer = _optimizer(sheet)
    adapter = _adapter(sheet) if method == "lora" else {}
    adapter |= optimizers.of_whole(sheet, "use_galore", optimizer, method)
    kernels = _kernels(sheet, how)
    if method == "full" and quantised:
        sheet.refuse("quantization_bit", "packed weights cannot be trained; LLaMA-Factory refuses this too")
    sheet.check(LLAMAFACTORY)
    rows = hf.batch(sheet)
    run = ForeignRun(
        tool="llamafactory", model=model, method=method, micro_batch_size=rows.micro, accumulation=rows.accumulation,
        trained_dtype=precision.trained, compute_dtype=precision.compute, autocast=precision.autocast,
        quantised=quantised, optimizer=optimizer.name, optimizer_bits=optimizer.bits_with(precision.trained),
        foreach=optimizer.foreach, paged=optimizer.paged, clipped=hf.clip(sheet) > 0,
        compiled=sheet.flag("torch_compile"), optimizer_on_host=how.optimizer_on_host,
        parameters_on_host=how.parameters_on_host, load=how.load, spread=spread(sheet, how, devices),
        **adapter, **kernels, **_rows(sheet, kernels["attention"]),
    )  # fmt: skip
    _wishes(sheet, run)
    return sheet.result(run)


def _refusals(sheet: Sheet) -> None:
    if not sheet.flag("do_train"):
        key = next(
            (k for k in ("export_dir", "do_predict", "do_eval", "infer_backend", "do_train") if sheet.has(k)), ""
        )
        sheet.refuse(key or "model_name_or_path", "without do_train: true nothing is trained")
    for key, table, default in (("stage", _STAGES, "sft"), ("finetuning_type", _METHODS, "lora")):
        if reason := sheet.choice(key, default, table):
            sheet.refuse(key, f"{sheet.text(key)}: {reason}")
    sheet.refuse_set(_UNEXPRESSED)
    sheet.refuse_set(dict.fromkeys(_PIXELS, "images, video and sound are not expressed"))
    if _VISUAL_TEMPLATE.search(template := sheet.text("template")):
        sheet.refuse("template", f"'{template}' is for a model that also takes images or sound")
    hf.refuse_multimodal(sheet, "model_name_or_path", sheet.text("model_name_or_path"))


def _quantised(sheet: Sheet, model: str) -> Quantised:
    """On-the-fly quantisation, else what the model's name says; ``fp4`` packs as ``nf4`` does."""
    stored = hf.packed_weights(sheet, "model_name_or_path", model)
    if not sheet.has("quantization_bit") or stored:
        return stored
    way = sheet.text("quantization_method", "bnb").lower()
    bits = sheet.whole("quantization_bit", 4)
    if way not in ("bnb", "bitsandbytes") or bits not in (4, 8):
        sheet.refuse("quantization_bit", f"{bits}-bit weights of {way} are not expressed; bitsandbytes' 4 and 8 are")
    sheet.get("quantization_type")
    if bits == 8:
        return "int8"
    return "nf4_double" if sheet.flag("double_quantization", True) else "nf4"


def _precision(sheet: Sheet, method: str, how: Sharding) -> _Precision:
    """PEFT raises adapters to fp32 by itself, so ``pure_bf16`` leaves only full fine-tuning in bf16."""
    compute, autocast = hf.mixed(sheet, how)
    sheet.note("weights are loaded in the checkpoint's own type: bfloat16 is assumed")
    if sheet.flag("pure_bf16"):
        return _Precision("float32" if method == "lora" else "bfloat16", "bfloat16", autocast)
    if compute:
        return _Precision("float32", compute, autocast)
    return _Precision("float32", "float32" if method == "full" else "bfloat16", False)


def _optimizer(sheet: Sheet) -> optimizers.Optimizer:
    sheet.loses("loraplus_lr_ratio")
    if sheet.get("use_muon"):
        sheet.loses("use_muon")
        return optimizers.AXOLOTL["muon"]
    named = optimizers.named(sheet, "optim", hf.DEFAULT_OPTIMIZER)
    if not sheet.flag("use_galore"):
        return named
    if named.name != "adamw" or named.paged:
        sheet.refuse("optim", f"GaLore of {sheet.text('optim')} is not expressed; that of AdamW is")
    layerwise = sheet.flag("galore_layerwise")
    return optimizers.galore(sheet, "use_galore", named.bits, sheet.whole("galore_rank", 16), layerwise)


def _adapter(sheet: Sheet) -> dict[str, Any]:
    if sheet.has("adapter_name_or_path"):
        sheet.note("training goes on from an adapter: its own rank and targets count, those here are shown")
        sheet.get("adapter_name_or_path")
    whole = sheet.names("additional_target")
    if sheet.get("resize_vocab") and not whole:
        whole = ("embed_tokens", "lm_head")
        sheet.note("resize_vocab without additional_target: embedding and head train as a whole")
    sheet.loses("additional_target", "resize_vocab", "use_dora", "use_rslora", "pissa_init", "adapter_name_or_path")
    return {
        "rank": sheet.size("rank", "lora_rank", 8), "targets": hf.targets(sheet, "lora_target"),
        "lora_dropout": sheet.share("lora_dropout", 0.0), "dora": sheet.flag("use_dora"), "trained_modules": whole,
    }  # fmt: skip


def _kernels(sheet: Sheet, how: Sharding) -> dict[str, Any]:
    """Checkpointing, attention, loss and fused kernels."""
    checkpoints = not sheet.flag("disable_gradient_checkpointing") or how.checkpointing
    reentrant = sheet.flag("use_reentrant_gc", True)
    kind: hf.Attention = sheet.choice("flash_attn", "auto", _ATTENTION)
    loss, kernels = ("fused", True) if sheet.flag("enable_liger_kernel") else ("plain", False)
    if sheet.flag("use_liger_kernel"):
        loss, kernels = hf.liger(sheet)
    offloads = sheet.flag("use_unsloth_gc") and checkpoints
    if sheet.flag("use_unsloth"):
        sheet.note("use_unsloth: its kernels, its fused loss and its checkpoints on the host are assumed")
        kind, loss, kernels, checkpoints, offloads = "flash", "fused", True, True, True
    if sheet.flag("upcast_layernorm"):
        sheet.note("upcast_layernorm: the fp32 copy of the norms is not counted")
        sheet.wants("memory.fp32_islands", ["norms"])
    sheet.get("upcast_lmhead_output")  # the plain loss raises logits anyway
    return {
        "checkpointing": "full" if checkpoints else "none", "activations_on_host": offloads, "attention": kind,
        "reentrant": bool(checkpoints and reentrant and not how.checkpointing),
        "loss": loss, "fused_kernels": kernels,
    }  # fmt: skip


def _rows(sheet: Sheet, kind: hf.Attention) -> dict[str, Any]:
    """Length and packing: packed rows are full and their padding is not masked, unless ``neat_packing`` marks ends."""
    pretrains = sheet.text("stage", "sft") == "pt"
    neat = sheet.flag("neat_packing")
    packs = neat or sheet.flag("packing", pretrains)
    length = sheet.size("max_length", "cutoff_len", 2048)
    if pretrains:
        sheet.note("continued pre-training: every token is trained on")
    return {
        "max_length": length if pretrains else hf.rounded(length, _PAD),
        "packed": hf.is_packed(sheet, packs, kind, marks_ends=neat),
        "lengths": hf.lengths(sheet, packs, _PAD),
    }  # fmt: skip


def _wishes(sheet: Sheet, run: ForeignRun) -> None:
    sheet.wants("model", run.model)
    sheet.wants("data", _data(sheet, "dataset"))
    sheet.wants("eval_data", _data(sheet, "eval_dataset"))
    hf.method_wishes(sheet, run, sheet.number("lora_alpha", 2 * run.rank) if run.rank else 0)
    sheet.wants("train.global_batch_size", run.micro_batch_size * run.accumulation * run.spread.data)
    sheet.wants("train.max_length", sheet.whole("cutoff_len", 2048))
    if sheet.flag("disable_shuffling"):
        sheet.wants("train.order", "as_given")
    hf.wishes(sheet, epochs=3.0, learning_rate=5e-5)


def _data(sheet: Sheet, key: str) -> str | None:
    """The one local file behind a name of ``dataset_info.json``; several, or columns of other names, are not ours."""
    names = sheet.names(key)
    folder = sheet.text("dataset_dir", "data")
    info = sheet.find(f"{folder}/dataset_info.json") if len(names) == 1 else None
    try:
        entry = json.loads(info.read_text("utf-8")).get(names[0], {}) if info else {}
    except (OSError, ValueError, AttributeError):
        entry = {}
    if info and isinstance(entry, dict) and isinstance(entry.get("file_name"), str) and not entry.get("columns"):
        found = sheet.data_file(str(info.parent / entry["file_name"]))
        if found:
            return found
    if names:
        sheet.lost.append(key)
        sheet.note(f"the data of '{key}' is not a file that can be read here: name one with data:")
    return None
