"""From a config to its plan: the device, the job, the budget, the search, and what the data adds to its prediction.

Imports neither the data's rooms nor numpy: a plan without data needs none of them.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import phases
from . import plan as plans
from .batches import Batches, Uniform
from .candidates import Question, rewrite
from .coefficients import sections_for, trace_reckoned
from .config import Config
from .config import deepspeed as deepspeeds
from .errors import ConfigError, DoesNotFit, EngineError
from .explain import explained
from .hardware import HardwareSpec
from .layout import Micro
from .meshes import mesh_of
from .obey import Wish, limits, obeyed
from .plan import WARNING, Plan
from .predict import footprint
from .search import DEFAULT_BUDGET, search
from .spec import JobSpec, ModelSpec
from .supervise import kept
from .techniques import Zero
from .units import Budget, format_bytes, parse_budget

if TYPE_CHECKING:
    from .examples import Data


def hardware_of(config: Config, named: str | None) -> HardwareSpec:
    if named:
        hardware = HardwareSpec.from_name(named)
        wanted = config.hardware.device.partition(":")[0]
        if wanted not in ("auto", hardware.kind):
            hint = "leave one of them out"
            raise ConfigError(
                f"hardware.device={config.hardware.device} and --gpu {named} contradict each other", hint=hint
            )
        return hardware
    machine = HardwareSpec.of_this_machine()
    if config.hardware.device == "cpu" and machine.kind != "cpu":
        machine = HardwareSpec.of_cpu()
    if config.hardware.device.startswith("cuda") and machine.kind != "cuda":
        raise EngineError("no CUDA device is here", hint="finefit doctor says why; hardware.device=cpu runs without")
    return _with_devices(machine, config)


def _with_devices(machine: HardwareSpec, config: Config) -> HardwareSpec:
    """As many of the machine's devices as are wished; as many as there are processes, where torch's launcher began some."""
    wished = config.hardware.devices
    one = 1 if ":" in config.hardware.device or machine.kind == "cpu" else machine.count
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    count = ranks if ranks > 1 else one if wished == "auto" else wished
    if wished not in ("auto", count):
        raise ConfigError(
            f"hardware.devices={wished}, and {count} processes were started", hint="leave one of them out"
        )
    nodes = max(ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), 1)
    if machine.kind == "cpu":
        return machine if count == 1 else replace(machine.shared_by(count // nodes), count=count, nodes=nodes)
    if count > machine.count * nodes:
        hint = f"say {machine.count} or less; finefit launch --nodes takes more machines"
        raise ConfigError(f"{count} devices were asked for, {machine.count} are here", hint=hint)
    return replace(machine, count=count, nodes=nodes)


def job_of(config: Config, data: "Data | None") -> JobSpec:
    at = config.train
    asked = deepspeeds.asked_by(config)
    job = JobSpec(
        method=config.method, rank=config.lora.rank, alpha=config.lora.alpha, dropout=config.lora.dropout,
        targets=config.lora.names(), precision=config.memory.precision, global_batch_size=at.global_batch_size,
        max_length=at.max_length, longest=at.max_length, steps=at.steps or 0, seed=config.seed,
        pins=(*config.memory.pins(), *config.qlora.pins(), ("max_grad_norm", str(at.max_grad_norm)),
              ("optimizer", at.optimizer), *(asked.pins() if asked else ())),
    )  # fmt: skip
    if data is None:
        return job
    size = min(at.global_batch_size, len(data.rows))
    return replace(job, longest=int(data.store.lengths.max()), steps=data.steps, global_batch_size=size,
                   labelled_share=data.store.labelled_share)  # fmt: skip


def budget_of(config: Config, hardware: HardwareSpec) -> Budget:
    text = config.memory.budget
    budget = parse_budget(DEFAULT_BUDGET[hardware.kind] if text == "auto" else text, hardware.memory_bytes)
    if budget.limit_bytes > hardware.memory_bytes:
        has = format_bytes(hardware.memory_bytes)
        hint = "say what it has or less, a share as 90%, or auto; --gpu plans for another device"
        raise ConfigError(f"memory.budget={text} is more than {hardware.name} has, {has}", hint=hint)
    return budget


def make_plan(config: Config, model: ModelSpec, hardware: HardwareSpec, data: "Data | None") -> Plan:
    """The search for this config; without data every example counts as long as allowed."""
    question = question_of(config, model, hardware, data)
    plan = _searched(question, data is not None)
    wanted, has = question.job.longest, model.max_position_embeddings
    if wanted > has:
        counted = f"{WARNING}the model has positions for {has:,} tokens: " + (
            "what is longer is beyond what it was trained for"
            if data
            else f"examples count as that long, not {wanted:,}"
        )
        plan = replace(plan, notes=(*plan.notes, counted))
    if (asked := deepspeeds.asked_by(config)) and asked.left:
        said = f"DeepSpeed runs with finefit's own {', '.join(asked.left)}, not those of {asked.path}"
        plan = replace(plan, notes=(*plan.notes, said))
    return foreseen(plan, model, hardware, data)


def plan_like(before: Plan, config: Config, model: ModelSpec, hardware: HardwareSpec, data: "Data") -> Plan:
    """The search for this config, but all that changes what is learnt as ``before`` has it."""
    question = question_of(config, model, hardware, data)
    question = replace(question, job=kept(question.job, before))
    return foreseen(_searched(question, is_run=True), model, hardware, data)


def _searched(question: Question, is_run: bool) -> Plan:
    """What is run is traced as it is, and searched for again by that, where a search reckons."""
    plan = search(question)
    while is_run and trace_reckoned(rewrite(question.model, Micro(1, 1, 1), plan.techniques)):
        plan = search(question)
    return explained(question, plan)


def question_of(config: Config, model: ModelSpec, hardware: HardwareSpec, data: "Data | None") -> Question:
    """What a search for this config depends on."""
    batches, job = batches_of(config, model, data), job_of(config, data)
    if asked := deepspeeds.asked_by(config):
        deepspeeds.fits(asked, job.global_batch_size, hardware.count, hardware.kind)
    return Question(model, hardware, job, batches, budget_of(config, hardware))


def foreseen(
    plan: Plan, model: ModelSpec, hardware: HardwareSpec, data: "Data | None", learnt: Mapping[str, float] | None = None
) -> Plan:
    """``plan`` with what the data adds beside the steps: the held-out examples' evaluation, and its part of the host.
    ``learnt``: how many times as much a moment takes as is predicted.

    What is short of memory outside the steps becomes a note that begins with WARNING.
    """
    predicted, warnings = plan.predicted, []
    layout, moments = rewrite(model, Micro(1, 1, 1), plan.techniques), dict(predicted.moments)
    if data is not None:
        sections_for(layout, "eval")  # a search does without rather than wait for a trace; what is run has it
        found = [footprint(rewrite(model, micro, plan.techniques), hardware).corrected(learnt or {})
                 for micro in data.held_out_batches().among(mesh_of(plan.techniques).data).work(*limits(plan)).largest]  # fmt: skip
        moments["eval"] = max(found, key=lambda one: one.at("eval")).moments["eval"]
    host = phases.together(phases.host(layout, moments, hardware.kind), predicted.host)
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


def batches_of(config: Config, model: ModelSpec, data: "Data | None") -> Batches:
    """The run's batches; without data, examples as long as the run and the model allow."""
    if data:
        return data.batches()
    return Uniform(config.train.global_batch_size, min(config.train.max_length, model.max_position_embeddings))


def obey(plan_file: Path, config: Config, model: ModelSpec, hardware: HardwareSpec, data: "Data") -> Plan:
    """The plan in the file, found to be of this run, with its prediction for this data."""
    limit = None if config.memory.budget == "auto" else budget_of(config, hardware).limit_bytes
    examples = min(config.train.global_batch_size, len(data.rows))
    wish = Wish(config, model, hardware, data.batches(), examples, limit)
    try:
        return foreseen(obeyed(plans.load(plan_file), wish), model, hardware, data)
    except (ConfigError, DoesNotFit) as error:
        error.where = error.where or str(plan_file)
        raise


def standing(config: Config) -> Config:
    """The config with paths that hold wherever a run is resumed from, and with what DeepSpeed's file asks for."""
    if config.hardware.deepspeed:
        path = str(Path(config.hardware.deepspeed).absolute())
        hardware = config.hardware.model_copy(update={"deepspeed": path})
        config = deepspeeds.agreed(config.model_copy(update={"hardware": hardware}))
    paths = {key: getattr(config, key) for key in ("model", "data", "eval_data")}
    known = {key: str(Path(word).absolute()) for key, word in paths.items() if word and Path(word).exists()}
    return config.model_copy(update=known)


def deepspeed_json(plan: Plan, model: ModelSpec) -> dict[str, Any]:
    """The plan's ZeRO as DeepSpeed's settings; ConfigError where it has none."""
    zero = plan.technique("zero")
    if not isinstance(zero, Zero):
        hint = "plan for several devices: --gpu '8 x NAME'; a plan that makes replicas of all has nothing to say either"
        raise ConfigError("the plan divides nothing by ZeRO, so there are no settings of DeepSpeed's", hint=hint)
    elements = sum(g.numel * g.count for g in rewrite(model, Micro(1, 1, 1), plan.techniques).groups if g.trainable)
    of: dict[str, Any] = {t.name: t for t in plan.techniques}
    max_norm = of["clipping"].max_norm if "clipping" in of else 0.0
    size, steps = _evenly(plan, zero.ranks)
    settings = zero.settings(of["precision"].kind, elements, max_norm, size, steps)
    return settings | (
        {"train_batch_size": whole} if (whole := size * steps * zero.ranks) == plan.global_batch_size else {}
    )


def _evenly(plan: Plan, ranks: int) -> tuple[int, int]:
    """(examples a micro-batch, micro-batches a step) of which every rank has as many, as DeepSpeed needs it: no fewer
    micro-batches than the plan's most. The plan's own where ranks cannot have as many."""
    each, left = divmod(plan.global_batch_size, ranks)
    if left:
        return plan.micro_batch_size, plan.gradient_accumulation_steps
    steps = next((n for n in range(plan.gradient_accumulation_steps, each) if each % n == 0), each)
    return each // steps, steps


def called(config: Config) -> str:
    """The model's name in plans and folders: the last part of what the user wrote."""
    return config.model.rstrip("/").rpartition("/")[2]
