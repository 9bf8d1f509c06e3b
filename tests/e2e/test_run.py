"""The command line as a user has it, on a tiny model: plan, train, stop, kill, resume, report, and what is wrong."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from commands import events
from tiny_run import chat

SHORT = ("method=lora", "lora.rank=4", "train.global_batch_size=8", "train.max_length=256", "train.learning_rate=1e-2")


def losses(folder):
    last = {event["step"]: event["loss"] for event in events(folder, "step")}
    return [last[step] for step in sorted(last)]


@pytest.fixture(scope="module")
def whole(finefit, model, data, tmp_path_factory):
    """An undisturbed run of 12 steps."""
    folder = tmp_path_factory.mktemp("runs")
    finefit("train", model, data, *SHORT, "train.steps=12", "train.save_every=4", "name=whole", f"output_dir={folder}")
    return folder / "whole"


def test_training_lowers_the_held_out_loss(whole):
    before, after = (event["loss"] for event in events(whole, "eval"))
    assert after < before - 0.1


def test_run_folder_is_complete(whole):
    names = {path.name for path in whole.iterdir()}
    expected = {"config.yaml", "plan.json", "events.jsonl", "checkpoints", "adapter_config.json", "report.md"}
    assert expected | {"adapter_model.safetensors"} <= names
    assert [path.name for path in sorted((whole / "checkpoints").iterdir())] == ["step-000008", "step-000012"]


def test_predicted_peak_is_the_measured_one(whole):
    memory = events(whole, "memory")[0]
    predicted, measured = memory["predicted"]["peak_bytes"], memory["measured"]["peak_bytes"]
    assert abs(predicted - measured) <= 0.03 * measured


def test_phases_beside_the_steps_take_what_was_predicted(whole):
    """But for the rotary tables, 64 bytes, which no prediction has."""
    found = {event["moment"]: event for event in events(whole, "phase")}
    assert list(found) == ["load", "eval", "save"]
    for event in found.values():
        predicted, measured = sum(event["predicted"].values()), sum(event["measured"].values())
        assert measured - predicted == 32, event["moment"]
    assert "weights loaded" in (whole / "report.md").read_text()


def test_all_techniques_are_verified(whole):
    assert all(technique["verified"] for technique in events(whole, "build")[-1]["techniques"])


def test_adapter_loads_in_peft_with_equal_logits(whole, model):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from finefit.chat import loaded

    ours, tokenizer = loaded(whole, base=False)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), whole)
    ids = tokenizer("Count from 3.", return_tensors="pt").input_ids
    with torch.no_grad():
        a, b = ours.float()(ids).logits, theirs.eval()(ids).logits
    assert torch.allclose(a, b, atol=1e-5)


def test_report_shows_the_example_before_and_after(finefit, whole):
    text = finefit("report", whole, "--md").stdout
    assert "Count from" in text


def test_kill_9_and_resume_gives_the_same_losses_bitwise(finefit, environment, model, data, whole, tmp_path):
    words = [*SHORT, "train.steps=12", "train.save_every=4", "name=killed", f"output_dir={tmp_path}"]
    command = [sys.executable, "-m", "finefit", "train", str(model), str(data), *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = tmp_path / "killed"
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if (folder / "events.jsonl").exists() and len(events_so_far(folder)) >= 6:
            break
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finefit("resume", folder)
    assert losses(folder) == losses(whole)


def events_so_far(folder):
    """Steps in a log that may end in half a line."""
    text = (folder / "events.jsonl").read_text()
    return [line for line in text.splitlines() if '"event": "step"' in line or '"event":"step"' in line]


def test_ctrl_c_saves_and_says_how_to_go_on(environment, finefit, model, data, whole, tmp_path):
    words = [*SHORT, "train.steps=12", "train.save_every=4", "name=stopped", f"output_dir={tmp_path}"]
    command = [sys.executable, "-m", "finefit", "train", str(model), str(data), *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "stopped"
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if (folder / "events.jsonl").exists() and events_so_far(folder):
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.002)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"finefit resume {folder}" in said
    finefit("resume", folder)
    assert losses(folder) == losses(whole)


def test_damaged_checkpoint_is_passed_over_with_a_warning(finefit, whole, tmp_path):
    import shutil

    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    newest = folder / "checkpoints" / "step-000012" / "adapter_model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    finefit("resume", folder)
    said = " ".join(event["message"] for event in events(folder, "warn"))
    assert "step-000012 is damaged" in said and "resumed after step 8" in said
    assert losses(folder) == losses(whole)


def test_plan_file_is_obeyed(finefit, model, data, tmp_path):
    plan = tmp_path / "plan.json"
    settings = (*SHORT, "memory.checkpointing=3", "memory.micro_batch_tokens=300", "train.steps=2")
    finefit("plan", model, data, *settings, "-o", plan)
    finefit("train", model, data, *SHORT, "train.steps=2", "--plan", plan, "name=planned", f"output_dir={tmp_path}")
    techniques = {t["name"]: t for t in events(tmp_path / "planned", "plan")[0]["plan"]["techniques"]}
    assert techniques["checkpointing"]["blocks"] == 3
    assert techniques["accumulation"]["micro_batch_tokens"] == 300


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["method=full"], "method is full, the plan has lora"),
        pytest.param(["lora.rank=8"], "lora.rank is 8, the plan has 4", marks=pytest.mark.slow),
        pytest.param(["memory.checkpointing=all"], "memory.checkpointing is 4, the plan has 3", marks=pytest.mark.slow),
        pytest.param(["memory.precision=fp32"], "memory.precision is fp32", marks=pytest.mark.slow),
        pytest.param(["train.max_grad_norm=0.5"], "train.max_grad_norm is 0.5, the plan has 1", marks=pytest.mark.slow),
        pytest.param(["memory.budget=1MiB"], "the budget is 1 MiB", marks=pytest.mark.slow),
    ],
)
def test_a_plan_of_another_run_is_refused(finefit, model, data, tmp_path, words, expected):
    plan = tmp_path / "plan.json"
    finefit("plan", model, data, *SHORT, "memory.checkpointing=3", "memory.precision=bf16", "-o", plan)
    given = [word for word in SHORT if word.partition("=")[0] not in {w.partition("=")[0] for w in words}]
    said = finefit("train", model, data, *given, *words, "--plan", plan, f"output_dir={tmp_path}/r", expect=2).stderr
    assert said.startswith(f"error: {plan}: ") and expected in said and not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_plan_is_predicted_again_for_other_data(finefit, model, data, tmp_path):
    """Made for short examples, it foresees what the long ones of this run need."""
    short, plan = write(tmp_path / "short.jsonl", chat("a", "b"), chat("c", "d")), tmp_path / "plan.json"
    finefit("plan", model, short, *SHORT, "-o", plan)
    finefit("train", model, data, *SHORT, "train.steps=1", "--plan", plan, "name=other", f"output_dir={tmp_path}")
    (made,), (memory,) = (events(tmp_path / "other", name) for name in ("plan", "memory"))
    assert made["predicted"]["peak_bytes"] > json.loads(plan.read_text())["predicted"]["peak_bytes"]
    assert memory["predicted"]["peak_bytes"] == made["predicted"]["peak_bytes"]


def test_one_process_a_run_folder(finefit, environment, model, data, tmp_path):
    words = [*SHORT, "train.steps=400", "name=twin", f"output_dir={tmp_path}"]
    command = [sys.executable, "-m", "finefit", "train", str(model), str(data), *words]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.time() + 120
        while time.time() < deadline and not (tmp_path / "twin" / "events.jsonl").exists():
            time.sleep(0.01)
        assert "another process" in finefit("resume", tmp_path / "twin", expect=2).stderr
    finally:
        first.kill()
        first.wait()


@pytest.mark.slow
def test_resume_wants_the_data_the_run_began_with(finefit, model, tmp_path):
    path = write(tmp_path / "d.jsonl", *(chat(f"q{i}", f"a{i}") for i in range(20)))
    words = (*SHORT, "train.steps=2", "name=run", f"output_dir={tmp_path}")
    finefit("train", model, path.name, *words, cwd=tmp_path)
    finefit("resume", tmp_path / "run", cwd="/")
    write(path, *(chat(f"other {i}", f"a{i}") for i in range(20)))
    assert "not what the run began with" in finefit("resume", tmp_path / "run", expect=2).stderr


@pytest.mark.slow
def test_dropout_is_drawn_from_the_seed(finefit, model, data, tmp_path):
    """Two seeds leave the generator in two states, one seed in one, and the same losses."""
    words = (*SHORT, "lora.dropout=0.3", "train.steps=2", f"output_dir={tmp_path}")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        finefit("train", model, data, *words, f"name={name}", f"seed={seed}")
    states = [(tmp_path / name / "checkpoints/step-000002/random.safetensors").read_bytes() for name in "abc"]
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert states[0] == states[1] != states[2]


def test_a_loss_that_is_no_number_stops_before_the_update(finefit, model, data, tmp_path):
    words = (*SHORT, "train.steps=9", "train.learning_rate=1e30", "train.max_grad_norm=0", "train.save_every=1")
    said = finefit("train", model, data, *words, "name=nan", f"output_dir={tmp_path}", expect=2).stderr
    assert "not a number" in said and "Traceback" not in said
    assert events(tmp_path / "nan", "end")[0]["status"] == "failed"
    skipped = events(tmp_path / "nan", "skip")
    assert [event["skipped"] for event in skipped] == [1, 2, 3] and "chats.jsonl:" in skipped[0]["message"]


def test_plan_diff_names_what_differs(finefit, model, tmp_path):
    for name, blocks in (("a.json", 1), ("b.json", 4)):
        finefit("plan", model, *SHORT, f"memory.checkpointing={blocks}", "-o", tmp_path / name)
    text = finefit("plan", "--diff", tmp_path / "a.json", tmp_path / "b.json").stdout
    assert "checkpointing" in text and "peak" in text


def test_full_fine_tuning_saves_a_model_transformers_loads(finefit, model, data, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    finefit("train", model, data, "method=full", "train.steps=2", "name=full", f"output_dir={tmp_path}")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    moved = [not torch.equal(a, b) for a, b in zip(loaded.parameters(), base.parameters(), strict=True)]
    assert all(moved)


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


BAD_DATA = {
    "empty file": ([], "is empty"),
    "invalid JSON": ([chat("a", "b"), '{"messages": ['], ":2"),
    "wrong role order": (
        [
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "user", "content": "b"},
                    {"role": "assistant", "content": "c"},
                ]
            }
        ],
        "user",
    ),
    "nothing trained": ([{"messages": [{"role": "user", "content": "a"}]}], "assistant"),
}


@pytest.mark.parametrize(
    "case", [case if case == "invalid JSON" else pytest.param(case, marks=pytest.mark.slow) for case in BAD_DATA]
)
def test_bad_data_is_one_message(finefit, model, tmp_path, case):
    rows, expected = BAD_DATA[case]
    path = write(tmp_path / "bad.jsonl", *rows)
    said = finefit("train", model, path, "method=lora", f"output_dir={tmp_path}", expect=2).stderr
    assert said.startswith(f"error: {path}") and expected in said and "Traceback" not in said


def test_too_long_can_be_an_error(finefit, model, tmp_path):
    path = write(tmp_path / "long.jsonl", chat("a", "b"), chat("x" * 400, "y"))
    words = ("train.max_length=100", "train.too_long=error", "method=lora")
    said = finefit("train", model, path, *words, f"output_dir={tmp_path}", expect=2).stderr
    assert f"{path}:2" in said


def bad(words, expected, marks=()):
    return pytest.param(words, expected, id=expected, marks=marks)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        bad(["train.stpes=3"], "did you mean 'train.steps'?"),
        bad(["rank=3"], "lora.rank"),
        bad(["train.steps=many"], "train.steps"),
        bad(["memory.budget=lots"], "8GiB"),
        bad(["lora.targets=q_prj", "method=lora"], "did you mean 'q_proj'?", pytest.mark.slow),
        bad(["memory.checkpointing=9", "method=lora"], "the model has 4", pytest.mark.slow),
        bad(["memory.micro_batch_size=99", "method=lora"], "global batch", pytest.mark.slow),
        bad(["memory.budget=300KiB", "method=lora"], "largest part"),
    ],
)
def test_bad_settings_are_one_message(finefit, model, data, tmp_path, words, expected):
    said = finefit("train", model, data, *words, f"output_dir={tmp_path}", expect=2).stderr
    assert said.startswith("error: ") and expected in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_unknown_key_in_a_file_has_its_place(finefit, tmp_path):
    path = write(tmp_path / "run.yaml", "model: m", "train:", "  learning_rte: 1")
    assert f"{path}:3:3: unknown key 'train.learning_rte'" in finefit("train", path, expect=2).stderr


def test_missing_names_are_one_message(finefit, model, data, tmp_path):
    assert "SmolLM2-135M-Instruct" in finefit("plan", "SmolLM2-135M-Instrct", expect=2).stderr
    close = data.with_name("chat.jsonl")
    assert "chats.jsonl" in finefit("train", model, close, expect=2).stderr
    assert "no run" in finefit("resume", tmp_path, expect=2).stderr


def test_model_folder_without_weights(finefit, model, data, tmp_path):
    (tmp_path / "m").mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / "m" / path.name).write_bytes(path.read_bytes())
    said = finefit("train", tmp_path / "m", data, "method=lora", f"output_dir={tmp_path}", expect=2).stderr
    assert "no safetensors weights" in said and "Traceback" not in said


def test_unknown_architecture(finefit, model, data, tmp_path):
    copy_of(model, tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "model_type": "llamma"}))
    said = finefit("train", tmp_path / "m", data, "method=lora", f"output_dir={tmp_path}", expect=2).stderr
    assert "llamma" in said and "'llama'" in said and len(said) < 400 and "Traceback" not in said


def test_plan_is_quick_and_torch_free(environment):
    """Its processor's time: another test runs beside this one. The best of three, the first of which may compile."""
    code = (
        "import sys, time; sys.argv = ['finefit', 'plan', 'meta-llama/Llama-3.1-8B', '--gpu', 'RTX 4090', '--method', "
        "'lora'];\nfrom finefit.cli import main\ntry:\n main()\nexcept SystemExit as e:\n assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules\nassert 'numpy' not in sys.modules\nprint('SECONDS', time.process_time())"
    )
    said = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    ]
    assert min(float(one.rpartition("SECONDS")[2]) for one in said) < 1.0


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("config.json", '{"a":', "config.json"),
        pytest.param("config.json", "[1]", "config.json", marks=pytest.mark.slow),
        ("tokenizer.json", "{", "tokenizer"),
        pytest.param("tokenizer.json", None, "tokenizer", marks=pytest.mark.slow),
    ],
)
def test_a_broken_model_folder_is_one_message(finefit, model, data, tmp_path, file, content, expected):
    folder = copy_of(model, tmp_path / "m")
    (folder / file).unlink() if content is None else (folder / file).write_text(content)
    said = finefit("train", folder, data, "method=lora", f"output_dir={tmp_path}/r", expect=2).stderr
    assert said.startswith("error: ") and expected in said and "Traceback" not in said


def test_a_quantised_base_is_refused(finefit, model, data, tmp_path):
    folder = copy_of(model, tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    said = finefit("train", folder, data, "method=lora", f"output_dir={tmp_path}/r", expect=2).stderr
    assert "quantised (fp8)" in said and not (tmp_path / "r").exists()


def copy_of(model, folder):
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


QLORA = (*SHORT[1:], "method=qlora", "train.steps=6", "train.save_every=3")


@pytest.fixture(scope="module")
def quantised(finefit, model, data, tmp_path_factory):
    """An undisturbed run on a quantised base."""
    folder = tmp_path_factory.mktemp("runs")
    finefit("train", model, data, *QLORA, "name=whole", f"output_dir={folder}")
    return folder / "whole"


def test_a_quantised_base_trains_and_is_as_planned(quantised):
    before, after = (event["loss"] for event in events(quantised, "eval"))
    assert after < before - 0.05
    (build,) = events(quantised, "build")
    assert {t["name"]: t["verified"] for t in build["techniques"]}["quantized_base"]
    memory = events(quantised, "memory")[0]
    parts = [memory[witness]["moments"]["forward_end"]["parameter"] for witness in ("predicted", "measured")]
    assert parts[0] == parts[1]
    peaks = [memory[witness]["peak_bytes"] for witness in ("predicted", "measured")]
    assert abs(peaks[0] - peaks[1]) <= 0.01 * peaks[1]


@pytest.mark.parametrize("method", ["whole", pytest.param("quantised", marks=pytest.mark.slow)])
def test_a_run_is_merged_into_a_model_of_its_own(finefit, environment, request, model, method, tmp_path):
    """As a user has it: the command, the model talked to, the run's report; the base in 16 bits or more, as its files."""
    import shutil

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = shutil.copytree(request.getfixturevalue(method), tmp_path / "run")
    template = run / "chat_template.jinja"
    template.write_text(template.read_text() + "{# its own #}")
    said = finefit("merge", run).stderr
    assert (run / "merged" / "chat_template.jinja").read_text().endswith("{# its own #}")
    assert said.startswith(f"merging model.safetensors, 1 of 1\nmerged: {run}/merged  (28 of 38 tensors changed, ")
    merged = AutoModelForCausalLM.from_pretrained(run / "merged", dtype="auto")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), run)
    ids = torch.arange(2, 40)[None]
    assert torch.allclose(merged(input_ids=ids).logits, adapted(input_ids=ids).logits, atol=1e-5)
    asked = [{"role": "user", "content": "Count."}]
    spoken = [AutoTokenizer.from_pretrained(folder).apply_chat_template(asked) for folder in (run / "merged", model)]
    assert spoken[0] == spoken[1]
    (phase,) = [event for event in events(run, "phase") if event["moment"] == "merge"]
    assert phase["measured"] == phase["predicted"] == {"temporary": 64 * 32 * 8 + 4}
    assert "merging" in finefit("report", run).stdout and "finished" in (run / "report.md").read_text()
    chatted = subprocess.run(
        [sys.executable, "-m", "finefit", "chat", str(run / "merged"), "--max-tokens", "2"], input="hello\n",
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert chatted.returncode == 0, chatted.stderr
    assert "there is something already" in finefit("merge", run, expect=2).stderr


def test_what_cannot_be_merged_is_one_message(finefit, model, whole, tmp_path):
    import shutil

    run = shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("adapter_*"))
    for words, expected in (
        ((model,), "there is no adapter to merge"),
        ((run,), f"hint: finefit resume {run} finishes the run"),
        ((tmp_path / "nothing",), "there is no adapter here"),
        ((whole, "-o", model), "there is something already"),
        ((whole, "-o", tmp_path / "m", "--dtype", "bfloat61"), "did you mean 'bfloat16'?"),
        ((whole, "-o", tmp_path / "m", "--base", "no/such"), "no/such"),
        ((whole, "-o", "/proc/nowhere/m"), "/proc"),
    ):
        said = finefit("merge", *words, expect=2).stderr
        assert said.startswith("error: ") and expected in said and "Traceback" not in said
    assert not (tmp_path / "m").exists()


def test_a_stopped_run_on_a_quantised_base_goes_on_bitwise(finefit, quantised, tmp_path):
    """From the checkpoint in its middle: the base is quantised again and is the same."""
    import shutil

    folder = tmp_path / "half"
    shutil.copytree(quantised, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000006")
    finefit("resume", folder)
    assert losses(folder) == losses(quantised)
    resumed = [event for event in events(folder, "phase") if event["moment"] == "resume"]
    assert [sum(event["measured"].values()) - sum(event["predicted"].values()) for event in resumed] == [32]
    adapters = [(run / "adapter_model.safetensors").read_bytes() for run in (folder, quantised)]
    assert adapters[0] == adapters[1]


def test_chat_has_the_base_the_adapter_was_trained_on(finefit, environment, quantised):
    from finefit.chat import loaded
    from finefit.nn.quantised_linear import QuantisedWeight

    for base in (False, True):
        model, _ = loaded(quantised, base)
        kinds = [type(layer.mlp.up_proj.weight) for layer in model.get_decoder().layers]
        assert {QuantisedWeight} == set(kinds)
    command = [sys.executable, "-m", "finefit", "chat", str(quantised), "--max-tokens", "4"]
    done = subprocess.run(command, input="Count from 3.\n/quit\n", env=environment, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_an_adapter_of_a_quantised_base_loads_in_peft(quantised, model):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), quantised)
    assert theirs.peft_config["default"].base_model_name_or_path == str(model)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["qlora.bits=5"], "'qlora.bits': must be 2, 3, 4 or 8, not 5; did you mean 4?"),
        (["method=qloar"], "did you mean 'qlora'?"),
    ],
)
def test_bits_there_are_not_are_one_message(finefit, model, data, tmp_path, words, expected):
    said = finefit("train", model, data, *QLORA[:-1], *words, f"output_dir={tmp_path}", expect=2).stderr
    assert expected in said and "Traceback" not in said and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_plan_of_other_bits_is_refused(finefit, model, data, tmp_path):
    plan = tmp_path / "plan.json"
    finefit("plan", model, data, *QLORA, "-o", plan)
    words = (*QLORA, "qlora.bits=8", "--plan", plan, f"output_dir={tmp_path}/r")
    assert "qlora.bits is 8, the plan has 4" in finefit("train", model, data, *words, expect=2).stderr
    text = plan.read_text().replace('"bits": 4', '"bits": 4.0', 1)
    plan.write_text(text)
    said = finefit("train", model, data, *QLORA, "--plan", plan, f"output_dir={tmp_path}/r", expect=2).stderr
    assert "bits' must be 2, 3, 4 or 8, not 4.0" in said
    plan.write_text(text.replace('"bits": 4.0', '"bits": 4').replace('"chunk": 524288', '"chunk": 100'))
    said = finefit("train", model, data, *QLORA, "--plan", plan, f"output_dir={tmp_path}/r", expect=2).stderr
    assert "a chunk of 100 elements is not whole groups" in said
