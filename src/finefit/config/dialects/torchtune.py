"""torchtune's YAML (``tune run RECIPE --config``): how it would run there.

Follows the recipes and modules of April 2026: everything is stored and computed in ``dtype`` (no autocast), AdamW's
moments too; ``modules/loss/cross_entropy_loss.py`` (head and loss in 8 chunks, each kept for backward); NF4 of torchao
has its scales quantised; ``data/_collate.py`` pads on the right and passes no mask. The file does not name its recipe:
the ``tune run`` line torchtune's own files carry in a comment does, else keys that only the distributed recipes have.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import did_you_mean
from ...foreign import Dtype, ForeignRun, Spread
from . import hf, optimizers
from .known import TORCHTUNE
from .sharding import Degrees, Sharding, spread
from .sheet import Foreign, Sheet
from .values import LAST_SEED

_UNEXPRESSED = {
    "teacher_model": "distilling a teacher is not expressed", "quantizer": hf.QAT, "policy_model": hf.PREFERENCE,
    "reward_and_value_model": hf.PREFERENCE, "ref_checkpointer": hf.PREFERENCE, "grpo_samples": hf.PREFERENCE,
    "reward_functions": hf.PREFERENCE, "enable_fp8_training": hf.FP8, "datasets": "several sets with images are not expressed",
    "model.encoder_trainable": "a model with an encoder is not expressed",
    "model.decoder_trainable": "a model with an encoder is not expressed",
}  # fmt: skip
_LOSSES: dict[str, hf.Loss] = {
    "LinearCrossEntropyLoss": "chunked", "CEWithChunkedOutputLoss": "chunked", "CrossEntropyLoss": "plain",
}  # fmt: skip
_DTYPES: dict[str, Dtype] = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", "fp16": "float16",
}  # fmt: skip
_NAMES_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "output_proj")
_NAMES_OF_MLP = ("gate_proj", "down_proj", "up_proj")
_DISTRIBUTED = (
    "custom_sharded_layers", "fsdp_cpu_offload", "fsdp_reshard_after_forward", "tensor_parallel_dim", "tensor_parallel_plan",
    "data_parallel_shard_dim", "data_parallel_replicate_dim", "context_parallel_dim", "use_distributed_state_dict",
)  # fmt: skip
_LAUNCH = re.compile(r"tune run((?:\s+--\w+[ =]\S+)*)\s+([\w/]+)")
#: Stands for "as long as the longest example", where ``max_seq_len`` is null.
LONGEST = 2048
#: Family of a builder -> hub id; {size} is the builder's, as the hub writes it, {tuned} its ending.
_HUB = {
    "llama2": "meta-llama/Llama-2-{size}-hf", "code_llama2": "codellama/CodeLlama-{size}-hf",
    "llama3": "meta-llama/Meta-Llama-3-{SIZE}-Instruct", "llama3_1": "meta-llama/Llama-3.1-{SIZE}-Instruct",
    "llama3_2": "meta-llama/Llama-3.2-{SIZE}-Instruct", "llama3_3": "meta-llama/Llama-3.3-{SIZE}-Instruct",
    "mistral": "mistralai/Mistral-{SIZE}-v0.1", "gemma": "google/gemma-{size}", "gemma2": "google/gemma-2-{size}",
    "phi3": "microsoft/Phi-3-mini-4k-instruct", "phi4": "microsoft/phi-4", "qwen2": "Qwen/Qwen2-{SIZE}-Instruct",
    "qwen2_5": "Qwen/Qwen2.5-{SIZE}{-tuned}", "qwen3": "Qwen/Qwen3-{SIZE}{-base}",
    "smollm2": "HuggingFaceTB/SmolLM2-{SIZE}",
}  # fmt: skip
#: The longest family that fits: llama3_1_8b is no llama3 of 1.8 billion.
_BUILDER = re.compile(
    rf"(?P<adapter>q?lora_)?(?P<family>{'|'.join(sorted(_HUB, key=len, reverse=True))})"
    r"_(?P<size>mini|\d+(?:_\d)?[bm])(?:_(?P<tuned>base|instruct))?"
)


@dataclass(frozen=True, slots=True)
class _Model:
    hub_id: str
    adapts: bool
    packs: bool


def read(sheet: Sheet, devices: int | None = None) -> Foreign:
    """One config of a fine-tuning recipe."""
    model = _refusals(sheet)
    dtype: Dtype = sheet.choice("dtype", "bf16", _DTYPES)
    optimizer, on_host = _optimizer(sheet)
    method: Literal["full", "lora"] = "lora" if model.adapts else "full"
    adapter = _adapter(sheet, model) if model.adapts else {}
    kernel = sheet.text("loss._component_").rpartition(".")[2]
    if kernel and kernel not in _LOSSES:
        sheet.refuse("loss", f"{kernel}: {hf.PREFERENCE if 'PO' in kernel else 'a loss that is not expressed'}")
    sheet.check(TORCHTUNE)
    how, over = _spread(sheet, devices)
    checkpoints = sheet.flag("enable_activation_checkpointing")
    some = sheet.text("ac_mode") == "selective"
    run = ForeignRun(
        tool="torchtune", model=model.hub_id, method=method, micro_batch_size=sheet.size("micro_batch_size", "batch_size", 1),
        max_length=_length(sheet), accumulation=sheet.size("accumulation", "gradient_accumulation_steps", 1),
        packed=sheet.flag("dataset.packed"), lengths=hf.lengths(sheet, sheet.flag("dataset.packed")), frozen_dtype=dtype, trained_dtype=dtype, compute_dtype=dtype,
        quantised="nf4_double" if model.packs else "", optimizer=optimizer.name,
        optimizer_bits=optimizer.bits_with(dtype), foreach=optimizer.foreach, paged=optimizer.paged,
        step_in_backward=sheet.flag("optimizer_in_bwd"), clipped=sheet.number("clip_grad_norm", 0.0) > 0,
        checkpointing="selective" if some else "full" if checkpoints else "none", attention="flash",
        loss=_LOSSES.get(kernel, "chunked"), loss_chunks=sheet.whole("loss.num_output_chunks", 8),
        compiled=bool(sheet.get("compile")), activations_on_host=sheet.flag("enable_activation_offloading"),
        optimizer_on_host=how.optimizer_on_host or on_host, parameters_on_host=how.parameters_on_host, spread=over,
        **adapter,
    )  # fmt: skip
    _wishes(sheet, run)
    return sheet.result(run)


def _refusals(sheet: Sheet) -> _Model:
    """What is no supervised fine-tuning of a text model; and the model."""
    sheet.refuse_set(_UNEXPRESSED)
    missing = next((key for key in ("loss", "optimizer", "dataset", "model") if not sheet.has(key)), "")
    if missing and not sheet.problems:
        sheet.refuse(next(iter(sheet.values), ""), f"a file without '{missing}' trains nothing")
    for key in ("loss", "optimizer", "dataset", "model"):
        if sheet.has(key) and not sheet.text(f"{key}._component_"):
            example = "torchtune.models.llama3_2.llama3_2_1b" if key == "model" else "the class or builder to make"
            sheet.refuse(
                key, "names no _component_; torchtune refuses this too", f"say {key}: {{_component_: {example}}}"
            )
    data = sheet.text("dataset._component_")
    if "multimodal" in data or "vision" in data:
        sheet.refuse("dataset", "images are not expressed")
    if "paired" in data or "preference" in data:
        sheet.refuse("dataset", hf.PREFERENCE)
    return _model(sheet)


def _model(sheet: Sheet) -> _Model:
    builder = sheet.text("model._component_").rpartition(".")[2]
    found = _BUILDER.fullmatch(builder)
    if not found:
        if builder:
            kind = "a model that also takes images" if "vision" in builder or "llama4" in builder else "not known here"
            sheet.refuse("model", f"the builder {builder} is {kind}")
        return _Model("", False, False)
    size = found["size"].replace("_", ".")
    base = found["tuned"] == "base" or (found["family"] == "qwen2_5" and not found["tuned"] and size in ("0.5b", "3b"))
    hub_id = (
        _HUB[found["family"]].replace("{size}", size).replace("{SIZE}", size.upper())
        .replace("{-tuned}", "" if base else "-Instruct").replace("{-base}", "-Base" if base else "")
    )  # fmt: skip
    packs = (found["adapter"] or "") == "qlora_" or sheet.flag("model.quantize_base")
    return _Model(hub_id, bool(found["adapter"]), packs)


def _adapter(sheet: Sheet, model: _Model) -> dict[str, Any]:
    """Targets by transformers' names: torchtune calls the output projection of attention ``output_proj``."""
    given = sheet.names("model.lora_attn_modules")
    if not given or any(name not in _NAMES_OF_ATTENTION for name in given):
        hint = next((near for name in given if (near := did_you_mean(name, _NAMES_OF_ATTENTION))), "")
        told = ", ".join(given) or "nothing"
        sheet.refuse(
            "model.lora_attn_modules", f"{told}: one or more of {', '.join(_NAMES_OF_ATTENTION)} are needed", hint
        )
    names = [name.replace("output_proj", "o_proj") for name in given]
    if sheet.flag("model.apply_lora_to_mlp"):
        names += _NAMES_OF_MLP
    if sheet.flag("model.apply_lora_to_output"):
        names.append("lm_head")
    sheet.loses("model.use_dora", "model.apply_lora_to_output")
    return {
        "rank": sheet.size("rank", "model.lora_rank", 8), "targets": tuple(names),
        "lora_dropout": sheet.share("model.lora_dropout", 0.0), "dora": sheet.flag("model.use_dora"),
    }  # fmt: skip


def _optimizer(sheet: Sheet) -> tuple[optimizers.Optimizer, bool]:
    """The optimizer, and whether torchao keeps its states on the host. ``fused`` and ``foreach`` are torch's."""
    name = sheet.text("optimizer._component_", "torch.optim.AdamW")
    on_host = name.endswith("CPUOffloadOptimizer")
    chosen = optimizers.CLASSES["torch.optim.AdamW"]
    if not on_host:
        chosen = optimizers.named(sheet, "optimizer._component_", "torch.optim.AdamW", optimizers.CLASSES)
    if sheet.flag("optimizer.fused") or (sheet.has("optimizer.foreach") and not sheet.flag("optimizer.foreach")):
        chosen = optimizers.Optimizer(chosen.name, chosen.bits, False, chosen.paged)
    if sheet.number("optimizer.momentum", 0) and chosen.name == "sgd":
        chosen = optimizers.Optimizer("sgd_momentum", chosen.bits, chosen.foreach)
        sheet.wish.pop("train.optimizer")
        sheet.loses("optimizer.momentum")
    return chosen, on_host


def _spread(sheet: Sheet, devices: int | None) -> tuple[Sharding, Spread]:
    """FSDP 2 over all devices of a distributed recipe; ``fsdp_cpu_offload`` moves weights and optimizer to the host."""
    launch = _LAUNCH.search(sheet.path.read_text("utf-8-sig"))
    recipe = launch[2] if launch else ""
    told = re.search(r"nproc[-_]per[-_]node[ =](\d+)", launch[1]) if launch else None
    degrees = _degrees(sheet)
    for key in _DISTRIBUTED:
        sheet.get(key)
    spans = any(sheet.has(key) for key in _DISTRIBUTED) or (devices or 1) > 1
    if not recipe and not spans:
        sheet.note("the file does not name its recipe: one device is assumed")
    if not ("distributed" in recipe or (not recipe and spans)):
        return Sharding(), spread(sheet, Sharding(), 1)
    offloads = sheet.flag("fsdp_cpu_offload")
    how = Sharding("fsdp2", 3 if sheet.flag("fsdp_reshard_after_forward", True) else 2, offloads, offloads)
    if told and not devices:
        devices = int(told[1])
        sheet.note(f"the comment's tune run line asks for {devices} devices")
    return how, spread(sheet, how, devices, degrees)


def _degrees(sheet: Sheet) -> Degrees | None:
    tensor, context = sheet.whole("tensor_parallel_dim", 1), sheet.whole("context_parallel_dim", 1)
    replicate = sheet.whole("data_parallel_replicate_dim", 1)
    shard = int(sheet.number("data_parallel_shard_dim", -1))
    if max(tensor, context, replicate, shard) <= 1:
        return None
    return Degrees(max(shard, 0), replicate, tensor, context)


def _length(sheet: Sheet) -> int:
    if sheet.has("tokenizer.max_seq_len"):
        return sheet.size("max_length", "tokenizer.max_seq_len", LONGEST)
    sheet.note(f"no tokenizer.max_seq_len, rows are as long as the longest example: {LONGEST} is assumed")
    return LONGEST


def _wishes(sheet: Sheet, run: ForeignRun) -> None:
    sheet.wants("model", run.model)
    sheet.wants("data", _data(sheet))
    hf.method_wishes(sheet, run, sheet.number("model.lora_alpha", 16) if run.rank else 0)
    sheet.wants("train.global_batch_size", run.micro_batch_size * run.accumulation * run.spread.data)
    sheet.wants("train.max_length", run.max_length)
    epochs = sheet.number("epochs", 1)
    if sheet.has("max_steps_per_epoch"):
        sheet.wants("train.steps", int(sheet.whole("max_steps_per_epoch", 1) * epochs))
    sheet.wants("train.epochs", epochs)
    sheet.wants("train.learning_rate", sheet.number("optimizer.lr", 1e-3))
    sheet.wants("train.warmup_steps", sheet.number("lr_scheduler.num_warmup_steps", 0))
    sheet.wants("train.weight_decay", sheet.number("optimizer.weight_decay", 0.01))
    sheet.wants("train.max_grad_norm", sheet.number("clip_grad_norm", 0.0))
    sheet.wants("train.order", "shuffled" if sheet.flag("shuffle", True) else "as_given")
    if sheet.has("seed"):
        sheet.wants("seed", sheet.whole("seed", 0, 0, LAST_SEED))
    if sheet.has("output_dir"):
        sheet.wants("output_dir", sheet.text("output_dir"))
    for key in ("tokenizer._component_", "checkpointer", "lr_scheduler._component_"):
        sheet.get(key)


def _data(sheet: Sheet) -> str | None:
    files = sheet.get("dataset.data_files")
    found = sheet.data_file(files) if isinstance(files, str) else None
    sheet.get("dataset.source")
    if not found:
        sheet.lost.append("dataset")
        sheet.note("the data is not a file that can be read here: name one with data:")
    return found
