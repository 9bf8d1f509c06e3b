"""Makes `.venv` in the repository with finefit and the named extras in it. Nothing but the standard library is needed.

    python3 scripts/bootstrap.py [train] [test] [check]

torch is the one package that comes in several builds, so it is chosen first: the one this Python has already; with an
NVIDIA driver the CUDA build; else a CPU build from PyTorch's index or a folder of pip's find-links; else what pip
finds. A second run with nothing changed does nothing. Exit codes: pip's own, 2 where the user has to do something.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
EXTRAS = ("train", "test", "check")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "finefit-stamp.json")
TORCH = "torch>=" + ".".join(map(str, OLDEST_TORCH))


def main(arguments: list[str]) -> int:
    unknown = [word for word in arguments if word not in EXTRAS]
    if unknown:
        return _give_up(f"unknown extra '{unknown[0]}': there are {', '.join(EXTRAS)}")
    if sys.version_info < OLDEST_PYTHON:
        return _with_newer_python(arguments)
    wanted = fingerprint(os.path.join(ROOT, "pyproject.toml"))
    have = read_stamp(STAMP)
    if is_done(have, wanted, arguments) and os.path.exists(_python()):
        return 0
    started = time.time()
    extras = sorted({*arguments, *(have.get("extras", []) if have else [])})
    code = _make_venv() or _install(extras)
    if code:
        return code
    with open(STAMP, "w", encoding="utf-8") as file:
        json.dump({"pyproject": wanted, "extras": extras, "python": list(sys.version_info[:2])}, file)
    _say(f"ready in {time.time() - started:.0f} s: {os.path.relpath(VENV)}")
    return 0


def fingerprint(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def read_stamp(path: str) -> dict | None:
    """What a bootstrap that ended well left, or None."""
    try:
        with open(path, encoding="utf-8") as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def is_done(stamp: dict | None, pyproject: str, extras: list[str]) -> bool:
    return bool(stamp) and stamp.get("pyproject") == pyproject and set(extras) <= set(stamp.get("extras", []))


def choose_torch(facts: dict) -> tuple[list[str], str]:
    """pip's words for torch and a sentence about the choice. ``facts`` are functions, asked until one decides."""
    if facts["system"]() != "Linux":
        return [TORCH], "torch: pip's own"
    if facts["driver"]():
        return [TORCH], "torch: the CUDA build, for the NVIDIA driver of this machine"
    if facts["index"]():
        return [TORCH, "--index-url", CPU_INDEX], f"torch: the CPU build of {CPU_INDEX}"
    version, folder = facts["wheel"]()
    if version:
        return ["torch==" + version], f"torch: {version} from {folder}"
    return [TORCH], "torch: pip's own, a CUDA build of several GB, because no CPU build could be found"


def cpu_wheel(folders: list[str], tag: str, machine: str) -> tuple[str, str]:
    """(version, folder) of the newest CPU wheel of torch for this Python in ``folders``, or two empty strings."""
    found = []
    for folder in folders:
        for path in glob.glob(os.path.join(glob.escape(folder), "torch-*.whl")):
            parts = urllib.parse.unquote(os.path.basename(path))[: -len(".whl")].split("-")
            if len(parts) == 5 and parts[2] == tag and "+cpu" in parts[1] and parts[4].endswith(machine):
                found.append((numbers(parts[1]), parts[1], folder))
    found = [one for one in found if one[0] >= OLDEST_TORCH]
    return max(found)[1:] if found else ("", "")


def find_links(config: str, environment: str) -> list[str]:
    """Folders that pip looks into for wheels: of `pip config list`'s text and of PIP_FIND_LINKS."""
    lists = [environment]
    for line in config.splitlines():
        key, _, value = line.partition("=")
        if key.strip().endswith(".find-links"):
            lists.append(value.strip().strip("'\""))
    places = [place for text in lists for place in text.replace("\\n", " ").split()]
    folders = [urllib.request.url2pathname(p[7:]) if p.startswith("file://") else p for p in places]
    return list(dict.fromkeys(folder for folder in folders if os.path.isdir(folder)))


def numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def venv_package(executable: str) -> str:
    """Debian's package that gives this system Python the means to make a venv, or "" for a Python not of Debian's."""
    if not os.path.exists("/etc/debian_version") or not os.path.realpath(executable).startswith("/usr/bin/"):
        return ""
    default = os.path.realpath("/usr/bin/python3")
    own = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    return "python3-venv" if os.path.realpath(executable) == default else own


def is_reachable(host: str, port: int, timeout_s: float = 3.0) -> bool:
    """Whether somebody answers; a name lookup knows no time limit, so it runs aside and is left behind."""
    answered: list[bool] = []

    def knock() -> None:
        try:
            socket.create_connection((host, port), timeout_s).close()
            answered.append(True)
        except OSError:
            pass  # not reachable is an answer

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return bool(answered)


def _make_venv() -> int:
    """An empty venv where there is none of this Python yet; one with the base's packages where they have a torch."""
    if any(_ends_well([_python(), "-m", *words]) for words in (["pip", "--version"], ["ensurepip"])):
        return 0
    if not _ends_well([sys.executable, "-c", "import ensurepip, venv"]):
        package = venv_package(sys.executable)
        command = ["apt-get", "install", "-y", package]
        if not package:
            return _give_up(
                f"{sys.executable} has no ensurepip: take another Python, as in make PYTHON=/usr/bin/python3"
            )
        if not hasattr(os, "geteuid") or os.geteuid() != 0:
            return _give_up(f"Python lacks ensurepip. Type: sudo {shlex.join(command)}")
        _say(f"installing {package}, which Debian's Python needs to make a venv")
        if not (_ends_well(command) or (_ends_well(["apt-get", "update"]) and _ends_well(command))):
            return _give_up(f"could not be installed. See what this says: {shlex.join(command)}")
    shutil.rmtree(VENV, ignore_errors=True)
    flags = ["--system-site-packages"] if _installed_torch() else []
    return subprocess.call([sys.executable, "-m", "venv", *flags, VENV])


def _install(extras: list[str]) -> int:
    pip = [_python(), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
    if "train" in extras and _has_torch(_python()):
        _say("torch: the one that is here already")
    elif "train" in extras:
        words, says = choose_torch(_facts())
        _say(says)
        code = subprocess.call([*pip, *words])
        if code:
            return code
    _say(f"finefit with {', '.join(extras) or 'no extras'}")
    return subprocess.call([*pip, "-e", f".[{','.join(extras)}]" if extras else "."], cwd=ROOT)


def _facts() -> dict:
    host = urllib.parse.urlsplit(CPU_INDEX).hostname or ""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return {
        "system": platform.system,
        "driver": lambda: os.path.exists("/proc/driver/nvidia/version") or bool(shutil.which("nvidia-smi")),
        "index": lambda: is_reachable(host, 443),
        "wheel": lambda: cpu_wheel(_pip_folders(), tag, platform.machine()),
    }


def _pip_folders() -> list[str]:
    listed = subprocess.run([_python(), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    return find_links(listed.stdout, os.environ.get("PIP_FIND_LINKS", ""))


def _installed_torch() -> bool:
    """Whether the Python below us has a torch that imports and is new enough. In a venv, that is the venv's base."""
    base = sys.executable if sys.prefix == sys.base_prefix else getattr(sys, "_base_executable", sys.executable)
    return _has_torch(base)


def _has_torch(python: str) -> bool:
    asked = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=False
    )
    return asked.returncode == 0 and numbers(asked.stdout.strip()) >= OLDEST_TORCH


def _python() -> str:
    return os.path.join(VENV, "Scripts", "python.exe") if os.name == "nt" else os.path.join(VENV, "bin", "python")


def _with_newer_python(arguments: list[str]) -> int:
    for minor in range(14, OLDEST_PYTHON[1] - 1, -1):
        other = shutil.which(f"python3.{minor}")
        if other:
            return subprocess.call([other, os.path.abspath(__file__), *arguments])
    return _give_up(f"finefit needs Python 3.11 or newer, this is {platform.python_version()}")


def _ends_well(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _say(text: str) -> None:
    print("bootstrap: " + text, flush=True)


def _give_up(text: str) -> int:
    print("bootstrap: " + text, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
