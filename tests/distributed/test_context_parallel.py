"""Ranks that share the tokens of every micro-batch against one process: loss, norm and weights; bytes against the prediction."""

import pytest
from test_data_ranks import BASE, CLIPPED, CONFIG, MICRO, SGD, TECHNIQUES, as_alone, differences

MESHES = {
    "context": {"context": 2}, "zero1": {"context": 2, "stage": 1}, "zero2": {"context": 2, "stage": 2},
    "zero3": {"context": 2, "stage": 3},
}  # fmt: skip
HEADS = {**CONFIG, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def check(ranks, mesh, techniques, config=HEADS):
    found, alone = as_alone(ranks, mesh, techniques, config, rate=1e-2 if SGD in techniques else 1e-4)
    for ours, theirs in zip(found["steps"], alone["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    largest, whole = differences(found["weights"], alone["weights"])
    assert largest < 2e-6 and whole < 1e-6


@pytest.mark.parametrize("kind", TECHNIQUES)
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_learn_what_one_process_does(two, mesh, kind):
    check(two, MESHES[mesh], TECHNIQUES[kind])


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("kind", ["fp32", "bf16_mixed", "bf16 lora", "bf16 qlora", "checkpointed", "8-bit states"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_ranks_bytes_are_those_that_are_predicted(two, mesh, kind, micro_steps):
    lora = {"name": "lora", "rank": 4}
    more = {
        "bf16 lora": [lora], "bf16 qlora": [lora, {"name": "quantized_base", "chunk": 2**14}],
        "checkpointed": [{"name": "checkpointing", "blocks": 4}],
        "8-bit states": [{"name": "optimizer_states", "kind": "adamw_8bit", "chunk": 2**12}],
    }.get(kind, [])  # fmt: skip
    precision = {"checkpointed": "bf16_mixed", "8-bit states": "fp32"}.get(kind, kind.partition(" ")[0])
    techniques = [{"name": "precision", "kind": precision}, *more, *BASE, CLIPPED, {**MICRO, "most_steps": micro_steps}]
    config = {**HEADS, "num_hidden_layers": 6, "vocab_size": 512, "tie_word_embeddings": False}
    found = two.call("measured", MESHES[mesh], techniques, config, (256,), micro_steps)
    for predicted, measured in (rank["states"] for rank in found):
        assert predicted == measured
    print(mesh, kind, micro_steps, [rank["moments"] for rank in found])
    peaks = [[max(moment[i] for moment in rank["moments"].values()) for i in (0, 1)] for rank in found]
    assert all(predicted == pytest.approx(measured, rel=0.03) for predicted, measured in peaks)


OF_FOUR = {
    "context of four": {"context": 4}, "data": {"replicas": 2, "context": 2}, "zero1": {"shards": 2, "context": 2, "stage": 1},
    "zero3": {"shards": 2, "context": 2, "stage": 3}, "hybrid": {"replicas": 2, "context": 2, "stage": 2},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpointed", "qlora", "plain"])
@pytest.mark.parametrize("mesh", OF_FOUR)
def test_four_ranks_learn_what_one_process_does(four, mesh, kind):
    check(four, OF_FOUR[mesh], TECHNIQUES[kind])
