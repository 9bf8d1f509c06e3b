"""A plan as a file and beside another one; golden plans.

Renew ``tests/golden/plans.json`` after a change that is meant to change plans:  python tests/unit/test_plan.py
"""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from finefit import cli
from finefit.batches import Uniform
from finefit.candidates import Question
from finefit.errors import ConfigError
from finefit.plan import Plan, diff, load
from finefit.search import search
from finefit.spec import HardwareSpec, JobSpec, resolve_model
from finefit.techniques import Accumulation, Checkpointing, Clipping, Lora, from_json
from finefit.units import parse_budget

GOLDEN = Path(__file__).parents[1] / "golden" / "plans.json"
LAPTOP = HardwareSpec("laptop", "cpu", 16 * 2**30, matmul_flops_per_s=(("float32", 3e11), ("bfloat16", 1.8e12)),
                      bandwidth_bytes_per_s=2.4e10)  # fmt: skip
# model, device (or laptop), budget, method, longest, global batch
WISHES = [
    ("SmolLM2-135M-Instruct", "laptop", "2GiB", "lora", 1024, 16),
    ("SmolLM2-135M-Instruct", "laptop", "600MiB", "lora", 1024, 16),
    ("SmolLM2-135M-Instruct", "laptop", "90%", "full", 2048, 8),
    ("Qwen/Qwen2.5-0.5B", "laptop", "8GiB", "auto", 512, 16),
    ("meta-llama/Llama-3.2-1B", "RTX 3060", "90%", "auto", 2048, 16),
    ("meta-llama/Llama-3.1-8B", "RTX 4090", "90%", "auto", 4096, 16),
    ("meta-llama/Llama-3.1-8B", "H100", "-4GiB", "lora", 8192, 32),
    ("mistralai/Mistral-7B-v0.1", "RTX 4090", "20GiB..23GiB", "lora", 2048, 16),
    ("Qwen/Qwen2.5-7B", "A100 80GB", "90%", "auto", 4096, 64),
    ("google/gemma-2-2b", "RTX 4090", "90%", "lora", 4096, 8),
    ("google/gemma-3-1b-it", "RTX 3060", "90%", "auto", 1024, 16),
    ("microsoft/Phi-3-mini-4k-instruct", "L4", "90%", "lora", 4096, 4),
    ("meta-llama/Llama-3.1-8B", "RTX 3060", "90%", "auto", 2048, 16),
    ("Qwen/Qwen2.5-7B", "RTX 3060", "90%", "qlora", 1024, 16),
]


def question_of(name, device, budget, method, longest, size):
    hardware = LAPTOP if device == "laptop" else HardwareSpec.from_name(device)
    job = JobSpec(method=method, global_batch_size=size, max_length=longest, longest=longest)
    batches = Uniform(size, longest)
    return Question(resolve_model(name), hardware, job, batches, parse_budget(budget, hardware.memory_bytes))


def facts(plan):
    """What a golden file holds of a plan: its settings, its bytes, its time to three digits."""
    return {
        "method": plan.method,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "techniques": [t.to_json() for t in plan.techniques],
        "peak_moment": plan.predicted.peak_moment,
        "peak": dict(plan.predicted.moments[plan.predicted.peak_moment]),
        "reserved_bytes": plan.predicted.reserved_bytes,
        "seconds_per_step": float(f"{plan.seconds_per_step:.3g}"),
    }


def golden_plans():
    return [{"wish": list(wish), "plan": facts(search(question_of(*wish)))} for wish in WISHES]


@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: " ".join(map(str, wish)))
def test_golden_plan(wish):
    known = {tuple(row["wish"]): row["plan"] for row in json.loads(GOLDEN.read_text())}
    found = json.loads(json.dumps(facts(search(question_of(*wish)))))
    assert known[wish] == found, f"renew with: python {Path(__file__).name} (see the top of this file)"


@pytest.fixture(scope="module")
def plan():
    return search(question_of(*WISHES[1]))


def test_a_plan_is_read_back_as_it_was_written(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = load(tmp_path / "plan.json")
    assert plan.to_json() == again.to_json()
    assert plan.techniques == again.techniques
    assert plan.alternatives == again.alternatives
    assert plan.predicted.total_bytes == again.predicted.total_bytes


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("", "a folder is there", "--json prints the plan"),
        ("pipe", "a pipe is there", "--json prints the plan"),
        ("nope/x.json", "there is no such folder for the plan", "mkdir -p .*/nope"),
        ("keep.json", "the file there is not a plan", "give another name"),
        ("keep.txt", "the file there is not a plan", "give another name"),
    ],
)
def test_a_plan_is_saved_over_nothing_but_plans(plan, tmp_path, name, message, hint):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "keep.json").write_text('{"version": 1}')
    (tmp_path / "keep.txt").write_text("notes")

    def state():
        stats = {path: path.lstat() for path in tmp_path.iterdir()}
        return {path: (one.st_ino, one.st_mode, one.st_mtime_ns) for path, one in stats.items()}

    before = state()
    with pytest.raises(ConfigError, match=message) as caught:
        plan.save(tmp_path / name)
    assert re.search(hint, caught.value.hint)
    assert before == state()


def test_a_plan_needs_a_name(plan):
    with pytest.raises(ConfigError, match="needs the name of a file"):
        plan.save(Path())


def test_a_plan_replaces_an_earlier_one_and_what_is_empty(plan, tmp_path):
    (tmp_path / "new.json").touch()
    (tmp_path / "link.json").symlink_to("old.json")
    (tmp_path / "old.json").write_text('{"version": 0, "techniques": [], "predicted": {}}')
    for name in ("new.json", "link.json"):
        plan.save(tmp_path / name)
        assert plan.to_json() == load(tmp_path / name).to_json()
    assert (tmp_path / "link.json").is_symlink()


def test_no_clipping_is_plain_json_and_read_back(plan, tmp_path):
    free = tuple(Clipping(0.0) if t.name == "clipping" else t for t in plan.techniques)
    dataclasses.replace(plan, techniques=free).save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json").technique("clipping") == Clipping(0.0)
    assert "Infinity" not in (tmp_path / "plan.json").read_text()


def test_every_technique_is_read_back():
    for technique in (Lora(4, 8.0, 0.1, ("q_proj", "v_proj")), Checkpointing(2), Accumulation(2, 512, 8)):
        written = json.loads(json.dumps({**technique.to_json(), "says": technique.describe()}))
        assert technique == from_json(written)


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("{", "not a plan: Expecting property name", "plan.json:1:2"),
        ("[]", "not a plan: it must be an object, not []", "plan.json"),
        ('{"version": 99}', "this plan is of version 99", "plan.json"),
        ('{"version": 1}', "not a plan of this version: 'model' is missing", "plan.json"),
        ("[" * 100_000, "not a plan: ", "plan.json"),
        ("1" * 5000, "not a plan: ", "plan.json"),
    ],
)
def test_what_is_no_plan_is_the_users_fault(tmp_path, text, message, where):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in caught.value.message
    assert caught.value.where.endswith(where)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(budget_bytes="z"), "'budget_bytes' must be a whole number, 0 or more, not 'z'"),
        (lambda d: d.update(budget_bytes=True), "'budget_bytes' must be a whole number, 0 or more, not true"),
        (lambda d: d.update(budget_bytes=-1), "'budget_bytes' must be a whole number, 0 or more, not -1"),
        (lambda d: d.update(micro_batch_size="3"), "'micro_batch_size' must be a whole number, 0 or more, not '3'"),
        (lambda d: d.update(micro_batch_size=0), "'micro_batch_size' must be at least 1, not 0"),
        (lambda d: d.update(model=None), "'model' must be text, not null"),
        (lambda d: d.update(seconds_per_step="fast"), "'seconds_per_step' must be a number, not 'fast'"),
        (lambda d: d.update(reasons="x"), "'reasons' must be a list, not 'x'"),
        (lambda d: d.update(notes=[1]), "'notes[0]' must be text, not 1"),
        (lambda d: d["alternatives"][0].update(chosen=1), "'alternatives[0].chosen' must be true or false, not 1"),
        (lambda d: d.pop("notes"), "'notes' is missing"),
        (lambda d: d.update(predicted=[]), "'predicted' must be an object, not []"),
        (lambda d: d["predicted"].update(moments={}), "'predicted.moments' must be at least one moment, not {}"),
        (lambda d: d["predicted"]["moments"].update(load={"parameter": 1.5}),
         "'predicted.moments.load.parameter' must be a whole number, 0 or more, not 1.5"),
        (lambda d: d["predicted"].update(witness="me"),
         "'predicted.witness' must be predicted or simulated or measured, not 'me'"),
        (lambda d: d.update(techniques={}), "'techniques' must be a list, not {}"),
        (lambda d: d.update(techniques=[]), "'techniques' must be one technique 'accumulation', not 0"),
        (lambda d: d["techniques"].append(d["techniques"][0]), "'techniques' must be one technique 'precision', not 2"),
        (lambda d: d["techniques"][0].update(name="levitation"), "'techniques[0].name' must be one of precision, "),
        (lambda d: d["techniques"][0].update(name=[]), "'techniques[0].name' must be one of precision, "),
        (lambda d: d["techniques"][0].update(kind="fp8"),
         "'techniques[0].kind' must be fp32 or bf16 or bf16_mixed or fp16 or fp16_mixed, not 'fp8'"),
        (lambda d: d["techniques"][1].update(targets="q"), "'techniques[1].targets' must be a list, not 'q'"),
        (lambda d: d["techniques"][1].update(rank=None), "'techniques[1].rank' must be a whole number"),
        (lambda d: d["techniques"][1].update(speed=3), "it knows no 'techniques[1].speed'"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_a_plan_is_named_when_it_is_read(plan, tmp_path, edit, message):
    data = json.loads(json.dumps(plan.to_json()))
    edit(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert f"not a plan of this version: {message}" in caught.value.message
    assert caught.value.where == str(path)


def test_a_plan_that_is_no_text_is_the_users_fault(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not a plan: byte 7 is not UTF-8 text"):
        load(path)


def test_a_missing_plan_is_the_users_fault(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the plan: No such file"):
        load(tmp_path / "none.json")


def test_a_plan_does_not_differ_from_itself(plan):
    assert diff(plan, plan) == []


def test_what_differs_is_listed_and_nothing_else(plan):
    roomy = search(question_of(*WISHES[0]))
    rows = {what: (one, other) for what, one, other in diff(plan, roomy)}
    assert rows["budget"] == ("600 MiB", "2.00 GiB")
    assert rows["peak"][0] != rows["peak"][1]
    assert {"model", "hardware", "method", "lora", "precision", "clipping"}.isdisjoint(rows)
    assert all(one != other for one, other in rows.values())


def test_a_technique_that_one_plan_lacks_is_off_there(plan):
    bare = dataclasses.replace(plan, techniques=tuple(t for t in plan.techniques if t.name != "lora"))
    rows = {what: (one, other) for what, one, other in diff(plan, bare)}
    assert rows == {"lora": (plan.technique("lora").describe(), "off")}


def test_a_plan_is_never_edited(plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.method = "full"
    assert isinstance(plan, Plan)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden_plans(), indent=1) + "\n")


def test_a_difference_as_json(plan, tmp_path, capsys):
    plan.save(tmp_path / "a.json")
    dataclasses.replace(plan, method="full").save(tmp_path / "b.json")
    cli._show_diff([str(tmp_path / "a.json"), str(tmp_path / "b.json")], as_json=True)
    assert json.loads(capsys.readouterr().out) == [{"what": "method", "a": plan.method, "b": "full"}]
