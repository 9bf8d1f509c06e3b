"""States and steps elsewhere are the same steps: weights, states and norms to the bit, wherever they are made.

A host beside a GPU is played by the CPU beside itself: the same twins, sums and copies, without streams.
"""

import errno
import os
import random

import pytest
import torch

from finefit import checkpoint, loop
from finefit.errors import EngineError
from finefit.run import trainable
from finefit.scratch import Scratch, is_mapped
from finefit.techniques import Accumulation, Clipping, Lora, OptimizerOffload, Packing, Precision, Unsuitable
from tiny import config_of, examples_of, layout_for, run_of

WAYS = {
    "host": OptimizerOffload("host", "host"),
    "disk": OptimizerOffload("disk", "disk"),
    "states on disk": OptimizerOffload("disk", "device"),
    "disk beside a GPU": OptimizerOffload("disk", "host"),
}
SPLIT = Accumulation(1, most_steps=3)


def stepped(techniques, steps=3, run=None, first=0):
    """The run after some steps of three micro-batches each, and their losses and norms."""
    run = run or run_of((SPLIT, Clipping(0.5), Packing(), *techniques), config_of(num_hidden_layers=2))
    seen = []
    for step in range(first, first + steps):
        examples = examples_of((30, 7, 19), seed=step)
        batches = [run.collate([examples[i] for i in group]) for group in run.split([len(ids) for ids, _ in examples])]
        seen.append(loop.optimizer_step(run, batches, 1e-2)[:2])
    return run, seen


def state_of(run):
    weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    states = {
        f"{name}.{key}": tensor.clone()
        for name, p in run.model.named_parameters()
        for key, tensor in run.optimizer.states_of(p).items()
    }
    return {**weights, **states}


def assert_same(run, other):
    found, expected = state_of(run), state_of(other)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("others", [(), (Lora(4),)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16_mixed", "fp16_mixed"])
def test_steps_are_the_same_to_the_bit(way, others, kind):
    plain, expected = stepped((Precision(kind), *others))
    offloaded, seen = stepped((Precision(kind), *others, WAYS[way]))
    assert seen == expected
    assert_same(offloaded, plain)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_it_is_held_where_the_model_is(way):
    run, _ = stepped((WAYS[way],), steps=1)
    if WAYS[way].place == "disk":  # a CPU's host is the CPU
        assert [t for p in run.model.parameters() for t in run.optimizer.held(p) if t.dim()] == []
    assert [p for p in run.model.parameters() if p.grad is not None] == []
    if WAYS[way].place == "disk":
        assert all(is_mapped(t) for p in trainable(run.model) for t in run.optimizer.states_of(p).values() if t.dim())


@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_leaves_all_as_it_was(way):
    run, _ = stepped((Precision("fp16_mixed"), WAYS[way]), steps=1)
    before = state_of(run)
    run.scaler.update(2.0**40)
    _, ((_, norm),) = stepped((), steps=1, run=run)
    assert norm == float("inf") or norm != norm
    after = state_of(run)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_is_the_undisturbed_one(way, tmp_path):
    """Also into a run whose twins were made before the checkpoint was read."""
    whole, _ = stepped((WAYS[way],), steps=4)
    half, _ = stepped((WAYS[way],), steps=2)
    checkpoint.save(half, 2, tmp_path, "base", keep=1)
    resumed = run_of((SPLIT, Clipping(0.5), Packing(), WAYS[way]), config_of(num_hidden_layers=2), seed=5)
    assert checkpoint.load_newest(resumed, tmp_path, lambda *_: None) == 2
    stepped((), steps=2, run=resumed, first=2)
    assert_same(resumed, whole)


def test_a_parameter_without_a_gradient_is_not_stepped():
    """An expert that no token was sent to, say: its twin must not be stepped by what came last time."""
    run, _ = stepped((WAYS["host"],), steps=1)
    left_out = run.model.get_decoder().layers[0].mlp.up_proj.weight
    before, hooked = left_out.detach().clone(), left_out.requires_grad_(False)
    stepped((), steps=1, run=run, first=1)
    assert torch.equal(hooked, before)


def test_pages_of_states_are_let_go(monkeypatch):
    """Each parameter's states and the sum of its gradients, once it is stepped, in order."""
    gone = []
    monkeypatch.setattr("finefit.nn.mapped_states.let_go", lambda t: gone.append(t.data_ptr()))
    run, _ = stepped((WAYS["disk"],), steps=1)
    expected = [t.data_ptr() for group in run.optimizer.param_groups for p in group["params"]
                for t in (*run.optimizer.state[p].values(), run.optimizer.home.sums[p])]  # fmt: skip
    assert gone == expected


def test_mapped_values_outlive_their_pages(tmp_path):
    scratch, rng = Scratch(tmp_path), random.Random(0)
    drawn = [torch.randn(rng.randint(1, 20_000)) for _ in range(20)]
    mapped = [scratch.mapped(t) for t in drawn]
    for tensor in mapped:
        tensor.mul_(2)
    os.sync()
    assert all(torch.equal(m, 2 * d) for m, d in zip(mapped, drawn, strict=True))


def test_no_room_on_the_disk_is_said_before_the_first_step(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match="No space left"):
        run_of((WAYS["disk"],))


def test_settings_that_name_no_way_are_refused():
    batch = run_of(()).collate(examples_of((8,)))
    with pytest.raises(Unsuitable, match="stepped there"):
        layout_for(config_of(), (OptimizerOffload("host", "device"),), batch)
