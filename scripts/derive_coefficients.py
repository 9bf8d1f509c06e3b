"""Derive the coefficient files that ship with finefit: every family of the catalogue, the graphs the planner chooses.

    python scripts/derive_coefficients.py [--evaluations] [FAMILY ...]

Takes some minutes a family; with ``--evaluations`` only the evaluations are made anew, a minute a family. Each graph is checked against a second trace at other sizes before it is written.
"""

import contextlib
import sys

from finefit import catalog, coefficients
from finefit.candidates import rewrite
from finefit.layout import Micro
from finefit.spec import ModelSpec
from finefit.techniques import FusedLoss, FusedOps, Lora, Precision, QuantizedBase, Technique, Unsuitable
from finefit.trace import main as trace

KINDS = ("bf16", "bf16_mixed", "fp32")
METHODS: tuple[list[Technique], ...] = ([], [Lora(1)], [QuantizedBase(4), Lora(1)], [QuantizedBase(8), Lora(1)])


def keys_of(spec: ModelSpec) -> set[str]:
    """Graphs of a model: each method and precision with what the planner always uses, and the plain step."""
    micro = Micro(1, 1, 1)
    found: list[list[Technique]] = []
    for kind in KINDS:
        for method in METHODS:
            found.append([Precision(kind), *method, FusedOps(), FusedLoss(1)])
    found.append([Precision("fp32")])
    graphs: set[str] = set()
    for techniques in found:
        with contextlib.suppress(Unsuitable):
            graphs.add(coefficients.key_of(rewrite(spec, micro, techniques)))
    return {key for graph in graphs for key in coefficients.kinds_of(graph)}


def main() -> None:
    wanted: dict[str, set[str]] = {}
    for model in catalog.models():
        spec = ModelSpec.from_config(model.config, model.name)
        wanted.setdefault(spec.family, set()).update(keys_of(spec))
    # the catalogue has more families than are traced: a new one is named once, then its file is there
    folders = [coefficients.SHIPPED, coefficients.EVALUATIONS]
    words = [word for word in sys.argv[1:] if word != "--evaluations"]
    for family in words or sorted(path.stem for path in coefficients.SHIPPED.glob("*.json")):
        evaluations = {key for key in wanted[family] if key.endswith(" eval")}
        parts = [wanted[family] - evaluations, evaluations]
        for folder, keys in list(zip(folders, parts, strict=True))["--evaluations" in sys.argv :]:
            path = folder / f"{family}.json"
            path.unlink(missing_ok=True)
            trace(family, str(path), *sorted(keys))
            print(family, len(keys), "graphs,", path.stat().st_size, "bytes", flush=True)


if __name__ == "__main__":
    main()
