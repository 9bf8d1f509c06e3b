"""Large models on many devices: predicted, simulated by the engines' own code, and beside what others have published.

    python benchmarks/many_ranks.py [--only WORD]

Each case is planned for the devices it names. The plan's first rank then runs a whole step of the real model by the real code
(FSDP2, pipelines, tensor parallel layers) on fake tensors, in a process group whose other ranks are not there: every byte
that it allocates is followed, as in a run. Where somebody has published the speed of such a job on such devices, theirs
stands beside the one by which plans are weighed. Writes benchmarks/results/many-ranks.json and the table of
docs/*/concepts/several_devices.md.
"""

import argparse
import json
import re
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from finefit import models, trace
from finefit.batches import Uniform
from finefit.candidates import Question, rewrite
from finefit.config.parallel import degrees
from finefit.divided import Part, part
from finefit.footprint import COMPONENTS
from finefit.foretell import config_json
from finefit.layout import Layout, Micro
from finefit.plan import Plan
from finefit.predict import QUERY_BLOCK, of_device
from finefit.search import DEFAULT_BUDGET, search
from finefit.spec import HardwareSpec, JobSpec, resolve_model
from finefit.techniques import Accumulation
from finefit.units import format_bytes, parse_budget

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
RESULTS = HERE / "results" / "many-ranks.json"
STEP = ("forward_end", "loss", "backward_peak", "optimizer_step")


@dataclass(frozen=True)
class Case:
    model: str
    devices: str
    method: str
    length: int
    batch: int
    """Examples of a step, of all devices together."""
    parallel: str = "auto"
    published: str = ""
    """By whom, and tokens/s of all devices."""
    tokens_per_s: float = 0


CASES = (
    Case("meta-llama/Llama-3.1-8B", "2x RTX 4090", "full", 2048, 16),
    Case("meta-llama/Llama-3.1-8B", "8x H100", "full", 8192, 16, "zero3", "torchtitan, selective checkpointing", 8 * 5762),
    Case("meta-llama/Llama-3.1-70B", "8x A100-80GB", "lora", 2048, 16, "auto", "torchtune, FSDP2", 3497),
    Case("meta-llama/Llama-3.1-70B", "8x A100-80GB", "full", 2048, 16, "auto", "torchtune, FSDP2, all on the host", 1568),
    Case("meta-llama/Llama-3.1-70B", "8x DGX A100", "full", 4096, 128),
    Case("meta-llama/Llama-3.1-70B", "32x DGX H100", "full", 8192, 512, "zero3,tensor8", "torchtitan, FSDP2 x TP 8, fp8", 256 * 829),
    Case("meta-llama/Llama-3.1-405B", "2x DGX A100", "lora", 2048, 16),
    Case("meta-llama/Llama-3.1-405B", "8x A100-80GB", "qlora", 2048, 16, "auto", "torchtune, FSDP2", 653),
    Case("meta-llama/Llama-3.1-405B", "64x DGX H100", "full", 8192, 512, "auto", "torchtitan, FSDP2 x TP 8 x PP 8, fp8", 512 * 100),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose words have this one")
    only = parser.parse_args().only
    rows = []
    for case in CASES:
        if only in f"{case.model} {case.devices} {case.method}":
            rows.append(row(case))
            print(json.dumps(rows[-1]), flush=True)
    if not only:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        write_tables(rows)


def row(case: Case) -> dict[str, Any]:
    plan, layout = planned(case)
    predicted = of_device(part(layout, 0) if layout.mesh.stages > 1 else Part(layout)).moments
    started = time.perf_counter()
    seen, offload = simulated(case, plan, layout), layout.gradients_on != "device"
    # Fake shards of a host are on the only device there is: what they are of is left out of both.
    counted = [c for c in COMPONENTS if not offload or c in ("activation", "temporary")]
    told = {
        m: [sum(parts[m].get(c, 0) for c in counted) for parts in (predicted, seen)] for m in STEP if m in predicted
    }
    highest = [max(pair[i] for pair in told.values()) for i in (0, 1)]
    return {
        "model": case.model, "devices": case.devices, "method": case.method, "length": case.length, "batch": case.batch,
        "mesh": layout.mesh.says(), "offload": offload, "checkpointed": layout.checkpointed, "micro_batch_tokens": layout.micro.tokens,
        "micro_steps": layout.micro_steps, "predicted_bytes": highest[0], "simulated_bytes": highest[1],
        "moments": told,
        "needed_of_a_device_bytes": plan.predicted.total_bytes, "tokens_per_s": round(plan.tokens_per_s),
        "published": case.published, "published_tokens_per_s": case.tokens_per_s,
        "simulated_in_s": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def planned(case: Case) -> tuple[Plan, Layout]:
    """The plan, and its layout with few enough micro-batches that more would need no more memory."""
    hardware, spec = HardwareSpec.from_name(case.devices), resolve_model(case.model)
    job = JobSpec(
        method=case.method, global_batch_size=case.batch, max_length=case.length, longest=case.length,
        pins=tuple(degrees(case.parallel).items()),
    )  # fmt: skip
    budget = parse_budget(DEFAULT_BUDGET[hardware.kind], hardware.memory_bytes)
    plan = search(Question(spec, hardware, job, Uniform(case.batch, case.length), budget))
    most = next(t.micro_batch_tokens for t in plan.techniques if isinstance(t, Accumulation))
    examples = min(plan.micro_batch_size, most // case.length) if most else plan.micro_batch_size
    tokens = case.length * max(examples, 1)
    layout = rewrite(spec, Micro(tokens, case.length, tokens), plan.techniques)
    return plan, replace(layout, micro_steps=min(layout.micro_steps, max(3, 2 * layout.mesh.stages)))


def simulated(case: Case, plan: Plan, layout: Layout) -> dict[str, dict[str, int]]:
    """Bytes by component at each moment of the first rank's step."""
    # On fake tensors of a CPU, where segments of the allocator are none.
    techniques = [t for t in plan.techniques if t.name not in ("allocator", "optimizer_offload")]
    micro = layout.micro
    sizes = {"T": micro.tokens, "S": micro.longest, "L": micro.labelled, "Q": QUERY_BLOCK}
    config = models.config_from(config_json(case.model))
    step = partial(trace.run_step, micro_steps=layout.micro_steps)
    return trace.traced(config, techniques, sizes, step).moments()


def write_tables(rows: list[dict[str, Any]]) -> None:
    for language, heads in HEADS.items():
        path = DOCS / language / "concepts" / "several_devices.md"
        table = "\n".join([f"| {' | '.join(heads)} |", "|---|---|---|---:|---:|---:|---|", *map(line, rows)])
        found = re.sub(r"(?<=<!-- many -->\n).*?(?=<!-- /many -->)", "", path.read_text(), flags=re.S)
        path.write_text(found.replace("<!-- many -->\n", f"<!-- many -->\n{table}\n"))


HEADS = {
    "en": ("model, tokens", "devices", "plan", "predicted", "simulated", "tokens/s by the plan", "published"),
    "zh": ("模型与长度", "设备", "计划", "预测", "模拟", "计划给出的 tokens/s", "已发表"),
}


def line(row: dict[str, Any]) -> str:
    how = row["mesh"] + (", shards on the host" if row["offload"] else "")
    published = f"{row['published_tokens_per_s']:,.0f} ({row['published']})" if row["published"] else ""
    name = row["model"].rpartition("/")[2]
    return (
        f"| {name}, {row['method']}, {row['length']:,} | {row['devices']} | {how} | {format_bytes(row['predicted_bytes'])} "
        f"| {format_bytes(row['simulated_bytes'])} | {row['tokens_per_s']:,} | {published} |"
    )


if __name__ == "__main__":
    main()
