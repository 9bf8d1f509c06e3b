"""Headroom that is used: where a run has measured less than its budget, a plan that takes less time within it.

A plan may have been made for less than there is: one from a file, one that went on after memory ran out, one whose
prediction was too high. Torch-free, as all that plans; what the run is like stays (``supervise.kept``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from . import planning, supervise
from .candidates import Question, rewrite
from .errors import ConfigError, DoesNotFit
from .footprint import STEP, Footprint
from .layout import Micro
from .plan import Plan
from .predict import footprint
from .search import search
from .session import Job
from .spec import ModelSpec
from .units import Budget, format_bytes, format_seconds

AFTER = 5  # steps of a plan, before another is looked for
WELL_UNDER = 0.9  # of the budget
FASTER = 0.95  # of the time of a step: what is nearer is not worth a new start
_LEAST_TIMES = 0.5  # a moment that took less than half of what was foreseen was no whole one


@dataclass(frozen=True, slots=True)
class Measured:
    """The rehearsal's footprint, and of what micro-batch it is."""

    micro: Micro
    footprint: Footprint


Better = Callable[[Job, Measured], Plan | None]
"""The plan to go on with; None where there is no better one."""


def nothing_better(_job: Job, _measured: Measured) -> None:
    """For a run that keeps its plan."""


def within(limit_bytes: int | None) -> Better:
    """Looks for the fastest plan within the run's budget, and within ``limit_bytes``."""

    def better(job: Job, measured: Measured) -> Plan | None:
        model = replace(ModelSpec.from_folder(job.model_folder), name=job.plan.model)
        try:
            question = planning.question_of(job.config, model, job.hardware, job.data)
            most = min(question.budget.limit_bytes, limit_bytes or 2**63)
            if measured.footprint.total_bytes > WELL_UNDER * most:
                return None
            times = _times(question, job.plan, measured)
            asked = replace(
                question, job=supervise.kept(question.job, job.plan), learnt=tuple(sorted(times.items())),
                budget=Budget(most, most, format_bytes(most)),
            )  # fmt: skip
            found = planning.foreseen(search(asked), model, job.hardware, job.data, times)
        except (DoesNotFit, ConfigError):  # nor does the present one, as it is reckoned: it stays
            return None
        is_better = found.seconds_per_step < FASTER * job.plan.seconds_per_step and found.predicted.total_bytes <= most
        return found if is_better else None

    return better


def _times(question: Question, plan: Plan, measured: Measured) -> dict[str, float]:
    """How many times as much as predicted each moment of a step took, weights and states apart."""
    said = footprint(rewrite(question.model, measured.micro, plan.techniques), question.hardware)
    found = {}
    for moment in STEP:
        foreseen, was = (supervise.beyond_states(one.moments.get(moment, {})) for one in (said, measured.footprint))
        if foreseen > 0:
            found[moment] = max(_LEAST_TIMES, was / foreseen)
    return found


def says(before: Plan, plan: Plan, measured: Measured) -> str:
    """Why ``plan`` is gone on with, in a sentence."""
    used = f"{format_bytes(measured.footprint.total_bytes)} of {format_bytes(plan.budget_bytes)} were in use"
    pace = f"{format_seconds(plan.seconds_per_step)} a step instead of {format_seconds(before.seconds_per_step)}"
    return f"{used}; now {supervise.changed(before, plan)}, foreseen {pace}"
