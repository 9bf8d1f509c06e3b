"""HardwareSpec from names, amounts of memory and this machine; NVML is a stand-in, no driver is needed."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from finefit import hardware
from finefit.errors import ConfigError, EngineError
from finefit.spec import HardwareSpec

MIB = 2**20


def test_hardware_by_every_spelling_of_one_card():
    spellings = ("RTX 4090", "4090", "rtx4090", "NVIDIA GeForce RTX 4090", "rtx-4090")
    assert {HardwareSpec.from_name("RTX 4090")} == {HardwareSpec.from_name(text) for text in spellings}
    card = HardwareSpec.from_name("RTX 4090")
    assert (card.kind, card.memory_bytes, card.count, card.supports_bf16) == ("cuda", 24564 * MIB, 1, True)
    assert (card.flops_per_s("float32"), card.flops_per_s("bfloat16")) == (82.6e12, 165.2e12)
    assert card.context_bytes == (24564 - 24217 + 600) * MIB


@pytest.mark.parametrize("text", ["2x H100", "H100 x2", "2 x h100", "H100x2", "2×H100"])
def test_hardware_counts(text):
    assert (HardwareSpec.from_name(text).name, HardwareSpec.from_name(text).count) == ("H100 SXM", 2)


def test_hardware_by_memory():
    spec = HardwareSpec.from_name("4x24GiB")
    assert (spec.name, spec.memory_bytes, spec.count) == ("GPU with 24.00 GiB", 24 * 2**30, 4)
    assert spec.flops_per_s("float32") == HardwareSpec.from_name("RTX 3090").flops_per_s("float32")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-80GB", "A100 80GB"), ("A100 80GB", "A100 80GB"), ("RTX4090-24GB", "RTX 4090"), ("H100-96GB", "H100 NVL"),
        ("H100-80GB", "H100 SXM"), ("L40S-48GB", "L40S"), ("A6000-48GB", "RTX A6000"), ("V100-16GB", "V100 16GB"),
        ("V100 32GB", "V100 32GB"), ("T4-16GB", "T4"), ("A10G-24GB", "A10G"), ("4090 24GB", "RTX 4090"),
        ("B200-192GB", "B200"), ("A100 1g.10gb", "A100 80GB 1g.10gb"), ("A100-40GB MIG 1g.10gb", "A100 40GB 1g.10gb"),
        ("A100 1g.5gb", "A100 40GB 1g.5gb"), ("H100 MIG 3g.40gb", "H100 SXM 3g.40gb"), ("M2 Max 96GB", "M2 Max 96GB"),
        ("A800", "A800 80GB"), ("H800", "H800"), ("H20", "H20"), ("GH200", "GH200 96GB"), ("RTX 5090", "RTX 5090"),
        ("RTX PRO 6000", "RTX PRO 6000 Blackwell"), ("L4", "L4"), ("DGX H100", "DGX H100, 8 x H100 SXM"),
    ],
)  # fmt: skip
def test_names_that_people_use(text, name):
    assert name == HardwareSpec.from_name(text).name


def test_a_label_that_does_not_fit_is_no_name():
    for text in ("A100-64GB", "H100-8GB", "RTX 4090 48GB", "M4 Max 36GB", "H100-10GB"):
        with pytest.raises(ConfigError):
            HardwareSpec.from_name(text)


def test_a_slice_has_a_share_of_its_device_and_no_link_to_others():
    whole, part = HardwareSpec.from_name("H100"), HardwareSpec.from_name("H100 MIG 3g.40gb")
    assert part.memory_bytes == round(39.5 * 2**30)
    assert part.flops_per_s("bfloat16") == pytest.approx(whole.flops_per_s("bfloat16") * 60 / 132, rel=1e-3)
    assert part.bandwidth_bytes_per_s == pytest.approx(whole.bandwidth_bytes_per_s / 2, rel=1e-3)
    assert (whole.peer_bytes_per_s, part.peer_bytes_per_s, part.supports_fp8) == (450e9, 0.0, True)


def test_apples_memory_is_what_metal_gives_a_gpu():
    sizes = {text: HardwareSpec.from_name(text).memory_bytes / 2**30 for text in ("M1 16GB", "M2 Max 96GB")}
    assert sizes == {"M1 16GB": pytest.approx(16 * 2 / 3, abs=0.01), "M2 Max 96GB": 72}


def test_machines_have_devices_memory_and_a_network():
    spec = HardwareSpec.from_name("2x p4d.24xlarge")
    assert (spec.name, spec.count, spec.nodes) == ("p4d.24xlarge, 8 x A100 40GB", 16, 2)
    assert (spec.host_memory_bytes, spec.network_bytes_per_s, spec.peer_bytes_per_s) == (1152 * 2**30, 50e9, 300e9)
    assert spec == HardwareSpec.from_json(json.loads(json.dumps(spec.to_json())))
    alone = HardwareSpec.from_name("A100 40GB")
    assert (alone.nodes, alone.host_memory_bytes, alone.network_bytes_per_s) == (1, 0, 0.0)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("RTX 4900", "did you mean 'RTX 4090'?"),
        ("2x H1000", "did you mean 'H100'?"),
        ("quux", "say a name (RTX 4090) or an amount of memory (24GiB)"),
        ("0x H100", "a count begins at 1"),
        ("0x DGX H100", "a count begins at 1"),
        ("0x 24GiB", "a count begins at 1"),
        ("200000x H100", "a count ends at 100,000"),
        ("1000000xH100", "a count ends at 100,000"),
        ("1" * 5000 + "x H100", "a count ends at 100,000"),
        ("-1xH100", "a count begins at 1"),
        ("H100 x-1", "a count begins at 1"),
        ("2.5xH100", "a count is a whole number"),
        ("H100 x2,5", "a count is a whole number"),
        ("24GBB", "did you mean '24GB'?"),
        ("2x 24gibb", "did you mean '24GiB'?"),
        ("3080it", "did you mean '3080 Ti'?"),
        ("", "say a name (RTX 4090) or an amount of memory (24GiB)"),
        ("1MiB", "a device context alone takes 600 MiB"),
    ],
)
def test_unknown_hardware_gets_a_suggestion(text, hint):
    with pytest.raises(ConfigError) as caught:
        HardwareSpec.from_name(text)
    assert hint == caught.value.hint
    assert len(caught.value.message) < 120


def test_this_machine_without_a_gpu_is_its_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "_nvml_devices", lambda: [])
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"avx512f", "amx_bf16"})
    monkeypatch.setattr(hardware, "_cores", lambda: 2)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    spec = HardwareSpec.of_this_machine()
    assert (spec.kind, spec.name, spec.context_bytes, spec.supports_bf16) == ("cpu", "CPU, 2 cores", 0, True)
    assert (spec.flops_per_s("float32"), spec.flops_per_s("bfloat16")) == (294e9, 1860e9)
    assert spec.memory_bytes > 2**28 and spec.host_memory_bytes == spec.memory_bytes


def test_calibration_replaces_the_guess_and_a_broken_one_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "_nvml_devices", lambda: [])
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    file = hardware.calibration_path()
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"matmul_flops_per_s": {"float32": 3.0, "bfloat16": 7.0}, "bandwidth_bytes_per_s": 5}))
    spec = HardwareSpec.of_this_machine()
    assert (
        *(spec.flops_per_s(dtype) for dtype in ("float32", "bfloat16", "float16")), spec.bandwidth_bytes_per_s,
    ) == (3.0, 7.0, 3.0, 5.0)  # fmt: skip
    for broken in ("{", '{"matmul_flops_per_s": {"bfloat16": 1}}', "[]"):
        file.write_text(broken)
        with pytest.raises(ConfigError) as caught:
            HardwareSpec.of_this_machine()
        assert str(file) == caught.value.where


def test_this_machine_with_gpus_counts_those_like_the_first(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    card = hardware._Device("NVIDIA GeForce RTX 4090", 24564 * MIB, 347 * MIB, True)
    other = hardware._Device("Tesla T4", 15360 * MIB, 258 * MIB, False)
    monkeypatch.setattr(hardware, "_nvml_devices", lambda: [card, other, card])
    spec = HardwareSpec.of_this_machine()
    assert (spec.name, spec.count, spec.context_bytes) == ("NVIDIA GeForce RTX 4090", 2, 947 * MIB)
    assert spec.flops_per_s("float16") == 165.2e12


class FakeNvmlError(Exception):
    pass


def fake_nvml(broken: str = "") -> SimpleNamespace:
    """A driver with one card, of which one call may fail."""

    def call(name, answer):
        def run(*args, **kwargs):
            if name == broken or (name == "memory_v2" and kwargs and broken == "v2"):
                raise FakeNvmlError("not supported")
            return answer

        return run

    return SimpleNamespace(
        NVMLError=FakeNvmlError,
        nvmlMemory_v2=2,
        nvmlInit=call("init", None),
        nvmlShutdown=call("shutdown", None),
        nvmlDeviceGetCount=call("count", 1),
        nvmlDeviceGetHandleByIndex=call("handle", "h"),
        nvmlDeviceGetUUID=call("uuid", "GPU-a"),
        nvmlDeviceGetMemoryInfo=call("memory_v2", SimpleNamespace(total=1000, reserved=20)),
        nvmlDeviceGetCudaComputeCapability=call("capability", (7, 5)),
        nvmlDeviceGetName=call("name", b"Tesla T4"),
    )


@pytest.mark.parametrize(
    ("broken", "devices"),
    [
        ("", [hardware._Device("Tesla T4", 1000, 20, False)]),
        ("v2", [hardware._Device("Tesla T4", 1000, 15, False)]),
        ("init", []),
    ],
)
def test_devices_by_nvml(monkeypatch, broken, devices):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(broken))
    assert devices == hardware._nvml_devices()


def test_a_driver_that_fails_midway_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml("capability"))
    with pytest.raises(EngineError, match="does not describe its devices"):
        hardware._nvml_devices()


@pytest.mark.parametrize(
    ("value", "seen"), [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("1,9,0", [1]), ("GPU-b", [1]), ("-1", [])]
)
def test_cuda_visible_devices(monkeypatch, value, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert seen == hardware._visible(["GPU-a1", "GPU-b2", "GPU-c3"])
