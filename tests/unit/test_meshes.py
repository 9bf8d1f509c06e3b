"""Several devices: which ways there are to divide a run, what each leaves on one of them, what it costs, what is chosen."""

import dataclasses
import time

import pytest
from test_search import ask, pinned

from finefit.batches import FromOrder, Uniform
from finefit.candidates import Question, rewrite
from finefit.config import Config
from finefit.config.parallel import degrees, words_of
from finefit.cost import seconds_per_step
from finefit.errors import ConfigError, DoesNotFit
from finefit.explain import explained
from finefit.layout import Micro
from finefit.mesh import Mesh
from finefit.meshes import LONG, contexts, fewest_ranks, mesh_of, meshes, techniques_of_mesh
from finefit.obey import Wish, obeyed
from finefit.predict import footprint, states
from finefit.search import search
from finefit.spec import HardwareSpec, JobSpec, ModelSpec, resolve_model
from finefit.techniques import (
    Checkpointing,
    ContextParallel,
    DataParallel,
    FusedLoss,
    FusedOps,
    Lora,
    OptimizerOffload,
    OptimizerStates,
    PipelineParallel,
    Precision,
    QuantizedBase,
    TensorParallel,
    Unsuitable,
    Zero,
)
from finefit.techniques.optimizer_offload import host_bytes
from finefit.techniques.parameter_offload import pinned_bytes
from finefit.units import parse_budget

GIB = 2**30
MODEL = ModelSpec("m", "llama", 1024, 4096, 24, 16, 8, 64, 32_000)
EIGHT = HardwareSpec.from_name("8x A100-80GB")
MICRO = Micro(2048, 2048, 2048)
STEP = (FusedOps(), FusedLoss(1024))


def divided(*techniques, micro=MICRO, model=MODEL):
    return rewrite(model, micro, (Precision("bf16_mixed"), *STEP, *techniques))


def question(gpu, job, model="meta-llama/Llama-3.1-8B", length=2048):
    hardware = HardwareSpec.from_name(gpu)
    budget = parse_budget("96%", hardware.memory_bytes)
    return Question(resolve_model(model), hardware, job, Uniform(job.global_batch_size, length), budget)


FULL = JobSpec(method="full", global_batch_size=64, max_length=2048, longest=2048)


def beside_little(asked):
    """The same devices in a machine of 100 GiB."""
    return dataclasses.replace(asked, hardware=dataclasses.replace(asked.hardware, host_memory_bytes=100 * GIB))


ON_DEVICES = pinned(FULL, optimizer_offload="none")


# --- which ways there are


@pytest.mark.parametrize("gpu", ["2x RTX 4090", "3x L4", "8x H100", "16x DGX H100", "512x H100"])
def test_every_way_uses_all_devices_and_is_there_once(gpu):
    hardware = HardwareSpec.from_name(gpu)
    found = list(meshes(hardware, 4096))
    assert {mesh.devices for mesh in found} == {hardware.count}
    assert len(set(found)) == len(found) > 2


def test_one_device_is_not_divided():
    assert list(meshes(HardwareSpec.from_name("RTX 4090"), 16)) == [Mesh()]


def test_every_data_parallel_rank_has_an_example():
    assert max(mesh.data for mesh in meshes(EIGHT, 2)) == 2


def test_tensor_parallel_stays_inside_a_machine():
    assert max(mesh.tensor for mesh in meshes(HardwareSpec.from_name("16x DGX H100"), 4096)) == 8


@pytest.mark.parametrize("mesh", meshes(HardwareSpec.from_name("2x DGX H100"), 64), ids=Mesh.says)
def test_a_way_is_read_back_from_its_techniques(mesh):
    assert mesh_of(techniques_of_mesh(mesh)) == mesh
    assert rewrite(resolve_model("meta-llama/Llama-3.1-8B"), MICRO, (Precision("bf16"), *techniques_of_mesh(mesh))).mesh == mesh  # fmt: skip


# --- what one of them holds


def test_states_are_divided_by_stage():
    """Sixteen bytes a parameter with fp32 masters: states are eight of them, gradients four (arXiv:1910.02054, §5)."""
    n = MODEL.num_parameters
    steps = 4 * sum(g.count for g in divided().groups)
    held = [states(divided(*(Zero(stage, 8),) if stage else ())) for stage in (0, 1, 2, 3)]
    assert [h["parameter"] for h in held] == [4 * n, 4 * n, n // 2, n // 2]
    assert [h["gradient"] for h in held] == [4 * n, 4 * n, n // 2, n // 2]
    assert [h["optimizer_state"] - steps for h in held] == [8 * n, n, n, n]


def test_what_does_not_divide_evenly_is_rounded_up():
    layout = divided(Zero(3, 7))
    shards = ((-(-g.rows // 7) * (g.numel // g.rows), g.count) for g in layout.groups)
    assert states(layout)["parameter"] == sum(4 * numel * count for numel, count in shards)


def test_the_peak_falls_with_every_stage_and_rank():
    peaks = [
        footprint(divided(*t)).peak_bytes for t in ((), (Zero(1, 8),), (Zero(2, 8),), (Zero(3, 8),), (Zero(3, 16),))
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_two_blocks_and_all_outside_them_are_whole_while_a_block_runs():
    """Sharded over so many ranks that nothing is left of the states: what remains is what is gathered."""
    layout = divided(Zero(3, 10**9), Checkpointing(24), micro=Micro(1, 1, 1))
    block = 2 * sum(p.numel for p in MODEL.block_parameters())
    outer = 2 * sum(p.numel for p in MODEL.outer_parameters())
    tables = 2 * 2 * 1024 * 32_000  # gradients of head and embedding, whole to the end
    a_block = block + outer + tables + 2 * block  # the last: its gradients are let go, and are reduced in fp32
    the_rest = tables + 2 * outer  # when no weights are gathered any more
    assert footprint(layout).at("backward_peak") == pytest.approx(max(a_block, the_rest), rel=0.02)
    deep = rewrite(
        dataclasses.replace(MODEL, vocab_size=1000),
        Micro(1, 1, 1),
        (Precision("bf16_mixed"), *STEP, Zero(3, 10**9), Checkpointing(24)),
    )
    outer = 2 * 2 * 1024 * 1000
    assert footprint(deep).at("backward_peak") == pytest.approx(
        5 * block + 2 * outer, rel=0.02
    )  # two gathered, gradients, fp32


def test_data_parallel_ranks_hold_what_one_device_does():
    assert footprint(divided(DataParallel(8))).peak_bytes == footprint(divided()).peak_bytes


def test_tensor_parallel_divides_weights_and_activations():
    one, eight = (footprint(divided(*t)) for t in ((), (TensorParallel(8),)))
    assert states(divided(TensorParallel(8)))["parameter"] == pytest.approx(
        states(divided())["parameter"] / 8, rel=0.001
    )
    assert one.peak_bytes / 8 < eight.peak_bytes < one.peak_bytes / 5


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    plain = dataclasses.replace(divided(PipelineParallel(4)), micro_steps=8)
    two = dataclasses.replace(divided(PipelineParallel(4)), micro_steps=2)
    held = [footprint(layout).moments["backward_peak"]["activation"] for layout in (plain, two)]
    assert held[0] > 1.5 * held[1]


def test_stages_share_the_blocks():
    whole, stage = (footprint(divided(*t)).moments["save"]["parameter"] for t in ((), (PipelineParallel(4),)))
    blocks = sum(p.numel * count for p, count in MODEL.block_tensors())
    head_and_norm = 1024 * 32_000 + 1024
    assert stage == 4 * (blocks // 4 + head_and_norm) < whole


@pytest.mark.parametrize(
    ("techniques", "why"),
    [
        ((TensorParallel(3),), "8 key/value heads do not divide among 3 devices"),
        (
            (QuantizedBase(), Lora(8), TensorParallel(2)),
            "blocks of quantised weights do not divide by rows and columns",
        ),
        ((PipelineParallel(25),), "25 stages for 24 blocks"),
        ((ContextParallel(3),), "rows are of 16 tokens or a multiple, which do not divide among 3 devices"),
        ((ContextParallel(2), TensorParallel(2)), "with data parallel and sharded ranks only"),
        ((PipelineParallel(2), Zero(3, 2)), "in a pipeline the weights would be gathered again for every micro-batch"),
    ],
)
def test_what_makes_no_sense_says_why(techniques, why):
    with pytest.raises(Unsuitable, match=why):
        rewrite(MODEL, MICRO, (Precision("bf16"), *techniques))


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "why"),
    [
        (12, 12, 8, "12 heads do not divide among 8 devices"),
        (24, 6, 4, "6 key/value heads do not go evenly into 4 devices"),
    ],
)
def test_heads_that_ranks_of_a_context_cannot_share_say_why(heads, key_heads, ranks, why):
    model = dataclasses.replace(MODEL, num_attention_heads=heads, num_key_value_heads=key_heads)
    with pytest.raises(Unsuitable, match=why):
        rewrite(model, MICRO, (Precision("bf16"), ContextParallel(ranks)))


def test_attention_that_takes_whole_rows_is_not_shared():
    with pytest.raises(Unsuitable, match="attention of 'bloom' models is their own"):
        rewrite(dataclasses.replace(MODEL, family="bloom"), MICRO, (Precision("bf16"), ContextParallel(2)))


def test_ranks_of_a_context_share_activations_and_states_where_these_are_sharded():
    layouts = (rewrite(MODEL, MICRO, (Precision("fp32"), *STEP, *t)) for t in ((), (ContextParallel(4),)))
    one, four = (footprint(layout).moments["forward_end"]["activation"] for layout in layouts)
    assert four == pytest.approx(one / 4, rel=0.01)
    assert states(divided(ContextParallel(4), Zero(3, 2))) == states(divided(Zero(3, 8)))
    assert states(divided(ContextParallel(4))) == states(divided())


def test_a_rank_has_its_part_of_every_batch():
    batches = FromOrder([[0, 1, 2, 3], [4, 5]], [16, 32, 48, 64, 80, 96], [16] * 6).among(2)
    assert batches.steps == [[0, 2], [1, 3], [4], [5]]
    assert Uniform(7, 16).among(2) == Uniform(4, 16)


def test_long_examples_are_shared_inside_a_machine():
    hardware = HardwareSpec.from_name("2x DGX H100")
    assert contexts(hardware, LONG - 1, None) == (1,)
    assert contexts(hardware, LONG, None) == (1, 2, 4, 8)
    found = list(meshes(hardware, 64, contexts(hardware, LONG, None)))
    assert {mesh.devices for mesh in found} == {16} and len(set(found)) == len(found)
    assert all(mesh_of(techniques_of_mesh(mesh)) == mesh for mesh in found)


def test_as_many_devices_share_an_example_as_were_said():
    hardware = HardwareSpec.from_name("8x A100-80GB")
    assert {mesh.context for mesh in meshes(hardware, 64, contexts(hardware, 1, "4"))} == {4}
    with pytest.raises(ConfigError, match="3 devices do not divide 8"):
        contexts(hardware, 1, "3")


# --- what it costs


def seconds(*techniques, hardware=EIGHT, work=None):
    work = work or Uniform(8, 2048).work(8, 4096, False)
    return seconds_per_step(divided(*techniques, micro=work.largest[0]), work, hardware)


def test_a_pipeline_waits_for_its_bubble():
    """p stages and m micro-batches take m + p - 1 turns for m turns of work."""
    work = Uniform(8, 2048).work(8, 4096, False)
    alone, staged = seconds(work=work), seconds(PipelineParallel(4), work=work)
    assert work.mean_steps == 4
    assert staged == pytest.approx(alone / 4 * (1 + 3 / 4), rel=0.01)


def test_a_slow_link_makes_tensor_parallel_dear_and_data_parallel_not():
    slow = dataclasses.replace(EIGHT, peer_bytes_per_s=5e9)
    tensor, data = (
        seconds(t, hardware=slow) / seconds(t, hardware=EIGHT) for t in (TensorParallel(8), DataParallel(8))
    )
    assert data < 2 < 4 < tensor


def test_all_to_alls_are_waited_for():
    """Each rank sends its queries, keys, values and outputs but for its own heads, forward and backward in every block."""
    slow = dataclasses.replace(EIGHT, peer_bytes_per_s=1e9)
    work = Uniform(1, 2048).work(1, 4096, False)
    there, back = (
        seconds(ContextParallel(4), hardware=dataclasses.replace(slow, peer_bytes_per_s=rate), work=work)
        for rate in (1e9, 2e9)
    )
    token = 2 * 2 * (MODEL.q_width + MODEL.kv_width)
    sent = 2 * MODEL.num_hidden_layers * 2048 / 4 * token * 3 / 4
    assert there - back >= sent / (0.8 * 2e9)  # of gradients only what exceeds that


def test_between_machines_the_network_decides():
    near = HardwareSpec.from_name("DGX A100")
    far = dataclasses.replace(HardwareSpec.from_name("2x DGX A100"), network_bytes_per_s=1e9)
    assert seconds(Zero(3, 16), hardware=far) > 3 * seconds(Zero(3, 8), hardware=near)
    assert seconds(Zero(3, 8), DataParallel(2), hardware=far) < seconds(Zero(3, 16), hardware=far)


# --- what is chosen


def test_a_second_device_doubles_the_speed_of_what_fits_one():
    lora = dataclasses.replace(FULL, method="lora")
    one, two = (search(question(gpu, lora)) for gpu in ("A100-80GB", "2x A100-80GB"))
    assert 1.8 < two.tokens_per_s / one.tokens_per_s < 2.05


def test_what_fits_no_device_is_sharded_over_several():
    plan = search(question("8x A100-80GB", FULL))
    assert plan.hardware == "8 x A100 80GB"
    assert mesh_of(plan.techniques).devices == 8
    assert plan.predicted.total_bytes <= plan.budget_bytes
    with pytest.raises(DoesNotFit, match=r"RTX 4090 may use 23\.03 GiB each"):
        search(question("2x RTX 4090", ON_DEVICES))


def test_more_of_the_same_devices_are_a_way_out():
    """What two do not hold, and their host does not either."""
    with pytest.raises(DoesNotFit) as found:
        search(beside_little(question("2x RTX 4090", FULL)))
    assert "with --gpu '8 x RTX 4090', it would fit" in found.value.hint


def test_a_question_for_512_devices_is_answered_in_three_seconds():
    job = dataclasses.replace(FULL, global_batch_size=1024, max_length=4096, longest=4096)
    start = time.process_time()
    plan = search(question("64x DGX H100", job, "meta-llama/Llama-3.1-405B", 4096))
    assert time.process_time() - start < 3
    assert mesh_of(plan.techniques).devices == 512


def test_neighbours_divide_otherwise():
    asked = question("8x A100-80GB", FULL)
    near = {n.says: n for n in explained(asked, search(asked)).neighbours}
    assert near["8 data parallel"].verdict == "too large"
    assert "8 sharded (ZeRO-2)" in near or "8 sharded (ZeRO-3)" in near


def test_a_plan_for_several_devices_is_not_begun_on_one():
    asked = question("2x A100-80GB", dataclasses.replace(FULL, method="lora"))
    plan = search(asked)
    config = Config(model="meta-llama/Llama-3.1-8B", method="lora", train={"global_batch_size": 64, "max_length": 2048})
    one = dataclasses.replace(asked.hardware, count=1)
    with pytest.raises(ConfigError, match="the plan is for 2 devices, there are 1"):
        obeyed(plan, Wish(config, asked.model, one, asked.batches, 64, None))
    assert (
        obeyed(plan, Wish(config, asked.model, asked.hardware, asked.batches, 64, None)).techniques == plan.techniques
    )


@pytest.mark.parametrize(
    ("said", "mesh"),
    [
        ("pipeline2", Mesh(stages=2)), ("pipeline2,1f1b", Mesh(stages=2)), ("zero0", None),
        ("pipeline2 gpipe", Mesh(stages=2, schedule="gpipe")),
        ("Interleaved3,pipeline2", Mesh(stages=2, schedule="interleaved", stages_a_rank=3)),
    ],
)  # fmt: skip
def test_the_order_of_a_pipeline_is_the_users(said, mesh):
    if mesh is None:
        with pytest.raises(ValueError, match="no way to share a run"):
            words_of(said)
        return
    job = dataclasses.replace(FULL, method="lora", pins=tuple(degrees(words_of(said)).items()))
    plan = search(question("2x A100-80GB", job))
    assert mesh_of(plan.techniques) == mesh


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("gpipe", "'gpipe' has an order of a pipeline and no pipeline; say pipeline2,gpipe"),
        ("pipeline2,gpipe,interleaved2", "says one thing twice"),
        ("data,zero2", "says one thing twice"),
        ("pipeline2,interleave2", "did you mean 'interleaved2'"),
    ],
)  # fmt: skip
def test_words_that_do_not_go_together(said, why):
    with pytest.raises(ValueError, match=why):
        words_of(said)


def test_a_plan_with_another_order_is_not_the_one_that_is_wished():
    asked = question("2x A100-80GB", dataclasses.replace(FULL, method="lora", pins=(("pipeline_parallel", "2"),)))
    config = Config(
        model="meta-llama/Llama-3.1-8B", method="lora", train={"global_batch_size": 64, "max_length": 2048},
        memory={"parallel": "pipeline2,gpipe"},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"memory\.parallel is pipeline2,gpipe, the plan has pipeline_schedule 1f1b"):
        obeyed(search(asked), Wish(config, asked.model, asked.hardware, asked.batches, 64, None))


def test_more_devices_than_examples_are_still_used():
    plan = search(question("8x A100-80GB", dataclasses.replace(FULL, global_batch_size=2)))
    mesh = mesh_of(plan.techniques)
    assert (mesh.devices, mesh.data <= 2) == (8, True)


def test_a_machine_without_gpus_is_one_device():
    assert mesh_of(search(ask()).techniques) == Mesh()


@pytest.mark.parametrize("method", ["full", "auto"])
def test_devices_that_cannot_share_a_step_say_what_would(method: str) -> None:
    hardware = HardwareSpec.from_name("17 x A100-80GB")
    job = JobSpec(method=method, global_batch_size=16, max_length=1024, longest=1024)
    with pytest.raises(ConfigError) as caught:
        search(Question(MODEL, hardware, job, Uniform(16, 1024), parse_budget("96%", hardware.memory_bytes)))
    assert str(caught.value) == (
        "17 devices cannot share a step of 16 examples: tensor and pipeline parallel divide them into at least 17 "
        "data-parallel ranks, each of which needs one\nhint: say train.global_batch_size=17, or 16 devices"
    )


def test_fewest_ranks_are_those_of_the_ways_there_are() -> None:
    for count in (1, 2, 6, 8, 17, 24, 31, 96, 1000):
        hardware = HardwareSpec.from_name(f"{count} x A100-80GB")
        assert min(mesh.data for mesh in meshes(hardware, 10**6)) == fewest_ranks(hardware)


def test_examples_that_do_not_come_out_even_are_said() -> None:
    hardware = HardwareSpec.from_name("3 x A100-80GB")
    job = JobSpec(method="full", global_batch_size=16, max_length=1024, longest=1024)
    plan = search(Question(MODEL, hardware, job, Uniform(16, 1024), parse_budget("96%", hardware.memory_bytes)))
    assert "16 examples over 3 ranks: 6 for some, fewer for others, who wait" in plan.notes


# --- shards on the host, and optimizers that need whole matrices


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_on_the_host_leave_what_is_gathered(stage):
    plain, away = (divided(Zero(stage, 4), *more) for more in ((), (OptimizerOffload(),)))
    assert states(away) == {"parameter": 0, "gradient": 0, "optimizer_state": 0}
    held = sum(states(plain).values())
    # Beside them the device has a block's shards for a moment: as weights before their cast, or as gradients.
    block = states(plain)["parameter"] // MODEL.num_hidden_layers
    saved = footprint(plain).peak_bytes - footprint(away).peak_bytes
    assert held - states(plain)["gradient"] - 3 * block < saved <= held
    host = pinned_bytes(away) + host_bytes(away)
    assert host == held


@pytest.mark.parametrize("mesh", [DataParallel(4), Zero(1, 4), TensorParallel(4), PipelineParallel(4)])
def test_gradients_that_stay_on_their_devices_are_not_offloaded(mesh):
    with pytest.raises(Unsuitable, match="zero2, zero3"):
        divided(mesh, OptimizerOffload())


@pytest.mark.parametrize("mesh", [Zero(1, 2), Zero(3, 2), TensorParallel(2)])
@pytest.mark.parametrize("kind", ["adafactor", "apollo", "apollo_mini"])
def test_an_optimizer_of_whole_matrices_gets_no_shards(mesh, kind):
    with pytest.raises(Unsuitable, match=f"{kind} steps by rows and columns of whole matrices"):
        divided(mesh, OptimizerStates(kind))


def test_a_model_that_two_cards_do_not_hold_is_planned_beside_their_host():
    plan = search(question("2x RTX 4090", JobSpec(method="full", global_batch_size=16, max_length=2048, longest=2048)))
    assert {t.name: t.setting() for t in plan.techniques if t.name in ("zero", "optimizer_offload")} == {
        "zero": "3", "optimizer_offload": "host",
    }  # fmt: skip
    assert plan.predicted.peak_bytes < 24 * 2**30


def test_devices_of_one_host_share_its_memory():
    """Of 120 GiB each would have 60 for itself."""
    asked = question("2x RTX 4090", FULL)
    search(dataclasses.replace(asked, hardware=dataclasses.replace(asked.hardware, host_memory_bytes=130 * GIB)))
    with pytest.raises(DoesNotFit):
        search(beside_little(asked))
