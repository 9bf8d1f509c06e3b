"""A whole run with its weights on the disk: trained, resumed, talked to; the same numbers as with resident weights."""

import json

import pytest

from commands import events

SHORT = ("method=lora", "lora.rank=4", "train.global_batch_size=8", "train.max_length=256", "train.learning_rate=1e-2",
         "train.steps=4", "train.save_every=2")  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param("lora", marks=pytest.mark.slow), "qlora"])
def runs(request, finefit, model, data, tmp_path_factory):
    """(resident, streamed): the same run but for where the weights are."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("none", "disk"):
        words = (
            f"method={request.param}",
            *SHORT[1:],
            f"memory.parameter_offload={name}",
            f"name={name}",
            f"output_dir={folder}",
        )
        finefit("train", model, data, *words)
    return folder / "none", folder / "disk"


def test_losses_and_held_out_losses_are_the_same_to_the_bit(runs):
    resident, streamed = runs
    for kind in ("step", "eval"):
        assert [e["loss"] for e in events(streamed, kind)] == [e["loss"] for e in events(resident, kind)]
    assert (streamed / "adapter_model.safetensors").read_bytes() == (
        resident / "adapter_model.safetensors"
    ).read_bytes()


def test_the_plan_says_so_and_what_is_said_is_verified(runs):
    _, streamed = runs
    said = {t["name"]: t for t in events(streamed, "build")[-1]["techniques"]}
    assert said["parameter_offload"]["verified"]
    assert "frozen weights on the disk" in said["parameter_offload"]["says"]


def test_every_phase_takes_what_was_predicted(runs):
    """But for the rotary tables, 64 bytes, which no prediction has."""
    _, streamed = runs
    found = {event["moment"]: event for event in events(streamed, "phase")}
    assert list(found) == ["load", "eval", "save"]
    for event in found.values():
        assert sum(event["measured"].values()) - sum(event["predicted"].values()) == 32, event["moment"]
    memory = events(streamed, "memory")[0]
    assert (
        memory["predicted"]["moments"]["backward_peak"]["parameter"]
        == memory["measured"]["moments"]["backward_peak"]["parameter"]
    )


def test_a_streamed_run_is_resumed(finefit, runs, tmp_path):
    import shutil

    _, streamed = runs
    folder = tmp_path / "resumed"
    shutil.copytree(streamed, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    finefit("resume", folder)
    losses = {event["step"]: event["loss"] for event in events(folder, "step")}
    assert losses == {event["step"]: event["loss"] for event in events(streamed, "step")}
    assert (folder / "adapter_model.safetensors").read_bytes() == (streamed / "adapter_model.safetensors").read_bytes()


def test_its_model_answers_as_the_resident_one(runs):
    from finefit.chat import loaded

    answers = []
    for run in runs:
        model, tokenizer = loaded(run, base=False)
        assert hasattr(model, "streamed") == (run.name == "disk")
        ids = tokenizer("Count from 3.", return_tensors="pt").input_ids
        answers.append(model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=1).tolist())
    assert answers[0] == answers[1]


def test_a_plan_file_with_it_is_obeyed(finefit, model, data, tmp_path):
    plan = tmp_path / "plan.json"
    finefit("plan", model, data, *SHORT, "memory.parameter_offload=disk", "-o", plan)
    assert "parameter_offload" in {t["name"] for t in json.loads(plan.read_text())["techniques"]}
    said = finefit("train", model, data, *SHORT, "memory.parameter_offload=none", "--plan", plan, expect=2)
    assert "memory.parameter_offload is none, the plan has disk" in said.stderr + said.stdout
