"""The caching allocator on paper: PyTorch's rules in small, one at a time."""

import random

from finefit.allocator import AWAITED, MIB, Replay, replay, smallest_capacity


def test_small_tensors_share_a_segment_of_two_mebibytes() -> None:
    found = replay([(1, 1), (2, 512), (3, 513)])
    assert (found.allocated_bytes, found.reserved_bytes) == (512 + 512 + 1024, 2 * MIB)


def test_middling_tensors_share_a_segment_of_twenty() -> None:
    found = replay([(1, 3 * MIB), (2, 9 * MIB)])
    assert (found.allocated_bytes, found.reserved_bytes) == (12 * MIB, 20 * MIB)


def test_large_tensors_get_a_segment_of_their_own_rounded_to_two_mebibytes() -> None:
    found = replay([(1, 11 * MIB), (2, 31 * MIB)])
    assert found.reserved_bytes == (12 + 32) * MIB


def test_a_freed_block_is_used_again() -> None:
    found = replay([(1, 40 * MIB), (1, -40 * MIB), (2, 30 * MIB)])
    assert found.reserved_bytes == 40 * MIB


def test_what_is_left_of_a_large_block_is_split_off_only_above_one_mebibyte() -> None:
    rest_of_one = replay([(1, 40 * MIB), (1, -40 * MIB), (2, 39 * MIB), (3, MIB + 512)])
    rest_of_two = replay([(1, 40 * MIB), (1, -40 * MIB), (2, 38 * MIB), (3, MIB + 512)])
    assert (rest_of_one.reserved_bytes, rest_of_two.reserved_bytes) == (60 * MIB, 40 * MIB)


def test_free_neighbours_merge() -> None:
    events = [(1, 3 * MIB), (2, 3 * MIB), (1, -3 * MIB), (2, -3 * MIB), (3, 9 * MIB)]
    assert replay(events).reserved_bytes == 20 * MIB


def test_a_full_device_gives_cached_segments_back_and_tries_again() -> None:
    events = [(1, 40 * MIB), (1, -40 * MIB), (2, 60 * MIB)]
    found = replay(events, 60 * MIB)
    assert (found.retries, found.failed_at) == (1, -1)


def test_a_request_that_cannot_be_met_says_where() -> None:
    assert replay([(1, 40 * MIB), (2, 40 * MIB)], 60 * MIB).failed_at == 1


def test_a_block_that_is_in_use_in_part_cannot_be_given_back() -> None:
    events = [(1, 40 * MIB), (2, 40 * MIB), (1, -40 * MIB), (2, -40 * MIB), (3, 12 * MIB), (4, 42 * MIB)]
    assert replay(events, 80 * MIB).failed_at == 5
    assert replay(events, 80 * MIB, "expandable").failed_at == -1


def test_the_smallest_capacity_lies_between_allocated_and_reserved_and_goes_through() -> None:
    events = _random_events(3000)
    for kind in ("classic", "expandable"):
        free, least = replay(events, None, kind), smallest_capacity(events, kind)
        assert free.allocated_bytes <= least <= free.reserved_bytes * 1.004 + 2 * MIB
        assert replay(events, least, kind).failed_at == -1


def test_emptying_the_cache_forgets_the_peak_before() -> None:
    events = [(1, 100 * MIB), (1, -100 * MIB), (2, 30 * MIB)]
    assert replay(events, emptied_at=2).reserved_bytes == 30 * MIB


def test_live_bytes_do_not_depend_on_the_kind() -> None:
    events = _random_events(2000)
    assert replay(events).allocated_bytes == replay(events, None, "expandable").allocated_bytes


def _random_events(count: int) -> list[tuple[int, int]]:
    dice, live, events = random.Random(0), [], []
    for key in range(count):
        if live and dice.random() < 0.5:
            old, n_bytes = live.pop(dice.randrange(len(live)))
            events.append((old, -n_bytes))
        n_bytes = dice.choice([100, 5000, 700 * 1024, 3 * MIB, 12 * MIB, 50 * MIB])
        events.append((key, n_bytes))
        live.append((key, n_bytes))
    return events


def test_what_is_cached_on_one_stream_serves_no_other() -> None:
    events = [(1, 40 * MIB, 0), (1, -40 * MIB, 0), (2, 40 * MIB, 1)]
    for kind in ("classic", "expandable"):
        assert replay(events, None, kind).reserved_bytes == 80 * MIB
        assert replay(events, 60 * MIB, kind) == Replay(40 * MIB, 40 * MIB, 1)


def test_what_another_stream_still_reads_is_free_but_not_used_again_until_that_is_waited_for() -> None:
    read = [(1, 40 * MIB), (1, -1, AWAITED), (2, 40 * MIB)]
    again = replay([*read, (1, 0, AWAITED), (3, 40 * MIB)])
    assert (again.allocated_bytes, again.reserved_bytes) == (80 * MIB, 80 * MIB)
    assert replay([*read, (3, 40 * MIB)]).reserved_bytes == 120 * MIB


def test_streams_are_waited_for_up_to_a_tensor() -> None:
    read = [(1, 40 * MIB), (2, 60 * MIB), (1, -1, AWAITED), (2, -1, AWAITED)]
    for last, expected in ((1, 160), (2, 100), (3, 200)):
        assert replay([*read, (last, 0, AWAITED), (4, 40 * MIB), (5, 60 * MIB)]).reserved_bytes == expected * MIB


def test_a_full_device_waits_for_all_streams_first() -> None:
    found = replay([(1, 40 * MIB), (1, -1, AWAITED), (2, 60 * MIB)], 60 * MIB)
    assert (found.retries, found.failed_at) == (1, -1)
