"""What benchmarks and scripts take from each other and from finefit is there: they run rarely, and must run then."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py"))


def source_of(module, script):
    """The file a name is taken from, of finefit or beside the script; None where it is a library's."""
    if module.partition(".")[0] == "finefit":
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin, f"{module} is not there"
        return Path(found.origin)
    beside = script.parent / f"{module}.py"
    return beside if beside.is_file() else None


def names_in(path):
    """What a module binds at its top, and the modules of a package."""
    found = {beside.stem for beside in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_script_takes_is_there(script):
    missing = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(script.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and (source := source_of(node.module, script))
        for alias in node.names
        if alias.name not in names_in(source)
    ]
    assert missing == []
