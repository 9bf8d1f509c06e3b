"""The load of a rank, by the way a tool brings the weights."""

from dataclasses import replace

from finefit.foreign import ForeignRun, Spread
from finefit.loading import loaded, way_of
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


def test_whole_models_are_cut_unit_by_unit() -> None:
    assert _temporary(replace(RUN, spread=TWO, load="whole")) == 400 + 200 - 200


def test_one_tensor_at_a_time() -> None:
    assert _temporary(replace(RUN, spread=replace(TWO, engine="fsdp2"))) == 120


def test_on_one_device_weights_are_read_in_their_place() -> None:
    assert (_temporary(RUN), way_of(RUN)) == (0, "shards")


def test_a_packed_tensor_comes_unpacked() -> None:
    assert _temporary(replace(RUN, method="lora", quantised="nf4")) == 4 * 60
