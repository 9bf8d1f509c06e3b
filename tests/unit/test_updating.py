"""Optimizers on paper: bytes by hand, sharded, in a plan, in the hints and beside the plan."""

import dataclasses
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from test_search import FULL, LORA, SMALL, ask, pinned

from finefit import ladder, predict
from finefit.candidates import rewrite, techniques_of
from finefit.config import Config, load
from finefit.config.schema import Train
from finefit.cost import seconds_per_step
from finefit.errors import ConfigError, DoesNotFit
from finefit.explain import explained
from finefit.layout import Micro
from finefit.obey import Wish, obeyed
from finefit.plan import Plan
from finefit.search import search
from finefit.session import peak_rate
from finefit.techniques import OptimizerStates, Precision, TensorParallel, Unsuitable, Zero
from finefit.updating import OPTIMIZERS, OptimizerKind, Piece, Update

KINDS = get_args(OptimizerKind)
MATRIX = Piece(1536 * 576, 1536, 576, 32)
VECTOR = Piece(576, 576, 0, 32)


@pytest.mark.parametrize(
    ("kind", "matrix", "vector"),
    [
        ("adamw", 8 * 884_736 + 4, 8 * 576 + 4),
        ("adamw_8bit", 2 * (884_736 + 4 * 3456) + 4, 8 * 576 + 4),
        ("adamw_4bit", 2 * (442_368 + 4 * 6912) + 4, 8 * 576 + 4),
        ("lion", 4 * 884_736, 4 * 576),
        ("lion_8bit", 884_736 + 4 * 3456, 4 * 576),
        ("sgd", 0, 0),
        ("adafactor", 4 * (1536 + 576) + 4, 4 * 576 + 4),
        ("apollo", 8 * 256 * 1536 + 8, 8 * 576 + 4),
        ("apollo_mini", 8 * 1536 + 8, 8 * 576 + 4),
    ],
)
def test_bytes_by_hand(kind, matrix, vector):
    assert (sum(Update(kind).tensors(MATRIX)), sum(Update(kind).tensors(VECTOR))) == (matrix, vector)


@pytest.mark.parametrize(
    ("kind", "tables"), [("adamw_8bit", 2 * 66_560), ("adamw_4bit", 2 * 67_584), ("lion_8bit", 66_560)]
)
def test_tables_are_shared_once_and_only_where_something_is_coded(kind, tables):
    assert Update(kind).table_bytes([MATRIX, MATRIX, VECTOR]) == tables
    assert Update(kind).table_bytes([VECTOR]) == 0


CUT = [(kind, stage) for kind in KINDS for stage in (0, 1, 2, 3) if not (stage and Update(kind).by_matrix)]


@pytest.mark.parametrize(("kind", "stage"), CUT)
def test_a_shard_is_kept_as_a_tensor_of_its_own(kind, stage):
    """Rows are cut: seven ranks do not divide 1,536 rows, and the largest shard counts."""
    zero = (Zero(stage, 7),) if stage else ()
    layout = rewrite(SMALL, Micro(1, 1, 1), (Precision("fp32"), OptimizerStates(kind), *zero))
    ranks, update, total = 7 if stage else 1, layout.update, 0
    for p, count in (*SMALL.block_tensors(), *((p, 1) for p in SMALL.outer_parameters())):
        rows = -(-p.shape[0] // ranks)
        columns = p.shape[1] if len(p.shape) > 1 else 0
        total += count * sum(update.tensors(Piece(rows * (columns or 1), rows, columns, 32)))
    assert predict.states(layout)["optimizer_state"] == total + update.table_bytes([MATRIX])


def test_what_keeps_rows_and_columns_is_not_cut_by_tensor_parallel():
    model = dataclasses.replace(SMALL, num_attention_heads=8, num_key_value_heads=2)
    for kind in ("adafactor", "apollo", "apollo_mini"):
        with pytest.raises(Unsuitable, match="tensor parallel cuts"):
            rewrite(model, Micro(1, 1, 1), (Precision("fp32"), TensorParallel(2), OptimizerStates(kind)))
    layout = rewrite(model, Micro(1, 1, 1), (Precision("fp32"), TensorParallel(2), OptimizerStates("adamw_8bit")))
    assert predict.states(layout)["optimizer_state"] > 0


@pytest.mark.parametrize(("job", "precision"), [(FULL, "bf16_mixed"), (FULL, "fp32"), (LORA, "bf16")])
def test_nothing_is_rounded_where_nothing_that_trains_is_bf16(job, precision):
    job = dataclasses.replace(pinned(job, rounding="stochastic"), precision=precision)
    with pytest.raises(ConfigError, match=r"memory\.precision=bf16"):
        search(ask("100%", job))


def test_the_optimizer_is_the_users_and_in_the_plan():
    for kind in KINDS:
        plan = search(ask("100%", pinned(FULL, optimizer=kind)))
        states = plan.technique("optimizer_states")
        assert (states.kind if states else "adamw") == kind
        assert Plan.from_json(plan.to_json()) == plan
    both = dataclasses.replace(pinned(FULL, optimizer="adamw_8bit", rounding="stochastic"), precision="bf16")
    assert search(ask("100%", both)).technique("optimizer_states") == OptimizerStates("adamw_8bit", "stochastic")
    for job in (FULL, LORA):
        assert search(ask("100%", job)).technique("optimizer_states") is None


@pytest.fixture
def nothing_turned_on(monkeypatch):
    """As long as nothing exact helps: offload to disk makes all of these fit."""
    monkeypatch.setattr(ladder, "RUNGS", {"cpu": (), "cuda": ()})


def test_the_planner_never_takes_another_optimizer_to_fit(nothing_turned_on):
    with pytest.raises(DoesNotFit):
        search(ask("1200MiB", FULL))
    smaller = dataclasses.replace(pinned(FULL, optimizer="adafactor"), precision="bf16")
    assert search(ask("1200MiB", smaller)).technique("optimizer_states").kind == "adafactor"


def test_a_plan_of_another_optimizer_is_refused():
    asked = ask("100%", pinned(FULL, optimizer="lion"))
    plan = search(asked)
    config = Config(model="m", train={"optimizer": "adafactor"}, memory={"rounding": "stochastic"})
    wish = Wish(config, asked.model, asked.hardware, asked.batches, 16, None)
    with pytest.raises(ConfigError) as told:
        obeyed(dataclasses.replace(plan, model=asked.model.name), wish)
    assert "train.optimizer is adafactor, the plan has lion" in told.value.message
    assert "memory.rounding is stochastic, the plan has nearest" in told.value.message


def test_what_others_would_need_is_shown_beside_full_fine_tuning():
    asked = ask("100%", FULL)
    plan = explained(asked, search(asked))
    near = {one.says: one for one in plan.neighbours}
    split, blocks = plan.technique("accumulation"), plan.technique("checkpointing")
    for kind in ("adamw_8bit", "adafactor"):
        one = near[f"optimizer {kind}"]
        assert one.verdict == "not allowed"
        assert one.why.startswith(f"a choice of quality, so yours (train.optimizer={kind}); it fits")
        other = dataclasses.replace(asked, job=pinned(FULL, optimizer=kind))
        work = other.work(split.micro_batch_size, split.micro_batch_tokens)
        techniques = techniques_of(
            other, split.micro_batch_size, split.micro_batch_tokens, work, blocks.blocks if blocks else 0
        )
        layouts = [rewrite(other.model, micro, techniques) for micro in work.largest]
        assert one.peak_bytes == max(predict.footprint(one, other.hardware).peak_bytes for one in layouts)
    assert "optimizer adamw" not in near
    eight = explained(
        ask("100%", pinned(FULL, optimizer="adamw_8bit")), search(ask("100%", pinned(FULL, optimizer="adamw_8bit")))
    )
    assert "optimizer adamw" in {one.says for one in eight.neighbours}
    adapters = explained(ask(), search(ask()))
    assert not any(one.says.startswith("optimizer") for one in adapters.neighbours)


def test_a_neighbour_that_rounds_nothing_is_not_allowed_and_ways_out_are_found(nothing_turned_on):
    job = dataclasses.replace(pinned(FULL, rounding="stochastic"), precision="bf16")
    plan = explained(ask("100%", job), search(ask("100%", job)))
    near = {one.says: one for one in plan.neighbours}
    assert near["precision fp32"].why.startswith("nothing that trains is held in bf16")
    with pytest.raises(DoesNotFit) as told:
        search(ask("1GiB", job))
    assert "train.optimizer=adamw_8bit would fit: " in told.value.hint
    assert "method=lora" not in told.value.hint


def test_a_way_out_is_8_bits_where_it_alone_is_enough(nothing_turned_on):
    job = dataclasses.replace(FULL, precision="bf16_mixed", max_length=64, longest=64)
    with pytest.raises(DoesNotFit) as told:
        search(ask("1800MiB", job))
    assert "train.optimizer=adamw_8bit would fit: " in told.value.hint
    assert "moments are rounded to 8 bits: a choice of quality" in told.value.hint
    with pytest.raises(DoesNotFit) as told:
        search(ask("1GiB", pinned(FULL, optimizer="lion")))
    assert "train.optimizer" not in told.value.hint


@pytest.mark.parametrize(("word", "ours"), [*OPTIMIZERS.items(), ("PAGED_ADAMW_8BIT", "adamw_8bit")])
def test_another_tools_word_is_told_ours(word, ours):
    with pytest.raises(ValueError, match=f"say {ours}"):
        Train(optimizer=word)


def test_a_run_file_says_both(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ntrain: {optimizer: adamw_4bit}\nmemory: {rounding: stochastic}\n")
    config = load(path)
    assert (config.train.optimizer, config.memory.rounding) == ("adamw_4bit", "stochastic")
    assert ("rounding", "stochastic") in config.memory.pins()
    with pytest.raises(ConfigError, match=r"train\.optimizer"):
        load(path, ["optim=paged_adamw_8bit"])


def test_learning_rates_that_nobody_said():
    rates = {kind: peak_rate(Config(model="m", train={"optimizer": kind}), "full") for kind in KINDS if kind != "sgd"}
    assert rates == {kind: pytest.approx(4e-6 if "lion" in kind else 2e-5) for kind in rates}
    with pytest.raises(ConfigError, match="no learning rate"):
        peak_rate(Config(model="m", train={"optimizer": "sgd"}), "full")
    assert peak_rate(Config(model="m", train={"optimizer": "sgd", "learning_rate": 0.1}), "full") == 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_takes_time_by_its_kind(kind):
    question = ask("100%", FULL)
    work = question.work(16, 1024)
    with_it, plain = (
        seconds_per_step(rewrite(SMALL, work.largest[0], (Precision("fp32"), *states)), work, question.hardware)
        for states in ((OptimizerStates(kind),), ())
    )
    elements, bandwidth = SMALL.num_parameters, question.hardware.bandwidth_bytes_per_s
    own = with_it - plain + 28 * elements / bandwidth
    assert 0 < own < 200 * elements / bandwidth
    assert (own < 28 * elements / bandwidth) == (kind == "sgd") or kind == "adamw"


def test_stochastic_rounding_takes_more_time_than_the_nearest():
    question = ask("100%", FULL)
    work = question.work(16, 1024)
    nearest, chance = (
        seconds_per_step(
            rewrite(SMALL, work.largest[0], (Precision("bf16"), OptimizerStates("adamw_8bit", rounding))), work,
            question.hardware,
        )
        for rounding in ("nearest", "stochastic")
    )  # fmt: skip
    assert chance > nearest


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_pages_bytes_are_those_of_the_code(language):
    page = Path(__file__).parents[2] / "docs" / language / "concepts" / "optimizer_states.md"
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|(.*)\|$", page.read_text("utf-8"), re.MULTILINE))
    assert tuple(rows) == KINDS
    for kind, cells in rows.items():
        pieces = [Piece(4096 * 4096, 4096, 4096, bits) for bits in (32, 16)]
        expected = [f"{sum(Update(kind).tensors(piece)) / piece.numel:.3g}" for piece in pieces]
        assert [cell.strip() for cell in cells.split("|")] == expected, kind


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_pages_measured_figures_are_those_of_the_results(language):
    root = Path(__file__).parents[2]
    page = (root / "docs" / language / "concepts" / "optimizer_states.md").read_text("utf-8")
    results = json.loads((root / "benchmarks" / "results" / "optimizers-cpu.json").read_text("utf-8"))
    found = re.findall(r"^\| (\w+), (\w+)(, stochastic)? \|(.*)\|$", page, re.MULTILINE)
    assert len(found) == len(results["kinds"])
    for (kind, precision, chance, cells), row in zip(found, results["kinds"], strict=True):
        assert (kind, precision, bool(chance)) == (row["kind"], row["precision"], row["rounding"] == "stochastic")
        mib, loss = row["state_bytes"] / 2**20, row["held_out_after"]
        expected = [f"{mib:,.1f}", f"{row['ns_per_element']:.1f}", f"{row['held_out_before']:.3f}", f"{loss:.3f}"]
        assert [cell.strip() for cell in cells.split("|")] == expected
