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
from .nn.blockwise import Tables
from .nn.quantised_linear import QuantisedWeight

ATTENTION = "finefit"
_TRAINED = "pick a llama, mistral, qwen, gemma, phi3 or smollm3 model"
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
        model = AutoModelForCausalLM.from_config(_routed(config), attn_implementation=ATTENTION)
    scales = {getattr(config, key, None) or 1.0 for key in ("logits_scaling", "logit_scale")}
    if scales != {1.0} or getattr(model.get_output_embeddings(), "bias", None) is not None:
        message = f"the logits of this '{config.model_type}' model are scaled or shifted, which the loss cannot do"
        raise ModelError(message, hint=_TRAINED)
    return model.train()


def _routed(config: Any) -> Any:
    """``config``, of a family whose attention goes through the registry; ModelError where sequences would mix."""
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    if not kind._supports_attention_backend or config.model_type == "gpt_oss":  # which adds learned sinks to it
        message = f"the attention of '{config.model_type}' models is their own and cannot be packed yet"
        raise ModelError(message, hint=_TRAINED)
    return config


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
    for module in model.modules():
        if isinstance(module, Tables):
            module.reset()
    model.tie_weights()


def stored_weights(model: Any) -> dict[str, Tensor | QuantisedWeight]:
    """What a checkpoint holds of ``model``, by its name there; both kinds take a tensor by ``copy_``."""
    quantised = {name: m for name, m in model.named_modules() if isinstance(m, QuantisedWeight)}
    inside = {id(p) for m in quantised.values() for p in m.parameters()}
    plain = {name: p for name, p in model.named_parameters() if "lora_" not in name and id(p) not in inside}
    return {**plain, **quantised}


def num_parameters(model: Any) -> int:
    """Elements of weights and adapters; a quantised weight counts as the matrix it stands for."""
    weights = sum(weight.numel() for weight in stored_weights(model).values())
    adapters: int = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    return weights + adapters


def fill_random(seed: int) -> Fill:
    """Small random weights, the same for a seed and a shape: for tests and for timing without a checkpoint."""

    def fill(model: Any, device: torch.device) -> None:
        fill_empty(model, device)
        generator = torch.Generator(device="cpu").manual_seed(seed)
        with torch.no_grad():
            for name, weight in sorted(stored_weights(model).items()):
                scale = 1.0 / math.sqrt(weight.shape[-1]) if len(weight.shape) > 1 else 0.1
                drawn = torch.randn(weight.shape, generator=generator) * scale
                weight.copy_(drawn + (1.0 if len(weight.shape) == 1 and "bias" not in name else 0.0))

    return fill


def fill_from(folder: Path) -> Fill:
    """Weights of a model folder, one tensor in flight at a time; what is to be quantised is so before the next one."""

    def fill(model: Any, device: torch.device) -> None:
        fill_empty(model, device)
        wanted = stored_weights(model)
        for name, tensor in _stored(folder):
            weight = wanted.pop(name, None)
            if weight is None:
                continue
            if weight.shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)} in the file, {tuple(weight.shape)} by config.json"
                raise ModelError(f"{name} is {shapes}", where=str(folder), hint="the files do not belong together")
            with torch.no_grad():
                weight.copy_(tensor)
            del tensor  # or it would be there until the next one is
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
