"""Frozen facts: the model's shape (ModelSpec), the devices (HardwareSpec), the wished training (JobSpec).

Shapes follow transformers' modelling code (names of parameters and their order within a block), read from a
config.json alone; when the folder also has safetensors files their headers are compared and win. Declined here:
mixtures of experts, encoder-decoders, the vision part of multimodal models, and all that needs torch or the weights.

Symbols of shapes, used by every formula of the project (`ModelSpec.symbols()`):
h hidden size, q query width (heads x head_dim), k key/value width, f MLP width, n heads, m key/value heads, d head_dim,
V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, Self

from .catalog import folders
from .catalog.configs import fields_of_config
from .catalog.resolve import locate_model
from .hardware import HardwareSpec

__all__ = ["HardwareSpec", "JobSpec", "ModelSpec", "Parameter", "Role", "resolve_model"]

Role = Literal["linear", "norm", "bias", "embedding", "head"]
BLOCK_PREFIX = "model.layers."


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model: transformers' name, shape, and what it is for."""

    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def short_name(self) -> str:
        """The module's own name: ``q_proj`` of ``self_attn.q_proj.weight``."""
        return self.name.split(".")[-2]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only language model. ``family`` is transformers' ``model_type`` of the text part."""

    name: str
    family: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 4096
    dtype: str = "bfloat16"
    sliding_window: int | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    notes: tuple[str, ...] = ()
    extra: tuple[Parameter, ...] = ()
    """Every parameter as the safetensors headers have it, filled only where that differs from the config's shape."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> Self:
        """Read a transformers config.json (a nested ``text_config`` too); ModelError names what is missing."""
        return cls(name=name, **fields_of_config(config, name))

    @classmethod
    def from_folder(cls, path: Path | str) -> Self:
        """Read config.json and, when there are safetensors files, their headers; the weights are never read."""
        folder = Path(path)
        config = folders.read_config(folder / "config.json")
        spec = cls.from_config(config, folder.resolve().name)
        if config.get("quantization_config"):
            return spec  # packed tensors have other names and shapes; the config's are the model's
        headers, why_not = folders.read_headers(folder)
        return spec._compared_with(headers) if headers else spec.with_note(why_not)

    @property
    def q_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Elements of all distinct tensors; a tied head counts once."""
        if self.extra:
            return sum(p.numel for p in self.extra)
        block = sum(p.numel for p in self.block_parameters())
        return block * self.num_hidden_layers + sum(p.numel for p in self.outer_parameters())

    def parameters(self) -> tuple[Parameter, ...]:
        """Every tensor, named and ordered as transformers' ``named_parameters()`` does; a tied head is not repeated."""
        if self.extra:
            return self.extra
        block, (first, *rest) = self.block_parameters(), self.outer_parameters()
        layers = (
            Parameter(f"{BLOCK_PREFIX}{i}.{p.name}", p.shape, p.role)
            for i in range(self.num_hidden_layers)
            for p in block
        )
        return (first, *layers, *rest)

    def block_parameters(self) -> tuple[Parameter, ...]:
        """The tensors of one decoder block, named relative to it (``self_attn.q_proj.weight``)."""
        if self.extra:
            return _largest_block(self.extra)
        return _attention(self) + _mlp(self) + _block_norms(self)

    def outer_parameters(self) -> tuple[Parameter, ...]:
        """The tensors outside the blocks: embedding, final norm, and the head unless it is tied."""
        if self.extra:
            return tuple(p for p in self.extra if not p.name.startswith(BLOCK_PREFIX))
        table = (self.vocab_size, self.hidden_size)
        outer = (
            Parameter("model.embed_tokens.weight", table, "embedding"),
            Parameter("model.norm.weight", (self.hidden_size,), "norm"),
        )
        return outer if self.tie_word_embeddings else (*outer, Parameter("lm_head.weight", table, "head"))

    def linears(self) -> tuple[Parameter, ...]:
        """Weights of the block's linear layers: what LoRA may adapt and a quantiser may pack."""
        return tuple(p for p in self.block_parameters() if p.role == "linear")

    def symbols(self) -> dict[str, int]:
        """Values of the legend at the top of this file."""
        return {
            "h": self.hidden_size, "q": self.q_width, "k": self.kv_width, "f": self.intermediate_size,
            "n": self.num_attention_heads, "m": self.num_key_value_heads, "d": self.head_dim, "V": self.vocab_size,
        }  # fmt: skip

    def with_note(self, note: str) -> Self:
        return dataclasses.replace(self, notes=(*self.notes, note))

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; `from_json` reads it back equal."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        extra = tuple(Parameter(p["name"], tuple(p["shape"]), p["role"]) for p in data.get("extra", ()))
        return cls(**{**data, "notes": tuple(data.get("notes", ())), "extra": extra})

    def _compared_with(self, headers: folders.Headers) -> Self:
        """Believe the headers: a difference in shape becomes a note and fills ``extra``."""
        stored, left_out = folders.text_part(headers)
        if self.tie_word_embeddings:
            stored.pop("lm_head.weight", None)  # some checkpoints repeat the tied table
        dtypes = sorted({dtype for _, dtype in stored.values()})
        spec = dataclasses.replace(self, dtype=dtypes[0]) if len(dtypes) == 1 else self
        notes = list(spec.notes)
        if left_out:
            notes.append(f"{left_out} tensors outside the text model are left out")
        if len(dtypes) > 1:
            notes.append(f"tensors are stored in several types: {', '.join(dtypes)}")
        expected = {p.name: p.shape for p in self.parameters()}
        found = {name: shape for name, (shape, _) in stored.items()}
        extra: tuple[Parameter, ...] = ()
        if found.items() < expected.items():
            notes.append(f"the files lack {len(expected) - len(found)} of {len(expected)} tensors: are they all there?")
        elif found != expected:
            notes.append(_difference(expected, found))
            extra = tuple(Parameter(name, shape, _role_of(name, shape)) for name, shape in found.items())
        return dataclasses.replace(spec, notes=tuple(notes), extra=extra)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The training the user wishes for. What the planner may not change is in ``pins``, as (key, value) pairs."""

    method: Literal["full", "lora", "auto"] = "lora"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """Short names of adapted linears (``q_proj``); empty means every linear of the block."""
    precision: Literal["auto", "fp32", "bf16", "bf16_mixed"] = "auto"
    global_batch_size: int = 16
    max_length: int = 1024
    longest: int = 1024
    """Tokens of the longest example that is really there, after cutting at ``max_length``."""
    lengths: tuple[int, ...] = ()
    labelled_share: float = 1.0
    steps: int = 100
    learning_rate: float = 2e-4
    seed: int = 0
    pins: tuple[tuple[str, str], ...] = ()

    def pin(self, key: str) -> str | None:
        """The value the user fixed for ``key``, or None where the planner is free."""
        return dict(self.pins).get(key)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        tuples = {key: tuple(data.get(key, ())) for key in ("targets", "lengths")}
        return cls(**{**data, **tuples, "pins": tuple((key, value) for key, value in data.get("pins", ()))})


def resolve_model(text: str) -> ModelSpec:
    """The model a user named: folder, config.json, catalogue name, cached or online hub id, in this order."""
    found = locate_model(text)
    if not isinstance(found, Path):
        return ModelSpec.from_config(found.config, found.name)
    if found.is_dir():
        return dataclasses.replace(ModelSpec.from_folder(found), name=folders.repository_name(found))
    return ModelSpec.from_config(folders.read_config(found), folders.repository_name(found.parent))


def _linear(name: str, rows: int, columns: int, bias: bool) -> tuple[Parameter, ...]:
    """Weight (out x in) and, if it has one, bias of a linear layer."""
    weight = Parameter(f"{name}.weight", (rows, columns), "linear")
    return (weight, Parameter(f"{name}.bias", (rows,), "bias")) if bias else (weight,)


def _attention(spec: ModelSpec) -> tuple[Parameter, ...]:
    h, q, k, bias = spec.hidden_size, spec.q_width, spec.kv_width, spec.attention_bias
    if spec.family == "phi3":
        return _linear("self_attn.o_proj", h, q, False) + _linear("self_attn.qkv_proj", q + 2 * k, h, False)
    # Qwen2 alone has biases on q, k, v and none on o
    o_bias = bias and spec.family != "qwen2"
    projections = (
        *_linear("self_attn.q_proj", q, h, bias),
        *_linear("self_attn.k_proj", k, h, bias),
        *_linear("self_attn.v_proj", k, h, bias),
        *_linear("self_attn.o_proj", h, q, o_bias),
    )
    if spec.family not in ("qwen3", "gemma3_text"):
        return projections
    norms = (Parameter(f"self_attn.{part}_norm.weight", (spec.head_dim,), "norm") for part in "qk")
    return (*projections, *norms)


def _mlp(spec: ModelSpec) -> tuple[Parameter, ...]:
    h, f, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
    down = _linear("mlp.down_proj", h, f, bias)
    if spec.family == "phi3":
        return _linear("mlp.gate_up_proj", 2 * f, h, bias) + down
    return _linear("mlp.gate_proj", f, h, bias) + _linear("mlp.up_proj", f, h, bias) + down


def _block_norms(spec: ModelSpec) -> tuple[Parameter, ...]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if spec.family in ("gemma2", "gemma3_text"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return tuple(Parameter(f"{name}.weight", (spec.hidden_size,), "norm") for name in names)


def _largest_block(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Blocks may differ (first layers of some models); planning with the largest one is never too low."""
    blocks: dict[str, list[Parameter]] = {}
    for p in parameters:
        if p.name.startswith(BLOCK_PREFIX):
            index, _, rest = p.name.removeprefix(BLOCK_PREFIX).partition(".")
            blocks.setdefault(index, []).append(Parameter(rest, p.shape, p.role))
    return tuple(max(blocks.values(), key=lambda block: sum(p.numel for p in block), default=[]))


def _role_of(name: str, shape: tuple[int, ...]) -> Role:
    """What a stored tensor is for, by its name and rank: the only evidence a header gives."""
    if name.startswith("lm_head."):
        return "head"
    if "embed" in name:
        return "embedding"
    if name.endswith(".bias"):
        return "bias"
    return "linear" if len(shape) >= 2 else "norm"


def _difference(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    seen, said = _shape_text(found.get(names[0])), _shape_text(expected.get(names[0]))
    example = f"{names[0]}: {seen} in the files, {said} by the config"
    return f"{len(names)} tensors differ from config.json, such as {example}; the files are believed"


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "scalar"
