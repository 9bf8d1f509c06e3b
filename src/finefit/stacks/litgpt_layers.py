"""LitGPT's sizes and layers: norms, linear layers, and what LoRA and the adapters add to them. See ``litgpt``.

Follows ``lit_gpt/{config,rmsnorm,lora,adapter_v2}.py`` at commit 069f6584 (October 2023) and ``litgpt/`` 0.4.12;
Gemma 2 as it came, at 916a84ca (July 2024).

Shapes: h hidden, n query heads, m key/value groups, d head size, f MLP width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..foreign import ForeignRun
from .four_bit import Bnb4bit


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes and variants, in litgpt's terms."""

    h: int
    n: int
    m: int
    d: int
    f: int
    vocab: int
    rotary: int
    parallel: bool = False
    shared_norm: bool = False
    norm: Literal["rms", "layer"] = "rms"
    mlp: Literal["gelu", "silu_gated", "gelu_gated"] = "silu_gated"
    bias: bool = False
    head_bias: bool = False
    scaled: bool = False
    """The embedding is multiplied, and norms add one to their weight (Gemma)."""
    capped: bool = False
    """Scores are soft-capped, a window masks those of every other block, norms follow attention and MLP too (Gemma 2)."""


def shape_of(config: Mapping[str, Any]) -> Shape:
    """From a model's ``config.json``."""
    get = config.get
    h, n = int(config["hidden_size"]), int(config["num_attention_heads"])
    d = int(get("head_dim") or h // n)
    m, f = int(get("num_key_value_heads") or n), int(get("intermediate_size") or get("ffn_hidden_size") or 4 * h)
    sizes: dict[str, Any] = {"h": h, "n": n, "m": m, "d": d, "f": f, "vocab": int(config["vocab_size"]), "rotary": d}
    match config["model_type"]:
        case "llama" | "mistral" | "phi3":
            return Shape(**sizes)
        case "gemma":
            return Shape(**sizes, mlp="gelu_gated", scaled=True)
        case "gemma2":
            return Shape(**sizes, mlp="gelu_gated", scaled=True, capped=True)
        case "phi":
            sizes["rotary"] = int(float(get("partial_rotary_factor", 0.5)) * d)
            plain: dict[str, Any] = {"parallel": True, "norm": "layer", "mlp": "gelu", "bias": True}
            return Shape(**sizes, **plain, shared_norm=True, head_bias=True)
        case "gpt_neox":
            sizes["rotary"] = int(float(get("rotary_pct", 0.25)) * d)
            return Shape(
                **sizes, parallel=bool(get("use_parallel_residual", True)), norm="layer", mlp="gelu", bias=True
            )
        case "falcon":
            new = bool(get("new_decoder_architecture"))
            sizes["m"] = int(get("num_kv_heads") or n) if new else 1 if get("multi_query", True) else n
            return Shape(**sizes, parallel=True, norm="layer", mlp="gelu", shared_norm=not new)
        case other:
            raise ValueError(f"no litgpt model of type {other} is known here")


class Norm(nn.Module):
    def __init__(self, shape: Shape, dtype: torch.dtype, modern: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.h, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape.h, dtype=dtype)) if shape.norm == "layer" else None
        self.modern, self.plus_one = modern, shape.scaled

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return functional.layer_norm(x, self.weight.shape, self.weight, self.bias)
        wide = x.float()
        normed = wide * torch.rsqrt(torch.mean(wide * wide, -1, keepdim=True) + 1e-5)
        weight = 1 + self.weight if self.plus_one else self.weight
        # The weight was raised by the product, later by a copy that is kept.
        return (normed * (weight.float() if self.modern else weight)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes layers as one run has them."""

    shape: Shape
    run: ForeignRun

    @property
    def modern(self) -> bool:
        """LitGPT of 2024, not lit-gpt."""
        return self.run.tool != "lit_gpt"

    @property
    def stored(self) -> torch.dtype:
        return dtype_of(self.run.trained_dtype if self.run.method == "full" else self.run.frozen_dtype)

    @property
    def cast(self) -> torch.dtype | None:
        """The type autocast gives products, None where nothing is cast."""
        return dtype_of(self.run.compute_dtype) if self.run.autocast else None

    def norm(self) -> Norm:
        return Norm(self.shape, self.stored, self.modern)

    def linear(self, n_in: int, n_out: int, bias: bool | None = None) -> nn.Module:
        biased = self.shape.bias if bias is None else bias
        if self.run.quantised.startswith("nf4"):
            nested = self.run.quantised == "nf4_double"
            return Bnb4bit(n_in, n_out, self.stored if biased else None, nested, keeps_input=True)
        return Linear(n_in, n_out, self.stored if biased else None, self.stored, self.cast)

    def layer(self, n_in: int, n_out: int, names: str, bias: bool | None = None) -> nn.Module:
        """A linear layer with what the method adds to it."""
        inner = self.linear(n_in, n_out, bias)
        if self.run.method == "lora" and adapted(self.run, names):
            return LoraLinear(inner, n_in, n_out, self)
        if str(self.run.method) == "adapter_v2":
            return ScaledLinear(inner, n_out, dtype_of(self.run.trained_dtype))
        return inner


_NAMES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "proj", "gate_proj": "mlp", "up_proj": "mlp",
    "down_proj": "mlp", "lm_head": "head", "query_key_value": "qkv", "dense": "proj", "dense_h_to_4h": "mlp",
    "dense_4h_to_h": "mlp", "fc1": "mlp", "fc2": "mlp", "qkv_proj": "qkv", "gate_up_proj": "mlp",
}  # fmt: skip


def adapted(run: ForeignRun, part: str) -> bool:
    """Whether LoRA is on q, k, v, proj, mlp or head; without targets on all but the head."""
    if not run.rank:
        return False
    if not run.targets:
        return part != "head"
    parts = {_NAMES.get(target, target) for target in run.targets}
    return part in parts or (part in "qkv" and "qkv" in parts)


class Linear(nn.Module):
    """A plain layer; under autocast its weight is cast in every call, and the copy kept for backward."""

    def __init__(
        self, n_in: int, n_out: int, bias: torch.dtype | None, dtype: torch.dtype, cast: torch.dtype | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, dtype=dtype))
        self.bias = None if bias is None else nn.Parameter(torch.empty(n_out, dtype=bias))
        self.cast = cast

    def forward(self, x: Tensor) -> Tensor:
        if self.cast is None:
            return functional.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(self.cast)
        return functional.linear(x.to(self.cast), self.weight.to(self.cast), bias)


class LoraLinear(nn.Module):
    def __init__(self, linear: nn.Module, n_in: int, n_out: int, maker: Maker) -> None:
        super().__init__()
        rank, dtype = maker.run.rank, dtype_of(maker.run.trained_dtype)
        self.linear, self.dropout, self.cast = linear, maker.run.lora_dropout, maker.cast
        self.lora_a = nn.Parameter(torch.empty(rank, n_in, dtype=dtype))
        self.lora_b = nn.Parameter(torch.empty(n_out, rank, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        pretrained = self.linear(x)
        x, a, b = cast_all(self.cast, dropped(x, self.dropout), self.lora_a, self.lora_b)
        added = (x @ a.transpose(0, 1) @ b.transpose(0, 1)) * 2.0
        return pretrained + added


class LoraQkv(nn.Module):
    """The fused query, key and value layer with LoRA on some of the three; the others' columns are filled with zeros."""

    def __init__(self, linear: nn.Module, parts: tuple[bool, bool, bool], maker: Maker) -> None:
        super().__init__()
        shape, rank, dtype = maker.shape, maker.run.rank, dtype_of(maker.run.trained_dtype)
        self.linear, self.parts, self.maker = linear, parts, maker
        widths = (shape.n * shape.d, shape.m * shape.d, shape.m * shape.d)
        self.widths = [width for width, on in zip(widths, parts, strict=True) if on]
        self.n_out = sum(widths)
        self.lora_a = nn.Parameter(torch.empty(rank * sum(parts), shape.h, dtype=dtype))
        self.lora_b = nn.Parameter(torch.empty(sum(self.widths), rank, dtype=dtype))
        self.index: Tensor
        if not all(parts) and maker.modern:
            self.register_buffer("index", torch.empty(sum(self.widths), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        pretrained = self.linear(x)
        x, a, b = cast_all(self.maker.cast, dropped(x, self.maker.run.lora_dropout), self.lora_a, self.lora_b)
        after_a = functional.linear(x, a)
        del x
        after_b = self._grouped(after_a.transpose(-2, -1), b.unsqueeze(-1)).transpose(-2, -1)
        added = self._padded(after_b) * 2.0
        return pretrained + added

    def _grouped(self, rows: Tensor, weight: Tensor) -> Tensor:
        if self.maker.shape.n == self.maker.shape.m:
            return functional.conv1d(rows, weight, groups=sum(self.parts))
        chunks = zip(rows.chunk(sum(self.parts), 1), weight.split(self.widths), strict=True)
        return torch.cat([functional.conv1d(one, w) for one, w in chunks], 1)

    def _padded(self, x: Tensor) -> Tensor:
        if all(self.parts):
            return x
        if self.maker.modern:
            return x.new_zeros(*x.shape[:-1], self.n_out).index_copy_(-1, self.index, x)
        # The columns' places were put on the device in each call, and the padded columns copied.
        x = x.transpose(0, 1)
        padded = x.new_zeros(*x.shape[:-1], self.n_out).view(-1, self.n_out)
        index = torch.empty(sum(self.widths), dtype=torch.int64)
        padded = padded.index_copy(1, index, x.reshape(-1, sum(self.widths)))
        return padded.view(*x.shape[:-1], self.n_out).transpose(0, 1)


class ScaledLinear(nn.Module):
    """Adapter v2: a trained bias and scale on every linear layer."""

    def __init__(self, linear: nn.Module, n_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = linear
        self.adapter_bias = nn.Parameter(torch.empty(n_out, dtype=dtype))
        self.adapter_scale = nn.Parameter(torch.empty(n_out, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter_scale * (self.linear(x) + self.adapter_bias)


def dropped(x: Tensor, p: float) -> Tensor:
    """Dropout as CUDA does it: a boolean mask is kept."""
    return torch.ops.aten.native_dropout(x, p, True)[0] if p else x


def cast_all(cast: torch.dtype | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if cast is None else tuple(tensor.to(cast) for tensor in tensors)


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
