"""Writes the benchmark's chat examples: evenly spaced pairs of the built-in data set, one JSON object a line.

    python benchmarks/demo_examples.py demo.jsonl [--count 512]

The same Python gives the same bytes, so every tool reads the same examples in the same order. Declined: tokenizing,
shuffling, filtering; the built-in data set (finefit.data.stdlib_docstrings) decides what an example is. Needs finefit
importable, not torch.
"""

import argparse
import json
from pathlib import Path

from finefit.data.stdlib_docstrings import pairs


def spaced(count: int) -> list[dict[str, object]]:
    """``count`` examples at even distances, ``{"messages": [user, assistant]}`` each, in the data set's own order."""
    found = list(pairs())
    if count > len(found):
        raise SystemExit(f"{count} examples wanted, this Python's standard library gives {len(found)}")
    return [{"messages": found[index * len(found) // count]["messages"]} for index in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="the .jsonl file to write")
    parser.add_argument("--count", type=int, default=512)
    arguments = parser.parse_args()
    lines = [json.dumps(example, ensure_ascii=False) + "\n" for example in spaced(arguments.count)]
    arguments.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
