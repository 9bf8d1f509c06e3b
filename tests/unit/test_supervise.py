"""What a run that died teaches, and the plan that goes on: pure functions of the question, the plan and the shortage."""

from dataclasses import replace

import pytest

from finefit.batches import Uniform
from finefit.candidates import Question, rewrite
from finefit.errors import OutOfMemory
from finefit.layout import Micro
from finefit.obey import limits
from finefit.predict import footprint
from finefit.search import search
from finefit.shortage import Shortage
from finefit.spec import HardwareSpec, JobSpec, resolve_model
from finefit.supervise import Lesson, changed, learnt, planned_again
from finefit.units import parse_budget

MIB = 2**20
CPU = HardwareSpec("a CPU", "cpu", 16 * 2**30, matmul_flops_per_s=(("float32", 1e11),), bandwidth_bytes_per_s=1e10)
MODEL = resolve_model("SmolLM2-135M")


def question(**wish):
    job = JobSpec(**{"method": "lora", "global_batch_size": 16, "max_length": 512, "longest": 512, **wish})
    return Question(MODEL, CPU, job, Uniform(16, 512), parse_budget("90%", CPU.memory_bytes))


def again(asked, plan, lesson, before=Lesson()):  # noqa: B008
    return planned_again(asked, plan, lesson, before, lambda found, _times: found)


def test_more_than_was_foreseen_scales_what_the_moment_makes_and_no_state():
    asked = question()
    plan, micro = search(asked), Micro(1024, 512, 512)
    said = footprint(rewrite(MODEL, micro, plan.techniques), CPU).moments["backward_peak"]
    made = said["activation"] + said["temporary"]
    met = Shortage("backward_peak", "", 3, micro, sum(said.values()) + made // 2 - 7, 7)
    lesson = learnt(asked, plan, met, Lesson())
    assert lesson.times == {"backward_peak": pytest.approx(1.5, abs=1e-6)}
    more = learnt(asked, plan, Shortage("backward_peak", "", 3, micro, sum(said.values()) + made - 7, 7), lesson)
    assert more.times == {"backward_peak": pytest.approx(2.0, abs=1e-6)}
    corrected = plan.predicted.corrected(lesson.times)
    assert corrected.moments["loss"] == plan.predicted.moments["loss"]
    assert corrected.moments["backward_peak"]["parameter"] == plan.predicted.moments["backward_peak"]["parameter"]


def test_less_than_was_foreseen_lowers_the_limit_to_what_there_was():
    asked = question()
    plan = search(asked)
    lesson = learnt(asked, plan, Shortage("loss", "", 0, None, 400 * MIB, MIB), Lesson())
    assert (lesson.times, lesson.limit_bytes) == ({}, 400 * MIB)
    assert again(asked, plan, lesson).predicted.total_bytes <= 400 * MIB


def test_a_smaller_micro_batch_comes_before_checkpointing_and_that_before_offload():
    asked = question()
    plan, on = search(asked), []
    for limit in (900, 480, 300, 220):
        plan = again(asked, plan, Lesson(limit_bytes=limit * MIB))
        on.append({t.name for t in plan.techniques} & {"checkpointing", "parameter_offload", "activation_offload"})
    assert on[0] == set() and on[1:] == sorted(on[1:], key=len)
    assert "checkpointing" in on[2] and "parameter_offload" in on[3]


def test_what_changes_the_result_stays_as_it_was():
    """Of method=auto the method that was found, and its precision; the base's bits are the user's anyway."""
    asked = question(method="auto")
    plan = search(asked)
    other = again(asked, plan, Lesson(limit_bytes=plan.predicted.total_bytes // 2))
    assert plan.method == other.method == "full"
    assert plan.technique("precision") == other.technique("precision")
    assert changed(plan, other).startswith("micro-batches of at most")


def test_a_guess_that_nothing_meets_gives_way_to_the_smallest_step_down():
    asked = question()
    plan = search(asked)
    other = again(asked, plan, Lesson(guess_bytes=MIB))
    assert other.predicted.total_bytes <= 0.8 * plan.predicted.total_bytes


def test_a_limit_that_nothing_meets_ends_with_the_argument():
    asked = question()
    with pytest.raises(
        OutOfMemory, match=r"no plan is left: HuggingFaceTB/SmolLM2-135M \(lora\) needs at least"
    ) as caught:
        again(asked, search(asked), Lesson(limit_bytes=10 * MIB))
    assert "would fit" in caught.value.hint


@pytest.mark.parametrize(
    ("wish", "pins", "names"),
    [
        ({"rank": 32, "alpha": 7.0, "dropout": 0.1, "targets": ("q_proj",)}, {"optimizer": "adamw_8bit", "fp32_islands": "norms"},
         ("lora", "optimizer_states", "fp32_islands")),
        ({"method": "full"}, {"rounding": "stochastic", "optimizer": "lion"}, ("optimizer_states",)),
        ({"method": "qlora"}, {"qlora.bits": "3", "qlora.scales": "plain"}, ("quantized_base", "lora")),
    ],
)  # fmt: skip
def test_what_a_plan_file_said_and_the_config_does_not_stays(wish, pins, names):
    """Rank, optimizer, clipping, rounding, bits, islands: the plan obeyed them, so the next one does."""
    said = (*pins.items(), ("max_grad_norm", "0.0"))
    plan = search(question(**wish, precision="bf16", pins=said))
    other = again(question(), plan, Lesson(limit_bytes=plan.predicted.total_bytes * 3 // 4))
    assert plan.method == other.method
    for name in (*names, "clipping", "precision"):
        assert plan.technique(name) is not None and plan.technique(name) == other.technique(name)


def test_a_second_lesson_does_not_count_the_first_again():
    asked = question()
    plan, lesson = search(asked), Lesson(times={"backward_peak": 2.0}, limit_bytes=900 * MIB)
    first = again(asked, plan, lesson)
    second = again(asked, first, Lesson(times={"backward_peak": 2.0}), lesson)
    assert second.predicted.total_bytes < first.predicted.total_bytes
    raw = footprint(rewrite(MODEL, Uniform(16, 512).work(*limits(second)).largest[0], second.techniques), CPU)
    assert second.predicted.moments["backward_peak"] == raw.corrected(lesson.times).moments["backward_peak"]


def test_what_evaluations_add_counts_too():
    asked, plan = question(), search(question())

    def foresee(found, _times):
        more = {"eval": {"temporary": found.predicted.peak_bytes * 5 // 4}}
        return replace(found, predicted=replace(found.predicted, moments={**found.predicted.moments, **more}))

    found = planned_again(asked, plan, Lesson(limit_bytes=600 * MIB), Lesson(), foresee)
    assert found.predicted.total_bytes == found.predicted.at("eval") <= 600 * MIB
