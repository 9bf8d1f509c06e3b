"""The doctor's judgement of made-up machines, the torch question in another process, and the calibration file."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from finefit import doctor, machine, probe
from finefit.doctor import Finding, examine, findings
from finefit.errors import EngineError
from finefit.hardware import HardwareSpec
from finefit.machine import Driver, Facts, Gpu, Place, Requirement, Torch
from finefit.toolchain import Toolchain, stale_locks, toolchain

GIB = 2**30
GPU = Gpu("NVIDIA GeForce RTX 4090", 24 * GIB, 0)
DRIVER = Driver("560.35", (12, 6), (GPU,))
CUDA_TORCH = Torch("2.13.0", cuda="12.8", devices=(GPU.name,))
HEALTHY = Facts(
    python="3.11.7 (/usr/bin/python3)", system="Debian, 6.1, x86_64", cpu="AMD EPYC", cores=8,
    flags=("avx512_bf16", "avx512f"), load=0.5, memory_bytes=64 * GIB, available_bytes=60 * GIB,
    places=(Place("home", "/home/me", 500 * GIB), Place("here", "/home/me/work", 500 * GIB)),
    caches=(Place("Hugging Face", "/home/me/.cache/huggingface/hub", 500 * GIB, 12 * GIB),),
    driver=DRIVER, torch=CUDA_TORCH, versions=(("transformers", "5.24.0"), ("peft", "")),
    requirements=(Requirement("pydantic", "2.8", "", "2.14.4"), Requirement("torch", "2.11", "train", "2.13.0"),
                  Requirement("ruff", "0.9", "check", "")),
    hub_why_not="", is_calibrated=True,
)  # fmt: skip


def only(**changes) -> Finding:
    (found,) = findings(replace(HEALTHY, **changes))
    return found


def test_a_healthy_machine_has_no_findings():
    assert findings(HEALTHY) == ()
    assert examine(HEALTHY).is_healthy


def test_torch_missing_with_and_without_a_gpu():
    lacking = (Requirement("torch", "2.11", "train", ""),)
    pip = f"{sys.executable} -m pip install 'torch>=2.11'"
    assert Finding("problem", "training needs torch>=2.11", pip) == only(requirements=lacking, torch=None)
    on_cpu = only(requirements=lacking, torch=None, driver=None)
    assert f"{pip} --index-url https://download.pytorch.org/whl/cpu" == on_cpu.command


def test_missing_and_old_packages_in_one_command():
    needed = (
        Requirement("transformers", "5", "train", "4.57.1"),
        Requirement("gguf", "0.17", "train", ""),
        Requirement("numpy", "1.26", "train", "2.4.6"),
    )
    found = only(requirements=needed)
    assert found.message == "training needs transformers>=5 (here: 4.57.1), gguf>=0.17"
    assert f"{sys.executable} -m pip install 'transformers>=5' 'gguf>=0.17'" == found.command


def test_a_broken_torch_is_reported_and_not_fatal():
    found = only(torch=Torch("2.13.0", error="ImportError: libcudart.so.13"))
    assert (found.kind, found.message) == ("problem", "torch 2.13.0 does not start: ImportError: libcudart.so.13")
    assert found.command.endswith("-m pip install --force-reinstall 'torch>=2.11'")


def test_cpu_torch_beside_a_gpu():
    found = only(torch=Torch("2.13.0+cpu"))
    assert found.message == "torch 2.13.0+cpu is built for the CPU alone, and there is a NVIDIA GeForce RTX 4090"
    assert not examine(replace(HEALTHY, torch=Torch("2.13.0+cpu"))).is_healthy


def test_torch_newer_than_the_driver():
    found = only(torch=Torch("2.13.0", cuda="13.0", why_not="driver too old"))
    assert "built for CUDA 13.0, but driver 560.35 serves CUDA 12.6 and older" in found.message
    assert found.command.endswith("'torch>=2.11' --index-url https://download.pytorch.org/whl/cu126")
    old = only(torch=Torch("2.13.0", cuda="13.0"), driver=Driver("470.1", (11, 4), (GPU,)))
    assert old.message.endswith("update the driver") and old.command == "nvidia-smi"


def test_the_same_major_serves_every_minor_version():
    assert findings(replace(HEALTHY, torch=replace(CUDA_TORCH, cuda="12.9"))) == ()


def test_torch_that_does_not_reach_the_gpu():
    assert "it sees no device; is CUDA_VISIBLE_DEVICES set?" in only(torch=replace(CUDA_TORCH, devices=())).message
    why = "CUDA unknown error"
    assert why in only(torch=replace(CUDA_TORCH, devices=(), why_not=why)).message


def test_a_driver_that_does_not_answer():
    found = only(driver=Driver(error="Driver/library version mismatch"))
    assert found.kind == "problem" and "--gpus all" in found.message


def test_memory_of_a_gpu_used_by_others():
    found = only(driver=replace(DRIVER, gpus=(replace(GPU, used_bytes=6 * GIB),)))
    assert (found.kind, found.message) == ("advice", "others use 6.00 GiB of the NVIDIA GeForce RTX 4090")
    assert found.command.startswith("nvidia-smi --query-compute-apps")


def test_little_room():
    full = (Place("home", "/home/me", 3 * GIB),)
    assert only(places=full).message == "only 3.00 GiB are free on the disk of /home/me"
    assert only(available_bytes=GIB).message == "only 1.00 GiB of RAM are available"


def test_no_hub_is_advice():
    found = only(hub_why_not="https://huggingface.co cannot be reached")
    assert (found.kind, found.command) == ("advice", "finefit train SmolLM2-135M-Instruct stdlib-docstrings")


def test_rates_and_speed():
    assert only(is_calibrated=False).command == "finefit doctor --probe"
    assert only(calibration_error="'float32'").command[:3] == "rm "
    cpu = {"driver": None, "torch": Torch("2.13.0+cpu")}
    assert "no bf16 instructions" in only(**cpu, flags=("avx2",)).message
    assert only(**cpu, load=9.5).message == "the CPU is busy: 9.5 processes want its 8 cores"


def test_problems_come_first():
    kinds = [f.kind for f in findings(replace(HEALTHY, is_calibrated=False, hub_why_not="no", torch=Torch("2.13.0")))]
    assert kinds == ["problem", "advice", "advice"]


def test_what_is_shown():
    console = Console(width=100, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(doctor.render(examine(replace(HEALTHY, is_calibrated=False)), ascii_only=True))
    text = captured.get()
    for part in ("560.35, CUDA 12.6", "24.00 GiB, 0 B used", "2.13.0, built for CUDA 12.8, sees 1 device(s)",
                 "not installed", "ready to train", "    finefit doctor --probe", "12.00 GiB, /home/me"):  # fmt: skip
        assert part in text
    assert text.isascii()


def test_the_facts_of_this_machine(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seen = machine.facts()
    assert HardwareSpec.of_cpu().memory_bytes == seen.memory_bytes >= seen.available_bytes > 0
    assert seen.torch is not None and seen.torch.error == ""
    assert {"torch", "transformers", "pydantic"} <= {one.name for one in seen.requirements}
    assert [one for one in seen.requirements if one.extra == "train" and not doctor._is_enough(one)] == []
    assert seen.hub_why_not == "HF_HUB_OFFLINE is set"
    assert len(examine(seen).rows) > 15


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13: cannot open"),
        ("import os; os.abort()", "the process ended with -6"),
    ],
)
def test_asking_a_broken_torch(code, error):
    answer = machine.torch_facts((sys.executable, "-c", code))
    assert answer is not None and error == answer.error


def test_requirements_of_package_metadata():
    lines = ["pydantic>=2.8", "torch>=2.11; extra == 'train'", 'types-PyYAML; extra == "check"']
    assert [
        Requirement("pydantic", "2.8", "", "1"),
        Requirement("torch", "2.11", "train", "1"),
        Requirement("types-PyYAML", "", "check", "1"),
    ] == machine.requirements(lines, lambda _: "1")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_measured_rates_are_what_hardware_reads(home, monkeypatch):
    for name, value in (("SIDE", 64), ("RUNS", 1), ("COPY_BYTES", 2**16)):
        monkeypatch.setattr(probe, name, value)
    rates = probe.measure()
    path = probe.record(rates)
    assert home / ".cache" / "finefit" / "machine.json" == path
    spec = HardwareSpec.of_cpu()
    assert rates["cpu"]["matmul_flops_per_s"] == dict(spec.matmul_flops_per_s)
    assert rates["cpu"]["bandwidth_bytes_per_s"] == spec.bandwidth_bytes_per_s
    assert {"float32", "bfloat16"} == set(rates["cpu"]["matmul_flops_per_s"])


def test_recording_keeps_other_devices(home):
    path = home / ".cache" / "finefit" / "machine.json"
    path.parent.mkdir(parents=True)
    flat = {"bandwidth_bytes_per_s": 1.0}
    path.write_text(json.dumps({**flat, "H100": {"link_bytes_per_s": 2.0}}))
    probe.record({"A100": {"bandwidth_bytes_per_s": 3.0}})
    kept = {"cpu": flat, "H100": {"link_bytes_per_s": 2.0}, "A100": {"bandwidth_bytes_per_s": 3.0}}
    assert kept == json.loads(path.read_text())
    path.write_text("{")
    probe.record({"cpu": flat})
    assert {"cpu": flat} == json.loads(path.read_text())


def test_measuring_that_fails_says_why(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ImportError: no torch' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(EngineError, match="the rates could not be measured: ImportError: no torch"):
        probe.measured()


def test_importing_the_doctor_imports_no_torch():
    code = "import sys, finefit.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path.home()).returncode == 0


WHOLE = Toolchain("0.19.8", compiler="/usr/bin/c++", ninja="/usr/bin/ninja", has_libaio=True, cuda="/usr/local/cuda")


def test_deepspeed_that_is_whole_or_not_there_is_no_finding():
    assert findings(replace(HEALTHY, deepspeed=WHOLE)) == ()
    (row,) = (row for row in examine(HEALTHY).rows if row.name == "deepspeed")
    assert row.value == f"not installed; hardware.deepspeed alone needs it: {sys.executable} -m pip install deepspeed"


@pytest.mark.parametrize(
    ("change", "message", "command"),
    [
        ({"lacking": ("hjson", "einops")}, "does not start without hjson, einops", "pip install hjson einops"),
        ({"compiler": ""}, "no C++ compiler", "apt-get install g++"),
        ({"cuda": ""}, "no CUDA toolkit", "cuda-toolkit"),
        ({"ninja": ""}, "no ninja", "pip install ninja"),
        ({"has_libaio": False}, "no libaio", "apt-get install libaio-dev"),
        ({"locks": ("/home/me/a b/lock",)}, "waits for ever", "rm '/home/me/a b/lock'"),
    ],
)
def test_what_deepspeed_lacks(change, message, command):
    found = only(deepspeed=replace(WHOLE, **change))
    assert found.kind == "advice"
    assert message in found.message and command in found.command


def test_cuda_headers_are_no_matter_where_there_is_no_gpu():
    assert "no CUDA toolkit" not in str(findings(replace(HEALTHY, driver=None, deepspeed=replace(WHOLE, cuda=""))))


def test_a_cuda_toolkit_is_one_with_headers_and_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for part in ("bin/nvcc", "include/cuda_runtime.h"):
        assert toolchain().cuda != str(tmp_path)
        (tmp_path / part).parent.mkdir()
        (tmp_path / part).touch()
    assert toolchain().cuda == str(tmp_path)


def test_a_lock_is_stale_when_it_is_old_and_nobody_works_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name, age in (("old", 3600), ("young", 0), ("used", 3600)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        os.utime(tmp_path / name / "lock", (time.time() - age,) * 2)
    builder = subprocess.Popen([sys.executable, "-c", "input()"], cwd=tmp_path / "used", stdin=subprocess.PIPE)
    try:
        assert stale_locks() == [tmp_path / "old" / "lock"]
    finally:
        builder.communicate(b"\n")


def test_deepspeed_is_found_without_being_imported():
    code = "import sys; from finefit.toolchain import toolchain; toolchain(); print('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
