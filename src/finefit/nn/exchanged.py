"""Attention over tokens that several ranks share: each takes all tokens of some heads (DeepSpeed-Ulysses, arXiv:2309.14509).

Before attention an all-to-all gives each rank its heads of everybody's tokens, after it another one everybody's heads of its
tokens. A key/value head that several ranks need goes to each of them, and its gradient is the sum of theirs. torch's own
ring attention has no kernels for a CPU; this one is the same on both.

Shapes: U tokens of a rank, T = c·U of all c ranks, n heads, d head size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Here:
    """All tokens are here."""

    def heads(self, qkv: list[Tensor]) -> list[Tensor]:
        """``(U, n, d)`` each → ``(T, n/c, d)``. They are taken out of the list, so that they are let go of one by one."""
        return qkv

    def tokens(self, out_tnd: Tensor) -> Tensor:
        """``(T, n/c, d)`` → ``(U, n, d)``."""
        return out_tnd


class Exchange(Here):
    """Among the ranks of ``group``, of which each has as many tokens as the others, in order."""

    def __init__(self, group: dist.ProcessGroup, seen: Callable[[], None]) -> None:
        self.group, self.seen = group, seen
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def heads(self, qkv: list[Tensor]) -> list[Tensor]:
        self.seen()
        found: list[Tensor] = []
        while qkv:
            found.append(self._heads(qkv.pop(0)))
        return found

    def _heads(self, x_und: Tensor) -> Tensor:
        heads = x_und.shape[1]
        if heads < self.ranks:  # each of them several times
            x_und = x_und[:, :, None].expand(-1, -1, self.ranks // heads, -1).flatten(1, 2)
        sent_cund = x_und.unflatten(1, (self.ranks, -1)).transpose(0, 1)
        got_cund: Tensor = _AllToAll.apply(sent_cund, self)
        return got_cund.flatten(0, 1)

    def tokens(self, out_tnd: Tensor) -> Tensor:
        parts_cund: Tensor = _AllToAll.apply(out_tnd.unflatten(0, (self.ranks, -1)), self)
        del out_tnd
        return parts_cund.transpose(0, 1).flatten(1, 2).contiguous()

    def passed(self, x_cund: Tensor) -> Tensor:
        """The i-th part goes to the i-th rank, its part for this one comes."""
        sent_cund = x_cund.contiguous()
        got_cund = torch.empty_like(sent_cund)
        dist.all_to_all_single(got_cund, sent_cund, group=self.group)
        return got_cund


class _AllToAll(torch.autograd.Function):
    """``exchange.passed``; gradients go back the way that values came."""

    @staticmethod
    def forward(ctx: Any, x_cund: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.passed(x_cund)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.passed(grads[0]), None
