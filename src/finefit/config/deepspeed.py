"""DeepSpeed's JSON, read as constraints of a run and written from a plan, for ``hardware.deepspeed``.

Key names and defaults are those of DeepSpeed 0.16 to 0.19 (``runtime/config.py``, ``runtime/zero/config.py``). What finefit
decides by itself (rates, schedule, micro-batches) may be ``auto`` there, and what differs from the run file is an error that
names both. Settings that change neither memory nor what is learnt as a plan sees it (buckets, streams) are left to the plan,
and said so. Declines stage 0 (replicas need no DeepSpeed), pipelines, compression, and everything that changes the update.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..errors import ConfigError, did_you_mean
from .schema import Config

Place = Literal["none", "host", "disk"]
BUCKET = 2**25
"""Elements that are reduced or gathered at once: 64 to 128 MiB, which no link is faster with more of."""
PERSISTENT = 10_000
"""Elements up to which a weight stays whole on every rank at stage 3: norms, for which a gather is all waiting."""
AUTO = "auto"
_PLACES: dict[str, Place] = {"none": "none", "cpu": "host", "nvme": "disk"}
_DEVICES = {place: device for device, place in _PLACES.items()}
# Which of them say something about a run; a value here is what finefit does whatever the file says.
_TOP = (
    "zero_optimization", "bf16", "bfloat16", "fp16", "gradient_clipping", "train_batch_size",
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "steps_per_print", "wall_clock_breakdown",
    "prescale_gradients", "aio", "communication_data_type", "dump_state", "gradient_predivide_factor",
    "disable_allgather",
)  # fmt: skip
_TUNING = (
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "reduce_bucket_size",
    "contiguous_gradients", "round_robin_gradients", "sub_group_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters",
    "memory_efficient_linear", "load_from_fp32_weights", "elastic_checkpoint", "cpu_offload", "legacy_stage1",
)  # fmt: skip
_ADAM = (AUTO, "adam", "adamw")
_ZERO = ("stage", "offload_optimizer", "offload_param", *_TUNING)
_HINT = "finefit reads zero_optimization, bf16, fp16, gradient_clipping and the batch sizes; leave the rest out"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a file asks for; None where it leaves it to finefit."""

    path: str
    stage: Literal[1, 2, 3]
    optimizer_on: Place = "none"
    parameters_on: Place = "none"
    nvme: str = ""
    precision: Literal["fp32", "bf16_mixed", "fp16_mixed"] | None = None
    clipping: float | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None
    left: tuple[str, ...] = ()
    """Settings that are not taken over."""

    def pins(self) -> tuple[tuple[str, str], ...]:
        """The plan's constraints."""
        size = () if self.micro_batch_size is None else (("micro_batch_size", str(self.micro_batch_size)),)
        zero = (self.optimizer_on, self.parameters_on, self.nvme)
        return (("deepspeed", str(self.stage)), ("deepspeed.offload", ":".join(zero)), *size)


def read(path: Path) -> Asked:
    """The file at ``path``, or ConfigError that says where it is wrong."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        told = json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read DeepSpeed's settings: {error.strerror}", where=str(path)) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", where=str(path)) from error
    if not isinstance(told, dict):
        raise ConfigError("DeepSpeed's settings must be an object", where=str(path), hint=_HINT)
    return _File(path, text).asked(told)


def asked_by(config: Config) -> Asked | None:
    """What the file of ``hardware.deepspeed`` asks for, if there is one."""
    path = config.hardware.deepspeed
    return None if path is None else read(Path(path))


def agreed(config: Config) -> Config:
    """The run with what its ``hardware.deepspeed`` asks for; ConfigError where both say something else of one thing."""
    if (asked := asked_by(config)) is None:
        return config
    said = (
        ("train", "global_batch_size", asked.global_batch_size), ("train", "max_grad_norm", asked.clipping),
        ("memory", "precision", asked.precision), ("memory", "micro_batch_size", asked.micro_batch_size),
    )  # fmt: skip
    for section, key, value in said:
        part = getattr(config, section)
        has = getattr(part, key)
        if value is None or has == value:
            continue
        if key in part.model_fields_set and has != AUTO:
            hint = "change one of them, or say auto in DeepSpeed's file"
            raise ConfigError(f"{section}.{key} is {has}, DeepSpeed's file has {value}", where=asked.path, hint=hint)
        config = config.model_copy(update={section: part.model_copy(update={key: value})})
    return config


def fits(asked: Asked, examples: int, devices: int, kind: str) -> None:
    """ConfigError where its three sizes of a batch do not belong together on so many devices, or there is one device, or
    what is to be offloaded is there already."""
    if kind == "cpu" and "host" in (asked.optimizer_on, asked.parameters_on):
        hint = "leave offload_optimizer and offload_param out"
        raise ConfigError("a CPU's memory is the host's: there is nowhere to offload to", where=asked.path, hint=hint)
    if devices == 1:
        hint = "--gpu '2 x NAME' plans for several; on one memory.optimizer_offload=host does what its offload does"
        raise ConfigError("DeepSpeed divides a run among devices, and this is one", where=asked.path, hint=hint)
    if asked.micro_batch_size and asked.accumulation:
        whole = asked.micro_batch_size * asked.accumulation * devices
        if whole != examples:
            parts = f"{asked.micro_batch_size} x {asked.accumulation} x {devices} devices"
            hint = "leave gradient_accumulation_steps out, or say auto: the plan splits the batch"
            raise ConfigError(f"{parts} are {whole} examples a step, not {examples}", where=asked.path, hint=hint)


class _File:
    """One file while it is read: errors say the line of the key."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.lines = path, text.splitlines()

    def asked(self, told: Mapping[str, Any]) -> Asked:
        self.known(told, _TOP, "")
        zero = self.part(told, "zero_optimization")
        if not zero:
            self.wrong("zero_optimization", "is needed: its stage is what DeepSpeed divides", "say {'stage': 2}")
        self.known(zero, _ZERO, "zero_optimization.")
        stage = zero.get("stage", 0)
        if isinstance(stage, bool) or stage not in (1, 2, 3):
            self.wrong("stage", f"must be 1, 2 or 3, not {stage!r}", "without it finefit makes replicas by itself")
        optimizer, nvme = self.place(zero, "offload_optimizer")
        parameters, other = self.place(zero, "offload_param")
        if parameters != "none" and stage != 3:
            self.wrong("offload_param", f"needs stage 3, and the stage is {stage}")
        if optimizer == "disk" and stage != 3:
            self.wrong("offload_optimizer", f"to nvme needs stage 3, and the stage is {stage}")
        if nvme and other and nvme != other:
            self.wrong("nvme_path", f"is said twice: {nvme} and {other}")
        kind = self.part(told, "optimizer").get("type", AUTO)
        if str(kind).lower() not in _ADAM:
            self.wrong("optimizer", f"is {kind}: finefit's own rules step", "leave it out, and say train.optimizer")
        return Asked(
            str(self.path), stage, optimizer, parameters, nvme or other,
            precision=self.precision(told), clipping=self.number(told, "gradient_clipping"),
            global_batch_size=self.whole(told, "train_batch_size"),
            micro_batch_size=self.whole(told, "train_micro_batch_size_per_gpu"),
            accumulation=self.whole(told, "gradient_accumulation_steps"), left=tuple(self.left(told, zero)),
        )  # fmt: skip

    def left(self, told: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[str]:
        for name in ("optimizer", "scheduler", "aio", "communication_data_type"):
            if name in told:
                yield name
        yield from (name for name in _TUNING if zero.get(name, AUTO) != AUTO)

    def precision(self, told: Mapping[str, Any]) -> Literal["fp32", "bf16_mixed", "fp16_mixed"] | None:
        wide = self.enabled(told, "bf16") or self.enabled(told, "bfloat16")
        half = self.enabled(told, "fp16")
        if wide is True and half is True:
            self.wrong("fp16", "and bf16 are both enabled", "enable one of them")
        if AUTO in (wide, half) and True not in (wide, half):
            return None
        return "bf16_mixed" if wide is True else "fp16_mixed" if half is True else "fp32"

    def enabled(self, told: Mapping[str, Any], name: str) -> bool | str:
        value = self.part(told, name).get("enabled", False)
        if value not in (True, False, AUTO):
            self.wrong(name, f"is enabled: true, false or auto, not {value!r}")
        return value  # type: ignore[no-any-return]

    def place(self, zero: Mapping[str, Any], name: str) -> tuple[Place, str]:
        part = self.part(zero, name)
        device = part.get("device", "none") or "none"
        if not isinstance(device, str) or device not in _PLACES:
            hint = did_you_mean(str(device), _PLACES) or "say none, cpu or nvme"
            self.wrong("device", f"of {name} must be none, cpu or nvme, not {device!r}", hint)
        path = part.get("nvme_path") or ""
        if device == "nvme" and not path:
            self.wrong(name, "to nvme needs a folder there", "say nvme_path")
        return _PLACES[device], str(path) if device == "nvme" else ""

    def part(self, told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        value = told.get(name) or {}
        if not isinstance(value, Mapping):
            self.wrong(name, f"must be an object, not {value!r}")
        return value

    def number(self, told: Mapping[str, Any], name: str) -> float | None:
        value = told.get(name, AUTO)
        if value == AUTO:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            self.wrong(name, f"must be a number, 0 or more, or auto, not {value!r}")
        return float(value)

    def whole(self, told: Mapping[str, Any], name: str) -> int | None:
        value = told.get(name, AUTO)
        if value == AUTO:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.wrong(name, f"must be a whole number from 1 on, or auto, not {value!r}")
        return int(value)

    def known(self, told: Mapping[str, Any], names: tuple[str, ...], prefix: str) -> None:
        for name in told:
            if name not in names:
                hint = did_you_mean(str(name), names) or _HINT
                self.wrong(str(name), "is not read here", hint, prefix)

    def wrong(self, key: str, what: str, hint: str = "", prefix: str = "") -> NoReturn:
        line = next((i for i, text in enumerate(self.lines, 1) if f'"{key}"' in text), 0)
        where = f"{self.path}:{line}" if line else str(self.path)
        raise ConfigError(f"{prefix}{key} {what}", where=where, hint=hint)


def bucket_of(elements: int) -> int:
    """Elements of a bucket for that many that train; it must be even."""
    return min(BUCKET, elements + elements % 2)


def written(
    stage: int, places: tuple[Place, Place, str], precision: str, elements: int, max_norm: float, size: int, steps: int
) -> dict[str, Any]:
    """The settings that finefit runs DeepSpeed with. ``places``: of states, of weights, and the folder of what is on disk;
    ``elements`` train; ``size`` and ``steps`` are the plan's largest micro-batch and its most micro-batches a step."""
    bucket = bucket_of(elements)
    zero: dict[str, Any] = {
        "stage": stage, "overlap_comm": False, "contiguous_gradients": True, "reduce_scatter": True,
        "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "round_robin_gradients": False,
    }  # fmt: skip
    optimizer_on, parameters_on, nvme = places
    if optimizer_on != "none":
        zero["offload_optimizer"] = _offload(optimizer_on, nvme)
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": PERSISTENT, "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": BUCKET, "stage3_max_reuse_distance": BUCKET,
        }  # fmt: skip
        if parameters_on != "none":
            zero["offload_param"] = _offload(parameters_on, nvme)
    return {
        "train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": steps, "gradient_clipping": max_norm,
        "bf16": {"enabled": precision.startswith("bf16")},
        "fp16": {"enabled": precision == "fp16_mixed", "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1},
        "zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }  # fmt: skip


def _offload(place: Place, nvme: str) -> dict[str, Any]:
    return {"device": _DEVICES[place], "pin_memory": True, **({"nvme_path": nvme} if place == "disk" else {})}
