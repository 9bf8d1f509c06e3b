"""ForeignRun: a training step as another tool would run it, with that tool's own habits spelled out. Torch-free facts.

Dialect readers fill it from a run file and the tool's defaults; ``simulate`` steps it. Where a tool leaves something
open, the reader decides and says so in ``notes``.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16", "float16"]
Quantised = Literal["", "nf4", "nf4_double", "int8", "gptq4", "gptq4_rows"]


@dataclass(frozen=True, slots=True)
class Spread:
    """How a run is spread over devices; every degree is 1 on a single device."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shard_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage; FSDP's full shard is 3. Parameters are sharded over ``shards`` ranks."""
    shards: int = 1
    engine: Literal["", "ddp", "fsdp1", "fsdp2", "deepspeed", "gemini", "naive"] = ""
    """naive: layers in sequence over the devices of one process (``device_map``); gemini: ColossalAI's, stage 3."""
    reduce_dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """What gradients are reduced in; empty: what they are computed in."""
    reduces: Literal["each", "last"] = "each"
    """Gradients are reduced after each micro-step, or whole ones wait for the last of a step (``no_sync``)."""
    units: Literal["apart", "mixed"] = "apart"
    """FSDP 1: frozen and trained weights have units of their own, or share the flat parameter of a block, whose
    gradient is of all of it (``use_orig_params`` without a policy for adapters)."""
    stays: Literal["", "last", "all", "step"] = ""
    """The blocks that are not let go between their forward and their backward; step: nor before the next micro-step."""
    micro_batches: int = 1
    """A pipeline's, each of ``micro_batch_size`` rows."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    stages_a_rank: int = 1
    gathers: Literal["allocated", "symmetric", "whole"] = "allocated"
    """Tensor parallel: rows are gathered into tensors of their own, or product and communication are one kernel over
    symmetric memory (asynchronous TP), which is outside the allocator. whole: nothing but weights is cut, products are
    summed into whole ones on each rank (ColossalAI's 1D)."""

    overlaps: bool = True
    """DeepSpeed communicates on streams of its own, beside a second bucket (``overlap_comm``)."""
    bucket: int = 0
    """DeepSpeed's ``reduce_bucket_size`` in elements; -1 for ``auto``, 0 where nothing says it."""

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def stages_whole(self) -> int:
        """Parts of a rank's blocks, of ``stages_a_rank``, whose gradients are whole at once: with one round of micro-batches
        a stage is through with its own before the next one begins."""
        one_round = self.schedule == "interleaved" and self.micro_batches <= self.pipeline
        return 1 if one_round else self.stages_a_rank

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations the first rank of a pipeline holds at once, of all its blocks together
        (``torch/distributed/pipelining/schedules.py``: warm-up and one more)."""
        ranks, stages = self.pipeline, self.stages_a_rank
        chunks = (stages - 1) * ranks + 2 * (ranks - 1) + 1
        most = {"gpipe": self.micro_batches, "1f1b": ranks, "interleaved": -(-chunks // stages)}[self.schedule]
        return min(most, self.micro_batches)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Samples of many lengths, every micro-batch padded to its own longest: neither packed nor all of one length."""

    mean: float = 0.0
    deviation: float = 0.0
    """Of the data, in tokens, before anything is cut: a gamma distribution then. Without a mean any length up to the longest is
    as likely as another."""
    least: int = 1
    over: Literal["cut", "dropped"] = "cut"
    """What becomes of samples above ``max_length``."""
    samples: int = 0
    """Of the whole run, those dropped counted; 0 where it is not known."""
    multiple: int = 1
    """Micro-batches are padded to a multiple of this."""
    emptied_every: int = 0
    """Optimizer steps from one emptying of the allocator's cache to the next; 0: never."""


@dataclass(frozen=True, slots=True)
class ForeignRun:
    tool: str
    """llamafactory, axolotl, trl, torchtune, transformers, litgpt, torchtitan, swift, unsloth …"""
    model: str
    """As it is written there: a hub id, a folder, a builder's name."""
    method: Literal["full", "lora", "adapter", "adapter_v2"]
    micro_batch_size: int
    """Rows of one forward on one device."""
    max_length: int
    """Tokens of a row, padding counted."""
    accumulation: int = 1
    longest_first: bool = False
    """The longest row comes in the first micro-step, before there are gradients and states; all others are shorter."""
    packed: bool = False
    """Rows are full and no attention mask with a zero in it is passed."""
    lengths: Lengths | None = None
    """How lengths vary; None: every row is ``max_length`` long. The longest row is ``max_length`` long either way."""

    frozen_dtype: Dtype = "bfloat16"
    """Stored type of weights that do not train (before quantisation)."""
    trained_dtype: Dtype = "float32"
    """Stored type of weights that train: the whole model, or the adapters."""
    compute_dtype: Dtype = "bfloat16"
    autocast: bool = False
    """Products run in ``compute_dtype`` by autocast; else every tensor is computed in its stored type."""
    quantised: Quantised = ""
    """How linear weights of the blocks are stored; the head is not quantised. int8 with method full: they train so.
    gptq4 has scales for groups of 128 columns, gptq4_rows (a group size of -1) for rows."""
    inputs_kept: bool = False
    """Packed layers in 4 bits keep their inputs to the end of the graph (bitsandbytes before 0.43.2)."""
    raised: Literal["", "norms", "all"] = ""
    """What is held in fp32 beside a lower stored type: all but packed weights (peft's k-bit preparation), or the norms
    alone (TRL takes embedding and head back to bf16)."""

    rank: int = 0
    """Of the adapters; of the space gradients are projected into, where the optimizer is GaLore's."""
    targets: tuple[str, ...] = ()
    """Short names of adapted linears; empty with a rank means all linears of the blocks."""
    lora_dropout: float = 0.0
    dora: bool = False
    trained_modules: tuple[str, ...] = ()
    """Whole modules that train beside the adapters (``lm_head``, ``embed_tokens``), in the frozen weights' type."""

    adapter: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Another adapter of peft's than LoRA: its ``adapter_config.json``. peft itself builds it, where it is installed."""

    optimizer: str = "adamw"
    """adamw, adam, sgd, sgd_momentum, lion, adafactor, muon, galore_adamw …"""
    optimizer_bits: int = 32
    """Bits of each moment: 32, 16 (states in the parameter's type), 8, 4."""
    foreach: bool = True
    """The multi-tensor step, with a parameter-sized temporary; False: fused or one tensor at a time."""
    paged: bool = False
    """States in memory the driver may move to the host: not counted on the device."""
    step_in_backward: bool = False
    clipped: bool = True

    checkpointing: Literal["none", "full", "selective"] = "none"
    reentrant: bool = False
    """The checkpoint is an autograd function of its own, its forward pass runs without a graph."""
    attention: Literal["flash", "sdpa", "math"] = "sdpa"
    loss: Literal["plain", "kernel", "chunked", "fused"] = "plain"
    """plain: whole logits and their fp32 copy; kernel: whole logits, one fused kernel; chunked: whole logits never in
    fp32 together; fused: head and loss together, logits never whole."""
    shift: Literal["", "inside", "apart"] = ""
    """How whole logits meet the next token: labels moved; a copy of all rows but the last, made in the model's code
    (transformers before 4.46) or in a function of its own while the model holds the logits (4.46 to 4.48)."""
    loss_raised: bool = True
    """Logits are raised to fp32 for the loss; some models' own code leaves that to autocast."""
    loss_chunks: int = 8
    fused_kernels: bool = False
    """Norm, rotary and gated-MLP kernels (Liger, Unsloth)."""
    fused_mlp: bool = True
    """The MLP's among them; fms-acceleration has one for adapted and packed MLPs only."""
    compiled: bool = False
    use_cache: bool = False

    load: Literal["", "whole", "units", "first", "tensors", "shards"] = ""
    """How weights come to the device (``loading``); empty: as the tool does it."""
    segments: Literal["classic", "expandable"] = "classic"
    """The caching allocator's, by the tool's own launcher or environment."""
    frozen_stay: bool = False
    """FSDP 1 before torch 2.1: units that do not train stay gathered to the end of backward."""
    rounded_on_host: bool = False
    """DeepSpeed before 0.14.1, stages 1 and 2: weights updated on the host are rounded there, not on the device."""
    activations_on_host: bool = False
    optimizer_on_host: bool = False
    parameters_on_host: bool = False
    spread: Spread = dataclasses.field(default_factory=Spread)
    notes: tuple[str, ...] = ()

    @property
    def is_quantised(self) -> bool:
        return bool(self.quantised)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
