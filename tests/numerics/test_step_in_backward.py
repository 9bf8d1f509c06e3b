"""The optimizer's step in backward: to the bit the plain run's, and what is not finite is never applied."""

import math

import pytest
import torch

from finefit import checkpoint, loop, predict, rehearse
from finefit.errors import Diverged
from finefit.layout import layout_of
from finefit.run import trainable
from finefit.techniques import (
    Accumulation,
    Checkpointing,
    Clipping,
    FusedBackwardStep,
    FusedLoss,
    FusedOps,
    Lora,
    NotAsPlanned,
    Packing,
    Precision,
    Unsuitable,
)  # fmt: skip
from finefit.techniques.data_parallel import DataParallel
from tiny import config_of, examples_of, family_config, layout_for, measured, micro_of, predicted, run_of, spec_of

USED = (FusedOps(), Packing(), FusedLoss(16), Checkpointing(2), Clipping(0.0))
LENGTHS = (40, 24, 56)


def states(run):
    """Every weight and every state of it, by name."""
    named = {p: name for name, p in run.model.named_parameters()}
    weights = {name: p.detach().clone() for p, name in named.items()}
    held = {f"{named[p]}.{k}": t.clone() for p, state in run.optimizer.state.items() for k, t in state.items()}
    return {**weights, **held}


def stepped(run, steps=3, first=0):
    """(loss, norm) of some steps at another rate each."""
    for group in run.optimizer.param_groups:
        group["weight_decay"] = 0.1 if group["params"][0].dim() > 1 else 0.0
    batches = [run.collate(examples_of(LENGTHS, seed=first + i)) for i in range(steps)]
    rates = [1e-3 / (1 + first + i) for i in range(steps)]
    return [loop.optimizer_step(run, [batch], rate)[:2] for batch, rate in zip(batches, rates, strict=True)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", [(), (Lora(4, dropout=0.2),)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16_mixed"])
def test_three_steps_are_the_plain_runs_to_the_bit(kind, method, tied):
    """Losses, weights, moments and counts; the norm as it is rounded, by type."""
    plain, fused = (
        run_of((Precision(kind), *method, *USED, *extra), config_of(tie_word_embeddings=tied))
        for extra in ((), (FusedBackwardStep(),))
    )
    seen = []
    for run in (plain, fused):
        torch.manual_seed(5)
        seen.append(stepped(run))
    assert [loss for loss, _ in seen[0]] == [loss for loss, _ in seen[1]]
    rounding = 4e-3 if kind == "bf16" and not method else 1e-6
    assert [norm for _, norm in seen[1]] == pytest.approx([norm for _, norm in seen[0]], rel=rounding)
    expected, found = states(plain), states(fused)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert all(count == 3 for name, count in found.items() if name.endswith(".step"))


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe", "gemma2", "bloom"])
def test_other_families_as_they_are(family):
    """Blocks of transformers' own modules, biases, tables of positions, experts that no token comes to."""
    plain, fused = (run_of(extra, family_config(family)) for extra in ((), (FusedBackwardStep(),)))
    assert [loss for loss, _ in stepped(plain)] == [loss for loss, _ in stepped(fused)]
    expected, found = states(plain), states(fused)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_what_is_compared_moves():
    run = run_of((Precision("bf16_mixed"), *USED, FusedBackwardStep()))
    before = states(run)
    stepped(run, 1)
    assert [name for name, tensor in states(run).items() if torch.equal(tensor, before[name])] == []


def test_whenever_a_gradient_comes_no_other_is_kept():
    alive = []
    run = run_of((Precision("fp32"), *USED, FusedBackwardStep()))
    for p in trainable(run.model):
        p.register_hook(lambda _: alive.append(sum(q.grad is not None for q in trainable(run.model))))
    stepped(run, 1)
    assert alive == [0] * len(trainable(run.model))


def test_less_memory_than_the_plain_run_by_the_gradients_that_would_be_kept():
    """A short batch, so that gradients are most of the peak; to the byte as predicted."""
    config = config_of(intermediate_size=1024)
    peaks = []
    for extra in ((), (FusedBackwardStep(),)):
        techniques = (Precision("fp32"), FusedOps(), FusedLoss(4), *extra)
        run = run_of(techniques, config)
        batch = run.collate(examples_of((4,)))
        seen, said = measured(run, batch).moments(), predicted(config, techniques, batch).moments
        peaks.append(sum(n for c, n in seen["backward_peak"].items() if c != "input"))
        assert peaks[-1] == sum(n for c, n in said["backward_peak"].items() if c != "input")
    gradients = predict.states(layout_for(config, (Precision("fp32"),), batch))["gradient"]
    assert gradients / 2 < peaks[0] - peaks[1] < gradients


# --- what is not finite


def spoiled(run, name, value):
    """One element of a gradient is ``value``, as if a product had made it."""

    def spoil(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[3] = value
        return gradient

    return run.model.get_parameter(name).register_hook(spoil)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_not_applied_and_ends_the_run(value):
    name = "model.layers.1.mlp.up_proj.weight"
    run = run_of((Precision("fp32"), *USED, FusedBackwardStep()))
    stepped(run, 1)
    before = states(run)
    handle = spoiled(run, name, value)
    with pytest.raises(Diverged, match=r"norm (nan|inf)"):
        stepped(run, 1)
    after = states(run)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert torch.equal(after[name], before[name])
    assert torch.equal(after[f"{name}.step"], before[f"{name}.step"])
    earlier, later = "model.norm.weight", "model.embed_tokens.weight"  # in backward
    assert not torch.equal(after[earlier], before[earlier]) and torch.equal(after[later], before[later])
    handle.remove()
    ((_, norm),) = stepped(run, 1)  # nothing of it stays
    assert math.isfinite(norm)


def test_a_loss_that_is_not_a_number_changes_nothing():
    run = run_of((Precision("fp32"), *USED, FusedBackwardStep()))
    with torch.no_grad():
        run.model.get_parameter("model.norm.weight")[0] = math.nan
    before = states(run)
    with pytest.raises(Diverged, match="loss nan"):
        stepped(run, 1)
    after = states(run)
    assert all(torch.equal(after[name].nan_to_num(9.0), before[name].nan_to_num(9.0)) for name in before)


def test_a_second_micro_batch_of_a_step_is_noticed():
    run = run_of((Precision("fp32"), *USED, FusedBackwardStep()))
    batch = run.collate(examples_of(LENGTHS))
    with pytest.raises(RuntimeError, match="a second gradient in the same step"):
        loop.optimizer_step(run, [batch, batch], 1e-3)


# --- beside the steps


def test_a_rehearsal_leaves_no_trace():
    techniques = (Precision("bf16_mixed"), *USED, Accumulation(3), FusedBackwardStep())
    run = run_of(techniques)
    before, examples = states(run), examples_of(LENGTHS)
    rehearse.rehearse(run, examples, examples_of((5, 6)), techniques, 1)
    assert [name for name, tensor in states(run).items() if not torch.equal(tensor, before[name])] == []
    plain = run_of(techniques[:-1])
    stepped(run), stepped(plain)
    expected, found = states(plain), states(run)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_a_gradient_that_is_kept_is_noticed():
    technique = FusedBackwardStep()
    run = run_of((Precision("fp32"), *USED))
    ledger = measured(run, run.collate(examples_of((8,))))
    with pytest.raises(NotAsPlanned, match="gradients were kept"):
        technique.verify(run, ledger)


def test_resumed_it_goes_on_as_it_would_have(tmp_path):
    runs = [run_of((Precision("fp32"), *USED, FusedBackwardStep())) for _ in range(2)]
    stepped(runs[0], 2)
    checkpoint.save(runs[0], 2, tmp_path, "base", 1)
    assert checkpoint.load_newest(runs[1], tmp_path, lambda *_: None) == 2
    for run in runs:
        stepped(run, 2, first=2)
    expected, found = states(runs[0]), states(runs[1])
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


# --- what it declines


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ((Clipping(1.0),), "train.max_grad_norm=0"),
        ((Accumulation(1, most_steps=3),), "gradients of 3 micro-batches"),
        ((Precision("fp16_mixed"),), "a scaled loss"),
        ((DataParallel(2),), "several devices"),
    ],
    ids=["clipping", "accumulation", "scaler", "devices"],
)
def test_it_is_unsuitable_where_all_gradients_are_needed(others, why):
    layout = layout_of(spec_of(config_of()), micro_of(run_of((Packing(),)).collate(examples_of((8,)))))
    for technique in others:
        layout = technique.rewrite(layout)
    with pytest.raises(Unsuitable, match=why):
        FusedBackwardStep().rewrite(layout)
