"""Mixtures of experts with the tokens spread evenly: routing by values cannot run on fake tensors.

The layer's loop over experts is transformers' (``MixtralExperts.forward`` and its like): gather the tokens of an
expert, three products, weigh, add back. Packed bases keep an expert as three linears, as transformers did before 5.
"""

import types
from typing import Any

import torch
from torch import Tensor, nn


def spread_evenly(model: nn.Module, as_linears: bool) -> None:
    """Replace the forward of every layer of 3-D expert weights, on the instance."""
    for module in list(model.modules()):
        if getattr(getattr(module, "gate_up_proj", None), "dim", lambda: 0)() != 3:
            continue
        module.width = _hidden(model)  # type: ignore[assignment]
        if as_linears:
            _split(module)
        module.forward = types.MethodType(_even, module)


def _hidden(model: Any) -> int:
    return int(model.config.get_text_config().hidden_size)


def _split(module: Any) -> None:
    """Three linears an expert in the place of the stacked weights."""
    experts, columns = module.gate_up_proj.shape[0], module.width
    inner = module.gate_up_proj.numel() // experts // columns // 2
    device, dtype = module.gate_up_proj.device, module.gate_up_proj.dtype
    del module.gate_up_proj, module.down_proj
    module.linears = nn.ModuleList()
    for _ in range(experts):
        expert = nn.Module()
        for name, shape in (("w1", (columns, inner)), ("w2", (inner, columns)), ("w3", (columns, inner))):
            setattr(expert, name, nn.Linear(*shape, bias=False, device=device, dtype=dtype))
        module.linears.append(expert)


def _even(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any, **__: Any) -> Tensor:
    tokens, chosen = hidden_states.shape[0], top_k_index.shape[-1]
    experts = len(self.linears) if hasattr(self, "linears") else self.gate_up_proj.shape[0]
    out = torch.zeros_like(hidden_states)
    mask = torch.zeros(tokens, chosen, experts, dtype=torch.int64, device=out.device)
    share = -(-tokens * chosen // experts)
    for i in range(experts):
        row = torch.zeros(share, dtype=torch.int64, device=out.device)
        place = torch.zeros(share, dtype=torch.int64, device=out.device)
        x = _expert(self, i, hidden_states[row]) * top_k_weights[row, place, None]
        out.index_add_(0, row, x.to(out.dtype))
        del x
    del mask
    return out


def _expert(self: Any, i: int, x: Tensor) -> Tensor:
    if hasattr(self, "linears"):
        one = self.linears[i]
        out: Tensor = one.w2(nn.functional.silu(one.w1(x)) * one.w3(x))
        return out
    into, back = self.gate_up_proj[i], self.down_proj[i]
    if into.shape[0] == self.width:  # stored for x @ W
        into, back = into.t(), back.t()
    gate, up = nn.functional.linear(x, into).chunk(2, dim=-1)
    return nn.functional.linear(nn.functional.silu(gate) * up, back)
