"""Lightning's lit-gpt of October 2023 and LitGPT 0.4 of 2024: the same blocks with a few different habits.

Follows ``lit_gpt/{model,lora,adapter,adapter_v2,utils}.py`` and ``finetune/{lora,adapter,adapter_v2,full}.py`` of
Lightning-AI/litgpt at commit 069f6584 (the one that finished ``tutorials/resource-tables.md``) and ``litgpt/`` 0.4.12
(``config_hub``), and ``lightning/fabric`` 2.1 around them: Fabric hands every logit back in fp32, the loop's names hold
logits and loss until the next ones are there, and the bitsandbytes plug-in quantises each ``Linear``, the head too.
Weights are never tied. In one thing lit-gpt is taken as it was a few days before: a single key head was not repeated.

``run.tool`` is ``lit_gpt`` for the former and ``litgpt`` for the latter; ``run.method`` may also be ``adapter`` or
``adapter_v2``, whose blocks are alike from the fourth on only. Declines mixtures of experts.

Shapes: b rows, s tokens of a row, h hidden, n query heads, m key/value groups, d head size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..foreign import ForeignRun
from ..ledger import Ledger, NoLedger
from .attention import cuda_choice, sdpa
from .base import Stepped
from .litgpt_layers import LoraQkv, Maker, adapted, dtype_of, shape_of

CHUNK = 128
"""Tokens of a row that the head, and the loss, take at a time."""
PROMPT, START = 10, 2
"""Rows of an adapter's prefix, and the first block that has one."""


def build(config: Mapping[str, Any], run: ForeignRun, depth: int) -> Stepped:
    maker = Maker(shape_of(config), run)
    model = Gpt(maker, depth)
    _freeze(model, run)
    return Stepped(model, model.blocks, Loop(model, maker))


def _freeze(model: nn.Module, run: ForeignRun) -> None:
    trained = {"lora": ("lora_",), "adapter": ("adapter_", "gating")}
    trained["adapter_v2"] = (*trained["adapter"], "norm")
    if run.method != "full":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(word in name for word in trained[run.method]))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The tables are fp32: Fabric's default type is in force when they are made anew for the longest row."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
    roped = (x * cos) + (rotated * sin)
    return roped.type_as(x)


class Attention(nn.Module):
    def __init__(self, maker: Maker, index: int) -> None:
        super().__init__()
        shape, run = maker.shape, maker.run
        self.maker, self.windowed = maker, index % 2 == 0
        width = (shape.n + 2 * shape.m) * shape.d
        parts = (adapted(run, "q"), adapted(run, "k"), adapted(run, "v"))
        if run.method == "lora" and any(parts):
            self.attn: nn.Module = LoraQkv(maker.linear(shape.h, width), parts, maker)
        else:
            self.attn = maker.layer(shape.h, width, "qkv")
        self.proj = maker.layer(shape.n * shape.d, shape.h, "proj")
        self.prefixed = str(run.method).startswith("adapter") and index >= START
        if self.prefixed:
            dtype = dtype_of(run.trained_dtype)
            self.adapter_wte = nn.Parameter(torch.empty(PROMPT, shape.h, dtype=dtype))
            self.gating = nn.Parameter(torch.empty(1, 1, shape.n, 1, dtype=dtype))
            # The sanity check before training fills a cache, without gradients, that training reads ever after.
            self.adapter_k: Tensor
            self.adapter_v: Tensor
            self.register_buffer("adapter_k", torch.empty(1, shape.n, PROMPT, shape.d, dtype=dtype))
            self.register_buffer("adapter_v", torch.empty(1, shape.n, PROMPT, shape.d, dtype=dtype))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape, (b, s, _) = self.maker.shape, x.shape
        qkv = self.attn(x).view(b, s, shape.m, -1, shape.d).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((shape.n // shape.m, 1, 1), 2)
        if shape.m != shape.n and (shape.m != 1 or self.maker.modern):
            k, v = (t.expand(b, shape.m, shape.n // shape.m, s, shape.d) for t in (k, v))
        q, k, v = (t.reshape(b, -1, s, shape.d) for t in (q, k, v))
        # Named, for as long as they are there: upstream's names hold them to the end as well.
        q_roped, k_roped = rope(q[..., : shape.rotary], cos, sin), rope(k[..., : shape.rotary], cos, sin)
        q = torch.cat((q_roped, q[..., shape.rotary :]), -1)
        k = torch.cat((k_roped, k[..., shape.rotary :]), -1)
        y = self._attended(q, k, v)
        if self.prefixed:
            y = y + self.gating * self._prefix(q)
        y = y.reshape(b, s, shape.n * shape.d)
        return self.proj(y)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.maker.shape.capped:
            return _capped_scores(q, k, v, self.windowed).transpose(1, 2)
        if k.shape[1] != q.shape[1]:
            return _whole_scores(q, k, v).transpose(1, 2)
        return sdpa(q, k, v, cuda_choice(q, k, None)).transpose(1, 2)

    def _prefix(self, q: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], PROMPT, dtype=torch.bool)
        return sdpa(q, self.adapter_k, self.adapter_v, "efficient", mask).transpose(1, 2)


def _whole_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch 2.1 on one key head for many query heads: no fused kernel takes it, every score is there."""
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    mask = torch.zeros_like(keep, dtype=q.dtype).masked_fill_(keep.logical_not(), float("-inf"))
    scores = torch.matmul(q * q.shape[-1] ** -0.25, (k * q.shape[-1] ** -0.25).transpose(-2, -1))
    scores.add_(mask)
    scores = torch.softmax(scores, -1)
    return torch.matmul(scores, v)


def _capped_scores(q: Tensor, k: Tensor, v: Tensor, windowed: bool) -> Tensor:
    """No fused kernel caps scores; the mask is made in each block."""
    rows = q.shape[2]
    mask = torch.ones(rows, rows, dtype=q.dtype).triu(1)
    mask.masked_fill_(mask.bool(), float("-inf"))
    if windowed:
        window = torch.ones_like(mask).tril(-rows)
        window.masked_fill_(window.bool(), float("-inf"))
        mask += window
    scores = q @ k.mT * 0.0625
    scores = torch.tanh(scores / 50.0) * 50.0
    scores = scores + mask
    scores = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return scores @ v


class Mlp(nn.Module):
    def __init__(self, maker: Maker) -> None:
        super().__init__()
        shape = maker.shape
        self.kind = shape.mlp
        self.fc_1 = maker.layer(shape.h, shape.f, "mlp")
        self.fc_2 = maker.layer(shape.h, shape.f, "mlp") if shape.mlp != "gelu" else None
        self.proj = maker.layer(shape.f, shape.h, "mlp")

    def forward(self, x: Tensor) -> Tensor:
        if self.fc_2 is None:
            x = self.fc_1(x)
            x = functional.gelu(x)
            return self.proj(x)
        first, second = self.fc_1(x), self.fc_2(x)
        x = (functional.silu(first) if self.kind == "silu_gated" else functional.gelu(first)) * second
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, maker: Maker, index: int) -> None:
        super().__init__()
        self.maker = maker
        self.norm_1 = maker.norm()
        self.attn = Attention(maker, index)
        self.norm_2 = None if maker.shape.shared_norm else maker.norm()
        self.mlp = Mlp(maker)
        self.after_attention, self.after_mlp = (maker.norm() if maker.shape.capped else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Activation checkpointing is there under FSDP only, where every block is wrapped.
        if self.maker.run.checkpointing == "full":
            out: Tensor = checkpoint(self.step, x, cos, sin, use_reentrant=False)
            return out
        return self.step(x, cos, sin)

    def step(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_1 = self.norm_1(x)
        h = self.after_attention(self.attn(n_1, cos, sin))
        if self.maker.shape.parallel:
            n_2 = n_1 if self.norm_2 is None else self.norm_2(x)
            if self.maker.modern:
                n_1 = n_2  # one name upstream: the first norm's output goes here
            x = self.mlp(n_2) + h + x
            return x
        assert self.norm_2 is not None
        x = h + x
        x = self.after_mlp(self.mlp(self.norm_2(x))) + x
        return x


class Gpt(nn.Module):
    def __init__(self, maker: Maker, depth: int) -> None:
        super().__init__()
        shape = maker.shape
        self.maker = maker
        self.lm_head = maker.layer(shape.h, shape.vocab, "head", shape.head_bias)
        self.wte = nn.Embedding(shape.vocab, shape.h, dtype=maker.stored)
        self.blocks = nn.ModuleList(Block(maker, index) for index in range(depth))
        self.norm_f = maker.norm()
        rows = maker.run.max_length
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.empty(rows, shape.rotary, dtype=torch.float32))
        self.register_buffer("sin", torch.empty(rows, shape.rotary, dtype=torch.float32))

    def forward(self, ids: Tensor, chunked: bool, ledger: Ledger | NoLedger) -> list[Tensor]:
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.wte(ids)
        if self.maker.shape.scaled:
            x = x * (self.maker.shape.h**0.5)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm_f(x)
        ledger.mark("loss")
        if chunked:
            return [self.lm_head(rows) for rows in x.split(CHUNK, 1)]
        x = self.lm_head(x)
        return [torch.tanh(x / 30.0) * 30.0 if self.maker.shape.capped else x]  # chunks are not capped


class Loop:
    """``finetune``'s loop: its names hold the logits and the loss, and what hangs on it, until the next are there."""

    def __init__(self, model: Gpt, maker: Maker) -> None:
        self.model, self.maker = model, maker
        self.logits: list[Tensor] = []
        self.last: Tensor | None = None

    def __call__(self, ids: Tensor, labels: Tensor, ledger: Ledger | NoLedger) -> Tensor:
        if not self.maker.modern:  # feeds the longest row first: what is held is of a much shorter one
            self.logits, self.last = [], None
        full = self.maker.run.method == "full"
        # Fabric's ``convert_output``: all of them in fp32 before the first ones go.
        self.logits = [logits.float() for logits in self.model(ids, not full, ledger)]
        labels = labels[..., 1:]
        self.last = self._whole(labels) if full else self._chunked(labels)
        return self.last

    def _chunked(self, labels: Tensor) -> Tensor:
        self.logits[-1] = self.logits[-1][..., :-1, :]
        rows = [chunk.reshape(-1, chunk.shape[-1]) for chunk in self.logits]
        targets = [chunk.reshape(-1) for chunk in labels.split(self.logits[0].shape[1], 1)]
        losses = [functional.cross_entropy(r, t, reduction="none") for r, t in zip(rows, targets, strict=True)]
        return torch.cat(losses).mean()

    def _whole(self, labels: Tensor) -> Tensor:
        rows = self.logits[0][..., :-1, :]
        rows, targets = rows.reshape(-1, rows.shape[-1]), labels.reshape(-1)
        if not self.maker.modern:
            return functional.cross_entropy(rows, targets)
        pairs = zip(rows.split(CHUNK), targets.split(CHUNK), strict=True)
        return torch.cat([functional.cross_entropy(r, t, reduction="none") for r, t in pairs]).mean()
