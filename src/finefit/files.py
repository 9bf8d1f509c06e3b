"""Writing so that a reader never sees half a file: temporary name, fsync, rename."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointError


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
        return "the disk is full: free some space, then `finefit resume` continues from the last checkpoint"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return "the folder cannot be written to: choose another output_dir"
    return "check that the disk is there and writable"
