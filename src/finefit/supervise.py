"""Plan, run, and on running out of memory learn where it died and plan again: the only way back from measurement to planning.

What died at a moment that was foreseen to take less scales that moment's activations and temporaries; what died within
its prediction had less memory than was thought, and the limit falls to what there was. All that changes the result stays
as it was: method, precision, optimizer, the base's bits. Torch-free.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from . import keeper
from .candidates import Method, Question, rewrite
from .errors import ConfigError, DoesNotFit, OutOfMemory
from .plan import Plan
from .predict import footprint
from .search import search
from .spec import JobSpec
from .units import Budget, format_bytes

if TYPE_CHECKING:
    from .shortage import Shortage

MOST = keeper.MOST  # plans that are made after the first
SMALLER = keeper.LESS  # of what was foreseen where it died, what there may be at most if nobody knows
_MOST_TIMES = 8.0  # a moment that takes more than so often what was foreseen is no matter of a coefficient
_STATES = ("parameter", "gradient", "optimizer_state", "input")


@dataclass(frozen=True, slots=True)
class Lesson:
    """What runs that died have taught: moment -> how often as much it takes; what there is at most; what it is by guess."""

    times: Mapping[str, float] = field(default_factory=dict)
    limit_bytes: int = 2**63
    guess_bytes: int = 2**63
    says: str = ""


def learnt(question: Question, plan: Plan, shortage: "Shortage", before: Lesson) -> Lesson:
    """The lesson of one shortage on top of those before."""
    parts = plan.predicted.moments.get(shortage.moment, {})
    if shortage.micro:
        said = footprint(rewrite(question.model, shortage.micro, plan.techniques), question.hardware)
        parts = said.corrected(before.times).moments.get(shortage.moment, parts)
    foreseen = sum(parts.values())
    fixed = foreseen - beyond_states(parts)
    said_bytes = format_bytes(foreseen)
    if not shortage.held_bytes:
        guess = int(SMALLER * (foreseen or plan.predicted.peak_bytes))
        return replace(before, guess_bytes=guess, says=f"less could be had than the {said_bytes} that were foreseen")
    needed = shortage.held_bytes + shortage.asked_bytes
    if needed > foreseen > fixed and needed - fixed <= _MOST_TIMES * (foreseen - fixed):
        times = before.times.get(shortage.moment, 1.0) * (needed - fixed) / (foreseen - fixed)
        says = f"{format_bytes(needed)} were needed where {said_bytes} were foreseen"
        limit = min(before.limit_bytes, needed - 1)
        return replace(before, times={**before.times, shortage.moment: times}, limit_bytes=limit, says=says)
    says = f"{format_bytes(shortage.held_bytes)} could be had, {said_bytes} were foreseen"
    return replace(before, limit_bytes=min(before.limit_bytes, shortage.held_bytes), says=says)


def beyond_states(parts: Mapping[str, int]) -> int:
    """Of a moment, what is neither a weight nor a state of one: what a prediction can be wrong about."""
    return sum(n for component, n in parts.items() if component not in _STATES)


Foresee = Callable[[Plan, Mapping[str, float]], Plan]
"""What a run's data adds to a plan, by what was learnt."""


def planned_again(question: Question, plan: Plan, lesson: Lesson, before: Lesson, foresee: Foresee) -> Plan:
    """The plan that goes on where ``plan``, made by the lesson ``before``, failed; OutOfMemory with an argument where there
    is none. It needs less than ``plan``; less than the guess too, if it can be.
    """
    asked = replace(question, job=kept(question.job, plan), learnt=tuple(sorted(lesson.times.items())))
    since = {moment: times / before.times.get(moment, 1.0) for moment, times in lesson.times.items()}
    has = plan.predicted.corrected(since).total_bytes
    why: DoesNotFit | ConfigError | None = None
    known = min(lesson.limit_bytes, question.budget.limit_bytes, has - 1)
    for limit in (min(known, lesson.guess_bytes), min(known, int(SMALLER * has)), known):
        try:
            return _other(asked, plan, limit, lambda found: foresee(found, lesson.times))
        except (DoesNotFit, ConfigError) as error:
            why = why or error
    assert why is not None
    raise OutOfMemory(f"no plan is left: {why.message}", hint=why.hint) from why


def _other(question: Question, plan: Plan, limit: int, foresee: Callable[[Plan], Plan]) -> Plan:
    """The best plan within the limit, evaluations too, that is not ``plan``."""
    aim = limit
    while True:
        found = foresee(search(replace(question, budget=Budget(aim, aim, format_bytes(aim)))))
        if found.techniques != plan.techniques and found.predicted.total_bytes <= limit:
            return found
        aim = int(SMALLER * min(aim, found.predicted.total_bytes))


def kept(job: JobSpec, plan: Plan) -> JobSpec:
    """The wish with all that changes the result as the plan has it: a plan file may say what the config does not."""
    of: dict[str, Any] = {t.name: t for t in plan.techniques}
    states, base, lora, islands = (of.get(n) for n in ("optimizer_states", "quantized_base", "lora", "fp32_islands"))
    pins = {
        **dict(job.pins), "max_grad_norm": str(of["clipping"].max_norm),
        "optimizer": states.kind if states else "adamw", "rounding": states.rounding if states else "nearest",
        "fp32_islands": islands.setting() if islands else "",
    }  # fmt: skip
    if base:
        pins |= {"qlora.bits": str(base.bits), "qlora.scales": base.scales}
    adapter = {key: getattr(lora, key) for key in ("rank", "alpha", "dropout", "targets")} if lora else {}
    return replace(
        job, method=cast(Method, plan.method), precision=of["precision"].kind, pins=tuple(pins.items()), **adapter
    )


def changed(before: Plan, plan: Plan) -> str:
    """What of ``plan`` is another than before, in a sentence."""
    made = [t.describe() for t in plan.techniques if t not in before.techniques]
    gone = [f"without {t.name}" for t in before.techniques if plan.technique(t.name) is None]
    return "; ".join((*made, *gone)) or "the same plan"
