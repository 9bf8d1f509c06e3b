"""Model folders on disk, read without torch: config.json and the headers of safetensors files.

The header format is the safetensors README's: eight bytes of little-endian length, then JSON. Weights are never read.
"""

import json
import re
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..units import format_bytes

Headers = dict[str, tuple[tuple[int, ...], str]]
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
_LONGEST_HEADER = 100_000_000  # the safetensors library's own limit
# How multimodal checkpoints call the text model; transformers 5 loads it as model.* and lm_head.*
INDEX = "model.safetensors.index.json"  # of weights in several files
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
# Buffers that older files carry and nothing trains: rotary tables, causal masks, what balances experts.
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.(attn|attention)\.(bias|masked_bias)|e_score_correction_bias)$")
_LAYER = re.compile(r"(.*?\.)(\d+)\.")
_LARGEST_JSON = 64 * 2**20  # a config has kilobytes, the index of the largest models some megabytes


def read_config(path: Path) -> dict[str, Any]:
    """config.json as a dict. ModelError says where: missing, too large, empty, not JSON (with line and column)."""
    try:
        if path.exists() and not path.is_file():
            raise ModelError("not a file", where=str(path), hint="give a model folder or a config.json")
        if (n_bytes := path.stat().st_size) > _LARGEST_JSON:
            hint = "a config.json has kilobytes: is this another file?"
            raise ModelError(f"too large to read: {format_bytes(n_bytes)}", where=str(path), hint=hint)
        text = path.read_text("utf-8-sig")
    except FileNotFoundError as error:
        hint = f"'{path.parent}' has no config.json" if path.parent.is_dir() else f"there is no folder '{path.parent}'"
        raise ModelError("the file is not there", where=str(path), hint=f"{hint}; give a model folder") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot be read: {error}", where=str(path), hint="check the file") from error
    if not text.strip():
        raise ModelError("the file is empty", where=str(path), hint="download the model again")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise ModelError(f"invalid JSON at line {error.lineno}: {error.msg}", where=where, hint="mend it") from error
    except (RecursionError, ValueError) as error:  # brackets without end, a number of thousands of digits
        raise ModelError(f"JSON that cannot be read: {error}", where=str(path), hint="mend it") from error
    if not isinstance(config, dict):
        raise ModelError("not a JSON object", where=str(path), hint="a config.json begins with '{'")
    return config


def read_headers(folder: Path) -> tuple[Headers, str]:
    """Name -> (shape, dtype) of every tensor in the folder's safetensors files, or none and the reason."""
    paths = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("adapter_")]
    if not paths:
        return {}, "the folder has no safetensors files: shapes come from config.json alone"
    if (folder / INDEX).is_file():
        paths = shards(folder)
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            return {}, f"{len(missing)} of {len(paths)} weight files are missing, such as {missing[0]}"
    return {name: value for path in paths for name, value in _header(path).items()}, ""


def shards(folder: Path) -> list[Path]:
    """The files that the index names, there or not; ModelError where it names none, or one that is not in this folder."""
    index = folder / INDEX
    places = read_config(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError("there is no weight_map in it", where=str(index), hint="download the model again")
    names = sorted(set(map(str, places.values())))
    for name in names:
        if name != Path(name).name or "\\" in name or "\0" in name:
            hint = "a model's weights lie beside their index: take the model from where it can be trusted"
            raise ModelError(f"it names a file outside its folder: {name!r}", where=str(index), hint=hint)
    return [folder / name for name in names]


def text_part(headers: Headers, expected: Mapping[str, tuple[int, ...]], depth: int) -> tuple[Headers, int]:
    """The text model's tensors under the names transformers gives them, and how many others there are.

    Others are what multimodal models see and hear with, and blocks past the last (DeepSeek's for predicting two tokens).
    """
    renamed = {real_name(name, expected): value for name, value in headers.items()}
    weights = {name: value for name, value in renamed.items() if name in expected or not _BUFFERS.search(name)}
    layers = {match[1] for name in expected if (match := _LAYER.match(name))}
    parts = {name.rpartition(".")[0] + "." for name in expected if not _LAYER.match(name)} | {"lm_head."}
    text = {}
    for name, value in weights.items():
        match = _LAYER.match(name)
        if (match[1] in layers and int(match[2]) < depth) if match else name.rpartition(".")[0] + "." in parts:
            text[name] = value
    return text, len(weights) - len(text)


def block_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Elements by block, and outside the blocks (""): equal where loading only renames, splits or stacks tensors."""
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        match = _LAYER.match(name)
        layer = match[2] if match else ""
        sizes[layer] = sizes.get(layer, 0) + prod(shape)
    return sizes


def difference(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    seen, said = _shape_text(found.get(names[0])), _shape_text(expected.get(names[0]))
    example = f"{names[0]}: {seen} in the files, {said} by the config"
    return f"{len(names)} tensors differ from config.json, such as {example}; the files are believed"


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "scalar"


def real_name(name: str, expected: Mapping[str, Any]) -> str:
    """transformers' name of a stored tensor: multimodal prefixes, and GPT-2's files that leave out ``transformer.``."""
    for stored, real in _TEXT_PREFIXES.items():
        if name.startswith(stored):
            return real + name.removeprefix(stored)
    base = next(iter(expected), "").partition(".")[0] + "."
    return base + name if base + name in expected else name


def repository_name(folder: Path) -> str:
    """``org/name`` of a snapshot in the Hugging Face cache, else the folder's own name."""
    parts = folder.resolve().parts if "snapshots" not in folder.parts else folder.parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1)
    return folder.resolve().name


def _header(path: Path) -> Headers:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            entries = json.loads(file.read(length))
        return {
            name: (tuple(entry["shape"]), _DTYPES.get(entry["dtype"], str(entry["dtype"]).lower()))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "the file is cut or not safetensors: download it again"
        raise ModelError(f"its header cannot be read ({error})", where=str(path), hint=hint) from error
