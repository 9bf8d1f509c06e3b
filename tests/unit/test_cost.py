"""Seconds of a step: counted by hand for one case, and in the right order for the rest."""

import pytest

from finefit.batches import Uniform
from finefit.candidates import rewrite
from finefit.cost import seconds_per_step
from finefit.layout import Micro
from finefit.spec import HardwareSpec, ModelSpec
from finefit.techniques import Checkpointing, FusedLoss, FusedOps, Lora, Precision, QuantizedBase

MODEL = ModelSpec("m", "llama", 1024, 4096, 24, 16, 8, 64, 32_000)
FAST = HardwareSpec("fast", "cuda", 2**34, matmul_flops_per_s=(("float32", 1e14), ("bfloat16", 2e14)),
                    bandwidth_bytes_per_s=1e12)  # fmt: skip
# An arithmetic that memory and calls cost nothing on: what is left are the operations.
IDEAL = HardwareSpec("ideal", "cuda", 2**34, matmul_flops_per_s=(("float32", 1e9),), bandwidth_bytes_per_s=1e30)


def seconds(*techniques, hardware=FAST, work=None, tokens=8192):
    work = work or Uniform(8, 1024).work(8, tokens, False)
    return seconds_per_step(rewrite(MODEL, work.largest[0], techniques), work, hardware)


def test_operations_of_a_full_step_are_six_a_weight_and_token():
    work = Uniform(4, 16).work(4, 0, False)
    layout = rewrite(MODEL, Micro(64, 16, 64), (Precision("fp32"), FusedLoss(8)))
    blocks = 24 * sum(p.numel for p in MODEL.linears())
    attention = 2 * 1024 * 4 * 16**2 * 24 * 3.5 / 0.4
    operations = 6 * (blocks + 1024 * 32_000) * 64 + attention
    rate = 1e9 * 0.6 * 64 / (64 + 256)
    calls = 24 * 120 * 6e-6
    assert seconds_per_step(layout, work, IDEAL) == pytest.approx(operations / rate + calls, rel=1e-9)


def test_a_frozen_base_saves_a_third_of_its_products():
    full, lora = (seconds(Precision("fp32"), *t, FusedLoss(8), hardware=IDEAL) for t in ((), (Lora(1),)))
    assert 0.6 < lora / full < 0.75


def test_checkpointing_costs_up_to_one_more_forward():
    some = [[Checkpointing(k)] if k else [] for k in (0, 12, 24)]
    at = [seconds(Precision("bf16"), FusedOps(), FusedLoss(64), *more) for more in some]
    assert at == sorted(at)
    assert 1.2 < at[2] / at[0] < 1.5
    assert at[1] - at[0] == pytest.approx(at[2] - at[1], rel=1e-6)


def test_smaller_micro_batches_cost_more():
    at = [seconds(Precision("bf16"), FusedLoss(64), tokens=tokens) for tokens in (8192, 4096, 2048, 1024)]
    assert at == sorted(at)


def test_bf16_is_faster_where_the_device_says_so():
    assert seconds(Precision("bf16"), FusedLoss(64)) < seconds(Precision("fp32"), FusedLoss(64))


def test_an_unlabelled_token_needs_no_head_with_a_fused_loss():
    few = Uniform(8, 1024, labelled_share=0.1).work(8, 0, False)
    fused, whole = (seconds(Precision("fp32"), *t, hardware=IDEAL, work=few) for t in ((FusedLoss(64),), ()))
    assert fused < whole
    head = 6 * 1024 * 32_000 * (8192 - 8 * 102) / (1e9 * 0.6 * 8192 / (8192 + 256))
    assert whole - fused == pytest.approx(head, rel=1e-5)


@pytest.mark.parametrize(("bits", "n_bytes"), [(4, 25), (8, 15)])
@pytest.mark.parametrize(("blocks", "times"), [(0, 2), (12, 2.5), (24, 3)])
def test_a_quantised_weight_is_brought_back_in_each_pass(blocks, times, bits, n_bytes):
    """Forward, backward and where a block is computed again, for each of eight micro-batches."""
    others = [Lora(1), FusedLoss(64), *([Checkpointing(blocks)] if blocks else [])]
    dense, small = (seconds(Precision("bf16"), *base, *others, tokens=1024) for base in ((), (QuantizedBase(bits),)))
    elements = 24 * sum(p.numel for p in MODEL.linears())
    chunks = 24 * sum(-(-p.numel // 2**19) for p in MODEL.linears())
    assert small - dense == pytest.approx(8 * times * (elements * n_bytes / 1e12 + chunks * 12 * 6e-6), rel=1e-6)


# An arithmetic that operations cost nothing on: what is left is memory traffic.
MOVED = HardwareSpec("moved", "cuda", 2**34, matmul_flops_per_s=(("float32", 1e30), ("bfloat16", 1e30)),
                     bandwidth_bytes_per_s=1.0)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "first", "later"),
    [("fp32", 4 + 4 + 4, 12), ("bf16", 2 + 2 + 2, 6), ("bf16_mixed", 2 + 2 + (4 + 2) + 2 + (2 + 4), 12)],
)
def test_what_a_micro_batch_moves_of_a_weight(kind, first, later):
    """Read forward and backward, cast where the types differ, a gradient written, from the second on added to the sum."""
    few, many = (Uniform(8, 256).work(size, 0, False) for size in (8, 1))
    untied = ModelSpec("m", "llama", 1024, 4096, 24, 16, 8, 64, 100, tie_word_embeddings=False)
    one, eight = (
        seconds_per_step(rewrite(untied, work.largest[0], (Precision(kind), FusedLoss(2048))), work, MOVED)
        for work in (few, many)
    )
    inside = 24 * sum(p.numel for p, _ in untied.block_tensors())
    assert (eight - one) / inside == pytest.approx(7 * (first + later), rel=0.02)  # embedding and head: 200 rows
