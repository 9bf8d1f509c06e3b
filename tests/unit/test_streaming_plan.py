"""Streamed weights on paper: when the search turns them on, what that costs, and where they cannot be."""

import dataclasses

import pytest
from test_search import FULL, LAPTOP, LORA, SMALL, ask, pinned

from finefit import phases, predict
from finefit.candidates import rewrite
from finefit.cost import seconds_per_step
from finefit.errors import ConfigError, DoesNotFit
from finefit.explain import explained
from finefit.layout import Micro
from finefit.nn import arena, side_stream
from finefit.search import search
from finefit.spec import HardwareSpec, JobSpec, resolve_model
from finefit.techniques import Lora, ParameterOffload, Precision, QuantizedBase, Unsuitable, Zero, parameter_offload

SHORT = JobSpec(method="lora", global_batch_size=4, max_length=512, longest=512)
EIGHT = resolve_model("meta-llama/Llama-3.1-8B")
MICRO = Micro(512, 512, 512)


def test_what_is_on_paper_is_what_is_laid_out():
    """Plans need no torch, so these numbers stand twice."""
    assert (parameter_offload.ALIGNED, parameter_offload.STAGES) == (arena.ALIGNED, 2 * side_stream.STAGE)


def layout_of(model=SMALL, *techniques):
    return rewrite(model, MICRO, (Precision("bf16"), *techniques))


def test_a_model_larger_than_the_memory_is_planned_with_its_weights_on_the_disk():
    """15 GiB of weights where 4 GiB may be used: nothing else is changed, and the plan says so."""
    with pytest.raises(DoesNotFit):
        search(ask("4GiB", pinned(SHORT, parameter_offload="none"), EIGHT))
    question = ask("4GiB", SHORT, EIGHT)
    plan = search(question)
    assert plan.technique("parameter_offload") == ParameterOffload("disk")
    assert plan.predicted.total_bytes <= 4 * 2**30
    assert "nothing fits without parameter_offload, so it is turned on" in plan.reasons
    assert explained(question, plan).technique("parameter_offload") == ParameterOffload("disk")


def test_where_it_fits_nothing_is_streamed_and_explain_says_what_it_would_do():
    question = ask("1GiB", LORA)
    plan = explained(question, search(question))
    assert plan.technique("parameter_offload") is None
    beside = {n.says: n for n in plan.neighbours}["with parameter_offload"]
    assert beside.verdict == "slower"
    assert 0 < beside.peak_bytes < plan.predicted.total_bytes


def test_a_gpu_streams_from_its_host_before_it_does_from_a_disk():
    card = HardwareSpec.from_name("RTX 4060")
    plan = search(ask("96%", SHORT, EIGHT, card))
    assert plan.technique("parameter_offload") == ParameterOffload("host")
    said = search(ask("96%", pinned(SHORT, parameter_offload="disk"), EIGHT, card))
    assert said.technique("parameter_offload") == ParameterOffload("disk")
    assert said.seconds_per_step > plan.seconds_per_step


def test_a_host_that_is_too_small_leaves_the_disk():
    card = dataclasses.replace(HardwareSpec.from_name("RTX 4060"), host_memory_bytes=8 * 2**30)
    assert search(ask("96%", SHORT, EIGHT, card)).technique("parameter_offload") == ParameterOffload("disk")
    with pytest.raises(ConfigError, match=r"14\.96 GiB of the host's memory, which is 8\.00 GiB"):
        search(ask("96%", pinned(SHORT, parameter_offload="host"), EIGHT, card))


def test_what_the_user_said_is_kept_to():
    plan = search(ask("4GiB", pinned(LORA, parameter_offload="disk")))
    assert plan.technique("parameter_offload") == ParameterOffload("disk")


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (pinned(LORA, parameter_offload="host"), "a CPU's memory is the host's"),
        (pinned(FULL, parameter_offload="disk"), "weights that train are not streamed"),
    ],
)
def test_where_it_cannot_be_it_says_why(job, why):
    with pytest.raises(ConfigError, match=why):
        search(ask("8GiB", job))


def test_several_devices_and_two_blocks_have_nothing_to_stream():
    with pytest.raises(Unsuitable, match="weights are streamed to one device"):
        layout_of(SMALL, Lora(), Zero(3, 2), ParameterOffload("host"))
    with pytest.raises(Unsuitable, match="the model has 2 blocks"):
        layout_of(dataclasses.replace(SMALL, num_hidden_layers=2), Lora(), ParameterOffload("disk"))


def test_an_arena_is_two_blocks_or_the_largest_table():
    """Of Llama 3.1 8B: a head of 128,256 rows, and blocks of 218 M elements, in 16 bits and in 4."""
    block = sum(p.numel for p in EIGHT.block_parameters())
    head = 128_256 * 4096 * 2
    assert layout_of(EIGHT, Lora(), ParameterOffload("disk")).arena == head > 2 * 2 * block
    small = dataclasses.replace(EIGHT, vocab_size=32_000)
    assert layout_of(small, Lora(), ParameterOffload("disk")).arena == 2 * 2 * block
    packed = layout_of(small, QuantizedBase(), Lora(), ParameterOffload("disk")).arena
    assert packed == 32_000 * 4096 * 2 > 2 * block * 0.52
    states = predict.states(layout_of(EIGHT, Lora(), ParameterOffload("disk")))
    adapters = 4 * sum(g.numel * g.count for g in layout_of(EIGHT, Lora()).groups if g.trainable)
    assert states["parameter"] == head + adapters + 4096 * 2  # and the last norm


def test_the_host_of_a_gpu_has_every_streamed_byte_and_of_a_disk_two_pieces():
    layouts = [layout_of(EIGHT, Lora(), ParameterOffload(place)) for place in ("host", "disk")]
    host, disk = (phases.host(one, {"eval": {"parameter": 1}}, "cuda")["eval"] for one in layouts)
    weights = sum(g.numel * g.count * 2 for g in layouts[0].groups if g.place)
    assert host["copies"] == weights == 2 * EIGHT.num_parameters - 4096 * 2
    assert disk["copies"] == 128 * 2**20


def test_nothing_of_a_file_is_mapped_that_is_streamed_from_it():
    resident, linked = (phases.host(layout_of(EIGHT, Lora(), *more), {"load": {}}, "cpu")["load"].get("mapped", 0)
                        for more in ((), (ParameterOffload("disk"),)))  # fmt: skip
    assert (resident, linked) == (phases.MAPPED_AT_ONCE, 2 * 4096)


def seconds(hardware, question, *techniques):
    work = question.work(16, 1024)
    return seconds_per_step(layout_of(EIGHT, *techniques), work, hardware), work


@pytest.mark.parametrize("rate", [1e8, 1e9, 1e15])
def test_streaming_takes_as_long_as_the_disk_where_that_is_slower_than_the_products(rate):
    laptop = dataclasses.replace(LAPTOP, disk_bytes_per_s=rate, bandwidth_bytes_per_s=1e11)
    question = ask("90%", SHORT, EIGHT, laptop)
    alone, work = seconds(laptop, question, Lora())
    streamed, _ = seconds(laptop, question, Lora(), ParameterOffload("disk"))
    blocks = 2 * 2 * sum(p.numel * n for p, n in EIGHT.block_tensors())
    least = work.mean_steps * blocks / min(rate, 1e11)
    assert streamed >= max(alone, least)
    assert streamed <= alone + 1.2 * least
