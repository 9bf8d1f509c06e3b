"""Checkpointed blocks in groups: the input of a group is kept, those of its other blocks are computed again from it.

Recursive checkpointing of arXiv:1604.06174, section 4.2, one level deep. When the backward of a group's last block
begins, the others run once more to give every block of the group its input; then each runs a third time for its own
backward. Autocast and random numbers are as they were, so what comes is what was.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .kept import Input, keeping
from .recomputed import Call, Recomputed


def group(blocks: Sequence[Recomputed], size: int) -> None:
    """Keep the input of every ``size``-th of these blocks, which follow each other, and of no other."""
    for start in range(0, len(blocks), size):
        chain = _Chain()
        for place, block in enumerate(blocks[start : start + size]):
            block.keeping = chain.keeper(is_first=place == 0)


class _Link(Input):
    """A block's input: the tensor, or how it comes from the input of the block before."""

    def __init__(self, call: Call, arguments: tuple[Any, ...], before: "_Link | None") -> None:
        self.call, self.before = call, before
        self.args, self.kwargs = arguments
        self.tensor: Tensor | None = None
        kinds = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
        self.casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    def leave(self, x: Tensor) -> None:
        if self.before is None:
            self.tensor = x

    def back(self) -> Tensor:
        """The block's input, after running the blocks before it again where it is not there."""
        if self.tensor is None:
            waiting = [self]
            while (before := waiting[-1].before) is not None and before.tensor is None:
                waiting.append(before)
            for link in reversed(waiting):
                assert link.before is not None, "the input of a group's first block is kept"
                link.tensor = link.before.output()
        assert self.tensor is not None
        return self.tensor

    def output(self) -> Tensor:
        """What the block makes of its input, with nothing kept on the way."""
        assert self.tensor is not None
        # With gradients wanted, as the first time: without, other kernels might be chosen.
        hidden = self.tensor.detach().requires_grad_()
        with ExitStack() as stack:
            for kind, dtype, enabled in self.casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(lambda _x: None, lambda none: none))
            out = self.call(hidden, *self.args, **self.kwargs)
        return (out[0] if isinstance(out, tuple) else out).detach()


class _Chain:
    """The links of one group's blocks in the forward that is under way."""

    def __init__(self) -> None:
        self.last: Callable[[], _Link | None] = lambda: None

    def keeper(self, is_first: bool) -> Callable[..., AbstractContextManager[Any]]:
        def kept(call: Call, hidden: Tensor, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
            link = _Link(call, (args, kwargs), None if is_first else self.last())
            self.last = weakref.ref(link)
            return keeping(hidden, link)

        return kept
