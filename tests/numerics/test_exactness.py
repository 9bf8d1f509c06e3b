"""Exact techniques are exact: loss and every gradient against transformers' own model, in fp32.

The reference is ``AutoModelForCausalLM`` as it is, each example alone, full logits; nothing of finefit runs in it.
"""

import functools
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from finefit import models
from finefit.build import build
from finefit.loop import optimizer_step
from finefit.nn.optimizers import Optimizing
from finefit.run import padded, summed_loss, trainable
from finefit.techniques import Accumulation, Checkpointing, Clipping, FusedLoss, FusedOps, Lora, Packing, Precision
from tiny import (
    config_of,
    examples_of,
    gradients,
    loss_and_gradients,
    relative_error,
    run_of,
    stock,
    stock_loss_and_gradients,
    worst_error,
)  # fmt: skip

LENGTHS = (150, 3, 40, 2)


@functools.cache
def reference(attention="eager", tied=True):
    """The stock model's loss and gradients on the examples, at the weights of every ``run_of``."""
    config = config_of(tie_word_embeddings=tied)
    model = stock(config, run_of((), config_of(tie_word_embeddings=tied)), attention)
    return stock_loss_and_gradients(model, examples_of(LENGTHS))


EXACT = {
    "plain": (),
    "fused_ops": (FusedOps(),),
    "fused_loss": (FusedLoss(16),),
    "packing": (Packing(),),
    "checkpointing": (Checkpointing(3),),
    "clipping": (Clipping(float("inf")),),
    "accumulation": (Accumulation(2, most_steps=2),),
    "all": (FusedOps(), FusedLoss(16), Packing(), Checkpointing(3), Accumulation(2, most_steps=2)),
}


def batches_of(run, examples):
    groups = run.split([len(ids) for ids, _ in examples])
    return [run.collate([examples[i] for i in group]) for group in groups]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_loss_and_gradients_are_those_of_transformers(name, tied, attention):
    run = run_of(EXACT[name], config_of(tie_word_embeddings=tied))
    loss, found = loss_and_gradients(run, batches_of(run, examples_of(LENGTHS)))
    expected_loss, expected = reference(attention, tied)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst_error(found, expected)[0] <= 1e-5


def test_the_reference_can_tell_a_difference():
    """An attention that looks one token less far back is found at once."""
    run = run_of((), config_of("mistral", sliding_window=8))
    model = stock(config_of("mistral", sliding_window=7), run)
    examples = examples_of(LENGTHS)
    found = loss_and_gradients(run, batches_of(run, examples))[1]
    assert worst_error(found, stock_loss_and_gradients(model, examples)[1])[0] > 1e-3


def test_packed_examples_are_what_they_are_alone():
    run = run_of((Packing(), FusedOps()))
    examples = examples_of((130, 1, 7, 300, 2))
    with torch.no_grad():
        decoder = run.model.get_decoder()
        together = run.collate(examples)
        hidden = decoder(input_ids=together.ids_bs, position_ids=together.position_bs, bounds=together.bounds)
        for example, start in zip(examples, together.bounds, strict=False):
            alone = run.collate([example])
            seen = decoder(input_ids=alone.ids_bs, position_ids=alone.position_bs, bounds=alone.bounds)
            length = alone.bounds[1]
            found = hidden.last_hidden_state[0, start : start + length]
            assert relative_error(found, seen.last_hidden_state[0, :length]) <= 1e-6


def test_packed_and_padded_label_the_same_tokens():
    examples = examples_of((9, 1, 30))
    run = run_of((Packing(),))
    for collate in (run.collate, padded):
        batch = collate(examples)
        labelled = [t for ids, mask in examples for t, m in zip(ids[1:], mask[1:], strict=True) if m]
        assert labelled == batch.label_l.tolist()
        assert batch.ids_bs.flatten()[batch.row_r[: len(batch.label_l)] + 1].tolist() == batch.label_l.tolist()
        assert batch.tokens == 40


def test_padding_does_not_reach_the_loss():
    """The padding token's id is of no account."""
    run = run_of(())
    batch = padded(examples_of((40, 5)))
    changed = padded(examples_of((40, 5)))
    changed.ids_bs[1, 5:] = 7
    with torch.no_grad():
        assert summed_loss(run, batch).item() == summed_loss(run, changed).item()


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("others", [(), (Lora(4, dropout=0.3),), (Lora(4, dropout=0.3), FusedOps(), Packing())])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16_mixed"])
def test_checkpointing_is_exact_to_the_bit(blocks, others, kind):
    """Dropout too: a recomputed block draws what it drew before."""
    results = []
    for checkpointing in ((), (Checkpointing(blocks),)):
        run = run_of((Precision(kind), *others, *checkpointing))
        for name, p in run.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(3)
        results.append(loss_and_gradients(run, [run.collate(examples_of((50, 20)))]))
    (loss, expected), (found_loss, found) = results
    assert loss == found_loss
    assert all(torch.equal(found[name], expected[name]) for name in expected)


UNEQUAL = (2, 3, 200, 5, 90, 2, 4, 150, 3, 60, 2, 2, 8, 120, 30, 4)


def sizes_of_micro_batches(kind="fp32"):
    """Gradients of one global batch of 16 very unequal examples, by the size of a micro-batch."""
    found = {}
    for size in (16, 1, 4):
        run = run_of((Precision(kind), Packing(), FusedOps(), Accumulation(size)))
        examples = examples_of(UNEQUAL)
        batches = [run.collate(examples[i : i + size]) for i in range(0, 16, size)]
        found[size] = loss_and_gradients(run, batches)
    return found


def test_any_split_of_a_global_batch_gives_the_same_gradient():
    found = sizes_of_micro_batches()
    for one, other in itertools.combinations(found.values(), 2):
        assert one[0] == pytest.approx(other[0], rel=1e-6)
        assert worst_error(one[1], other[1])[0] <= 2e-6


def test_a_mean_of_means_would_be_wrong():
    """What dividing each micro-batch by its own labelled tokens would give, and why nobody should."""
    run = run_of((Packing(),))
    examples = examples_of(UNEQUAL)
    exact = loss_and_gradients(run, [run.collate(examples)])[1]
    run.model.zero_grad()
    for example in examples:
        batch = run.collate([example])
        (summed_loss(run, batch) / len(batch.label_l) / len(examples)).backward()
    assert worst_error(gradients(run.model), exact)[0] > 0.1


@pytest.mark.parametrize("max_norm", [0.01, 1e6, float("inf")])
def test_clipping_is_that_of_the_global_norm(max_norm):
    run = run_of((Clipping(max_norm), FusedLoss(16)))
    _, found = loss_and_gradients(run, [run.collate(examples_of((20, 9)))])
    norm = torch.cat([g.double().flatten() for g in found.values()]).norm()
    assert run.clip(trainable(run.model), run.world).item() == pytest.approx(norm.item(), rel=1e-6)
    factor = min(1.0, max_norm / norm.item())
    for name, p in run.model.named_parameters():
        assert relative_error(p.grad, found[name] * factor) <= 1e-5


def test_a_step_of_the_loop_is_adamw_on_the_exact_gradient():
    """Three updates of the loop against three of ``torch.optim.AdamW`` on the stock model."""
    run = run_of((FusedOps(), FusedLoss(16), Packing(), Checkpointing(2), Clipping(1.0), Accumulation(2)))
    model = stock(config_of(), run)
    ours = dict(run.model.named_parameters())
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(3):
        examples = examples_of((30, 5, 60, 2), seed=step)
        loss, norm, tokens, labelled = optimizer_step(run, batches_of(run, examples), 1e-3)
        expected_loss, _ = stock_loss_and_gradients(model, examples)
        expected_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        assert (tokens, labelled) == (97, sum(sum(mask[1:]) for _, mask in examples))
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm.item(), rel=1e-5)
    for name, p in model.named_parameters():
        # Adam divides by the gradient's own size, so an element whose gradient is rounding alone moves anywhere
        assert relative_error(ours[name].detach(), p.detach()) <= 1e-4


@pytest.mark.model
def test_the_real_model_trains_as_transformers_does(model_folder):
    """SmolLM2-135M-Instruct with its own weights, in fp32, everything exact on."""
    techniques = (Precision("fp32"), FusedOps(), FusedLoss(32), Packing(), Checkpointing(30))
    cpu = torch.device("cpu")
    run = build(models.config_of(model_folder), techniques, models.fill_from(model_folder), cpu, Optimizing())
    theirs = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    examples = examples_of((60, 5))
    loss, found = loss_and_gradients(run, [run.collate(examples)])
    expected_loss, expected = stock_loss_and_gradients(theirs.train(), examples)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst_error(found, expected)[0] <= 1e-4
