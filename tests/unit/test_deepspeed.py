"""DeepSpeed's ZeRO on a stream: buckets, masters and gradients of a rank, parameters that are whole."""

from dataclasses import replace

import pytest

from finefit.foreign import ForeignRun, Spread
from finefit.ranks import of_rank
from finefit.sharding import GATHER, REDUCE, Buckets
from finefit.stream import Entry, Stream

FOUR = Spread(data=4, shard_stage=3, shards=4, engine="deepspeed")
RUN = ForeignRun("transformers", "m", "full", 1, 8, accumulation=2, checkpointing="full", spread=FOUR)
LITTLE = Buckets(reduce=50, group=30, persistent=0)
BLOCK, OUTSIDE = 100, 40  # elements of each block's one parameter, of embedding and head


def _micro_step(stream: Stream, blocks: int, alive: list[int]) -> None:
    for name in ("forward before", *(f"forward {i}" for i in range(blocks)), "loss", "backward start"):
        stream.opened(name)
    alive += [] if alive else [stream.born(_of(OUTSIDE, "gradient"))]
    for block in reversed(range(blocks)):
        stream.opened(f"backward {block}")
        if len(alive) <= blocks:
            alive.append(stream.born(_of(BLOCK, "gradient")))
    stream.opened("idle")


def _of(numel: int, owner: str) -> Entry:
    return Entry(2 * numel, 0, 0, (numel,), 2, owner)


def _stream(blocks: int = 3, block: tuple[int, ...] = (BLOCK,), outside: int = OUTSIDE) -> Stream:
    """Two steps, the second of two micro-steps; the embedding gets no gradient."""
    stream = Stream()
    for section, sizes in [(f"own {i}", block) for i in range(blocks)] + [("own rest", (outside, outside))]:
        stream.opened(section)
        for numel in sizes:
            stream.born(_of(numel, "parameter"))
    for micro_steps in (1, 2):
        if micro_steps == 2:
            stream.opened("steady")
        alive: list[int] = []
        for _ in range(micro_steps):
            _micro_step(stream, blocks, alive)
        stream.opened("optimizer")
        for index in alive:
            stream.died(index)
    stream.opened("end")
    return stream


TRAINED = (3 * BLOCK + OUTSIDE) // 4  # elements of a rank: 85


def _at(found: Stream, section: str) -> dict[str, int]:
    """Bytes alive by owner as the steady step's first section of that name ends, gathered ones apart."""
    first = found.sections.index(section, found.sections.index("steady"))
    end = [*found.section_start, len(found.events)][first + 1]
    out: dict[str, int] = {}
    for entry in found.entries:
        if entry.born < end and not 0 <= entry.died < end:
            key = "gathered" if entry.lane == GATHER else entry.owner
            out[key] = out.get(key, 0) + entry.n_bytes
    return out


def test_stage_3_holds_masters_a_bucket_and_all_gradients_from_the_start() -> None:
    found = _at(of_rank(_stream(), RUN, LITTLE), "forward before")
    shares = (3 * BLOCK + 2 * OUTSIDE) * 2 // 4
    assert {"parameter": shares, "optimizer_state": 12 * TRAINED, "gradient": 2 * TRAINED, "temporary": 2 * 50} == {
        key: n for key, n in found.items() if key != "gathered"
    }


def test_stage_3_updates_by_groups() -> None:
    run = replace(RUN, optimizer="adamw", foreach=True)
    for foreach, most in ((True, 8), (False, 6)):
        found = of_rank(_stream(), replace(run, foreach=foreach), LITTLE).moments("steady")["optimizer_step"]
        assert found["temporary"] == 2 * 50 + max(most * 30, 8 * BLOCK // 4)


def test_with_the_optimizer_on_the_host_gradients_are_there_too() -> None:
    found = _at(of_rank(_stream(), replace(RUN, optimizer_on_host=True), Buckets(reduce=5000)), "backward 0")
    assert {"gradient", "optimizer_state"}.isdisjoint(found)


def test_a_gradient_larger_than_a_bucket_waits_for_the_next() -> None:
    found = of_rank(_stream(), replace(RUN, accumulation=1), LITTLE)
    whole = [e for e in found.entries if e.owner == "gradient" and e.n_bytes == 2 * BLOCK]
    lives = [(found.sections[e.section], found.sections[e.died_section]) for e in whole[:3]]
    assert lives == [("backward 2", "backward 1"), ("backward 1", "backward 0"), ("backward 0", "idle")]


def _whole(block: int, outside: int, section: str) -> list[int]:
    found = of_rank(_stream(5, (block,), outside), RUN, replace(LITTLE, persistent=10))
    return sorted(_gathered(found, section))


def _gathered(found: Stream, section: str) -> list[int]:
    first = found.sections.index(section, found.sections.index("steady"))
    end = [*found.section_start, len(found.events)][first + 1]
    return [e.n_bytes // 2 // 10**6 for e in found.entries if e.lane == GATHER and e.born < end
            and not 0 <= e.died < end]  # fmt: skip


def test_parameters_that_follow_are_gathered_up_to_a_billion_elements() -> None:
    assert _whole(300 * 10**6, 50 * 10**6, "forward 0") == [300] * 4
    assert _whole(600 * 10**6, 50 * 10**6, "forward 0") == [600, 600]


def test_the_last_blocks_stay_whole_if_they_are_used_again_soon() -> None:
    found = of_rank(_stream(5, (300 * 10**6,), 50 * 10**6), RUN, replace(LITTLE, persistent=10))
    lives = [(found.sections[e.section], found.sections[e.died_section]) for e in found.entries if e.lane == GATHER]
    assert ("forward 1", "backward 3") in lives  # the last block's, asked for three blocks ahead
    assert _whole(100 * 10**6, 1100 * 10**6, "loss") == [1100]


def test_on_one_rank_nothing_is_gathered_but_what_comes_from_the_host() -> None:
    one = replace(RUN, spread=replace(FOUR, data=1, shards=1))
    kept = [bool(_gathered(of_rank(_stream(), run, LITTLE), "forward 1")) for run in
            (one, replace(one, parameters_on_host=True))]  # fmt: skip
    assert ([e.lane for e in of_rank(_stream(), one, LITTLE).entries].count(GATHER), kept) == (0, [False, True])


# Elements whole as DeepSpeed 0.19.8 itself stepped a Llama of six blocks (hidden 64, MLP 176, vocabulary 512, two of four heads
# for keys) on one rank, ``stage3_max_live_parameters`` and ``stage3_max_reuse_distance`` 60,000, checkpointed, third step: at the
# last fetch of a block's forward, of the head, and of a block's second forward.
RECORDED = {"forward 1": 61440, "forward 3": 61440, "forward 4": 90112, "loss": 67584, "backward 5": 69632, "backward 3": 69632,
            "backward 1": 69632, "backward 0": 78848}  # fmt: skip


def test_the_coordinator_holds_what_deepspeed_was_seen_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.deepspeed.LIVE", 60_000)
    block = (64 * 64, 32 * 64, 32 * 64, 64 * 64, 176 * 64, 176 * 64, 176 * 64)
    run = replace(RUN, spread=replace(FOUR, data=1, shards=1), parameters_on_host=True)
    found = of_rank(_stream(6, block, 512 * 64), run, Buckets(reduce=4096, prefetch=3686, persistent=640))
    assert {section: _at(found, section)["gathered"] // 2 for section in RECORDED} == RECORDED


def _stage(stage: int) -> Stream:
    return of_rank(_stream(), replace(RUN, spread=replace(FOUR, shard_stage=stage)), replace(LITTLE, reduce=5000))


def test_buckets_of_stage_2_are_as_large_as_asked_for_whatever_trains() -> None:
    assert _at(_stage(2), "backward 2")["temporary"] == 2 * 2 * 5000
    assert "temporary" not in _at(_stage(2), "forward 0")


def test_a_later_micro_step_of_stage_2_has_gradients_of_its_own() -> None:
    found = _stage(2)
    kept = [e for e in found.entries if e.owner == "gradient" and e.n_bytes == 2 * BLOCK]
    owned = [e for e in kept if found.sections[e.section] == "backward start"]
    assert [found.sections[e.died_section] for e in owned] == ["optimizer", "optimizer", "idle"]


def test_parameters_gathered_together_are_copied_out_of_a_tensor_that_stays_until_the_last_is_used() -> None:
    together = replace(LITTLE, persistent=10, prefetch=2 * BLOCK)
    found = of_rank(_stream(3), RUN, together)
    first = next(e for e in found.entries if e.lane == GATHER and e.n_bytes == 2 * 2 * BLOCK)
    life = (found.sections[first.section], found.sections[first.died_section])
    copies = [e for e in found.entries if e.lane == GATHER and e.n_bytes == 2 * BLOCK and e.born < first.died]
    assert (life, len(copies)) == (("forward before", "forward 1"), 2)
    one = replace(RUN, spread=replace(FOUR, data=1, shards=1), parameters_on_host=True)
    assert 2 * 2 * BLOCK not in [e.n_bytes for e in of_rank(_stream(3), one, together).entries if e.lane == GATHER]


def test_gradients_in_fp16_are_asked_whether_they_are_infinite() -> None:
    lanes = [[e.n_bytes for e in of_rank(_stream(), replace(RUN, compute_dtype=kind), LITTLE).entries if e.lane == REDUCE]
             for kind in ("bfloat16", "float16")]  # fmt: skip
    assert lanes == [[], [2 * TRAINED, TRAINED] * 2]


def test_masters_are_raised_copies_and_a_gradient_of_them_is_there_for_a_moment() -> None:
    found = of_rank(_stream(), RUN, LITTLE)
    start = found.sections.index("forward before")
    made = [e.n_bytes for e in found.entries if e.section == start and e.lane == 0][:7]
    assert made == [2 * 30, 4 * 30, 2 * 30, 4 * 30, 2 * 25, 4 * 25, 4 * 30]


def test_weights_updated_on_the_host_come_back_in_fp32_under_stages_1_and_2() -> None:
    run = replace(RUN, optimizer_on_host=True, spread=replace(FOUR, shard_stage=2))
    back = [4 * TRAINED in [e.n_bytes for e in of_rank(_stream(), one, LITTLE).entries] for one in
            (run, replace(run, rounded_on_host=True))]  # fmt: skip
    assert back == [True, False]


def test_without_overlap_there_is_one_bucket_and_one_stream() -> None:
    apart, one = (replace(FOUR, overlaps=overlaps) for overlaps in (True, False))
    lanes = [
        {e.lane for e in of_rank(_stream(), replace(RUN, spread=spread), LITTLE).entries} for spread in (apart, one)
    ]
    buckets = [_at(of_rank(_stream(), replace(RUN, spread=replace(spread, shard_stage=2)), LITTLE), "backward start")["temporary"]
               for spread in (apart, one)]  # fmt: skip
    assert (lanes, buckets) == ([{0, GATHER}, {0}], [2 * 2 * 50, 2 * 50])


def test_buckets_as_the_run_says() -> None:
    said = [(3, 0), (2, 0), (2, -1), (2, 7)]
    assert [Buckets.of(8, replace(FOUR, shard_stage=stage, bucket=n)).reduce for stage, n in said] == [
        64,
        200_000_000,
        64,
        7,
    ]  # type: ignore[arg-type]
