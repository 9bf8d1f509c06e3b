"""The square of everything that computes activations again or sends them away: predicted is measured, to the byte."""

import dataclasses

import pytest
from test_square import KINDS, assert_square, differences

from finefit import predict
from finefit.simulate import plan_stream
from finefit.techniques import (
    ActivationOffload,
    Checkpointing,
    FusedLoss,
    FusedOps,
    Lora,
    Packing,
    ParameterOffload,
    Precision,
    Unsuitable,
)
from tiny import config_of, examples_of, family_config, layout_for, measured, micro_of, predicted, run_of

USED = (Lora(4), FusedOps(), Packing(), FusedLoss(32))
DISK = ActivationOffload("disk")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_inputs_on_the_disk(blocks, kind):
    assert_square((Precision(kind), *USED, Checkpointing(blocks), DISK), micro_steps=2)


def test_inputs_on_the_disk_with_dropout():
    used = (Precision("bf16"), Lora(4, dropout=0.1), FusedOps(), Packing(), FusedLoss(32))
    assert_square((*used, Checkpointing(3), DISK), micro_steps=2)


@pytest.mark.parametrize("depth", [2, 7])
@pytest.mark.parametrize("way", [(DISK,), ()], ids=["disk", "nested"])
def test_at_any_depth(depth, way):
    checkpointing = Checkpointing(depth, "block" if way else "nested")
    used = (Precision("fp32"), FusedOps(), FusedLoss(32), checkpointing, *way)
    assert_square(used, config_of(num_hidden_layers=depth))


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 7, 9, 10])
def test_nested_groups(blocks):
    """Whole ones, a last one that is not, and plain blocks after them."""
    assert_square((Precision("bf16"), *USED, Checkpointing(blocks, "nested")), config_of(num_hidden_layers=10))


@pytest.mark.parametrize("kind", ["bf16", "bf16_mixed"])
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("part", ["attention", "mlp", "selective"])
def test_a_part_of_a_block(part, blocks, kind):
    assert_square((Precision(kind), *USED, Checkpointing(blocks, part)), micro_steps=2)


# Gemma scales what the embedding gives, GPT-2 adds positions to it: there nobody holds the first block's input.
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "qwen3_moe", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "gemma3_text", "gpt_neox", "mixtral")
)])  # fmt: skip
@pytest.mark.parametrize("way", ["disk", "nested"])
def test_every_kind_of_family(name, way):
    """As without: what is known to be off there (rows of indices of windows, experts that are chosen) is off here."""
    config = family_config(name)
    kind = "block" if way == "disk" else "nested"
    packed = () if name in ("gpt2", "gpt_neox") else (Packing(),)
    base = (Precision("fp32"), FusedOps(), *packed, FusedLoss(32))
    off = []
    for last in ((Checkpointing(3),), (Checkpointing(3, kind), *((DISK,) if way == "disk" else ()))):
        run = run_of((*base, *last), config)
        batch = run.collate(examples_of((128, 128)))
        found = differences(measured(run, batch), predicted(config, (*base, *last), batch))
        off.append({moment: found[moment] for moment in ("forward_end", "loss", "backward_peak")})
    windows = 16 * 128 if getattr(config, "sliding_window", None) else 0
    assert off[1]["forward_end"] in (off[0]["forward_end"], -windows)  # another block may be the highest
    assert {m: off[0][m] for m in ("loss", "backward_peak")} == {m: off[1][m] for m in ("loss", "backward_peak")}


@pytest.mark.parametrize("depth", [7, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [(Checkpointing(6), DISK), (Checkpointing(6), ActivationOffload("host")),
                                 (Checkpointing(6, "nested"),), (Checkpointing(6, "selective"),)])  # fmt: skip
def test_simulated_as_predicted(way, depth):
    """A fake step writes nothing and takes the same room, and blocks in the middle are repeated."""
    config = config_of(num_hidden_layers=depth)
    used = (Precision("bf16"), *USED, *way)
    batch = run_of((Precision("bf16"), *USED), config).collate(examples_of((128, 128)))
    found = plan_stream(config.to_dict(), used, micro_of(batch)).moments()
    told = predicted(config, used, batch).moments
    for moment in ("forward_end", "loss", "backward_peak"):
        parts = {**dict.fromkeys(found[moment], 0), **told[moment]}
        assert {c: n for c, n in parts.items() if c != "input"} == {
            c: found[moment].get(c, 0) for c in parts if c != "input"
        }


def test_what_is_away_is_not_counted():
    """All four inputs less at the loss; at the peak of backward two, or fewer where that is later now."""
    config, used = config_of(), (Precision("bf16"), *USED, Checkpointing(4))
    batch = run_of(used, config).collate(examples_of((128, 128)))
    here, away = (predicted(config, techniques, batch) for techniques in (used, (*used, DISK)))
    one = 256 * config.hidden_size * 2
    assert here.at("loss") - away.at("loss") == 4 * one
    assert 0 < here.at("backward_peak") - away.at("backward_peak") <= 2 * one


def test_the_square_can_fail():
    """A paper half that forgets the input that is on its way is off by exactly that."""
    config, used = config_of(), (Precision("bf16"), *USED, Checkpointing(4), DISK)
    run = run_of(used, config)
    batch = run.collate(examples_of((128, 128)))
    seen = measured(run, batch).moments()["backward_peak"]
    told = predict.footprint(dataclasses.replace(layout_for(config, used, batch), checkpointed=1))
    assert sum(seen.values()) != told.at("backward_peak")


@pytest.mark.parametrize(
    ("techniques", "why"),
    [
        ((DISK,), "without checkpointed blocks"),
        ((Checkpointing(4, "nested"), DISK), "checkpointing_kind=block"),
        ((Checkpointing(4, "selective"), DISK), "checkpointing_kind=block"),
        ((Checkpointing(5),), "the model has 4"),
        ((Lora(4), ParameterOffload("disk"), Checkpointing(4, "nested")), "out of their turn"),
    ],
)
def test_what_does_not_suit_says_why(techniques, why):
    batch = run_of(()).collate(examples_of((8,)))
    with pytest.raises(Unsuitable, match=why):
        layout_for(config_of(), (Precision("fp32"), *techniques), batch)


def test_a_block_without_an_mlp_of_its_own_has_none_to_compute_again():
    config = family_config("opt")
    batch = run_of((), config).collate(examples_of((8,)))
    with pytest.raises(Unsuitable, match="no part that is its mlp"):
        layout_for(config, (Precision("fp32"), Checkpointing(1, "mlp")), batch)
