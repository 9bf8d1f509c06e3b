"""A forward that keeps its input and is run again in backward (arXiv:1604.06174), by torch's non-reentrant checkpoint.

Installed in place of a block's forward, or of that of its attention or MLP. How the input is kept meanwhile is a slot,
``keeping``: as it is, elsewhere (``offloaded``), or not at all (``nested``). ``selective`` contexts keep what products
and attention give, so that only what is cheap is run again. Declines reentrant autograd.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class Call:
    """One call of a forward that will be made again, with the random numbers it had.

    ``run(*args, **kwargs)``; where it draws numbers the generators' states are stored (5 kB).
    """

    def __init__(self, run: Callable[..., Any], draws: bool) -> None:
        self.run, self.draws, self.is_first = run, draws, True
        self.cpu = torch.get_rng_state() if draws else None
        self.cuda = torch.cuda.get_rng_state_all() if draws and torch.cuda.is_initialized() else []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_first or self.cpu is None:
            self.is_first = False
            return self.run(*args, **kwargs)
        with torch.random.fork_rng(devices=range(len(self.cuda))):
            torch.set_rng_state(self.cpu)
            if self.cuda:
                torch.cuda.set_rng_state_all(self.cuda)
            return self.run(*args, **kwargs)


class Recomputed:
    """``run``, of which only the input is kept; it is the first argument given by position."""

    def __init__(self, run: Callable[..., Any], draws: bool, contexts: Contexts = noop_context_fn) -> None:
        self.run, self.draws, self.contexts = run, draws, contexts
        self.keeping: Callable[..., AbstractContextManager[Any]] = lambda *_args, **_kwargs: nullcontext()
        """A context of one call, given the call and its arguments, in which the input is saved."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        if not args:  # what is given by name the checkpoint takes to be no tensor
            args = (kwargs.pop("hidden_states"),)
        call = Call(self.run, self.draws)
        with self.keeping(call, *args, **kwargs):
            return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts,
                              **kwargs)  # fmt: skip


def recomputed(module: nn.Module, seen: Callable[[], None], contexts: Contexts = noop_context_fn) -> None:
    """Install it as the module's forward; ``seen`` is called whenever that really runs."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        seen()
        return forward(*args, **kwargs)

    module.forward = Recomputed(run, any(map(_draws, module.modules())), contexts)


def recomputed_blocks(blocks: nn.ModuleList) -> list[Recomputed]:
    """Forwards of the blocks that keep their input, in order."""
    return [block.forward for block in blocks if isinstance(block.forward, Recomputed)]


def _draws(module: nn.Module) -> bool:
    """Whether the module's forward draws random numbers, by the rates it keeps: of dropout, of a router's jitter."""
    rates = {**vars(module), "dropout p": getattr(module, "p", 0.0)}
    return any(isinstance(n, float) and n > 0 for name, n in rates.items() if "dropout" in name or "jitter" in name)


# --- selective: products and attention are not run again

_aten = torch.ops.aten
_PRODUCTS = {
    getattr(_aten, name).default
    for name in (
        # addmm_ adds a low-rank update to a product in place: both are kept as one
        "mm", "addmm", "addmm_", "_grouped_mm", "_flash_attention_forward", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(_aten, name)
}  # fmt: skip
_memory: ContextVar["_First | _Again | None"] = ContextVar("memory", default=None)


def once(compute: Callable[[], Tensor]) -> Tensor:
    """What ``compute`` gives; in the second of ``selective``'s contexts what it gave in the first."""
    memory = _memory.get()
    return compute() if memory is None else memory.result(compute)


def selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a forward and of its second run, which takes the results of products and attention from the first."""
    first = _First()
    return _remembered(first), _remembered(_Again(first.kept))


@contextmanager
def _remembered(mode: "_First | _Again") -> Iterator[None]:
    token = _memory.set(mode)
    try:
        with mode:
            yield
    finally:
        _memory.reset(token)


class _First(TorchDispatchMode):
    """Keeps results in order: None where one is changed afterwards, so that it is made and changed again."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: deque[Any] = deque()
        self.at: dict[int, list[int]] = defaultdict(list)  # storage → its places in ``kept``

    def result(self, compute: Callable[[], Any]) -> Any:
        out = compute()
        self.kept.append(tree_map_only(Tensor, Tensor.detach, out))
        for leaf in tree_leaves(self.kept[-1]):
            if isinstance(leaf, Tensor):
                self.at[_storage(leaf)].append(len(self.kept) - 1)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            return self.result(lambda: func(*args, **kwargs))
        for tensor in _written(func, args, kwargs):
            for place in self.at.pop(_storage(tensor), ()):
                self.kept[place] = None
        return func(*args, **kwargs)


class _Again(TorchDispatchMode):
    def __init__(self, kept: deque[Any]) -> None:
        super().__init__()
        self.kept = kept

    def result(self, compute: Callable[[], Any]) -> Any:
        out = self.kept.popleft()
        return compute() if out is None else out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def made() -> Any:
            return func(*args, **(kwargs or {}))

        return self.result(made) if func in _PRODUCTS else made()


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors an operator changes."""
    if func._schema.is_mutable:
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                yield value
