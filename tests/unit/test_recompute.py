"""Recomputation and offload in plans: what the search turns on, what it refuses, what it costs and where it is counted."""

import dataclasses
import itertools
import json

import pytest
from test_search import LAPTOP, LORA, SMALL, ask, blocks, pinned

from finefit.batches import Uniform
from finefit.candidates import candidate, candidates, rewrite, techniques_of
from finefit.config import load
from finefit.cost import seconds_per_step
from finefit.errors import ConfigError, DoesNotFit
from finefit.explain import explained
from finefit.layout import Micro
from finefit.plan import Plan
from finefit.search import search
from finefit.spec import HardwareSpec, resolve_model
from finefit.techniques import Checkpointing, Precision

NOTHING = {
    "activation_offload": "none",
    "checkpointing_kind": "block",
    "parameter_offload": "none",
    "optimizer_offload": "none",
}


def test_offload_is_turned_on_where_nothing_fits_without():
    with pytest.raises(DoesNotFit):
        search(ask("420MiB", pinned(**NOTHING)))
    plan = search(ask("420MiB"))
    assert plan.technique("activation_offload").place == "disk"
    assert "nothing fits without activation_offload, so it is turned on" in plan.reasons
    assert plan.predicted.total_bytes <= plan.budget_bytes


def test_nested_groups_are_turned_on_where_there_may_be_no_offload():
    plan = search(ask("430MiB", pinned(activation_offload="none")))
    assert plan.technique("checkpointing").kind == "nested"
    assert plan.technique("activation_offload") is None
    assert search(ask("450MiB", pinned(activation_offload="none"))).technique("checkpointing").kind == "block"


def test_with_room_neither_is_on_and_both_stand_among_the_neighbours():
    question = ask("600MiB")
    plan = explained(question, search(question))
    assert plan.technique("activation_offload") is None
    assert plan.technique("checkpointing").kind == "block"
    beside = {neighbour.says: neighbour for neighbour in plan.neighbours}
    for says in ("with activation_offload", "with checkpointing_kind"):
        assert beside[says].peak_bytes < plan.predicted.total_bytes
        assert beside[says].verdict == "slower"


def test_what_is_said_is_kept_to():
    """As few blocks as fit, but one at least: without any there is nothing to offload."""
    plan = search(ask("16GiB", pinned(activation_offload="disk")))
    assert blocks(plan) == 1
    assert plan.technique("activation_offload").place == "disk"
    for kind in ("attention", "mlp", "selective", "nested"):
        plan = search(ask("16GiB", pinned(checkpointing_kind=kind, checkpointing="all")))
        assert plan.technique("checkpointing").kind == kind


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        ({"activation_offload": "host"}, "a CPU's memory is the host's"),
        ({"activation_offload": "disk", "checkpointing": "0"}, "without checkpointed blocks"),
        ({"activation_offload": "disk", "checkpointing_kind": "nested"}, "checkpointing_kind=block"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(pins, why):
    with pytest.raises(ConfigError, match=why):
        search(ask("16GiB", pinned(**pins)))


@pytest.mark.parametrize(
    ("pins", "most"), [({"activation_offload": "disk"}, 0), ({"checkpointing_kind": "nested"}, 1), (NOTHING, 0)]
)
def test_the_peak_falls_with_every_block(pins, most):
    """What the bisection relies on; where one more block makes another group it may rise by an input."""
    question = ask("16GiB", pinned(**pins, micro_batch_tokens=4096))
    work = question.work(16, 4096)
    peaks = [candidate(question, 16, 4096, work, k).predicted.peak_bytes for k in range(1, 31)]
    one_input = work.largest[0].tokens * SMALL.hidden_size * 2
    assert max(after - before for before, after in itertools.pairwise(peaks)) <= most * one_input
    assert peaks[-1] < peaks[0] / 2


def test_a_way_costs_what_it_computes_again():
    """None < selective, halves < block < nested; offload next to nothing where the link is fast."""
    card = HardwareSpec.from_name("RTX 4090")
    eight = resolve_model("meta-llama/Llama-3.1-8B")

    def seconds(**pins):
        question = ask("90%", pinned(LORA, **pins), eight, card, Uniform(16, 4096))
        work = question.work(16, 8192)
        layout = rewrite(eight, work.largest[0], techniques_of(question, 16, 8192, work, 32 if pins else 0))
        return seconds_per_step(layout, work, card)

    none, block, nested = seconds(), seconds(checkpointing_kind="block"), seconds(checkpointing_kind="nested")
    halves = [seconds(checkpointing_kind=kind) for kind in ("attention", "mlp")]
    assert none < seconds(checkpointing_kind="selective") < min(halves) < max(halves) < block < nested
    assert block - none == pytest.approx(sum(halves) - 2 * none, rel=0.05)
    assert 1 < seconds(activation_offload="host") / block < 1.01
    assert seconds(activation_offload="disk") > seconds(activation_offload="host")


def test_pinned_buffers_are_counted_on_the_host():
    card = HardwareSpec.from_name("RTX 4090")
    eight = resolve_model("meta-llama/Llama-3.1-8B")
    found = {}
    for place in ("host", "disk", "none"):
        question = ask("90%", pinned(LORA, activation_offload=place, checkpointing="all"), eight, card)
        found[place] = next(iter(candidates(question, 2**40)))
    one = 2 ** (found["host"].work.largest[0].tokens * eight.hidden_size * 2 - 1).bit_length()
    assert found["host"].predicted.host["backward_peak"] == {"copies": 32 * one}
    assert found["disk"].predicted.host["backward_peak"] == {"copies": 2 * one}
    assert found["none"].predicted.host == {}


def test_several_devices_have_blocks_and_nothing_else():
    two = dataclasses.replace(HardwareSpec.from_name("RTX 4090"), count=2)
    with pytest.raises(ConfigError, match="planned for one device"):
        search(ask("90%", pinned(checkpointing_kind="nested", checkpointing="all"), SMALL, two))


def test_a_plan_file_has_them_and_an_older_one_is_read_without():
    plan = search(ask("420MiB"))
    data = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(data) == plan
    for technique in data["techniques"]:
        technique.pop("kind", None) if technique["name"] == "checkpointing" else None
    assert Plan.from_json(data).technique("checkpointing").kind == "block"


def test_groups_are_about_the_root():
    assert [Checkpointing(k, "nested").group for k in (1, 2, 4, 5, 9, 32, 80)] == [1, 2, 2, 3, 3, 6, 9]
    assert Checkpointing(80).group == 1
    layout = rewrite(SMALL, Micro(8, 8, 8), (Precision("fp32"), Checkpointing(30, "nested")))
    assert (layout.nested, layout.recomputed) == (6, "checkpointed")


@pytest.mark.parametrize(
    ("said", "pins"),
    [
        (["memory.activation_offload=false"], {"activation_offload": "none"}),
        (["memory.activation_offload=disk", "memory.checkpointing_kind=selective"],
         {"activation_offload": "disk", "checkpointing_kind": "selective"}),
        ([], {}),
    ],
)  # fmt: skip
def test_keys_of_a_run_file(said, pins):
    config = load(None, said, {"model": "m"})
    found = dict(config.memory.pins())
    assert {key: found.get(key) for key in ("activation_offload", "checkpointing_kind") if key in found} == pins
    assert LAPTOP.kind == "cpu"
