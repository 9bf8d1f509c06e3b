"""Whatever combination the planner can propose runs, is exact, and takes the bytes that were predicted.

Sixty combinations of a seed on tiny models, ten on the real one: see ``drawn``. A combination that fails says what a user
would have to write to have it.
"""

import functools
import math
from dataclasses import replace

import pytest

import drawn
import looked_at
from finefit import predict
from finefit.footprint import STEP
from finefit.techniques import Lora, Precision, allocator

SEED, COUNT, REAL = 20261130, 60, 10
MOST_TRACED = 5  # of graphs that are not shipped: a trace takes a second or two
WITHIN, OFTEN, NEVER_LOWER = 0.03, 0.95, 0.05


@pytest.fixture(autouse=True)
def heap_as_it_is(monkeypatch):
    """A trimmed heap would stay so for the tests that follow: what it does is tested in a process of its own."""
    monkeypatch.setattr(allocator, "_trim_heap", lambda _bytes: 1)


class _Numbered:
    """Draws by number: the same whichever of them are asked for."""

    def __init__(self, draws):
        self.draws, self.iterator, self.found = draws, iter(draws), []

    def __getitem__(self, number):
        while len(self.found) <= number:
            self.found.append(next(self.iterator))
        return self.found[number]


@functools.cache
def tiny():
    return _Numbered(drawn.Draws(drawn.tiny_subjects(), SEED, MOST_TRACED))


@functools.cache
def bytes_of(number):
    return looked_at.bytes_of(tiny()[number])


def precision_of(one):
    return next(t.kind for t in one.techniques if isinstance(t, Precision))


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n % 5 > 0)) for n in range(COUNT)])
def test_loss_and_gradients_are_the_plain_runs(number):
    """In fewer bits than fp32 the order of operations shows: no more than twice what the plain run itself is off by."""
    one = tiny()[number]
    found, is_fp32 = looked_at.exactness(one), precision_of(one) == "fp32"
    assert found.loss <= (1e-5 if is_fp32 else 2**-8), one.says()
    assert found.gradients <= (1e-5 if is_fp32 else 2 * found.of_plain), one.says()
    assert found.weights == 0, one.says()


@pytest.mark.parametrize("number", range(COUNT))
def test_bytes_at_rest_are_predicted_exactly_and_nothing_else_is_left(number):
    one, found = tiny()[number], bytes_of(number)
    assert found.measured_states == found.predicted_states, one.says()
    kept = {component: found.predicted_states[component] for component in ("parameter", "optimizer_state")}
    left = {component: n_bytes for component, n_bytes in found.left.items() if n_bytes and component != "input"}
    assert left == {component: n_bytes for component, n_bytes in kept.items() if n_bytes}, one.says()
    assert all(math.isfinite(loss) for loss in found.losses), one.says()


def test_peaks_are_predicted():
    """Of the worst micro-batch, and of a step of one; of several the largest comes first, when gradients are not there yet."""
    off = {number: bytes_of(number).off for number in range(COUNT)}
    steps = {number: bytes_of(number).off_in_steps for number in range(COUNT)}
    far = {number: (off[number], tiny()[number].says()) for number in off if abs(off[number]) > WITHIN}
    assert len(far) <= (1 - OFTEN) * COUNT, far
    assert min(off.values()) > -NEVER_LOWER and min(steps.values()) > -NEVER_LOWER
    alone = [n for n in steps if tiny()[n].work.most_steps == 1]
    assert sum(abs(steps[n]) > WITHIN for n in alone) <= (1 - OFTEN) * COUNT


def test_what_was_refused_was_refused_for_many_reasons():
    """By errors of finefit's own: anything else would have come out of the draw."""
    tiny()[COUNT - 1]
    assert len(tiny().draws.refused) >= 8
    assert tiny().draws.traced == MOST_TRACED


def test_every_technique_for_one_device_is_drawn():
    of_all = {t.name for number in range(COUNT) for t in tiny()[number].techniques}
    assert of_all == {t.name for t in drawn.ON_ONE_DEVICE}


def test_a_paper_half_that_forgets_something_is_found():
    """An adapter of another rank is not what is there."""
    one, found = next(
        (tiny()[n], bytes_of(n)) for n in range(COUNT) if any(t.name == "lora" for t in tiny()[n].techniques)
    )
    other = tuple(replace(t, rank=t.rank + 1) if isinstance(t, Lora) else t for t in one.techniques)
    assert predict.states(replace(one, techniques=other).layout()) != found.measured_states


@pytest.fixture(scope="module")
def real(model_folder):
    return _Numbered(drawn.Draws((drawn.real_subject(model_folder),), SEED, 0, steps=1, sizes=(1,)))


@pytest.mark.model
@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] if n > 1 else []) for n in range(REAL)])
def test_bytes_of_the_real_model(number, real):
    one = real[number]
    found = looked_at.bytes_of(one)
    assert found.measured_states == found.predicted_states, one.says()
    assert math.isfinite(found.losses[0])
    assert -NEVER_LOWER < found.off <= WITHIN, one.says()
    assert -NEVER_LOWER < found.off_in_steps <= WITHIN, one.says()
    assert set(found.rehearsed) >= set(STEP)
