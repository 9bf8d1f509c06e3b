"""Frozen facts: the model's shape (ModelSpec), the devices (HardwareSpec), the wished training (JobSpec).

Names, shapes and order of parameters are those of transformers' modelling code, by the templates of
`catalog/structures.json`, from a config.json alone; when the folder also has safetensors files their headers are
compared and win. Declined here: encoder-decoders, the vision part of multimodal models, and all that needs torch or the
weights.

Symbols of shapes, used by every formula of the project (`ModelSpec.symbols()`):
h hidden size, q query width (heads x head_dim), k key/value width, f MLP width, n heads, m key/value heads, d head_dim,
V vocabulary; of a partly turned head p dimensions are turned; of a mixture of experts also E experts, K experts per token, w width of an expert, s width of the shared
experts together.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, Self

from .catalog import folders, structures
from .catalog.configs import fields_of_config, told_at
from .catalog.resolve import locate_model
from .hardware import HardwareSpec

__all__ = ["BlockKind", "HardwareSpec", "JobSpec", "ModelSpec", "Parameter", "Role", "resolve_model"]

PrecisionKind = Literal["fp32", "bf16", "bf16_mixed", "fp16", "fp16_mixed"]
CheckpointingKind = Literal["block", "attention", "mlp", "selective", "nested"]
Role = Literal["linear", "transposed", "norm", "bias", "embedding", "head", "expert", "matrix"]
"""linear: the weight of an ``nn.Linear``; transposed: of GPT-2's ``Conv1D``, a linear stored (inputs, outputs);
expert: a stack with one slice an expert; matrix: any other, as a router's."""
_SAYS_NOTHING = (
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "pad_token_id", "quantization_config", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
_BLOCK = re.compile(r"(.*?\.)(\d+)\.(.+)")
_MIXTURE = ("num_experts", "experts_per_token", "moe_intermediate_size", "shared_intermediate_size", "dense_layers",
            "options", "rotary_dim", "config")  # fmt: skip


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
class BlockKind:
    """Decoder blocks with the same tensors: where they are, and the tensors, named relative to a block."""

    name: str
    layers: tuple[int, ...]
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)


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
    """Every parameter, where the family's template does not give them: as the safetensors headers have them, or as
    transformers builds a family without a template."""
    num_experts: int = 0
    """Experts of a block that a router chooses among; 0 in a dense model."""
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    """MLP width of one expert."""
    shared_intermediate_size: int = 0
    """MLP width of the experts that every token passes, together."""
    dense_layers: tuple[int, ...] = ()
    """Blocks without experts in a model that has them."""
    rotary_dim: int = 0
    """Dimensions of a head that rotary positions turn; 0 where it is all of them, or none."""
    config: str = field(default="", compare=False, repr=False)
    """The config.json it was read from, as text: what a trace of this very model is made from."""
    options: tuple[tuple[str, int], ...] = ()
    """Other keys of the config that the family's template names, as (key, value) pairs."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> Self:
        """Read a transformers config.json (a nested ``text_config`` too); ModelError names what is missing."""
        fields = fields_of_config(config, name)
        extra = tuple(Parameter(*row) for row in fields.pop("rows", ()))
        return cls(name=name, **fields, extra=extra, config=json.dumps(dict(config), sort_keys=True, default=str))

    @classmethod
    def from_folder(cls, path: Path | str) -> Self:
        """Read config.json and, when there are safetensors files, their headers; the weights are never read."""
        folder = Path(path)
        config, name = folders.read_config(folder / "config.json"), folder.resolve().name
        with told_at(folder / "config.json", name):
            spec = cls.from_config(config, name)
        if config.get("quantization_config"):
            return spec  # packed tensors have other names and shapes; the config's are the model's
        headers, why_not = folders.read_headers(folder)
        return spec._compared_with(headers) if headers else spec.with_note(why_not)

    @property
    def digest(self) -> str:
        """Names what of the config says how the model is built."""
        return digest(self.config)

    @property
    def dense_first(self) -> bool:
        """Whether a mixture begins with dense blocks, and has no other dense ones."""
        return bool(self.dense_layers) and self.dense_layers == tuple(range(len(self.dense_layers)))

    @property
    def packs(self) -> bool:
        """Whether several examples can lie in one row, blind to each other."""
        return self.family not in structures.OWN_ATTENTION

    @property
    def q_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Elements of all distinct tensors; a tied head counts once."""
        blocks = sum(len(kind.layers) * kind.numel for kind in self.block_kinds())
        return blocks + sum(p.numel for p in self.outer_parameters())

    @property
    def active_parameters(self) -> int:
        """Elements that one token meets: all but the experts it is not sent to."""
        stacks = sum(p.numel * count for p, count in self.block_tensors() if p.role == "expert")
        idle = stacks * (self.num_experts - self.experts_per_token) // self.num_experts if self.num_experts else 0
        return self.num_parameters - idle

    def parameters(self) -> tuple[Parameter, ...]:
        """Every tensor, named and ordered as transformers' ``named_parameters()`` does; a tied head is not repeated."""
        if self.extra:
            return self.extra
        shape = _shape_of(self)
        blocks = {layer: kind.parameters for kind in shape.kinds for layer in kind.layers}
        layers = (
            Parameter(f"{shape.prefix}{i}.{p.name}", p.shape, p.role)
            for i in range(self.num_hidden_layers)
            for p in blocks[i]
        )
        return (*shape.before, *layers, *shape.after)

    def block_kinds(self) -> tuple[BlockKind, ...]:
        """The kinds of decoder blocks, first seen first: one in a uniform model, dense and moe where both are."""
        return _shape_of(self).kinds

    def block_parameters(self, layer: int | None = None) -> tuple[Parameter, ...]:
        """The tensors of one decoder block, named relative to it (``self_attn.q_proj.weight``).

        Without a layer: of the largest kind of block. Planning with that one is never too low.
        """
        kinds = self.block_kinds()
        if layer is None:
            return max(kinds, key=lambda kind: kind.numel).parameters if kinds else ()
        return next(kind.parameters for kind in kinds if layer in kind.layers)

    def block_tensors(self) -> tuple[tuple[Parameter, int], ...]:
        """Every tensor of the blocks, named relative to its block, and in how many blocks it is."""
        counts: dict[Parameter, int] = {}
        for kind in self.block_kinds():
            for p in kind.parameters:
                counts[p] = counts.get(p, 0) + len(kind.layers)
        return tuple(counts.items())

    def outer_parameters(self) -> tuple[Parameter, ...]:
        """The tensors outside the blocks: embedding, final norm, and the head unless it is tied."""
        shape = _shape_of(self)
        return (*shape.before, *shape.after)

    def linears(self) -> tuple[Parameter, ...]:
        """Weights of the linear layers of any block: what LoRA may adapt."""
        return tuple(p for p, _ in self.block_tensors() if p.role in ("linear", "transposed"))

    def symbols(self) -> dict[str, int]:
        """Values of the legend at the top of this file."""
        symbols = {
            "h": self.hidden_size, "q": self.q_width, "k": self.kv_width, "f": self.intermediate_size,
            "n": self.num_attention_heads, "m": self.num_key_value_heads, "d": self.head_dim, "V": self.vocab_size,
        }  # fmt: skip
        if self.rotary_dim:
            symbols["p"] = self.rotary_dim
        if self.num_experts:
            symbols |= {
                "E": self.num_experts, "K": self.experts_per_token, "w": self.moe_intermediate_size,
                "s": self.shared_intermediate_size,
            }  # fmt: skip
        return symbols

    def with_note(self, note: str) -> Self:
        return dataclasses.replace(self, notes=(*self.notes, note))

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; `from_json` reads it back equal. What only mixtures have is left out of others."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value or key not in _MIXTURE}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        extra = tuple(Parameter(p["name"], tuple(p["shape"]), p["role"]) for p in data.get("extra", ()))
        tuples = {key: tuple(data.get(key, ())) for key in ("notes", "dense_layers")}
        options = tuple((key, value) for key, value in data.get("options", ()))
        return cls(**{**data, **tuples, "options": options, "extra": extra})

    def _compared_with(self, headers: folders.Headers) -> Self:
        """Believe the headers: a difference in shape becomes a note and fills ``extra``."""
        expected = {p.name: p.shape for p in self.parameters()}
        stored, left_out = folders.text_part(headers, expected, self.num_hidden_layers)
        if self.tie_word_embeddings:
            stored.pop("lm_head.weight", None)  # some checkpoints repeat the tied table
        dtypes = sorted({dtype for _, dtype in stored.values()})
        spec = dataclasses.replace(self, dtype=dtypes[0]) if len(dtypes) == 1 else self
        notes = list(spec.notes)
        if left_out:
            notes.append(f"{left_out} tensors outside the text model are left out")
        if len(dtypes) > 1:
            notes.append(f"tensors are stored in several types: {', '.join(dtypes)}")
        found = {name: shape for name, (shape, _) in stored.items()}
        extra = self.extra
        if found.items() < expected.items():
            notes.append(f"the files lack {len(expected) - len(found)} of {len(expected)} tensors: are they all there?")
        elif found != expected and folders.block_sizes(found) != folders.block_sizes(expected):
            notes.append(folders.difference(expected, found))
            extra = tuple(Parameter(name, shape, _role_of(name, shape)) for name, shape in found.items())
        return dataclasses.replace(spec, notes=tuple(notes), extra=extra)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The training the user wishes for. What the planner may not change is in ``pins``, as (key, value) pairs."""

    method: Literal["full", "lora", "qlora", "auto"] = "lora"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """Short names of adapted linears (``q_proj``); empty means every linear of the block."""
    precision: Literal["auto", PrecisionKind] = "auto"
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

    def suited_to(self, model: ModelSpec) -> Self:
        """Without packing where the model cannot have it, unless the user insists."""
        if model.packs or self.pin("packing") is not None:
            return self
        return dataclasses.replace(self, pins=(*self.pins, ("packing", "false")))

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
        spec = ModelSpec.from_config(found.config, found.name)
        return spec.with_note(found.note) if found.note else spec
    if found.is_dir():
        return dataclasses.replace(ModelSpec.from_folder(found), name=folders.repository_name(found))
    name = folders.repository_name(found.parent)
    with told_at(found, name):
        return ModelSpec.from_config(folders.read_config(found), name)


def digest(config: str) -> str:
    """A short name for what of a config.json says how the model is built."""
    said = {key: value for key, value in json.loads(config).items() if key not in _SAYS_NOTHING}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class _Shape:
    """All tensors of a model, with those of equal blocks once."""

    prefix: str
    before: tuple[Parameter, ...]
    kinds: tuple[BlockKind, ...]
    after: tuple[Parameter, ...]


@functools.lru_cache(maxsize=32)
def _shape_of(spec: ModelSpec) -> _Shape:
    if spec.extra:
        return _shape_of_list(spec.extra)
    family = spec.family if structures.entry_of(spec.family) else "llama"
    fields = {key: int(getattr(spec, key)) for key in structures.FIELDS}
    symbols = {symbol: fields[key] for symbol, key in structures.SYMBOLS.items()}
    values = {**fields, **symbols, "q": spec.q_width, "k": spec.kv_width, **dict(spec.options)}
    filled = structures.filled(family, tuple(values.items()))
    layers = {"dense": tuple(range(spec.num_hidden_layers))}
    if "moe" in filled.kinds:
        sparse = tuple(i for i in range(spec.num_hidden_layers) if i not in spec.dense_layers)
        layers = {"dense": spec.dense_layers, "moe": sparse}
    kinds = [BlockKind(kind, layers[kind], _parameters(rows)) for kind, rows in filled.kinds.items() if layers[kind]]
    return _Shape(
        filled.prefix,
        _parameters(filled.before),
        tuple(sorted(kinds, key=lambda kind: kind.layers)),
        _parameters(filled.after),
    )


def _parameters(rows: Iterable[tuple[str, tuple[int, ...], str]]) -> tuple[Parameter, ...]:
    return tuple(Parameter(*row) for row in rows)  # type: ignore[arg-type]  # roles are those of the file's script


def _shape_of_list(parameters: tuple[Parameter, ...]) -> _Shape:
    """Blocks by the first number in a name; those with the same tensors are of one kind."""
    outer: list[Parameter] = []
    blocks: dict[int, list[Parameter]] = {}
    prefix = ""
    for p in parameters:
        if match := _BLOCK.match(p.name):
            prefix = match[1]
            blocks.setdefault(int(match[2]), []).append(Parameter(match[3], p.shape, p.role))
        else:
            outer.append(p)
    kinds: dict[tuple[Parameter, ...], list[int]] = {}
    for layer, block in sorted(blocks.items()):
        kinds.setdefault(tuple(block), []).append(layer)
    named: list[BlockKind] = []
    for tensors, layers in kinds.items():
        name = "moe" if any(p.role == "expert" for p in tensors) else "dense"
        others = sum(kind.name.partition(" ")[0] == name for kind in named)
        named.append(BlockKind(f"{name} {others + 1}" if others else name, tuple(layers), tensors))
    return _Shape(prefix, tuple(outer), tuple(named), ())


def _role_of(name: str, shape: tuple[int, ...]) -> Role:
    """What a stored tensor is for, by its name and rank: the only evidence a header gives."""
    if name.startswith("lm_head."):
        return "head"
    if "embed" in name:
        return "embedding"
    if name.endswith(".bias"):
        return "bias"
    if len(shape) > 2:
        return "expert"
    return "linear" if len(shape) == 2 else "norm"
