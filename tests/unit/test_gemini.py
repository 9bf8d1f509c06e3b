"""ColossalAI's Gemini on a stream: the search for a chunk, what fills it up, what is whole and when."""

from dataclasses import replace

from finefit.allocator import MIB, replay
from finefit.foreign import ForeignRun, Spread
from finefit.gemini import Chunk, Gemini, chunk_numel, chunks_of
from finefit.ranks import of_rank
from finefit.stream import Entry, Stream

M = 2**20
TWO = Spread(data=2, shard_stage=3, shards=2, engine="gemini")
RUN = ForeignRun("transformers", "m", "full", 1, 8, trained_dtype="float32", compute_dtype="float16", spread=TWO)
EMBEDDING, BLOCK = 40, 32  # Mi elements


def _of(numel: int, owner: str) -> Entry:
    return Entry(2 * numel * M, 0, 0, (numel * M, 1), 2, owner)


def _stream(vector: int = 0) -> Stream:
    """Two steps of a tied model of two blocks with one weight each."""
    stream = Stream()
    for section, numel in (("own 0", BLOCK), ("own 1", BLOCK), ("own rest", EMBEDDING)):
        stream.opened(section)
        stream.born(_of(numel, "parameter"))
    if vector:
        stream.born(Entry(2 * vector, 0, 0, (vector,), 2, "parameter"))
    for step in range(2):
        if step:
            stream.opened("steady")
        for name in ("forward before", "forward 0", "forward 1", "loss", "backward start"):
            stream.opened(name)
        gradients = [stream.born(_of(EMBEDDING, "gradient"))]
        for block in (1, 0):
            stream.opened(f"backward {block}")
            gradients.append(stream.born(_of(BLOCK, "gradient")))
        stream.opened("idle")
        stream.opened("optimizer")
        for index in gradients:
            stream.died(index)
    stream.opened("end")
    return stream


def _at(found: Stream, section: str) -> dict[str, int]:
    """MiB alive by owner as the steady step's section of that name ends."""
    first = found.sections.index(section, found.sections.index("steady"))
    end = [*found.section_start, len(found.events)][first + 1]
    out: dict[str, int] = {}
    for index, sign in found.events[:end]:
        entry = found.entries[index]
        out[entry.owner] = out.get(entry.owner, 0) + sign * entry.n_bytes
    return {owner: n_bytes // MIB for owner, n_bytes in out.items() if n_bytes}


def test_the_chunk_is_the_smallest_that_leaves_least_empty() -> None:
    """Of 12 Mi each, two fill 32 Mi by 24, three 36 Mi and leave 24 of the second, four fill 48 Mi."""
    assert chunk_numel([12 * M] * 4, 1) == 48 * M
    assert chunk_numel([12 * M] * 4, 5) == 48 * M + 2


def test_a_tensor_far_beyond_the_others_does_not_count() -> None:
    assert chunk_numel([1000 * M] + [12 * M] * 20, 1) == 48 * M


def test_chunks_are_filled_in_order_and_cut_for_the_ranks() -> None:
    found = chunks_of([(7, 101), (1, 30), (2, 30), (3, 50)], 64, 4)
    assert found == [Chunk(104, 4, {7: 101}), Chunk(64, 4, {1: 30, 2: 30}), Chunk(64, 4, {3: 50})]
    assert [chunk.own() for chunk in found] == [{7: 26}, {1: 16}, {3: 16}]
    assert Chunk(64, 4, {1: 10, 2: 30}).own() == {1: 10, 2: 6}


MASTERS = 3 * 4 * 20  # three chunks of 40 Mi, half of each
MOMENTS = 2 * 4 * (20 + 20 + 20)


def test_all_chunks_are_whole_at_the_end_of_forward() -> None:
    assert _at(of_rank(_stream(), RUN), "loss") == {"temporary": 3 * 80, "optimizer_state": MASTERS + MOMENTS}


def test_a_reduced_chunk_is_a_part_with_its_gradients() -> None:
    """The embedding's gradient waits for the end: what it is added to comes last."""
    found, states = of_rank(_stream(), RUN), {"optimizer_state": MASTERS + MOMENTS}
    assert _at(found, "backward 1") == {"temporary": 2 * 80, "parameter": 40, "gradient": 80, **states}
    assert _at(found, "idle") == {"parameter": 3 * 40, **states}


def test_one_rank_keeps_its_chunks_whole() -> None:
    found = of_rank(_stream(), replace(RUN, spread=replace(TWO, data=1, shards=1)))
    held = {"parameter": 3 * 80, "optimizer_state": 3 * 4 * 40 + 2 * 4 * (40 + 32 + 32)}
    assert (_at(found, "loss"), _at(found, "idle")) == (held, held)


def test_vectors_are_whole_on_tensor_parallel_ranks() -> None:
    made = Gemini(_stream(vector=5), replace(RUN, spread=replace(TWO, tensor=2, gathers="whole")))
    made.made()
    assert made.chunks[-1] == Chunk(10, 1, {3: 10})


def test_the_load_is_part_of_the_stream() -> None:
    """Highest where the last weight is raised: parts of the first pair, the second pair open, the last two in fp32."""
    load = of_rank(_stream(), RUN).until("forward before")
    highest = 64 + (40 + 80) + (80 + 160) + 2 * 128
    assert replay(load.allocations()).allocated_bytes == highest * MIB
    assert sum(e.n_bytes for e in load.entries if e.died < 0) == (3 * 40 + MASTERS) * MIB


def test_an_emptied_cache_gives_back_what_is_free() -> None:
    stream = Stream()
    stream.died(stream.born(_of(20, "temporary")))
    stream.emptied()
    stream.born(_of(30, "temporary"))
    assert replay(stream.allocations()).reserved_bytes == 60 * MIB
