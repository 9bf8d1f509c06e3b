"""Ranks that have examples of their own against one process: loss, norm and weights; bytes against the prediction."""

import math

import pytest
from pool import note

MESHES = {
    "data": {"replicas": 2}, "zero1": {"shards": 2, "stage": 1}, "zero2": {"shards": 2, "stage": 2},
    "zero3": {"shards": 2, "stage": 3},
}  # fmt: skip
BASE = ({"name": "fused_ops"}, {"name": "packing"}, {"name": "fused_loss", "chunk": 32})
FULL = ({"name": "precision", "kind": "fp32"}, *BASE)
# AdamW divides by the size of each gradient, and of a matrix that begins at zero turns what is lost by rounding into a part
# of the step: SGD does not, so its weights can be compared.
SGD = {"name": "optimizer_states", "kind": "sgd", "chunk": 2**12}
LORA = {"name": "lora", "rank": 4, "alpha": 8.0}
TECHNIQUES = {
    "full": FULL,
    "checkpointed": (*FULL, {"name": "checkpointing", "blocks": 3}),
    "lora": (*FULL, SGD, LORA),
    "qlora": (*FULL, SGD, LORA, {"name": "quantized_base", "chunk": 2**14}),
    "plain": ({"name": "precision", "kind": "fp32"},),
}
CLIPPED = {"name": "clipping", "max_norm": 0.5}
MICRO = {"name": "accumulation", "micro_batch_size": 2, "micro_batch_tokens": 96, "most_steps": 4}
LENGTHS = (70, 31, 90, 12, 45, 60, 23)  # seven on two ranks: one has a micro-batch more than the other
CONFIG = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 192, "tie_word_embeddings": True}


def as_alone(ranks, mesh, techniques, config=CONFIG, rate=1e-4):
    wanted = [*techniques, CLIPPED, MICRO]
    found = ranks.call("trained", mesh, wanted, config, 5, LENGTHS, rate)[0]
    alone = ranks.call("trained", {}, wanted, config, 5, LENGTHS, rate)[0]
    return found, alone


def differences(found, alone):
    """Relative, of weights: of the tensor where it is largest, and of all together."""
    assert found.keys() == alone.keys()
    apart = {name: (math.dist(found[name], alone[name]), math.hypot(*alone[name])) for name in alone}
    whole = math.hypot(*(off for off, _ in apart.values())) / math.hypot(*(size for _, size in apart.values()))
    return max(off / size for off, size in apart.values() if size), whole


def are_alike(found, alone, loss=1e-6, largest=2e-6):
    """Losses, norms and counts of every step; weights, of the tensor that differs most and of all together."""
    for ours, theirs in zip(found["steps"], alone["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=loss)
    most, whole = differences(found["weights"], alone["weights"])
    assert most < largest and whole < 1e-6


OF_FOUR = {
    "data of four": {"replicas": 4}, "zero1 of four": {"shards": 4, "stage": 1}, "zero3 of four": {"shards": 4, "stage": 3},
    "hybrid zero2": {"replicas": 2, "shards": 2, "stage": 2}, "hybrid zero3": {"replicas": 2, "shards": 2, "stage": 3},
}  # fmt: skip
# Of each kind one of every mesh or one mesh of every kind, and the others with make test-distributed.
FEW = {
    ("data", "full"),
    ("zero1", "full"),
    ("zero2", "full"),
    ("zero3", "full"),
    ("zero3", "qlora"),
    ("zero3", "checkpointed"),
}


def some(meshes, kinds, few):
    return [
        pytest.param(mesh, kind, marks=[] if (mesh, kind) in few else pytest.mark.slow, id=f"{mesh}-{kind}")
        for mesh in meshes
        for kind in kinds
    ]


def learns_the_same(ranks, mesh, kind):
    found, alone = as_alone(ranks, mesh, TECHNIQUES[kind], rate=1e-2 if SGD in TECHNIQUES[kind] else 1e-4)
    are_alike(found, alone)
    note(mesh, kind, "exact", ranks.size)


@pytest.mark.parametrize("mesh, kind", some(MESHES, TECHNIQUES, FEW))
def test_ranks_learn_what_one_process_does(two, mesh, kind):
    learns_the_same(two, MESHES[mesh], kind)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, kind", some(OF_FOUR, TECHNIQUES, ()))
def test_four_ranks_learn_what_one_process_does(four, mesh, kind):
    learns_the_same(four, OF_FOUR[mesh], kind)


@pytest.mark.parametrize("mesh", ["data", "zero1", "zero3"])
def test_a_gradient_that_overflows_on_one_rank_is_skipped_by_all(two, mesh):
    """The first rank's own gradients are finite; its weights stay, too, and then go on."""
    techniques = [{"name": "precision", "kind": "fp16_mixed"}, *BASE, CLIPPED, MICRO]
    for rank in two.call("overflowing", MESHES[mesh], techniques, CONFIG, LENGTHS):
        assert rank == {"scales": [65536.0, 32768.0, 32768.0], "moved": [False, True]}


KINDS = ("fp32", "bf16_mixed", "bf16 lora", "bf16 qlora", "checkpointed", "8-bit states")
LEAN = {
    ("data", "fp32"),
    ("zero1", "8-bit states"),
    ("zero2", "bf16_mixed"),
    ("zero3", "bf16_mixed"),
    ("zero3", "bf16 qlora"),
}


def of_kind(kind):
    """Techniques of a word of ``KINDS``."""
    lora = {"name": "lora", "rank": 4}
    more = {
        "bf16 lora": [lora], "bf16 qlora": [lora, {"name": "quantized_base", "chunk": 2**14}],
        "checkpointed": [{"name": "checkpointing", "blocks": 4}],
        "8-bit states": [{"name": "optimizer_states", "kind": "adamw_8bit", "chunk": 2**12}],
    }.get(kind, [])  # fmt: skip
    precision = {"checkpointed": "bf16_mixed", "8-bit states": "fp32"}.get(kind, kind.partition(" ")[0])
    return [{"name": "precision", "kind": precision}, *more, *BASE]


def peaks_of(ranks, mesh, techniques, config, lengths, micro_steps):
    """Predicted and measured, of each rank; its states are as predicted to the byte."""
    wanted = [*techniques, CLIPPED, {**MICRO, "most_steps": micro_steps}]
    found = ranks.call("measured", mesh, wanted, config, lengths, micro_steps)
    for predicted, measured in (rank["states"] for rank in found):
        assert predicted == measured
    return [[max(moment[i] for moment in rank["moments"].values()) for i in (0, 1)] for rank in found]


def has_the_bytes(ranks, mesh, kind, micro_steps):
    """To the byte for states; at each moment, but for what a process that communicates lets go of a moment later."""
    config = {**CONFIG, "num_hidden_layers": 6, "vocab_size": 512, "tie_word_embeddings": False}
    peaks = peaks_of(ranks, mesh, of_kind(kind), config, (128, 128), micro_steps)
    assert all(predicted == pytest.approx(measured, rel=0.03) for predicted, measured in peaks)
    note(mesh, kind, "bytes", ranks.size)


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("mesh, kind", some(MESHES, KINDS, LEAN))
def test_a_ranks_bytes_are_those_that_are_predicted(two, mesh, kind, micro_steps):
    has_the_bytes(two, MESHES[mesh], kind, micro_steps)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, kind", some(OF_FOUR, KINDS, ()))
def test_the_bytes_of_four_ranks(four, mesh, kind):
    has_the_bytes(four, OF_FOUR[mesh], kind, 2)


ON_HOST = {"name": "optimizer_offload", "place": "host", "gradients": "host"}
ON_DISK = {"name": "optimizer_offload", "place": "disk", "gradients": "device"}
OFFLOADED = {
    "full on host": (*FULL, ON_HOST), "full on disk": (*FULL, ON_DISK), "lora on host": (*TECHNIQUES["lora"], ON_HOST),
    "checkpointed on host": (*TECHNIQUES["checkpointed"], ON_HOST), "states on disk by a host": (*FULL, {**ON_HOST, "place": "disk"}),
}  # fmt: skip


@pytest.mark.parametrize(
    "mesh, kind", some(("zero2", "zero3"), OFFLOADED, {("zero3", "full on host"), ("zero2", "full on disk")})
)
def test_shards_on_the_host_learn_what_one_process_does(two, mesh, kind):
    """A host beside a GPU is played by the CPU beside itself: the same shards, copies and steps, without streams."""
    alone = tuple(t for t in OFFLOADED[kind] if t["name"] != "optimizer_offload")
    wanted, plain = ([*some, CLIPPED, MICRO] for some in (OFFLOADED[kind], alone))
    rate = 1e-2 if SGD in alone else 1e-4
    found = two.call("trained", MESHES[mesh], wanted, CONFIG, 5, LENGTHS, rate)[0]
    expected = two.call("trained", {}, plain, CONFIG, 5, LENGTHS, rate)[0]
    are_alike(found, expected)
    note(MESHES[mesh], kind, "exact", two.size)
