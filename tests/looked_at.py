"""What is looked at in a drawn combination: whether it is exact, and its bytes, predicted and measured."""

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from drawn import Drawn, peak
from finefit import predict
from finefit.build import load, rewritten
from finefit.engines.alone import Alone
from finefit.footprint import STEP
from finefit.ledger import Ledger
from finefit.loop import optimizer_step
from finefit.nn.optimizers import Optimizing
from finefit.rehearse import rehearse
from finefit.run import Example, MicroBatch, Run, trainable
from finefit.techniques import (
    FusedBackwardStep,
    Lora,
    OptimizerOffload,
    OptimizerStates,
    Precision,
    QuantizedBase,
    Technique,
)  # fmt: skip
from finefit.trace import own_state

CPU = torch.device("cpu")
RATE = 1e-2


def run_of(drawn: Drawn, techniques: Sequence[Technique], into: dict[str, Tensor] | None = None) -> Run:
    """The run of these techniques, whose adapters start anywhere but at nothing; what is whole of gradients goes ``into``."""
    run = rewritten(drawn.subject.config(), techniques, CPU)
    load(run, drawn.subject.fill)
    for number, (name, p) in enumerate(run.model.named_parameters()):
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05, generator=torch.Generator().manual_seed(number))
    if run.scaler.is_enabled():
        run.scaler.update(1024.0)  # small enough that no update is skipped
    if into is not None:
        _gather(run, into)
    run.optimizer.begin(trainable(run.model), Optimizing())
    return run


def _gather(run: Run, into: dict[str, Tensor]) -> None:
    """Gradients of the first step before they are clipped; of what is stepped in backward as they appear."""
    names = {p: name for name, p in run.model.named_parameters()}
    appeared: dict[str, Tensor] = {}
    for p in trainable(run.model):
        p.register_post_accumulate_grad_hook(lambda p: appeared.update({names[p]: p.grad.clone()}))
    clip = run.clip

    def seen(stepped: Sequence[nn.Parameter], world: Alone) -> Tensor:
        if not into:
            whole = {names[p]: one.grad.clone() for p, one in run.optimizer.stepped.items() if one.grad is not None}
            into.update(whole or appeared)
        return clip(stepped, world)

    run.clip = seen


def batches_of(run: Run, examples: Sequence[Example]) -> list[MicroBatch]:
    """As the trainer makes them."""
    return [run.collate([examples[i] for i in group]) for group in run.split([len(ids) for ids, _ in examples])]


@dataclass(frozen=True)
class Stepped:
    """What one step gave: its loss, all gradients before they were clipped, and the weights that train after it."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    before: dict[str, Tensor]


def without_dropout(techniques: Sequence[Technique]) -> tuple[Technique, ...]:
    return tuple(replace(t, dropout=0.0) if isinstance(t, Lora) else t for t in techniques)


def plain_of(drawn: Drawn) -> tuple[Technique, ...]:
    """Of a combination what says what is trained: method, numeric types, what the base is."""
    return tuple(t for t in without_dropout(drawn.techniques) if isinstance(t, Precision | QuantizedBase | Lora))


def stepped(drawn: Drawn, techniques: Sequence[Technique], half: torch.dtype | None = None) -> Stepped:
    """The first step, without dropout. The weights are first rounded to ``half``, where that is said."""
    gradients: dict[str, Tensor] = {}
    run = run_of(drawn, without_dropout(techniques), gradients)
    if half:
        for name, p in run.model.named_parameters():
            if p.is_floating_point() and "lora_" not in name:
                p.data.copy_(p.data.to(half))
    before = _weights(run)
    torch.manual_seed(5)
    loss = optimizer_step(run, batches_of(run, drawn.of_step(0)), RATE)[0]
    return Stepped(loss, gradients, _weights(run), before)


def _weights(run: Run) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}


def relative_error(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor] | None = None
) -> float:
    """The largest of any tensor; of how far it is from its ``start``, where that is said."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, one in expected.items():
        reference = one.double()
        moved = reference - start[name].double() if start else reference
        worst = max(worst, float((found[name].double() - reference).norm() / moved.norm().clamp_min(1e-30)))
    return worst


@dataclass(frozen=True)
class Exactness:
    """Relative errors of a combination's first step. ``of_plain``: what the plain run in its own types is off by."""

    loss: float
    gradients: float
    of_plain: float
    weights: float
    """Of their way, against the same combination without a step in backward and with its states on the device; 0 where
    it is that combination, or its steps are rounded by chance."""


def exactness(drawn: Drawn) -> Exactness:
    """In fp32 against the plain run; in fewer bits against that run in fp32 on the same weights."""
    kind = next(t.kind for t in drawn.techniques if isinstance(t, Precision))
    plain, found = plain_of(drawn), stepped(drawn, drawn.techniques)
    reference, of_plain = stepped(drawn, plain), 0.0
    if kind != "fp32":
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind)
        wide = tuple(Precision("fp32") if isinstance(t, Precision) else t for t in plain)
        exact = stepped(drawn, wide, half)
        of_plain, reference = relative_error(reference.gradients, exact.gradients), exact
    moved, by_chance = 0.0, any(isinstance(t, OptimizerStates) and t.rounding == "stochastic" for t in drawn.techniques)
    rest = tuple(t for t in drawn.techniques if not isinstance(t, FusedBackwardStep | OptimizerOffload))
    if len(rest) < len(drawn.techniques) and not by_chance:
        other = stepped(drawn, rest)
        moved = relative_error(found.weights, other.weights, other.before)
    return Exactness(
        abs(found.loss / reference.loss - 1), relative_error(found.gradients, reference.gradients), of_plain, moved
    )


@dataclass(frozen=True)
class Bytes:
    """Predicted and measured, of the rehearsal and of the steps."""

    predicted: dict[str, dict[str, int]]
    rehearsed: dict[str, dict[str, int]]
    predicted_peak: int
    measured_peak: int
    predicted_states: dict[str, int]
    measured_states: dict[str, int]
    left: dict[str, int]
    """By component, what is alive after the last step."""
    losses: tuple[float, ...]

    @property
    def off(self) -> float:
        """Predicted beyond what the rehearsal measured, as a share of it: the worst micro-batch, gradients there already."""
        return self.predicted_peak / max(sum(parts.values()) for parts in self.rehearsed.values()) - 1

    @property
    def off_in_steps(self) -> float:
        """The same of the steps themselves, whose first micro-batch finds no gradients."""
        return self.predicted_peak / self.measured_peak - 1


def bytes_of(drawn: Drawn) -> Bytes:
    """Rehearsed as training begins, then all steps under a ledger."""
    run = run_of(drawn, drawn.techniques)
    short = sorted(drawn.examples, key=lambda example: len(example[0]))[:2]
    worst = [drawn.examples[row] for row in drawn.worst]
    rehearsed = rehearse(run, worst, short, drawn.techniques, drawn.work.most_steps)
    states: dict[str, int] = {}
    clip = run.clip

    def seen(parameters: Sequence[nn.Parameter], world: Alone) -> Tensor:
        states.update(at_rest(run))
        return clip(parameters, world)

    run.clip = seen
    ledger, losses = Ledger(), []
    own_state(run, batches_of(run, drawn.of_step(0))[0], ledger)
    if run.scaler.is_enabled():
        ledger.own((run.scaler._scale, run.scaler._growth_tracker), "input")
    with ledger:
        for step in range(len(drawn.steps)):
            batches = batches_of(run, drawn.of_step(step))
            ledger.own((t for batch in batches for t in batch.tensors()), "input")
            losses.append(optimizer_step(run, batches, RATE)[0])
            del batches
    run.clip = clip
    highest = max(sum(live.values()) for _, _, _, live in ledger.curve())
    left: collections.Counter[str] = collections.Counter()
    for entry in (ledger.entries[i] for i in ledger._live.values()):
        left[entry.owner or "nobody"] += entry.n_bytes
    predicted = {moment: dict(drawn.predicted.moments[moment]) for moment in STEP}
    return Bytes(
        predicted, {moment: dict(parts) for moment, parts in rehearsed.moments.items()}, peak(drawn.predicted), highest,
        predict.states(drawn.layout()), states, dict(left), tuple(losses),
    )  # fmt: skip


def at_rest(run: Run) -> dict[str, int]:
    """Bytes of distinct storages by component, counted on the tensors themselves, while gradients are there."""
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    owners = {
        "parameter": list(run.model.parameters()),
        "gradient": gradients,
        "optimizer_state": run.optimizer.all_held(),
    }
    return {
        component: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        for component, tensors in owners.items()
    }
