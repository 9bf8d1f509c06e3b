"""The size budget of src and scripts: what outgrows it is cut in two, not given a larger number. Run by `make check`.

Lines are counted from a definition's first line (without decorators) to its last, docstring and all; a file's lines are
all of its lines. Arguments are those that may be given by position, without self and cls; those of a typer command are
options, not arguments.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "scripts")
FUNCTION_LINES, FILE_LINES, CLASS_LINES, ARGUMENTS = 100, 400, 200, 7
#: Functions with a budget of their own: file, name, lines.
SPECIAL = (("src/finefit/loop.py", "train", 80),)


def excesses(path: Path, text: str) -> Iterator[str]:
    """One line for everything in a file that is over the budget."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
    if (lines := text.count("\n")) > FILE_LINES:
        yield f"{name}: {lines} lines, at most {FILE_LINES}"
    special = {function: limit for file, function, limit in SPECIAL if file == name}
    for node in ast.walk(ast.parse(text, name)):
        if isinstance(node, ast.ClassDef):
            yield from _too_long(name, node, CLASS_LINES)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _too_long(name, node, special.get(node.name, FUNCTION_LINES))
            if (count := _positional(node)) > ARGUMENTS:
                yield f"{name}:{node.lineno}: {node.name} takes {count} positional arguments, at most {ARGUMENTS}"


def _too_long(name: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, limit: int) -> Iterator[str]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > limit:
        yield f"{name}:{node.lineno}: {node.name} has {lines} lines, at most {limit}"


def _positional(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if any(isinstance(one, ast.Call) and ast.unparse(one.func).endswith(".command") for one in node.decorator_list):
        return 0
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def main() -> int:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = {path: path.read_text("utf-8") for path in paths}
    found = [line for path, text in texts.items() for line in excesses(path, text)]
    for file, function, _ in SPECIAL:
        if f"def {function}(" not in texts.get(ROOT / file, ""):
            found.append(f"{file} has no function {function}: say in scripts/budget.py where it went")
    print("\n".join(found) or f"{len(paths)} files are within the size budget")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
