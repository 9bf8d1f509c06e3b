"""torchtitan's Llama and its training loop, of December 2024.

Follows pytorch/torchtitan at commit 9dec370 (the one of ``benchmarks/llama3_h100_202412_torchtitan.md``):
``models/llama/model.py``, ``models/norms.py`` (``rmsnorm``), ``parallelisms/parallelize_llama.py`` (checkpointing by
operator: every other product, attention and little else is kept; layers compiled with the checkpoint inside),
``train.py`` (fp32 loss over whole logits, never compiled, the logits let go before backward). Weights are built in
``trained_dtype``: under FSDP2 that is the type they are gathered in. No weight is tied.

Float8 is not modelled: linear layers would keep 8-bit inputs in place of bf16 ones where the compiler saves those.

Shapes: b rows, s tokens of a row, h hidden, n query heads, m key/value heads, d head size, f MLP width.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..foreign import ForeignRun
from ..ledger import Ledger, NoLedger
from .attention import sdpa
from .base import Stepped
from .compiled import PieceOf, Policy

_MM = torch.ops.aten.mm.default
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


def build(config: Mapping[str, Any], run: ForeignRun, depth: int) -> Stepped:
    if config["model_type"] != "llama" or run.method != "full":
        raise ValueError("torchtitan trains the whole of Llama models only")
    model = Transformer(config, run, depth)
    return Stepped(model, model.blocks, Loop(model, entropy_of(run)))


def entropy_of(run: ForeignRun) -> Any:
    return PartsOfRows.apply if run.spread.tensor > 1 else functional.cross_entropy


class PartsOfRows(torch.autograd.Function):
    """What ``loss_parallel`` computes of a part of the vocabulary (``torch/distributed/tensor/parallel/loss.py``)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        result = shifted - shifted.exp().sum(-1, keepdim=True).log()
        del shifted
        ctx.save_for_backward(result, labels)
        return -result.gather(-1, labels[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        result, labels = ctx.saved_tensors
        grad = torch.zeros_like(result)
        grad.scatter_(-1, labels[:, None], -1.0)
        return (grad + result.exp()) * grads[0], None


def saves() -> Any:
    """A fresh policy: whether an operator's result is kept, by ``_save_list`` and the rule for products."""
    seen: Counter[Any] = Counter()

    def kept(operator: Any) -> bool:
        seen[operator] += 1
        return bool(operator is _FLASH or (operator is _MM and seen[operator] % 2))

    return kept


def _contexts() -> Any:
    forward, again = saves(), saves()

    def policy(ctx: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = (again if ctx.is_recompute else forward)(operator)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _graph_policy(mode: str) -> Policy:
    kept = saves()

    def policy(node: fx.Node) -> bool:
        return mode == "selective" and bool(kept(node.target))

    return policy


class Norm(nn.Module):
    def __init__(self, h: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(h, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        output = self._normed(x.float()).type_as(x)
        return output * self.weight

    @staticmethod
    def _normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def rotated(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of neighbours as fp32 complex numbers; the table is complex too."""
    pairs = [torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (q, k)]
    table = table[: q.shape[1]].view(1, q.shape[1], 1, -1)
    turned = [torch.view_as_real(one * table).flatten(3) for one in pairs]
    return turned[0].type_as(q), turned[1].type_as(k)


class Attention(nn.Module):
    def __init__(self, h: int, heads: tuple[int, int, int], linear: Any, fused: bool) -> None:
        super().__init__()
        self.n, self.m, self.d = heads
        self.fused = fused
        self.wq, self.wk = linear(h, self.n * self.d), linear(h, self.m * self.d)
        self.wv, self.wo = linear(h, self.m * self.d), linear(self.n * self.d, h)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (t.view(b, s, -1, self.d) for t in (q, k, v))
        q, k = rotated(q, k, table)
        keys, values = self._repeated(k), self._repeated(v)
        q, k, v = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        # The operator itself where a policy must know it; else the stand-in that takes what its kernels take.
        out = _FLASH(q, k, v, 0.0, True)[0] if self.fused else sdpa(q, k, v, "flash")
        out = out.transpose(1, 2).contiguous().view(b, s, -1)
        return self.wo(out)

    def _repeated(self, x: Tensor) -> Tensor:
        b, s = x.shape[:2]
        if self.n == self.m:
            return x
        return x.unsqueeze(3).expand(b, s, self.m, self.n // self.m, self.d).reshape(b, s, self.n, self.d)


class Block(nn.Module):
    """``forward`` is what the wrappers make of ``step``."""

    def __init__(self, config: Mapping[str, Any], run: ForeignRun, linear: Any) -> None:
        super().__init__()
        h, f, n = (int(config[key]) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
        heads = n, int(config.get("num_key_value_heads") or n), int(config.get("head_dim") or h // n)
        dtype = getattr(torch, run.trained_dtype)
        self.mode = run.checkpointing
        self.attention = Attention(h, heads, linear, fused=run.compiled or self.mode == "selective")
        self.w1, self.w2, self.w3 = linear(h, f), linear(f, h), linear(h, f)
        self.attention_norm, self.ffn_norm = Norm(h, dtype), Norm(h, dtype)

    def step(self, x: Tensor, table: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), table)
        out = h + self._mlp(self.ffn_norm(h))
        return out

    def _mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out

    def forward(self, x: Tensor, table: Tensor, compiled: PieceOf | None) -> Tensor:
        if compiled is not None:
            return compiled(_Stepping(self), x, table)[0]
        if self.mode == "none":
            return self.step(x, table)
        how: dict[str, Any] = {"context_fn": _contexts} if self.mode == "selective" else {}
        out: Tensor = checkpoint(self.step, x, table, use_reentrant=False, preserve_rng_state=False, **how)
        return out


class _Stepping(nn.Module):
    """A block whose call is its step."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.block.step(x, table)


class Transformer(nn.Module):
    def __init__(self, config: Mapping[str, Any], run: ForeignRun, depth: int) -> None:
        super().__init__()
        dtype = getattr(torch, run.trained_dtype)
        h, vocab = int(config["hidden_size"]), int(config["vocab_size"])
        d = int(config.get("head_dim") or h // int(config["num_attention_heads"]))
        linear = partial(nn.Linear, bias=False, dtype=dtype)
        self.tok_embeddings = nn.Embedding(vocab, h, dtype=dtype)
        self.blocks = nn.ModuleList(Block(config, run, linear) for _ in range(depth))
        self.norm = Norm(h, dtype)
        self.output = linear(h, vocab)
        self.register_buffer("table", torch.empty(run.max_length, d // 2, dtype=torch.complex64))
        self.compiled: PieceOf | None = None
        if run.compiled:
            policy = None if run.checkpointing == "none" else partial(_graph_policy, run.checkpointing)
            first: Any = self.blocks[0]
            self.compiled = PieceOf(_Stepping(first), policy)

    def forward(self, ids: Tensor, ledger: Ledger | NoLedger) -> Tensor:
        h = self.tok_embeddings(ids)
        for block in self.blocks:
            h = block(h, self.table, self.compiled)
        h = self.norm(h)
        ledger.mark("loss")
        out: Tensor = self.output(h)
        return out


class Loop:
    """``train.py``: the logits go before backward; the losses of the last steps are held until they are logged."""

    def __init__(self, model: Transformer, entropy: Any) -> None:
        self.model, self.entropy = model, entropy

    def __call__(self, ids: Tensor, labels: Tensor, ledger: Ledger | NoLedger) -> Tensor:
        logits = self.model(ids, ledger)
        return self._loss(logits, labels)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        return loss
