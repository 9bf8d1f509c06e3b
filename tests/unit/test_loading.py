"""The load of a rank, by the way a tool brings the weights."""

from dataclasses import replace

from finefit.allocator import MIB, replay
from finefit.foreign import ForeignRun, Spread
from finefit.loading import arrivals, loaded, way_of
from finefit.ranks import of_rank
from finefit.stream import Entry, Stream

RUN = ForeignRun("transformers", "m", "full", 1, 8, trained_dtype="float32")
TWO = Spread(data=2, shard_stage=3, shards=2, engine="fsdp1")


def _weights() -> Stream:
    """Two blocks of 100 and 60 bytes in bf16, 40 outside."""
    stream = Stream()
    for section, sizes in (("own 0", (60, 40)), ("own 1", (60,)), ("own rest", (40,)), ("steady", ())):
        stream.opened(section)
        for n_bytes in sizes:
            stream.born(Entry(n_bytes, 0, 0, (n_bytes // 2,), 2, "parameter"))
    return stream


def _temporary(run: ForeignRun) -> int:
    return loaded(_weights(), of_rank(_weights(), run), run)["temporary"]


def test_a_unit_and_its_flat_copy_are_whole_in_their_stored_type() -> None:
    assert _temporary(replace(RUN, spread=TWO)) == 2 * 200


def test_whole_models_are_read_and_then_rounded_tensor_by_tensor() -> None:
    assert _temporary(replace(RUN, spread=TWO, load="whole")) == 400 + 60 - 200


def test_one_tensor_at_a_time() -> None:
    assert _temporary(replace(RUN, spread=replace(TWO, engine="fsdp2"))) == 120


def test_on_one_device_weights_are_read_in_their_place() -> None:
    assert (_temporary(RUN), way_of(RUN)) == (0, "shards")


def test_a_packed_tensor_comes_unpacked() -> None:
    """Others are made where they stay, however large; what a file has packed is read as it is."""
    stream = Stream()
    for section, size, itemsize in (("own 0", 60, 1), ("own rest", 900, 2), ("steady", 0, 1)):
        stream.opened(section)
        stream.born(Entry(size, 0, 0, (size,), itemsize, "parameter"))
    ways = ("nf4", "int8", "gptq4")
    assert [loaded(stream, stream, replace(RUN, method="lora", quantised=way))["temporary"] for way in ways] == [
        240,
        120,
        0,
    ]


SENT = replace(RUN, trained_dtype="bfloat16", load="first", spread=TWO)


def _large() -> Stream:
    """Two blocks of 200 and 100 MiB, and a scale of one weight that is no parameter."""
    stream = Stream()
    for block in range(2):
        stream.opened(f"own {block}")
        for size in (200, 100):
            stream.born(Entry(size * MIB, 0, 0, (size,), 2, "parameter"))
    stream.born(Entry(20 * MIB, 0, 0, (20,), 1, "parameter", whole=True))
    return stream


def test_a_rank_that_is_sent_its_weights_uses_no_bucket_twice() -> None:
    events = arrivals(_large(), SENT)
    # 20 apart; two tensors, a bucket and a flat copy of 300; the next unit puts its tensors where those were
    assert replay(events).reserved_bytes == (20 + 300 + 300 + 300 + 300 + 300) * MIB
    assert replay([*events, (1, 300 * MIB), (2, 300 * MIB)]).reserved_bytes == replay(events).reserved_bytes
    held = {key: n_bytes for key, n_bytes, *_ in events if n_bytes > 0}
    for key, n_bytes, *_ in events:
        if n_bytes < 0:
            del held[key]
    assert sorted(held.values()) == [20 * MIB, 150 * MIB, 150 * MIB]


def test_buckets_are_whole_tensors_and_two_are_under_way() -> None:
    stream = _large()
    for _ in range(4):
        stream.born(Entry(130 * MIB, 0, 0, (130,), 2, "parameter"))
    sent = [n_bytes // MIB for _, n_bytes, *_ in arrivals(stream, SENT)]
    # tensors, two buckets, the first goes before the third is filled
    assert [200, 100, 130, 130, 130, 130, 300, 260, -1, 260] == sent[sent.index(130) - 2 :][:10]


def test_nothing_is_sent_where_shards_do_not_stay_or_every_rank_reads() -> None:
    for run in (replace(SENT, load=""), replace(SENT, parameters_on_host=True), replace(SENT, spread=Spread())):
        assert arrivals(_large(), run) == []
