"""One run from its config to its report: find model and data, plan, build, rehearse, train, export.

The run folder holds everything: resolved config, plan, events, checkpoints, and at its end the adapter or model.
"""

import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import phases
from . import plan as plans
from .assets import model_folder
from .batches import Batches, FromOrder, Uniform
from .candidates import Question, rewrite
from .config import Config, dump, load
from .data.order import InOrder, Order, spaced
from .data.readers import HELD_OUT, Source, open_source
from .data.tokens import TokenStore, prepare
from .errors import CheckpointError, ConfigError, DataError, DoesNotFit, EngineError, ModelError
from .explain import explained
from .files import hold, write_atomically
from .hardware import HardwareSpec
from .layout import Micro
from .obey import Wish, limits, obeyed
from .plan import WARNING, Plan
from .predict import footprint
from .search import DEFAULT_BUDGET, search
from .spec import JobSpec, ModelSpec, resolve_model
from .units import Budget, format_bytes, parse_budget

LEARNING_RATE = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5}
HELD_OUT_SHARE = 20  # one of so many examples is set aside where no held-out data is named
EVALUATED = 64  # examples, evenly spaced over the held-out set: a quarter of a minute on two cores for a 135M model
BASE = "base.json"  # where the run's model is


@dataclass(frozen=True, slots=True)
class Data:
    """Tokens to train on and to evaluate with, their order, and the number of steps."""

    store: TokenStore
    held_out: TokenStore
    held_out_rows: tuple[int, ...]
    order: Order | InOrder
    rows: tuple[int, ...]
    """Rows of ``store`` that are trained on, which the order counts."""
    steps: int

    def batch(self, step: int) -> list[int]:
        """Rows of the store of one global batch."""
        return [self.rows[i] for i in self.order.batch(step)]

    def evaluated(self) -> list[int]:
        """Rows of the held-out store that an evaluation takes."""
        return [self.held_out_rows[i] for i in spaced(len(self.held_out_rows), EVALUATED)]

    def held_out_batches(self) -> FromOrder:
        """They as one global batch."""
        rows = self.evaluated()
        lengths, labelled = (of[rows].tolist() for of in (self.held_out.lengths, self.held_out.labelled))
        return FromOrder([range(len(rows))], lengths, labelled)

    def batches(self) -> FromOrder:
        steps = [self.batch(step) for step in range(1, self.steps + 1)]
        return FromOrder(steps, self.store.lengths.tolist(), self.store.labelled.tolist())


def tokenizer_of(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EngineError("training needs transformers", hint="pip install 'finefit[train]'") from error
    resolve_model(str(folder))  # says what is wrong with a config.json before transformers trips over it
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a library raises on a file it cannot read: the file is the user's
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        hint = "tokenizer.json and tokenizer_config.json are missing, damaged, or of a newer transformers"
        raise ModelError(f"the tokenizer cannot be read: {first}", where=str(folder), hint=hint) from error


def read_data(config: Config, tokenizer: Any) -> Data:
    """Tokenise (or take from the cache) what is trained on and what is held out."""
    if config.data is None:
        raise ConfigError("no data is named", hint="finefit train MODEL DATA, or data: in the run file")
    at = config.train

    def store_of(source: Source) -> TokenStore:
        return prepare(source, tokenizer, max_length=at.max_length, too_long=at.too_long)

    store = store_of(open_source(config.data))
    named = config.eval_data or (HELD_OUT if config.data == HELD_OUT.partition(":")[0] else None)
    held_out = store_of(open_source(named)) if named else store
    aside: tuple[int, ...] = () if named else tuple(range(0, len(store), HELD_OUT_SHARE))
    if len(aside) == len(store):
        aside = ()  # too few examples to set any aside: they are evaluated on what they learn
    held_out_rows = aside or tuple(range(len(held_out)))
    rows = tuple(sorted(set(range(len(store))) - set(aside)))
    size = min(at.global_batch_size, len(rows))
    order = InOrder(len(rows), size) if at.order == "as_given" else Order(len(rows), size, config.seed)
    return Data(store, held_out, held_out_rows, order, rows, at.steps or order.steps(at.epochs))


def hardware_of(config: Config, named: str | None) -> HardwareSpec:
    if named:
        return HardwareSpec.from_name(named)
    machine = replace(HardwareSpec.of_this_machine(), count=1)  # what trains here trains on one device
    if config.hardware.device == "cpu" and machine.kind != "cpu":
        machine = HardwareSpec.of_cpu()
    if config.hardware.device.startswith("cuda") and machine.kind != "cuda":
        raise EngineError("no CUDA device is here", hint="finefit doctor says why; hardware.device=cpu runs without")
    return machine


def job_of(config: Config, data: Data | None) -> JobSpec:
    at = config.train
    job = JobSpec(
        method=config.method, rank=config.lora.rank, alpha=config.lora.alpha, dropout=config.lora.dropout,
        targets=config.lora.names(), precision=config.memory.precision, global_batch_size=at.global_batch_size,
        max_length=at.max_length, longest=at.max_length, steps=at.steps or 0, seed=config.seed,
        pins=(*config.memory.pins(), *config.qlora.pins(), ("max_grad_norm", str(at.max_grad_norm))),
    )  # fmt: skip
    if data is None:
        return job
    size = min(at.global_batch_size, len(data.rows))
    return replace(job, longest=int(data.store.lengths.max()), steps=data.steps, global_batch_size=size,
                   labelled_share=data.store.labelled_share)  # fmt: skip


def budget_of(config: Config, hardware: HardwareSpec) -> Budget:
    text = config.memory.budget
    return parse_budget(DEFAULT_BUDGET[hardware.kind] if text == "auto" else text, hardware.memory_bytes)


def make_plan(config: Config, model: ModelSpec, hardware: HardwareSpec, data: Data | None) -> Plan:
    """The search for this config; without data every example counts as long as allowed."""
    job, batches = job_of(config, data), batches_of(config, model, data)
    question = Question(model, hardware, job, batches, budget_of(config, hardware))
    return foreseen(explained(question, search(question)), model, hardware, data)


def foreseen(plan: Plan, model: ModelSpec, hardware: HardwareSpec, data: Data | None) -> Plan:
    """``plan`` with what the data adds beside the steps: the held-out examples' evaluation, and its part of the host.

    What is short of memory outside the steps becomes a note that begins with WARNING.
    """
    predicted, warnings = plan.predicted, []
    layout, moments = rewrite(model, Micro(1, 1, 1), plan.techniques), dict(predicted.moments)
    if data is not None:
        found = [footprint(rewrite(model, micro, plan.techniques), hardware)
                 for micro in data.held_out_batches().work(*limits(plan)).largest]  # fmt: skip
        moments["eval"] = max(found, key=lambda one: one.at("eval")).moments["eval"]
    host = phases.host(layout, moments, hardware.kind)
    if data is not None:
        stores = {store.folder: store for store in (data.store, data.held_out)}.values()
        examples, tokens = sum(map(len, stores)), sum(int(store.index["tokens"]) for store in stores)
        host = phases.with_data(host, examples, tokens)
    predicted = replace(predicted, moments=moments, host=host)
    if plan.predicted.total_bytes <= plan.budget_bytes < predicted.total_bytes:
        needs = f"{format_bytes(predicted.total_bytes)} of {format_bytes(plan.budget_bytes)}"
        warnings.append(f"{WARNING}the held-out examples are longer than the rest: evaluating them needs {needs}")
    moment, needed = phases.needed(predicted.host)
    if 0 < hardware.host_memory_bytes < needed:
        has = format_bytes(hardware.host_memory_bytes)
        warnings.append(f"{WARNING}{moment} needs {format_bytes(needed)} of the host's memory, which is {has}")
    return replace(plan, predicted=predicted, notes=(*plan.notes, *warnings))


def warnings_of(plan: Plan) -> tuple[str, ...]:
    """What of the plan's notes is to be shown before it runs."""
    return tuple(note.removeprefix(WARNING) for note in plan.notes if note.startswith(WARNING))


def batches_of(config: Config, model: ModelSpec, data: Data | None) -> Batches:
    """The run's batches; without data, examples as long as the run and the model allow."""
    if data:
        return data.batches()
    return Uniform(config.train.global_batch_size, min(config.train.max_length, model.max_position_embeddings))


def obey(plan_file: Path, config: Config, model: ModelSpec, hardware: HardwareSpec, data: Data) -> Plan:
    """The plan in the file, found to be of this run, with its prediction for this data."""
    limit = None if config.memory.budget == "auto" else budget_of(config, hardware).limit_bytes
    examples = min(config.train.global_batch_size, len(data.rows))
    wish = Wish(config, model, hardware, data.batches(), examples, limit)
    try:
        return foreseen(obeyed(plans.load(plan_file), wish), model, hardware, data)
    except (ConfigError, DoesNotFit) as error:
        error.where = error.where or str(plan_file)
        raise


def called(config: Config) -> str:
    """The model's name in plans and folders: the last part of what the user wrote."""
    return config.model.rstrip("/").rpartition("/")[2]


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


def new(config: Config, plan_file: Path | None) -> Job:
    """A new run, planned (or told by ``plan_file``), its folder made with config and plan in it."""
    folder = run_folder(config)
    asset = model_folder(config.model)
    tokenizer = tokenizer_of(asset.folder)
    check_base(asset.folder)
    model, data = replace(resolve_model(str(asset.folder)), name=called(config)), read_data(config, tokenizer)
    hardware = hardware_of(config, None)
    plan = obey(plan_file, config, model, hardware, data) if plan_file else make_plan(config, model, hardware, data)
    check_disk(folder, plan)
    held = hold(folder)
    run_folder(config.model_copy(update={"name": folder.name}))  # nobody was quicker
    write_atomically(folder / "config.yaml", dump(config).encode())
    plan.save(folder / "plan.json")
    base = {"folder": str(asset.folder), "says": asset.says, "data": data.store.folder.name}
    write_atomically(folder / BASE, json.dumps(base).encode())
    said = tuple(sentence for sentence in (asset.says, *data.store.says(), *warnings_of(plan)) if sentence)
    return Job(config, plan, hardware, data, tokenizer, asset.folder, folder, held, said)


def again(folder: Path) -> Job:
    """The run in ``folder``, by the config and plan it was started with."""
    if not (folder / "config.yaml").is_file() or not (folder / "plan.json").is_file():
        hint = "a run folder has config.yaml and plan.json"
        raise CheckpointError("there is no run here", where=str(folder), hint=hint)
    held = hold(folder)
    config = load(folder / "config.yaml")
    base, key = base_of(folder, config)
    tokenizer = tokenizer_of(base)
    data, plan = read_data(config, tokenizer), plans.load(folder / "plan.json")
    if data.store.folder.name != key:
        held.close()
        hint = "put the data back as it was, or start a new run with it"
        raise DataError("the data is not what the run began with", where=str(config.data), hint=hint)
    return Job(config, plan, hardware_of(config, None), data, tokenizer, base, folder, held)


def standing(config: Config) -> Config:
    """The config with paths that hold wherever a run is resumed from."""
    paths = {key: getattr(config, key) for key in ("model", "data", "eval_data")}
    known = {key: str(Path(word).absolute()) for key, word in paths.items() if word and Path(word).exists()}
    return config.model_copy(update=known)


def check_base(folder: Path) -> None:
    """A checkpoint stored in a quantised format is codes and scales, not weights: refuse it rather than train on it."""
    stored = json.loads((folder / "config.json").read_text())
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


def check_disk(folder: Path, plan: Plan) -> None:
    """Free space against what the checkpoints will take, before anything is trained."""
    states = plan.predicted.moments["optimizer_step"]
    trained = states.get("gradient", 0) + states.get("optimizer_state", 0)
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK):
        raise CheckpointError("the folder cannot be written to", where=str(existing), hint="choose another output_dir")
    free = shutil.disk_usage(existing).free
    if free < 2 * trained:
        raise CheckpointError(
            f"a checkpoint takes {format_bytes(trained)}, {format_bytes(free)} are free", where=str(existing),
            hint="free some disk space or choose another output_dir",
        )  # fmt: skip
