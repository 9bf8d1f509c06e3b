"""Ranks that share every weight against one process: loss, norm and weights; bytes against the prediction."""

import pytest
from test_data_ranks import FULL, LORA, SGD, as_alone, differences

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
