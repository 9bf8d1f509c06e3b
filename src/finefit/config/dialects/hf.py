"""What tools on transformers' Trainer have in common: its arguments, their defaults, and PEFT's.

transformers 5.24 ``training_args.py`` and peft 0.21 ``utils/constants.py``. Bf16 or fp16 means autocast there, except
under DeepSpeed, which converts the module itself (accelerate ``accelerator.py``: ``native_amp``).
"""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from ...foreign import Dtype, ForeignRun, Lengths, Quantised
from .sharding import Sharding, deepspeed, fsdp
from .sheet import Sheet
from .values import LAST_SEED

Attention = Literal["flash", "sdpa", "math"]
Loss = Literal["plain", "kernel", "chunked", "fused"]

#: torch >= 2.8 is what transformers 5 asks for; before, it was adamw_torch.
DEFAULT_OPTIMIZER = "adamw_torch_fused"
ATTENTION: dict[str, Attention] = {
    "eager": "math", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash",
    "flex_attention": "flash", "xformers": "flash", "sage": "flash", "fp8": "flash",
}  # fmt: skip
#: Reasons that several tools share.
PREFERENCE = "preference and reinforcement training is not supervised fine-tuning"
REWARD = "a reward model is no decoder-only language model"
OWN_LOSS = "a loss of its own, which weights tokens by the whole distribution, is not expressed"
RAY = "a run that Ray starts is not expressed"
QAT = "quantisation-aware training is not expressed"
FP8 = "products in 8-bit floats are not expressed"
PARTS = "training some layers and freezing the rest is not expressed"
MULTIMODAL = re.compile(
    r"[-_/](vl|vision|llava|pixtral|voxtral|omni|audio|internvl|paligemma|smolvlm|mllama|whisper|minicpm-?[vo])"
    r"|\dv[lb]?\b|llava|pixtral|voxtral|smolvlm|internvl|paligemma|[a-z]vl[-_\d]",
    re.IGNORECASE,
)
_PACKED_WEIGHTS: tuple[tuple[str, Quantised, str], ...] = (
    (r"gptq", "gptq4", ""),
    (r"bnb[-_]?(4bit|nf4)|[-_]4bit|nf4", "nf4_double", ""),
    (r"awq|aqlm|hqq|eetq|exl2|gguf", "", "weights packed in this way are not expressed"),
    (r"nvfp4|mxfp4|fp8|int4|w4a16", "", "weights packed in this way are not expressed"),
    (r"int8|8bit", "int8", ""),
)
#: What PEFT adapts when it is told nothing, by words in the model's name; the families it knows mostly have q and v.
_PEFT_TARGETS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"gpt-?2|starcoder", ("c_attn",)),
    (r"falcon|bloom|neox|pythia|chatglm", ("query_key_value",)),
    (r"phi-?[12]", ("q_proj", "v_proj", "fc1", "fc2")),
    (r"phi", ("qkv_proj",)),
    (r"", ("q_proj", "v_proj")),
)


@dataclass(frozen=True, slots=True)
class Batch:
    micro: int
    accumulation: int


def batch(sheet: Sheet) -> Batch:
    """Rows of one forward and forwards of one step."""
    if sheet.get("auto_find_batch_size"):
        sheet.note("auto_find_batch_size: the micro-batch becomes smaller where it does not fit")
    accumulation = sheet.size("accumulation", "gradient_accumulation_steps", 1)
    return Batch(sheet.size("micro_batch_size", "per_device_train_batch_size", 8), accumulation)


def sharding(sheet: Sheet) -> Sharding:
    """DeepSpeed or FSDP, as the Trainer's own arguments name them."""
    if sheet.has("deepspeed"):
        return deepspeed(sheet, "deepspeed")
    if sheet.get("fsdp") or sheet.get("fsdp_config"):
        return fsdp(sheet, "fsdp", "fsdp_config")
    return Sharding()


def mixed(sheet: Sheet, how: Sharding, default: bool = False) -> tuple[Dtype | None, bool]:
    """The type of mixed precision, or None without it; and whether autocast brings it."""
    half = sheet.flag("fp16")
    if half and sheet.flag("bf16"):
        sheet.refuse("fp16", "bf16 and fp16 are both on; transformers refuses this too", "switch one of them off")
    compute: Dtype | None = "float16" if half else None
    if sheet.flag("bf16", default and not half) or how.bf16:
        compute = "bfloat16"
    return compute, compute is not None and how.engine != "deepspeed"


def wishes(sheet: Sheet, epochs: float, learning_rate: float) -> None:
    """Our keys for the Trainer's arguments on what is optimised; what is only logged and saved, where it is given."""
    steps = int(sheet.number("max_steps", -1))
    if steps > 0:
        sheet.wants("train.steps", steps)
    sheet.wants("train.epochs", sheet.number("num_train_epochs", epochs))
    sheet.wants("train.learning_rate", sheet.number("learning_rate", learning_rate))
    warmup = sheet.number("warmup_steps", 0) or sheet.number("warmup_ratio", 0)
    sheet.wants("train.warmup_steps", warmup)
    sheet.wants("train.weight_decay", sheet.number("weight_decay", 0.0))
    sheet.wants("train.max_grad_norm", clip(sheet))
    sheet.wants("seed", sheet.whole("seed", 42, 0, LAST_SEED))
    rhythm(sheet, {"save_steps": "save_every", "eval_steps": "eval_every", "logging_steps": "log_every"})
    if sheet.has("save_total_limit"):
        sheet.wants("train.keep_checkpoints", sheet.whole("save_total_limit", 2))
    if sheet.has("output_dir"):
        sheet.wants("output_dir", sheet.text("output_dir"))
    sheet.loses("group_by_length")


def clip(sheet: Sheet) -> float:
    return sheet.number("max_grad_norm", 1.0)


def rhythm(sheet: Sheet, keys: dict[str, str]) -> None:
    """Steps between saves, evaluations, lines; a share of all steps has no counterpart and stays unread."""
    for theirs, ours in keys.items():
        value = sheet.values.get(theirs)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
            sheet.wants(f"train.{ours}", int(sheet.number(theirs, 1)))


def method_wishes(sheet: Sheet, run: ForeignRun, alpha: float) -> None:
    """What is trained: our ``qlora`` is an adapter over packed weights. The head gets no adapter of ours."""
    bits, scales = _PACKED.get(run.quantised, (0, None))
    sheet.wants("method", "qlora" if bits else run.method)
    if run.quantised and not bits:
        sheet.note(f"weights packed as {run.quantised} have no counterpart: name the model before it was packed")
    if bits:
        sheet.wants("qlora.bits", bits)
        sheet.wants("qlora.scales", scales)
    if run.compute_dtype == "float16":  # it was asked for, so it is no choice of a plan's
        sheet.wants("memory.precision", "fp16" if run.method == "lora" else "fp16_mixed")
    if run.method == "lora":
        names = [name for name in run.targets if name != "lm_head"]
        sheet.wants("lora.rank", run.rank)
        sheet.wants("lora.alpha", float(alpha))
        sheet.wants("lora.dropout", run.lora_dropout)
        sheet.wants("lora.targets", names or "all")


def attention(sheet: Sheet, key: str) -> Attention:
    """The kernel an ``attn_implementation`` stands for; transformers' own choice is SDPA."""
    word = sheet.text(key, "sdpa")
    if word in ("flex_attention", "xformers", "sage", "fp8"):
        sheet.note(f"{word} attention is counted as flash attention")
    if "/" in word:  # a kernel from the hub
        sheet.note(f"the attention kernel '{word}' is counted as flash attention")
        return "flash"
    found: Attention = sheet.choice(key, "sdpa", ATTENTION)
    return found


def packed_weights(sheet: Sheet, key: str, model: str) -> Quantised:
    """What the model's name says about weights that are stored packed; its config.json is not here to be asked."""
    for pattern, kind, reason in _PACKED_WEIGHTS:
        if re.search(pattern, model.rpartition("/")[2], re.IGNORECASE):
            if reason:
                sheet.refuse(key, f"'{model}': {reason}")
            else:
                sheet.note(f"the name '{model}' says that its weights are stored as {kind}")
            return kind
    return ""


def refuse_multimodal(sheet: Sheet, key: str, model: str) -> None:
    if MULTIMODAL.search(model):
        sheet.refuse(key, f"'{model}' also takes images or sound; only text models can be read")


def peft_targets(sheet: Sheet, model: str) -> tuple[str, ...]:
    """What PEFT adapts where no target is named."""
    found = next(names for pattern, names in _PEFT_TARGETS if re.search(pattern, model, re.IGNORECASE))
    sheet.note(f"no LoRA target is named: PEFT's own for this family are assumed, {', '.join(found)}")
    return found


#: Our ``qlora.bits`` and ``qlora.scales``.
_PACKED: dict[str, tuple[int, str | None]] = {"nf4_double": (4, "double"), "nf4": (4, "plain"), "int8": (8, None)}
_BLOCK_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIXES = ("model.layers.0.", "model.language_model.layers.0.", "language_model.model.layers.0.", "layers.0.", "")


def targets(sheet: Sheet, key: str) -> tuple[str, ...]:
    """Short names of adapted linears, none for all of a block. One text alone is a pattern on full names, as in PEFT."""
    value = sheet.get(key)
    names = sheet.names(key)
    sheet.tells("targets", key)
    if isinstance(value, str) and len(names) == 1:
        if names[0] in ("all", "all-linear"):
            return ()
        if not names[0].isidentifier():
            return _matching(sheet, key, names[0])
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _matching(sheet: Sheet, key: str, pattern: str) -> tuple[str, ...]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        sheet.wrong(key, f"is not a pattern that can be read: {error}")
    full = {name: "mlp." if name in _BLOCK_LINEARS[4:] else "self_attn." for name in _BLOCK_LINEARS}
    found = tuple(n for n, part in full.items() if any(compiled.fullmatch(f"{p}{part}{n}") for p in _PREFIXES))
    if not found:
        sheet.refuse(key, "the pattern matches no linear layer of a Llama-like block")
    return () if len(found) == len(_BLOCK_LINEARS) else found


def rounded(length: int, multiple: int) -> int:
    """A row's length after padding to a multiple."""
    return multiple * math.ceil(length / multiple)


def lengths(sheet: Sheet, packs: bool, multiple: int = 1, over: Literal["cut", "dropped"] = "cut") -> Lengths | None:
    """How rows vary that are padded to the longest of their micro-batch; the data are not here to be asked."""
    emptied = sheet.whole("torch_empty_cache_steps", 0, 0)
    if packs:
        return None
    sheet.note("rows are as long as the data: any length up to the longest is taken as equally likely")
    return Lengths(over=over, multiple=multiple, emptied_every=emptied)


def liger(sheet: Sheet) -> tuple[Loss, bool]:
    """Loss and kernels of ``use_liger_kernel`` with its ``liger_kernel_config``: all of it, unless told otherwise."""
    parts: dict[str, Any] = sheet.section("liger_kernel_config")
    whole_logits = bool(parts.get("cross_entropy", False))
    fused = bool(parts.get("fused_linear_cross_entropy", not whole_logits))
    loss: Loss = "fused" if fused else "kernel" if whole_logits else "plain"
    return loss, bool(parts.get("rms_norm", True) or parts.get("swiglu", True))


def is_packed(sheet: Sheet, packs: bool, kind: Attention, marks_ends: bool) -> bool:
    """Whether no mask reaches attention. Examples that must not see each other need one, except in a flash kernel."""
    if packs and marks_ends and kind != "flash":
        sheet.note("packed rows without flash attention: transformers builds the mask between examples")
        return False
    return packs
