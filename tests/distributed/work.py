"""What ranks do for the tests: functions of plain values, called on all of them at once (``pool.Ranks.call``)."""

import json
import os
import sys
import traceback
from dataclasses import replace

import torch
import torch.distributed as dist

from finefit import loop, models, predict, trace
from finefit.build import build
from finefit.candidates import rewrite
from finefit.data.micro import shared_out
from finefit.engines import world as worlds
from finefit.ledger import Ledger
from finefit.mesh import Mesh
from finefit.meshes import techniques_of_mesh
from finefit.nn.optimizers import Optimizing
from finefit.parts import all_cuts, local
from finefit.run import of_share
from finefit.techniques import from_json, in_order
from tiny import CPU, config_of, examples_of, micro_of, spec_of

MOMENTS = ("forward_end", "loss", "backward_peak", "optimizer_step")


def world_of(mesh):
    made = Mesh(**mesh)
    return worlds.World(made, "cpu") if made.devices > 1 else None


def run_of(mesh, techniques, config, rate=1e-3):
    """A tiny model with small random weights, the same on every rank of every mesh."""
    world = world_of(mesh)
    ordered = in_order([*techniques_of_mesh(Mesh(**mesh)), *map(from_json, techniques)])
    made = config_of(**config)
    return build(made, ordered, models.fill_random(0), CPU, Optimizing(rate), 0, world), ordered, made


def trained(mesh, techniques, config, steps, lengths, rate=1e-3):
    """[loss, norm, tokens, labelled] of each step, and whole weights as lists: on the first rank, or alone where all of
    ``mesh`` is 1. Lengths differ by rank and by step."""
    run, _, _ = run_of(mesh, techniques, config, rate)
    torch.manual_seed(0)
    made = []
    for step in range(steps):
        examples = examples_of([length + 3 * step for length in lengths], seed=step)
        made.append(loop.optimizer_step(run, batches_of(run, examples), rate))
    return {"steps": made, "scale": run.scaler.get_scale(), "weights": weights_of(run)}


def trained_family(mesh, techniques, family, config, *how):
    return trained(mesh, techniques, {"family": family, **config}, *how)


def batches_of(run, examples):
    groups = shared_out([len(ids) for ids, _ in examples], run.split, run.world.data_size, run.world.lockstep)
    return [of_share(run, examples, group) for group in groups[run.world.data_rank]]


def weights_of(run):
    """Whole, by name: every rank is asked, the first one answers."""
    found = {name: (p.full_tensor() if hasattr(p, "full_tensor") else p) for name, p in run.model.named_parameters()}
    for name, cut in all_cuts(run.model).items():
        if name in found:  # of tied weights one has the name
            found[name] = cut.whole(found[name].detach(), run.world.group("tensor"))
    kept = {name: p.detach().double().flatten().tolist() for name, p in found.items() if p.dtype.is_floating_point}
    return kept if run.world.is_first else {}


def bytes_at_rest(run):
    def of(tensors):
        storages = [local(t).untyped_storage() for t in tensors if local(t).numel()]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    return {
        "parameter": of(run.model.parameters()), "gradient": of(gradients),
        "optimizer_state": of(run.optimizer.all_held()),
    }  # fmt: skip


def measured(mesh, techniques, config, lengths, micro_steps):
    """States and each moment's highest bytes, predicted and measured on this rank."""
    run, ordered, made = run_of(mesh, techniques, config)
    batch, ledger = run.collate(examples_of(lengths)), Ledger()
    run.evidence["micro_steps"] = micro_steps
    trace.run_step(run, batch, ledger, micro_steps)
    layout = replace(rewrite(spec_of(made), micro_of(batch), ordered), micro_steps=micro_steps)
    for technique in ordered:
        technique.verify(run, ledger)
    said, seen = predict.footprint(layout).moments, ledger.moments()
    return {
        "states": [predict.states(layout), bytes_at_rest(run)],
        "moments": {moment: [_beside_input(said[moment]), _beside_input(seen[moment])] for moment in MOMENTS},
    }


def _beside_input(parts):
    return sum(n for component, n in parts.items() if component != "input")


def serve():
    worlds.begin("cpu")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"result": globals()[asked["call"]](*asked["args"])}
        except BaseException:
            answer = {"error": traceback.format_exc(limit=-6)}
        answers.write(json.dumps(answer) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    serve()
