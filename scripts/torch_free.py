"""Fails when importing a module of the planning half also imports torch or transformers. Run by `make check`.

Each module is imported in turn in this one process; the first after which a heavy package is there is to blame.
"""

import importlib
import sys

HEAVY = ("torch", "transformers", "safetensors", "peft", "gguf")
MODULES = (
    "units", "errors", "files", "hub", "poly", "reckoned", "catalog", "catalog.derived", "catalog.resolve", "hardware", "spec",
    "footprint", "layout", "events", "data", "data.formats", "data.masks", "data.micro", "data.order", "data.readers",
    "data.stdlib_docstrings", "data.tokens", "foreign", "config", "config.dialects", "techniques", "coefficients",
    "batches", "sections", "predict", "cost", "plan", "ways", "search", "explain", "fits", "report",
    "inventory", "terminal", "terminal.listing", "terminal.planned", "terminal.fitting", "assets", "probe", "machine",
    "doctor", "planning", "examples", "session", "cli",
)  # fmt: skip


def main() -> int:
    for name in MODULES:
        importlib.import_module(f"finefit.{name}")
        if found := [heavy for heavy in HEAVY if heavy in sys.modules]:
            print(f"finefit.{name} imports {', '.join(found)}")
            return 1
    print(f"{len(MODULES)} modules import neither torch nor transformers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
