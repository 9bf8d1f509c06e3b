"""Writes what was tried on several ranks into ``docs/*/concepts/several_devices.md``, from what a test run found.

    make test-distributed          runs the tests, then this

Reads benchmarks/results/ranks.json, which tests/distributed/conftest.py writes where nothing failed. A row is a mesh and an
engine; "exact" and "bytes" name what it was tried with, on how many ranks.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "ranks.json"
TABLE = re.compile(r"(<!-- ranks -->\n).*?(<!-- /ranks -->)", re.DOTALL)
HEADS = {
    "en": ("technique", "engine", "loss, norm and weights of one process", "bytes as predicted", "ranks"),
    "zh": ("技术", "引擎", "损失、范数、权重与单进程相同", "字节与预测相同", "rank 数"),
}


def rows(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """By mesh and engine, in the order of names."""
    kinds = sorted({(row["mesh"], row["engine"]) for row in found})
    return [(mesh, engine, *_cells([r for r in found if (r["mesh"], r["engine"]) == (mesh, engine)]))
            for mesh, engine in kinds]  # fmt: skip


def _cells(found: list[dict[str, Any]]) -> tuple[str, str, str]:
    of = {what: ", ".join(sorted({row["with"] for row in found if row["what"] == what})) for what in ("exact", "bytes")}
    return of["exact"] or "-", of["bytes"] or "-", ", ".join(sorted({str(row["ranks"]) for row in found}))


def table(found: list[dict[str, Any]], lang: str) -> str:
    lines = [HEADS[lang], ("---",) * len(HEADS[lang]), *rows(found)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def pages() -> dict[Path, str]:
    """Path and text of both pages."""
    found = json.loads(RESULT.read_text())
    paths = {lang: ROOT / "docs" / lang / "concepts" / "several_devices.md" for lang in HEADS}
    return {
        path: TABLE.sub(lambda mark, lang=lang: f"{mark[1]}{table(found, lang)}{mark[2]}", path.read_text("utf-8"))
        for lang, path in paths.items()
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf-8")
