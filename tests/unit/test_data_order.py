"""Order is a pure function of seed and step; micro-batches keep their limits."""

import numpy as np
import pytest

from finefit.data.micro import split, width
from finefit.data.order import InOrder, Order
from finefit.errors import DataError


def test_every_epoch_has_every_example_once():
    order = Order(10, 4, seed=3)
    line = [example for step in range(1, 6) for example in order.batch(step)]
    assert list(range(10)) == sorted(line[:10])
    assert list(range(10)) == sorted(line[10:])
    assert line[:10] != line[10:]


def test_a_step_does_not_depend_on_the_steps_before_it():
    walked = [Order(101, 7, seed=5).batch(step) for step in range(1, 60)]
    order = Order(101, 7, seed=5)
    assert walked[::-1] == [order.batch(step) for step in range(59, 0, -1)]
    assert walked != [Order(101, 7, seed=6).batch(step) for step in range(1, 60)]


def test_the_order_is_this_one_on_every_machine():
    assert Order(8, 4, seed=0).batch(1) + Order(8, 4, seed=0).batch(2) == [3, 2, 1, 6, 0, 7, 4, 5]


def test_more_examples_in_a_step_than_there_are():
    assert InOrder(3, 7).batch(1) == [0, 1, 2, 0, 1, 2, 0]
    assert InOrder(3, 7).batch(2) == [1, 2, 0, 1, 2, 0, 1]


def test_steps_and_epochs_count_alike():
    order = Order(10, 4, seed=0)
    assert (order.steps(1), order.steps(2), order.steps(0.1)) == (3, 5, 1)
    assert order.epoch(5) == 2.0


def test_wrong_numbers_are_refused():
    with pytest.raises(DataError):
        Order(0, 1, seed=0)
    with pytest.raises(ValueError, match="count from 1"):
        Order(3, 1, seed=0).batch(0)
    with pytest.raises(ValueError, match="at least 1"):
        Order(3, 0, seed=0)
    with pytest.raises(ValueError, match="at least 1"):
        split([1], 0, 10)


def test_first_fit_decreasing_by_hand():
    """Limits hold for widths, multiples of 16."""
    assert split([48, 112, 320, 48, 80, 32], 3, 160) == [[2], [1, 0], [4, 3, 5]]
    assert split([44, 97, 305, 33, 66, 32], 3, 175) == [[2], [1, 0], [4, 3, 5]]
    assert split([16, 144, 16], 2, 160) == [[1, 0], [2]]
    assert split([1, 1, 1], 3, 32) == [[0, 1], [2]]
    assert split([], 4, 10) == []


def test_micro_batches_keep_both_limits_and_lose_nothing():
    random = np.random.default_rng(0)
    for _ in range(50):
        lengths = random.integers(1, 120, size=int(random.integers(1, 64))).tolist()
        groups = split(lengths, 5, 100)
        assert list(range(len(lengths))) == sorted(position for group in groups for position in group)
        for group in groups:
            assert len(group) <= 5
            assert len(group) == 1 or sum(width(lengths[position]) for position in group) <= 100
