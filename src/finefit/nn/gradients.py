"""The global norm of gradients and their scaling, all at once; one by one where they are pages of a file."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..engines.world import Alone
from ..scratch import is_mapped, let_go


def global_norm(parameters: Sequence[Parameter], world: Alone) -> Tensor:
    """2-norm of all gradients together, those of all ranks that have parts of them too; changes none."""
    norm = _norm_here([p for p in parameters if p not in world.counted_elsewhere])
    return world.total(norm.square_()).sqrt_() if world.size > 1 else norm


def _norm_here(parameters: Sequence[Parameter]) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(map(is_mapped, gradients)):
        return torch.nn.utils.get_total_norm(gradients, foreach=True)
    return torch.linalg.vector_norm(torch.stack([_norm(g) for g in gradients]))


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient)
    let_go(gradient)
    return norm


def clip(parameters: Sequence[Parameter], world: Alone, max_norm: float) -> Tensor:
    """Scale all gradients so that their common 2-norm is at most ``max_norm``; the norm before that is returned."""
    norm = global_norm(parameters, world)
    mapped = any(p.grad is not None and is_mapped(p.grad) for p in parameters)
    for some in [[p] for p in parameters] if mapped else [parameters]:
        torch.nn.utils.clip_grads_with_norm_(some, max_norm, norm, foreach=True)
        for p in some if mapped else ():
            if p.grad is not None:
                let_go(p.grad)
    return norm
