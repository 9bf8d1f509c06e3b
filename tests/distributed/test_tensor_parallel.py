"""Ranks that share every weight against one process: loss, norm and weights; bytes against the prediction."""

import pytest
from test_data_ranks import BASE, CLIPPED, CONFIG, FULL, LORA, MICRO, SGD, as_alone, differences

MESHES = {"tensor": {"tensor": 2}}
TECHNIQUES = {
    "full": FULL,
    "checkpointed": (*FULL, {"name": "checkpointing", "blocks": 3}),
    "lora": (*FULL, SGD, LORA),
    "plain": ({"name": "precision", "kind": "fp32"},),
}


@pytest.mark.parametrize("kind", TECHNIQUES)
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_learn_what_one_process_does(two, mesh, kind):
    found, alone = as_alone(two, MESHES[mesh], TECHNIQUES[kind], rate=1e-2 if SGD in TECHNIQUES[kind] else 1e-4)
    for ours, theirs in zip(found["steps"], alone["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    largest, whole = differences(found["weights"], alone["weights"])
    assert largest < 2e-6 and whole < 1e-6


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("kind", ["fp32", "bf16_mixed", "bf16 lora", "checkpointed", "8-bit states"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_ranks_bytes_are_those_that_are_predicted(two, mesh, kind, micro_steps):
    """To the byte for states; at each moment, but for what a process that communicates lets go of a moment later."""
    check_bytes(two, MESHES[mesh], kind, micro_steps)


def check_bytes(ranks, mesh, kind, micro_steps):
    more = {
        "bf16 lora": [{"name": "lora", "rank": 4}], "checkpointed": [{"name": "checkpointing", "blocks": 4}],
        "8-bit states": [{"name": "optimizer_states", "kind": "adamw_8bit", "chunk": 2**12}],
    }.get(kind, [])  # fmt: skip
    precision = {"checkpointed": "bf16_mixed", "8-bit states": "fp32"}.get(kind, kind.partition(" ")[0])
    techniques = [{"name": "precision", "kind": precision}, *more, *BASE, CLIPPED, {**MICRO, "most_steps": micro_steps}]
    config = {**CONFIG, "num_hidden_layers": 6, "vocab_size": 512, "tie_word_embeddings": False}
    found = ranks.call("measured", mesh, techniques, config, (128, 128), micro_steps)
    for rank in found:
        print(rank)
    for predicted, measured in (rank["states"] for rank in found):
        assert predicted == measured
    peaks = [[max(moment[i] for moment in rank["moments"].values()) for i in (0, 1)] for rank in found]
    assert all(predicted == pytest.approx(measured, rel=0.03) for predicted, measured in peaks)
