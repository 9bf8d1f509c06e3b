"""Writing so that a reader never sees half a file: temporary name, fsync, rename."""

import os
import tempfile
from pathlib import Path

from .errors import CheckpointError


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; CheckpointError (disk full, no permission) leaves the old file as it was."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"could not write: {error.strerror or error}", where=str(path), hint=_hint(error)) from error


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hint(error: OSError) -> str:
    import errno

    if error.errno == errno.ENOSPC:
        return "the disk is full: free some space, then `finefit resume` continues from the last checkpoint"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return "the folder cannot be written to: choose another output_dir"
    return "check that the disk is there and writable"
