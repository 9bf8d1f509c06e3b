"""Writing so that a reader never sees half a file: temporary name, fsync, rename."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import CheckpointError, ConfigError

try:
    import fcntl
except ImportError:  # Windows: two writers are not noticed there
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; CheckpointError (disk full, no permission) leaves the old file as it was."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; flushed to the disk and renamed to ``path`` when the block ends well."""
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


def hold(folder: Path) -> IO[bytes]:
    """Take ``folder`` for this process, until the file returned is closed; ConfigError when another one has it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("ab")
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
        return "the folder cannot be written to: choose another output_dir"
    return "check that the disk is there and writable"
