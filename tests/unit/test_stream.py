"""Streams of allocations: how blocks repeat, what moves to the host, what a rank of a sharded run holds."""

from dataclasses import replace

from finefit.allocator import MIB, replay
from finefit.foreign import ForeignRun, Spread
from finefit.placement import placed
from finefit.ranks import of_rank
from finefit.stream import Entry, Pattern, Stream, pattern_of

RUN = ForeignRun("transformers", "m", "full", 1, 8, trained_dtype="bfloat16", optimizer_bits=16)


def test_blocks_of_one_kind_have_a_period_of_one() -> None:
    assert pattern_of([""] * 12) == Pattern(0, 1)


def test_first_blocks_of_another_kind_are_a_prefix() -> None:
    assert pattern_of(["dense"] * 3 + [""] * 20) == Pattern(3, 1)


def test_alternating_blocks_have_a_period() -> None:
    assert pattern_of(["s", "s", "f"] * 6) == Pattern(0, 3)


def test_a_shallow_model_keeps_the_remainder_of_the_period() -> None:
    assert [Pattern(0, 2).shallow(depth) for depth in (3, 24, 25)] == [(3, 0), (10, 0), (11, 0)]


def test_five_groups_of_either_kind_where_the_first_blocks_are_otherwise():
    assert Pattern(0, 1).shallow(80, 30) == (10, 5)
    assert Pattern(0, 1).shallow(80, 3) == (8, 3)
    assert Pattern(0, 1).shallow(80, 80) == (5, 5)
    assert Pattern(3, 1).shallow(61, 2) == (8, 2)
    assert Pattern(3, 1).shallow(61, 30) == (13, 8)
    assert Pattern(0, 6).spans(62, 20) == [(0, 3), (4, 6)]  # the fourth group is cut
    assert Pattern(0, 6).shallow(62, 20) == (56, 20)
    assert Pattern(0, 6).spans(62, 61) == [(0, 10)]  # in what is left over
    assert Pattern(0, 6).shallow(62, 61) == (32, 31)


def _stream() -> Stream:
    """Two blocks with a parameter of 100 bytes each, an activation of 10 a block, gradients as large as parameters."""
    stream = Stream()
    for name, events in _SCRIPT:
        stream.sections.append(name)
        stream.section_start.append(len(stream.events))
        for key, n_bytes, owner in events:
            if n_bytes > 0:
                stream.entries.append(Entry(n_bytes, len(stream.sections) - 1, len(stream.events), (), 2, owner))
                stream.events.append((key, 1))
            else:
                stream.entries[key].died = len(stream.events)
                stream.entries[key].died_section = len(stream.sections) - 1
                stream.events.append((key, -1))
    return stream


def _step(first: int) -> list[tuple[str, list[tuple[int, int, str]]]]:
    a, b, g, h = range(first, first + 4)
    return [
        ("forward before", []), ("forward 0", [(a, 10, "")]), ("forward 1", [(b, 10, "")]), ("loss", []),
        ("backward start", []), ("backward 1", [(g, 100, "gradient"), (b, 0, "")]),
        ("backward 0", [(h, 100, "gradient"), (a, 0, "")]), ("idle", []),
        ("optimizer", [(g, 0, ""), (h, 0, "")]),
    ]  # fmt: skip


_SCRIPT = [
    ("own 0", [(0, 100, "parameter")]), ("own 1", [(1, 100, "parameter")]),
    *_step(2), ("steady", []), *_step(6), ("end", []),
]  # fmt: skip


def test_the_script_peaks_at_the_end_of_backward() -> None:
    assert _stream().moments("steady")["backward_peak"] == {"parameter": 200, "gradient": 200, "activation": 10}


def test_a_full_shard_keeps_a_share_and_gathers_the_block_that_runs_and_the_next() -> None:
    run = replace(RUN, spread=Spread(data=2, shard_stage=3, shards=2, engine="fsdp2"))
    moments = of_rank(_stream(), run).moments("steady")
    # shards of both blocks and of block 1's gradient; block 0 gathered and copied out, block 1's gradients being reduced
    expected = {"parameter": 100, "gradient": 50, "temporary": 300, "activation": 10, "optimizer_state": 200}
    assert expected == moments["backward_peak"]


def test_gradients_that_wait_for_the_last_micro_step_are_whole() -> None:
    spread = Spread(data=2, shard_stage=3, shards=2, engine="fsdp2", reduces="last")
    run = replace(RUN, accumulation=2, longest_first=True, spread=spread)
    found = of_rank(_stream(), run).until("optimizer")
    assert sum(e.n_bytes for e in found.entries if e.owner == "gradient" and e.died < 0) == 200


def test_what_communicates_has_streams_of_its_own() -> None:
    run = replace(RUN, spread=Spread(data=2, shard_stage=3, shards=2, engine="fsdp2"))
    lanes = {(e.lane, e.owner) for e in of_rank(_stream(), run).entries}
    assert {(1, "temporary"), (2, "gradient")} < lanes


def test_a_reentrant_checkpoint_under_fsdp_1_gathers_one_block_only() -> None:
    run = replace(RUN, spread=Spread(data=2, shard_stage=3, shards=2, engine="fsdp1"))
    run = replace(run, checkpointing="full", reentrant=True)
    assert of_rank(_stream(), run).moments("steady")["backward_peak"]["temporary"] == 100


def test_inputs_of_frozen_units_under_fsdp_1_live_to_the_end_of_backward() -> None:
    run = replace(RUN, method="lora", checkpointing="full", reentrant=True)
    run = replace(run, spread=Spread(data=2, shard_stage=3, shards=2, engine="fsdp1"))
    kept = of_rank(_stream(), run)
    last = [name for name, _ in kept.by_section()].index("idle")
    assert all(e.died_section in (-1, last) or e.died_section > last for e in kept.entries if e.n_bytes == 10)


def test_ddp_adds_a_bucket_of_all_gradients() -> None:
    run = replace(RUN, spread=Spread(data=2, engine="ddp"))
    assert of_rank(_stream(), run).moments("steady")["backward_peak"]["temporary"] == 200


def test_one_device_is_left_as_it_is() -> None:
    stream = _stream()
    assert of_rank(stream, RUN) is stream and placed(stream, RUN) is stream


def test_activations_on_the_host_are_back_for_their_backward() -> None:
    found = placed(_stream(), replace(RUN, activations_on_host=True))
    alive = {name: _live_at(found, name, 10) for name in ("loss", "backward 1", "backward 0")}
    assert alive == {"loss": 1, "backward 1": 1, "backward 0": 1}


def _live_at(stream: Stream, section: str, n_bytes: int) -> int:
    """How many entries of that size are alive when the last section of that name begins, or come in its first events."""
    at = max(i for i, name in enumerate(stream.sections) if name == section)
    events = stream.events[: stream.section_start[at]]
    alive = sum(sign for i, sign in events if stream.entries[i].n_bytes == n_bytes)
    first = dict(stream.by_section())[section][:1]
    return alive + sum(sign for i, sign in first if sign > 0 and stream.entries[i].n_bytes == n_bytes)


def test_until_keeps_what_was_alive() -> None:
    cut = _stream().until("optimizer")
    assert [e.n_bytes for e in cut.entries if e.died < 0] == [100, 100, 100, 100]


def test_what_hangs_on_a_parameter_is_neither_cut_nor_gathered() -> None:
    stream = _stream()
    stream.entries[0].whole = True
    run = replace(RUN, spread=Spread(data=2, shard_stage=3, shards=2, engine="fsdp1"), parameters_on_host=True)
    cut = of_rank(stream, run)
    assert [100, 50] == [e.n_bytes for e in cut.entries if e.owner == "parameter"]
    assert {100} == {e.n_bytes for e in cut.entries if e.lane == 1}  # the other's alone
    assert [100] == [e.n_bytes for e in placed(cut, run).entries if e.owner == "parameter"]


def _frozen(depth: int) -> Stream:
    """A step of as many frozen blocks of 40 MiB."""
    stream = Stream()
    for block in range(depth):
        stream.opened(f"own {block}")
        stream.born(Entry(40 * MIB, 0, 0, (20 * MIB,), 2, "parameter"))
    step = ["forward before", *(f"forward {i}" for i in range(depth)), "loss", "backward start"]
    for name in (*step, *(f"backward {i}" for i in reversed(range(depth))), "idle", "optimizer", "end"):
        stream.opened(name)
    return stream


def _gathers_hold(stream: Stream) -> int:
    """MiB that the stream which gathers keeps."""
    events = [event for event in stream.allocations() if stream.entries[event[0]].lane == 1]
    return replay(events).reserved_bytes // MIB


def test_fsdp_1_gathers_into_the_block_of_the_last_unit_but_one() -> None:
    run = replace(RUN, method="lora", spread=Spread(data=2, shard_stage=3, shards=2, engine="fsdp1"))
    again = replace(run, checkpointing="full", reentrant=True)  # nothing is gathered ahead
    assert [3 * 40, 2 * 40] == [_gathers_hold(of_rank(_frozen(6), one)) for one in (run, again)]


def test_what_is_awaited_is_so_where_shards_are_on_the_host() -> None:
    run = replace(RUN, method="lora", spread=Spread(data=2, shard_stage=3, shards=2, engine="fsdp1"))
    run = replace(run, parameters_on_host=True)
    assert 3 * 40 == _gathers_hold(placed(of_rank(_frozen(6), run), run))
