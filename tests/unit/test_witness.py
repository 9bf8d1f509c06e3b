"""Another tool's run, foretold: what is said of it, and what the command line makes of it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finefit.cli import app
from finefit.config.dialects import read
from finefit.foretell import config_json, foretell
from finefit.hardware import HardwareSpec
from finefit.witness import nccl_bytes, workspace_bytes

RUN_FILE = """\
model_name_or_path: HuggingFaceTB/SmolLM2-135M-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: mine
template: default
cutoff_len: 512
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
output_dir: out
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text(RUN_FILE)
    return path


def test_libraries_take_more_from_hopper_on() -> None:
    named = {name: workspace_bytes(name) for name in ("RTX 4090", "A100-80GB", "NVIDIA H200", "H100-80GB", "B200")}
    small, large = 8320 * 1024, 32 * 2**20
    assert named == {
        "RTX 4090": small, "A100-80GB": small, "NVIDIA H200": large, "H100-80GB": large, "B200": large,
    }  # fmt: skip


def test_one_device_has_no_communicator() -> None:
    assert [nccl_bytes(n) for n in (1, 2, 8, 64)] == [0, 402653184, 1610612736, 1610612736]


def test_a_models_config_is_found_by_its_hub_id() -> None:
    assert config_json("HuggingFaceTB/SmolLM2-135M")["hidden_size"] == 576


def test_their_run_is_foretold_and_ours_stands_beside_it(run_file: Path) -> None:
    told = foretell(read(run_file), HardwareSpec.from_name("RTX 4090"))
    inputs, outputs = 6 * 576 + 1536, 576 + 2 * 192 + 576 + 2 * 1536 + 576  # of the seven linears of a block
    adapters = 8 * 30 * (inputs + outputs)
    found = told.simulated.footprint.moments["optimizer_step"]
    assert found["parameter"] == 2 * 134515008 + 4 * adapters
    assert told.fits and told.ours is not None and told.ours.method == "lora"
    assert told.ours.global_batch_size == 8


def test_plan_takes_another_tools_file_as_it_is(run_file: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(run_file), "--gpu", "RTX 4090", "--json"])
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert (said["tool"], said["fits"], said["run"]["rank"]) == ("llamafactory", True, 8)
    assert said["needed_bytes"] < said["finefit"]["budget_bytes"]


def test_an_override_after_another_tools_file_is_refused(run_file: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(run_file), "lora.rank=4", "--gpu", "RTX 4090"])
    assert "change the file" in str(done.exception.hint if done.exception else "")
