"""What the data is to a plan: largest micro-batches and mean work, by hand and against every split there is."""

import random
import time

import pytest

from finefit.batches import FromOrder, Uniform, undominated
from finefit.data.micro import split, width
from finefit.layout import Micro

LENGTHS = (10, 40, 5, 30, 20, 8)  # widths 16, 48, 16, 32, 32, 16
LABELLED = (4, 1, 5, 30, 7, 0)
BATCHES = FromOrder([[0, 1, 2], [3, 4, 5]], LENGTHS, LABELLED)


def test_facts_of_an_order():
    assert (BATCHES.longest, BATCHES.most_tokens) == (48, 80)
    assert (Uniform(4, 100).longest, Uniform(4, 100).most_tokens) == (112, 448)


def test_work_of_whole_batches():
    """Two steps of one micro-batch each: 80 tokens filled to 128, 55 and 58 of them real."""
    work = BATCHES.work(3, 0, padded=False)
    assert work.largest == (Micro(128, 32, 37), Micro(128, 48, 10))
    assert (work.most_steps, work.mean_steps) == (1, 1.0)
    assert (work.mean_tokens, work.mean_real_tokens, work.mean_labelled) == (128, 56.5, 23.5)
    assert work.mean_square == (16**2 + 48**2 + 16**2 + 32**2 + 32**2 + 16**2) / 2


def test_work_of_padded_batches_counts_padding():
    work = BATCHES.work(3, 0, padded=True)
    assert work.largest == (Micro(144, 48, 10), Micro(96, 32, 37))
    assert (work.mean_tokens, work.mean_real_tokens) == ((144 + 96) / 2, 56.5)
    assert work.mean_square == (3 * 48**2 + 3 * 32**2) / 2


def test_work_of_limited_micro_batches():
    """At most 48 tokens: [40], [10, 5] and [30, 8], [20], by widths [48], [16, 16], [32, 16], [32]; each row is filled to 64."""
    work = BATCHES.work(3, 48, padded=False)
    assert (work.most_steps, work.mean_steps) == (2, 2.0)
    assert work.largest == (Micro(64, 32, 30), Micro(64, 48, 1))


def test_nothing_labelled_still_takes_a_row():
    assert BATCHES.micro([5], padded=False) == Micro(64, 16, 1)


def test_rows_of_a_largest_micro_batch():
    rows = BATCHES.rows_of(Micro(64, 32, 30), 3, 48, padded=False)
    assert rows == [3, 5]
    assert sorted(BATCHES.rows_of(Micro(128, 32, 37), 3, 0, padded=False)) == [3, 4, 5]


def test_uniform_is_an_order_of_equal_examples():
    same = FromOrder([list(range(7))], [100] * 7, [25] * 7)
    for limits in ((7, 0, False), (2, 0, True), (7, 224, False), (3, 0, False), (7, 50, False), (2, 500, False)):
        assert Uniform(7, 100, labelled_share=0.25).work(*limits) == same.work(*limits)


def test_a_batch_of_a_million_takes_no_longer_than_one_of_ten():
    started = time.perf_counter()
    assert Uniform(10**6, 100).work(16, 0, False).most_steps == 62_500
    assert time.perf_counter() - started < 0.1


def test_undominated_covers_all_and_holds_nothing_twice():
    rng = random.Random(0)
    for _ in range(100):
        micros = {Micro(rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(1, 12))}
        kept = undominated(micros)
        for m in micros:
            assert any(k.tokens >= m.tokens and k.longest >= m.longest and k.labelled >= m.labelled for k in kept)
        for k in kept:
            others = [o for o in kept if o != k]
            assert not any(o.tokens >= k.tokens and o.longest >= k.longest and o.labelled >= k.labelled for o in others)


@pytest.mark.parametrize("max_sequences", [1, 3, 100])
@pytest.mark.parametrize("max_tokens", [1, 50, 120, 10**9])
def test_a_split_holds_every_example_once_and_keeps_its_limits(max_sequences, max_tokens):
    rng = random.Random(max_tokens)
    lengths = [rng.randint(1, 100) for _ in range(40)]
    groups = split(lengths, max_sequences, max_tokens)
    assert sorted(i for group in groups for i in group) == list(range(40))
    for group in groups:
        assert len(group) <= max_sequences
        assert len(group) == 1 or sum(width(lengths[i]) for i in group) <= max_tokens


def test_a_larger_limit_never_makes_more_micro_batches():
    """Of one data set; first-fit decreasing may, in theory, by a bin."""
    rng = random.Random(1)
    order = FromOrder([list(range(32))], [rng.randint(1, 200) for _ in range(32)], [1] * 32)
    counts = [order.work(32, tokens, False).most_steps for tokens in (200, 400, 800, 1600, 3200, 6400)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1
