"""Gradients that every data-parallel rank sums with the others', and parameters of which each steps its own rows.

In the last micro-batch of a step each gradient is all-reduced where it is as soon as it is whole, while backward goes on
with the blocks before (arXiv:2006.15704, section 3.2.3). There are no buckets: DDP's stay between steps, and a rank would
hold its gradients through forward. What is asked of the group comes in one order on all ranks, that of the parameters from
the last to the first: one that has no gradient on this rank holds back those behind it until backward is over.

With ``ZeRO-1`` (arXiv:1910.02054, section 5.1) a rank has the optimizer's states of its own rows alone, and what it has
stepped is gathered by all.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ..engines.world import Alone
from .optimizers import Home

# torch 2.13's name, and that of 2.11
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Replicated(Home):
    """All-reduces over ``group``, as a sum."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.order: list[Parameter] = []
        self._whole: set[Parameter] = set()
        self._asked: list[Any] = []
        self._next, self._is_last = -1, True

    def of(self, parameter: Parameter) -> Parameter:
        self.order.append(parameter)
        parameter.register_post_accumulate_grad_hook(self._arrived)
        return parameter

    def before(self, is_last: bool) -> None:
        self._is_last, self._next = is_last, len(self.order) - 1

    def _arrived(self, parameter: Tensor) -> None:
        if self._is_last:
            self._whole.add(parameter)  # type: ignore[arg-type]
            self._ask()

    def _ask(self) -> None:
        while self._next >= 0 and self.order[self._next] in self._whole:
            gradient = self.order[self._next].grad
            assert gradient is not None
            self._asked.append(dist.all_reduce(gradient, group=self.group, async_op=True))
            self._next -= 1

    def gather(self) -> None:
        """Of a parameter that others have a gradient of this rank's is zero; one that nobody has any of stays without."""
        found = torch.tensor([p.grad is not None for p in self.order], dtype=torch.uint8)
        found = found.to(self.order[0].device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        for parameter, is_found in zip(self.order, found.tolist(), strict=True):
            if is_found and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        while self._next >= 0:
            if self.order[self._next].grad is None:
                self._next -= 1
                continue
            self._whole.add(self.order[self._next])
            self._ask()
        for one in self._asked:
            one.wait()
        self._asked.clear()
        self._whole.clear()


class RowsStepped(Replicated):
    """The same, and each rank steps its own rows of every parameter."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._rows: dict[Parameter, Parameter] = {}  # what is stepped, by the model's

    def of(self, parameter: Parameter) -> Parameter:
        super().of(parameter)
        own = self._parts(parameter.detach())[dist.get_rank(self.group)]
        return self._rows.setdefault(parameter, Parameter(own, requires_grad=False))

    def _parts(self, whole: Tensor) -> list[Tensor]:
        """Each rank's rows, as views; the last ones may have none."""
        ranks = dist.get_world_size(self.group)
        each = -(-whole.shape[0] // ranks)
        starts = [min(rank * each, whole.shape[0]) for rank in range(ranks + 1)]
        return [whole[a:b] for a, b in itertools.pairwise(starts)]

    def gather(self) -> None:
        super().gather()
        for parameter, own in self._rows.items():
            if parameter.grad is not None:
                own.grad = self._parts(parameter.grad)[dist.get_rank(self.group)]

    def over(self) -> None:
        """Gather what each has stepped."""
        asked: list[Any] = []
        for whole in self._rows:
            if whole.grad is not None:
                asked += self._told(whole.detach())
        for one in asked:
            one.wait()

    def _told(self, whole: Tensor) -> list[Any]:
        parts = self._parts(whole)
        if len({part.shape for part in parts}) == 1:
            own = parts[dist.get_rank(self.group)]
            return [_gather(whole, own, group=self.group, async_op=True)]
        return [
            dist.broadcast(part, group=self.group, group_src=rank, async_op=True)
            for rank, part in enumerate(parts)
            if part.numel()
        ]

    def cleared(self) -> None:
        for parameter in self._rows:
            parameter.grad = None


class Summed(Home):
    """Around another: what each rank of ``group`` has of a gradient is a term of a sum, of the weights that all hold whole.

    ``is_whole`` tells them; they are summed once a step, when all else is.
    """

    def __init__(
        self, inner: Home, group: dist.ProcessGroup, is_whole: Callable[[Parameter], bool], world: Alone
    ) -> None:
        self.inner, self.group, self.is_whole, self.world = inner, group, is_whole, world
        self.terms: list[Parameter] = []
        """What is stepped of them."""

    def of(self, parameter: Parameter) -> Parameter:
        stepped = self.inner.of(parameter)
        if self.is_whole(parameter):
            self.terms.append(stepped)
            if dist.get_rank(self.group):
                self.world.counted_elsewhere.add(stepped)
        return stepped

    def before(self, is_last: bool) -> None:
        self.inner.before(is_last)

    def gather(self) -> None:
        self.inner.gather()
        asked = [
            dist.all_reduce(one.grad, group=self.group, async_op=True)
            for one in self.terms
            if one.grad is not None and one.numel()
        ]
        for one in asked:
            one.wait()

    def back(self, parameters: Sequence[Parameter]) -> None:
        self.inner.back(parameters)

    def over(self) -> None:
        self.inner.over()

    def cleared(self) -> None:
        self.inner.cleared()
