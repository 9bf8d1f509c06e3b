"""The first of many ranks, of which the others are not there: the engines' own code on fake tensors against the prediction."""

from dataclasses import replace
from functools import partial

import pytest

from finefit import models, trace
from finefit.candidates import rewrite
from finefit.layout import Micro
from finefit.predict import QUERY_BLOCK, footprint, states
from finefit.spec import ModelSpec
from finefit.techniques import (
    Accumulation,
    Checkpointing,
    Clipping,
    DataParallel,
    FusedLoss,
    FusedOps,
    Lora,
    Packing,
    Precision,
    TensorParallel,
    Zero,
    in_order,
)

# As of a 7B model, but for the number of blocks: what is outside them takes as much as several of them.
CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False,
}  # fmt: skip
MESHES = {
    "zero2 of 8": (Zero(2, 8),), "zero3 of 8": (Zero(3, 8),), "zero3 of 512": (Zero(3, 512),),
    "hybrid of 64": (Zero(3, 8), DataParallel(8)), "zero1 of 8": (Zero(1, 8),), "tensor of 8": (TensorParallel(8),),
    "tensor of 8, zero3 of 64": (TensorParallel(8), Zero(3, 64)),
}  # fmt: skip
KINDS = {"full": (Precision("bf16_mixed"),), "lora": (Precision("bf16"), Lora(16))}
MICRO = Micro(2048, 2048, 2048)
QUICK = {
    ("zero2 of 8", "full", 2),
    ("zero3 of 512", "full", 1),
    ("zero3 of 8", "lora", 2),
    ("tensor of 8, zero3 of 64", "full", 2),
}


def square():
    for mesh in MESHES:
        for kind in KINDS:
            for steps in (1, 2, 3):
                quick = (mesh, kind, steps) in QUICK
                yield pytest.param(mesh, kind, steps, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("mesh", "kind", "steps"), square())
def test_a_rank_is_predicted_as_its_engine_runs(mesh, kind, steps):
    techniques = in_order([
        *MESHES[mesh], *KINDS[kind], FusedOps(), Packing(), FusedLoss(1024), Clipping(), Checkpointing(4),
        Accumulation(1, 2048, steps),
    ])  # fmt: skip
    sizes = {"T": MICRO.tokens, "S": MICRO.longest, "L": MICRO.labelled, "Q": QUERY_BLOCK}
    step = partial(trace.run_step, micro_steps=steps)
    seen = trace.traced(models.config_from(CONFIG), techniques, sizes, step).moments()
    layout = replace(rewrite(ModelSpec.from_config(CONFIG, "m"), MICRO, techniques), micro_steps=steps)
    said = footprint(layout).moments
    at_rest = {c: seen["optimizer_step"].get(c, 0) for c in ("parameter", "gradient", "optimizer_state")}
    assert at_rest == states(layout)
    highest = [max(sum(found[m].values()) for m in said if m in seen) for found in (said, seen)]
    assert highest[0] == pytest.approx(highest[1], rel=0.03)
