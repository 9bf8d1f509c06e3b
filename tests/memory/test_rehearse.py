"""The rehearsal measures what the plan predicts, notices what is not as planned, and leaves no trace."""

import dataclasses

import pytest
import torch

from finefit.layout import layout_of
from finefit.ledger import Ledger
from finefit.rehearse import check_blind, rehearse
from finefit.run import blocks_of, padded, plain_loss
from finefit.techniques import (
    Accumulation,
    Checkpointing,
    Clipping,
    FusedBackwardStep,
    FusedLoss,
    FusedOps,
    Lora,
    NotAsPlanned,
    OptimizerOffload,
    Packing,
    ParameterOffload,
    Precision,
    QuantizedBase,
    Unsuitable,
)
from finefit.techniques.quantized_base import FORMS
from tiny import FAMILIES, config_of, examples_of, micro_of, predicted, run_of, spec_of

USED = (
    Precision("bf16"), Lora(4, dropout=0.1), FusedOps(), Packing(), Checkpointing(2), FusedLoss(32),
    Accumulation(3, most_steps=2), Clipping(),
)  # fmt: skip


def snapshot(run):
    states = [t for state in run.optimizer.state.values() for t in state.values()]
    return [t.clone() for t in (*run.model.parameters(), *states)]


def test_a_rehearsal_measures_what_was_predicted():
    run = run_of(USED)
    worst = examples_of((128, 128, 64))
    found = rehearse(run, worst, examples_of((9, 12), seed=1), USED, 5)
    said = predicted(config_of(), USED, run.collate(worst), 2)
    assert (found.witness, said.witness) == ("measured", "predicted")
    assert found.peak_moment == said.peak_moment
    for moment in ("forward_end", "loss", "backward_peak", "optimizer_step"):
        for component in ("parameter", "gradient", "optimizer_state", "activation"):
            assert found.moments[moment].get(component, 0) == said.moments[moment].get(component, 0)
        # but for the rotary frequencies, and a few norms of single gradients
        assert abs(found.at(moment) - said.at(moment)) <= 4 * config_of().head_dim + 8


def test_a_rehearsal_leaves_no_trace():
    run = run_of(USED)
    before, drawn = snapshot(run), torch.get_rng_state()
    rates = [(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups]
    rehearse(run, examples_of((60, 20)), examples_of((9, 12)), USED, 2)
    assert all(torch.equal(was, now) for was, now in zip(before, snapshot(run), strict=True))
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(p.grad is None for p in run.model.parameters())
    assert [decay for _, decay in rates] == [group["weight_decay"] for group in run.optimizer.param_groups]


def test_weight_decay_does_not_move_weights_in_a_rehearsal():
    run = run_of((Precision("fp32"), Packing()))
    for group in run.optimizer.param_groups:
        group["weight_decay"] = 0.3
    before = snapshot(run)
    rehearse(run, examples_of((30,)), [], (Precision("fp32"), Packing()), 1)
    assert all(torch.equal(was, now) for was, now in zip(before, snapshot(run), strict=True))
    assert {0.3} == {group["weight_decay"] for group in run.optimizer.param_groups}


def not_finite(loss):
    return lambda *args: loss(*args) * float("inf")


NOT_FINITE = {
    "plain": (Packing(), Clipping()),
    "away": (Packing(), OptimizerOffload("disk")),
    "in backward": (Packing(), FusedBackwardStep()),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_gradient_that_is_not_finite_leaves_the_weights_as_they_were(name):
    used = NOT_FINITE[name]
    run = run_of(used)
    run.loss = not_finite(run.loss)
    before = snapshot(run)
    rehearse(run, [([5] * 40, [1] * 40)], examples_of((8, 9)), used, 1)
    assert all(torch.equal(one, other) for one, other in zip(before, snapshot(run), strict=True))


def test_a_trained_adapter_with_dropout_passes_the_rehearsal():
    """The neighbour check compares two forward passes: dropout must not differ between them."""
    run = run_of(USED)
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    rehearse(run, examples_of((60, 20)), examples_of((9, 12)), USED, 2)
    assert run.model.training


@pytest.mark.parametrize("collate", ["packed", "padded"])
def test_examples_are_blind_to_each_other(collate):
    run = run_of((Packing(),) if collate == "packed" else ())
    check_blind(run, examples_of((20, 14)))


def test_a_neighbour_that_is_seen_is_noticed():
    run = run_of((Packing(),))

    def open_doors(examples, packed=run.collate):
        batch = packed(examples)
        return dataclasses.replace(batch, bounds=(0, batch.bounds[1] - 16, batch.bounds[-1]))

    run.collate = open_doors
    with pytest.raises(NotAsPlanned, match="with its neighbour"):
        check_blind(run, examples_of((20, 14)))


def undo_precision(run):
    run.model.get_input_embeddings().to(torch.float32)


def undo_fused_ops(run):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    run.model.get_decoder().norm = LlamaRMSNorm(64).bfloat16().requires_grad_(False)


def undo_packing(run):
    run.collate = padded


def undo_checkpointing(run):
    block = run.model.get_decoder().layers[0]
    block.forward = type(block).forward.__get__(block)


def undo_fused_loss(run):
    run.loss = plain_loss


def undo_lora(run):
    run.model.get_decoder().layers[1].mlp.up_proj.lora_A.requires_grad_(False)


def thaw_base(run):
    run.model.get_decoder().norm.weight.requires_grad_(True)


UNDONE = {
    "precision": undo_precision, "fused_ops": undo_fused_ops, "packing": undo_packing,
    "checkpointing": undo_checkpointing, "fused_loss": undo_fused_loss, "lora": undo_lora,
}  # fmt: skip


@pytest.mark.parametrize("name", [*UNDONE, "thawed base"])
def test_what_does_not_run_as_planned_is_named(name):
    run = run_of(USED)
    {**UNDONE, "thawed base": thaw_base}[name](run)
    with pytest.raises(NotAsPlanned) as caught:
        rehearse(run, examples_of((80, 60)), [], USED, 2)
    assert str(caught.value).startswith("lora" if name == "thawed base" else name)


AWAY = {  # where what a post-condition looks for is elsewhere when the step is over
    "stepped in backward": (FusedBackwardStep(),),
    "states on disk": (OptimizerOffload("disk", "disk"),),
    "sums on the device": (OptimizerOffload("disk", "device"),),
    "both": (OptimizerOffload("disk", "device"), FusedBackwardStep()),
    "weights on disk": (ParameterOffload("disk"),),
}


@pytest.mark.parametrize(
    "form", [f if f in ("plain", "nf4") else pytest.param(f, marks=pytest.mark.slow) for f in ("plain", *FORMS)]
)
@pytest.mark.parametrize("away", AWAY)
def test_an_adapter_passes_the_rehearsal_wherever_its_gradients_and_the_base_are(away, form):
    """Gradients may be gone before the step is over; codes of 3 bits have a table larger than many weights."""
    base = () if form == "plain" else (QuantizedBase(*FORMS[form], 2**14),)
    used = (Precision("bf16"), *base, Lora(4), FusedOps(), Packing(), FusedLoss(32), *AWAY[away])
    run = run_of(used)
    rehearse(run, examples_of((40, 20)), examples_of((9, 12)), used, 1)
    assert all(p.grad is None for p in run.model.parameters())


@pytest.mark.parametrize("away", AWAY)
def test_an_adapter_without_a_gradient_is_noticed_wherever_gradients_are(away):
    used = (Precision("bf16"), Lora(4), FusedOps(), Packing(), FusedLoss(32), *AWAY[away])
    run = run_of(used)
    run.optimizer.updated.add(
        run.model.get_decoder().layers[1].mlp.up_proj.lora_A
    )  # of an earlier step: counts for nothing
    undo_lora(run)
    with pytest.raises(NotAsPlanned, match=r"^lora: 1 adapter"):
        rehearse(run, examples_of((40, 20)), [], used, 1)


def test_more_blocks_to_checkpoint_than_there_are_is_unsuitable():
    batch = padded(examples_of((8,)))
    with pytest.raises(Unsuitable, match="5 blocks to checkpoint, the model has 4"):
        Checkpointing(5).rewrite(layout_of(spec_of(config_of()), micro_of(batch)))


@pytest.mark.parametrize("part", ["self_attn", "mlp", "input_layernorm"])
def test_a_module_that_was_not_taken_over_is_noticed(part):
    run, plain = run_of((FusedOps(),)), run_of(())
    FusedOps().verify(run, Ledger())
    setattr(blocks_of(run.model)[0], part, getattr(blocks_of(plain.model)[0], part))
    with pytest.raises(NotAsPlanned, match=f"layers.0.{part}"):
        FusedOps().verify(run, Ledger())


# What the shipped graphs are of: switches as most models of a family have them; BLOOM's sizes follow from its width.
BUILT = {
    "gpt_neox": {"attention_bias": True}, "phi": {}, "qwen3_moe": {}, "dots1": {}, "gpt_oss": {}, "falcon": {},
    "bloom": {"num_key_value_heads": 4, "intermediate_size": 256}, "stablelm": {"use_qkv_bias": True},
}  # fmt: skip


@pytest.mark.parametrize("name", BUILT)
def test_a_step_of_any_family_measures_what_its_shipped_coefficients_predict(name):
    """Partly turned heads, a head with a bias, experts, dense blocks first, rows that are not packed."""
    tied = name in ("bloom", "falcon")
    config = config_of(name, **{"num_hidden_layers": 4, **FAMILIES[name], "tie_word_embeddings": tied, **BUILT[name]})
    packs = spec_of(config).packs
    used = (Precision("bf16"), Lora(4), FusedOps(), *([Packing()] * packs), FusedLoss(8), Accumulation(2, most_steps=2))
    run, lengths = run_of(used, config), (256,) if packs else (48, 48)
    found = rehearse(run, examples_of(lengths), examples_of((9, 12), seed=1), used, 5)
    said = predicted(config, used, run.collate(examples_of(lengths)), 2)
    for moment in ("forward_end", "loss", "backward_peak", "optimizer_step"):
        # but for rotary frequencies, counts of experts' tokens, and rows that share one row of positions
        assert found.at(moment) == pytest.approx(said.at(moment), abs=512)
