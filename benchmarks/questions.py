"""Three questions people ask before they pay, answered by simulation: writes the tables of docs/*/guide/questions.md.

python benchmarks/questions.py
"""

import re
from dataclasses import replace
from pathlib import Path

from finefit.foreign import ForeignRun, Spread
from finefit.foretell import config_json
from finefit.hardware import CONTEXT_BYTES, HardwareSpec
from finefit.units import format_bytes
from finefit.witness import Simulator, workspace_bytes

DOCS = Path(__file__).parent.parent / "docs"
PURE = {"trained_dtype": "bfloat16", "frozen_dtype": "bfloat16", "optimizer_bits": 16}
MASTER = {"trained_dtype": "float32", "frozen_dtype": "bfloat16", "optimizer_bits": 32}


def sharded(ranks: int, tensor: int = 1) -> Spread:
    return Spread(data=ranks // tensor, tensor=tensor, shard_stage=3, shards=ranks // tensor, engine="fsdp2")


def run(model: str, method: str, length: int, spread: Spread, **more: object) -> ForeignRun:
    base = ForeignRun("transformers", model, method, 1, length, packed=True, checkpointing="full", foreach=False)  # type: ignore[arg-type]
    return replace(base, spread=spread, loss="fused", **more)  # type: ignore[arg-type]


def questions() -> dict[str, tuple[str, list[tuple[str, ForeignRun]]]]:
    """Name → (device, rows): what is tried and how it would run."""
    one, eight, big = Spread(), "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-405B"
    seventy = "meta-llama/Llama-3.1-70B"
    lora = {"rank": 16, **MASTER, "autocast": True}
    return {
        "70b": ("L40S", [
            (f"QLoRA 4 bit, {length} tokens", run(seventy, "lora", length, one, quantised="nf4_double", **lora))
            for length in (2048, 4096, 8192)
        ]),
        "8b": ("RTX 4090", [
            ("full, bf16 states, one card", run(eight, "full", 2048, one, **PURE)),
            ("full, bf16 states, sharded over 2", run(eight, "full", 2048, sharded(2), **PURE)),
            ("full, fp32 master weights, sharded over 2", run(eight, "full", 2048, sharded(2), **MASTER)),
            ("full, bf16 states, sharded over 4", run(eight, "full", 2048, sharded(4), **PURE)),
            ("LoRA, one card", run(eight, "lora", 2048, one, **lora)),
        ]),
        "405b": ("A100-80GB", [
            ("full, bf16 states, sharded over 128", run(big, "full", 4096, sharded(128), **PURE)),
            ("full, fp32 master weights, sharded over 128", run(big, "full", 4096, sharded(128), **MASTER)),
            ("the same, 8 tensor parallel × 16 sharded", run(big, "full", 4096, sharded(128, 8), **MASTER)),
        ]),
    }  # fmt: skip


def table(device: str, rows: list[tuple[str, ForeignRun]], simulator: Simulator) -> str:
    card = HardwareSpec.from_name(device)
    lines = ["| | weights | gradients | states | peak | needed of a card | |", "|---|---:|---:|---:|---:|---:|---|"]
    for name, wished in rows:
        found = simulator.ask(config_json(wished.model), wished, workspace_bytes(card.name))
        moments = found.footprint.moments.values()
        parts = [max(m.get(c, 0) for m in moments) for c in ("parameter", "gradient", "optimizer_state")]
        needed = found.needs(CONTEXT_BYTES, wished.spread.devices)
        cells = [*map(format_bytes, parts), format_bytes(found.footprint.peak_bytes), format_bytes(needed)]
        fits = "✓" if needed <= card.memory_bytes else "✗"
        lines.append(f"| {name} | {' | '.join(cells)} | {fits} {format_bytes(card.memory_bytes)} |")
        print(lines[-1], f"{found.seconds:.1f} s", flush=True)
    return "\n".join(lines)


def main() -> None:
    with Simulator() as simulator:
        made = {name: table(device, rows, simulator) for name, (device, rows) in questions().items()}
    for page in DOCS.glob("*/guide/questions.md"):
        text = page.read_text()
        for name, rows in made.items():
            marks = rf"(<!-- {name} -->\n).*?\n?(<!-- /{name} -->)"
            text = re.sub(marks, lambda m, r=rows: m[1] + r + "\n" + m[2], text, flags=re.S)  # type: ignore[misc]
        page.write_text(text)


if __name__ == "__main__":
    main()
