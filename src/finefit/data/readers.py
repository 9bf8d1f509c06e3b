"""Files and built-in sets to examples, one after the other, in constant memory (a JSON array is read whole).

JSON lines, JSON arrays, CSV and plain text (a blank line between two examples), each also with ``.gz``. Anything that
cannot be used stops at once with ``file:line:column`` and a hint: training on half of a file unasked is no kindness. Where
rows may be left out (``BadRows``), each is told to who reads; a file whose end is lost still stops.
Declined: parquet, arrow and hub ids (convert them to JSON lines), and folders of files.
"""

import csv
import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from finefit.data import stdlib_docstrings
from finefit.data.formats import Example, Format, Row, detect, example, unused_columns
from finefit.errors import DataError, did_you_mean

HELD_OUT = f"{stdlib_docstrings.NAME}:held-out"
BUILT_IN: dict[str, Callable[[], list[stdlib_docstrings.Pair]]] = {
    stdlib_docstrings.NAME: stdlib_docstrings.train,
    HELD_OUT: stdlib_docstrings.held_out,
}


class _Twice(ValueError):
    """A JSON object has this key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ``json`` itself keeps the last of two equal keys, and one of two answers would be lost."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Twice(_first_twice([key for key, _ in pairs]))
    return found


def _first_twice(names: Sequence[str]) -> str:
    return next((name for at, name in enumerate(names) if name in names[:at]), "")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)

Rows = Iterator[tuple[int, Row]]
BadRows = Literal["strict", "skip"]
Refuse = Callable[[DataError], None]
"""Told of a row that cannot be used. It raises, or reading goes on with the next one."""


def refuse_all(error: DataError) -> NoReturn:
    """The first bad row ends it."""
    raise error


@dataclass(frozen=True, slots=True)
class Source:
    """Something to read examples from, as often as wanted. ``digest`` names the content, not the file; ``bad_rows`` is what
    who reads is asked to do with rows that cannot be used."""

    name: str
    format: str
    digest: str
    unused_columns: tuple[str, ...]
    bad_rows: BadRows
    _open: Callable[[Refuse], Iterator[Example]] = field(repr=False, compare=False)

    def __iter__(self) -> Iterator[Example]:
        return self._open(refuse_all)

    def examples(self, refuse: Refuse) -> Iterator[Example]:
        """As iterating does, but ``refuse`` is told of rows that cannot be used."""
        return self._open(refuse)


def open_source(name: str | Path, columns: Mapping[str, str] | None = None, bad_rows: BadRows = "strict") -> Source:
    """The built-in set or the file ``name``. ``columns`` renames: ``{"prompt": "question"}`` reads one as the other."""
    if str(name) in BUILT_IN:
        return _built_in(str(name), bad_rows)
    path = Path(name).expanduser()
    _check_file(path)
    renamed = {theirs: ours for ours, theirs in (columns or {}).items()}
    known, row = _first(path, renamed, bad_rows)
    marks = json.dumps([known.name, sorted(renamed.items())]).encode()
    return Source(
        name=str(path),
        format=known.name,
        digest=_file_digest(path, marks),
        unused_columns=unused_columns(known, row),
        bad_rows=bad_rows,
        _open=partial(_examples, path, known, renamed),
    )


def check_named(name: str) -> None:
    """DataError where ``name`` is neither a built-in set nor a file of a kind that is read; nothing is read of it."""
    if name not in BUILT_IN:
        _check_file(Path(name).expanduser())


def _first(path: Path, renamed: Mapping[str, str], bad_rows: BadRows) -> tuple[Format, Row]:
    """The file's format, by its first row that has one."""
    refused: list[DataError] = []
    refuse: Refuse = refuse_all if bad_rows == "strict" else refused.append
    for line, row in _rows(path, renamed, refuse):
        try:
            return detect(row, f"{path}:{line}"), row
        except DataError as error:
            refuse(error)
    if refused:
        raise none_usable(path, len(refused), refused[0])
    raise DataError("the file has no rows", where=str(path), hint="it must hold at least one example")


def none_usable(name: str | Path, count: int, first: DataError) -> DataError:
    said = f"none of the {count:,} rows can be used; the first: {first.message}"
    return DataError(said, where=first.where or str(name), hint=first.hint)


def _built_in(name: str, bad_rows: BadRows) -> Source:
    def examples(_refuse: Refuse) -> Iterator[Example]:
        for pair in BUILT_IN[name]():
            yield Example(pair["where"], messages=tuple(pair["messages"]))

    # The library itself is not read for the digest: it only changes with the interpreter, and reading it takes seconds.
    recipe = Path(stdlib_docstrings.__file__).read_bytes()
    digest = hashlib.sha256(f"{name} {sys.version} {sys.platform} {sys.base_prefix}".encode() + recipe).hexdigest()
    return Source(name=name, format="messages", digest=digest, unused_columns=(), bad_rows=bad_rows, _open=examples)


def _examples(path: Path, known: Format, renamed: Mapping[str, str], refuse: Refuse) -> Iterator[Example]:
    for line, row in _rows(path, renamed, refuse):
        try:
            read = example(known, row, f"{path}:{line}")
        except DataError as error:
            refuse(error)
        else:
            yield read


def _rows(path: Path, renamed: Mapping[str, str], refuse: Refuse) -> Rows:
    for line, row in _READERS[_suffix(path)](path, refuse):
        yield line, {renamed.get(column, column): value for column, value in row.items()} if renamed else row


def _check_file(path: Path) -> None:
    if path.is_dir():
        found = sorted(file.name for file in path.iterdir() if _suffix(file) in _READERS)
        hint = f"give one file of it: {', '.join(found[:5])}" if found else "it holds no file that could be read"
        raise DataError("this is a folder", where=str(path), hint=hint)
    if not path.exists():
        raise DataError("no such data file", where=str(path), hint=_missing_hint(path))
    if _suffix(path) not in _READERS:
        raise DataError(
            f"cannot read files that end in '{path.suffix}'",
            where=str(path),
            hint=f"convert it to JSON lines; read are {', '.join(sorted(_READERS))}, also with .gz",
        )
    if path.stat().st_size == 0:
        raise DataError("the file is empty", where=str(path), hint="it must hold at least one example")


def _missing_hint(path: Path) -> str:
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = did_you_mean(path.name, names) or did_you_mean(str(path), BUILT_IN)
    if not path.parent.is_dir():
        hint = hint or f"the folder {path.parent} does not exist either"
    return hint or f"give a file, or the built-in '{stdlib_docstrings.NAME}'"


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _file_digest(path: Path, marks: bytes) -> str:
    digest = hashlib.sha256(marks)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _lines(path: Path, refuse: Refuse) -> Iterator[tuple[int, str]]:
    """Numbered lines with their endings. Decoded one by one, so that a bad byte has a line."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if (line := _decoded(raw, path, number, refuse)) is not None:
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"the compressed file is damaged ({error})",
            where=f"{path}:{number + 1}",
            hint="copy or download it again",
        ) from None
    except OSError as error:
        raise DataError(f"cannot read the file: {error.strerror}", where=str(path)) from None


def _decoded(raw: bytes, path: Path, number: int, refuse: Refuse) -> str | None:
    """A line's text; None where it is not UTF-8, and may be left out."""
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        # of what is decoded: a mark at the beginning is no part of it
        said, where = f"not UTF-8 text: byte 0x{error.object[error.start]:02x}", f"{path}:{number}:{error.start + 1}"
    refuse(DataError(said, where=where, hint="save the file as UTF-8"))
    return None


def _json_rows(path: Path, refuse: Refuse) -> Rows:
    """JSON lines, or one JSON array: whichever the content is, since half of all .json files are JSON lines."""
    is_first = True
    for number, line in _lines(path, refuse):
        if is_first and line.lstrip().startswith("["):
            yield from _array_rows(path, "".join(text for _, text in _lines(path, refuse_all)), refuse)
            return
        if line.strip():
            is_first = False
            try:
                row = _object(_parse(line, path, number), f"{path}:{number}")
            except DataError as error:
                refuse(error)
            else:
                yield number, row


def _parse(line: str, path: Path, number: int) -> object:
    try:
        return _DECODER.decode(line.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        spread = line.strip() in ("{", "[") or error.pos >= len(line.rstrip())
        hint = "write one JSON object a line, or one JSON array" if spread else "check quotes, commas and escapes there"
        raise DataError(f"invalid JSON: {error.msg}", where=f"{path}:{number}:{error.colno}", hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, f"{path}:{number}") from None


def _unreadable(error: Exception, where: str) -> DataError:
    """JSON by its grammar, but not to be used: a key twice, a number of thousands of digits, a tower of brackets."""
    if isinstance(error, _Twice):
        return DataError(f"key '{error}' stands twice in one object", where=where, hint="keep one of the two")
    if isinstance(error, RecursionError):
        return DataError("invalid JSON: nested too deeply", where=where)
    return DataError(f"invalid JSON: {error}", where=where)


def _array_rows(path: Path, text: str, refuse: Refuse) -> Rows:
    """Where one value ends is where the next one begins: what is no JSON ends it, whatever ``refuse`` would do."""
    position, line, counted = _skip_blank(text, text.index("[") + 1), 1, 0
    while text[position : position + 1] != "]":
        try:
            line += text.count("\n", counted, position)
            counted = position
            value, end = _DECODER.raw_decode(text, position)
            if isinstance(value, dict):
                yield line, value
            else:
                refuse(_no_object(f"{path}:{line}"))
            position = _skip_blank(text, end)
            if text[position : position + 1] == ",":
                position = _skip_blank(text, position + 1)
                if text[position : position + 1] == "]":
                    raise json.JSONDecodeError("Illegal trailing comma before end of array", text, position)
            elif text[position : position + 1] != "]":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
        except json.JSONDecodeError as error:
            where = f"{path}:{error.lineno}:{error.colno}"
            hint = "check quotes, commas and brackets there; is the end of the file missing?"
            raise DataError(f"invalid JSON: {error.msg}", where=where, hint=hint) from None
        except (ValueError, RecursionError) as error:
            raise _unreadable(error, f"{path}:{line}") from None
    rest = _skip_blank(text, position + 1)
    if rest < len(text):
        where = f"{path}:{text.count(chr(10), 0, rest) + 1}"
        raise DataError("there is more after the end of the JSON array", where=where, hint="keep one array in a file")


def _skip_blank(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _object(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise _no_object(where)


def _no_object(where: str) -> DataError:
    return DataError(
        "this row is not a JSON object",
        where=where,
        hint='a row looks like {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}',
    )


def _csv_rows(path: Path, refuse: Refuse) -> Rows:
    csv.field_size_limit(2**31 - 1)  # the default stops at 128 KiB, which one long answer reaches
    # A line is not a row: without one of them it could be another table. As with an array of JSON, and a text.
    # Strict, or a quote without its end would take the rest of the file into one cell.
    reader = csv.DictReader((text for _, text in _lines(path, refuse_all)), strict=True)
    line = 1
    try:
        header = reader.fieldnames or ()  # reads the header, so that a row's first line is known
        if twice := _first_twice(header):
            raise DataError(
                f"column '{twice}' stands twice in the header", where=f"{path}:1", hint="rename one of them"
            )
        line = reader.line_num + 1
        for row in reader:
            if None in row or None in row.values():
                said = f"this row has {'more' if None in row else 'fewer'} cells than the header"
                hint = "put quotes around cells with commas or line breaks"
                refuse(DataError(said, where=f"{path}:{line}", hint=hint))
            else:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"invalid CSV: {error}", where=f"{path}:{line}") from None


def _text_rows(path: Path, _refuse: Refuse) -> Rows:
    start, kept = 1, ""
    for number, line in _lines(path, refuse_all):
        if line.strip():
            start = start if kept else number
            kept += line
        elif kept:
            yield start, {"text": kept.strip()}
            kept = ""
    if kept:
        yield start, {"text": kept.strip()}


_READERS: dict[str, Callable[[Path, Refuse], Rows]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".txt": _text_rows,
}
