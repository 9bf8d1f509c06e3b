"""Derive the coefficient files that ship with finefit: every family of the catalogue, the graphs the planner chooses.

    python scripts/derive_coefficients.py [--missing] [FAMILY ...]

Takes some minutes a family. Each graph is checked against a second trace at other sizes before it is written. Those most
plans need come first; with ``--missing`` what the files have is kept. Families with sizes of their own kind, as latent
attention's, are traced model by model.
"""

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from finefit import catalog, coefficients
from finefit.candidates import rewrite
from finefit.layout import Micro
from finefit.reading import RANKS
from finefit.spec import ModelSpec
from finefit.techniques import (
    FusedLoss,
    FusedOps,
    Lora,
    Precision,
    QuantizedBase,
    Technique,
    TensorParallel,
    Unsuitable,
)  # fmt: skip
from finefit.trace import main as trace

FULL, LORA, QLORA = (), (Lora(1),), (QuantizedBase(4), Lora(1))
EIGHT = (QuantizedBase(8), Lora(1))
# By how many plans have them: adapters on weights of 16 bits, on those of 32, everything trained, four bits, the rest.
FIRST = (("bf16", LORA), ("bf16_mixed", LORA), ("bf16_mixed", FULL), ("bf16", QLORA))
BY_MODEL = ("deepseek_v2", "deepseek_v3")
FINER = ("llama",)  # families of which finer kinds of checkpointing are shipped, for what most plans have


def graphs() -> Iterator[list[Technique]]:
    """Each precision and method with what the planner always uses, on one device and by a tensor-parallel rank, and the
    plain step."""
    rest = itertools.product(("bf16", "bf16_mixed", "fp32"), (FULL, LORA, QLORA, EIGHT))
    for divided in ((), (TensorParallel(RANKS),)):
        for kind, method in dict.fromkeys((*FIRST, *rest)):
            yield [Precision(kind), *method, *divided, FusedOps(), FusedLoss(1)]
    yield [Precision("fp32")]


def wanted(families: list[str]) -> Iterator[tuple[str, str, str]]:
    """(file's name, config.json or nothing, key), what most plans need first."""
    models = [ModelSpec.from_config(model.config, model.name) for model in catalog.models()]
    for techniques, spec in itertools.product(graphs(), models):
        if spec.family not in families:
            continue
        name, config = (f"{spec.family}-{spec.digest}", spec.config) if spec.family in BY_MODEL else (spec.family, "")
        with contextlib.suppress(Unsuitable):
            key = coefficients.key_of(rewrite(spec, Micro(1, 1, 1), techniques))
            yield from ((name, config, kind) for kind in sorted(coefficients.kinds_of(key), reverse=True))
            if spec.family in FINER and any(techniques[1:-2] == list(method) and Precision(kind) == techniques[0]
                                            for kind, method in FIRST):  # fmt: skip
                yield from ((name, config, f"{key} {kind}") for kind in coefficients.FINER)


def main() -> None:
    words = sys.argv[1:]
    kept = "--missing" in words
    families = [word for word in words if word != "--missing"]
    families = families or list(coefficients.shipped())
    found = list(dict.fromkeys(wanted(families)))
    for name in {name for name, *_ in found} if not kept else ():
        (coefficients.SHIPPED / f"{name}.json.gz").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, config, key in found:
            path = coefficients.SHIPPED / f"{name}.json.gz"
            coefficients.read.cache_clear()
            if key in coefficients.read(path):
                continue
            described = Path(folder) / f"{name}.json"
            described.write_text(config)
            try:
                trace(str(described) if config else name, str(path), key)
            except Exception as error:
                print(f"{name}: {key}: {error}", flush=True)
            else:
                print(f"{name}: {key}", flush=True)


if __name__ == "__main__":
    main()
