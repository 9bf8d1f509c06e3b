"""Neighbours of a plan: what is said of each is what its own prediction says; the chain of reasons; JSON both ways."""

import dataclasses
import io
import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from finefit import cli
from finefit.batches import Uniform
from finefit.candidates import Question, candidate
from finefit.explain import explained
from finefit.plan import Neighbour, Plan, load
from finefit.search import search
from finefit.spec import HardwareSpec, JobSpec, ModelSpec
from finefit.terminal.planned import plan_view
from finefit.units import format_bytes, parse_budget

SMALL = ModelSpec("small", "llama", 576, 1536, 30, 9, 3, 64, 49_152, tie_word_embeddings=True)
LAPTOP = HardwareSpec("laptop", "cpu", 16 * 2**30, matmul_flops_per_s=(("float32", 2e11), ("bfloat16", 1e12)),
                      bandwidth_bytes_per_s=2e10)  # fmt: skip
LORA = JobSpec(method="lora", global_batch_size=16, max_length=1024, longest=1024)
AUTO = dataclasses.replace(LORA, method="auto")


def ask(budget="700MiB", job=LORA):
    batches = Uniform(job.global_batch_size, job.longest)
    return Question(SMALL, LAPTOP, job, batches, parse_budget(budget, LAPTOP.memory_bytes))


def plan_of(question):
    return explained(question, search(question))


def beside(plan):
    return {neighbour.says: neighbour for neighbour in plan.neighbours}


def pinned(job=LORA, **pins):
    return dataclasses.replace(job, pins=tuple((key, str(value)) for key, value in pins.items()))


@pytest.fixture(scope="module")
def plan():
    return plan_of(ask())


def test_what_is_searched_for_is_not_changed(plan):
    found = search(ask())
    assert dataclasses.replace(plan, neighbours=(), reasons=found.reasons) == found
    assert plan.reasons[: len(found.reasons)] == found.reasons


def test_the_chain_ends_with_what_is_enough_and_what_is_left(plan):
    k = plan.technique("checkpointing").blocks
    enough, headroom = plan.reasons[-2:]
    less = beside(plan)[f"{k - 1} of 30 blocks checkpointed"]
    uses = f"{format_bytes(plan.predicted.total_bytes)} of 700 MiB"
    needs = format_bytes(less.peak_bytes)
    assert enough == f"checkpointing {k} of 30 blocks is enough: {uses}; {k - 1} would need {needs}"
    assert headroom == "headroom: 95.7 % of the device's 16.00 GiB is left free (memory.budget=700MiB)"
    assert plan_of(ask("8GiB")).reasons[-2].startswith("no block has to be checkpointed: ")


@pytest.mark.parametrize("budget", ["500MiB", "700MiB", "2GiB", "8GiB", "100MiB..700MiB"])
@pytest.mark.parametrize("job", [LORA, AUTO, pinned(packing="false")], ids=["lora", "auto", "padded"])
def test_verdicts_are_what_the_numbers_say(budget, job):
    found = plan_of(ask(budget, job))
    for one in found.neighbours:
        if one.verdict == "too large":
            limit = format_bytes(found.budget_bytes)
            assert (one.peak_bytes > found.budget_bytes, one.why) == (
                True, f"needs {format_bytes(one.peak_bytes)} of {limit}",
            )  # fmt: skip
        elif one.verdict == "slower":
            assert (one.peak_bytes <= found.budget_bytes, one.tokens_per_s < found.tokens_per_s) == (True, True)
            speeds = f"{one.tokens_per_s:,.0f} against {found.tokens_per_s:,.0f} tokens/s"
            assert one.why == f"fits and is slower: {speeds}"
        elif one.verdict == "no better" and one.peak_bytes:
            assert found.tokens_per_s <= one.tokens_per_s <= 1.02 * found.tokens_per_s
            assert found.predicted.total_bytes <= one.peak_bytes <= found.budget_bytes


def test_a_neighbour_is_predicted_as_itself(plan):
    question, split = ask(), plan.technique("accumulation")
    work = question.batches.work(split.micro_batch_size, split.micro_batch_tokens, False)
    k = plan.technique("checkpointing").blocks + 1
    found = candidate(question, split.micro_batch_size, split.micro_batch_tokens, work, k)
    one = beside(plan)[f"{k} of 30 blocks checkpointed"]
    speed = work.mean_real_tokens / found.seconds
    assert (found.predicted.total_bytes, speed, "slower") == (one.peak_bytes, one.tokens_per_s, one.verdict)


def test_quality_is_never_the_plans_to_choose(plan):
    near = beside(plan)
    for says in ("precision fp32", "precision bf16_mixed", "method qlora"):
        assert (near[says].verdict, "a choice of quality, so yours" in near[says].why) == ("not allowed", True)
    assert near["method full"].verdict == "too large"
    roomy = beside(plan_of(ask("8GiB", AUTO)))
    assert roomy["method lora"].why.startswith("auto takes full before it: ")


def test_what_the_user_fixed_is_said_and_what_it_would_be():
    near = beside(plan_of(ask("8GiB", pinned(checkpointing=7, packing="true"))))
    assert near["6 of 30 blocks checkpointed"].verdict == "not allowed"
    assert near["6 of 30 blocks checkpointed"].why.startswith("you said memory.checkpointing=7; it fits")
    assert near["without packing"].why.startswith("you said memory.packing=true; it ")
    assert beside(plan_of(ask("8GiB", pinned(fused_ops="false"))))["with fused_ops"] == Neighbour(
        "with fused_ops", "not allowed", "memory.fused_ops is switched off by you"
    )


def test_other_bits_of_a_base_are_told_with_what_they_would_need():
    job = dataclasses.replace(LORA, method="qlora")
    near = beside(plan_of(ask("8GiB", job)))
    found = {bits: near[f"a base in {bits} bits"] for bits in (8, 3, 2)}
    assert {one.verdict for one in found.values()} == {"not allowed"}
    assert all(f"a choice of quality, so yours (qlora.bits={bits}); it " in one.why for bits, one in found.items())
    assert found[8].peak_bytes > found[3].peak_bytes > found[2].peak_bytes > 0
    assert "a base in 4 bits" not in near


SHORT = JobSpec(method="full", global_batch_size=2, max_length=256, longest=256)


def test_a_step_in_backward_is_told_with_the_reason_it_is_not_taken():
    says = "with fused_backward_step"
    clipped = beside(plan_of(ask("8GiB", SHORT)))[says]
    assert (clipped.verdict, clipped.why[:22]) == ("not allowed", "gradients are clipped,")
    split = beside(plan_of(ask("8GiB", pinned(SHORT, max_grad_norm=0.0, micro_batch_size=1))))[says]
    assert split.why == "gradients of 2 micro-batches are added up before a step"
    whole = plan_of(ask("8GiB", pinned(SHORT, max_grad_norm=0.0, micro_batch_size=2, checkpointing="all")))
    assert beside(whole)[says].verdict == "slower" and beside(whole)[says].peak_bytes < whole.predicted.total_bytes
    off = beside(plan_of(ask("8GiB", pinned(SHORT, max_grad_norm=0.0, fused_backward_step="false"))))[says]
    assert (off.verdict, off.why) == ("not allowed", "you said memory.fused_backward_step=false")


def test_what_a_step_in_backward_rules_out_is_told_beside_it():
    plan = plan_of(ask("2100MiB", pinned(SHORT, max_grad_norm=0.0)))
    assert plan.technique("fused_backward_step")
    assert beside(plan)["precision fp16_mixed"].why.startswith("with a scaled loss a step is skipped as a whole")


def test_nothing_is_traced_for_an_explanation(monkeypatch, tmp_path):
    from finefit import coefficients

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # another test may have traced it
    monkeypatch.setattr(coefficients, "derive", lambda *_: pytest.fail("an explanation must not trace"))
    unknown = dataclasses.replace(ask(), model=dataclasses.replace(SMALL, name="other"))
    assert beside(plan_of(unknown))["without fused_loss"].why == "it only saves, and is exact"


def test_neighbours_are_read_back_and_older_files_have_none(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json").neighbours == plan.neighbours
    older = {key: value for key, value in plan.to_json().items() if key != "neighbours"}
    assert Plan.from_json(json.loads(json.dumps(older))).neighbours == ()


def test_the_view_shows_them_when_asked(plan):
    def shown(explain):
        out = Console(file=io.StringIO(), width=160)
        plan_view(plan.to_json(), out, explain=explain)
        return out.file.getvalue()

    assert "why not" not in shown(False)
    for one in plan.neighbours:
        assert re.search(rf"{re.escape(one.says)} +{one.verdict} +", shown(True))
    assert "headroom: 95.7 %" in shown(False)


def test_the_command_explains():
    words = ["plan", "SmolLM2-135M", "--gpu", "RTX 4090", "--method", "lora"]
    done = CliRunner().invoke(cli.app, [*words, "--explain"])
    assert (done.exit_code, "headroom: 4 % of the device's 23.99 GiB is left free" in done.output) == (0, True)
    data = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).output)
    assert {"says", "verdict", "why", "peak_bytes", "tokens_per_s"} == set(data["neighbours"][0])
