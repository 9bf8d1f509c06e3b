"""What is on this machine, as plain facts: gathered by `facts`, judged by `doctor`.

Nothing here fails because something is missing or broken: that is what it is for. torch is imported in another
process, since a broken one may take its process down. Declined: AMD's and Apple's devices beyond what torch says.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from . import hub
from .assets import models_cache
from .catalog.resolve import cache_folder
from .errors import ConfigError
from .hardware import HardwareSpec, calibration_path
from .toolchain import Toolchain, toolchain

#: Instruction sets that decide how fast a CPU multiplies.
TELLING_FLAGS = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16", "avx512f", "avx2", "bf16", "sve", "asimd")
PACKAGES = ("transformers", "peft", "safetensors", "tokenizers", "huggingface-hub", "gguf", "numpy", "pydantic")
_TORCH_LIMIT_S = 120
_ASK_TORCH = """
import json, warnings
warnings.simplefilter("ignore")
import torch
why, names = "", []
try:
    torch.cuda.init()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
except Exception as error:
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda or "", "hip": torch.version.hip or "",
                  "devices": names, "why_not": why}))
"""
_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+)\s*(?:>=\s*([0-9.]+))?[^;]*(?:;.*extra\s*==\s*['\"]([\w-]+)['\"])?")


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    used_bytes: int
    """By whoever; the driver's own share is not in it where the driver tells them apart."""


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver. ``error``: it is there but does not answer."""

    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA it serves."""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Torch:
    """Built for ``cuda`` or ``hip``. ``error``: why the import failed; ``why_not``: why CUDA does not start."""

    version: str = ""
    cuda: str = ""
    hip: str = ""
    devices: tuple[str, ...] = ()
    why_not: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder: what for, where, bytes free on its disk, bytes in it (of caches)."""

    label: str
    path: str
    free_bytes: int
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package finefit needs for ``extra``, from version ``at_least``; ``found`` is empty when it is not there."""

    name: str
    at_least: str
    extra: str
    found: str


@dataclass(frozen=True, slots=True)
class Facts:
    python: str
    system: str
    cpu: str
    cores: int
    flags: tuple[str, ...]
    load: float
    """Processes that wanted a core during the last minute."""
    memory_bytes: int
    available_bytes: int
    places: tuple[Place, ...]
    caches: tuple[Place, ...]
    driver: Driver | None
    torch: Torch | None
    versions: tuple[tuple[str, str], ...]
    requirements: tuple[Requirement, ...]
    hub_why_not: str
    is_calibrated: bool
    calibration_error: str = ""
    deepspeed: Toolchain = field(default_factory=Toolchain)


def facts() -> Facts:
    """Everything at once; takes the seconds that `import torch` takes."""
    memory_bytes, calibration_error = _memory()
    return Facts(
        python=f"{platform.python_version()} ({sys.executable})",
        system=_system(),
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        flags=_flags(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        memory_bytes=memory_bytes,
        available_bytes=min(memory_bytes, int(psutil.virtual_memory().available)),
        places=tuple(_place(label, path) for label, path in (("home", Path.home()), ("here", Path.cwd()))),
        caches=tuple(
            _cache(*named) for named in (("Hugging Face", cache_folder()), ("finefit", models_cache().parent))
        ),
        driver=nvidia_driver(),
        torch=torch_facts(),
        versions=tuple((name, _version(name)) for name in PACKAGES),
        requirements=tuple(requirements(metadata.requires("finefit") or ())),
        hub_why_not=hub.why_not(),
        is_calibrated=calibration_path().is_file(),
        calibration_error=calibration_error,
        deepspeed=toolchain(),
    )


def nvidia_driver() -> Driver | None:
    """The driver by NVML, or None where there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # the kernel's half alone: a container without --gpus, or a driver updated under a running kernel
        version = _read("/proc/driver/nvidia/version").splitlines()
        return Driver(error=str(error)) if version else None
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(pynvml, handle) for handle in handles)
        version_text = _text(pynvml.nvmlSystemGetDriverVersion())
        return Driver(version_text, (cuda // 1000, cuda % 1000 // 10), gpus)
    except pynvml.NVMLError as error:
        return Driver(error=str(error))
    finally:
        pynvml.nvmlShutdown()


def torch_facts(command: tuple[str, ...] = (sys.executable, "-P", "-c", _ASK_TORCH)) -> Torch | None:
    """What torch says of itself, asked in another process; None when it is not installed."""
    if not _version("torch"):
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Torch(_version("torch"), error=f"import torch took over {_TORCH_LIMIT_S} s")
    if done.returncode:
        said = done.stderr.strip().splitlines()
        died = f"the process ended with {done.returncode}"
        return Torch(_version("torch"), error=said[-1] if said else died)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Torch(**{**answer, "devices": tuple(answer["devices"])})


def requirements(lines: Iterable[str], version: Callable[[str], str] | None = None) -> list[Requirement]:
    """Package metadata's ``Requires-Dist`` lines, each with the version that is here."""
    version_of = version or _version
    matches = [match for match in map(_REQUIREMENT.match, lines) if match]
    return [Requirement(m[1], m[2] or "", m[3] or "", version_of(m[1])) for m in matches]


def _gpu(nvml: Any, handle: Any) -> Gpu:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:  # drivers before 510
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(_text(nvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _memory() -> tuple[int, str]:
    """(bytes a process may use, what is wrong with the calibration file if anything)."""
    try:
        return HardwareSpec.of_cpu().memory_bytes, ""
    except ConfigError as error:
        return int(psutil.virtual_memory().total), error.message


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    return f"{name or platform.system()}, {platform.release()}, {platform.machine()}"


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _flags() -> tuple[str, ...]:
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    there = set(line[1].split()) if line else set()
    return tuple(flag for flag in TELLING_FLAGS if flag in there)


def _place(label: str, path: Path) -> Place:
    existing = next(p for p in (path, *path.parents) if p.exists())
    return Place(label, str(path), psutil.disk_usage(str(existing)).free)


def _cache(label: str, path: Path) -> Place:
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    used = sum(file.lstat().st_size for file in files if file.exists())
    return Place(label, str(path), _place(label, path).free_bytes, used)


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError:
        return ""
