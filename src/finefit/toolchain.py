"""What DeepSpeed needs beside itself, found without importing it: packages, compilers, CUDA's headers, ninja, libaio, locks.

It compiles parts of itself when they are first used (``op_builder/builder.py``, by torch's ``cpp_extension.load``): on a
CPU its communication, for states on NVMe its file access. A build that was killed leaves a file ``lock`` in its folder
(``torch/utils/file_baton.py``), on which every later one waits without a word and without end.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

OLD_S = 60
"""A lock that is younger may be of a build that has not begun to compile."""
_HEADERS = ("/usr/include", "/usr/local/include")
_NAME = re.compile(r"^[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """``version`` is empty where DeepSpeed is not installed; paths are empty where nothing is there."""

    version: str = ""
    lacking: tuple[str, ...] = ()
    """Packages it imports."""
    compiler: str = ""
    ninja: str = ""
    has_libaio: bool = False
    cuda: str = ""
    """The folder of a CUDA toolkit with its headers and its compiler."""
    mpi: str = ""
    """MPI's compiler. Ranks that are told where to meet, as finefit's and torch's launcher's are, do without."""
    locks: tuple[str, ...] = ()
    """Left by builds that were killed."""


def toolchain() -> Toolchain:
    version = _version("deepspeed")
    needed = metadata.requires("deepspeed") or [] if version else []
    names = [found[0] for line in needed if "extra ==" not in line and (found := _NAME.match(line))]
    return Toolchain(
        version, tuple(name for name in names if not _version(name)),
        compiler=shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or "",
        ninja=shutil.which("ninja") or "", has_libaio=any(Path(folder, "libaio.h").is_file() for folder in _folders()),
        cuda=_cuda(), mpi=shutil.which("mpicc") or "", locks=tuple(map(str, stale_locks())),
    )  # fmt: skip


def _cuda() -> str:
    """Where torch's ``cpp_extension`` looks for one."""
    nvcc = shutil.which("nvcc")
    said = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), nvcc and str(Path(nvcc).resolve().parents[1]))
    homes = [Path(home) for home in (*said, "/usr/local/cuda") if home]
    parts = ("include/cuda_runtime.h", "bin/nvcc")
    return next((str(home) for home in homes if all((home / part).is_file() for part in parts)), "")


def stale_locks() -> list[Path]:
    """Locks of builds of which no process is left; torch's own place for them, or what its variable says."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    top, pattern = (Path(root), "*/lock") if root else (Path.home() / ".cache" / "torch_extensions", "*/*/lock")
    old = [path for path in sorted(top.glob(pattern)) if _age_s(path) > OLD_S]
    if not old:
        return []
    used = set(_working_folders())
    return [path for path in old if path.parent.resolve() not in used]


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:  # just gone
        return 0.0


def _working_folders() -> Iterator[Path]:
    """Of all processes that may be looked at: a compiler works in the folder of its build."""
    for process in psutil.process_iter(["cwd"]):
        if cwd := process.info["cwd"]:
            yield Path(cwd)


def _folders() -> Iterator[str]:
    yield from _HEADERS
    yield from (folder for name in ("CPATH", "CPLUS_INCLUDE_PATH") for folder in os.environ.get(name, "").split(":"))
    yield from re.findall(r"-I\s*(\S+)", os.environ.get("CFLAGS", ""))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
