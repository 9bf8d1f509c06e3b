"""DeepSpeed's JSON both ways: what is read of it becomes constraints, what is wrong is told with its line."""

import json

import pytest
from typer.testing import CliRunner

from finefit import session
from finefit.cli import app
from finefit.config import Config
from finefit.config.deepspeed import Asked, agreed, bucket_of, fits, read, written
from finefit.errors import ConfigError, EngineError
from finefit.mesh import Mesh
from finefit.techniques import Zero, from_json
from finefit.toolchain import Toolchain

MINE = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/fast"},
        "reduce_bucket_size": "auto",
        "overlap_comm": True,
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
}


def file_of(folder, told):
    path = folder / "ds.json"
    path.write_text(told if isinstance(told, str) else json.dumps(told, indent=1))
    return path


def test_what_a_file_asks_for(tmp_path):
    path = file_of(tmp_path, MINE)
    expected = Asked(
        str(path), 3, "host", "disk", "/fast", precision="bf16_mixed", clipping=0.5, global_batch_size=64,
        micro_batch_size=4, left=("overlap_comm",),
    )  # fmt: skip
    assert read(path) == expected


def test_auto_is_left_to_the_plan(tmp_path):
    told = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
    }
    path = file_of(tmp_path, told)
    assert read(path) == Asked(str(path), 2)
    assert read(path).pins() == (("deepspeed", "2"), ("deepspeed.offload", "none:none:"))


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation is not read here", "did you mean 'zero_optimization'?"),
        ({"gradient_clipping": -1}, "must be a number, 0 or more", ""),
        ({"train_batch_size": 2.5}, "must be a whole number", ""),
        ({"optimizer": {"type": "Lion"}}, "is Lion", "say train.optimizer"),
        ({"fp16": {"enabled": True}}, "and bf16 are both enabled", "enable one of them"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path, change, message, hint):
    path = file_of(tmp_path, {**MINE, **change})
    with pytest.raises(ConfigError) as raised:
        read(path)
    said = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if f'"{next(iter(change))}"' in text)
    assert raised.value.where == f"{path}:{said}"
    assert message in raised.value.message and hint in raised.value.hint


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"stage": 4}, "must be 1, 2 or 3, not 4"),
        ({"stage": 0}, "must be 1, 2 or 3, not 0"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "needs stage 3"),
        ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, "needs stage 3"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "needs a folder there"),
        ({"stage": 3, "offload_param": {"device": "disk"}}, "must be none, cpu or nvme"),
        ({"stage": 3, "stage3_max_live_params": 1}, "is not read here"),
        ({}, "is needed"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(tmp_path, zero, message):
    with pytest.raises(ConfigError, match=message):
        read(file_of(tmp_path, {"zero_optimization": zero}))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1,}', "{" * 10_000])
def test_what_is_no_object_is_refused(tmp_path, text):
    with pytest.raises(ConfigError):
        read(file_of(tmp_path, text))


def config_of(path, **sections):
    return Config.model_validate({"model": "m", "hardware": {"deepspeed": str(path)}, **sections})


def test_what_a_file_asks_for_is_what_the_run_has(tmp_path):
    found = agreed(config_of(file_of(tmp_path, MINE)))
    assert (found.train.global_batch_size, found.train.max_grad_norm) == (64, 0.5)
    assert (found.memory.precision, found.memory.micro_batch_size) == ("bf16_mixed", 4)


def test_a_contradiction_names_both(tmp_path):
    path = file_of(tmp_path, MINE)
    with pytest.raises(ConfigError, match=r"train\.global_batch_size is 16, DeepSpeed's file has 64"):
        agreed(config_of(path, train={"global_batch_size": 16}))
    same = agreed(config_of(path, train={"global_batch_size": 64}, memory={"precision": "auto"}))
    assert same.memory.precision == "bf16_mixed"


def test_sizes_of_a_batch_must_belong_together(tmp_path):
    asked = read(file_of(tmp_path, {**MINE, "gradient_accumulation_steps": 2}))
    fits(asked, 64, 8, "cuda")
    with pytest.raises(ConfigError, match="4 x 2 x 4 devices are 32 examples a step, not 64"):
        fits(asked, 64, 4, "cuda")
    with pytest.raises(ConfigError, match="this is one"):
        fits(asked, 64, 1, "cuda")
    with pytest.raises(ConfigError, match="nowhere to offload to"):
        fits(asked, 64, 8, "cpu")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "fp16_mixed"])
def test_what_is_written_reads_as_what_it_was_written_from(tmp_path, stage, precision):
    weights, nvme = ("disk", "/fast") if stage == 3 else ("none", "")
    zero = Zero(stage, 8, "deepspeed", "host", weights, nvme)
    path = file_of(tmp_path, zero.settings(precision, 1001, 0.5, 4, 2))
    found = read(path)
    assert (found.stage, found.optimizer_on, found.parameters_on, found.nvme) == (stage, "host", weights, nvme)
    assert (found.precision, found.clipping, found.micro_batch_size, found.accumulation) == (precision, 0.5, 4, 2)
    assert from_json(zero.to_json()) == zero


NVME = {"device": "nvme", "nvme_path": "/fast"}
HOST = {"device": "cpu", "pin_memory": True}
AUTO = {
    "gradient_clipping": "auto", "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}  # fmt: skip
SIZES = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
TYPICAL = {
    "zero1": {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}, **SIZES},
    "zero2": {"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}, **SIZES},
    "zero2 offload": {"zero_optimization": {"stage": 2, "offload_optimizer": HOST}, "fp16": {"enabled": "auto"}, **AUTO},
    "zero3": {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"}, **AUTO},
    "zero3 offload": {
        "zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}, "bf16": {"enabled": True}, **AUTO
    },
    "zero3 nvme": {
        "zero_optimization": {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME}, "bf16": {"enabled": True}, **SIZES
    },
    "fp32": {"zero_optimization": {"stage": 3}, **SIZES},
}  # fmt: skip


@pytest.mark.parametrize("name", TYPICAL)
def test_what_is_read_is_written_and_read_again(tmp_path, name):
    """What a file says stays; what it leaves open is what the plan has, from then on."""
    asked = read(file_of(tmp_path, TYPICAL[name]))
    zero = Zero(asked.stage, 8, "deepspeed", asked.optimizer_on, asked.parameters_on, asked.nvme)
    assert zero.does(asked)
    settings = zero.settings(asked.precision or "bf16_mixed", 1001, asked.clipping or 1.0, 4, 2)
    again = read(file_of(tmp_path, settings))
    for field in ("stage", "optimizer_on", "parameters_on", "nvme"):
        assert getattr(again, field) == getattr(asked, field)
    for field in ("precision", "clipping", "micro_batch_size", "accumulation"):
        assert getattr(asked, field) in (None, getattr(again, field))
    assert settings == zero.settings(again.precision, 1001, again.clipping, again.micro_batch_size, again.accumulation)


def test_a_bucket_is_even_and_no_larger_than_what_trains():
    assert (bucket_of(1001), bucket_of(10**10)) == (1002, 2**25)
    assert written(2, ("none", "none", ""), "fp32", 10, 1.0, 1, 1)["zero_optimization"]["reduce_bucket_size"] == 10


def test_a_plan_by_deepspeed(tmp_path):
    path = file_of(tmp_path, {"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}})
    words = ["plan", "Qwen/Qwen3-8B", "--gpu", "8 x H100", "--method", "full", f"hardware.deepspeed={path}"]
    made = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    (zero,) = [t for t in made["techniques"] if t["name"] == "zero"]
    assert (zero["stage"], zero["ranks"], zero["engine"]) == (2, 8, "deepspeed")
    assert f"DeepSpeed runs with finefit's own overlap_comm, not those of {path}" in made["notes"]
    settings = json.loads(CliRunner().invoke(app, [*words, "--deepspeed"]).output)
    assert settings["zero_optimization"]["stage"] == 2 and settings["bf16"]["enabled"] is True
    assert settings["train_batch_size"] == made["global_batch_size"]


@pytest.mark.parametrize("name", ["zero2", "zero3 offload", "zero3 nvme"])
def test_settings_that_a_plan_wrote_make_a_plan_that_writes_them(tmp_path, name):
    told, words = (
        {**TYPICAL[name], "train_batch_size": 64},
        ["plan", "Qwen/Qwen3-8B", "--gpu", "8 x H100", "--method", "full"],
    )
    for again in (False, True):
        path = file_of(tmp_path, told)
        output = CliRunner().invoke(app, [*words, f"hardware.deepspeed={path}", "--deepspeed"]).output
        assert not again or json.loads(output) == told
        told = json.loads(output)
    assert told["zero_optimization"].get("offload_optimizer", {}).get("nvme_path") == (
        "/fast" if "nvme" in name else None
    )


def test_deepspeed_divides_several_devices_only(tmp_path):
    path = file_of(tmp_path, {"zero_optimization": {"stage": 2}})
    found = CliRunner().invoke(app, ["plan", "Qwen/Qwen3-8B", "--gpu", "H100", f"hardware.deepspeed={path}"])
    assert isinstance(found.exception, ConfigError)
    assert "this is one" in found.exception.message


def test_the_mesh_says_who_divides():
    assert Mesh(shards=2, stage=2).engine == "torch"


@pytest.mark.parametrize(
    ("seen", "places", "message"),
    [
        (Toolchain(), (), "hardware.deepspeed needs deepspeed, not installed here"),
        (Toolchain("0.19.8", lacking=("hjson",)), (), "hardware.deepspeed needs hjson, not installed here"),
        (Toolchain("0.19.8"), ("disk", "none", "/fast"), "in no checkpoint"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_before_a_run(monkeypatch, seen, places, message):
    monkeypatch.setattr(session, "toolchain", lambda: seen)
    with pytest.raises(EngineError, match=message):
        session.check_engine(Zero(3, 2, "deepspeed", *places))
    session.check_engine(Zero(3, 2))
