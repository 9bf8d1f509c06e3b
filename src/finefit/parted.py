"""State that several ranks hold in parts: written by each as files of its own, read back on any other mesh.

A file is safetensors with one more entry of metadata, where each of its tensors begins in the whole one: the layout of
torch's distributed checkpoints of Hugging Face's kind (``torch/distributed/checkpoint/_hf_utils.py``), whose own tools read
and join these. What a rank needs it takes from whichever files overlap with it; a file without that entry holds whole
tensors. So nothing is ever whole on any rank, but for one tensor where parts are cut along a later dimension.

What lies flat is written as boxes of the tensor that it is a stretch of, no more than three of a matrix; a file has one of each.

Declines to cut anew what is in blocks of its own: moments in codes are read on as many ranks as wrote them.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .adapter import DTYPES, PREFIX, trained, write_pieces
from .errors import CheckpointError
from .nn.optimizers import Stretch
from .parts import Cut, all_cuts, is_sharded, local, rows_of
from .run import Run

OFFSETS = "DCP_SHARDING_INFO"
_AT = "saved_offsets"
_TORCH = {word: dtype for dtype, word in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of a tensor, and where that begins in the whole. ``is_mine``: of the ranks that hold the same it is
    this one that writes it."""

    tensor: Tensor
    start: tuple[int, ...]
    is_mine: bool = True


Parts = Mapping[str, Sequence[Part]]
"""By the tensor's name, what this rank has of it."""


def trained_parts(run: Run) -> Parts:
    """Of what ``adapter.save_trained`` writes of a run on one device, by the same names."""
    found: dict[str, Sequence[Part]] = {}
    cuts = all_cuts(run.model)
    cuts |= {f"{PREFIX}{name}.weight": cut for name, cut in cuts.items()}  # as adapters' files have it
    for name, tensor in trained(run.model).items():
        if lies := run.optimizer.stretch(tensor):
            found[name] = _boxes(lies.flat.detach(), lies)
            continue
        start, cut = rows_of(tensor)[0] if is_sharded(tensor) else 0, cuts.get(name)
        is_mine = run.world.is_first_of(sharded=is_sharded(tensor), cut=cut is not None)
        found[name] = list(_parts(local(tensor.detach()), start, cut, is_mine))
    return found


def optimizer_parts(run: Run) -> Parts:
    """Of the optimizer's states, by the parameter's name and the state's. One that is no tensor of the parameter's shape is
    told apart by what it is of."""
    found: dict[str, Sequence[Part]] = {}
    cuts = all_cuts(run.model)
    for name, p in run.model.named_parameters():
        if lies := run.optimizer.stretch(p):
            found |= _flat_states(run, name, lies)
        else:
            found |= _own_states(run, name, p, cuts.get(name))
    return found


def _flat_states(run: Run, name: str, lies: Stretch) -> dict[str, Sequence[Part]]:
    found: dict[str, Sequence[Part]] = {}
    for key, state in run.optimizer.state[lies.flat].items():
        if state.shape == lies.flat.shape:
            found[f"{name}.{key}"] = _boxes(state, lies)
        elif state.dim():
            found[f"{key}@{lies.place}"] = list(_parts(state, 0, None, is_mine=True))
        else:
            found[f"{name}.{key}"] = list(_parts(state, 0, None, run.world.is_first))
    return found


def _boxes(flat: Tensor, lies: Stretch) -> list[Part]:
    """Views of the stretch, as boxes of the whole tensor."""
    found, at = [], lies.at
    for start, shape in boxes(lies.start, lies.start + lies.numel, lies.shape):
        n = math.prod(shape)
        found.append(Part(flat[at : at + n].view(shape), start))
        at += n
    return found


def boxes(begin: int, end: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(where it starts, its shape) of each box that elements ``begin`` to ``end`` of a tensor of that shape are, in order."""
    if len(shape) < 2:
        if begin < end:
            yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    inner = math.prod(shape[1:])
    while begin < end:
        row, inside = divmod(begin, inner)
        rows = 0 if inside else (end - begin) // inner
        if rows:
            yield (row, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
            begin += rows * inner
            continue
        until = min(end, (row + 1) * inner)
        for start, box in boxes(inside, until - row * inner, shape[1:]):
            yield (row, *start), (1, *box)
        begin = until


def _own_states(run: Run, name: str, p: Any, cut: Cut | None) -> dict[str, Sequence[Part]]:
    """Of a parameter that is stepped by itself, or in rows."""
    found: dict[str, Sequence[Part]] = {}
    if not (states := run.optimizer.states_of(p)):
        return found
    start, stop = run.optimizer.home.rows(p)
    is_mine = run.world.is_first_of(sharded=stop - start < (p.shape[0] if p.dim() else 1), cut=cut is not None)
    for key, state in states.items():
        if state.shape == (stop - start, *p.shape[1:]):
            found[f"{name}.{key}"] = list(_parts(state, start, cut, is_mine))
        elif state.dim() and (cut or (start, stop) != (0, p.shape[0])):
            of_cut = f" of {cut.dim}:{cut.ranges}" if cut else ""
            found[f"{name}.{key}@{start}-{stop}{of_cut}"] = list(_parts(state, 0, None, is_mine))
        else:
            is_first = run.world.is_first_of(sharded=False, cut=False)
            found[f"{name}.{key}"] = list(_parts(state, 0, None, is_first))
    return found


def _parts(own: Tensor, start: int, cut: Cut | None, is_mine: bool) -> Iterator[Part]:
    """Of rows from ``start`` on of a tensor, or of what ``cut`` has left of it."""
    if cut is None:
        yield Part(own, (start, *[0] * (own.dim() - 1))[: own.dim()], is_mine)
        return
    at = 0
    for begin, end in cut.ranges:
        if cut.dim:
            yield Part(own.narrow(cut.dim, at, end - begin), (start, *[0] * (cut.dim - 1), begin), is_mine)
        elif (first := max(at, start)) < (last := min(at + end - begin, start + own.shape[0])):
            yield Part(own[first - start : last - start], (begin + first - at, *[0] * (own.dim() - 1)), is_mine)
        at += end - begin


def write(folder: Path, rank: int, parts: Parts) -> None:
    """Those that are this rank's to write, if there are any, into files named as torch's of this layout are."""
    mine = {name: [part for part in some if part.is_mine and part.tensor.numel()] for name, some in parts.items()}
    count = max(map(len, mine.values()), default=0)
    for i in range(count):
        of_file = {name: some[i] for name, some in mine.items() if i < len(some)}
        _write(folder / f"shard-{rank + 1:05d}-model-{i + 1:05d}-of-{count:05d}.safetensors", of_file)


def _write(path: Path, parts: Mapping[str, Part]) -> None:
    described = {name: (part.tensor.dtype, tuple(part.tensor.shape)) for name, part in parts.items()}
    offsets = {name: {_AT: list(part.start)} for name, part in parts.items()}
    write_pieces(path, described, lambda name: (parts[name].tensor,), {OFFSETS: json.dumps(offsets)})


def n_bytes(parts: Parts) -> int:
    """Of what this rank writes."""
    return sum(part.tensor.nbytes for some in parts.values() for part in some if part.is_mine)


@dataclass(frozen=True, slots=True)
class Stored:
    """A part in a file."""

    path: Path
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def index(paths: Sequence[Path]) -> dict[str, list[Stored]]:
    """Parts by name, in the order of where they begin; CheckpointError for a file that is none of ours."""
    found: dict[str, list[Stored]] = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            told = json.loads(header.pop("__metadata__", {}).get(OFFSETS, "{}"))
            for name, entry in header.items():
                shape = tuple(entry["shape"])
                start = tuple(told.get(name, {}).get(_AT, (0,) * len(shape)))
                found.setdefault(name, []).append(Stored(path, start, shape, _TORCH[entry["dtype"]]))
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"cannot be read: {error}", where=str(path)) from error
    for name, parts in found.items():  # what both ends of a pipeline have is there twice
        found[name] = sorted({stored.start: stored for stored in parts}.values(), key=lambda stored: stored.start)
    return found


def read(paths: Sequence[Path], into: Parts) -> None:
    """Fill every part from the files; CheckpointError where one is not all there."""
    from safetensors import SafetensorError, safe_open

    stored, opened = index(paths), {}
    try:
        for name, part in ((name, part) for name, some in into.items() for part in some):
            left = part.tensor.numel()
            for one in stored.get(name, ()):
                if one.path not in opened:
                    opened[one.path] = safe_open(one.path, framework="pt")
                left -= _copy(opened[one.path], name, one, part)
            if left:
                raise CheckpointError(f"{name} is missing or of another shape", where=str(paths[0].parent),
                                      hint=_hint(name, stored))  # fmt: skip
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(paths[0].parent)) from error


def _copy(file: Any, name: str, stored: Stored, part: Part) -> int:
    """What both have, from the file into the part; how many elements."""
    if len(stored.shape) != part.tensor.dim():
        return 0
    begin = [max(a, b) for a, b in zip(stored.start, part.start, strict=True)]
    ends = zip(stored.start, stored.shape, part.start, part.tensor.shape, strict=True)
    end = [min(a + n, b + m) for a, n, b, m in ends]
    if any(a >= b for a, b in zip(begin, end, strict=True)):
        return 0
    there = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, stored.start, strict=True))
    here = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, part.start, strict=True))
    with torch.no_grad():
        part.tensor[here].copy_(file.get_slice(name)[there] if there else file.get_tensor(name))
    return math.prod(b - a for a, b in zip(begin, end, strict=True))


def _hint(name: str, stored: Mapping[str, list[Stored]]) -> str:
    """A state in blocks is there under other rows where other ranks wrote it."""
    state = name.partition("@")[0]
    others = [known for known in stored if known.partition("@")[0] == state]
    return "moments in 8 or 4 bits go on with as many devices, divided as they were" if others else ""


def join(paths: Sequence[Path], path: Path) -> None:
    """One file of whole tensors, a piece at a time."""
    from safetensors import safe_open

    stored = index(paths)
    described = {name: (parts[0].dtype, _whole(parts)) for name, parts in stored.items()}

    def pieces(name: str) -> Iterator[Tensor]:
        parts, shape = stored[name], described[name][1]
        if all(part.shape[1:] == shape[1:] for part in parts):
            for part in parts:
                with safe_open(part.path, framework="pt") as file:
                    yield file.get_tensor(name)
            return
        whole = torch.empty(shape, dtype=parts[0].dtype)
        read(paths, {name: [Part(whole, (0,) * len(shape))]})
        yield whole

    write_pieces(path, described, pieces)


def _whole(parts: Sequence[Stored]) -> tuple[int, ...]:
    return tuple(max(p.start[d] + p.shape[d] for p in parts) for d in range(len(parts[0].shape)))
