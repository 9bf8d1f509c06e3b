"""How a foreign run is spread: DeepSpeed's JSON, FSDP's options, parallel degrees, and the number of devices.

Follows accelerate 1.15: with FSDP and mixed precision, weights that train are kept in fp32 and gathered in the compute
type; DeepSpeed in bf16 keeps the module in bf16 and an fp32 master of what trains in its optimizer. Either is told by a
``ForeignRun`` whose ``trained_dtype`` is float32 and whose ``engine`` says where the narrower copy comes from.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigError
from ...foreign import Spread
from ...hardware import MOST_DEVICES
from .sheet import Sheet

Stage = Literal[0, 1, 2, 3]
Engine = Literal["", "ddp", "fsdp1", "fsdp2", "deepspeed", "naive"]
_STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
_FOLDERS = ("deepspeed_configs", "examples/deepspeed", "deepspeed")
_REDUCED: dict[str, Stage] = {"no_shard": 0, "shard_grad_op": 2, "full_shard": 3, "hybrid_shard": 3}


@dataclass(frozen=True, slots=True)
class Sharding:
    engine: Engine = ""
    stage: Stage = 0
    optimizer_on_host: bool = False
    parameters_on_host: bool = False
    checkpointing: bool = False
    bf16: bool = False
    """DeepSpeed's own file switches bf16 on."""
    tensor: int = 1
    reduces: Literal["each", "last"] = "each"
    load: Literal["", "first"] = ""
    """The first rank alone reads the weights (accelerate's ``cpu_ram_efficient_loading``)."""
    overlaps: bool = True
    bucket: int = 0


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees the file fixes; 0 where it does not say."""

    shard: int = 0
    replicate: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        """All devices together, or 0 where the file does not say."""
        rest = self.replicate * self.tensor * self.context
        return rest * self.shard if self.shard else rest if rest > 1 else 0


def deepspeed(sheet: Sheet, key: str) -> Sharding:
    """The DeepSpeed configuration a key names or holds; without the file, its name still tells the stage."""
    value = sheet.get(key)
    if isinstance(value, Mapping):
        return _from_json(sheet, key, value)
    name = sheet.text(key)
    found = sheet.find(name, *_FOLDERS)
    if found:
        return _from_json(sheet, key, _json(sheet, key, found))
    stage = re.search(r"z(?:ero)?[_-]?([0-3])(?!\d)", Path(name).name.lower())
    if not stage:
        sheet.wrong(key, f"names '{name}', which is not there, and its name does not tell the ZeRO stage")
    sheet.note(f"'{name}' was not found: ZeRO stage {stage[1]} is read from its name")
    offloads = "offload" in name.lower()
    return Sharding(
        "deepspeed", _STAGES[int(stage[1])],
        optimizer_on_host=offloads and "params" not in name.lower(),
        parameters_on_host=offloads and stage[1] == "3" and "optimizer" not in name.lower(),
    )  # fmt: skip


def fsdp(sheet: Sheet, flags: str, options: str, version: int = 1) -> Sharding:
    """FSDP as transformers and Axolotl spell it: words in ``flags``, a section (or the name of a JSON) in ``options``."""
    words = " ".join(map(str, value)) if isinstance(value := sheet.get(flags, ""), list) else str(value).lower()
    given = sheet.get(options, {})
    if isinstance(given, str):
        found = sheet.find(given)
        given = _json(sheet, options, found) if found else sheet.wrong(options, f"names '{given}', which is not there")
    if not isinstance(given, Mapping):
        sheet.wrong(options, f"must be a section of keys, not {given!r}")
    told = {str(name).lower().removeprefix("fsdp_"): value for name, value in given.items()}
    number = told.get("version", version)
    if str(number) not in ("1", "2"):
        sheet.wrong(options, f"must have version 1 or 2, not {number!r}")
    reshards = str(told.get("reshard_after_forward", True)).lower()
    strategy = str(told.get("sharding_strategy", reshards)).lower()
    chosen = next((stage for word, stage in _REDUCED.items() if word in words or word == strategy), None)
    stage: Stage = chosen if chosen is not None else 2 if reshards == "false" else 3
    offloads = str(told.get("offload_params", "offload" in words)).lower() == "true"
    return Sharding(
        "fsdp2" if str(number) == "2" else "fsdp1", stage, offloads, offloads,
        checkpointing=bool(told.get("activation_checkpointing")),
        reduces="last",  # accelerate's accumulation enters no_sync, unless sync_each_batch is asked for
        load="first" if str(told.get("cpu_ram_efficient_loading")).lower() == "true" and str(number) == "1" else "",
    )  # fmt: skip


def spread(sheet: Sheet, how: Sharding, devices: int | None, degrees: Degrees | None = None) -> Spread:
    """Devices and degrees of a run; where nothing says how many, one device, or two if the state is to be sharded."""
    fixed = degrees or Degrees(tensor=how.tensor)
    world = devices or fixed.devices or (2 if how.stage else 1)
    if not devices and not fixed.shard and how.stage:
        sheet.note(f"the file does not say on how many devices it runs: {world} are assumed")
    if world > MOST_DEVICES:
        raise ConfigError(f"{world:,} devices are more than a run has: at most {MOST_DEVICES:,}", where=str(sheet.path))
    inner = fixed.tensor * fixed.context
    if world % inner:
        raise ConfigError(
            f"{world} devices cannot be divided into groups of {inner}", where=str(sheet.path),
            hint=f"give a number of devices that {inner} divides",
        )  # fmt: skip
    across = world // fixed.tensor
    shards = (fixed.shard * fixed.context if fixed.shard else across // fixed.replicate) if how.stage else 1
    engine: Engine = how.engine or ("ddp" if world > 1 else "")
    return Spread(
        data=world // inner, tensor=fixed.tensor, context=fixed.context, shard_stage=how.stage,
        shards=max(min(shards, across), 1), engine=engine, reduces=how.reduces,
        overlaps=how.overlaps, bucket=how.bucket,
    )  # fmt: skip


def _from_json(sheet: Sheet, key: str, config: Mapping[str, Any]) -> Sharding:
    zero = _part(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in _STAGES:
        sheet.wrong(key, f"has the ZeRO stage {stage!r}; there are 0, 1, 2 and 3")
    return Sharding(
        "deepspeed", stage,
        optimizer_on_host=_moves(zero, "offload_optimizer"),
        parameters_on_host=_moves(zero, "offload_param"),
        bf16=_part(config, "bf16").get("enabled") is True,
        tensor=_whole(_part(config, "tensor_parallel").get("autotp_size", 1), 1),
        overlaps=bool(zero.get("overlap_comm", stage == 3)), bucket=_bucket(zero),
    )  # fmt: skip


def _bucket(zero: Mapping[str, Any]) -> int:
    """``reduce_bucket_size``, which DeepSpeed sets to 5e8."""
    return _whole(zero.get("reduce_bucket_size", 500_000_000), -1)


def _whole(value: object, other: int) -> int:
    """A finite number of one or more as a whole one; ``other`` for ``auto`` and what is none."""
    return int(value) if isinstance(value, int | float) and 1 <= value < 1e15 else other


def _moves(zero: Mapping[str, Any], part: str) -> bool:
    return _part(zero, part).get("device", "none") in ("cpu", "nvme")


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


def _json(sheet: Sheet, key: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        sheet.wrong(key, f"names '{path}', which cannot be read: {error}")
    if not isinstance(value, dict):
        sheet.wrong(key, f"names '{path}', which is not a JSON object")
    return value
