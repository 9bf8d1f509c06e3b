"""Transformers models in: built on meta, rewritten there by techniques, then filled tensor by tensor.

Any ``AutoModelForCausalLM`` decoder; its code is never copied or patched. All attention goes through transformers' own
registry under the name ``finefit``, so no mask is ever built; a batch's boundaries are passed explicitly.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ModelError
from .nn.attend import attend

ATTENTION = "finefit"
Fill = Callable[[Any, torch.device], None]


def config_of(folder: Path) -> Any:
    """The transformers config of a model folder."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    except (ValueError, KeyError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        hint = "update transformers, or pick a model whose model_type it knows"
        raise ModelError(f"transformers cannot read this model: {first}", where=str(folder), hint=hint) from error


def on_meta(config: Any) -> Any:
    """The model without storage, in training mode, attention routed to finefit's own."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, attend)
    config._attn_implementation = ATTENTION
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    return model.train()


def fill_empty(model: Any, device: torch.device) -> None:
    """Give every tensor a storage and every constant buffer (rotary frequencies, scales) its value."""
    for module in model.modules():
        stale = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in stale:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        if stale:
            model._init_weights(module)
    for name, parameter in list(model.named_parameters()):
        assign(model, name, torch.empty_like(parameter, device=device))
    model.tie_weights()


def fill_random(seed: int) -> Fill:
    """Small random weights, the same for a seed and a shape: for tests and for timing without a checkpoint."""

    def fill(model: Any, device: torch.device) -> None:
        fill_empty(model, device)
        generator = torch.Generator(device="cpu").manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if "lora_" in name:
                    continue
                scale = 1.0 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.1
                drawn = torch.randn(parameter.shape, generator=generator) * scale
                parameter.copy_(drawn + (1.0 if parameter.dim() == 1 and "bias" not in name else 0.0))

    return fill


def fill_from(folder: Path) -> Fill:
    """Weights of a model folder, one tensor in flight at a time."""

    def fill(model: Any, device: torch.device) -> None:
        fill_empty(model, device)
        wanted = {name: p for name, p in model.named_parameters() if "lora_" not in name}
        for name, tensor in _stored(folder):
            parameter = wanted.pop(name, None)
            if parameter is None:
                continue
            if parameter.shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)} in the file, {tuple(parameter.shape)} by config.json"
                raise ModelError(f"{name} is {shapes}", where=str(folder), hint="the files do not belong together")
            with torch.no_grad():
                parameter.copy_(tensor)
        if wanted:
            some = ", ".join(sorted(wanted)[:3])
            hint = "the download is incomplete, or the files belong to another model"
            raise ModelError(f"{len(wanted)} tensors are missing: {some} …", where=str(folder), hint=hint)

    return fill


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder's safetensors files, lazily."""
    from safetensors import SafetensorError, safe_open

    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read these weights: {error}", where=str(path)) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, or ModelError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        what = f"weights {', '.join(missing)} are missing" if missing else "there are no safetensors weights here"
        raise ModelError(what, where=str(folder), hint="finefit reads *.safetensors and never unpickles .bin files")
    return files


def assign(model: Any, name: str, tensor: Tensor) -> None:
    """Put ``tensor`` where parameter ``name`` is, as trainable as that one was."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    trains = module._parameters[leaf].requires_grad
    module._parameters[leaf] = nn.Parameter(tensor, requires_grad=trains)
