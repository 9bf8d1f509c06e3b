"""torchtune's Llama models and single-device recipes, from version 0.4 (November 2024) to the main branch of 2025.

Follows meta-pytorch/torchtune ``modules/{transformer,attention,feed_forward,rms_norm,position_embeddings}.py``,
``modules/peft/lora.py``, ``modules/loss/ce_chunked_output_loss.py``, ``training/{_compile,_activation_offloading}.py``
and ``recipes/{full,lora}_finetune_single_device.py``: everything in ``trained_dtype``, rotary in fp32, keys and values
repeated.

``run.packed`` means a block mask: attention is a compiled ``flex_attention`` then, before which and after which a
compiled layer breaks. ``run.loss``: plain (all logits in fp32, CrossEntropyLoss), chunked (CEWithChunkedOutputLoss) or
fused (LinearCrossEntropyLoss, of the main branch in 2025).

Shapes: b rows, s tokens of a row, h hidden, n query heads, m key/value heads, d head size, V vocabulary.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..foreign import ForeignRun
from ..ledger import Ledger, NoLedger
from .attention import cuda_choice, sdpa
from .base import Stepped
from .compiled import Piece, PieceOf
from .four_bit import AoNf4
from .offload import Offloaded, Plain

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Shape:
    h: int
    n: int
    m: int
    d: int
    f: int
    vocab: int
    positions: int
    tied: bool
    bias: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Shape":
        kind = config["model_type"]
        if kind not in ("llama", "mistral", "qwen2"):
            raise ValueError(f"no torchtune model of type {kind} is known here")
        h, n = int(config["hidden_size"]), int(config["num_attention_heads"])
        return Shape(
            h, n, int(config.get("num_key_value_heads") or n), int(config.get("head_dim") or h // n),
            int(config["intermediate_size"]), int(config["vocab_size"]), int(config["max_position_embeddings"]),
            bool(config.get("tie_word_embeddings")), kind == "qwen2",
        )  # fmt: skip


def build(config: Mapping[str, Any], run: ForeignRun, depth: int, builtin_norm: bool = False) -> Stepped:
    """``builtin_norm``: 0.5 and 0.6 only, which normalise with ``torch.nn.functional.rms_norm``."""
    model = Decoder(Shape.of(config), run, depth)
    for module in model.modules():
        if isinstance(module, Norm):
            module.builtin = builtin_norm
    if run.method == "lora":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    return Stepped(model, model.blocks, Recipe(model, run))


def _dtype(run: ForeignRun, trained: bool) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, run.trained_dtype if trained or run.method == "full" else run.frozen_dtype)
    return dtype


class Norm(nn.Module):
    """Scaled in the model's type; by ``rms_norm`` in fp32 throughout, whose result is then kept in fp32 too."""

    builtin = False

    def __init__(self, h: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(h, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.builtin:
            return _rms_norm(wide, self.scale).to(x.dtype)
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


def _rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """PyTorch's composite, before 2.8."""
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add_(1e-5))
    return x.mul(root).type_as(x).mul(scale)


class Lora(nn.Module):
    def __init__(self, base: nn.Module, sizes: tuple[int, int], run: ForeignRun) -> None:
        super().__init__()
        dtype = _dtype(run, trained=True)
        self.base, self.p = base, run.lora_dropout
        self.lora_a = nn.Parameter(torch.empty(run.rank, sizes[0], dtype=dtype))
        self.lora_b = nn.Parameter(torch.empty(sizes[1], run.rank, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        x = torch.ops.aten.native_dropout(x, self.p, True)[0] if self.p else x
        low = functional.linear(x, self.lora_a)
        low = 2.0 * functional.linear(low, self.lora_b)
        return out + low


def _linear(name: str, sizes: tuple[int, int], run: ForeignRun, bias: bool = False) -> nn.Module:
    dtype = _dtype(run, trained=False)
    base: nn.Module
    if run.quantised.startswith("nf4"):
        base = AoNf4(*sizes, dtype)
    else:
        base = nn.Linear(*sizes, bias=bias, dtype=dtype)
    adapted = run.method == "lora" and run.rank and (not run.targets or name in run.targets)
    return Lora(base, sizes, run) if adapted else base


def rotated(x: Tensor, cache: Tensor, positions: Tensor | None) -> Tensor:
    """Pairs of neighbours in fp32; with positions the table's rows are gathered for every call."""
    table = cache[: x.shape[1]] if positions is None else cache[positions]
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    table = table.view(-1, pairs.shape[1], 1, pairs.shape[3], 2)
    out = torch.stack(
        [
            pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
            pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1],
        ],
        -1,
    )
    return out.flatten(3).type_as(x)


class Projections(nn.Module):
    """Queries, keys and values as attention takes them."""

    def __init__(self, shape: Shape, run: ForeignRun) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = _linear("q_proj", (shape.h, shape.n * shape.d), run, shape.bias)
        self.k_proj = _linear("k_proj", (shape.h, shape.m * shape.d), run, shape.bias)
        self.v_proj = _linear("v_proj", (shape.h, shape.m * shape.d), run, shape.bias)

    def forward(self, x: Tensor, cache: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """No result is a view, so that this may be compiled; ``laid_out`` makes of them what attention takes."""
        shape, (b, s, _) = self.shape, x.shape
        q = rotated(self.q_proj(x).view(b, s, shape.n, shape.d), cache, positions)
        k = self.k_proj(x)
        v = self.v_proj(x)
        k = rotated(k.view(b, s, -1, shape.d), cache, positions)
        if shape.n != shape.m:
            sizes = (b, shape.m, shape.n // shape.m, -1, shape.d)
            k = k.transpose(1, 2).unsqueeze(2).expand(sizes).flatten(1, 2)
            v = v.view(b, s, -1, shape.d).transpose(1, 2).unsqueeze(2).expand(sizes).flatten(1, 2)
        return q, k, v

    def laid_out(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.shape.n == self.shape.m:
            k, v = k.transpose(1, 2), v.view(k.shape).transpose(1, 2)
        return q.transpose(1, 2), k, v


class Joined(nn.Module):
    """From the heads' outputs to the attention's."""

    def __init__(self, shape: Shape, run: ForeignRun) -> None:
        super().__init__()
        self.o_proj = _linear("o_proj", (shape.n * shape.d, shape.h), run)

    def forward(self, heads: Tensor) -> Tensor:
        heads = heads.transpose(1, 2).contiguous().flatten(2)
        return self.o_proj(heads)


class Rest(nn.Module):
    """Residual sum and feed-forward."""

    def __init__(self, shape: Shape, run: ForeignRun) -> None:
        super().__init__()
        self.norm = Norm(shape.h, _dtype(run, trained=False))
        self.gate_proj = _linear("gate_proj", (shape.h, shape.f), run)
        self.up_proj = _linear("up_proj", (shape.h, shape.f), run)
        self.down_proj = _linear("down_proj", (shape.f, shape.h), run)

    def forward(self, attended: Tensor, x: Tensor) -> Tensor:
        h = attended + x
        return h + self.mlp(self.norm(h))

    def mlp(self, x: Tensor) -> Tensor:
        h = functional.silu(self.gate_proj(x))
        h = h * self.up_proj(x)
        return self.down_proj(h)


class Flex(torch.autograd.Function):
    """``flex_attention`` as Inductor compiles it: laid out as the queries, one sum a row for backward, no wide sums."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _out, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del delta
        return found


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a layer is compiled to; every layer shares it, and is handed to it."""

    whole: PieceOf
    norm: PieceOf
    qkv: PieceOf
    joined: PieceOf
    rest: PieceOf


class Block(nn.Module):
    def __init__(self, shape: Shape, run: ForeignRun) -> None:
        super().__init__()
        self.run = run
        self.norm = Norm(shape.h, _dtype(run, trained=False))
        self.qkv = Projections(shape, run)
        self.joined = Joined(shape, run)
        self.rest = Rest(shape, run)
        self.compiled: Compiled | None = None

    def forward(self, x: Tensor, cache: Tensor, positions: Tensor | None) -> Tensor:
        if self.run.checkpointing != "none":
            out: Tensor = checkpoint(self.step, x, cache, positions, use_reentrant=False)
            return out
        return self.step(x, cache, positions)

    def step(self, x: Tensor, cache: Tensor, positions: Tensor | None) -> Tensor:
        if self.compiled is not None:
            return self._compiled_step(self.compiled, x, cache, positions)
        h = self.norm(x)
        attended = self._attended(h, cache, positions)
        h = attended + x
        mlp = self.rest.mlp(self.rest.norm(h))
        out: Tensor = h + mlp
        return out

    def _attended(self, x: Tensor, cache: Tensor, positions: Tensor | None) -> Tensor:
        q, k, v = self.qkv.laid_out(*self.qkv(x, cache, positions))
        heads = Flex.apply(q, k, v) if positions is not None else sdpa(q, k, v, cuda_choice(q, k, None))
        out: Tensor = self.joined(heads)
        return out

    def _compiled_step(self, compiled: Compiled, x: Tensor, cache: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            return compiled.whole(_Whole(self), x, cache)[0]
        # The call of attention is what breaks the layer's graph, and within it the call of flex_attention.
        (h,) = compiled.norm(self.norm, x)
        (attended,) = self._broken(compiled, h, cache, positions)
        del h
        return compiled.rest(self.rest, attended, x)[0]

    def _broken(self, compiled: Compiled, h: Tensor, cache: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.qkv.laid_out(*compiled.qkv(self.qkv, h, cache, positions))
        heads = Flex.apply(q, k, v)
        return compiled.joined(self.joined, heads)


class _Whole(nn.Module):
    """A layer with flash attention as one graph."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.qkv, self.joined, self.rest = block.norm, block.qkv, block.joined, block.rest

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        q, k, v = self.qkv.laid_out(*self.qkv(self.norm(x), cache))
        heads = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        out: Tensor = self.rest(self.joined(heads), x)
        return out


class Decoder(nn.Module):
    def __init__(self, shape: Shape, run: ForeignRun, depth: int) -> None:
        super().__init__()
        dtype = _dtype(run, trained=False)
        self.embedding = nn.Embedding(shape.vocab, shape.h, dtype=dtype)
        self.blocks = nn.ModuleList(Block(shape, run) for _ in range(depth))
        self.norm = Norm(shape.h, dtype)
        self.output = None if shape.tied else nn.Linear(shape.h, shape.vocab, bias=False, dtype=dtype)
        self.register_buffer("cache", torch.empty(shape.positions, shape.d // 2, 2, dtype=torch.float32))
        if run.compiled:
            first: Any = self.blocks[0]
            whole, parts = _Whole(first), (first.norm, first.qkv, first.joined, first.rest)
            shared = Compiled(PieceOf(whole), *(PieceOf(part) for part in parts))
            for block in self.blocks:
                block.compiled = shared  # type: ignore[assignment]

    def forward(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Up to the final norm."""
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h, self.cache, positions)
        return h

    @property
    def head(self) -> Tensor:
        return self.embedding.weight if self.output is None else self.output.weight


class Recipe:
    """A recipe's ``_loss_step``; logits are let go before backward, as far as the loss does not need them."""

    def __init__(self, model: Decoder, run: ForeignRun) -> None:
        self.model, self.run = model, run
        self.piece = Piece(lambda logits, labels: (_cross_entropy(logits, labels),))
        self.fused = Piece(lambda rows, weight, labels: (_cross_entropy(functional.linear(rows, weight), labels),))

    def __call__(self, ids: Tensor, labels: Tensor, ledger: Ledger | NoLedger) -> Tensor:
        positions = torch.zeros_like(ids) if self.run.packed else None
        with Offloaded() if self.run.activations_on_host else nullcontext():
            last = self.model(ids, positions)
            h = self.model.norm(last)
            ledger.mark("loss")
            if self.run.loss == "fused":
                return self._fused(h, _shifted(labels))
            # Offloading spares the head: what it keeps is needed again at once.
            with Plain() if self.run.activations_on_host else nullcontext():
                chunks = self.run.loss_chunks if self.run.loss == "chunked" else 1
                logits = [functional.linear(rows, self.model.head) for rows in h.chunk(chunks, 1)]
            if self.run.loss != "chunked":
                logits = [logits.pop().float()]
            del h, last
        return self._loss(logits, _shifted(labels))

    def _loss(self, logits: list[Tensor], labels: Tensor) -> Tensor:
        rows = [chunk.reshape(-1, chunk.shape[-1]) for chunk in logits]
        targets = [chunk.reshape(-1) for chunk in labels.chunk(len(rows), 1)]
        total: Any = 0.0
        # The full recipe drops what ``compile_loss`` returns: only the chunked loss, changed in place, is compiled.
        compiled = self.run.compiled and (self.run.loss == "chunked" or self.run.method == "lora")
        for r, t in zip(rows, targets, strict=True):
            total = total + (self.piece(r, t)[0] if compiled else _cross_entropy(r, t))
        return total / (labels != -100).sum()

    def _fused(self, h: Tensor, labels: Tensor) -> Tensor:
        total: Any = 0.0
        for rows, t in zip(h.chunk(self.run.loss_chunks, 1), labels.chunk(self.run.loss_chunks, 1), strict=True):
            rows, t = rows.reshape(-1, rows.shape[-1]), t.reshape(-1)
            if self.run.compiled:
                total = total + self.fused(rows, self.model.head, t)[0]
            else:
                total = total + _cross_entropy(functional.linear(rows, self.model.head), t)
        return total / (labels != -100).sum()


def _shifted(labels: Tensor) -> Tensor:
    return functional.pad(labels[..., 1:], (0, 1), value=-100)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
