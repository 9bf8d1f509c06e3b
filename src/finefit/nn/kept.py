"""Something else in the place of a tensor that autograd saves: what a checkpointed forward keeps of its input."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Input:
    """Stands for a tensor from when it is saved until it is wanted, and lives as long as it would have been saved."""

    def leave(self, x: Tensor) -> None:
        """It is saved: whoever else has ``x`` keeps it for a while."""

    def gone(self) -> None:
        """The forward it was saved by is through, and ``x`` will not be there any more."""

    def back(self) -> Tensor:
        """It is wanted."""
        raise AssertionError("says how the input comes back")


@contextmanager
def keeping(hidden: Tensor, instead: Input) -> Iterator[None]:
    """Where ``hidden`` is saved in this context, ``instead`` is; what hooks inside the context save is theirs."""
    storage, shape = hidden.untyped_storage()._cdata, hidden.shape  # the hooks live on, and must not hold it
    del hidden

    def pack(x: Tensor) -> Any:
        if x.untyped_storage()._cdata != storage or x.shape != shape:
            return x
        instead.leave(x)
        return instead

    with saved_tensors_hooks(pack, lambda kept: kept.back() if isinstance(kept, Input) else kept):
        yield
    instead.gone()
