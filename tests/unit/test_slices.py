"""Tensor and pipeline parallel on a stream: what is whole for a moment, what is in flight."""

from dataclasses import replace

from finefit.foreign import ForeignRun, Spread
from finefit.slices import sliced, stages
from finefit.stream import Entry, Stream

RUN = ForeignRun("torchtitan", "m", "full", 1, 8, trained_dtype="bfloat16")
WIDTH, SHARE = 4, 4 * 4 * 2  # of two ranks: four rows of four elements


def _stream() -> Stream:
    """One block with an activation of 100 bytes, a head of 7 bytes, an embedding of 5; the loss takes 1,000."""
    stream = Stream()
    stream.opened("own 0")
    stream.born(Entry(64, 0, 0, (8, WIDTH), 2, "parameter"))
    stream.opened("own rest")
    for n_bytes in (5, 7):
        stream.born(Entry(n_bytes, 0, 0, (9, WIDTH), 2, "parameter"))
    for name in ("steady", "forward before", "forward 0"):
        stream.opened(name)
    kept = stream.born(Entry(100, 0, 0, (1, 4, WIDTH), 2))
    stream.opened("loss")
    loss = stream.born(Entry(1000, 0, 0, (4, 9), 4))
    stream.opened("backward start")
    stream.died(loss)
    stream.opened("backward 0")
    stream.born(Entry(64, 0, 0, (8, WIDTH), 2, "gradient"))
    stream.died(kept)
    for name in ("idle", "optimizer", "end"):
        stream.opened(name)
    return stream


def test_a_rank_holds_its_part_and_gathers_the_inputs_of_both_sub_layers() -> None:
    found = sliced(_stream(), replace(RUN, spread=Spread(tensor=2)))
    assert [e.n_bytes for e in found.entries if e.owner == "parameter"] == [32, 3, 4]
    extra = [e.n_bytes for e in found.entries if e.owner in ("activation", "temporary") and e.n_bytes == SHARE]
    # forward: two inputs and a sum; the head's input; backward: three sums of gradients
    assert extra == [SHARE] * (2 + 1 + 1 + 3)


def test_asynchronous_tensor_parallel_gathers_outside_the_allocator() -> None:
    found = sliced(_stream(), replace(RUN, spread=Spread(tensor=2, gathers="symmetric")))
    assert not [e for e in found.entries if e.owner == "temporary"]


def test_the_first_stage_holds_what_is_in_flight_and_no_head_the_last_no_embedding() -> None:
    run = replace(RUN, spread=Spread(pipeline=4, micro_batches=8))
    first, last = stages(_stream(), run)
    assert sum(e.n_bytes == 100 for e in first.entries) == 4
    assert {7, 1000}.isdisjoint(e.n_bytes for e in first.entries)
    assert 5 not in [e.n_bytes for e in last.entries] and 1000 in [e.n_bytes for e in last.entries]


def test_micro_batches_in_flight_by_schedule() -> None:
    spread = Spread(pipeline=4, micro_batches=16)
    flights = [replace(spread, schedule=s, stages_a_rank=n).in_flight for s, n in
               (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))]  # fmt: skip
    assert flights == [16, 4, 6]


def test_one_round_of_an_interleaved_schedule_has_one_stage_of_whole_gradients() -> None:
    spread = Spread(pipeline=4, micro_batches=4, schedule="interleaved", stages_a_rank=2)
    assert (spread.stages_whole, replace(spread, micro_batches=8).stages_whole) == (1, 2)
