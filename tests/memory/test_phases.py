"""What a run holds beside its steps: predicted and measured on the device, to the byte, and on the host, in a band."""

import dataclasses
import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from finefit import checkpoint, coefficients, evaluate, models, phases, predict, watch
from finefit.adapter import write_tensors
from finefit.build import load, rewritten
from finefit.candidates import rewrite
from finefit.footprint import PHASES
from finefit.nn.optimizers import Optimizing
from finefit.run import MicroBatch, trainable
from finefit.spec import HardwareSpec, ModelSpec
from finefit.stored import portions
from finefit.techniques import (
    Accumulation,
    Checkpointing,
    FusedLoss,
    FusedOps,
    Lora,
    OptimizerStates,
    Packing,
    ParameterOffload,
    Precision,
    QuantizedBase,
)
from tiny import CPU, config_of, examples_of, layout_for, micro_of, run_of

SHARED = (FusedOps(), Packing(), FusedLoss(32), Accumulation(4))
WAYS = {
    "full": (Precision("bf16_mixed"), *SHARED),
    "full in bf16": (Precision("bf16"), *SHARED),
    "full, moments in 8 bits": (Precision("bf16_mixed"), OptimizerStates("adamw_8bit"), *SHARED),
    "full, nothing kept": (Precision("bf16"), OptimizerStates("sgd", "stochastic"), *SHARED),
    "full, rows and columns": (Precision("bf16"), OptimizerStates("adafactor"), *SHARED),
    "checkpointed": (Precision("bf16_mixed"), *SHARED, Checkpointing(2)),
    "lora": (Precision("bf16"), Lora(4, dropout=0.1), *SHARED),
    "qlora": (Precision("bf16"), QuantizedBase(4, "double", 2**14), Lora(4), *SHARED),
    "qlora, one chunk": (Precision("bf16"), QuantizedBase(4, "plain", 2**20), Lora(4), *SHARED),
    "qlora in 8 bits": (Precision("bf16"), QuantizedBase(8, "double", 2**16), Lora(4), *SHARED),
    "qlora, its scales the most": (Precision("bf16"), QuantizedBase(8, "double", 2**14), Lora(64), *SHARED),
    "streamed": (Precision("bf16"), Lora(4, dropout=0.1), ParameterOffload("disk"), *SHARED),
    "streamed, converted": (Precision("bf16_mixed"), Lora(4), ParameterOffload("disk"), *SHARED, Checkpointing(2)),
    "streamed qlora": (
        Precision("bf16"),
        QuantizedBase(4, "double", 2**14),
        Lora(4),
        ParameterOffload("disk"),
        *SHARED,
    ),
    "nothing fused": (Precision("fp32"), Packing(), Accumulation(4)),
}
HELD_OUT = examples_of((128, 96, 64, 32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in bf16 files whose MLP weights are larger than its embedding."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = config_of(hidden_size=256, head_dim=64, intermediate_size=768, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=WAYS)
def both(request, folder, tmp_path_factory):
    """(predicted, measured) of each phase of a run that is loaded, evaluated, saved and resumed."""
    techniques, checkpoints = WAYS[request.param], tmp_path_factory.mktemp("checkpoints")
    run = rewritten(models.config_of(folder), techniques, CPU)
    seen: dict[str, watch.Seen] = {}
    batches: list[MicroBatch] = []
    with watch.phase("load", run) as seen["load"]:
        load(run, models.fill_from(folder))
    run.optimizer.begin(trainable(run.model), Optimizing())

    @contextmanager
    def watching(batch):
        batches.append(batch)
        with watch.phase("eval", run, batch.tensors()) as seen["eval"]:
            yield

    evaluate.held_out_loss(run, HELD_OUT, watching)
    with watch.phase("save", run) as seen["save"]:
        checkpoint.save(run, 1, checkpoints, str(folder), 1)
    with watch.phase("resume", run) as seen["resume"]:
        assert checkpoint.load_newest(run, checkpoints, lambda *_: None) == 1
    layout = layout_for(models.config_of(folder), techniques, batches[0])
    coefficients.sections_for(layout, "eval")  # traced if need be: a plan would do without
    rotary = sum(buffer.untyped_storage().nbytes() for buffer in run.model.buffers())
    return predict.footprint(layout).moments, {name: one.device for name, one in seen.items()}, rotary


@pytest.mark.parametrize("phase", ["load", "resume", "eval", "save"])
def test_a_phase_takes_what_was_predicted_to_the_byte(both, phase):
    """But for the rotary tables, constants of the model's that no prediction has."""
    said, found, rotary = both
    inputs = found[phase].pop("input", rotary) - rotary
    assert said[phase] == {**found[phase], **({"input": inputs} if inputs else {})}
    found[phase]["input"] = inputs + rotary


def test_no_phase_is_above_the_step(both):
    said, _, _ = both
    step = max(sum(said[moment].values()) for moment in ("forward_end", "loss", "backward_peak", "optimizer_step"))
    assert max(sum(said[phase].values()) for phase in ("resume", "eval", "save")) <= step


def test_an_evaluation_forms_no_gradient_of_the_head_and_keeps_no_cast():
    """A function asks its tensors, not the mode, whether a gradient is wanted; autocast's cache asks neither."""
    run = run_of((Precision("bf16_mixed"), *SHARED))
    batch, ledger = run.collate(HELD_OUT), watch.PhaseLedger()
    with ledger:
        evaluate.unlearned_loss(run, batch)
    made = [entry for entry in ledger.entries if entry.n_bytes]
    head = tuple(run.model.get_output_embeddings().weight.shape)
    assert [e.itemsize for e in made if e.shape == head] == [2]
    weights = {tuple(p.shape) for p in run.model.parameters() if p.dim() > 1}
    live = top = 0
    for index, sign in ledger.events:
        if ledger.entries[index].shape in weights and ledger.entries[index].n_bytes:
            live += sign
            top = max(top, live)
    assert (top, live) == (1, 0)


def test_evaluating_leaves_autocast_as_it_was():
    run = run_of((Precision("bf16_mixed"), *SHARED))
    evaluate.unlearned_loss(run, run.collate(HELD_OUT))
    assert torch.is_autocast_cache_enabled() and run.model.training


def test_a_plain_weight_takes_nothing_beside_itself_on_a_gpu(folder):
    """It is converted on the host on its way; only what is to be quantised is there as the file has it."""
    spec, micro = ModelSpec.from_folder(folder), micro_of(run_of((Packing(),)).collate(HELD_OUT))
    card = HardwareSpec.from_name("RTX 4090")
    layouts = [rewrite(spec, micro, WAYS[way]) for way in ("full", "lora", "qlora, one chunk")]
    moments = [predict.footprint(layout, card).moments for layout in layouts]
    stored, blocks = 768 * 256 * 2, 768 * 4
    beside = stored + 4 * blocks + 12 * 768 * 256 + 60
    assert [found["load"].get("temporary", 0) for found in moments] == [0, 0, beside]
    full, lora, _ = (phases.host(layout, found, "cuda") for layout, found in zip(layouts, moments, strict=True))
    assert full["load"]["copies"] == 768 * 256 * 4
    assert lora["save"]["copies"] == 4 * 768 * 4


def test_the_host_of_a_cpu_has_the_tensors_too(folder):
    spec, micro = ModelSpec.from_folder(folder), micro_of(run_of((Packing(),)).collate(HELD_OUT))
    laptop = HardwareSpec("laptop", "cpu", 2**34, matmul_flops_per_s=(("float32", 3e11),), bandwidth_bytes_per_s=2e10)
    layout = rewrite(spec, micro, WAYS["lora"])
    found = predict.footprint(layout, laptop)
    host = phases.host(layout, found.moments, "cpu")
    assert {m: h["tensors"] for m, h in host.items()} == {m: found.at(m) for m in found.moments}
    assert host["load"]["mapped"] == spec.num_parameters * 2
    moment, needed = phases.needed(host)
    assert (moment, needed) == (found.peak_moment, phases.PROGRAM + phases.WARM + found.peak_bytes)


# --- files


def test_tensors_are_written_one_by_one_and_read_by_the_library(tmp_path):
    kinds = (torch.bfloat16, torch.float32, torch.uint8, torch.int64)
    tensors = {f"{kind}": torch.arange(7).to(kind) for kind in kinds} | {"scalar": torch.tensor(2.5)}
    tensors["turned"] = torch.arange(12.0).view(3, 4).t()
    write_tensors(tmp_path / "a.safetensors", tensors)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
        assert file.metadata() == {"format": "pt"}


def test_a_write_copies_no_tensor_of_the_host(tmp_path):
    tensors = {name: torch.ones(1000) for name in "abc"}
    ledger = watch.PhaseLedger()
    with ledger:
        write_tensors(tmp_path / "a.safetensors", tensors)
    assert sum(entry.n_bytes for entry in ledger.entries) == 0


# --- the watch


def test_a_file_s_mapping_takes_nothing_and_what_is_made_of_it_does(folder):
    run = run_of(())
    with safe_open(folder / "model.safetensors", "pt") as file, watch.phase("load", run) as seen:
        stored = file.get_tensor("model.layers.0.mlp.up_proj.weight")
        made = stored.float()
        del made
    assert seen.device["temporary"] == stored.numel() * 4


def test_a_file_is_mapped_a_part_at_a_time(folder, monkeypatch):
    """In its own order; what is read is the same."""
    assert list(portions({"c": 20, "a": 0, "d": 31, "b": 10}, 10)) == [["a", "b"], ["c"], ["d"]]
    whole = {name: tensor for name, tensor, _ in models._stored(folder)}
    monkeypatch.setattr(models, "MAPPED_AT_ONCE", 1000)
    found = {name: tensor for name, tensor, _ in models._stored(folder)}
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def test_what_is_held_is_seen_where_nothing_is_made():
    run = run_of((Lora(4),))
    with watch.phase("save", run) as seen:
        pass
    assert seen.device["parameter"] == sum(p.untyped_storage().nbytes() for p in run.model.parameters())
    assert seen.host_bytes > 100 * 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's mark is Linux's")
def test_the_mark_of_the_host_is_the_phase_s_own():
    run = run_of(())
    marks = []
    for n_bytes in (300_000_000, 0):
        with watch.phase("save", run) as seen:
            torch.ones(n_bytes, dtype=torch.uint8)
        marks.append(seen.host_bytes)
    assert marks[0] - marks[1] > 250_000_000


# --- the real model


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_the_host_needs_what_was_predicted_within_a_tenth(model_folder, tmp_path, method):
    """A process of its own, as a user has it: one step, an evaluation, a checkpoint, the run resumed and merged."""
    rows = [{"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"{i}!"}]}
            for i in range(24)]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"method={method}", "train.steps=1", "train.global_batch_size=4", "name=run", f"output_dir={tmp_path}"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    folder = str(tmp_path / "run")
    for verb in (
        ["train", str(model_folder), str(tmp_path / "data.jsonl"), *words],
        ["resume", folder],
        ["merge", folder],
    ):
        subprocess.run([sys.executable, "-m", "finefit", *verb], env=environment, check=True, capture_output=True)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    found = {event["moment"]: event for event in events if event["event"] == "phase"}
    assert set(found) == set(PHASES)
    for moment, event in found.items():
        assert sum(event["predicted_host"].values()) == pytest.approx(event["host_bytes"], rel=0.1), moment
        measured = {c: n for c, n in event["measured"].items() if c != "input"}
        assert measured == {c: n for c, n in event["predicted"].items() if c != "input"}, moment


def test_phases_are_read_back_from_a_plan_file():
    footprint = predict.footprint(layout_for(config_of(), WAYS["lora"], run_of((Packing(),)).collate(HELD_OUT)))
    said = dataclasses.replace(footprint, host={"load": {"program": 3, "mapped": 4}})
    again = type(said).from_json(json.loads(json.dumps(said.to_json())))
    assert again.to_json() == said.to_json()
    older = {key: value for key, value in said.to_json().items() if key != "host"}
    assert type(said).from_json(older).host == {}
