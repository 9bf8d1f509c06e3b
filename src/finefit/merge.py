"""A LoRA adapter added into its base, as a plain model folder: W + s·B·A (arXiv:2106.09685, section 4.1).

The base's files are read where they lie and written again under their own names, a piece of one weight at a time: neither
model is ever in memory, and no device is needed. Sums are made in fp32 and rounded once to the type that is written,
the file's own unless another is said. An adapter that was trained beside a quantised base goes into the weights as the
files have them.

Declines what ``LoRALinear`` does not train, by name: DoRA, biases, modules saved whole, alphas by pattern.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import models, watch
from .adapter import ADAPTER, ADAPTER_CONFIG, DTYPES, MODEL, PREFIX, Described, save_tokenizer, write_pieces
from .assets import model_folder
from .catalog.folders import INDEX, read_config, read_headers
from .config import load as load_config
from .errors import CheckpointError, ConfigError, ModelError, did_you_mean
from .events import EventLog
from .examples import read_tokenizer, tokenizer_of
from .files import hold, replacing_folder, write_atomically
from .phases import rows_at_once
from .plan import load as load_plan
from .report.folder import write_report
from .run import Run
from .session import BASE, base_of, check_base
from .stored import Places
from .units import format_bytes

_NAME = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_STORED = {name: dtype for dtype, name in DTYPES.items()}
# Of peft's LoraConfig (tuners/lora/config.py) what leaves the sum W + s·B·A as it is; whatever else is set is declined,
# so is what a later version adds. Some ways to begin change the base itself: those that do not are named.
_HARMLESS = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora", "layers_to_transform",
    "layers_pattern", "rank_pattern", "megatron_core", "eva_config", "qalora_group_size", "runtime_config",
})  # fmt: skip
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(slots=True)
class Merged:
    """What was written: tensors in all, those with an update, and the share of the update that rounding took."""

    folder: Path
    tell: Callable[[str], None]
    tensors: int = 0
    n_bytes: int = 0
    adapted: int = 0
    update: float = 0.0
    """Sum of the update's squares."""
    lost: float = 0.0
    """The same of what rounding changed."""
    seen: watch.Seen = field(default_factory=watch.Seen)

    @property
    def rounding(self) -> float:
        return math.sqrt(self.lost / self.update)

    def says(self) -> str:
        beside = format_bytes(sum(self.seen.device.values()))
        return f"{self.adapted} of {self.tensors} tensors changed, {beside} of tensors at once"

    def minds(self) -> str:
        """What rounding did, where it is no trifle: small updates vanish beside large weights in 16 bits."""
        if self.rounding < 0.1:
            return ""
        return f"rounding to 16 bits is {100 * self.rounding:.0f} % of the update; --dtype float32 keeps all of it"


def merge(
    source: Path, into: Path | None = None, base: str | None = None, dtype: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Merged:  # fmt: skip
    """Write the base of ``source`` (a run's folder, or one with an adapter of peft's) with its adapter into ``into``.

    ``base`` is a model's name or folder, where the adapter's own note of it does not hold; ``dtype`` one of ``TYPES``;
    ``tell`` hears of each file. Errors: CheckpointError (no adapter, or one that was not written), ConfigError (``into``
    is taken, no such type), ModelError (it is not this base's adapter).
    """
    dtype = _SHORT.get(dtype or "", dtype)
    if dtype is not None and dtype not in TYPES:
        hint = did_you_mean(dtype, TYPES) or f"say {', '.join(TYPES)}"
        raise ConfigError(f"there is no type '{dtype}' to write weights in", hint=hint)
    settings = {**_settings(source), "dtype": dtype}
    folder = _base(source, settings, base)
    check_base(folder)
    merged = Merged((into or source / "merged").resolve(), tell)
    _check_place(merged.folder, folder, TYPES.get(dtype or ""))
    if not (source / "plan.json").is_file() or not os.access(source, os.W_OK):  # an adapter, or a run that is kept
        _watched(source, settings, folder, merged)
        return merged
    held, plan = hold(source), load_plan(source / "plan.json")
    try:
        _watched(source, settings, folder, merged)
        if dtype is None and (source / "events.jsonl").is_file():  # what was predicted is of the file's own type
            seen = merged.seen
            if not plan.predicted.moments.get("merge"):  # trained on a GPU: all of this is beside its device
                seen = replace(seen, device={})
            with EventLog(source / "events.jsonl", []) as log:
                watch.tell(log, "merge", 0, seen, plan.predicted)
            write_report(source)
    finally:
        held.close()
    return merged


def _settings(source: Path) -> Mapping[str, Any]:
    """The adapter's config; CheckpointError where there is none, or one with more in it than A and B."""
    if not (source / ADAPTER).is_file() or not (source / ADAPTER_CONFIG).is_file():
        if (source / MODEL).is_file() and (source / "config.json").is_file():
            hint = "it is a plain model folder already"
            raise CheckpointError(
                "there is no adapter to merge: all of the model was trained", where=str(source), hint=hint
            )
        is_run = (source / "plan.json").is_file()
        missing = " and ".join(name for name in (ADAPTER_CONFIG, ADAPTER) if not (source / name).is_file())
        hint = f"finefit resume {source} finishes the run" if is_run else f"{missing} is not there"
        raise CheckpointError("there is no adapter here" + (" yet" if is_run else ""), where=str(source), hint=hint)
    try:
        settings: dict[str, Any] = json.loads((source / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank = settings["r"] = int(settings["r"])
        alpha = settings["lora_alpha"] = float(settings["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"not the config of a LoRA adapter: {type(error).__name__}: {error}"
        raise CheckpointError(
            said, where=str(source / ADAPTER_CONFIG), hint="peft writes r and lora_alpha there"
        ) from error
    unheard = [
        key for key, said in settings.items() if said and key not in _HARMLESS and (key, said) != ("bias", "none")
    ]
    if settings.get("init_lora_weights", True) in _BEGINNINGS:
        unheard = [key for key in unheard if key != "init_lora_weights"]
    if settings.get("peft_type") != "LORA" or rank <= 0 or not math.isfinite(alpha) or not alpha or unheard:
        what = f"it is {settings.get('peft_type')} of rank {rank} and alpha {alpha:g}"
        what = f"{', '.join(unheard)} is set" if unheard else what
        hint = "finefit merges plain LoRA; peft's merge_and_unload merges the others"
        raise CheckpointError(
            f"this adapter is more than A and B: {what}", where=str(source / ADAPTER_CONFIG), hint=hint
        )
    return settings


def _base(source: Path, settings: Mapping[str, Any], said: str | None) -> Path:
    """The folder of the model that the adapter goes into."""
    if said is not None:
        return model_folder(said).folder
    if (source / BASE).is_file():
        return base_of(source, load_config(source / "config.yaml"))[0]
    named = settings.get("base_model_name_or_path")
    if not named:
        raise CheckpointError(
            "the adapter does not say its base", where=str(source / ADAPTER_CONFIG), hint="say it: --base MODEL"
        )
    try:
        return model_folder(str(named)).folder
    except ModelError as error:
        error.where, error.hint = error.where or str(source / ADAPTER_CONFIG), "say where its base is: --base MODEL"
        raise


def _check_place(into: Path, base: Path, dtype: torch.dtype | None) -> None:
    if into.exists() and (not into.is_dir() or any(into.iterdir()) or into == Path.cwd()):
        raise ConfigError("there is something already", where=str(into), hint="give another name: -o FOLDER")
    existing = next(path for path in into.parents if path.exists())
    if dtype is None:
        needed = sum(path.stat().st_size for path in models.weight_files(base))
    else:
        needed = sum(math.prod(shape) * dtype.itemsize for shape, _ in read_headers(base)[0].values())
    free = shutil.disk_usage(existing).free
    if free < needed:
        what = f"the merged model takes {format_bytes(needed)}, {format_bytes(free)} are free"
        raise CheckpointError(what, where=str(existing), hint="free some disk space, or give another place: -o FOLDER")


def _watched(source: Path, settings: Mapping[str, Any], base: Path, merged: Merged) -> None:
    host = Run(torch.nn.Module(), torch.device("cpu"))  # nothing of a run is held
    own = any((source / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    # What it was trained with, and before anything is written.
    tokenizer = read_tokenizer(source) if own else tokenizer_of(base)
    try:
        with replacing_folder(merged.folder) as building:
            with watch.phase("merge", host) as merged.seen, torch.no_grad():
                _write(source / ADAPTER, settings, base, building, merged)
            _write_configs(base, building, settings["dtype"], merged.n_bytes)
            save_tokenizer(tokenizer, building, "free some disk space, and merge again")
    except OSError as error:
        raise CheckpointError(
            f"the merged model was not written: {error.strerror or error}", where=str(merged.folder),
            hint="see that the place can be written to and has room; adapter and base are untouched",
        ) from error  # fmt: skip


def _write_configs(base: Path, building: Path, dtype: str | None, n_bytes: int) -> None:
    """What stands beside the weights, as it is but for the type."""
    if (base / "generation_config.json").is_file():
        shutil.copyfile(base / "generation_config.json", building / "generation_config.json")
    config = read_config(base / "config.json")
    for key in ("dtype", "torch_dtype"):
        if dtype is not None and (key in config or key == "dtype"):
            config[key] = dtype
    write_atomically(building / "config.json", json.dumps(config, indent=2).encode())
    if (base / INDEX).is_file():
        index = read_config(base / INDEX)
        index["metadata"] = {**index.get("metadata", {}), "total_size": n_bytes}
        write_atomically(building / INDEX, json.dumps(index, indent=2).encode())


def _write(adapter: Path, settings: Mapping[str, Any], base: Path, building: Path, merged: Merged) -> None:
    with _opened(adapter) as updates:
        left = _pairs(updates, adapter)
        places = Places(models.config_of(base), left)
        files, wanted = models.weight_files(base), TYPES.get(settings["dtype"])
        for number, path in enumerate(files, 1):
            merged.tell(f"{path.name}, {number} of {len(files)}")
            with _opened(path) as file:
                described = {name: _described(file.get_slice(name), wanted, path) for name in file.keys()}  # noqa: SIM118
                here = {name: left.pop(place) for name in described if (place := places.of(name).name) in left}
                weights = _Weights(file, updates, here, described, settings, merged)
                write_pieces(building / path.name, described, weights.pieces)
                merged.tensors += len(described)
                merged.n_bytes += sum(kind.itemsize * math.prod(shape) for kind, shape in described.values())
                merged.adapted += len(here)
    if left:
        hint = "it is another model's adapter, or its weights are tied: say the right one with --base MODEL"
        raise ModelError(
            f"{next(iter(left))}, which the adapter changes, is not in the base", where=str(base), hint=hint
        )
    if not merged.update:
        raise CheckpointError(
            "the adapter changes nothing: its B is all zeros", where=str(adapter), hint="was it trained?"
        )


@dataclass(frozen=True, slots=True)
class _Weights:
    """One file of the base, as pieces of its tensors with their update."""

    file: Any
    updates: Any
    pairs: Mapping[str, str]
    described: Described
    settings: Mapping[str, Any]
    merged: Merged

    def pieces(self, name: str) -> Iterator[Tensor]:
        weight, dtype = self.file.get_tensor(name), self.described[name][0]
        if name not in self.pairs:
            same = weight.dtype is dtype
            yield from (
                [weight]
                if same
                else (self._cast(name, part) for part in weight.view(-1).split(rows_at_once(weight.numel(), 1)))
            )
            return
        left, right = self._factors(name, tuple(weight.shape))
        scale = self._scale(left.shape[1])
        rows, columns = weight.shape
        step = rows_at_once(rows, columns)
        for start in range(0, rows, step):
            part = slice(start, min(rows, start + step))
            yield self._sum(name, weight[part], (left[part] @ right).mul_(scale))

    def _factors(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(rows, r) and (r, columns) of the update, in fp32, for a weight of ``shape``."""
        a, b = (self.updates.get_tensor(f"{self.pairs[name]}.lora_{half}.weight").float() for half in "AB")
        left, right = (a.t(), b.t()) if self.settings.get("fan_in_fan_out") else (b, a)
        if left.shape[1] != right.shape[0] or (left.shape[0], right.shape[1]) != shape:
            shapes = f"{tuple(b.shape)} x {tuple(a.shape)} on {shape}"
            raise ModelError(f"the adapter is of another model: {name} has {shapes}", hint="say its base: --base MODEL")
        if left.shape[1] != self.settings["r"] and not self.settings.get("rank_pattern"):
            what = f"{name} has rank {left.shape[1]}, the adapter's config says {self.settings['r']}"
            raise CheckpointError(what, hint="the two files do not belong together")
        return left, right

    def _scale(self, rank: int) -> float:
        """Of the product, by the layer's own rank: a pattern may give it another than the rest."""
        alpha: float = self.settings["lora_alpha"]
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def _sum(self, name: str, weight: Tensor, update: Tensor) -> Tensor:
        """The rows with their update; what rounding them takes from it is added up."""
        exact = weight.to(torch.float32, copy=True)
        exact += update
        self.merged.update += float(torch.linalg.vector_norm(update)) ** 2
        if not math.isfinite(self.merged.update):
            raise CheckpointError(
                f"the update of {name} is not a number", hint="the run diverged: merge an earlier one"
            )
        rounded = exact.to(self.described[name][0])
        if rounded is not exact:
            self.merged.lost += float(torch.linalg.vector_norm(exact.sub_(rounded))) ** 2
            self._check_range(name, self.merged.lost)
        return rounded

    def _cast(self, name: str, weight: Tensor) -> Tensor:
        cast = weight.to(self.described[name][0])
        self._check_range(name, float(cast.abs().max()))
        return cast

    def _check_range(self, name: str, number: float) -> None:
        if not math.isfinite(number):
            what = f"{name} has numbers beyond the range of {self.described[name][0]}"
            raise CheckpointError(what, hint="--dtype bfloat16 or --dtype float32")


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path)) from error


def _pairs(updates: Any, path: Path) -> dict[str, str]:
    """The model's name of each weight with an update → the adapter's name before its halves."""
    halves: dict[str, set[str]] = {}
    for name in updates.keys():  # noqa: SIM118
        found = _NAME.fullmatch(name)
        if not found:
            hint = "finefit merges A and B of linear layers; peft's merge_and_unload merges the others"
            raise CheckpointError(f"{name} is neither an A nor a B", where=str(path), hint=hint)
        halves.setdefault(found[1], set()).add(found[2])
    lone = [name for name, found in halves.items() if found != {"A", "B"}]
    if lone or not halves:
        raise CheckpointError(f"{lone[0]} has no pair of A and B" if lone else "it is empty", where=str(path))
    return {f"{name}.weight": f"{PREFIX}{name}" for name in halves}


def _described(stored: Any, wanted: torch.dtype | None, path: Path) -> tuple[torch.dtype, tuple[int, ...]]:
    """(type, shape) as it is to be written."""
    kind = stored.get_dtype()
    if kind not in _STORED:
        hint = "take the model's 16-bit version"
        raise ModelError(f"weights of type {kind} cannot be merged into", where=str(path), hint=hint)
    dtype = _STORED[kind]
    return wanted if wanted and dtype.is_floating_point else dtype, tuple(stored.get_shape())
