"""Other tools' example files through finefit's readers: how many are read, how many refused and why; none may crash.

    python benchmarks/dialects.py FOLDER...      writes benchmarks/results/dialects.json

Each folder is a checkout of LLaMA-Factory, Axolotl, TRL or torchtune, or a part of one that keeps its paths. Every YAML
file below it that a tool is recognised in is read. A file that is read is also put through our own schema, so that the
wish it yields is one that finefit accepts. The commit of a checkout is asked of git, or stands in a file COMMIT.
"""

import argparse
import json
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from finefit.config import Config
from finefit.config.dialects import Foreign, read, recognise
from finefit.errors import ConfigError

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "dialects.json"


def files_of(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Every YAML file of a folder with the tool it is for."""
    for path in sorted(one for one in folder.rglob("*.y*ml") if one.is_file()):
        try:
            data = yaml.safe_load(path.read_text("utf-8"))
        except (yaml.YAMLError, ValueError):
            data = None
        yield path, recognise(data) if isinstance(data, dict) else None


def outcome(path: Path) -> tuple[str, str]:
    """``read``, ``refused`` with the reasons, or ``crashed`` with where."""
    try:
        accepted(read(path))
    except ConfigError as error:
        return "refused", error.message
    except Exception:  # any other exception is the mistake this script looks for
        return "crashed", traceback.format_exc()
    return "read", ""


def accepted(foreign: Foreign) -> Config:
    """The wish as a configuration of ours."""
    nested: dict[str, Any] = {}
    for key, value in foreign.wish:
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return Config.model_validate(nested)


def reasons(message: str) -> list[str]:
    """Each reason of an error, without places, names of models and values that differ from file to file."""
    lines = message.splitlines()[1:] if re.match(r"\d+ problems", message) else [message]
    bare = [re.sub(r"^\S+:\d+:\d+: ", "", line) for line in lines]
    return [_general(line) for line in bare]


def _general(line: str) -> str:
    """The key with what is said of it, without the hint and without words quoted from the file."""
    key, colon, rest = line.partition("': ")
    return key + colon + re.sub(r"'[^']*'", "…", rest).partition(" (did you mean")[0]


def measure(folders: list[Path]) -> dict[str, Any]:
    tools: dict[str, Any] = {}
    skipped = 0
    for folder in folders:
        for path, tool in files_of(folder):
            if tool is None:
                skipped += 1
                continue
            row = tools.setdefault(tool, {"read": 0, "refused": 0, "crashed": 0, "reasons": Counter(), "files": {}})
            kind, message = outcome(path)
            row[kind] += 1
            row["reasons"].update(reasons(message) if kind == "refused" else ())
            row["files"][str(path.relative_to(folder))] = message if kind == "crashed" else kind
            if kind == "crashed":
                print(f"{path}\n{message}", file=sys.stderr)
    for row in tools.values():
        row["reasons"] = dict(row["reasons"].most_common())
    return {"tools": tools, "other_yaml_files": skipped}


def commit_of(folder: Path) -> str:
    noted = folder / "COMMIT"
    if noted.is_file():
        return noted.read_text("utf-8").strip()
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="print the outcome of files whose path has this word; write nothing")
    given = parser.parse_args()
    if given.only:
        for folder in given.folders:
            for path, tool in files_of(folder):
                if tool and given.only in str(path):
                    print(path.relative_to(folder), tool, *outcome(path))
        return 0
    found = measure(given.folders)
    for tool, row in found["tools"].items():
        print(f"{tool}: {row['read']} read, {row['refused']} refused, {row['crashed']} crashed")
        for reason, count in row["reasons"].items():
            print(f"  {count:4d}  {reason}")
    print(f"{found['other_yaml_files']} other YAML files")
    sources = {folder.name: commit_of(folder) for folder in given.folders}
    made = {"date": time.strftime("%Y-%m-%d"), "sources": sources, **found}
    RESULTS.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 1 if any(row["crashed"] for row in found["tools"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
