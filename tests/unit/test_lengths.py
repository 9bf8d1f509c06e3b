"""Runs whose rows vary in length: which lengths come, sizes at any of them, and what the allocator keeps of it."""

from dataclasses import replace

from finefit.allocator import MIB, replay, smallest_capacity
from finefit.foreign import ForeignRun, Lengths
from finefit.lengths import Family, drawn, lasting, probes
from finefit.stream import Entry, Stream

RUN = ForeignRun("transformers", "m", "lora", 1, 1024, accumulation=2, lengths=Lengths())
TOKEN = 64 * 1024


def _micro_step(stream: Stream, length: int, opens: bool) -> None:
    """An activation of 64 KiB a token, a score of 16 bytes a pair of tokens; the first micro-step makes the gradient."""
    stream.opened("forward before")
    stream.opened("forward 0")
    kept = stream.born(Entry(TOKEN * length, 0, 0, (length,), 4))
    stream.died(stream.born(Entry(16 * length * length, 0, 0, (length, length), 4)))
    stream.opened("backward 0")
    if opens:
        stream.born(Entry(4 * MIB, 0, 0, (MIB,), 4, "gradient"))
    stream.died(kept)
    stream.opened("idle")


def _stream(length: int) -> Stream:
    stream = Stream()
    stream.opened("own rest")
    stream.born(Entry(100 * MIB, 0, 0, (100 * MIB,), 1, "parameter"))
    for accumulates in (False, True):
        _micro_step(stream, length, opens=True)
        if accumulates:
            _micro_step(stream, length, opens=False)
        stream.opened("optimizer")
        stream.died(next(i for i, e in enumerate(stream.entries) if e.owner == "gradient" and e.died < 0))
        stream.opened("end" if accumulates else "steady")
    return stream


def _family() -> Family:
    found = Family.of({n: _stream(n) for n in probes(1024)})
    assert found
    return found


def test_lengths_end_at_the_longest_and_the_same_seed_gives_the_same() -> None:
    order = drawn(Lengths(multiple=8), 2, 1024, seed=0)
    assert (max(order), {n % 8 for n in order}) == (1024, {0})
    assert order == drawn(Lengths(multiple=8), 2, 1024, seed=0)


def test_samples_above_the_longest_are_cut_or_dropped() -> None:
    data = Lengths(mean=2000, deviation=1000, samples=100)
    assert len(drawn(data, 1, 1024, seed=0)) == 100
    assert len(drawn(replace(data, over="dropped"), 1, 1024, seed=0)) < 30


def test_a_batch_is_as_long_as_its_longest_row() -> None:
    alone, together = (sum(n := drawn(Lengths(), rows, 1024, seed=0)) / len(n) for rows in (1, 8))
    assert 450 < alone < 580 and 850 < together < 970


def test_probes_are_whole_blocks_of_attention_rows_and_reach_the_longest() -> None:
    assert [probes(n) for n in (8192, 1000, 512, 100, 30)] == [
        (2048, 4096, 8192), (256, 512, 1024), (128, 256, 512), (16, 48, 112), (),
    ]  # fmt: skip


def test_sizes_at_any_length_are_those_of_its_own_stream() -> None:
    family, own = _family(), _stream(777)
    assert family.sizes(777, range(len(own.entries))) == {i: e.n_bytes for i, e in enumerate(own.entries)}


def test_runs_of_another_course_are_no_family() -> None:
    streams = {n: _stream(n) for n in probes(1024)}
    streams[512].died(1)
    assert Family.of(streams) is None


def test_varied_lengths_make_the_allocator_keep_more_than_the_longest_needs() -> None:
    found = lasting(_family(), RUN, [])
    alone = replay(_stream(1024).allocations())
    assert found["reserved_bytes"] > 1.15 * alone.reserved_bytes
    assert found["capacity_bytes"] < 1.02 * smallest_capacity(_stream(1024).allocations())


def test_an_emptied_cache_keeps_less() -> None:
    emptied = replace(RUN, lengths=Lengths(emptied_every=1))
    assert lasting(_family(), emptied, [])["reserved_bytes"] < lasting(_family(), RUN, [])["reserved_bytes"]
