"""The keys of a run file. Every ``memory`` key is ``auto`` or a value that the plan must keep to.

51 keys in all. A key sets what is trained or what the plan may use; none of them switches code.
It declines foreign spellings (each is named in a hint) and values that YAML quietly turns into something else
(``true`` where a number belongs).
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..errors import ConfigError
from ..spec import CheckpointingKind, PrecisionKind
from ..units import MOST_BYTES, parse_budget
from ..updating import OPTIMIZERS, OptimizerKind, Rounding
from .parallel import degrees, words_of

#: Budgets are only read against a real device by the plan; for their spelling any device will do that is larger than
#: the largest amount there is, so that no message speaks of this one.
_NOMINAL_TOTAL_BYTES = 2 * MOST_BYTES

Auto = Literal["auto"]


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"a number is needed, not {str(value).lower()}")
    return value


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Share = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, lt=1)]
NotNegative = Annotated[float, BeforeValidator(_no_bool), Field(ge=0)]
MoreThanZero = Annotated[float, BeforeValidator(_no_bool), Field(gt=0)]


def _budget(text: str) -> str:
    if text != "auto":
        try:
            parse_budget(text, _NOMINAL_TOTAL_BYTES)
        except ConfigError as error:
            raise ValueError(f"{error.message}; {error.hint}") from error
    return text


def _text(text: str) -> str:
    """A name of something: the system cuts names at a NUL, or refuses them long after this."""
    if "\0" in text:
        raise ValueError("a NUL character cannot be in a name")
    return text


def _folder_name(name: str) -> str:
    """One component of a path, so that a run stays inside ``output_dir``."""
    if name.strip() in ("", ".", "..") or "/" in name or "\\" in name:
        raise ValueError(
            f"'{name}' is not the name of one folder; say where with output_dir, and name without / and .."
        )
    return name


def _checkpointing(value: Any) -> Any:
    """YAML's on and off, and the word none, for all blocks and no block."""
    if isinstance(value, bool):
        return "all" if value else 0
    return 0 if value == "none" else value


def _place(value: Any) -> Any:
    """As other tools call the places, and YAML's off."""
    known = {False: "none", "off": "none", "false": "none", "cpu": "host", "ram": "host", "nvme": "disk"}
    return known.get(value, value) if isinstance(value, str | bool) else value


def _names(value: Any) -> Any:
    """``q_proj,v_proj`` and ``[all]`` as people also write them."""
    if isinstance(value, str) and value != "all":
        return [name.strip() for name in value.split(",") if name.strip()]
    return "all" if isinstance(value, list) and value == ["all"] else value


# How the rules of memory.fp32_islands are also said.
_ISLANDS = {"norm": "norms", "layernorm": "norms", "layernorms": "norms", "routers": "router", "lm_head": "head"}


def _islands(value: Any) -> Any:
    """``norms,head`` and none; each once, in one order: what is the same wish is the same plan."""
    names = () if value in (False, "none", "off", "false") else _names(value)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return value
    for name in names:
        if not re.fullmatch(r"[\w.*?-]+", name):
            raise ValueError(f"'{name}' is no name of modules; say norms, router, head, or one as q_norm or mlp.*")
    return "auto" if list(names) == ["auto"] else tuple(sorted({_ISLANDS.get(name, name) for name in names}))


def _bits(value: Any) -> Any:
    """Another number of bits is told the nearest there is."""
    known = (2, 3, 4, 8)
    if isinstance(value, int | float) and not isinstance(value, bool) and value not in known:
        near = min(known, key=lambda bits: abs(bits - value))
        raise ValueError(f"must be 2, 3, 4 or 8, not {value}; did you mean {near}?")
    return value


Offload = Annotated[Auto | Literal["none", "host", "disk"], BeforeValidator(_place)]


def _optimizer(value: Any) -> Any:
    """Another tool's name for one of them is told ours."""
    ours = OPTIMIZERS.get(value.lower()) if isinstance(value, str) else None
    if ours:
        raise ValueError(f"'{value}' is another tool's word; say {ours}")
    return value


Text = Annotated[str, AfterValidator(_text)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True, protected_namespaces=()
    )


class Lora(_Section):
    """The adapter, when ``method`` is lora or qlora or becomes one of them."""

    rank: Positive = Field(default=16, description="rank of the two adapter matrices")
    alpha: MoreThanZero = Field(default=32.0, description="scale of the adapter is alpha / rank; 2 × rank when absent")
    dropout: Share = Field(default=0.0, description="dropout on the adapter's input")
    targets: Annotated[Literal["all"] | tuple[str, ...], BeforeValidator(_names)] = Field(
        default="all", description="linear layers of a block that get an adapter: all, or names as q_proj"
    )

    @model_validator(mode="before")
    @classmethod
    def _alpha_follows_rank(cls, values: Any) -> Any:
        rank = values.get("rank") if isinstance(values, Mapping) else None
        if rank is None or "alpha" in values:
            return values
        try:
            alpha = 2.0 * float(rank)
        except (TypeError, ValueError):
            return values  # the rank itself is reported
        return {**values, "alpha": alpha} if alpha > 0 else values

    def names(self) -> tuple[str, ...]:
        """The targets by name; empty means every linear layer of a block."""
        return () if self.targets == "all" else self.targets


class Qlora(_Section):
    """The quantised base under the adapter, when ``method`` is qlora or becomes it."""

    bits: Annotated[Literal[2, 3, 4, 8], BeforeValidator(_bits)] = Field(
        default=4,
        description="of a weight of the base's linear layers: 8 (int8), 4 (NF4), 3 or 2 (levels for normal weights)",
    )
    scales: Literal["double", "plain"] = Field(
        default="double", description="a scale for 64 weights: quantised again, or plain fp32"
    )

    def pins(self) -> tuple[tuple[str, str], ...]:
        """The plan's constraints: it never changes what the base is."""
        return tuple((f"qlora.{key}", str(value)) for key, value in self.model_dump().items())


class Train(_Section):
    """What is optimised. Nothing here is changed to save memory."""

    global_batch_size: Positive = Field(default=16, description="examples per optimizer step, on all devices together")
    steps: Positive | None = Field(default=None, description="optimizer steps; wins over epochs when given")
    epochs: MoreThanZero = Field(default=1.0, description="passes over the data when steps is not given")
    learning_rate: Auto | MoreThanZero = Field(
        default="auto",
        description="peak learning rate; auto is 2e-4 for lora and qlora, 2e-5 for full, a fifth of it for lion; sgd has none",
    )
    optimizer: Annotated[OptimizerKind, BeforeValidator(_optimizer)] = Field(
        default="adamw", description="what keeps how much of each weight; never changed by the plan"
    )
    warmup_steps: NotNegative = Field(default=0.03, description="steps of warm-up; below 1 a share of all steps")
    weight_decay: NotNegative = Field(default=0.0, description="decoupled weight decay")
    max_grad_norm: NotNegative = Field(
        default=1.0, description="clip the global gradient norm to this; 0 does not clip"
    )
    max_skips: Count = Field(
        default=3,
        description="updates in a row that may be skipped as loss or gradient is not finite; then it stops (fp16: 25)",
    )
    max_length: Positive = Field(default=1024, description="longest example, tokens")
    too_long: Literal["truncate", "drop", "error"] = Field(
        default="truncate", description="what happens to longer examples"
    )
    bad_rows: Literal["strict", "skip"] = Field(
        default="strict",
        description="what happens at a row of the data that cannot be used: stop there, or leave it out",
    )
    eval_every: Count = Field(default=50, description="steps between evaluations; 0 only before and after training")
    save_every: Count = Field(default=50, description="steps between checkpoints; 0 only at the end")
    keep_checkpoints: Positive = Field(default=2, description="newest checkpoints to keep")
    log_every: Positive = Field(default=1, description="steps between step events")
    order: Literal["shuffled", "as_given"] = Field(default="shuffled", description="order of the examples in an epoch")


class Memory(_Section):
    """What the plan may use and must keep to. ``auto`` leaves it to the plan."""

    budget: Annotated[str, AfterValidator(_budget)] = Field(
        default="auto", description="memory of the device to use: 8GiB, 24GB, 80%, -1GiB (leave that much), 6GiB..8GiB"
    )
    precision: Literal["auto", PrecisionKind] = Field(
        default="auto", description="of weights and arithmetic; fp16 is never chosen unasked"
    )
    fp32_islands: Annotated[Auto | tuple[str, ...], BeforeValidator(_islands)] = Field(
        default="auto",
        description="what stays in fp32 in a run of 16 bits: norms, router, head, or names of modules as q_norm",
    )
    checkpointing: Annotated[Auto | Literal["all"] | Count, BeforeValidator(_checkpointing)] = Field(
        default="auto", description="blocks whose activations are recomputed: a number, all, none"
    )
    checkpointing_kind: Auto | CheckpointingKind = Field(
        default="auto",
        description="what of such a block is recomputed: block (all), attention, mlp, selective (all but products and "
        "attention); nested recomputes twice, in groups that keep one input",
    )
    activation_offload: Offload = Field(
        default="auto", description="where what checkpointed blocks keep waits for backward: none, host, disk"
    )
    packing: Auto | bool = Field(
        default="auto", description="several examples in one row, none padded to a common length"
    )
    micro_batch_size: Auto | Positive = Field(default="auto", description="examples per forward pass")
    micro_batch_tokens: Auto | Positive = Field(
        default="auto", description="tokens per forward pass; a packed row is filled up to a multiple of 64"
    )
    loss_chunk: Auto | Count = Field(
        default="auto", description="labelled tokens per slice of the logits; 0 computes them whole"
    )
    fused_backward_step: Auto | bool = Field(
        default="auto",
        description="step each weight in backward and free its gradient; needs max_grad_norm 0 and one micro-batch",
    )
    rounding: Auto | Rounding = Field(
        default="auto",
        description="of weights and states kept in bf16; auto is nearest, stochastic keeps small updates",
    )
    fused_ops: Auto | bool = Field(default="auto", description="finefit's own modules that keep less for backward")

    allocator: Literal["auto", "default", "expandable", "trimmed", "tight"] = Field(
        default="auto",
        description="a GPU's segments grow (expandable), a CPU's heap gives back at once (trimmed; tight: all, slow)",
    )
    parameter_offload: Offload = Field(
        default="auto", description="where frozen weights are that a block does not need now: none stays on the device"
    )
    optimizer_offload: Offload = Field(
        default="auto", description="optimizer states off the device: on the host (a GPU's), on disk, none"
    )

    parallel: Annotated[str, BeforeValidator(words_of)] = Field(
        default="auto",
        description="how several devices share the run: data, zero1 (optimizer states), zero2 (gradients too), zero3 (weights "
        "too), tensor2, pipeline2, context2 (so many devices for a matrix, the blocks, an example); some of them, as "
        "zero2,tensor4; of a pipeline also its order: 1f1b, gpipe, interleaved2 (so many stages a device)",
    )

    def pins(self) -> tuple[tuple[str, str], ...]:
        """What the user fixed, as the plan's constraints: every key but budget and precision that is not ``auto``."""
        kept = self.model_dump(exclude={"budget", "precision", "parallel"})
        said = {key: ",".join(value) if isinstance(value, tuple) else str(value).lower() for key, value in kept.items()}
        return (*((key, word) for key, word in said.items() if word != "auto"), *degrees(self.parallel).items())


class Hardware(_Section):
    """Where it runs."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = Field(
        default="auto", description="auto, cpu, cuda, cuda:1"
    )
    devices: Auto | Positive = Field(
        default="auto",
        description="how many of this machine's devices; a CPU's cores and memory are shared out. auto: "
        "all GPUs, one CPU",
    )
    threads: Auto | Positive = Field(default="auto", description="CPU threads of each process")
    deepspeed: Text | None = Field(
        default=None,
        description="DeepSpeed's JSON: several devices are divided by its engine, as its zero_optimization says",
    )


class Config(_Section):
    """One run."""

    model: Annotated[str, Field(min_length=1), AfterValidator(_text)] = Field(
        description="a folder with a transformers model, or a known name"
    )
    data: Text | None = Field(default=None, description="training examples: a file, or a known name")
    eval_data: Text | None = Field(default=None, description="held-out examples; absent, a few are set aside from data")
    output_dir: Text = Field(default="runs", description="folder of run folders")
    name: Annotated[Text, AfterValidator(_folder_name)] | None = Field(
        default=None, description="name of the run folder; absent, made from model and time"
    )
    seed: Count = Field(default=0, description="of the order, the adapter's start and dropout")
    method: Literal["auto", "full", "lora", "qlora"] = Field(
        default="auto", description="auto: the first of full, lora, qlora that fits"
    )
    lora: Lora = Lora()
    qlora: Qlora = Qlora()
    train: Train = Train()
    memory: Memory = Memory()
    hardware: Hardware = Hardware()


#: Section -> its keys; "" holds the keys outside any section. The one place the loader learns the keys from.
SECTIONS: dict[str, tuple[str, ...]] = {
    "": tuple(key for key, field in Config.model_fields.items() if not isinstance(field.default, _Section)),
    **{
        key: tuple(type(field.default).model_fields)
        for key, field in Config.model_fields.items()
        if isinstance(field.default, _Section)
    },
}

#: Our key -> how other tools spell it in their argument classes and example files.
_SPELLINGS: dict[str, str] = {
    "model": "model_name_or_path base_model model_id",
    "data": "dataset datasets dataset_name train_dataset train_file",
    "eval_data": "eval_dataset validation_file test_datasets val_set_size",
    "name": "run_name",
    "seed": "data_seed",
    "method": "finetuning_type adapter tuner_type train_type use_peft",
    "lora.rank": "lora_r lora_rank r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "lora_target lora_target_modules target_modules lora_target_linear lora_attn_modules",
    "qlora.bits": "quantization_bit load_in_4bit load_in_8bit quant_bits",
    "qlora.scales": "double_quantization bnb_4bit_use_double_quant",
    "train.global_batch_size": "gradient_accumulation_steps batch_size",
    "memory.micro_batch_size": "per_device_train_batch_size micro_batch",
    "train.steps": "max_steps num_steps",
    "train.epochs": "num_train_epochs num_epochs",
    "train.learning_rate": "lr",
    "train.optimizer": "optim optimizer_type optimizer_name",
    "train.warmup_steps": "warmup_ratio num_warmup_steps",
    "train.max_grad_norm": "clip_grad_norm gradient_clipping max_norm",
    "train.max_length": "cutoff_len sequence_len max_seq_length max_seq_len max_context_length model_max_length",
    "train.eval_every": "eval_steps",
    "train.save_every": "save_steps",
    "train.log_every": "logging_steps",
    "train.keep_checkpoints": "save_total_limit",
    "train.order": "train_sampling_strategy",
    "memory.precision": "bf16 fp16 pure_bf16 dtype torch_dtype",
    "memory.fp32_islands": "upcast_layernorm fp32_norms keep_in_fp32_modules",
    "memory.checkpointing": "gradient_checkpointing activation_checkpointing enable_activation_checkpointing"
    " disable_gradient_checkpointing",
    "memory.checkpointing_kind": "recompute_granularity selective_ac_option",
    "memory.activation_offload": "enable_activation_offloading activation_offloading",
    "memory.packing": "sample_packing neat_packing padding_free",
    "memory.rounding": "bf16_stochastic_round stochastic_rounding",
    "memory.fused_ops": "use_liger_kernel enable_liger_kernel",
    "memory.optimizer_offload": "offload_optimizer cpu_offload optimizer_in_cpu fsdp_offload_params",
    "memory.fused_backward_step": "optimizer_in_bwd",
    "hardware.deepspeed": "ds_config deepspeed_config deepspeed_config_file",
    "memory.budget": "gpu_memory_limit max_memory",
    "memory.parameter_offload": "offload_param fsdp_offload_params blocks_to_swap",
    "memory.parallel": "zero zero_stage zero_optimization fsdp tensor_parallel tensor_parallel_degree"
    " tensor_parallel_size tp_size pipeline_parallel pipeline_parallel_degree pp_size context_parallel"
    " context_parallel_degree context_parallel_size cp_size sequence_parallel_degree mesh",
    "hardware.devices": "nproc_per_node num_gpus n_gpus num_processes n_gpu gpus_per_node",
}  # fmt: skip

FOREIGN: dict[str, str] = {foreign: ours for ours, spellings in _SPELLINGS.items() for foreign in spellings.split()}

_QUANTISED_NOTE = "say method: qlora; qlora.bits is 4 unless you say 8, 3 or 2"
_BATCH_NOTE = "say train.global_batch_size, the examples of one optimizer step; the plan chooses how to split it"

#: What a hint says where the foreign key does not mean quite the same.
FOREIGN_NOTES: dict[str, str] = {
    "gradient_accumulation_steps": _BATCH_NOTE,
    "batch_size": _BATCH_NOTE,
    "per_device_train_batch_size": f"{_BATCH_NOTE}, or pin memory.micro_batch_size",
    "load_in_4bit": _QUANTISED_NOTE,
    "load_in_8bit": _QUANTISED_NOTE,
    "val_set_size": "held-out examples are named by eval_data; absent, a few are set aside",
    "bf16_stochastic_round": "say memory.rounding: stochastic",
    "stochastic_rounding": "say memory.rounding: stochastic",
    "warmup_ratio": "it is train.warmup_steps here, a share of all steps when below 1",
}
