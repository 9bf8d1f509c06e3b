"""Durable state of a run: trained weights, optimizer, random generators; a folder that is whole or not there.

A checkpoint is written under a temporary name, every file flushed, with a manifest of SHA-256 sums, and renamed into
place. Reading takes the newest whose manifest holds; a damaged one is named and the one before it used. The order of
the data is a function of the seed and the step, so the step number is all that is kept of it.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .adapter import ADAPTER, MODEL, name_of, read_tensors, save_config, save_trained, trained_tensors, write_tensors
from .errors import CheckpointError
from .files import replacing_folder, write_atomically
from .parted import Parts, join, n_bytes, optimizer_parts, read, trained_parts, write
from .run import Run
from .stored import starts
from .units import format_bytes

MANIFEST = "manifest.json"
TRAINED, OPTIMIZER = "trained", "optimizer"
"""Folders of a checkpoint that several ranks wrote, and kinds of tensors."""


def save(run: Run, step: int, folder: Path, base: str, keep: int) -> tuple[Path, int]:
    """Write the state after ``step`` into ``folder``/step-NNNNNN; the path and its bytes. Older than ``keep`` go.

    CheckpointError where the disk does not take it: earlier ones are untouched then.
    """
    if run.world.size > 1:
        return _save_together(run, step, folder, base, keep)
    final, states = folder / f"step-{step:06d}", _optimizer_tensors(run)
    written = (*trained_tensors(run.model).values(), *states.values())
    try:
        _make_room(folder, final, keep, sum(t.nbytes for t in written))
        with replacing_folder(final) as building:
            save_trained(run.model, building, base)
            if states:  # SGD keeps none
                write_tensors(building / "optimizer.safetensors", states)
            write_tensors(building / "random.safetensors", generators(run.device))
            write_atomically(building / "state.json", json.dumps(_state(run, step)).encode())
            _seal(building, final)
    except (OSError, CheckpointError) as error:
        raise _not_written(step, final, error) from (_cause(error) or error)
    _clear(folder, final, step, keep)
    return final, _size(final)


def _save_together(run: Run, step: int, folder: Path, base: str, keep: int) -> tuple[Path, int]:
    """The same of a run on several ranks: each writes what it holds, the first one makes the folder and names it last.

    What goes wrong on one rank goes wrong on all, at the same place."""
    world, final = run.world, folder / f"step-{step:06d}"
    parts = {TRAINED: trained_parts(run), OPTIMIZER: optimizer_parts(run)}
    (needed,) = world.summed([sum(map(n_bytes, parts.values()))])
    with ExitStack() as stack:
        wrong: OSError | CheckpointError | None = None
        building = None
        try:
            if world.is_first:
                _make_room(folder, final, keep, int(needed))
                building = stack.enter_context(replacing_folder(final))
        except OSError as error:
            wrong = error
        building = world.told(building)
        try:
            if building:
                _write_parts(run, building, parts)
                if world.is_first:
                    save_config(run.model, building, base)
                    write_atomically(building / "state.json", json.dumps(_state(run, step)).encode())
        except (OSError, CheckpointError) as error:
            wrong = error
        all_there = not world.any(wrong is not None)
        try:
            if all_there and world.is_first:
                _seal(building, final)
                stack.close()  # it has its name now
        except (OSError, CheckpointError) as error:
            wrong = error
        if world.any(wrong is not None):
            why = wrong or CheckpointError("another rank could not write its part")
            raise _not_written(step, final, why) from why
    if world.is_first:
        _clear(folder, final, step, keep)
    world.wait()
    return final, _size(final)


def _write_parts(run: Run, building: Path, parts: Mapping[str, Parts]) -> None:
    """Files of each kind, this rank's own."""
    for kind, held in parts.items():
        (building / kind).mkdir(exist_ok=True)
        write(building / kind, run.world.rank, held)
    write_tensors(building / f"random-{run.world.rank}.safetensors", generators(run.device))


def _seal(building: Path, final: Path) -> None:
    """What says that all is there, and what it is."""
    files = sorted(path for path in building.rglob("*") if path.is_file())
    sums = {path.relative_to(building).as_posix(): _sha256(path) for path in files}
    write_atomically(building / MANIFEST, json.dumps(sums, indent=1).encode())
    shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step


def _size(final: Path) -> int:
    return sum(path.stat().st_size for path in final.rglob("*") if path.is_file())


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ if isinstance(error, CheckpointError) else error


def _not_written(step: int, final: Path, error: OSError | CheckpointError) -> CheckpointError:
    cause = _cause(error)
    reason = (cause.strerror if isinstance(cause, OSError) else None) or str(error)
    hint = "free some disk space, or see that the disk is there; the newest one before it is untouched"
    return CheckpointError(f"the checkpoint of step {step} was not written: {reason}", where=str(final), hint=hint)


def _clear(folder: Path, final: Path, step: int, keep: int) -> None:
    for gone in (*_outdated(folder, final, keep), *(path for path in _folders(folder) if _step_of(path) > step)):
        shutil.rmtree(gone, ignore_errors=True)  # what is of a later step was damaged, or the run would be past it


def _outdated(folder: Path, final: Path, keep: int) -> list[Path]:
    """What goes once ``final`` is there, oldest first."""
    older = [path for path in _folders(folder) if _step_of(path) < _step_of(final)]
    return older[: max(0, len(older) - keep + 1)]


def _make_room(folder: Path, final: Path, keep: int, n_bytes: int) -> None:
    """Let go, but for the newest one, what would go after the save, where it does not fit beside them; OSError where it
    never fits: half of it would have to be written to find that out."""
    folder.mkdir(parents=True, exist_ok=True)
    for gone in _outdated(folder, final, max(2, keep)):
        if shutil.disk_usage(folder).free >= n_bytes:
            break
        shutil.rmtree(gone, ignore_errors=True)
    if (free := shutil.disk_usage(folder).free) < n_bytes:
        raise OSError(errno.ENOSPC, f"it takes {format_bytes(n_bytes)}, {format_bytes(free)} are free")


def load_newest(run: Run, folder: Path, warn: Callable[[str, str], None]) -> int:
    """Put the newest whole checkpoint back into the run, however many ranks wrote it; its step, or 0 when there is none
    yet."""
    path = run.world.told(_newest_whole(folder, warn) if run.world.is_first else None)
    if path is None:
        return 0
    read(tensor_files(path, TRAINED), trained_parts(run))
    if states := optimizer_parts(run):
        read(tensor_files(path, OPTIMIZER), states)
    run.optimizer.restored()
    _draw_as_then(path, run)
    state = json.loads((path / "state.json").read_text())
    if run.scaler.is_enabled():
        run.scaler.load_state_dict(state["scaler"])
    return int(state["step"])


def tensor_files(path: Path, kind: str) -> list[Path]:
    """Of a checkpoint: one where one process wrote it, else one of each rank."""
    one = {TRAINED: (ADAPTER, MODEL), OPTIMIZER: ("optimizer.safetensors",)}[kind]
    return [path / name for name in one if (path / name).is_file()] or sorted((path / kind).glob("*.safetensors"))


def consolidate(path: Path, run: Run, folder: Path, base: str) -> None:
    """The trained weights of a checkpoint as one process would have written them, into ``folder``."""
    join(tensor_files(path, TRAINED), folder / name_of(run.model))
    save_config(run.model, folder, base)


def newest_whole(folder: Path) -> Path:
    found = _newest_whole(folder, lambda *_: None)
    assert found is not None, "the run's end is saved before its result is written"
    return found


def _newest_whole(folder: Path, warn: Callable[[str, str], None]) -> Path | None:
    """Damaged ones that are newer are told and removed."""
    damaged = []
    folders = _folders(folder)
    for path in reversed(folders):
        wrong = damage(path)
        if wrong:
            then = (
                "the one before it is used" if path != folders[0] else "there is none before it: the run begins again"
            )
            warn(f"checkpoint {path.name} is damaged ({wrong})", then)
            damaged.append(path)
            continue
        for one in damaged:  # or they would count among those that are kept
            shutil.rmtree(one, ignore_errors=True)
        return path
    return None


def _state(run: Run, step: int) -> dict[str, Any]:
    """What is no tensor: the step, and of a scaled loss its scale and how long it was kept."""
    scaler = {"scaler": run.scaler.state_dict()} if run.scaler.is_enabled() else {}
    return {"step": step, "torch": torch.__version__, **scaler}


def damage(path: Path) -> str:
    """What is wrong with a checkpoint folder, or an empty string."""
    try:
        sums: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        wrong = [name for name, digest in sums.items() if _sha256(path / name) != digest]
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{', '.join(wrong)} is not what was written" if wrong else ""


def _folders(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir() and _step_of(path) >= 0), key=_step_of)


def _step_of(path: Path) -> int:
    """The updates it has seen; -1 of a folder that is none."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def last_step(folder: Path) -> int:
    """Of the newest checkpoint, whole or not; 0 where there is none."""
    return max(map(_step_of, _folders(folder)), default=0)


def _optimizer_tensors(run: Run) -> dict[str, Tensor]:
    """State tensors by the parameter's name."""
    return {
        f"{name}.{key}": tensor
        for name, p in run.model.named_parameters()
        for key, tensor in run.optimizer.states_of(p).items()
    }


def generators(device: torch.device) -> dict[str, Tensor]:
    """States of the generators of random numbers that a run on ``device`` draws from, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def draw_from(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators back to these states."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _draw_as_then(folder: Path, run: Run) -> None:
    """A run that went on on another kind of device draws from what that has; a rank that was not there, from where it is."""
    path = folder / ("random.safetensors" if run.world.size == 1 else f"random-{run.world.rank}.safetensors")
    if not path.is_file():
        return
    known = starts(path)
    drawn = {name: state for name, state in generators(run.device).items() if name in known}
    read_tensors(path, drawn)
    draw_from(drawn, run.device)


def is_there(folder: Path) -> bool:
    """Whether any checkpoint is, whole or not."""
    return bool(_folders(folder))


def is_whole(folder: Path, step: int) -> bool:
    return not damage(folder / f"step-{step:06d}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
