"""Writing so that a reader never sees half a file: temporary name, fsync, rename."""

import atexit
import errno
import functools
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import CheckpointError, ConfigError

try:
    import fcntl
except ImportError:  # Windows: two writers are not noticed there
    fcntl = None  # type: ignore[assignment]

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip

_STAND_INS: dict[Path, Path] = {}  # temporary folders, by that of the user's cache which cannot be written to


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; CheckpointError (disk full, no permission) leaves the old file as it was."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; flushed to the disk and renamed to ``path`` when the block ends well.

    Behind a link it is the file that is replaced; what is no file (a device, a pipe, a folder) is refused.
    """
    path = replaceable(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            _flush(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"could not write: {error.strerror or error}", where=str(path), hint=_hint(error)
        ) from error


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder`` to fill; it takes that place when the block ends well, and is gone if not.

    Nothing is written over: where ``folder`` is there by then, and not empty, it stays. OSError is the caller's to tell.
    """
    folder = folder.resolve()  # of new/.. is one folder before new is made, and another one after
    building = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _forget_dead(folder)
    building.mkdir()
    try:
        yield building
        os.replace(building, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _forget_dead(folder: Path) -> None:
    """Remove what processes that were killed had begun to build of ``folder``."""
    import psutil

    for path in folder.parent.iterdir():
        number = path.name.removeprefix(f".{folder.name}.").removesuffix(".tmp")
        if (
            path.name == f".{folder.name}.{number}.tmp"
            and number.isdigit()
            and int(number) < 2**31
            and not psutil.pid_exists(int(number))
        ):
            shutil.rmtree(path, ignore_errors=True)


def replaceable(path: Path) -> Path:
    """The file that writing to ``path`` replaces or makes. CheckpointError for what a rename would only destroy."""
    try:
        real = path.resolve() if path.is_symlink() else path
        # of what is opened: a link such as /dev/stdout has a target without a name
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return real
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a file as a folder, a name with a null
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"could not write: {reason}", where=str(path), hint="give another name") from error
    if kind == stat.S_IFREG:
        return real
    hint = "give the name of a file"
    raise CheckpointError(f"{_KINDS.get(kind, 'something that is no file')} is there", where=str(path), hint=hint)


def user_cache(part: str) -> Path:
    """The folder of XDG_CACHE_HOME (or ~/.cache) that holds ``part`` of what finefit derives, there or not."""
    return _cache_of(os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"), part)


@functools.cache
def _cache_of(named: str | None, _home: str | None, part: str) -> Path:
    """It is asked for with every prediction."""
    base = Path(named or Path.home() / ".cache").expanduser()
    return base / "finefit" / part


def cache_folders(part: str) -> tuple[Path, ...]:
    """Where ``part`` of the cache is read from, the last first: the user's folder, and what stands in for it."""
    folder = user_cache(part)
    return (folder, _STAND_INS[folder]) if folder in _STAND_INS else (folder,)


def writable_cache(part: str) -> Path:
    """The folder of ``cache_folders`` to write to. A cache is a convenience: where the user's cannot be written to,
    a temporary one stands in for it until this process ends, with one warning."""
    folder = user_cache(part)
    if folder in _STAND_INS:
        return _STAND_INS[folder]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"a full disk takes a name, and nothing in it")
    except OSError as error:
        if not _STAND_INS:
            print(
                f"warning: the cache {folder.parent} cannot be written to ({error.strerror}): what is derived is not kept; "
                "set XDG_CACHE_HOME to a folder that can be",
                file=sys.stderr,
            )
        made = tempfile.mkdtemp(prefix="finefit-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        _STAND_INS[folder] = Path(made)
        return _STAND_INS[folder]
    return folder


def hold(folder: Path) -> IO[bytes]:
    """Take ``folder`` for this process, until the file returned is closed; ConfigError when another one has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("ab")
    except OSError as error:
        raise CheckpointError(f"could not write: {error.strerror}", where=str(folder), hint=_hint(error)) from error
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        hint = "wait for it, stop it, or give another name=…"
        raise ConfigError("another process is working in this run folder", where=str(folder), hint=hint) from error
    return file


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hint(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full: free some space and repeat the command; a run goes on with `finefit resume`"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return "the folder cannot be written to: name another (output_dir of a run)"
    return "check that the disk is there and writable"
