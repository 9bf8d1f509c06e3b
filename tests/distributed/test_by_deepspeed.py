"""Ranks that DeepSpeed divides and steps, against one process of ours; what each holds against the prediction.

Needs deepspeed, which is no part of the test extra: `pip install deepspeed`, or where there is no compiler for its wheel
`pip install --no-deps --no-build-isolation deepspeed einops hjson py-cpuinfo msgpack ninja`.
"""

import importlib.util
import json
import shutil

import pytest
from pool import note
from test_data_ranks import (
    BASE,
    CLIPPED,
    CONFIG,
    FULL,
    LENGTHS,
    LORA,
    MICRO,
    SGD,
    TECHNIQUES,
    are_alike,
    as_alone,
)
from test_runs import begin, differ, finish, train, weights

from finefit.toolchain import toolchain
from tiny_run import data, events_of, losses, model  # noqa: F401 (fixtures)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed"),
]


@pytest.fixture(autouse=True, scope="module")
def _by_themselves(two):
    """Ranks in which DeepSpeed has run hold and allocate other things: the next file begins its own."""
    yield
    two.end()


MESHES = {f"stage {stage}": {"shards": 2, "stage": stage, "engine": "deepspeed"} for stage in (1, 2, 3)}
KINDS = {name: TECHNIQUES[name] for name in ("full", "checkpointed", "lora", "plain")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_learn_what_one_process_does(two, mesh, kind):
    found, alone = as_alone(two, MESHES[mesh], KINDS[kind], rate=1e-2 if SGD in KINDS[kind] else 1e-4)
    are_alike(found, alone)
    note(MESHES[mesh], kind, "exact", two.size, "deepspeed")


PLACES = [(1, "host", "none"), (2, "host", "none"), (3, "host", "none"), (3, "host", "host"), (3, "disk", "disk")]


@pytest.mark.parametrize("places", PLACES)
def test_what_is_offloaded_learns_the_same(two, places, tmp_path):
    """To disk by a C++ file access that is compiled first (minutes, once)."""
    if "disk" in places and not toolchain().has_libaio:
        pytest.skip("libaio is not installed: apt-get install libaio-dev")
    stage, states, weights = places
    zero = {
        "name": "zero",
        "stage": stage,
        "ranks": 2,
        "engine": "deepspeed",
        "optimizer_on": states,
        "parameters_on": weights,
        "nvme": str(tmp_path),
    }
    wanted = [*FULL, CLIPPED, MICRO]
    found = two.call("trained", {"shards": 2}, [*wanted, zero], CONFIG, 5, LENGTHS, 1e-4, limit_s=900)[0]
    alone = two.call("trained", {}, wanted, CONFIG, 5, LENGTHS, 1e-4)[0]
    are_alike(found, alone)


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("kind", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_ranks_peak_is_that_which_is_predicted(two, mesh, kind, micro_steps):
    """Of the third step: only then does stage 3 gather ahead."""
    techniques = [{"name": "precision", "kind": kind}, *BASE, CLIPPED, {**MICRO, "most_steps": micro_steps}]
    config = {**CONFIG, "num_hidden_layers": 6, "vocab_size": 512, "tie_word_embeddings": False}
    for rank in two.call("measured", MESHES[mesh], techniques, config, (128, 128), micro_steps, 2):
        predicted, measured = (max(moment[i] for moment in rank["moments"].values()) for i in (0, 1))
        assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("kind", ["fp32", "bf16_mixed", "fp32 lora"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_ranks_bytes_at_rest_are_those_that_are_predicted(two, mesh, kind):
    """Weights, masters and moments, to the byte: flat, and padded."""
    more = [LORA] if "lora" in kind else []
    techniques = [{"name": "precision", "kind": kind.partition(" ")[0]}, *more, *BASE, CLIPPED, MICRO]
    config = {**CONFIG, "num_hidden_layers": 3, "vocab_size": 211, "tie_word_embeddings": False}
    for predicted, measured in two.call("held_by_deepspeed", MESHES[mesh], techniques, config, (70, 31)):
        assert predicted == measured
    note(MESHES[mesh], kind, "bytes", two.size, "deepspeed")


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_whose_loss_is_not_finite_is_forgotten(two, mesh):
    """What was gathered of its gradients is in no later step."""
    for found in two.call("forgets", MESHES[mesh], [*FULL, CLIPPED, MICRO], CONFIG, (70, 31, 12)):
        assert found["after"] == pytest.approx(found["without"], rel=1e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_an_overflow_skips_the_step_on_all_ranks(two, mesh):
    """The scale is halved, and the next step is that of a run without it."""
    techniques = [{"name": "precision", "kind": "fp16_mixed"}, *BASE, CLIPPED, MICRO]
    for found in two.call("overflows", MESHES[mesh], techniques, CONFIG, (70, 31, 12)):
        assert found["scales"] == [2.0**16, 2.0**15, 2.0**15]
        assert found["after"] == pytest.approx(found["without"], rel=1e-3)


def goes_on(ranks, folder, kind, mesh, other=None):
    techniques = [{"name": "precision", "kind": kind}, *BASE, CLIPPED, MICRO]
    for whole, resumed in ranks.call("goes_on", mesh, techniques, CONFIG, (70, 31, 12), str(folder), other):
        assert resumed == pytest.approx(whole, rel=1e-6 if kind == "fp32" else 1e-2)


@pytest.mark.parametrize("kind", ["fp32", "bf16_mixed", "fp16_mixed"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_goes_on_from_its_checkpoint(two, mesh, kind, tmp_path):
    goes_on(two, tmp_path, kind, MESHES[mesh])


OWN = {"shards": 2, "stage": 3}


@pytest.mark.parametrize("mesh, other", [("stage 1", OWN), ("stage 3", OWN), ("stage 2", MESHES["stage 3"])])
def test_another_engine_or_stage_goes_on_with_its_checkpoint(two, mesh, other, tmp_path):
    goes_on(two, tmp_path, "fp32", MESHES[mesh], other)


@pytest.mark.parametrize("mesh", MESHES)
def test_it_goes_on_with_a_checkpoint_of_another_engine(two, mesh, tmp_path):
    goes_on(two, tmp_path, "fp32", OWN, MESHES[mesh])


def settings_of(folder, stage):
    path = folder / "ds.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": stage}, "train_batch_size": 8, "gradient_clipping": 1.0})
    )
    return f"hardware.deepspeed={path}"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_by_the_command_learns_what_one_device_does(tmp_path, model, data, stage):  # noqa: F811
    """And goes on as one device's, from its checkpoint of step 4."""
    code, _, error = finish(train(tmp_path, model, data, "train.steps=6", "name=one"))
    assert code == 0, error
    words = ("train.steps=6", "name=two", "hardware.devices=2", settings_of(tmp_path, stage))
    code, _, error = finish(train(tmp_path, model, data, *words))
    assert code == 0, error
    one, two = tmp_path / "runs/one", tmp_path / "runs/two"
    assert differ(weights(two), weights(one)) < 1e-6
    for event in ("step", "eval"):
        assert losses(events_of(two), event) == pytest.approx(losses(events_of(one), event), rel=1e-6)
    assert json.loads((two / "deepspeed.json").read_text())["zero_optimization"]["stage"] == stage
    shutil.rmtree(two / "checkpoints/step-000006")
    code, _, error = finish(begin(tmp_path, "resume", two, "hardware.devices=1", "hardware.deepspeed=null"))
    assert code == 0, error
    assert differ(weights(two), weights(one)) < 1e-6
