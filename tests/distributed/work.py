"""What ranks do for the tests: functions of plain values, called on all of them at once (``pool.Ranks.call``)."""

import contextlib
import json
import math
import os
import sys
import traceback
import zlib
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from finefit import adapter, checkpoint, divided, evaluate, loop, models, predict, trace
from finefit.build import build
from finefit.candidates import rewrite
from finefit.engines import world as worlds
from finefit.ledger import Ledger
from finefit.mesh import Mesh
from finefit.meshes import techniques_of_mesh
from finefit.nn.optimizers import Optimizing
from finefit.parts import all_cuts, local
from finefit.run import batches_of
from finefit.techniques import from_json, in_order
from tiny import CPU, config_of, examples_of, micro_of, spec_of

MOMENTS = ("forward_end", "loss", "backward_peak", "optimizer_step")


_devices = {}  # by mesh: gloo's groups have threads of their own, and are never given back


def world_of(mesh):
    made = Mesh(**mesh)
    if made.devices == 1:
        return None
    world = worlds.World(made, "cpu", _devices.get(made))
    _devices[made] = world.devices
    return world


def run_of(mesh, techniques, config, rate=1e-3):
    """A tiny model with small random weights, the same on every rank of every mesh."""
    world = world_of(mesh)
    ordered = in_order([*techniques_of_mesh(Mesh(**mesh)), *map(from_json, techniques)])
    made = config_of(**config)
    return build(made, ordered, fill_by_name, CPU, Optimizing(rate), 0, world), ordered, made


def fill_by_name(model, device):
    """As ``models.fill_random``; what a tensor is given is a function of its name, whichever others a rank has."""
    models.fill_empty(model, device)
    generator = torch.Generator(device="cpu")
    with torch.no_grad():
        cuts = all_cuts(model)
        for name, weight in models.stored_weights(model).items():
            generator.manual_seed(zlib.crc32(name.encode()))
            shape = cuts[name].shape if name in cuts else weight.shape
            drawn = torch.randn(shape, generator=generator)
            if len(shape) > 1:
                value = drawn / shape[-1] ** 0.5
            else:
                value = 0.1 * drawn + (0.0 if "bias" in name else 1.0)
            models.home_of(model).put(name, weight, cuts[name].of(value) if name in cuts else value)


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


def carried_on(mesh, techniques, config, folder, steps, lengths, rate=1e-3):
    """Whole weights after some ``steps`` (first, last), begun from the newest checkpoint in ``folder``, where another
    one is saved after them."""
    first, last = steps
    run, _, _ = run_of(mesh, techniques, config, rate)
    assert checkpoint.load_newest(run, Path(folder), print) == first
    dist.barrier()  # each alone: none may save before all have looked
    for step in range(first, last):
        examples = examples_of([length + 3 * step for length in lengths], seed=step)
        loop.optimizer_step(run, batches_of(run, examples), rate)
    if run.world.size > 1 or not dist.get_rank():
        checkpoint.save(run, last, Path(folder), "base", 2)
    dist.barrier()
    return weights_of(run)


def joined(folder, config, techniques):
    """The weights of a checkpoint as one file has them, by the names of a process alone."""
    run, _, _ = run_of({}, techniques, config)
    if not dist.get_rank():
        checkpoint.consolidate(checkpoint.newest_whole(Path(folder)), run, Path(folder), "base")
    dist.barrier()
    adapter.load_trained(run.model, Path(folder))
    return weights_of(run)


def trained_family(mesh, techniques, family, config, *how):
    return trained(mesh, techniques, {"family": family, **config}, *how)


def overflowing(mesh, techniques, config, lengths):
    """Scales around two steps, in the first of which the last rank has a gradient that is not finite; whether weights moved."""
    run, _, _ = run_of(mesh, techniques, config)
    beyond = next(p for p in run.model.parameters() if p.requires_grad)
    scales, moved = [run.scaler.get_scale()], []
    for step in range(2):
        before = local(beyond.detach()).clone()
        batches = batches_of(run, examples_of(lengths, seed=step))
        loss = run.loss
        if step == 0 and run.world.rank == run.world.size - 1:
            run.loss = lambda *args, plain=loss: plain(*args) * float("inf")
        loop.optimizer_step(run, batches, 1e-3)
        run.loss = loss
        scales.append(run.scaler.get_scale())
        moved.append(not torch.equal(before, local(beyond.detach())))
    return {"scales": scales, "moved": moved}


def held_out(mesh, techniques, config, lengths):
    """[loss, labelled tokens] of examples that are not trained on."""
    run, _, _ = run_of(mesh, techniques, config)
    return evaluate.held_out_loss(run, examples_of(lengths))[:2]


def weights_of(run):
    """Whole, by name: every rank is asked, the first one answers."""
    with getattr(run.optimizer, "whole", contextlib.nullcontext)():
        named = run.model.named_parameters()
        found = {name: (p.full_tensor() if hasattr(p, "full_tensor") else p) for name, p in named}
        for name, cut in all_cuts(run.model).items():
            if name in found:  # of tied weights one has the name
                found[name] = cut.whole(found[name].detach(), run.world.group("tensor"))
        found = {name: p for name, p in found.items() if p.dtype.is_floating_point and ".tables." not in name}
        kept = {name: p.detach().double().flatten().tolist() for name, p in found.items()}
    if run.world.mesh.stages > 1:
        stages = [None] * run.world.mesh.stages
        dist.all_gather_object(stages, kept, run.world.group("stages"))
        for name, values in (pair for stage in stages for pair in stage.items()):
            assert kept.setdefault(name, values) == values, f"{name} is not the same on both ends"
    return kept if run.world.is_first else {}


def bytes_at_rest(run):
    def of(tensors):
        storages = [local(t).untyped_storage() for t in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())

    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    return {
        "parameter": of(run.model.parameters()), "gradient": of(gradients),
        "optimizer_state": of(run.optimizer.all_held()),
    }  # fmt: skip


def measured(mesh, techniques, config, lengths, micro_steps, warm=0):
    """States and each moment's highest bytes, predicted and measured on this rank, after ``warm`` steps."""
    run, ordered, made = run_of(mesh, techniques, config)
    batch, ledger = run.collate(examples_of(lengths)), Ledger()
    for _ in range(warm):
        loop.optimizer_step(run, [batch] * micro_steps, 1e-3)
    run.evidence["micro_steps"] = micro_steps
    trace.run_step(run, batch, ledger, micro_steps)
    labelled = len(batch.label_l)
    if run.world.mesh.context > 1:
        (labelled,) = run.world._summed([labelled], "context")
    micro = replace(micro_of(batch), tokens=batch.bounds[-1], labelled=int(labelled))
    layout = replace(rewrite(spec_of(made), micro, ordered), micro_steps=micro_steps)
    for technique in ordered:
        technique.verify(run, ledger)
    part = divided.part(layout, run.world.place["stages"]) if layout.mesh.stages > 1 else divided.Part(layout)
    said, seen = predict.of_device(part).moments, ledger.moments()
    return {
        "states": [predict.states(part.layout), bytes_at_rest(run)],
        "moments": {
            moment: [_beside_input(said[moment]), _beside_input(seen[moment])] for moment in MOMENTS if moment in said
        },
    }


def held_by_deepspeed(mesh, techniques, config, lengths):
    """Bytes of weights, and of masters and states, after a step: predicted and measured on this rank."""
    run, ordered, made = run_of(mesh, techniques, config)
    batch = run.collate(examples_of(lengths))
    loop.optimizer_step(run, [batch], 1e-3)
    for technique in ordered:
        if technique.name in ("zero", "precision", "lora"):
            technique.verify(run, Ledger())
    layout = rewrite(spec_of(made), micro_of(batch), ordered)
    said = predict.states(layout)

    def of(tensors):
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    seen = {"parameter": of(run.optimizer.weights()), "optimizer_state": of(run.optimizer.all_held())}
    return [{key: said[key] for key in seen}, seen]


def forgets(mesh, techniques, config, lengths):
    """Loss and norm of a step, with one before it that was not finite, and without that."""
    found = {}
    for name in ("after", "without"):
        run, _, _ = run_of(mesh, techniques, config)
        if name == "after":
            usual = run.forward
            run.forward = lambda *args, usual=usual: usual(*args) * math.nan
            with contextlib.suppress(loop.NotFinite):
                loop.optimizer_step(run, batches_of(run, examples_of(lengths)), 1e-3)
                raise AssertionError("nothing was wrong with it")
            run.optimizer.zero_grad(set_to_none=True)
            run.forward = usual
        found[name] = [
            loop.optimizer_step(run, batches_of(run, examples_of(lengths, seed=step)), 1e-3)[:2] for step in range(3)
        ]
    return {name: [number for step in steps for number in step] for name, steps in found.items()}


def overflows(mesh, techniques, config, lengths):
    """Scales before, after and beyond a step of this rank's whose gradients are beyond fp16, and the loss of the next step
    with and without that."""
    found = {}
    for name in ("after", "without"):
        run, _, _ = run_of(mesh, techniques, config)
        scales = [run.scaler.get_scale()]
        if name == "after":
            usual = run.forward
            run.forward = lambda *args, usual=usual: usual(*args) * 1e30
            loop.optimizer_step(run, batches_of(run, examples_of(lengths)), 1e-3)
            run.forward = usual
            scales.append(run.scaler.get_scale())
        loss, *_ = loop.optimizer_step(run, batches_of(run, examples_of(lengths)), 1e-3)
        found[name] = loss
        found.setdefault("scales", [*scales, run.scaler.get_scale()])
    return found


def goes_on(mesh, techniques, config, lengths, folder, other=None):
    """Losses and norms of the last two of four steps: of one run, and of one that takes up its checkpoint of step 2, on the
    same mesh or another one."""
    run, _, _ = run_of(mesh, techniques, config)
    found = []
    for step in range(4):
        found.append(loop.optimizer_step(run, batches_of(run, examples_of(lengths, seed=step)), 1e-3)[:2])
        if step == 1:
            checkpoint.save(run, 2, Path(folder), "tiny", 1)
    again, _, _ = run_of(other or mesh, techniques, config)
    assert checkpoint.load_newest(again, Path(folder), print) == 2
    resumed = [
        loop.optimizer_step(again, batches_of(again, examples_of(lengths, seed=step)), 1e-3)[:2] for step in (2, 3)
    ]
    return [[n for pair in pairs for n in pair] for pairs in (found[2:], resumed)]


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
