"""The rehearsal: the largest micro-batch of the whole run, stepped once before the run, under the ledger.

It measures what the plan predicted and checks that what runs is what was planned: every technique's own post-condition,
and that packed examples do not see each other. Nothing of it stays: the update has a learning rate of zero, optimizer
states are zeroed, gradients freed, random generators put back.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from .data.micro import row_of, width
from .footprint import Footprint
from .ledger import Ledger, NoLedger
from .run import Example, MicroBatch, Run
from .techniques import NotAsPlanned, Technique
from .trace import run_step

WHY = "this is a mistake in finefit, please report it with the run folder's plan.json"


def rehearse(
    run: Run, worst: Sequence[Example], others: Sequence[Example], techniques: Sequence[Technique], micro_steps: int
) -> Footprint:
    """The measured footprint of a step of ``worst``; raises NotAsPlanned. ``others`` are two short examples."""
    generators = torch.get_rng_state(), torch.cuda.get_rng_state_all() if run.device.type == "cuda" else []
    batch = run.collate(worst).to(run.device)
    padding = batch.ids_bs.numel() - sum(row_of([width(len(ids)) for ids, _ in worst]))
    micro_steps = min(micro_steps, 2)
    run.evidence.update(padding_tokens=padding, micro_steps=micro_steps, block_forwards=0, inputs_offloaded=0)
    run.optimizer.updated.clear()
    for group in run.optimizer.param_groups:
        group["lr"], group["kept_decay"], group["weight_decay"] = 0.0, group["weight_decay"], 0.0
    ledger, scale = Ledger(device=run.device.type), run.scaler.get_scale()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)  # or they would be the load's
    run_step(run, batch, ledger, micro_steps)
    for technique in techniques:
        technique.verify(run, ledger)
    run.scaler.update(scale)  # as it was
    _forget(run)
    if len(others) == 2:
        check_blind(run, others)
    torch.set_rng_state(generators[0])
    if generators[1]:
        torch.cuda.set_rng_state_all(generators[1])
    return Footprint("measured", ledger.moments(), _reserved(run.device))


def check_blind(run: Run, pair: Sequence[Example]) -> None:
    """Another first example must not move the second one's loss by a bit more than rounding; without dropout."""
    first, second = pair
    changed = ([(t + 1) % 7 + 3 for t in first[0]], first[1])
    run.model.eval()
    with torch.no_grad():
        batches = [_second_only(run.collate([one, second]), first).to(run.device) for one in (first, changed)]
        losses = [run.passes.score(run, batch, NoLedger()).item() for batch in batches]
    run.model.train()
    if abs(losses[0] - losses[1]) > 1e-5 * abs(losses[0]):
        raise NotAsPlanned(
            f"packing: an example's loss moved from {losses[0]} to {losses[1]} with its neighbour. {WHY}"
        )


def _second_only(batch: MicroBatch, first: Example) -> MicroBatch:
    start = batch.bounds[1] if len(batch.bounds) > 1 else len(first[0])
    row_l = batch.row_r[: len(batch.label_l)]
    return replace(batch, row_r=row_l[row_l >= start], label_l=batch.label_l[row_l >= start])


def _forget(run: Run) -> None:
    """Gradients away, optimizer states as new."""
    run.optimizer.zero_grad(set_to_none=True)
    for state in run.optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    for group in run.optimizer.param_groups:
        group["weight_decay"] = group.pop("kept_decay")


def _reserved(device: torch.device) -> int:
    """What the caching allocator holds beyond live tensors at its peak; a CPU has no such allocator."""
    if device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats(device)
    return int(stats["reserved_bytes.all.peak"] - stats["allocated_bytes.all.peak"])
