"""`finefit doctor`: what this machine is, what is wrong with it, and for each thing the exact command that mends it.

Judges the facts of `machine`; it changes nothing itself. With ``probe`` the machine's rates are measured first.
"""

import shlex
import sys
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import probe as probing
from .hardware import calibration_path
from .machine import Driver, Facts, Gpu, Requirement, Torch, facts
from .toolchain import Toolchain
from .units import format_bytes

GIB = 2**30
_LITTLE_DISK_BYTES = 10 * GIB
_LITTLE_MEMORY_BYTES = 2 * GIB
_TAKEN_SHARE = 0.1  # of a GPU's memory, by others, from which it is worth a word
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_OLDER_INDEX = {12: "https://download.pytorch.org/whl/cu126"}  # by the driver's major version of CUDA
_MARKS = {"problem": ("red", "✗", "x"), "advice": ("yellow", "•", "*")}


@dataclass(frozen=True, slots=True)
class Row:
    """A fact, as it is shown."""

    topic: str
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong (a problem keeps finefit from training, advice does not) and what to type."""

    kind: Literal["problem", "advice"]
    message: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        return all(finding.kind != "problem" for finding in self.findings)


def show(*, probe: bool, console: Console | None = None) -> Examination:
    """Print the examination; with ``probe`` measure and remember the rates before it."""
    out = console or Console()
    if probe:
        out.print(Text("measuring matmul rates and memory bandwidth …", style="dim"))
        path = probing.record(rates := probing.measured())
        out.print(rates_table(rates), Text(f"kept in {path}", style="dim"), Text())
    examined = examine(facts())
    out.print(render(examined, ascii_only=out.options.ascii_only))
    return examined


def examine(seen: Facts) -> Examination:
    """Rows and findings of a machine's facts."""
    return Examination(rows(seen), findings(seen))


def rows(seen: Facts) -> tuple[Row, ...]:
    found = [
        Row("system", "Python", seen.python),
        Row("system", "system", seen.system),
        Row("CPU", "CPU", f"{seen.cpu}, {seen.cores} cores for this process, load {seen.load:.1f}"),
        Row("CPU", "instructions", ", ".join(seen.flags) or "none that are told"),
        Row("memory", "RAM", f"{format_bytes(seen.memory_bytes)}, {format_bytes(seen.available_bytes)} available"),
        *(Row("disk", place.label, f"{format_bytes(place.free_bytes)} free, {place.path}") for place in seen.places),
        *_gpu_rows(seen.driver),
        Row("packages", "torch", _torch_text(seen.torch)),
        *(Row("packages", name, version or "not installed") for name, version in seen.versions),
        Row("packages", "deepspeed", _deepspeed_text(seen.deepspeed)),
        Row("hub", "hub", seen.hub_why_not or "reachable"),
        *(Row("cache", f"{one.label} cache", f"{format_bytes(one.used_bytes)}, {one.path}") for one in seen.caches),
        Row("rates", "rates", "measured" if seen.is_calibrated else "guessed"),
    ]
    return tuple(found)


def findings(seen: Facts) -> tuple[Finding, ...]:
    """What is wrong, the gravest first."""
    found = [
        *_package_findings(seen.requirements, seen.driver),
        *_torch_findings(seen.torch, seen.driver),
        *_gpu_findings(seen.driver),
        *_deepspeed_findings(seen.deepspeed, bool(seen.driver and seen.driver.gpus)),
        *_room_findings(seen),
        *_speed_findings(seen),
    ]
    if seen.hub_why_not:
        works = "models in folders and caches work, and this, which PyPI has; a mirror: HF_ENDPOINT"
        command = "finefit train SmolLM2-135M-Instruct stdlib-docstrings"
        found.append(Finding("advice", f"no hub: {seen.hub_why_not}; {works}", command))
    return tuple(sorted(found, key=lambda finding: finding.kind != "problem"))


def _pip(*words: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def _package_findings(needed: tuple[Requirement, ...], driver: Driver | None) -> list[Finding]:
    """Packages of the base and of training that are missing or too old, in one command; torch has its own."""
    bad = [one for one in needed if one.extra in ("", "train") and not _is_enough(one)]
    found = []
    if torch := [one for one in bad if one.name == "torch"]:
        index = () if driver else ("--index-url", _CPU_INDEX)
        found.append(Finding("problem", _needs(torch), _pip(*map(_spelled, torch), *index)))
    if others := [one for one in bad if one.name != "torch"]:
        found.append(Finding("problem", _needs(others), _pip(*map(_spelled, others))))
    return found


def _needs(bad: list[Requirement]) -> str:
    return "training needs " + ", ".join(_spelled(one) + (f" (here: {one.found})" if one.found else "") for one in bad)


def _is_enough(one: Requirement) -> bool:
    return bool(one.found) and _numbers(one.found) >= _numbers(one.at_least)


def _numbers(version: str) -> tuple[int, ...]:
    """Leading whole numbers of a version: ``2.13.0+cpu`` -> (2, 13, 0)."""
    parts = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _spelled(one: Requirement) -> str:
    return f"{one.name}>={one.at_least}" if one.at_least else one.name


def _torch_findings(torch: Torch | None, driver: Driver | None) -> list[Finding]:
    if torch is None:
        return []
    again = ("--force-reinstall", "torch>=2.11")
    if torch.error:
        return [Finding("problem", f"torch {torch.version} does not start: {torch.error}", _pip(*again))]
    if not driver or not driver.gpus or torch.devices:
        return []
    if not torch.cuda and not torch.hip:
        message = f"torch {torch.version} is built for the CPU alone, and there is a {driver.gpus[0].name}"
        return [Finding("problem", message, _pip(*again))]
    build, served = _numbers(torch.cuda), driver.cuda
    if build and served[0] and build[0] > served[0]:  # minor versions of one major serve each other
        serves = f"driver {driver.version} serves CUDA {served[0]}.{served[1]} and older"
        message = f"torch {torch.version} is built for CUDA {torch.cuda}, but {serves}"
        if served[0] not in _OLDER_INDEX:
            return [Finding("problem", f"{message}: update the driver", "nvidia-smi")]
        older = _pip(*again, "--index-url", _OLDER_INDEX[served[0]])
        return [Finding("problem", f"{message}: update the driver, or take an older build", older)]
    hidden = "; is CUDA_VISIBLE_DEVICES set?" if not torch.why_not else ""
    why = torch.why_not or "it sees no device"
    return [Finding("problem", f"torch does not reach the {driver.gpus[0].name}: {why}{hidden}", "nvidia-smi")]


def _gpu_findings(driver: Driver | None) -> list[Finding]:
    if driver is None:
        return []
    if driver.error:
        message = f"there is an NVIDIA driver, but it does not answer ({driver.error})"
        return [Finding("problem", f"{message}; in a container, start it with --gpus all", "nvidia-smi")]
    taken = [gpu for gpu in driver.gpus if gpu.used_bytes > _TAKEN_SHARE * gpu.memory_bytes]
    query = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
    return [Finding("advice", f"others use {_used_text(gpu)} of the {gpu.name}", query) for gpu in taken]


def _deepspeed_text(deepspeed: Toolchain) -> str:
    if not deepspeed.version:
        return f"not installed; hardware.deepspeed alone needs it: {_pip('deepspeed')}"
    found = (
        deepspeed.version, deepspeed.compiler or "no C++ compiler", deepspeed.ninja or "no ninja",
        deepspeed.cuda or "no CUDA headers", deepspeed.mpi or "no MPI (its own launcher's alone)",
        "libaio" if deepspeed.has_libaio else "no libaio",
    )  # fmt: skip
    return ", ".join(found)


def _deepspeed_findings(deepspeed: Toolchain, has_gpu: bool) -> list[Finding]:
    """A lock stops every run that compiles the same; what is missing stops runs by DeepSpeed alone."""
    found = [
        Finding(
            "advice",
            f"a build that was killed left {lock}: who compiles the same waits for ever",
            shlex.join(["rm", lock]),
        )
        for lock in deepspeed.locks
    ]
    if not deepspeed.version:
        return found
    compiles = "deepspeed compiles parts of itself when they are first used"
    if deepspeed.lacking:
        message = f"deepspeed does not start without {', '.join(deepspeed.lacking)}"
        found.append(Finding("advice", message, _pip(*deepspeed.lacking)))
    if not deepspeed.compiler:
        found.append(Finding("advice", f"no C++ compiler: {compiles}", "apt-get install g++"))
    if has_gpu and not deepspeed.cuda:
        command = "conda install -c nvidia cuda-toolkit"
        found.append(Finding("advice", f"no CUDA toolkit with headers and nvcc: {compiles}", command))
    if not deepspeed.ninja:
        found.append(Finding("advice", f"no ninja on the path: {compiles}", _pip("ninja")))
    if not deepspeed.has_libaio:
        found.append(
            Finding("advice", "no libaio: deepspeed puts nothing on NVMe without", "apt-get install libaio-dev")
        )
    return found


def _room_findings(seen: Facts) -> list[Finding]:
    found = []
    for place in (*seen.places, *seen.caches[:1]):
        if place.free_bytes < _LITTLE_DISK_BYTES:
            message = f"only {format_bytes(place.free_bytes)} are free on the disk of {place.path}"
            found.append(Finding("advice", message, "hf cache prune"))
    if seen.available_bytes < _LITTLE_MEMORY_BYTES:
        message = f"only {format_bytes(seen.available_bytes)} of RAM are available"
        found.append(Finding("advice", message, "ps aux --sort=-rss | head"))
    return list({finding.message: finding for finding in found}.values())


def _speed_findings(seen: Facts) -> list[Finding]:
    found = []
    if seen.calibration_error:
        path = shlex.quote(str(calibration_path()))
        found.append(Finding("problem", f"the calibration file is unusable: {seen.calibration_error}", f"rm {path}"))
    elif not seen.is_calibrated:
        message = "the seconds in plans rest on guessed rates; measuring them takes about 10 s"
        found.append(Finding("advice", message, "finefit doctor --probe"))
    on_gpu = seen.driver is not None and bool(seen.driver.gpus)
    if not on_gpu and not {"amx_bf16", "avx512_bf16", "bf16"} & set(seen.flags):
        message = "this CPU has no bf16 instructions: fp32 will be faster, at twice the memory"
        found.append(Finding("advice", message, "finefit train … memory.precision=fp32"))
    if not on_gpu and seen.load > seen.cores:
        message = f"the CPU is busy: {seen.load:.1f} processes want its {seen.cores} cores"
        found.append(Finding("advice", message, "ps aux --sort=-%cpu | head"))
    return found


def _gpu_rows(driver: Driver | None) -> list[Row]:
    if driver is None:
        return [Row("GPU", "NVIDIA driver", "none")]
    if driver.error:
        return [Row("GPU", "NVIDIA driver", f"does not answer: {driver.error}")]
    head = Row("GPU", "NVIDIA driver", f"{driver.version}, CUDA {driver.cuda[0]}.{driver.cuda[1]}")
    gpus = (f"{one.name}, {format_bytes(one.memory_bytes)}, {_used_text(one)} used" for one in driver.gpus)
    return [head, *(Row("GPU", f"GPU {i}", text) for i, text in enumerate(gpus))]


def _used_text(gpu: Gpu) -> str:
    return format_bytes(gpu.used_bytes)


def _torch_text(torch: Torch | None) -> str:
    if torch is None:
        return "not installed"
    if torch.error:
        return f"{torch.version}, does not start"
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU alone"
    sees = f", sees {len(torch.devices)} device(s)" if torch.cuda or torch.hip else ""
    return f"{torch.version}, built for {build}{sees}"


def render(examined: Examination, *, ascii_only: bool = False) -> RenderableType:
    """The examination for a terminal: a row a fact, then the findings with their commands."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in examined.rows:
        table.add_row(Text(row.name, style="dim"), Text(row.value))
    parts: list[RenderableType] = [table, Text()]
    for finding in examined.findings:
        colour, mark, plain_mark = _MARKS[finding.kind]
        parts.append(Text.assemble((f"{plain_mark if ascii_only else mark} ", colour), finding.message))
        if finding.command:
            parts.append(Text(f"    {finding.command}", style="bold"))
    if examined.is_healthy:
        parts.append(Text("ready to train", style="green"))
    return Group(*parts)


def rates_table(rates: probing.Rates) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("device", "matmul", "memory"):
        table.add_column(title)
    for device, one in rates.items():
        flops = ", ".join(f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in one["matmul_flops_per_s"].items())
        table.add_row(device, flops, f"{one['bandwidth_bytes_per_s'] / 1e9:.3g} GB/s")
    return table
