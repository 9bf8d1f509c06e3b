"""Ranks that share every weight against one process: loss, norm and weights; bytes against the prediction."""

import math

import pytest
from pool import note
from test_data_ranks import BASE, CLIPPED, CONFIG, FULL, LENGTHS, LORA, MICRO, SGD, are_alike, as_alone, differences

from tiny import FAMILIES

PLAIN = ({"name": "precision", "kind": "fp32"},)
TECHNIQUES = {
    "full": FULL,
    "checkpointed": (*FULL, {"name": "checkpointing", "blocks": 3}),
    "lora": (*FULL, SGD, LORA),
    "plain": PLAIN,
}
QUICK = ("full", "lora")
TWO = {"tensor": 2}
FOUR = {
    "four": {"tensor": 4}, "data": {"tensor": 2, "replicas": 2}, "zero1": {"tensor": 2, "shards": 2, "stage": 1},
    "zero2": {"tensor": 2, "shards": 2, "stage": 2}, "zero3": {"tensor": 2, "shards": 2, "stage": 3},
    "pipeline": {"tensor": 2, "stages": 2}, "gpipe": {"tensor": 2, "stages": 2, "schedule": "gpipe"},
}  # fmt: skip
UNTIED = {**CONFIG, "tie_word_embeddings": False}


def learns_the_same(ranks, mesh, kind, config=CONFIG):
    stepped_by_sgd = SGD in TECHNIQUES[kind]
    found, alone = as_alone(ranks, mesh, TECHNIQUES[kind], config, rate=1e-2 if stepped_by_sgd else 1e-4)
    # Products are summed in another order, so more is lost by rounding than with whole ones.
    are_alike(found, alone, largest=4e-6)
    note(mesh, kind, "exact", ranks.size)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in TECHNIQUES]
)
def test_ranks_learn_what_one_process_does(two, kind):
    learns_the_same(two, TWO, kind)


@pytest.mark.slow
def test_a_head_of_its_own_is_cut_by_vocabulary_too(two):
    learns_the_same(two, TWO, "full", UNTIED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TECHNIQUES)
@pytest.mark.parametrize("mesh", FOUR)
def test_so_do_those_of_meshes(four, mesh, kind):
    learns_the_same(four, FOUR[mesh], kind, {**CONFIG, "num_key_value_heads": 4})


def test_a_step_that_a_scaler_skips_is_skipped_by_all(two):
    wanted = [{"name": "precision", "kind": "fp16_mixed"}, *BASE, CLIPPED, MICRO]
    found, alone = (two.call("trained", mesh, wanted, CONFIG, 4, LENGTHS, 1e-4)[0] for mesh in (TWO, {}))
    assert found["scale"] == alone["scale"]
    for ours, theirs in zip(found["steps"], alone["steps"], strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=2e-3)
        assert math.isfinite(ours[1]) == math.isfinite(theirs[1])


# Olmo's norms have no weights; of the others each has something that the rest has not.
@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "qwen2", "qwen2 with windows", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "smollm3", "cohere",
        "ernie4_5", "exaone", "exaone4", "gemma", "glm", "glm4", "granite", "helium", "internlm3", "olmo", "seed_oss",
    ],
)  # fmt: skip
def test_families_learn_what_they_do_alone(two, name, packed):
    config = {"family": name.split(" ")[0], "num_hidden_layers": 3, **FAMILIES[name]}
    wanted = [*(FULL if packed else PLAIN), SGD, CLIPPED, MICRO]  # AdamW would make steps of rounding
    found, alone = (two.call("trained", mesh, wanted, config, 2, LENGTHS, 1e-2)[0] for mesh in (TWO, {}))
    for ours, theirs in zip(found["steps"], alone["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert differences(found["weights"], alone["weights"])[1] < 1e-6


KINDS = ("fp32", "bf16_mixed", "bf16 lora", "checkpointed", "8-bit states")


def bytes_as_predicted(ranks, mesh, kind, micro_steps):
    """To the byte for states; predicted and measured at the peak."""
    more = {
        "bf16 lora": [{"name": "lora", "rank": 4}], "checkpointed": [{"name": "checkpointing", "blocks": 4}],
        "8-bit states": [{"name": "optimizer_states", "kind": "adamw_8bit", "chunk": 2**12}],
    }.get(kind, [])  # fmt: skip
    precision = {"checkpointed": "bf16_mixed", "8-bit states": "fp32"}.get(kind, kind.partition(" ")[0])
    techniques = [{"name": "precision", "kind": precision}, *more, *BASE, CLIPPED, {**MICRO, "most_steps": micro_steps}]
    config = {**UNTIED, "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 512}
    found = ranks.call("measured", mesh, techniques, config, (128, 128), micro_steps)
    for predicted, measured in (rank["states"] for rank in found):
        assert predicted == measured
    note(mesh, kind, "bytes", ranks.size)
    return [[max(moment[i] for moment in rank["moments"].values()) for i in (0, 1)] for rank in found]


ROWS = 256 * 128 * 4
"""Bytes of what was sent last: gloo's thread lets go of it when it comes to it, seldom after the next is there."""


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_ranks_bytes_are_those_that_are_predicted(two, kind, micro_steps):
    for predicted, measured in bytes_as_predicted(two, TWO, kind, micro_steps):
        assert predicted == pytest.approx(measured, abs=0.01 * measured + ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", FOUR)
def test_so_are_those_of_meshes(four, mesh, kind, micro_steps):
    for predicted, measured in bytes_as_predicted(four, FOUR[mesh], kind, micro_steps):
        assert predicted == pytest.approx(measured, rel=0.03)


CUT = {
    "full": (FULL, CONFIG), "lora": ((*FULL, LORA), CONFIG),
    "8-bit states": ((*FULL, {"name": "optimizer_states", "kind": "adamw_8bit", "chunk": 2**12}), CONFIG),
    "one matrix of several": (FULL, {"family": "phi3", "num_hidden_layers": 3, **FAMILIES["phi3"]}),
}  # fmt: skip
ON = [
    pytest.param(*way, marks=() if way in ((TWO, {}, "lora"), (TWO, {}, "one matrix of several")) else pytest.mark.slow)
    for kind in CUT
    for way in ((TWO, {}, kind), ({}, TWO, kind), (TWO, TWO, kind), ({"shards": 2, "stage": 2}, TWO, kind))
    if way[0] == way[1] or kind != "8-bit states"
]


def goes_on_elsewhere(ranks, folder, before, then, kind):
    techniques, config = CUT[kind]
    how = [*techniques, CLIPPED, MICRO], config
    for mesh, steps in ((before, (0, 1)), (then, (1, 2))):
        found = ranks.call("carried_on", mesh, *how, str(folder / "parts"), steps, LENGTHS, 1e-4)[0]
    at_once = ranks.call("carried_on", {}, *how, str(folder / "alone"), (0, 2), LENGTHS, 1e-4)[0]
    # Of an adapter's B, which is zero at first, AdamW makes steps of a size that rounding decides; and a part is in other
    # blocks of 8-bit codes than the whole.
    assert differences(found, at_once)[1] < (2e-5 if kind in ("lora", "8-bit states") else 1e-6)
    assert ranks.call("joined", str(folder / "parts"), config, techniques)[0] == found


@pytest.mark.parametrize(("before", "then", "kind"), ON)
def test_another_number_of_ranks_goes_on(two, tmp_path, before, then, kind):
    goes_on_elsewhere(two, tmp_path, before, then, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora", "one matrix of several"])
@pytest.mark.parametrize("mesh", ["data", "zero1", "zero2", "zero3", "pipeline"])
def test_so_do_those_of_meshes_after_one_process_and_before_it(four, tmp_path, mesh, kind):
    goes_on_elsewhere(four, tmp_path / "to", {}, FOUR[mesh], kind)
    goes_on_elsewhere(four, tmp_path / "from", FOUR[mesh], {}, kind)
