"""Predicted beside measured: peaks of a grid of plans of one model of about a billion parameters, and their speed.

Of a CUDA device the allocator's own counters are read over steps as the loop takes them; of a processor, which has none,
the rehearsal's ledger. ``predicted`` is the planner's figure of live tensors, ``simulated`` what ``plan --verify`` replays
through the allocator: rounded tensors with the libraries' workspaces, what is reserved, and the least capacity.
"""

import copy
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from checks.common import At, Check, Figures, at_most, config_of, examples_of, forget, micro_batches, synchronise
from checks.filling import fill_on_device
from finefit.batches import Uniform, Work
from finefit.build import build
from finefit.candidates import LOSS_CHUNK, rewrite
from finefit.cost import seconds_per_step
from finefit.errors import EngineError
from finefit.footprint import STEP
from finefit.hardware import HardwareSpec
from finefit.layout import Micro
from finefit.loop import optimizer_step
from finefit.nn.optimizers import Optimizing
from finefit.predict import footprint
from finefit.rehearse import rehearse
from finefit.run import Run
from finefit.spec import ModelSpec
from finefit.techniques import (
    Accumulation,
    ActivationOffload,
    Allocator,
    Checkpointing,
    Clipping,
    FusedBackwardStep,
    FusedLoss,
    FusedOps,
    Lora,
    OptimizerOffload,
    OptimizerStates,
    Packing,
    ParameterOffload,
    Precision,
    QuantizedBase,
    Technique,
    in_order,
)  # fmt: skip
from finefit.techniques.quantized_base import CHUNK
from finefit.witness import Simulator, workspace_bytes

BILLION = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
           "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
           "max_position_embeddings": 16384}  # fmt: skip
STEPS = 3  # that are timed
MOST = 0.05  # relative error of a peak


@dataclass(frozen=True, slots=True)
class Row:
    """``length`` × ``examples`` tokens a micro-batch, so many of them to a step, ``share`` of the blocks checkpointed."""

    method: str
    precision: str
    length: int
    examples: int
    share: float = 0.0
    steps: int = 1
    more: tuple[Technique, ...] = ()

    def name(self) -> str:
        more = "".join(f", {t.name} {t.setting()}" for t in self.more)
        blocks = f", {round(100 * self.share)} % checkpointed" if self.share else ""
        return f"{self.method} {self.precision}, {self.examples * self.steps} × {self.length}{blocks}{more}"

    def techniques(self, depth: int, kind: str) -> tuple[Technique, ...]:
        """As a plan has them."""
        chosen: list[Technique] = [Precision(self.precision), FusedOps(), Packing(), FusedLoss(LOSS_CHUNK[kind])]
        in_backward = any(isinstance(t, FusedBackwardStep) for t in self.more)
        chosen += [Accumulation(self.examples, most_steps=self.steps), Clipping(0.0 if in_backward else 1.0)]
        chosen += [Checkpointing(round(self.share * depth))] if self.share else []
        chosen += [QuantizedBase(4, "double", CHUNK[kind])] if self.method == "qlora" else []
        chosen += [Lora(16)] if self.method != "full" else []
        chosen += [Allocator("expandable")] if kind == "cuda" else []
        return in_order((*chosen, *self.more))


ROWS = (
    Row("full", "bf16", 1024, 4),
    Row("full", "bf16", 4096, 2),
    Row("full", "bf16", 4096, 2, 0.5),
    Row("full", "bf16", 2048, 2, 0.5, steps=2),
    Row("full", "bf16_mixed", 2048, 2),
    Row("full", "bf16_mixed", 2048, 4, 1.0),
    Row("lora", "bf16", 2048, 2),
    Row("lora", "bf16", 4096, 2, 0.5),
    Row("lora", "bf16", 8192, 2, 1.0),
    Row("qlora", "bf16", 2048, 2),
    Row("qlora", "bf16", 4096, 4, 1.0),
    Row("full", "bf16", 8192, 2, 1.0, more=(ActivationOffload("host"),)),
    Row("full", "bf16_mixed", 2048, 4, 0.5, more=(OptimizerOffload("host", "host"),)),
    Row("full", "bf16", 2048, 4, 0.5, more=(FusedBackwardStep(),)),
    Row("full", "bf16", 2048, 4, 0.5, more=(OptimizerStates("adamw_8bit", chunk=2**22),)),
    Row("lora", "bf16", 4096, 2, 0.5, more=(ParameterOffload("host"),)),
    Row("qlora", "bf16", 4096, 2, 1.0, more=(ParameterOffload("disk"),)),
)
_FEW = (  # of a processor, where nothing leaves for the host
    Row("full", "fp32", 64, 2),
    Row("full", "bf16_mixed", 64, 2, 0.5, steps=2),
    Row("lora", "bf16", 128, 2, 1.0),
    Row("full", "bf16", 64, 4, 0.5, more=(OptimizerOffload("disk", "disk"),)),
)


@functools.cache
def hardware_of(kind: str) -> HardwareSpec:
    return HardwareSpec.of_this_machine() if kind == "cuda" else HardwareSpec.of_cpu()


def measured(row: Row, run: Run, techniques: Sequence[Technique], at: At, config: Any) -> Figures:
    """Peaks of steady steps, and seconds of one."""
    examples = examples_of(at, config, lengths=(row.length,) * row.examples * row.steps)
    batches = micro_batches(run, examples)
    if not at.is_cuda:
        peak = rehearse(run, examples[: row.examples], [], techniques, row.steps)
        allocated = {"allocated_bytes": max(map(peak.at, STEP)), "peak_moment": peak.peak_moment}
    optimizer_step(run, batches, 1e-6)
    forget(at.device)
    started = time.perf_counter()
    for _ in range(STEPS):
        optimizer_step(run, batches, 1e-6)
    synchronise(at.device)
    seconds = (time.perf_counter() - started) / STEPS
    if at.is_cuda:
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        allocated = {
            "allocated_bytes": stats["allocated_bytes.all.peak"], "reserved_bytes": stats["reserved_bytes.all.peak"],
            "requested_bytes": stats["requested_bytes.all.peak"], "retries": stats["num_alloc_retries"],
            "driver_bytes": total - free,
        }  # fmt: skip
    tokens = sum(batch.tokens for batch in batches)
    return {**allocated, "step_s": seconds, "tokens_per_s": tokens / seconds}


def foreseen(config: Any, techniques: Sequence[Technique], work: Work, hardware: HardwareSpec) -> Figures:
    """What the planner says."""
    layout = rewrite(ModelSpec.from_config(config.to_dict(), "checked"), work.largest[0], techniques)
    said = footprint(layout, hardware)
    return {
        "predicted_bytes": max(map(said.at, STEP)), "predicted_total_bytes": said.total_bytes,
        "predicted_step_s": seconds_per_step(layout, work, hardware),
    }  # fmt: skip


def simulated(config: Any, techniques: Sequence[Technique], micro: Micro, hardware: HardwareSpec) -> Figures:
    question: Mapping[str, Any] = {
        "config": config.to_dict(), "techniques": [t.to_json() for t in techniques],
        "micro": [micro.tokens, micro.longest, micro.labelled], "kind": hardware.kind,
        "workspace_bytes": workspace_bytes(hardware.name) if hardware.kind == "cuda" else 0,
    }  # fmt: skip
    try:
        seen = _simulator().answered(question)
    except EngineError as error:
        return {"not_simulated": error.message}
    return {"simulated_bytes": seen.allocated_bytes, "simulated_reserved_bytes": seen.reserved_bytes,
            "simulated_capacity_bytes": seen.capacity_bytes, "simulation_s": seen.seconds}  # fmt: skip


@functools.cache
def _simulator() -> Simulator:
    """One for all rows: its process imports once. It ends with this one."""
    import atexit

    simulator = Simulator()
    atexit.register(simulator.__exit__)
    return simulator


def compared(row: Row, at: At) -> Figures:
    config = config_of(at, **({} if at.quick else BILLION))
    techniques = row.techniques(config.num_hidden_layers, at.device.type)
    work = Uniform(row.examples * row.steps, row.length, 0.5).work(row.examples, 0, False)
    hardware = hardware_of(at.device.type)
    figures = foreseen(config, techniques, work, hardware)
    forget(at.device)
    with ThreadPoolExecutor(1) as thread:  # another process simulates what this one measures
        seen = thread.submit(simulated, copy.deepcopy(config), techniques, work.largest[0], hardware)
        run = build(config, techniques, fill_on_device, at.device, Optimizing())
        figures |= {**measured(row, run, techniques, at, config), **seen.result()}
    figures["error"] = figures["predicted_bytes"] / figures["allocated_bytes"] - 1
    for ours, theirs in (("simulated_bytes", "allocated_bytes"), ("simulated_reserved_bytes", "reserved_bytes"),
                         ("predicted_step_s", "step_s")):  # fmt: skip
        if ours in figures and theirs in figures:
            figures[f"{ours.removesuffix('_bytes')}_error"] = figures[ours] / figures[theirs] - 1
    at_most(f"predicted beside measured ({figures})", abs(figures["error"]), MOST)
    return figures


def summary(rows: Sequence[Mapping[str, Any]]) -> Figures:
    """Median and worst of each relative error, of the rows that were measured."""
    found: Figures = {}
    for key in ("error", "simulated_error", "simulated_reserved_error", "predicted_step_s_error"):
        errors = [row["figures"][key] for row in rows if key in row.get("figures", {})]
        if errors:
            found[key] = {"rows": len(errors), "median": statistics.median(errors), "worst": max(errors, key=abs)}
    return found


def checks(quick: bool) -> dict[str, Check]:
    return {f"grid, {row.name()}": Check(functools.partial(compared, row)) for row in (_FEW if quick else ROWS)}
