"""Another tool's run, foretold: what is said of it, and what the command line makes of it."""

import json
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finefit.cli import app
from finefit.config.dialects import read
from finefit.errors import ConfigError
from finefit.foretell import config_json, foretell
from finefit.hardware import HardwareSpec
from finefit.terminal.foretold import waiting
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


def refused(*words: str) -> tuple[str, str]:
    done = CliRunner().invoke(app, ["plan", *words])
    assert isinstance(done.exception, ConfigError)
    return done.exception.message, done.exception.hint


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--budget", "8GiB"), "for a device of less memory say --gpu 20GiB"),
        (("--method", "full"), "change the method in the file"),
        (("--max-length", "0"), "change the length in the file"),
        (("-o", "plan.json"), "only finefit's own plans are obeyed; --json prints what is found here"),
        (("--explain",), "leave it out; finefit plan MODEL --explain tells of finefit's own plans"),
        (("--verify",), "leave it out: another tool's run is always simulated"),
    ],
)
def test_options_of_finefits_own_runs_are_refused(run_file: Path, options: tuple[str, ...], hint: str) -> None:
    message = f"{options[0]}: not for another tool's run file '{run_file}', which says what is run"
    assert (message, hint) == refused(str(run_file), "--gpu", "RTX 4090", *options)


def test_devices_are_of_another_tools_run_and_at_least_one(run_file: Path) -> None:
    assert ("--devices 0: a run has 1 to 100,000 devices", "") == refused(str(run_file), "--devices", "0")
    assert (
        "--devices is for another tool's run file, and this is finefit's own run",
        "devices of this run are told by --gpu: --gpu '4 x H100'",
    ) == refused("SmolLM2-135M", "--devices", "4")


def test_a_setting_before_the_file_is_refused_too(run_file: Path) -> None:
    assert (
        "'lora.rank=4' beside another tool's run file",
        "change the file; --gpu and --devices are heard",
    ) == refused("lora.rank=4", str(run_file))


def test_a_wait_is_told_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda told=is_terminal: told)
        with waiting(after_s=0.0):
            time.sleep(0.2)
        said.append(capsys.readouterr().err)
    assert ["simulating a step of the run …\n", ""] == said
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with waiting():
        pass
    assert "" == capsys.readouterr().err
