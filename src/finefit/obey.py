"""A plan file against the run it is given to: what the user said must be what the plan does, and it must fit this data.

The plan's techniques are kept as they are; its prediction is made again for this run's batches, which may be others than
those it was made for. Declines to mend a plan: a contradiction is an error that names it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .batches import Batches
from .candidates import judged, rewrite
from .config import Config
from .config.deepspeed import asked_by
from .config.parallel import degrees
from .errors import ConfigError, DoesNotFit
from .footprint import Footprint
from .meshes import DEGREES, mesh_of
from .plan import WARNING, Plan
from .predict import footprint
from .spec import HardwareSpec, ModelSpec
from .techniques import Accumulation, Technique, Unsuitable, Zero
from .units import format_bytes

AGAIN = "make a plan for this run: finefit plan MODEL DATA … -o FILE"


@dataclass(frozen=True, slots=True)
class Wish:
    """A run as its config says it: ``examples`` a step in ``batches``, ``limit_bytes`` if a budget was said."""

    config: Config
    model: ModelSpec
    hardware: HardwareSpec
    batches: Batches
    examples: int
    limit_bytes: int | None


def obeyed(plan: Plan, wish: Wish) -> Plan:
    """``plan`` with the prediction for the wish's batches, or ConfigError, DoesNotFit."""
    model = wish.model
    contradictions = [f"{key} is {said}, the plan has {has}" for key, said, has in _contradictions(plan, wish)]
    if plan.model != model.name:
        contradictions.insert(0, f"it is for {plan.model}, the model is {model.name}")
    mesh = mesh_of(plan.techniques)
    for key, degree in degrees(wish.config.memory.parallel).items():
        if (has := str(getattr(mesh, DEGREES.get(key, "order")))) != degree:
            contradictions.append(f"memory.parallel is {wish.config.memory.parallel}, the plan has {key} {has}")
    asked, zero = asked_by(wish.config), plan.technique("zero")
    if asked and not (isinstance(zero, Zero) and zero.does(asked)):
        contradictions.append(f"hardware.deepspeed is {asked.path}, the plan does not do what it says")
    if contradictions:
        raise ConfigError("the plan is of another run: " + "; ".join(contradictions), hint=AGAIN)
    if (devices := mesh.devices) != wish.hardware.count:
        hint = f"hardware.devices={devices} takes as many; or {AGAIN}"
        raise ConfigError(f"the plan is for {devices} devices, there are {wish.hardware.count}", hint=hint)
    work = wish.batches.among(mesh.data).work(*limits(plan))
    techniques: tuple[Technique, ...] = tuple(
        replace(t, most_steps=work.most_steps) if isinstance(t, Accumulation) else t for t in plan.techniques
    )
    try:
        made = judged(model, wish.hardware, techniques, work)
    except Unsuitable as error:
        raise ConfigError(f"the plan cannot be carried out: {error}", hint=AGAIN) from error
    predicted, seconds = made.predicted, made.seconds
    if _weights(predicted) != _weights(plan.predicted):
        sizes = f"{format_bytes(_weights(plan.predicted))} of weights, this one has {format_bytes(_weights(predicted))}"
        raise ConfigError(f"the plan is for another {model.name}: {sizes}", hint=AGAIN)
    limit = plan.budget_bytes if wish.limit_bytes is None else wish.limit_bytes
    if predicted.total_bytes > limit:
        needs, budget = format_bytes(predicted.total_bytes), format_bytes(limit)
        raise DoesNotFit(f"with this data the plan needs {needs}, the budget is {budget}", hint=AGAIN)
    return replace(
        plan, techniques=techniques, predicted=predicted, global_batch_size=wish.examples, budget_bytes=limit, seconds_per_step=seconds,
        gradient_accumulation_steps=work.most_steps, tokens_per_s=made.tokens_per_s,
        neighbours=(),  # they were judged for other batches
        notes=tuple(note for note in plan.notes if not note.startswith(WARNING)),
    )  # fmt: skip


def limits(plan: Plan) -> tuple[int, int, bool]:
    """How the plan splits a batch: most examples, most tokens (0 is no limit), whether into rectangles."""
    split = next(t for t in plan.techniques if isinstance(t, Accumulation))
    return split.micro_batch_size, split.micro_batch_tokens, plan.technique("packing") is None


def worst_rows(plan: Plan, model: ModelSpec, hardware: HardwareSpec, batches: Any) -> list[int]:
    """Rows of the micro-batch the plan was made for: of all in the run the one with the highest predicted peak."""
    most_of_each = limits(plan)
    largest = batches.work(*most_of_each).largest
    most = max(largest, key=lambda micro: footprint(rewrite(model, micro, plan.techniques), hardware).peak_bytes)
    rows: list[int] = batches.rows_of(most, *most_of_each)
    return rows


def _weights(predicted: Footprint) -> int:
    return predicted.moments["optimizer_step"].get("parameter", 0)


def _contradictions(plan: Plan, wish: Wish) -> Iterator[tuple[str, str, str]]:
    """(key, what the user said, what the plan has) for every key that was said and differs."""
    for (section, key), has in _settings(plan).items():
        part = getattr(wish.config, section) if section else wish.config
        said = getattr(part, key)
        if (key, said) == ("checkpointing", "all"):
            said = wish.model.num_hidden_layers
        if key in part.model_fields_set and said != "auto" and _word(said) != _word(has):
            yield (f"{section}.{key}" if section else key), _word(said), _word(has)


def _settings(plan: Plan) -> dict[tuple[str, str], Any]:
    """Config keys → what the plan does; what is not in the plan is not compared."""
    of: dict[str, Any] = {t.name: t for t in plan.techniques}
    split, lora = of["accumulation"], of.get("lora")
    found: dict[tuple[str, str], Any] = {
        ("", "method"): plan.method,
        ("memory", "precision"): of["precision"].kind,
        ("memory", "checkpointing"): of["checkpointing"].blocks if "checkpointing" in of else 0,
        ("memory", "packing"): "packing" in of,
        ("memory", "fused_backward_step"): "fused_backward_step" in of,
        ("memory", "fused_ops"): "fused_ops" in of,
        ("memory", "loss_chunk"): of["fused_loss"].chunk if "fused_loss" in of else 0,
        ("memory", "micro_batch_size"): split.micro_batch_size,
        ("memory", "micro_batch_tokens"): split.micro_batch_tokens,
    }
    offloads = dict.fromkeys(("activation_offload", "parameter_offload", "optimizer_offload"), "none")
    for name, absent in {**offloads, "allocator": "default"}.items():
        found["memory", name] = of[name].setting() if name in of else absent
    if of["precision"].kind != "fp32":  # where all is in fp32 there are no islands
        found["memory", "fp32_islands"] = of["fp32_islands"].parts if "fp32_islands" in of else ()
    if "checkpointing" in of:
        found["memory", "checkpointing_kind"] = of["checkpointing"].kind
    states = of.get("optimizer_states")
    found["train", "optimizer"] = states.kind if states else "adamw"
    found["memory", "rounding"] = states.rounding if states else "nearest"
    if "clipping" in of:
        found["train", "max_grad_norm"] = of["clipping"].max_norm
    if "quantized_base" in of:
        found |= {("qlora", key): getattr(of["quantized_base"], key) for key in ("bits", "scales")}
    if lora is not None:
        found |= {("lora", key): getattr(lora, key) for key in ("rank", "alpha", "dropout")}
        found["lora", "targets"] = lora.targets or "all"
    return found


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float | int) and not isinstance(value, bool) else str(value)
