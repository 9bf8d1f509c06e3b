"""Transformers models in: built on meta, rewritten there by techniques, then filled tensor by tensor.

Any ``AutoModelForCausalLM`` decoder; its code is never copied or patched. Attention goes through transformers' own
registry under the name ``finefit``, so no mask is ever built; a batch's boundaries are passed explicitly. Families that
cannot take them keep their attention and get whole rows.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .catalog import structures
from .catalog.folders import INDEX, shards
from .errors import ModelError
from .nn.arena import home_of
from .nn.attend import ATTENTION, attend
from .nn.blockwise import Tables
from .nn.quantised_linear import QuantisedWeight
from .nn.stores import Origin
from .parts import all_cuts, is_sharded
from .phases import MAPPED_AT_ONCE
from .stored import Places, portions, starts

_PICK = "pick a model that finefit fits lists"
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


def config_from(described: Mapping[str, Any]) -> Any:
    """The transformers config of what a config.json holds."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**described).get_text_config()


def sampled(config: Any, blocks: int) -> Any:
    """A copy with that many blocks: the first ones, the first of another type of layer than the first, and the last.

    Four are for a mixture whose first blocks are dense: two of these come first.
    """
    few, depth = copy.deepcopy(config), config.num_hidden_layers
    types = getattr(config, "layer_types", None) or [""] * depth
    other = next((i for i, kind in enumerate(types) if kind != types[0]), min(1, depth - 1))
    layers = [0, other, depth - 1] if blocks <= 3 else [0, 0, other, depth - 1]
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:
            setattr(few, key, [value[i] for i in layers])
    few.num_hidden_layers = blocks
    for key in ("first_k_dense_replace", "moe_layer_start_index"):
        if hasattr(few, key):
            setattr(few, key, 2 if blocks > 3 else 0)
    return few


def on_meta(config: Any) -> Any:
    """The model without storage, in training mode, attention routed to finefit's own where the family lets it."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, attend)
    config.use_cache = False
    config._attn_implementation = _attention_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=config._attn_implementation)
    return model.train()


def _attention_of(config: Any) -> str:
    """finefit's own; transformers' for families known to take whole rows; ModelError where sequences would mix."""
    from transformers import AutoModelForCausalLM

    family = config.model_type
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(f"a '{family}' model is no decoder that transformers trains on text alone", hint=_PICK)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    if family in structures.OWN_ATTENTION:
        # Falcon with alibi loses it on the other way where its causal mask is left to the kernel (transformers 5.24).
        return "sdpa" if kind._supports_sdpa and not getattr(config, "alibi", False) else "eager"
    if not kind._supports_attention_backend:
        raise ModelError(f"the attention of '{family}' models is their own and cannot be packed yet", hint=_PICK)
    return ATTENTION


def fill_empty(model: Any, device: torch.device) -> None:
    """Give every tensor a storage and every constant buffer (rotary frequencies, scales) its value."""
    for module in model.modules():
        stale = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in stale:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        if stale:
            model._init_weights(module)
    home = home_of(model)
    home.lay(device)
    for name, parameter in list(model.named_parameters()):
        assign(model, name, home.empty(name, parameter, device))
    for module in model.modules():
        if isinstance(module, Tables):
            module.reset()
    model.tie_weights()


def move_whole(model: Any, device: torch.device) -> None:
    """Everything that ranks do not share, to where it is computed with."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and not is_sharded(tensor):
                    tensor.data = tensor.data.to(device)


def stored_weights(model: Any) -> dict[str, Tensor | QuantisedWeight]:
    """What a checkpoint holds of ``model``, by its name there; both kinds take a tensor by ``copy_``."""
    quantised = {name: m for name, m in model.named_modules() if isinstance(m, QuantisedWeight)}
    inside = {id(p) for m in quantised.values() for p in m.parameters()}
    plain = {name: p for name, p in model.named_parameters() if "lora_" not in name and id(p) not in inside}
    return {**plain, **quantised}


def kept_buffers(model: Any) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds as it does weights: what balances a router. A file may leave them out."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def num_parameters(model: Any) -> int:
    """Elements of weights and adapters; a quantised weight counts as the matrix it stands for."""
    cuts, adapters = all_cuts(model), {name: p for name, p in model.named_parameters() if "lora_" in name}
    each = {**stored_weights(model), **adapters}
    return sum(cuts[name].numel if name in cuts else weight.numel() for name, weight in each.items())


def num_trainable(model: Any) -> int:
    """Elements of what trains."""
    cuts = all_cuts(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return sum(cuts[name].numel if name in cuts else p.numel() for name, p in trained.items())


def fill_random(seed: int) -> Fill:
    """Small random weights, the same for a seed and a shape: for tests and for timing without a checkpoint."""

    def fill(model: Any, device: torch.device) -> None:
        fill_empty(model, device)
        generator, home = torch.Generator(device="cpu").manual_seed(seed), home_of(model)
        cuts = all_cuts(model)
        with torch.no_grad():
            for name, weight in sorted(stored_weights(model).items()):
                cut = cuts.get(name)
                shape = cut.shape if cut else weight.shape
                scale = 1.0 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.1
                drawn = torch.randn(shape, generator=generator) * scale
                value = drawn + (1.0 if len(shape) == 1 and "bias" not in name else 0.0)
                home.put(name, weight, cut.of(value) if cut else value)
                del drawn, value  # or they would be there while the next ones are drawn
            for _, buffer in sorted(kept_buffers(model).items()):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)

    return fill


def fill_from(folder: Path) -> Fill:
    """Weights of a model folder, one tensor in flight at a time; what is to be quantised is so before the next one."""

    def fill(model: Any, device: torch.device) -> None:
        fill_empty(model, device)
        needed, home = stored_weights(model), home_of(model)
        weights, cuts = {**needed, **kept_buffers(model)}, all_cuts(model)
        places, left = Places(model.config, weights), {name: weight.numel() for name, weight in weights.items()}
        for stored, tensor, origin in _stored(folder):
            place = places.of(stored)
            if place.name not in weights:
                continue
            whole, cut = weights[place.name], cuts.get(place.name)
            shape = cut.shape if cut else whole.shape if isinstance(whole, QuantisedWeight) else place.shape_of(whole)
            if shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)} in the file, {tuple(shape)} by config.json"
                raise ModelError(f"{stored} is {shapes}", where=str(folder), hint="the files do not belong together")
            tensor = cut.of(tensor) if cut else tensor
            with torch.no_grad():
                if isinstance(whole, QuantisedWeight) or not is_sharded(whole):
                    weight = whole if isinstance(whole, QuantisedWeight) else place.of(whole)
                    home.put(place.name, weight, tensor, origin)
                else:
                    place.put(whole, tensor)
            left[place.name] -= tensor.numel()
            del tensor  # or it would be there until the next one is
        missing = [name for name in sorted(needed) if left[name] > 0]
        if missing:
            hint = "the download is incomplete, or the files belong to another model"
            what = f"{len(missing)} tensors are missing: {', '.join(missing[:3])} …"
            raise ModelError(what, where=str(folder), hint=hint)

    return fill


def _stored(folder: Path) -> Iterator[tuple[str, Tensor, Origin]]:
    """Every tensor of the folder's safetensors files, lazily, and where it is; what is mapped of a file is let go of as it
    is read, or all of it would be resident at the end."""
    from safetensors import SafetensorError, safe_open

    for path in weight_files(folder):
        try:
            begins = starts(path)
            for names in portions(begins, MAPPED_AT_ONCE):
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        yield name, file.get_tensor(name), Origin(path, begins[name])
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read these weights: {error}", where=str(path)) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, or ModelError."""
    files = shards(folder) if (folder / INDEX).is_file() else sorted(folder.glob("*.safetensors"))
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
