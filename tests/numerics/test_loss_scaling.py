"""float16 with a dynamic scale of the loss: what underflows without one, what is skipped, and when it ends."""

import json
from functools import partial

import pytest
import torch

from finefit import checkpoint, loop
from finefit.errors import Diverged
from finefit.events import EventLog
from finefit.run import summed_loss
from finefit.techniques import Clipping, FusedLoss, FusedOps, Lora, Packing, Precision
from tiny import examples_of, gradients, relative_error, run_of

USED = (FusedOps(), Packing(), FusedLoss(32), Clipping())
EXAMPLES = examples_of((40, 24, 56))
SMALL = 1e-8  # of the loss: a gradient as of a hundred million labelled tokens


def small_gradients(kind, scaled=True, others=()):
    run = run_of((Precision(kind), *others, *USED))
    if not scaled:
        run.scaler = torch.amp.GradScaler("cpu", enabled=False)
    run.scaler.scale(summed_loss(run, run.collate(EXAMPLES)) * SMALL).backward()
    run.scaler.unscale_(run.optimizer)
    return gradients(run.model)


@pytest.mark.parametrize(("kind", "others"), [("fp16_mixed", ()), ("fp16", (Lora(4),))])
def test_small_gradients_are_lost_without_a_scale_and_those_of_fp32_with_one(kind, others):
    exact = small_gradients("fp32", others=others)
    scaled, plain = (small_gradients(kind, way, others) for way in (True, False))
    moved = [name for name, gradient in exact.items() if gradient.count_nonzero()]  # not A's, as B is zero at first
    assert max(relative_error(scaled[name], exact[name]) for name in moved) < 0.02
    assert min(relative_error(plain[name], exact[name]) for name in moved if "embed" not in name) > 0.3


def trained(run, path, steps, batches=None):
    """Steps of the loop itself over one micro-batch; its events."""
    batch = run.collate(EXAMPLES)
    hooks = loop.Hooks(lambda _: batches or [batch], lambda _: None, lambda _: None, lambda: False)
    with EventLog(path, []) as log:
        loop.train(run, loop.Pace(steps, lambda _: 1e-3, 0, 0, 1), hooks, log, 0)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_overflow_is_skipped_told_and_halves_the_scale(tmp_path):
    """The first scale is far too large: no weight moves until it is small enough, and then every one does."""
    run = run_of((Precision("fp16_mixed"), *USED))
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    events = trained(run, tmp_path / "one", 1)
    (skip,) = [event for event in events if event["event"] == "skip"]
    assert (skip["step"], skip["scale"], skip["skipped"]) == (1, 2.0**23, 1)
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    events = trained(run, tmp_path / "more", 20)
    skips = [event["step"] for event in events if event["event"] == "skip"]
    assert skips == list(range(1, len(skips) + 1)) and 0 < len(skips) < 20
    assert run.scaler.get_scale() == 2.0 ** (23 - len(skips))
    assert not any(torch.equal(p, before[name]) for name, p in run.model.named_parameters())


def test_the_scale_grows_after_updates_without_a_skip(tmp_path):
    run = run_of((Precision("fp16_mixed"), *USED))
    run.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    trained(run, tmp_path / "log", 7)
    assert run.scaler.get_scale() == 64.0 * 2 * 2


def test_a_run_that_only_skips_ends_with_a_reason(tmp_path):
    run = run_of((Precision("fp16_mixed"), *USED))
    with torch.no_grad():
        run.model.get_input_embeddings().weight.mul_(1e6)
    with pytest.raises(Diverged, match="25 updates in a row were skipped") as told:
        trained(run, tmp_path / "log", 100)
    assert "memory.precision=fp32" in told.value.hint
    assert sum(json.loads(line)["event"] == "skip" for line in (tmp_path / "log").read_text().splitlines()) == 25


def test_losses_follow_those_of_fp32(tmp_path):
    half, single = (
        [
            event["loss"]
            for event in trained(run_of((Precision(kind), *USED)), tmp_path / kind, 12)
            if event["event"] == "step"
        ]
        for kind in ("fp16_mixed", "fp32")
    )
    assert half == pytest.approx(single, rel=2e-3)
    assert half[-1] < 0.9 * half[0]


def test_the_scale_is_saved_and_taken_up_again(tmp_path):
    run, other = (run_of((Precision("fp16"), Lora(4), *USED)) for _ in range(2))
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    trained(run, tmp_path / "log", 12)
    checkpoint.save(run, 12, tmp_path / "kept", "base", 1)
    assert checkpoint.load_newest(other, tmp_path / "kept", lambda *_: None) == 12
    assert other.scaler.state_dict() == run.scaler.state_dict() != torch.amp.GradScaler("cpu").state_dict()
    losses = [loop.optimizer_step(one, [one.collate(EXAMPLES)], 1e-3)[0] for one in (run, other)]
    assert losses[0] == losses[1]
    after = partial(zip, run.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in after())
