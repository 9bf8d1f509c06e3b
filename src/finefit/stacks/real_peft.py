"""Adapters other than LoRA: the real peft puts them into the model, on fake tensors, where it is installed.

So two dozen kinds need no stand-in, and are as peft of the installed version has them. Settings are those of an
``adapter_config.json``. Declines what needs values to be built (a decomposition of the weights, indices of the largest
of them), and a base in packed layers of ours, which peft does not know.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..foreign import ForeignRun

PROMPTS = ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT")
"""They put trained tokens before the row's own: the wrapper has to be called, not the model."""


def with_adapter(model: Any, run: ForeignRun) -> Any:
    """peft's wrapper around the model, whose modules are adapted in place; ValueError where that cannot be."""
    kind = str(run.adapter.get("peft_type"))
    try:
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model
    except ImportError as error:
        raise ValueError(f"the adapter {kind} is built by peft, which is not installed") from error
    if run.quantised:
        raise ValueError(f"the adapter {kind} over a packed base is not modelled")
    known: Mapping[Any, Any] = PEFT_TYPE_TO_CONFIG_MAPPING
    if kind not in known:
        raise ValueError(f"the installed peft has no adapter {kind}")
    settings = {key: value for key, value in run.adapter.items() if key != "peft_type"}
    with _reassigned():
        return get_peft_model(model, known[kind](**settings), autocast_adapter_dtype=run.trained_dtype == "float32")


@contextmanager
def _reassigned() -> Iterator[None]:
    """``Module.to`` gives a module new parameters: fake ones cannot be swapped in place while peft refers to them."""
    plain = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    moved = fn(parameter)
                if moved is not parameter:
                    self._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]
