"""The token store: every example's ids and mask in flat memory-mapped files, made once and found again.

A folder per (content, chat template, tokenizer, max_length, policy): ``ids.bin`` int32, ``mask.bin`` uint8,
``offsets.bin`` int64 (one more than rows), ``labelled.bin`` int64, ``where.txt``, ``refused.txt`` (each row that could not be
used, and why) and ``index.json``. A re-plan after
running out of memory, a resumed run and a second rank therefore do not tokenise again. Built in a temporary folder in
constant memory, flushed to disk and renamed, so a store is whole or absent; checked when opened, rebuilt if damaged.
Declined: packing several examples into one row (that is decided per step) and cutting a long example into several.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from finefit.data.masks import Encoded, Masker, Rendered, Tokenizer
from finefit.data.readers import Refuse, Source, none_usable, refuse_all
from finefit.errors import DataError
from finefit.files import user_cache

MAGIC = "finefit tokens"
VERSION = 2
TooLong = Literal["truncate", "drop", "error"]

_BATCH_EXAMPLES = 256
_BATCH_CHARACTERS = 1_000_000  # so that a few books do not become one batch


class TokenStore:
    """An opened store. ``index`` holds what ``index.json`` does: rows, tokens, longest, what was cut and dropped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: dict[str, Any] = _index(folder)
        rows, tokens = int(self.index["rows"]), int(self.index["tokens"])
        self._ids: NDArray[np.int32] = np.memmap(folder / "ids.bin", np.int32, "r", shape=(tokens,))
        self._mask: NDArray[np.uint8] = np.memmap(folder / "mask.bin", np.uint8, "r", shape=(tokens,))
        self._offsets: NDArray[np.int64] = np.fromfile(folder / "offsets.bin", np.int64)
        self.labelled: NDArray[np.int64] = np.fromfile(folder / "labelled.bin", np.int64)
        """Trained tokens of each example."""
        self.lengths: NDArray[np.int64] = np.diff(self._offsets)
        """Tokens of each example."""
        if self._offsets[0] != 0 or self._offsets[-1] != tokens or (rows and self.lengths.min() < 1):
            raise _damaged(folder, "its offsets are not those of its tokens")

    def __len__(self) -> int:
        return int(self.index["rows"])

    def __getitem__(self, row: int) -> Encoded:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a store of {len(self)}")
        start, end = int(self._offsets[row]), int(self._offsets[row + 1])
        # Copies, so that torch may wrap them without a warning about read-only memory.
        return Encoded(np.array(self._ids[start:end]), np.array(self._mask[start:end]))

    def where(self, row: int) -> str:
        """``file:line`` of an example, for error messages and for the one that makes the peak."""
        return self._places[row]

    @property
    def labelled_share(self) -> float:
        return float(self.index["labelled_tokens"]) / float(self.index["tokens"])

    def says(self) -> tuple[str, ...]:
        """What happened to the data on the way in, each a sentence to be shown: nothing is left out silently."""
        at, said = self.index, []
        long = f"of {at['read']:,} examples were longer than {at['max_length']:,} tokens and"
        if at["truncated"]:
            said.append(f"{at['truncated']:,} {long} cut there: {at['truncated_tokens']:,} tokens left out")
        if at["dropped_long"]:
            said.append(f"{at['dropped_long']:,} {long} dropped")
        if at["dropped_unlabelled"]:
            said.append(f"{at['dropped_unlabelled']:,} of {at['read']:,} examples had nothing left to learn: dropped")
        if at["refused"]:
            rows = f"{at['refused']:,} of {at['read'] + at['refused']:,} rows cannot be used and are left out"
            said.append(f"{rows}: {at['first_refused']}; all of them are in {self.folder / 'refused.txt'}")
        return tuple(said)

    @cached_property
    def _places(self) -> list[str]:
        return (self.folder / "where.txt").read_text(encoding="utf-8").split("\n")


def prepare(
    source: Source, tokenizer: Tokenizer, *, max_length: int, too_long: TooLong = "truncate", cache: Path | None = None
) -> TokenStore:
    """The store of ``source``, from the cache folder if it is there, else built.

    ``too_long`` says what happens to an example of more than ``max_length`` tokens: its head is kept ("truncate"), it
    is left out ("drop"), or building stops ("error").
    """
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2 tokens, not {max_length}")
    cache = cache or user_cache("tokens")
    folder = cache / _key(source, tokenizer, max_length, too_long)
    if folder.exists():
        try:
            return TokenStore(folder)
        except DataError:
            shutil.rmtree(folder)  # damaged: it can be made again, so it is not the user's trouble
    try:
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name[:16]}-", dir=cache))
        try:
            _build(building, source, Masker(tokenizer), max_length, too_long)
            _publish(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)  # gone already if it was published
    except OSError as error:
        raise DataError(
            f"cannot write the token cache: {error.strerror}",
            where=str(error.filename or cache),
            hint="free some disk space, or set XDG_CACHE_HOME to another disk",
        ) from error
    return TokenStore(folder)


def _key(source: Source, tokenizer: Tokenizer, max_length: int, too_long: TooLong) -> str:
    recipe = json.loads(tokenizer.backend_tokenizer.to_str())
    # Truncation and padding are what the last call left behind, not part of the vocabulary.
    recipe = {name: value for name, value in recipe.items() if name not in ("truncation", "padding")}
    parts = [
        MAGIC,
        VERSION,
        source.name,
        source.digest,
        str(tokenizer.chat_template),
        tokenizer.eos_token,
        recipe,
        max_length,
        too_long,
        source.bad_rows,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _build(folder: Path, source: Source, masker: Masker, max_length: int, too_long: TooLong) -> None:
    names = ("ids.bin", "mask.bin", "offsets.bin", "labelled.bin", "where.txt", "refused.txt")
    index: dict[str, Any] = {"magic": MAGIC, "version": VERSION, "source": source.name, "max_length": max_length}
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {name: stack.enter_context((folder / name).open("wb")) for name in names}
        refused = _Refused(files["refused.txt"])
        refuse = refuse_all if source.bad_rows == "strict" else refused
        index |= _write_rows(files, _batches(source, masker, refuse), max_length, too_long)
        for file in files.values():
            _flush(file)
    if refused.first and not index["read"]:
        raise none_usable(source.name, refused.count, refused.first)
    if not index["rows"]:
        raise DataError(
            f"none of the {index['read']:,} examples has a token to learn within {max_length:,} tokens",
            where=source.name,
            hint="raise max_length: the prompts alone fill it",
        )
    index |= {"refused": refused.count, "first_refused": _one_line(refused.first), "methods": dict(masker.methods)}
    index["bytes"] = {name: (folder / name).stat().st_size for name in names}
    with (folder / "index.json").open("wb") as file:
        file.write(json.dumps(index, indent=1).encode())
        _flush(file)


class _Refused:
    """Writes what could not be used, a line each."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.count = file, 0
        self.first: DataError | None = None

    def __call__(self, error: DataError) -> None:
        self.first = self.first or error
        self.count += 1
        self.file.write(f"{_one_line(error)}\n".encode(errors="replace"))


def _one_line(error: DataError | None) -> str:
    return " ".join(f"{error.where}: {error.message}".split()) if error else ""


def _write_rows(
    files: dict[str, IO[bytes]], batches: Iterator[list[tuple[str, Encoded]]], max_length: int, too_long: TooLong
) -> dict[str, Any]:
    counts = ("read", "rows", "tokens", "labelled_tokens", "longest")
    cuts = ("truncated", "truncated_tokens", "dropped_long", "dropped_unlabelled")
    index: dict[str, Any] = {**dict.fromkeys((*counts, *cuts), 0), "longest_where": ""}
    files["offsets.bin"].write(np.int64(0).tobytes())
    for where, (ids, mask) in chain.from_iterable(batches):
        index["read"] += 1
        if len(ids) > max_length:
            if too_long == "error":
                hint = "raise max_length, or let too_long be 'truncate' or 'drop'"
                raise DataError(f"{len(ids):,} tokens, more than {max_length:,}", where=where, hint=hint)
            if too_long == "drop":
                index["dropped_long"] += 1
                continue
        kept, labelled = min(len(ids), max_length), int(mask[:max_length].sum())
        if not labelled:
            index["dropped_unlabelled"] += 1
            continue
        index["truncated"] += len(ids) > max_length
        index["truncated_tokens"] += len(ids) - kept
        index["rows"] += 1
        index["tokens"] += kept
        index["labelled_tokens"] += labelled
        if kept > index["longest"]:
            index["longest"], index["longest_where"] = kept, where
        files["ids.bin"].write(ids[:max_length].tobytes())
        files["mask.bin"].write(mask[:max_length].tobytes())
        files["offsets.bin"].write(np.int64(index["tokens"]).tobytes())
        files["labelled.bin"].write(np.int64(labelled).tobytes())
        files["where.txt"].write(where.replace("\n", " ").encode() + b"\n")
    return index


def _batches(source: Source, masker: Masker, refuse: Refuse) -> Iterator[list[tuple[str, Encoded]]]:
    """Examples with their places, tokenised many at a time."""
    places: list[str] = []
    batch: list[Rendered] = []
    characters = 0
    for example in source.examples(refuse):
        try:
            rendered = masker.render(example)
        except DataError as error:
            refuse(error)
            continue
        places.append(example.where)
        batch.append(rendered)
        characters += len(rendered.text)
        if len(batch) == _BATCH_EXAMPLES or characters > _BATCH_CHARACTERS:
            yield list(zip(places, masker.tokenized(batch), strict=True))
            places, batch, characters = [], [], 0
    if batch:
        yield list(zip(places, masker.tokenized(batch), strict=True))


def _publish(building: Path, folder: Path) -> None:
    _flush_folder(building)
    try:
        building.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        return  # another process was quicker and has made the same store
    _flush_folder(folder.parent)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    if os.name != "nt":  # Windows cannot open a folder, and its renames are journalled
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _index(folder: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        if index["magic"] != MAGIC or index["version"] != VERSION:
            raise _damaged(folder, f"it is not a store of version {VERSION}")
        for name, size in index["bytes"].items():
            if (folder / name).stat().st_size != size:
                raise _damaged(folder, f"{name} does not have {size:,} bytes")
        rows, tokens = index["rows"], index["tokens"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"its index cannot be used ({error})") from error
    wanted = {"ids.bin": 4 * tokens, "mask.bin": tokens, "offsets.bin": 8 * (rows + 1), "labelled.bin": 8 * rows}
    for name, size in wanted.items():
        if index["bytes"].get(name) != size:
            raise _damaged(folder, f"{name} is not that of {rows:,} rows and {tokens:,} tokens")
    return index


def _damaged(folder: Path, why: str) -> DataError:
    return DataError(f"this token store is damaged: {why}", where=str(folder), hint="remove the folder")
