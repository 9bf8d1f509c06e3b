"""One run from its config to its report: find model and data, plan, build, rehearse, train, export.

The run folder holds everything: resolved config, plan, events, checkpoints, and at its end the adapter or model.
"""

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import plan as plans
from .assets import model_folder
from .candidates import rewrite
from .catalog.folders import read_config
from .config import Config, dump, load
from .engines.alone import Alone
from .errors import CheckpointError, ConfigError, DataError, EngineError, ModelError
from .examples import Data, read_data, tokenizer_of
from .files import hold, write_atomically
from .hardware import HardwareSpec
from .layout import Micro
from .meshes import mesh_of
from .phases import checkpoint_bytes
from .plan import Plan
from .planning import called, deepspeed_json, hardware_of, make_plan, obey, plan_like, warnings_of
from .spec import resolve_model
from .techniques import Technique, Zero
from .toolchain import toolchain
from .units import format_bytes

LEARNING_RATE = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5}
_LION = 0.2
# What torch's launcher, and SLURM of a job that was put back into its queue, count.
BEGUN_AGAIN = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
BASE = "base.json"  # where the run's model is


def peak_rate(config: Config, method: str) -> float:
    """The peak learning rate; ConfigError where the optimizer has none of its own. Lion's step has the size of the rate in
    every element, so its authors take a third to a tenth of AdamW's (arXiv:2302.06675, section 5)."""
    said, optimizer = config.train.learning_rate, config.train.optimizer
    if said != "auto":
        return said
    if optimizer == "sgd":
        hint = "say train.learning_rate: its step has the size of the gradient"
        raise ConfigError("train.optimizer=sgd has no learning rate that suits every model", hint=hint)
    return LEARNING_RATE[method] * (_LION if optimizer.startswith("lion") else 1)


def run_folder(config: Config) -> Path:
    """Where the run goes: a new folder, or ConfigError when one with events is there."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(config.output_dir) / (config.name or f"{called(config)}-{stamp}")
    if (folder / "events.jsonl").exists():
        hint = f"finefit resume {folder} goes on with it; or give another name=…"
        raise ConfigError(f"there is a run in {folder} already", hint=hint)
    return folder


@dataclass(frozen=True, slots=True)
class Job:
    """All that carrying out a plan needs. ``said`` are sentences about model and data to be shown once."""

    config: Config
    plan: Plan
    hardware: HardwareSpec
    data: Data
    tokenizer: Any
    model_folder: Path
    folder: Path
    held: Any
    """The folder's lock, given back when the job is gone."""
    said: tuple[str, ...] = ()
    before: Plan | None = None
    """The plan it went on by until now, where it is resumed by another one."""
    world: Alone = field(default_factory=Alone)
    """Of the processes that carry it out together."""


def new(config: Config, plan_file: Path | None) -> Job:
    """A new run, planned (or told by ``plan_file``), its folder made with config and plan in it. Where its processes
    are begun again by whoever began them, the one that they had begun goes on."""
    if any(int(os.environ.get(key, "0")) for key in BEGUN_AGAIN) and (begun := _begun_before(config)):
        return again(begun)
    folder = run_folder(config)
    peak_rate(config, "lora")  # or there is none, and nothing is planned first
    asset = model_folder(config.model)
    tokenizer = tokenizer_of(asset.folder)
    check_base(asset.folder)
    model, data = replace(resolve_model(str(asset.folder)), name=called(config)), read_data(config, tokenizer)
    hardware = hardware_of(config, None)
    plan = obey(plan_file, config, model, hardware, data) if plan_file else make_plan(config, model, hardware, data)
    check_engine(plan.technique("zero"))
    check_disk(folder, checkpoint_bytes(rewrite(model, Micro(1, 1, 1), plan.techniques)), config.train.keep_checkpoints)
    held = hold(folder)
    run_folder(config.model_copy(update={"name": folder.name}))  # nobody was quicker
    write_atomically(folder / "config.yaml", dump(config).encode())
    plan.save(folder / "plan.json")
    if mesh_of(plan.techniques).engine == "deepspeed":
        write_atomically(folder / "deepspeed.json", json.dumps(deepspeed_json(plan, model), indent=1).encode())
    base = {"folder": str(asset.folder), "says": asset.says, "data": data.store.folder.name}
    write_atomically(folder / BASE, json.dumps(base).encode())
    said = tuple(sentence for sentence in (asset.says, *_said_of(data), *warnings_of(plan)) if sentence)
    return Job(config, plan, hardware, data, tokenizer, asset.folder, folder, held, said)


def _begun_before(config: Config) -> Path | None:
    """The newest run of this very config that has a plan."""
    wanted = dump(config)
    found = [
        path.parent
        for path in Path(config.output_dir).glob(f"{config.name or '*'}/config.yaml")
        if path.read_text(encoding="utf-8") == wanted and (path.parent / "plan.json").is_file()
    ]
    return max(found, key=lambda folder: (folder / "plan.json").stat().st_mtime, default=None)


def _said_of(data: Data) -> tuple[str, ...]:
    stores = {store.folder: store for store in (data.store, data.held_out)}.values()
    return tuple(sentence for store in stores for sentence in store.says())


# What a run may be resumed with: nothing of it changes what is learnt.
_MAY_CHANGE = ("memory.", "hardware.")
_MAY_NOT = ("memory.precision", "memory.rounding", "memory.fp32_islands")


def again(folder: Path, overrides: Sequence[str] = (), *, holds: bool = True, is_new: bool = False) -> Job:
    """The run in ``folder``, by the config and plan it was started with; by another plan where ``overrides`` ask for one.

    ``holds``: this process alone works in the folder. ``is_new``: what there is to say once is still to be said.
    """
    if not (folder / "config.yaml").is_file() or not (folder / "plan.json").is_file():
        hint = "a run folder has config.yaml and plan.json"
        raise CheckpointError("there is no run here", where=str(folder), hint=hint)
    for word in overrides:
        key = word.partition("=")[0].strip()
        if not key.startswith(_MAY_CHANGE) or key in _MAY_NOT:
            hint = "memory.… and hardware.… may: micro_batch_size, checkpointing, offload, budget; a new run takes the rest"
            raise ConfigError(f"'{key}' cannot change in the middle of a run", hint=hint)
    held = hold(folder) if holds else nullcontext()
    config = load(folder / "config.yaml", overrides)
    base, key = base_of(folder, config)
    tokenizer = tokenizer_of(base)
    data, plan = read_data(config, tokenizer), plans.load(folder / "plan.json")
    if data.store.folder.name != key:
        with held:
            pass
        hint = "put the data back as it was, or start a new run with it"
        raise DataError("the data is not what the run began with", where=str(config.data), hint=hint)
    said = (*_said_of(data), *warnings_of(plan)) if is_new else ()
    job = Job(config, plan, hardware_of(config, None), data, tokenizer, base, folder, held, said)
    job = _otherwise(job) if overrides else job
    check_engine(job.plan.technique("zero"))
    return job


def _otherwise(job: Job) -> Job:
    """The same run by the plan that its config asks for now; what the run is like stays as it is."""
    model = replace(resolve_model(str(job.model_folder)), name=job.plan.model)
    plan = plan_like(job.plan, job.config, model, job.hardware, job.data)
    write_atomically(job.folder / "config.yaml", dump(job.config).encode())
    plan.save(job.folder / "plan.json")
    return replace(job, plan=plan, said=warnings_of(plan), before=job.plan)


def check_engine(zero: Technique | None) -> None:
    """EngineError where the engine of a plan's ``zero`` is not here, or cannot carry out what is planned."""
    if not isinstance(zero, Zero) or zero.engine != "deepspeed":
        return
    without = "without hardware.deepspeed finefit's own engine does the same"
    if "disk" in (zero.optimizer_on, zero.parameters_on):
        hint = f"say cpu in place of nvme; finefit plan --deepspeed writes settings for DeepSpeed by itself; {without}"
        raise EngineError("what DeepSpeed has on NVMe is in no checkpoint of finefit's", hint=hint)
    seen = toolchain()
    if not seen.version or seen.lacking:
        names = " ".join(seen.lacking or ("deepspeed",))
        hint = f"pip install {names}; finefit doctor says what else it needs; {without}"
        raise EngineError(f"hardware.deepspeed needs {names.replace(' ', ', ')}, not installed here", hint=hint)


def check_base(folder: Path) -> None:
    """A checkpoint stored in a quantised format is codes and scales, not weights: refuse it rather than train on it."""
    stored = read_config(folder / "config.json")
    kind = stored.get("quantization_config", stored.get("compression_config"))
    if kind:
        method = kind.get("quant_method", "an unknown method") if isinstance(kind, dict) else kind
        hint = "take the model's 16-bit version; method=qlora quantises it while it is loaded"
        raise ModelError(f"the weights are quantised ({method})", where=str(folder / "config.json"), hint=hint)


def base_of(folder: Path, config: Config) -> tuple[Path, str]:
    """The very files the run began with (another copy under the same name may differ), and the key of its data."""
    try:
        made = json.loads((folder / BASE).read_text())
        noted, key = Path(made["folder"]), made["data"]
    except (OSError, ValueError, KeyError) as error:
        hint = "the run folder is incomplete; start the run again"
        raise CheckpointError(
            "the run does not say which model it began with", where=str(folder / BASE), hint=hint
        ) from error
    if not noted.is_dir():
        hint = f"bring the folder back, or start again with {config.model}"
        raise CheckpointError(f"the model the run began with is gone: {noted}", where=str(folder), hint=hint)
    return noted, key


def check_disk(folder: Path, checkpoint: tuple[int, int], keep: int) -> None:
    """Free space against what checkpoints (bytes of weights, of states) and the end's weights take, before training."""
    weights, one = checkpoint[0], sum(checkpoint)
    needed = max(2, keep) * one + weights  # a new one is whole before the last one before it goes
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK):
        raise CheckpointError("the folder cannot be written to", where=str(existing), hint="choose another output_dir")
    free = shutil.disk_usage(existing).free
    if free < needed:
        amounts = (
            f"{max(2, keep)} checkpoints of {format_bytes(one)} and the trained weights of {format_bytes(weights)}"
        )
        hint = "free some disk space, choose another output_dir, or lower train.keep_checkpoints"
        raise CheckpointError(f"{amounts} do not fit in {format_bytes(free)}", where=str(existing), hint=hint)
