"""Measures this machine's rates, for the planner's seconds: `python -m finefit.probe` prints them as JSON.

Matmul of 2048 x 2048 by dtype and memory bandwidth by a large copy, of the CPU and of every kind of CUDA device; of the
disk under the user's cache, writing and then reading what the system was told to forget; the median of five. `record` keeps them where `hardware` reads them. Always a process of its own, so that a broken torch is
a message and not a crash. Declined: networks, links between devices.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import EngineError
from .files import writable_cache, write_atomically
from .hardware import calibration_path

SIDE = 2048
RUNS = 5
COPY_BYTES = 256 * 2**20
_LIMIT_S = 600
_FLAT = ("matmul_flops_per_s", "bandwidth_bytes_per_s", "link_bytes_per_s")
Rates = dict[str, dict[str, Any]]


def measured() -> Rates:
    """Rates by device ("cpu", or the name its driver gives), measured in another process. EngineError if it fails."""
    command = [sys.executable, "-P", "-m", "finefit.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"measuring took over {_LIMIT_S} s", hint="is the machine busy with something?") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EngineError(f"the rates could not be measured: {last}", hint="finefit doctor says what torch lacks")
    rates: Rates = json.loads(done.stdout.splitlines()[-1])
    return rates


def record(rates: Rates) -> Path:
    """Keep ``rates`` in the calibration file beside those of devices that were not measured now."""
    path = calibration_path()
    write_atomically(path, (json.dumps({**_kept(path), **rates}, indent=1) + "\n").encode())
    return path


def _kept(path: Path) -> Mapping[str, Any]:
    """The sections that are there; the flat form is the CPU's; a file that cannot be read is replaced."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    flat = {key: data.pop(key) for key in _FLAT if key in data}
    return {"cpu": flat, **data} if flat else data


def measure() -> Rates:
    """The same in this process: imports torch and takes some seconds."""
    import torch

    found = {"cpu": {**_rates(torch, torch.device("cpu"), ("float32", "bfloat16")), "disk_bytes_per_s": _disk_rate()}}
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        if name not in found:
            found[name] = _rates(torch, torch.device("cuda", index), ("float32", "bfloat16", "float16"))
    return found


def _rates(torch: Any, device: Any, dtypes: tuple[str, ...]) -> dict[str, Any]:
    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    flops, size = {}, COPY_BYTES // 4
    for name in dtypes:
        a, b = (torch.randn(SIDE, SIDE, device=device).to(getattr(torch, name)) for _ in range(2))
        out = torch.empty_like(a)
        flops[name] = 2 * SIDE**3 / _median_s(lambda: torch.mm(a, b, out=out), finish)  # noqa: B023 (called at once)
    source, target = (torch.ones(size, device=device) for _ in range(2))
    rates = {
        "matmul_flops_per_s": flops,
        "bandwidth_bytes_per_s": 2 * COPY_BYTES / _median_s(lambda: target.copy_(source), finish),  # read and written
    }
    if device.type == "cuda":
        host = torch.ones(size, pin_memory=True)
        rates["link_bytes_per_s"] = COPY_BYTES / _median_s(lambda: target.copy_(host, non_blocking=True), finish)
    return rates


def _disk_rate() -> float:
    """Bytes/s written to the disk and read again: what is offloaded there goes both ways."""
    block = memoryview(bytearray(COPY_BYTES // 16))
    with tempfile.TemporaryFile(dir=writable_cache("scratch"), buffering=0) as file:

        def both_ways() -> None:
            file.seek(0)
            for _ in range(16):
                file.write(block)
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            for _ in range(16):
                file.readinto(block)

        return 2 * COPY_BYTES / _median_s(both_ways, lambda: None)


def _median_s(work: Callable[[], object], finish: Callable[[], None]) -> float:
    seconds = []
    for _ in range(RUNS + 1):  # the first one sets things up
        started = time.perf_counter()
        work()
        finish()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    print(json.dumps(measure()))
