"""Nothing fits: the argument, and ways out of which each has been tried and is said with what it really needs."""

import dataclasses
import re

import pytest
from test_search import AUTO, FULL, LAPTOP, LORA, MIB, QLORA, ask, pinned

from finefit import catalog, ladder
from finefit.batches import Uniform
from finefit.errors import DoesNotFit
from finefit.search import search
from finefit.spec import HardwareSpec, resolve_model
from finefit.units import format_bytes, parse_budget


@pytest.fixture(autouse=True)
def nothing_to_turn_on(monkeypatch):
    """What else a user could change, where the search has nothing of its own to turn on."""
    monkeypatch.setattr(ladder, "RUNGS", {"cpu": (), "cuda": ()})


def message_of(question):
    with pytest.raises(DoesNotFit) as caught:
        search(question)
    return caught.value


def test_does_not_fit_argues():
    error = message_of(ask("1GiB", FULL))
    lines = error.message.splitlines()
    assert re.match(r"small \(full\) needs at least 2\.\d\d GiB, laptop may use 1\.00 GiB\.", lines[0])
    assert "fp32 weights, matrix products in bf16 by autocast" in lines[1]
    assert "activations of 30 blocks are computed again in backward" in lines[1]
    assert re.match(r"  largest part: optimizer states, 1\.\d+ GiB, at \w+", lines[2])


def ways(hint):
    return hint.split("\n  or: ")


def applied(hint, question):
    """The question after the change that one way of a hint names, and nothing else."""
    job, batches = question.job, question.batches
    if gpu := re.match(r"on a larger device, (.+) \(", hint):
        hardware = HardwareSpec.from_name(gpu[1])
        budget = parse_budget(question.budget.text, hardware.memory_bytes)
        return dataclasses.replace(question, hardware=hardware, budget=budget)
    if budget := re.match(r"memory\.budget=(\w+)", hint):
        return dataclasses.replace(question, budget=parse_budget(budget[1], question.hardware.memory_bytes))
    if "train.max_grad_norm=0 " in hint:
        job = dataclasses.replace(job, pins=(("max_grad_norm", "0.0"),))
    if bits := re.search(r"qlora\.bits=(\d)", hint):
        job = dataclasses.replace(job, pins=(("qlora.bits", bits[1]),))
    if "memory.* " in hint:
        job = dataclasses.replace(job, pins=())
    if optimizer := re.search(r"train\.optimizer=(\w+)", hint):
        job = dataclasses.replace(job, pins=(*job.pins, ("optimizer", optimizer[1])))
    if precision := re.search(r"memory\.precision=(\w+)", hint):
        job = dataclasses.replace(job, precision=precision[1])
    if method := re.search(r"method=(\w+)", hint):
        job = dataclasses.replace(job, method=method[1])
    length = re.search(r"train\.max_length=(\d+)", hint)
    if length:
        job = dataclasses.replace(job, max_length=int(length[1]), longest=int(length[1]))
        batches = Uniform(job.global_batch_size, int(length[1]))
    return dataclasses.replace(question, job=job, batches=batches)


@pytest.mark.parametrize(
    ("budget", "job", "change"),
    [
        ("480MiB", pinned(checkpointing=0), "leave memory.* to the plan (auto) would"),
        ("600MiB", pinned(micro_batch_size=16, packing="false"), "leave memory.* to the plan (auto) would"),
        ("480MiB", pinned(AUTO, checkpointing=0), "leave memory.* to the plan (auto) would"),
        ("380MiB", pinned(checkpointing=0), "memory.* auto and train.max_length="),
        ("380MiB", LORA, "train.max_length="),
        ("250MiB", AUTO, "train.max_length="),
        ("270MiB", LORA, "method=qlora"),
        ("300MiB", FULL, "method=qlora would"),
        ("230MiB", FULL, "method=qlora train.max_length="),
        ("1GiB", FULL, "train.optimizer=adamw_8bit memory.precision=bf16 would"),
        ("430MiB", FULL, "method=lora train.max_length="),
        ("430MiB", pinned(FULL, packing="false"), "memory.* auto and method=lora train.max_length="),
    ],
)
def test_the_change_it_names_really_fits(budget, job, change):
    question = ask(budget, job)
    hint = message_of(question).hint
    assert hint.startswith(change), hint
    assert 1 <= len(ways(hint)) <= 3
    for way in ways(hint):
        changed = applied(way, question)
        plan = search(changed)
        assert plan.predicted.total_bytes <= changed.budget.limit_bytes
        said = f" would fit: {format_bytes(plan.predicted.total_bytes)}, {plan.tokens_per_s:,.0f} tokens/s"
        assert said in way


@pytest.mark.parametrize(("budget", "job"), [("380MiB", LORA), ("250MiB", AUTO), ("255MiB", QLORA)])
def test_the_length_it_names_is_the_longest_that_fits(budget, job):
    question = ask(budget, job)
    way = message_of(question).hint.partition("\n")[0]
    length = int(re.match(r"train\.max_length=(\d+)", way)[1])
    longer = applied(f"train.max_length={length + 64}", question)
    with pytest.raises(DoesNotFit):
        search(longer)


def test_the_ways_out_of_a_small_budget():
    """Another method is said to be a choice of quality; what is kept as it was asked for comes without one."""
    assert ways(message_of(ask("1GiB", FULL)).hint) == [
        "train.optimizer=adamw_8bit memory.precision=bf16 would fit: 993 MiB, 220 tokens/s "
        "(updates are rounded to bf16, moments to 8 bits: a choice of quality)",
        "method=lora would fit: 818 MiB, 309 tokens/s "
        "(adapters on a frozen base instead of all weights: a choice of quality)",
        "memory.budget=2568MiB would fit: 2.51 GiB, 210 tokens/s",
    ]


@pytest.mark.parametrize(("asked", "named"), [(8, 4), (4, 3), (3, 2)])
def test_fewer_bits_are_a_way_out_of_a_base_that_does_not_fit(asked, named):
    question = ask("1GiB", pinned(QLORA, **{"qlora.bits": asked}))
    smaller = search(
        dataclasses.replace(
            question, job=pinned(QLORA, **{"qlora.bits": named, "checkpointing": "all", "micro_batch_tokens": 1024})
        )
    )
    budget = f"{-(-smaller.predicted.total_bytes // MIB)}MiB"
    question = ask(budget, pinned(QLORA, **{"qlora.bits": asked}))
    (way,) = [way for way in ways(message_of(question).hint) if way.startswith("qlora.bits=")]
    assert way.startswith(f"qlora.bits={named} would fit: ") and "a choice of quality" in way
    plan = search(applied(way, question))
    assert plan.technique("quantized_base").bits == named
    assert f" would fit: {format_bytes(plan.predicted.total_bytes)}, " in way


def test_a_step_in_backward_is_a_way_out_where_clipping_alone_keeps_it_from_being_taken(monkeypatch):
    monkeypatch.setattr(ladder, "RUNGS", {"cpu": ((("fused_backward_step", "true"),),), "cuda": ()})
    job = dataclasses.replace(FULL, global_batch_size=2, max_length=256, longest=256)
    clipped = pinned(job, max_grad_norm=1.0)
    hint = ways(message_of(ask("2100MiB", clipped)).hint)
    (way,) = [way for way in hint if way.startswith("train.max_grad_norm=0 would fit: ")]
    assert way.endswith("(each weight is stepped in backward, and gradients are not clipped: a choice of quality)")
    plan = search(applied(way, ask("2100MiB", clipped)))
    assert plan.technique("fused_backward_step") and plan.technique("clipping").max_norm == 0.0
    assert f" would fit: {format_bytes(plan.predicted.total_bytes)}, " in way


def test_the_ways_out_of_a_small_card():
    """A budget that is a share is the same share of the smallest whole GPU that is enough."""
    card = HardwareSpec.from_name("RTX 4060")
    eight = resolve_model("meta-llama/Llama-3.1-8B")
    qlora, larger = ways(message_of(ask("96%", FULL, eight, card)).hint)
    assert qlora.startswith("method=qlora would fit: ")
    assert larger.startswith("on a larger device, H200 (140 GiB), it would fit: ")


def test_every_smaller_device_would_not_do():
    card = HardwareSpec.from_name("RTX 4060")
    question = ask("96%", LORA, resolve_model("meta-llama/Llama-3.1-8B"), card)
    named = next(way for way in ways(message_of(question).hint) if way.startswith("on a larger device"))
    found = applied(named, question).hardware
    for gpu in catalog.whole_gpus():
        if gpu.maker == "NVIDIA" and gpu.memory_mib * MIB < found.memory_bytes:
            smaller = applied(f"on a larger device, {gpu.name} (", question)
            with pytest.raises(DoesNotFit):
                search(smaller)


def test_when_no_change_helps_it_says_so():
    tiny = dataclasses.replace(LAPTOP, memory_bytes=100 * MIB)
    assert message_of(ask("100MiB", hardware=tiny)).hint == "a device with more memory"


def test_another_device_is_of_the_same_maker():
    card = HardwareSpec.from_name("RX 7900 XT")
    found = ways(message_of(ask("96%", FULL, resolve_model("meta-llama/Llama-3.1-8B"), card)).hint)
    named = next(way for way in found if way.startswith("on a larger device"))
    assert catalog.find_gpu(named.removeprefix("on a larger device, ").partition(" (")[0]).maker == "AMD"
