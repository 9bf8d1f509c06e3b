"""Another tool's run, foretold: what is said of it, and what the command line makes of it."""

import json
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from finefit.cli import app
from finefit.config.dialects import read
from finefit.errors import ConfigError
from finefit.foretell import _in_place, _most_positions, _ours, config_json, foretell
from finefit.hardware import HardwareSpec
from finefit.spec import resolve_model
from finefit.techniques.clipping import Clipping
from finefit.terminal.foretold import _verdict, waiting
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


@pytest.mark.slow
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
    assert ("--devices four is no number of devices", "say 4, or cpu:4 for processes on this CPU") == refused(
        "SmolLM2-135M", "--devices", "four"
    )


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


def noted(run_file: Path, text: str) -> tuple[str, ...]:
    """What the model's config adds to the notes of the reader."""
    run_file.write_text(text)
    found = read(run_file)
    config = config_json(found.run.model)
    return _in_place(found, resolve_model(found.run.model), config).run.notes[len(found.run.notes) :]


def test_targets_that_no_layer_has_are_refused_at_their_place(run_file: Path) -> None:
    run_file.write_text(RUN_FILE.replace("lora_target: all", "lora_target: q_porj"))
    done = CliRunner().invoke(app, ["plan", str(run_file), "--gpu", "RTX 4090"])
    assert str(done.exception) == (
        f"{run_file}:6:14: 'lora_target': the model has no linear layer 'q_porj'\nhint: did you mean 'q_proj'?"
    )
    with pytest.raises(ConfigError, match="hint: its blocks have q_proj, k_proj, v_proj, o_proj, gate_proj"):
        noted(run_file, RUN_FILE.replace("lora_target: all", "lora_target: [query_key_value, lm_head]"))


def test_targets_that_peft_passes_over_are_noted(run_file: Path) -> None:
    assert ("the model has no linear layer 'c_attn': PEFT passes over it",) == noted(
        run_file, RUN_FILE.replace("lora_target: all", "lora_target: q_proj,c_attn,lm_head")
    )
    assert () == noted(
        run_file, RUN_FILE.replace("lora_target: all", "lora_target: model.layers.3.self_attn.q_proj,v_proj")
    )


def test_rows_beyond_the_models_positions_are_noted(run_file: Path) -> None:
    long = RUN_FILE.replace("cutoff_len: 512", "cutoff_len: 16384")
    what = "rows of 16,384 tokens are longer than the 8,192 positions of the model's config"
    assert (f"{what}: it was not trained on them, and the tool does not say so",) == noted(run_file, long)
    assert () == noted(run_file, f"{long}rope_scaling: yarn\n")
    assert () == noted(run_file, RUN_FILE)
    learned = long.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "gpt2").replace(
        "cutoff_len: 16384", "cutoff_len: 2048"
    )
    assert (
        "rows of 2,048 tokens are longer than the 1,024 positions of the model's config, and it learns a vector for each"
        " of those: such a row ends the run with an error",
    ) == noted(run_file, learned)


def test_positions_that_the_config_itself_scales_count() -> None:
    model = resolve_model("SmolLM2-135M")
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}
    assert [8192, 32768, 32768, 8192] == [
        _most_positions(model, config) for config in ({}, yarn, {"text_config": yarn}, {"rope_scaling": None})
    ]


def test_the_wish_is_planned_at_its_own_length(run_file: Path) -> None:
    """A model's config does not shorten it unseen."""
    card, needed = HardwareSpec.from_name("RTX 4090"), []
    for length in (8192, 16384):
        run_file.write_text(RUN_FILE.replace("cutoff_len: 512", f"cutoff_len: {length}"))
        plan, why = _ours(read(run_file), card)
        assert plan is not None and not why
        needed.append(plan.predicted.peak_bytes)
    assert needed[1] > 1.2 * needed[0]
    run_file.write_text(RUN_FILE.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "gpt2").replace("512", "2048"))
    assert (None, "the model has 1,024 positions, rows have 2,048") == _ours(read(run_file), card)


def shown(reserved: int, needed: int) -> list[str]:
    told = {"fits": True, "hardware": "RTX 4090", "reserved_bytes": reserved, "needed_bytes": needed}
    console = Console(width=160)
    with console.capture() as captured:
        console.print(_verdict(told))
    return captured.get().splitlines()


def test_more_reserved_than_needed_is_explained() -> None:
    why = "on a full device cached memory is given back: the smallest device decides"
    assert ["fits RTX 4090", why] == shown(reserved=30, needed=20)
    assert ["fits RTX 4090"] == shown(reserved=20, needed=20)


def test_a_wish_without_clipping_says_so(run_file: Path) -> None:
    run_file.write_text(RUN_FILE + "max_grad_norm: 0\n")
    plan, _ = _ours(read(run_file), HardwareSpec.from_name("RTX 4090"))
    assert plan is not None
    assert "gradients are not clipped" in {t.describe() for t in plan.techniques}
    assert "gradients clipped to a global norm of 0.5" == Clipping(0.5).describe()


def test_a_wish_of_millions_of_examples_is_planned_at_once(run_file: Path) -> None:
    run_file.write_text(RUN_FILE.replace("gradient_accumulation_steps: 4", "gradient_accumulation_steps: 1000000"))
    started = time.process_time()
    plan, _ = _ours(read(run_file), HardwareSpec.from_name("RTX 4090"))
    assert plan is not None and plan.global_batch_size == 2_000_000
    assert time.process_time() - started < 5
