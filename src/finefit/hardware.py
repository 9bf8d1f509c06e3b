"""HardwareSpec: the devices of one or more equal machines: how many, their memory, rates and links.

Names come from the catalogue (`catalog/gpus.json`, `catalog/hosts.json`) or are plain amounts of memory ("24GiB").
`of_this_machine` asks the driver through NVML and otherwise describes the CPU: memory from the operating system and its
control group, rates from the calibration file if there is one, else a guess from core count and instruction sets.
Declined here: AMD's, Intel's and Apple's management libraries, which slice of a GPU this process was given, and
measuring anything: that is calibration's work.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from .catalog import CatalogGpu, CatalogHost, find_gpu, find_host, gpu_names
from .errors import ConfigError, EngineError, did_you_mean
from .units import format_bytes, parse_bytes, unit_meant

MIB = 2**20
# CUDA context and library kernels of one process: 0.5 to 0.9 GiB with recent PyTorch; the lower middle of that band.
CONTEXT_BYTES = 600 * MIB
# What a driver keeps for itself where nobody has written down what programs see: known cards keep 0.4 to 2 %.
_DRIVER_SHARE = 0.015
MOST_DEVICES = 100_000  # no cluster has more; beyond it is a slip of the hand
UNNAMED, STAND_IN = "GPU with", "RTX 3090"  # rates of a device of which only the memory is known: a middling card
# One core's matmul rate. avx512f, amx_bf16: 2,048-cubed products with PyTorch 2.13 on 2 cores of a Sapphire Rapids
# (295 and 1,866 GFLOP/s together). The others are scaled by vector width from those, not measured.
_CORE_FLOPS_PER_S = {"avx512f": 147e9, "avx2": 60e9, "none": 20e9, "amx_bf16": 930e9, "amx_fp16": 930e9}
_CORE_BANDWIDTH_BYTES_PER_S = 12e9  # one core streaming from DDR4/DDR5, a guess
_SOCKET_BANDWIDTH_BYTES_PER_S = 80e9
# One process to another by gloo over the loopback: 64 MB summed by two in 0.11 s, gathered in 0.28 s (2 cores of a Sapphire
# Rapids, torch 2.13).
_LOOPBACK_BYTES_PER_S = 0.7e9
_LINK_SHARE = 0.8  # of the host link's peak that large pinned copies reach
_COUNT_BEFORE = re.compile(r"^\s*(-?\d+(?:[.,]\d+)?)\s*[x×*]\s*(.+)$", re.IGNORECASE)
_COUNT_AFTER = re.compile(r"^(.*\d|.+\s)[x×*]\s*(-?\d+(?:[.,]\d+)?)\s*$", re.IGNORECASE)
_AMOUNT = re.compile(r"^(?:gpu[\s_-]*)?([0-9.]+\s*(?:[kmgt]i?b?|b))$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """``count`` equal devices; memory, rates and links are of one."""

    name: str
    kind: Literal["cpu", "cuda"]
    """``cuda`` stands for any accelerator: ROCm's, oneAPI's and Metal's are planned as one."""
    memory_bytes: int
    """As the driver or the operating system reports it."""
    count: int = 1
    matmul_flops_per_s: tuple[tuple[str, float], ...] = ()
    """Dense peak by dtype: pairs of ("float32" | "bfloat16" | "float16", rate)."""
    bandwidth_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    """Host to one device, one direction, theoretical peak."""
    context_bytes: int = 0
    """Part of the memory that tensors never get: the driver's share and the process's device context."""
    supports_bf16: bool = True
    supports_fp8: bool = False
    peer_bytes_per_s: float = 0.0
    """One device to another of its machine, one direction, over a link of their own; 0 where that is the host link."""
    network_bytes_per_s: float = 0.0
    """What leaves one machine towards others, one direction; 0 where it is not known."""
    nodes: int = 1
    """Machines that the ``count`` devices are spread over evenly."""
    host_memory_bytes: int = 0
    """Of one machine; 0 where it is not known."""
    disk_bytes_per_s: float = 1.5e9
    """Written to or read from the disk of the user's cache; a middling NVMe drive where it was not measured."""

    def offload_bytes_per_s(self, place: str) -> float:
        """One direction between the device and where something is offloaded to: its host, or the host's disk."""
        link = self.link_bytes_per_s * _LINK_SHARE if self.kind == "cuda" else self.bandwidth_bytes_per_s
        return min(link, self.disk_bytes_per_s) if place == "disk" else link

    def flops_per_s(self, dtype: str) -> float:
        """Dense matmul rate in ``dtype``; float32's where the dtype has no rate of its own."""
        rates = dict(self.matmul_flops_per_s)
        return rates.get(dtype) or rates["float32"]

    @property
    def lacks_bf16(self) -> bool:
        """A GPU from before there was bf16; a CPU computes in it one way or the other."""
        return self.kind == "cuda" and not self.supports_bf16

    @property
    def says(self) -> str:
        """The name, with how many there are: of devices, or of machines where the name is a machine's."""
        is_machine = f"{self.count // self.nodes} x " in self.name
        times = self.nodes if is_machine else self.count
        return self.name if times == 1 else f"{times} x {self.name}"

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; `from_json` reads it back equal."""
        return {**dataclasses.asdict(self), "matmul_flops_per_s": dict(self.matmul_flops_per_s)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "matmul_flops_per_s": _rates(data["matmul_flops_per_s"])})

    @classmethod
    def from_name(cls, text: str) -> Self:
        """A catalogued device ("RTX 4090", "2x H100", "A100 1g.10gb"), machine ("2x DGX H100") or amount ("24GiB")."""
        text_of_one, said = _without_count(text)
        count = _count_of(said, text)
        if gpu := find_gpu(text_of_one):
            return cls._of_gpu(gpu, count)
        if host := find_host(text_of_one):
            return cls._of_host(host, count)
        if amount := _AMOUNT.match(text_of_one):
            return cls._of_memory(parse_bytes(amount[1]), count)
        near = unit_meant(text_of_one) or did_you_mean(text_of_one, gpu_names())
        raise _no_device(text, near or "say a name (RTX 4090) or an amount of memory (24GiB)")

    @classmethod
    def _of_gpu(cls, gpu: CatalogGpu, count: int) -> Self:
        kept = gpu.memory_mib - gpu.visible_mib if gpu.visible_mib else round(gpu.memory_mib * _DRIVER_SHARE)
        return cls(
            name=gpu.name,
            kind="cuda",
            memory_bytes=gpu.memory_mib * MIB,
            count=count,
            context_bytes=kept * MIB + CONTEXT_BYTES,
            **_catalogued_rates(gpu),
        )

    @classmethod
    def _of_host(cls, host: CatalogHost, nodes: int) -> Self:
        gpu = find_gpu(host.gpu)
        if gpu is None:
            raise RuntimeError(f"hosts.json names '{host.gpu}', which gpus.json does not have")
        return dataclasses.replace(
            cls._of_gpu(gpu, host.count * nodes),
            name=f"{host.name}, {host.count} x {gpu.name}",
            network_bytes_per_s=host.network_gb_per_s * 1e9,
            nodes=nodes,
            host_memory_bytes=host.host_memory_gib * 2**30,
        )

    @classmethod
    def of_this_machine(cls) -> Self:
        """The NVIDIA devices of this machine (of the first one's kind), else its CPU."""
        devices = _nvml_devices()
        if not devices:
            return cls.of_cpu()
        first = devices[0]
        gpu = find_gpu(first.name) or _stand_in()
        rates = {
            **_catalogued_rates(gpu),
            "supports_bf16": first.supports_bf16,
            **_disk_rate(),
            **_calibrated(first.name),
        }
        return cls(
            name=first.name,
            kind="cuda",
            memory_bytes=first.memory_bytes,
            count=sum(device.name == first.name for device in devices),
            context_bytes=first.reserved_bytes + CONTEXT_BYTES,
            host_memory_bytes=_host_memory_bytes(),
            **rates,
        )

    @classmethod
    def _of_memory(cls, memory_bytes: int, count: int) -> Self:
        if memory_bytes <= CONTEXT_BYTES:
            hint = f"a device context alone takes {format_bytes(CONTEXT_BYTES)}"
            raise ConfigError(f"a GPU of {format_bytes(memory_bytes)} cannot be used", hint=hint)
        name = f"{UNNAMED} {format_bytes(memory_bytes)}"
        rates = _catalogued_rates(_stand_in())
        return cls(name, "cuda", memory_bytes, count, context_bytes=CONTEXT_BYTES, **rates)

    def shared_by(self, ranks: int) -> Self:
        """A CPU whose cores and memory so many processes share out: a device each."""
        share: dict[str, Any] = {
            "matmul_flops_per_s": tuple((dtype, rate / ranks) for dtype, rate in self.matmul_flops_per_s),
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s / ranks,
            "link_bytes_per_s": self.link_bytes_per_s / ranks,
            "disk_bytes_per_s": self.disk_bytes_per_s / ranks,
        }
        return dataclasses.replace(
            self,
            name=f"CPU, {_cores() / ranks:.2g} cores",
            count=ranks,
            memory_bytes=self.memory_bytes // ranks,
            peer_bytes_per_s=_LOOPBACK_BYTES_PER_S,
            **share,
        )

    @classmethod
    def of_cpu(cls) -> Self:
        flags, cores = _cpu_flags(), _cores()
        bandwidth = min(cores * _CORE_BANDWIDTH_BYTES_PER_S, _SOCKET_BANDWIDTH_BYTES_PER_S)
        guessed: dict[str, Any] = {
            "matmul_flops_per_s": tuple((dtype, cores * rate) for dtype, rate in _core_rates(flags).items()),
            "bandwidth_bytes_per_s": bandwidth,
            "link_bytes_per_s": bandwidth,
            "supports_bf16": bool(flags & {"amx_bf16", "avx512_bf16", "bf16"}),
        }
        memory = _host_memory_bytes()
        rates = {**guessed, **_calibrated("cpu")}
        return cls(f"CPU, {cores} cores", "cpu", memory_bytes=memory, host_memory_bytes=memory, **rates)


def _no_device(text: str, hint: str) -> ConfigError:
    shown = text if len(text) < 80 else f"{text[:77]}…"
    return ConfigError(f"no device is called '{shown}'", hint=hint)


def _without_count(text: str) -> tuple[str, str]:
    """``2x H100`` and ``H100 x2`` -> (``H100``, ``2``); a name that is catalogued as it stands has no count in it."""
    if find_gpu(text) or find_host(text):
        return text, "1"
    if before := _COUNT_BEFORE.match(text):
        return before[2].strip(), before[1]
    if after := _COUNT_AFTER.match(text):
        return after[1].strip(), after[2]
    return text.strip(), "1"


def _count_of(said: str, text: str) -> int:
    if said.startswith("-") or not said.strip("0"):
        raise _no_device(text, "a count begins at 1")
    if not said.isdecimal():
        raise _no_device(text, "a count is a whole number")
    digits = said.lstrip("0")
    if len(digits) > len(str(MOST_DEVICES)) or int(digits) > MOST_DEVICES:
        raise _no_device(text, f"a count ends at {MOST_DEVICES:,}")
    return int(digits)


def calibration_path() -> Path:
    """Where calibration leaves measured rates: sections by device ("cpu", or NVML's name), or flat for the CPU."""
    return Path.home() / ".cache" / "finefit" / "machine.json"


def _catalogued_rates(gpu: CatalogGpu) -> dict[str, Any]:
    rates = (("float32", gpu.fp32_tflops), ("bfloat16", gpu.bf16_tflops), ("float16", gpu.fp16_tflops))
    return {
        "matmul_flops_per_s": tuple((dtype, tflops * 1e12) for dtype, tflops in rates),
        "bandwidth_bytes_per_s": gpu.bandwidth_gb_per_s * 1e9,
        "link_bytes_per_s": gpu.link_gb_per_s * 1e9,
        "supports_bf16": gpu.supports_bf16,
        "supports_fp8": gpu.supports_fp8,
        "peer_bytes_per_s": gpu.peer_gb_per_s * 1e9,
    }


def _stand_in() -> CatalogGpu:
    gpu = find_gpu(STAND_IN)
    if gpu is None:
        raise RuntimeError(f"gpus.json has lost {STAND_IN}")
    return gpu


def _rates(rates: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple((dtype, float(rate)) for dtype, rate in rates.items())


def _disk_rate() -> dict[str, Any]:
    """The disk's, which the CPU's section has, whatever the device."""
    return {key: rate for key, rate in _calibrated("cpu").items() if key == "disk_bytes_per_s"}


def _calibrated(device: str) -> dict[str, Any]:
    """Measured rates of ``device`` by field of HardwareSpec; empty where nothing was measured."""
    path = calibration_path()
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
        # the flat form describes the CPU; a machine with a GPU needs a section for each device
        found = data.get(device, data if device == "cpu" else {})
        measured: dict[str, Any] = {
            key: float(found[key])
            for key in ("bandwidth_bytes_per_s", "link_bytes_per_s", "disk_bytes_per_s")
            if key in found
        }
        if "matmul_flops_per_s" in found:
            measured["matmul_flops_per_s"] = _rates(found["matmul_flops_per_s"])
            dict(measured["matmul_flops_per_s"])["float32"]  # every other rate falls back on it
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "delete the file; rates are guessed without it"
        raise ConfigError(f"the calibration cannot be read ({error})", where=str(path), hint=hint) from error
    return measured


@dataclass(frozen=True, slots=True)
class _Device:
    name: str
    memory_bytes: int
    reserved_bytes: int
    supports_bf16: bool


def _nvml_devices() -> list[_Device]:
    """What NVML sees and CUDA_VISIBLE_DEVICES lets through; empty without a driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or no device
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [_nvml_device(pynvml, handles[i]) for i in _visible([pynvml.nvmlDeviceGetUUID(h) for h in handles])]
    except pynvml.NVMLError as error:
        hint = "see whether nvidia-smi answers, or say the device: --gpu 24GiB"
        raise EngineError(f"the NVIDIA driver does not describe its devices ({error})", hint=hint) from error
    finally:
        pynvml.nvmlShutdown()


def _nvml_device(nvml: Any, handle: Any) -> _Device:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        reserved = int(memory.reserved)
    except nvml.NVMLError:  # drivers before 510 do not tell their own share
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        reserved = int(memory.total * _DRIVER_SHARE)
    major, _ = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = nvml.nvmlDeviceGetName(handle)
    text = name.decode() if isinstance(name, bytes) else str(name)
    return _Device(text, int(memory.total), reserved, major >= 8)  # bf16 came with compute capability 8.0


def _visible(uuids: list[str]) -> list[int]:
    """Indices CUDA_VISIBLE_DEVICES names, in its order; CUDA stops at the first name it does not know."""
    wished = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wished is None:
        return list(range(len(uuids)))
    found = []
    for word in (part.strip() for part in wished.split(",")):
        if word.isdigit() and int(word) < len(uuids):
            found.append(int(word))
        elif word and any(uuid.startswith(word) for uuid in uuids):
            found.append(next(i for i, uuid in enumerate(uuids) if uuid.startswith(word)))
        else:
            break
    return found


def _core_rates(flags: set[str]) -> dict[str, float]:
    vector = next((name for name in ("avx512f", "avx2") if name in flags), "avx2" if "asimd" in flags else "none")
    float32 = _CORE_FLOPS_PER_S[vector]
    rates = {"float32": float32, "bfloat16": float32 / 2, "float16": float32 / 2}  # converted on the way: no gain
    if flags & {"avx512_bf16", "bf16"}:
        rates["bfloat16"] = 2 * float32
    if "avx512_fp16" in flags:
        rates["float16"] = 2 * float32
    if "amx_bf16" in flags:
        rates["bfloat16"] = _CORE_FLOPS_PER_S["amx_bf16"]
    if "amx_fp16" in flags:
        rates["float16"] = _CORE_FLOPS_PER_S["amx_fp16"]
    return rates


def _cpu_flags() -> set[str]:
    """Instruction sets by Linux's names; empty elsewhere, which makes the guess a low one."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return set()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(line[1].split()) if line else set()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host_memory_bytes() -> int:
    """Physical memory, or the control group's limit where that is less (containers)."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(path).read_text("utf-8").strip()
        except OSError:
            continue
        if limit.isdigit():
            return min(total, int(limit))
    return total
