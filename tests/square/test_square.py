"""The law: bytes counted after ``apply`` on the real model equal bytes counted after ``rewrite`` on paper.

For every technique alone and every pair, in every precision: parameters, gradients and optimizer states of the real
run after a step; and what lives at the highest point of each moment, as the ledger sees it on real tensors. Bytes of
the input are left out (the paper half does not count the rotary frequencies and what padding expands), and the norms
of clipping are counted by the tensor: a few bytes.
"""

import dataclasses
import itertools
from typing import get_args

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from finefit import models, predict, trace
from finefit.fakes import without_values
from finefit.ledger import Ledger
from finefit.nn.optimizers import Optimizing
from finefit.run import trainable
from finefit.techniques import (
    DIVIDING,
    TECHNIQUES,
    Accumulation,
    ActivationOffload,
    Allocator,
    Checkpointing,
    Clipping,
    Fp32Islands,
    FusedBackwardStep,
    FusedLoss,
    FusedOps,
    Lora,
    OptimizerOffload,
    OptimizerStates,
    Packing,
    ParameterOffload,
    Precision,
    QuantizedBase,
)  # fmt: skip
from finefit.techniques.quantized_base import FORMS
from finefit.updating import OptimizerKind
from tiny import FAMILIES, config_of, examples_of, family_config, layout_for, measured, micro_of, predicted, run_of

KINDS = ("fp32", "bf16", "bf16_mixed", "fp16_mixed")
ONE_OF_EACH = (
    QuantizedBase(chunk=2**14), Lora(4), OptimizerStates("adamw_8bit", chunk=2**12), FusedOps(), Fp32Islands(("norms", "head")), ParameterOffload("disk"), Packing(), Checkpointing(4),
    ActivationOffload("disk"), FusedLoss(32), Accumulation(2, most_steps=2), Clipping(0.5),
    OptimizerOffload("disk", "disk"), FusedBackwardStep(), Allocator("expandable"),
)  # fmt: skip
# What is not exact together, and refused.
UNSUITED = tuple({other, FusedBackwardStep} for other in (Accumulation, Clipping, OptimizerOffload))
# What something is of no use without: checkpointed blocks, frozen weights.
NEEDED = ((ActivationOffload, (Checkpointing,), Checkpointing(4)), (ParameterOffload, (QuantizedBase, Lora), Lora(4)))


def with_needed(*techniques):
    kinds = {type(t) for t in techniques}
    return (*techniques, *(one for kind, any_of, one in NEEDED if kind in kinds and not kinds & set(any_of)))


PAIRS = [pair for pair in itertools.combinations(ONE_OF_EACH, 2) if set(map(type, pair)) not in UNSUITED]
SETS = list(dict.fromkeys([(), *(with_needed(t) for t in ONE_OF_EACH), *(with_needed(*pair) for pair in PAIRS)]))
MOMENTS = ("forward_end", "loss", "backward_peak", "optimizer_step")
# The trace spreads the few scalars of the global norm that are not one a gradient over the gradients.
NORMS = 8  # bytes, and one for every eighth gradient


def names(techniques):
    return "+".join(t.name for t in techniques) or "plain"


def at_rest(run):
    """Bytes of distinct storages by component, counted on the tensors themselves."""
    states = run.optimizer.all_held()
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    owners = {"parameter": list(run.model.parameters()), "gradient": gradients, "optimizer_state": states}
    return {
        component: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        for component, tensors in owners.items()
    }


def differences(ledger, footprint):
    """Predicted − measured bytes at each moment, input apart."""
    seen, said = ledger.moments(), footprint.moments
    return {
        moment: sum(n - seen[moment].get(c, 0) for c, n in {**dict.fromkeys(seen[moment], 0), **said[moment]}.items()
                    if c != "input")
        for moment in MOMENTS
    }  # fmt: skip


WIDE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 192}


def config_for(techniques):
    """Where weights are quantised every one of them is at least a chunk, as in the trace."""
    return config_of(**WIDE) if any(isinstance(t, QuantizedBase) for t in techniques) else config_of()


def stepping_takes(techniques):
    """Whether a rule that takes something beside its states steps in backward."""
    return {FusedBackwardStep, OptimizerStates} <= {type(t) for t in techniques}


def assert_square(techniques, config=None, lengths=(128, 128), micro_steps=1):
    config = config or config_for(techniques)
    run = run_of(techniques, config)
    batch = run.collate(examples_of(lengths))
    ledger = measured(run, batch, micro_steps)
    assert predict.states(layout_for(config, techniques, batch)) == at_rest(run)
    off = differences(ledger, predicted(config, techniques, batch, micro_steps))
    if stepping_takes(techniques):  # counted on top of all that is there in backward, wherever it comes
        assert 0 <= off.pop("backward_peak") <= predict.temporary_bytes(layout_for(config, techniques, batch))
        off["backward_peak"] = 0
    assert {m: off[m] for m in MOMENTS[:3]} == {"forward_end": 0, "loss": 0, "backward_peak": 0}
    assert abs(off["optimizer_step"]) <= NORMS + sum(p.requires_grad for p in run.model.parameters()) // 8


def test_every_technique_is_in_the_square():
    """What divides a run over devices is planned, not carried out yet: its other half is a simulated rank."""
    assert set(TECHNIQUES) == {Precision, *(type(t) for t in ONE_OF_EACH), *DIVIDING}


# What changes nothing of what a forward or a backward makes, and a quantised base, whose pairs take ten seconds each (with
# adapters it is in many other tests): pairs with them are slow.
BETWEEN = {Accumulation, Clipping, Allocator, QuantizedBase}


def in_every_precision():
    """Each alone in two of them, pairs in one; the others are slow."""
    for techniques, kind in itertools.product(SETS, KINDS):
        if kind == "fp16_mixed" and FusedBackwardStep() in techniques:
            continue  # refused: a scaled loss needs all gradients before a step
        if len(techniques) > 1:
            is_other = kind != "bf16_mixed" or not BETWEEN.isdisjoint(map(type, techniques))
        else:
            is_other = kind not in ("fp32", "bf16_mixed")
        marks = [pytest.mark.slow] if is_other else []
        yield pytest.param(techniques, kind, marks=marks, id=f"{names(techniques)}-{kind}")


@pytest.mark.parametrize(("techniques", "kind"), in_every_precision())
def test_square(techniques, kind):
    steps = next((t.most_steps for t in techniques if isinstance(t, Accumulation)), 1)
    assert_square((Precision(kind), *techniques), micro_steps=steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [2**12, pytest.param(2**18, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", get_args(OptimizerKind))
def test_square_of_every_optimizer(optimizer, chunk, kind):
    """A projected gradient needs sides beyond the rank for itself: the tiny model's are not, so it has wider ones too."""
    config = config_of(hidden_size=320, head_dim=80, intermediate_size=448) if optimizer == "apollo" else None
    assert_square((Precision(kind), OptimizerStates(optimizer, chunk=chunk), Clipping()), config)


@pytest.mark.parametrize("chunk", [2**12, 2**18])
@pytest.mark.parametrize("optimizer", get_args(OptimizerKind))
def test_square_of_rounding_by_chance(optimizer, chunk):
    config = config_of(hidden_size=320, head_dim=80, intermediate_size=448) if optimizer == "apollo" else None
    assert_square((Precision("bf16"), OptimizerStates(optimizer, "stochastic", chunk), FusedLoss(32)), config)


@pytest.mark.parametrize("optimizer", get_args(OptimizerKind))
@pytest.mark.parametrize("base", [(), (QuantizedBase(chunk=2**14),)], ids=["plain", "quantised"])
def test_square_of_every_optimizer_on_adapters(optimizer, base):
    used = (Precision("fp16"), *base, Lora(4), OptimizerStates(optimizer, chunk=2**12), FusedOps(), FusedLoss(32))
    assert_square(used, config_of(**WIDE), micro_steps=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_square_of_checkpointed_beside_plain_blocks(blocks, kind):
    assert_square((Precision(kind), Packing(), Checkpointing(blocks)), micro_steps=2)


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("blocks", [0, 1, 3, 4])
def test_square_of_what_a_plan_uses(blocks, micro_steps):
    """Everything on, as ``search`` does, with dropout, in bf16."""
    checkpointing = [Checkpointing(blocks)] if blocks else []
    used = (Precision("bf16"), Lora(4, dropout=0.1), FusedOps(), Packing(), FusedLoss(32), Clipping(), *checkpointing)
    assert_square(used, micro_steps=micro_steps)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["bf16", "bf16_mixed", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("blocks", [0, 2, 4])
@pytest.mark.parametrize("method", [(), (Lora(4),)], ids=["full", "lora"])
def test_square_of_a_step_in_backward_as_a_plan_uses_it(method, blocks, kind, tied):
    checkpointing = [Checkpointing(blocks)] if blocks else []
    used = (Precision(kind), *method, FusedOps(), Packing(), FusedLoss(32), *checkpointing)
    assert_square((*used, Clipping(0.0), Accumulation(2), FusedBackwardStep()), config_of(tie_word_embeddings=tied))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3"])
def test_square_of_a_step_in_backward_of_every_family(name):
    config, techniques = family_config(name), (Precision("bf16_mixed"), FusedOps(), Packing(), FusedLoss(32))
    run = run_of((*techniques, FusedBackwardStep()), config)
    batch = run.collate(examples_of((128, 128)))
    off = differences(measured(run, batch), predicted(config, (*techniques, FusedBackwardStep()), batch))
    assert off["loss"] == off["backward_peak"] == 0


@pytest.mark.parametrize("base", [(), (QuantizedBase(chunk=2**14),)], ids=["plain", "quantised"])
def test_square_of_adapters_on_a_base_in_fp16(base):
    used = (Precision("fp16"), *base, Lora(4), FusedOps(), Packing(), FusedLoss(32), Clipping())
    assert_square(used, config_of(**WIDE), micro_steps=2)


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("blocks", [0, 2, 4])
@pytest.mark.parametrize(
    "form", ["nf4", "lloyd3", *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS if f not in ("nf4", "lloyd3"))]
)
def test_square_of_a_quantised_base_as_a_plan_uses_it(form, blocks, micro_steps):
    checkpointing = [Checkpointing(blocks)] if blocks else []
    base = QuantizedBase(*FORMS[form], 2**14)
    assert_square((Precision("bf16"), base, Lora(4), FusedOps(), Packing(), FusedLoss(32), *checkpointing),
                  micro_steps=micro_steps)  # fmt: skip


@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize(
    "base", ["plain", "nf4", *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS if f != "nf4")]
)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_square_of_streamed_weights_as_a_plan_uses_them(base, blocks, tied):
    """A slot is the larger part of the arena in fp32, a table in 4 bits."""
    form = () if base == "plain" else (QuantizedBase(*FORMS[base], 2**14),)
    checkpointing = [Checkpointing(blocks)] if blocks else []
    used = (
        Precision("bf16"),
        *form,
        Lora(4),
        FusedOps(),
        ParameterOffload("disk"),
        Packing(),
        FusedLoss(32),
        *checkpointing,
    )
    config = config_of(**WIDE, tie_word_embeddings=tied, attention_bias=True, num_hidden_layers=5)
    assert_square(used, config, micro_steps=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_states_of_every_family(name):
    """To the byte: stacks of experts, blocks of two kinds, norms with biases, tables of positions that stay."""
    techniques = (Precision("bf16"), Lora(4), ParameterOffload("disk"))
    run, batch = run_of(techniques, family_config(name)), run_of((), config_of()).collate(examples_of((8,)))
    arena = layout_for(family_config(name), techniques, batch).arena
    assert arena == run.model.streamed.n_bytes > 0
    assert predict.states(layout_for(family_config(name), techniques, batch))["parameter"] == at_rest(run)["parameter"]


@pytest.mark.parametrize(
    "lora",
    [Lora(4, dropout=0.1), pytest.param(Lora(4, targets=("q_proj", "down_proj")), marks=pytest.mark.slow)],
    ids=["dropout", "some"],
)
def test_square_of_other_adapters_on_a_quantised_base(lora):
    used = (Precision("bf16_mixed"), QuantizedBase(chunk=2**14), lora, FusedOps(), Packing(), FusedLoss(32))
    assert_square(used, config_of(**WIDE, attention_bias=True, tie_word_embeddings=False))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "smollm3"])
def test_square_of_a_quantised_base_of_every_family(name):
    """States, to the byte; a step's bytes are those of the family's own trace."""
    family = {**FAMILIES[name], **WIDE, "num_hidden_layers": 3}
    config = config_of(name, **{**family, "head_dim": 32} if name == "phi3" else family)
    techniques = (Precision("bf16"), QuantizedBase(chunk=2**14), Lora(4), FusedOps(), Packing(), FusedLoss(32))
    run = run_of(techniques, config)
    batch = run.collate(examples_of((128, 128)))
    measured(run, batch)
    assert predict.states(layout_for(config, techniques, batch)) == at_rest(run)


@pytest.mark.parametrize("chunk", [2**14, 2**19])
def test_prediction_is_never_low_where_a_weight_is_smaller_than_a_chunk(chunk):
    """The paper half takes every weight to be brought back in as much as the largest is: over by that difference."""
    config = config_of(intermediate_size=384)
    techniques = (Precision("bf16"), QuantizedBase(chunk=chunk), Lora(4), FusedOps(), Packing(), FusedLoss(32))
    run = run_of(techniques, config)
    batch = run.collate(examples_of((128, 128)))
    off = differences(measured(run, batch), predicted(config, techniques, batch))
    del off["optimizer_step"]  # as anywhere: a few norms
    assert all(0 <= n_bytes <= 7 * 384 * 64 for n_bytes in off.values())


@pytest.mark.parametrize(
    "techniques",
    [(Lora(4, dropout=0.1),), (Lora(3, targets=("q_proj", "v_proj")), FusedOps()), (FusedOps(), FusedLoss(32))],
    ids=["dropout", "some targets", "fused"],
)
def test_square_of_an_untied_head(techniques):
    assert_square((Precision("bf16_mixed"), *techniques), config_of(tie_word_embeddings=False))


def test_square_of_projections_with_biases():
    config = config_of(attention_bias=True, mlp_bias=True)
    assert_square((Precision("fp32"), Lora(4), FusedOps(), FusedLoss(32)), config)


@pytest.mark.parametrize("depth", [2, 7])
@pytest.mark.parametrize("blocks", [0, 1])
def test_square_at_any_depth(depth, blocks):
    checkpointing = [Checkpointing(blocks)] if blocks else []
    techniques = (Precision("fp32"), FusedOps(), FusedLoss(32), *checkpointing)
    assert_square(techniques, config_of(num_hidden_layers=depth))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "smollm3"])
def test_square_of_every_family(name):
    """A window shorter than the sequence makes two rows of indices that no trace has: under by 16 bytes a row."""
    config = config_of("smollm3", num_hidden_layers=3) if name == "smollm3" else family_config(name)
    techniques = (Precision("bf16_mixed"), Lora(4), FusedOps(), Packing(), FusedLoss(32))
    run = run_of(techniques, config)
    batch = run.collate(examples_of((128, 128)))
    ledger = measured(run, batch)
    assert predict.states(layout_for(config, techniques, batch)) == at_rest(run)
    off = differences(ledger, predicted(config, techniques, batch))
    windows = 16 * 128 if config.sliding_window else 0
    assert off["forward_end"] in (0, -windows)
    assert off["loss"] == off["backward_peak"] == 0


def test_a_block_without_positions_is_predicted_with_them():
    """SmolLM3 leaves rotary positions out in one block of four; the trace has them in all: over, never under."""
    config = family_config("smollm3")
    assert 0 in config.no_rope_layers
    techniques = (Precision("bf16_mixed"), Lora(4), FusedOps(), Packing(), FusedLoss(32))
    run = run_of(techniques, config)
    batch = run.collate(examples_of((128, 128)))
    ledger = measured(run, batch)
    off = differences(ledger, predicted(config, techniques, batch))
    measured_bytes = max(sum(parts.values()) for parts in ledger.moments().values())
    assert all(0 <= n_bytes <= 0.1 * measured_bytes for n_bytes in off.values())


def test_one_block_is_predicted_over_by_a_hidden_state_at_most():
    """The trace has a first and a last block: where they are one, a gradient between them is counted and not there."""
    config, techniques = config_of(num_hidden_layers=1), (Precision("fp32"), FusedOps(), FusedLoss(32))
    run = run_of(techniques, config)
    batch = run.collate(examples_of((128, 128)))
    off = differences(measured(run, batch), predicted(config, techniques, batch))
    assert {m: off[m] for m in MOMENTS[:3]} == {"forward_end": 0, "loss": 0, "backward_peak": 256 * 64 * 4}


@pytest.mark.parametrize("lengths", [(128,), (256, 128, 7), (100, 60, 60), (384, 1)], ids=str)
def test_square_at_other_lengths(lengths):
    """Exact where the longest sequence is one block of queries or a multiple of 128."""
    assert_square((Precision("bf16"), Lora(4), FusedOps(), FusedLoss(32), Packing()), lengths=lengths)


@pytest.mark.parametrize("lengths", [(300,), (129, 128), (255, 3)], ids=str)
def test_prediction_is_never_low_where_a_last_block_of_queries_is_not_full(lengths):
    """The paper half takes 128 rows against all keys of the longest: over by at most such a block's few copies."""
    techniques = (Precision("fp32"), FusedOps(), FusedLoss(32), Packing())
    run = run_of(techniques)
    batch = run.collate(examples_of(lengths))
    off = differences(measured(run, batch), predicted(config_of(), techniques, batch))
    rest = micro_of(batch).longest % 128
    a_block = 4 * run.model.config.num_attention_heads * 128 * (128 + rest)
    assert all(0 <= n_bytes <= 4 * a_block for n_bytes in off.values())


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("others", [(), (Lora(4), Checkpointing(2))], ids=names)
def test_square_of_states_on_disk_that_are_stepped_in_backward(others, kind):
    techniques = (
        FusedOps(),
        Packing(),
        FusedLoss(32),
        OptimizerOffload("disk", "device"),
        FusedBackwardStep(),
        *others,
    )
    assert_square((Precision(kind), *techniques))


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("others", [(), (Lora(4), Checkpointing(2))], ids=names)
@pytest.mark.parametrize("where", [("host", "host"), ("disk", "host")], ids=" ".join)
def test_square_of_a_step_on_the_host(where, others, micro_steps):
    """Without values, where what a host would hold has no storage at all."""
    techniques = (Precision("bf16_mixed"), FusedOps(), Packing(), FusedLoss(32), Clipping(), *others,
                  OptimizerOffload(*where))  # fmt: skip
    run, ledger = trace.rewritten(config_of(), techniques, torch.device("cpu")), Ledger()
    batch = run.collate(examples_of((128, 128)))
    with FakeTensorMode(allow_non_fake_inputs=True), without_values():
        models.fill_empty(run.model, run.device)
        run.optimizer.begin(trainable(run.model), Optimizing())
        trace.run_step(run, trace.batch_of(micro_of(batch)), ledger, micro_steps)
    off = differences(ledger, predicted(config_of(), techniques, batch, micro_steps))
    del off["optimizer_step"]  # nothing is left to do on the device
    assert off == {"forward_end": 0, "loss": 0, "backward_peak": 0}
    held = predicted(config_of(), techniques, batch, micro_steps).moments["optimizer_step"]
    assert "gradient" not in held and "optimizer_state" not in held


def test_a_technique_that_lies_on_paper_is_caught():
    """The square can fail: a rewrite that forgets half of the adapters is off by exactly their bytes."""

    run = run_of((Lora(4),))
    batch = run.collate(examples_of((8,)))
    measured(run, batch)
    told = layout_for(config_of(), (Precision("fp32"), Lora(4)), batch)
    forgetful = dataclasses.replace(told, groups=tuple(g for g in told.groups if not g.name.endswith("lora_B")))
    said = predict.states(forgetful)
    adapters = sum(p.numel() for name, p in run.model.named_parameters() if name.endswith("lora_B"))
    assert at_rest(run)["gradient"] - said["gradient"] == 4 * adapters


def test_bytes_of_states_do_not_depend_on_the_batch():
    layouts = [layout_for(config_of(), (Precision("bf16"), Lora(4)), run_of((Lora(4),)).collate(examples_of(lengths)))
               for lengths in ((8,), (64, 64))]  # fmt: skip
    assert predict.states(layouts[0]) == predict.states(layouts[1])
    assert layouts[0].micro != layouts[1].micro
    assert torch.get_num_threads() == 2


@pytest.mark.model
def test_square_of_the_real_model(model_folder):
    """SmolLM2-135M-Instruct as a plan would train it, two thirds of its blocks checkpointed."""
    techniques = (Precision("bf16"), Lora(16), FusedOps(), Packing(), FusedLoss(256), Clipping(), Checkpointing(20))
    assert_square(techniques, models.config_of(model_folder), (128, 128), micro_steps=2)
