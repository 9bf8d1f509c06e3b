"""Ranks that share the tokens of every micro-batch against one process: loss, norm and weights; bytes against the prediction."""

import pytest
from pool import note
from test_data_ranks import (
    BASE,
    CLIPPED,
    CONFIG,
    FULL,
    LENGTHS,
    MICRO,
    SGD,
    TECHNIQUES,
    are_alike,
    as_alone,
    differences,
    of_kind,
    peaks_of,
)

MESHES = {
    "context": {"context": 2}, "zero1": {"context": 2, "stage": 1}, "zero2": {"context": 2, "stage": 2},
    "zero3": {"context": 2, "stage": 3},
}  # fmt: skip
OF_FOUR = {
    "context": {"context": 4}, "data": {"replicas": 2, "context": 2}, "zero1": {"shards": 2, "context": 2, "stage": 1},
    "zero3": {"shards": 2, "context": 2, "stage": 3}, "hybrid": {"replicas": 2, "context": 2, "stage": 2},
}  # fmt: skip
HEADS = {**CONFIG, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
# Each kind, and each way of dividing, once; the rest of their square is slow.
LEARNT = {("context", "checkpointed"), ("context", "plain"), ("zero1", "lora"), ("zero2", "full"), ("zero3", "qlora")}
MEASURED = {
    ("context", "bf16_mixed", 2), ("zero1", "8-bit states", 1), ("zero2", "bf16 lora", 2), ("zero3", "checkpointed", 1),
}  # fmt: skip
KINDS = ("fp32", "bf16_mixed", "bf16 lora", "bf16 qlora", "checkpointed", "8-bit states")
FAMILIES = {
    "mistral": {"sliding_window": 20}, "qwen3": {}, "phi3": {}, "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.1},
    "gemma2": {"sliding_window": 20, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 1.5},
}  # fmt: skip


def square(quick, *sides):
    """Every combination of the sides; all but the quick ones are slow."""
    found = [()]
    for side in sides:
        found = [(*one, value) for one in found for value in side]
    return [pytest.param(*one, marks=() if one in quick else pytest.mark.slow) for one in found]


def check(ranks, mesh, techniques, config=HEADS):
    found, alone = as_alone(ranks, mesh, techniques, config, rate=1e-2 if SGD in techniques else 1e-4)
    are_alike(found, alone)
    note(mesh, next(kind for kind, known in TECHNIQUES.items() if known is techniques), "exact", ranks.size)


def peaks(ranks, mesh, techniques, lengths=(256,), micro_steps=1, **changes):
    """Predicted and measured, of each rank; its states are as predicted to the byte."""
    config = {**HEADS, "num_hidden_layers": 6, "vocab_size": 512, "tie_word_embeddings": False, **changes}
    return peaks_of(ranks, mesh, techniques, config, lengths, micro_steps)


@pytest.mark.parametrize(("mesh", "kind"), square(LEARNT, MESHES, TECHNIQUES))
def test_ranks_learn_what_one_process_does(two, mesh, kind):
    check(two, MESHES[mesh], TECHNIQUES[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpointed", "qlora", "plain"])
@pytest.mark.parametrize("mesh", OF_FOUR)
def test_four_ranks_learn_what_one_process_does(four, mesh, kind):
    check(four, OF_FOUR[mesh], TECHNIQUES[kind])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_a_family_sees_what_it_would_alone(two, family):
    """By SGD: what rounding there is in attention isn't made a step of, as AdamW's first ones would where gradients are small."""
    config = {**HEADS, "family": family, **FAMILIES[family]}
    are_alike(*as_alone(two, MESHES["context"], (*FULL, SGD), config, rate=1e-2))


@pytest.mark.parametrize("mesh", ["context", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_rank_whose_share_has_no_label_takes_part(two, mesh):
    """A row of 64 tokens, of which the first 32 are an example and the others fill it up."""
    wanted = [*FULL, CLIPPED, MICRO]
    found, alone = (two.call("trained", m, wanted, HEADS, 3, (20,), 1e-4)[0] for m in (MESHES[mesh], {}))
    assert found["steps"] == [pytest.approx(step, rel=1e-6) for step in alone["steps"]]
    assert max(differences(found["weights"], alone["weights"])) < 2e-6


def test_a_key_head_that_all_ranks_need_learns_from_all(two):
    check(two, MESHES["context"], FULL, {**HEADS, "num_key_value_heads": 1})


def test_all_ranks_skip_what_is_beyond_fp16(two):
    wanted = [{"name": "precision", "kind": "fp16_mixed"}, *BASE, CLIPPED, MICRO]
    found = two.call("trained", MESHES["context"], wanted, HEADS, 5, LENGTHS, 1e-4)
    (alone, _) = two.call("trained", {}, wanted, HEADS, 5, LENGTHS, 1e-4)
    assert found[0]["steps"] == found[1]["steps"] and found[0]["scale"] == found[1]["scale"] == alone["scale"]
    for ours, theirs in zip(found[0]["steps"], alone["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)


def test_a_held_out_loss_is_that_of_all_tokens(two):
    wanted = [*FULL, MICRO]
    found, alone = (two.call("held_out", mesh, wanted, HEADS, LENGTHS) for mesh in (MESHES["context"], {}))
    assert found[0] == found[1] == pytest.approx(alone[0], rel=1e-6)


@pytest.mark.parametrize(("mesh", "kind", "micro_steps"), square(MEASURED, MESHES, KINDS, (1, 2)))
def test_a_ranks_bytes_are_those_that_are_predicted(two, mesh, kind, micro_steps):
    found = peaks(two, MESHES[mesh], of_kind(kind), micro_steps=micro_steps)
    assert all(predicted == pytest.approx(measured, rel=0.03) for predicted, measured in found)
    note(MESHES[mesh], kind, "bytes", 2)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [0, 3])
@pytest.mark.parametrize("lengths", [(1024,), (48,) * 16])
@pytest.mark.parametrize("family", ["llama", "phi3", "granite"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_what_is_exchanged_is_predicted(two, family, heads, lengths, blocks):
    checkpointing = [{"name": "checkpointing", "blocks": blocks}] * bool(blocks)
    techniques = [{"name": "precision", "kind": "fp32"}, *checkpointing, *BASE]
    more = {"family": family, "num_hidden_layers": 3, "num_key_value_heads": heads}
    found = peaks(two, MESHES["context"], techniques, lengths, **more)
    assert max(predicted / measured for predicted, measured in found) < 1.03
    assert min(predicted / measured for predicted, measured in found) > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("mesh", OF_FOUR)
def test_of_four_each_holds_what_is_predicted(four, mesh):
    found = peaks(four, OF_FOUR[mesh], [{"name": "precision", "kind": "bf16_mixed"}, *BASE], (512,), 2)
    assert max(predicted for predicted, _ in found) == pytest.approx(max(measured for _, measured in found), rel=1e-3)
