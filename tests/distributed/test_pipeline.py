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
