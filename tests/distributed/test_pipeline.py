"""Stages of a pipeline against one process: loss, norm and weights; bytes against the prediction."""

import pytest
from test_data_ranks import BASE, CLIPPED, FULL, LORA, MICRO, SGD, TECHNIQUES, as_alone, differences

DEEP = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 192, "tie_word_embeddings": True, "num_hidden_layers": 5}
SCHEDULES = {
    "gpipe": {"stages": 2, "schedule": "gpipe"}, "1f1b": {"stages": 2},
    "interleaved": {"stages": 2, "schedule": "interleaved", "stages_a_rank": 2},
}  # fmt: skip
UNTIED = {**DEEP, "tie_word_embeddings": False}


def learns_as_alone(ranks, mesh, techniques, config=DEEP):
    found, alone = as_alone(ranks, mesh, techniques, config, rate=1e-2 if SGD in techniques else 1e-4)
    for ours, theirs in zip(found["steps"], alone["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert found["scale"] == alone["scale"]
    largest, whole = differences(found["weights"], alone["weights"])
    assert largest < 2e-6 and whole < 1e-6


@pytest.mark.parametrize("kind", TECHNIQUES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_learn_what_one_process_does(two, schedule, kind):
    learns_as_alone(two, SCHEDULES[schedule], TECHNIQUES[kind])


PRODUCTS = {
    "data": {"stages": 2, "replicas": 2}, "zero1": {"stages": 2, "shards": 2, "stage": 1},
    "zero2": {"stages": 2, "shards": 2, "stage": 2}, "four stages": {"stages": 4},
    "zero2 interleaved": {**SCHEDULES["interleaved"], "shards": 2, "stage": 2},
    "data interleaved": {**SCHEDULES["interleaved"], "replicas": 2},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", TECHNIQUES)
@pytest.mark.parametrize("mesh", PRODUCTS)
def test_products_with_other_meshes_learn_what_one_process_does(four, mesh, kind):
    learns_as_alone(four, PRODUCTS[mesh], TECHNIQUES[kind])


@pytest.mark.parametrize("micro_steps", [1, 2, 5])
@pytest.mark.parametrize("kind", ["fp32", "bf16_mixed", "bf16 lora", "bf16 qlora", "checkpointed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stages_bytes_are_those_that_are_predicted(two, schedule, kind, micro_steps):
    bytes_as_predicted(two, SCHEDULES[schedule], kind, micro_steps)


def bytes_as_predicted(ranks, mesh, kind, micro_steps, tied=True):
    lora = {"name": "lora", "rank": 4}
    more = {
        "bf16 lora": [lora], "bf16 qlora": [lora, {"name": "quantized_base", "chunk": 2**14}],
        "checkpointed": [{"name": "checkpointing", "blocks": 4}],
    }.get(kind, [])  # fmt: skip
    precision = {"checkpointed": "bf16_mixed"}.get(kind, kind.partition(" ")[0])
    techniques = [{"name": "precision", "kind": precision}, *more, *BASE, CLIPPED, {**MICRO, "most_steps": micro_steps}]
    config = {**DEEP, "num_hidden_layers": 6, "vocab_size": 512, "tie_word_embeddings": tied}
    found = ranks.call("measured", mesh, techniques, config, (128, 128), micro_steps)
    for predicted, measured in (rank["states"] for rank in found):
        assert predicted == measured
    peaks = [[max(moment[i] for moment in rank["moments"].values()) for i in (0, 1)] for rank in found]
    print([rank["moments"] for rank in found])
    print(peaks, [round(a / b, 4) for a, b in peaks])
    assert all(predicted == pytest.approx(measured, rel=0.03) for predicted, measured in peaks)
