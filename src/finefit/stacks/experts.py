"""Mixtures of experts with the tokens spread evenly: routing by values cannot run on fake tensors.

The layer's loop over experts is transformers' (``MixtralExperts.forward`` and its like): gather the tokens of an
expert, two products, weigh, add back.
"""

import types
from typing import Any

import torch
from torch import Tensor, nn


def spread_evenly(model: nn.Module) -> None:
    """Replace the forward of every layer of 3-D expert weights, on the instance."""
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and getattr(module.gate_up_proj, "dim", lambda: 0)() == 3:
            module.forward = types.MethodType(_even, module)


def _even(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any, **__: Any) -> Tensor:
    tokens, chosen = hidden_states.shape[0], top_k_index.shape[-1]
    experts = self.gate_up_proj.shape[0]
    out = torch.zeros_like(hidden_states)
    mask = torch.zeros(tokens, chosen, experts, dtype=torch.int64, device=out.device)
    share = -(-tokens * chosen // experts)
    transposed = self.gate_up_proj.shape[1] == hidden_states.shape[-1] and self.gate_up_proj.shape[2] != tokens
    for i in range(experts):
        row = torch.zeros(share, dtype=torch.int64, device=out.device)
        place = torch.zeros(share, dtype=torch.int64, device=out.device)
        x = hidden_states[row]
        one, two = self.gate_up_proj[i], self.down_proj[i]
        gate, up = nn.functional.linear(x, one.t() if transposed else one).chunk(2, dim=-1)
        x = nn.functional.linear(nn.functional.silu(gate) * up, two.t() if transposed else two)
        x = x * top_k_weights[row, place, None]
        out.index_add_(0, row, x.to(out.dtype))
        del gate, up
    del mask
    return out
