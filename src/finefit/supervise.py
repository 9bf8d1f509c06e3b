"""Plan, run, and on running out of memory learn where it died and plan again: the only way back from measurement to planning.

What died at a moment that was foreseen to take less scales that moment's activations and temporaries; what died within
its prediction had less memory than was thought, and the limit falls to what there was. All that changes the result stays
as it was: method, precision, optimizer, the base's bits. Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from .candidates import Method, Question, rewrite
from .errors import ConfigError, DoesNotFit, OutOfMemory
from .plan import Plan
from .predict import footprint
from .search import search
from .techniques import Precision
from .units import Budget, format_bytes

if TYPE_CHECKING:
    from .shortage import Shortage

MOST = 5  # plans that are made after the first
SMALLER = 0.8  # of what was foreseen where it died, what there may be at most if nobody knows
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
    foreseen, fixed = sum(parts.values()), sum(n for component, n in parts.items() if component in _STATES)
    said_bytes = format_bytes(foreseen)
    if not shortage.held_bytes:
        guess = int(SMALLER * (foreseen or plan.predicted.peak_bytes))
        return replace(before, guess_bytes=guess, says=f"less could be had than the {said_bytes} that were foreseen")
    needed = shortage.held_bytes + shortage.asked_bytes
    if needed > foreseen > fixed and needed - fixed <= _MOST_TIMES * (foreseen - fixed):
        times = before.times.get(shortage.moment, 1.0) * (needed - fixed) / (foreseen - fixed)
        says = f"{format_bytes(needed)} were needed where {said_bytes} were foreseen"
        return replace(
            before,
            times={**before.times, shortage.moment: times},
            limit_bytes=min(before.limit_bytes, needed),
            says=says,
        )
    says = f"{format_bytes(shortage.held_bytes)} could be had, {said_bytes} were foreseen"
    return replace(before, limit_bytes=min(before.limit_bytes, shortage.held_bytes), says=says)


def planned_again(question: Question, plan: Plan, lesson: Lesson) -> Plan:
    """The plan that goes on where ``plan`` failed; OutOfMemory with an argument where there is none.

    It needs less than ``plan``; less than the guess too, if it can be.
    """
    precision = next(t for t in plan.techniques if isinstance(t, Precision))
    job = replace(question.job, method=cast(Method, plan.method), precision=precision.kind)
    known = min(lesson.limit_bytes, question.budget.limit_bytes)
    asked = replace(question, job=job, learnt=tuple(sorted(lesson.times.items())))
    has = plan.predicted.corrected(lesson.times).total_bytes
    why: DoesNotFit | ConfigError | None = None
    for limit in (min(known, lesson.guess_bytes), min(known, int(SMALLER * has)), min(known, has - 1)):
        try:
            return _other(asked, plan, limit)
        except (DoesNotFit, ConfigError) as error:
            why = why or error
    assert why is not None
    raise OutOfMemory(f"no plan is left: {why.message}", hint=why.hint) from why


def _other(question: Question, plan: Plan, limit: int) -> Plan:
    """The best plan within the limit that is not ``plan``."""
    found = search(replace(question, budget=Budget(limit, limit, format_bytes(limit))))
    while found.techniques == plan.techniques:
        limit = int(SMALLER * min(limit, found.predicted.total_bytes))
        found = search(replace(question, budget=Budget(limit, limit, format_bytes(limit))))
    return found


def changed(before: Plan, plan: Plan) -> str:
    """What of ``plan`` is another than before, in a sentence."""
    return "; ".join(t.describe() for t in plan.techniques if t not in before.techniques) or "without what took memory"
