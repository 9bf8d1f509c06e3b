"""The loop's own judgements: which losses are spikes, when there is an evaluation."""

import math
import random

import pytest

from finefit.loop import Pace, Spikes, evaluates, warmup_then_linear


def test_a_loss_far_above_those_before_is_a_spike_and_is_not_counted():
    spikes, rng = Spikes(), random.Random(0)
    for _ in range(Spikes.BEFORE):
        assert spikes.usual(2 + rng.gauss(0, 0.1)) == 0
    assert spikes.usual(9.0) == spikes.usual(9.0) == pytest.approx(2, abs=0.1)
    assert spikes.usual(2.4) == 0


def test_neither_noise_nor_the_first_steps_nor_what_is_no_number_are_spikes():
    spikes, rng = Spikes(), random.Random(0)
    assert [spikes.usual(loss) for loss in (9.0, 2.0, 50.0, math.nan, math.inf)] == [0] * 5
    assert all(spikes.usual(math.exp(rng.gauss(1, 0.15))) == 0 for _ in range(300))


def test_a_falling_loss_has_no_spikes():
    spikes = Spikes()
    assert all(spikes.usual(10 * 0.99**step) == 0 for step in range(500))


def test_there_is_an_evaluation_at_the_end_and_every_so_many_steps():
    pace = Pace(7, warmup_then_linear(1.0, 7, 0), 3, 0, 1)
    assert [step for step in range(1, 8) if evaluates(pace, step)] == [3, 6, 7]
    assert [step for step in range(1, 8) if evaluates(Pace(7, pace.learning_rate, 0, 0, 1), step)] == [7]
