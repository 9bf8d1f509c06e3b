"""The built-in data set: functions of the running Python's standard library, asked for their docstrings.

Nothing is downloaded and nothing is random: files in sorted order, functions in the order of their text, one example
for every function or method whose docstring says something. The answer is the real docstring, so what a model learned
is easy to see. Declined: functions inside functions (their text would sit inside another example), tests, third-party
packages, whatever this Python installed as bytecode only. Counts differ a little between Python versions.
"""

import ast
import functools
import hashlib
import inspect
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finefit.errors import DataError

NAME = "stdlib-docstrings"
SHORTEST_DOCSTRING = 40  # characters; at or below this it is a label rather than a description
LONGEST_SOURCE = 6_000  # characters
HELD_OUT_OF = 20  # one example in this many is held out

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_PROMPT = "Write the docstring of this Python function.\n\n```python\n{source}\n```"

Pair = dict[str, Any]
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def pairs() -> list[Pair]:
    """Every example: ``messages`` (user, assistant), ``where`` (``ast.py:120``), ``held_out``. No function twice."""
    return list(_all())


@functools.cache
def _all() -> tuple[Pair, ...]:
    # Kept (about 10 MB): reading the library takes seconds, and training wants both halves of the split.
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[bytes] = set()
    found = []
    for path in _files(root):
        for line, source, docstring in _functions(path):
            digest = _digest(source)
            if digest in seen:
                continue
            seen.add(digest)
            messages = [
                {"role": "user", "content": _PROMPT.format(source=source)},
                {"role": "assistant", "content": docstring},
            ]
            where = f"{path.relative_to(root).as_posix()}:{line}"
            found.append({"messages": messages, "where": where, "held_out": _is_held_out(digest)})
    if not found:
        raise DataError(
            f"this Python has no readable standard library in {root}",
            hint="use a normal (not embedded or zipped) Python, or give your own data file",
        )
    return tuple(found)


def train() -> list[Pair]:
    """The examples to learn from: about 95 %."""
    return [pair for pair in pairs() if not pair["held_out"]]


def held_out() -> list[Pair]:
    """The examples to judge by: about 5 %, chosen by the function's text alone, so the same on every machine."""
    return [pair for pair in pairs() if pair["held_out"]]


def _digest(source: str) -> bytes:
    # Indentation is left out: a function copied into a class is still the same function.
    return hashlib.sha256("\n".join(line.strip() for line in source.splitlines()).encode()).digest()


def _is_held_out(digest: bytes) -> bool:
    return int.from_bytes(digest, "big") % HELD_OUT_OF == 0


def _files(root: Path) -> Iterator[Path]:
    # os.walk rather than glob: the folders left out hold most of the files.
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(n for n in folders if n not in _SKIPPED_FOLDERS and not n.startswith("config-"))
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)


def _functions(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, source without the docstring, docstring) of every function of ``path`` that qualifies."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library's own strings are not our user's business
            tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return  # some distributions ship templates with the ending .py; they hold no functions
    # ast counts lines by "\n" only and columns in UTF-8 bytes; str.splitlines would also split at form feeds.
    lines = [line.encode() for line in text.split("\n")]
    for node in _outermost(tree):
        docstring = ast.get_docstring(node, clean=False)
        if docstring is None or len(answer := inspect.cleandoc(docstring)) <= SHORTEST_DOCSTRING:
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        last = node.end_lineno or node.lineno
        if len("\n".join(line.decode() for line in lines[first:last])) < LONGEST_SOURCE:
            yield node.lineno, _without_docstring(lines, node, first, last), answer


def _outermost(node: ast.AST) -> Iterator[_Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _outermost(child)


def _without_docstring(lines: list[bytes], node: _Function, first: int, last: int) -> str:
    """The function's own lines, exactly, less the docstring (and the lines it has for itself)."""
    doc = node.body[0]
    start, end = doc.lineno - 1, (doc.end_lineno or doc.lineno) - 1
    before, after = lines[start][: doc.col_offset], lines[end][doc.end_col_offset :]
    kept = [] if not (before + after).strip() else [before + after]
    return b"\n".join([*lines[first:start], *kept, *lines[end + 1 : last]]).decode()
