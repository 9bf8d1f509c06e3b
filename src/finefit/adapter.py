"""Trained weights out and in: a LoRA adapter in peft's file layout, or the whole model in transformers'.

Every file is opened again after it was written: the tensors must be there, of the right shape, and not empty.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError
from .files import replacing, write_atomically
from .models import kept_buffers
from .nn.lora_linear import LoRALinear

ADAPTER, MODEL = "adapter_model.safetensors", "model.safetensors"
ADAPTER_CONFIG, PREFIX = "adapter_config.json", "base_model.model."
# Names of the format (huggingface/safetensors, its README) for the types that are written here.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def adapter_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """peft's names → tensors of every adapter."""
    return _detached(_adapters(model))


def _detached(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in named.items()}


def _adapters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        f"{PREFIX}{path}.lora_{half}.weight": getattr(layer, f"lora_{half}")
        for path, layer in model.named_modules()
        if isinstance(layer, LoRALinear)
        for half in ("A", "B")
    }


def adapter_config(model: torch.nn.Module, base: str) -> dict[str, Any]:
    """peft's ``adapter_config.json`` for the model's adapters."""
    layers = {path: m for path, m in model.named_modules() if isinstance(m, LoRALinear)}
    first = next(iter(layers.values()))
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": first.rank, "lora_alpha": first.scale * first.rank, "lora_dropout": first.dropout, "bias": "none",
        "target_modules": sorted({path.rpartition(".")[2] for path in layers}), "fan_in_fan_out": first.transposed,
        "use_rslora": False, "use_dora": False, "modules_to_save": None,
    }  # fmt: skip


def save_trained(model: Any, folder: Path, base: str) -> None:
    """The adapter (two files) or, without adapters, the model (weights and config) into ``folder``."""
    write_tensors(folder / name_of(model), trained_tensors(model))
    save_config(model, folder, base)


def name_of(model: torch.nn.Module) -> str:
    """Of the file that ``save_trained`` writes tensors to."""
    return ADAPTER if adapter_tensors(model) else MODEL


def save_config(model: Any, folder: Path, base: str) -> None:
    """What says of what the tensors are."""
    if adapter_tensors(model):
        text = json.dumps(adapter_config(model, base), indent=2)
        write_atomically(folder / ADAPTER_CONFIG, text.encode())
        return
    config = model.config.to_dict()
    config.pop("_attn_implementation", None)
    config["use_cache"] = True
    write_atomically(folder / "config.json", json.dumps(config, indent=2, default=str).encode())


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every distinct parameter, and what else a checkpoint holds, under transformers' name; a tied head is not repeated."""
    return _detached(dict((*model.named_parameters(), *kept_buffers(model).items())))


def trained_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """What ``save_trained`` writes."""
    return _detached(trained(model))


def trained(model: torch.nn.Module) -> dict[str, Tensor]:
    """The same, as the model has it."""
    return _adapters(model) or dict((*model.named_parameters(), *kept_buffers(model).items()))


def load_trained(model: torch.nn.Module, folder: Path) -> None:
    """Put back what ``save_trained`` wrote, in place; CheckpointError if a tensor is missing or of another shape."""
    adapters = adapter_tensors(model)
    wanted = adapters or model_tensors(model)
    read_tensors(folder / (ADAPTER if adapters else MODEL), wanted)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, atomically, opened again and checked; of a device's tensors one at a time is on the host."""
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_pieces(path, described, lambda name: (tensors[name],))


def write_pieces(
    path: Path,
    described: Described,
    pieces: Callable[[str], Iterable[Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """The same of tensors that come as pieces, in the order of their elements; no piece outlives its writing."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        # Wide types first, as the library's own files have it, so that every tensor begins at a multiple of its width.
        names = sorted(described, key=lambda name: (-described[name][0].itemsize, name))
        file.write(_header({name: described[name] for name in names}, metadata or {}))
        for name in names:
            file.writelines(map(_raw, pieces(name)))
    _reopen(path, described)


def _header(described: Described, metadata: Mapping[str, str]) -> bytes:
    """Its length in 8 bytes, then JSON of each tensor's type, shape and place, filled up to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, (dtype, shape) in described.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: Tensor) -> memoryview:
    """The tensor's bytes; those of a contiguous tensor on the host are not copied."""
    return tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data


_RESUME = "free some disk space, then finefit resume: only the tokenizer is missing"


def save_tokenizer(tokenizer: Any, folder: Path, hint: str = _RESUME) -> None:
    """The tokenizer's files, each whole or as it was."""
    building = folder / ".tokenizer.tmp"
    shutil.rmtree(building, ignore_errors=True)
    try:
        tokenizer.save_pretrained(building)
        for path in sorted(building.iterdir()):
            os.replace(path, folder / path.name)
    except Exception as error:  # tokenizers has no class for a full disk
        raise CheckpointError(f"the tokenizer was not written: {error}", where=str(folder), hint=hint) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def read_tensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Copy a file's tensors into the given ones."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            names = set(file.keys())
            for name, tensor in into.items():
                stored = file.get_tensor(name) if name in names else None
                if stored is None or stored.shape != tensor.shape:
                    raise CheckpointError(f"{name} is missing or of another shape", where=str(path))
                tensor.copy_(stored)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path)) from error


def _reopen(path: Path, described: Described) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    wrong = [name for name, (_, shape) in described.items() if stored.get(name) != shape or not math.prod(shape)]
    if wrong or not described:
        raise CheckpointError(f"what was written is not what was meant: {wrong[:3] or 'no tensors'}", where=str(path))
