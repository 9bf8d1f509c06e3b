"""The simulated witness: a whole training step under fake tensors, storages followed one by one, no weights, no GPU.

Two optimizer steps are taken, the second is kept: it has optimizer states. A shallow model is stepped and its middle
block repeated (``stream.unrolled``), which is exact for blocks of one kind or a repeating pattern; models of another
build are stepped whole. Attention, dropout and the multi-tensor update allocate as on a CUDA device.

Always called through ``simulated`` of ``witness``, which runs it in a subprocess: the switches set here are the
process's, and a model that cannot be stepped may take the process with it.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .allocator import Event, Kind, replay, smallest_capacity
from .build import Optimizing, rewritten
from .build import optimizer_of as own_optimizer
from .catalog.configs import depth_key
from .fakes import without_values
from .foreign import Dtype, ForeignRun, Lengths, Spread
from .layout import Micro
from .ledger import Ledger
from .lengths import Family, lasting, probes
from .loading import arrivals, loaded
from .meshes import mesh_of
from .models import fill_empty
from .nn.attend import standing_for
from .placement import placed
from .ranks import of_rank
from .sharding import Buckets, computed_as
from .slices import sliced, stages
from .stacks import builder_of
from .stacks.adapters import Packed
from .stacks.attention import cuda_kernels
from .stacks.base import Stepped
from .stacks.optimizers import optimizer_of
from .stacks.transformers import shallow_config
from .stacks.workspaces import CUDA
from .stream import Pattern, Stream, pattern_of, unrolled
from .techniques import DIVIDING, Accumulation, Checkpointing, FusedLoss, Lora, Precision, Technique, from_json
from .trace import batch_of, run_step

MICRO_STEPS = 2
_UNADAPTED = 3  # LLaMA-Adapter leaves the first two blocks as they are, and the third has no neighbour alike
STEADY = "steady"


def step_stream(config: Mapping[str, Any], run: ForeignRun, whole: bool = False) -> Stream:
    """The allocations of one steady optimizer step of ``run`` on one device, before anything is sharded."""
    depth, pattern = layers_of(config, run.method.startswith("adapter"))
    shallow = depth if whole else pattern.shallow(depth)
    ledger = Ledger(CUDA)
    with fake_world(run.attention if run.attention != "sdpa" else None):
        stepped = builder_of(run.tool)(config, run, shallow)
        step(stepped, run, ledger, torch.device("cpu"))
    return _deep(ledger, pattern, shallow, depth) or step_stream(config, run, whole=True)


def _deep(ledger: Ledger, pattern: Pattern, shallow: int, depth: int) -> Stream | None:
    """The stream of the whole depth; None where the blocks turn out not to repeat, and the whole must be stepped."""
    if shallow == depth:
        return ledger
    try:
        return unrolled(ledger, pattern, depth)
    except KeyError:
        return None


def plan_stream(
    config: Mapping[str, Any], techniques: Sequence[Technique], micro: Micro, kind: str = "cpu", whole: bool = False
) -> Stream:
    """The allocations of one step of finefit's own run: the real techniques on the real model.

    ``kind``: cpu or cuda, the device it stands for. Where only some blocks are checkpointed all are stepped.
    """
    from transformers import AutoConfig

    depth, pattern = layers_of(config)
    some = next((t.blocks for t in techniques if isinstance(t, Checkpointing)), 0)
    shallow = depth if whole or 0 < some < depth else pattern.shallow(depth)
    fitted = [replace(t, blocks=min(t.blocks, shallow)) if isinstance(t, Checkpointing) else t for t in techniques]
    steps = next((t.most_steps for t in techniques if isinstance(t, Accumulation)), 1)
    made = AutoConfig.for_model(**shallow_config(config, shallow)).get_text_config()
    ledger = Ledger(CUDA if kind == "cuda" else None)
    with standing_for(kind), without_values():
        run = rewritten(made, fitted, torch.device("cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            fill_empty(run.model, run.device)
            run.optimizer = own_optimizer(run, Optimizing())
            run_step(run, batch_of(micro), ledger, min(steps, MICRO_STEPS))
    return _deep(ledger, pattern, shallow, depth) or plan_stream(config, techniques, micro, kind, whole=True)


def layers_of(config: Mapping[str, Any], adapted: bool = False) -> tuple[int, Pattern]:
    """Depth and how its blocks repeat, from the config's own words."""
    depth = int(config[depth_key(config)])
    kinds = ["" for _ in range(depth)]
    types = config.get("layer_types") or []
    dense = config.get("first_k_dense_replace", 0) or 0
    turned = config.get("no_rope_layer_interval") or (4 if config.get("model_type") == "smollm3" else 0)
    window = config.get("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6}.get(
        str(config.get("model_type")), 0
    )
    for i in range(depth):
        kinds[i] = str(types[i]) if i < len(types) else "sliding" if window and (i + 1) % window else ""
        kinds[i] += " unadapted" if adapted and i < _UNADAPTED else ""
        kinds[i] += " dense" if i < dense else ""
        kinds[i] += " unturned" if turned and (i + 1) % turned == 0 else ""
    return depth, pattern_of(kinds)


@contextmanager
def fake_world(forced: Any = None) -> Iterator[None]:
    """Fake tensors on the CPU that allocate as CUDA tensors would."""
    from transformers import masking_utils

    # transformers takes fake tensors for tracing and would then keep an explicit mask.
    packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        with cuda_kernels(forced), FakeTensorMode(allow_non_fake_inputs=True), _Scalars():
            yield
    finally:
        masking_utils.find_packed_sequence_indices = packed


class _Scalars(TorchDispatchMode):
    """Answers questions for a value with one, as there are no values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


def step(stepped: Stepped, run: ForeignRun, ledger: Ledger, device: torch.device) -> None:
    """Two optimizer steps under the ledger; ``steady`` is marked between them."""
    optimizer = optimizer_of(stepped.model, run)
    batch = [torch.zeros(run.micro_batch_size, run.max_length, dtype=torch.int64, device=device) for _ in range(2)]
    _own(stepped, batch, ledger)
    with ledger, watched(stepped.blocks, ledger):
        one_step(stepped, replace(run, accumulation=1), optimizer, batch, ledger)
        for p, state in ((p, state) for one in optimizer for p, state in one.state.items()):
            held = [t for t in state.values() if isinstance(t, Tensor)]
            ledger.own(held, "optimizer_state")
            ledger.inherit(held, [p] * len(held))
        ledger.mark(STEADY)
        one_step(stepped, run, optimizer, batch, ledger)
        ledger.mark("end")


def one_step(stepped: Stepped, run: ForeignRun, optimizer: Any, batch: Sequence[Tensor], ledger: Any) -> None:
    """Forward, loss and backward of the micro-batches (two at most: the third is as the second), clip, update."""
    micro = min(run.accumulation, MICRO_STEPS)
    for _ in range(micro):
        ledger.mark("forward before")
        loss = stepped.loss(batch[0], batch[1], ledger)
        ledger.mark("backward start")
        (loss / micro if micro > 1 else loss).backward()
        del loss
        ledger.mark("idle")
    trained = [p for p in stepped.model.parameters() if p.requires_grad]
    if isinstance(ledger, Ledger):
        ledger.own((p.grad for p in trained), "gradient")
    ledger.mark("optimizer")
    if not run.step_in_backward:
        if run.clipped:
            nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _own(stepped: Stepped, batch: Sequence[Tensor], ledger: Ledger) -> None:
    """Parameters by block, so that unrolling multiplies them, and the batch."""
    seen: set[int] = set()
    for i, block in enumerate(stepped.blocks):
        ledger.mark(f"own {i}")
        mine = [t for t in (*block.parameters(), *block.buffers()) if id(t) not in seen]
        seen.update(id(t) for t in mine)
        ledger.own(mine, "parameter")  # packed weights are buffers
    ledger.mark("own rest")
    ledger.own((p for p in stepped.model.parameters() if id(p) not in seen), "parameter")
    ledger.own((b for b in stepped.model.buffers() if id(b) not in seen), "input")
    ledger.own(batch, "input")
    ledger.leave_whole(t for m in stepped.model.modules() if isinstance(m, Packed) for t in m.beside())


@contextmanager
def watched(blocks: nn.ModuleList, ledger: Ledger) -> Iterator[None]:
    """Each block opens ``forward i`` when it is called and ``backward i`` when a gradient reaches its output."""
    inner = list(blocks)
    for i, block in enumerate(inner):
        blocks[i] = _Watched(block, i, ledger)
    try:
        yield
    finally:
        for i, block in enumerate(inner):
            blocks[i] = block


class _Watched(nn.Module):
    def __init__(self, block: nn.Module, i: int, ledger: Ledger) -> None:
        super().__init__()
        self.block, self.i = block, i
        object.__setattr__(self, "ledger", ledger)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ledger, i = self.ledger, self.i
        if ledger.sections[-1].startswith("backward"):  # computed again
            return self.block(*args, **kwargs)
        ledger.mark(f"forward {i}")
        output = self.block(*args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _grad: ledger.mark(f"backward {i}"))
        ledger.mark_at_next_birth("forward after")
        return output


def plan_streams(config: Mapping[str, Any], techniques: Sequence[Technique], micro: Micro, kind: str) -> list[Stream]:
    """The streams of the devices that may need most: one, or of a pipeline the first and the last."""
    run = run_of_mesh(techniques, micro)
    spread = run.spread
    if spread.devices == 1:
        return [plan_stream(config, techniques, micro, kind)]
    cast = spread.shard_stage == 3  # the gather's cast takes the place of autocast's
    alone = [
        replace(t, kind="bf16") if cast and isinstance(t, Precision) and t.kind == "bf16_mixed" else t
        for t in techniques
        if not isinstance(t, DIVIDING)
    ]
    alone = [replace(t, chunk=max(t.chunk // spread.tensor, 1)) if isinstance(t, FusedLoss) else t for t in alone]
    own, depth = part_of(config, run), int(config[depth_key(config)])
    stage = int(own[depth_key(config)])
    alone = [replace(t, blocks=-(-t.blocks * stage // depth)) if isinstance(t, Checkpointing) else t for t in alone]
    share = Micro(*(max(n // spread.tensor, 1) for n in (micro.tokens, micro.longest, micro.labelled)))
    whole = sliced(plan_stream(own, alone, share, kind), run)
    return [of_rank(part, run) for part in stages(whole, run)]


def run_of_mesh(techniques: Sequence[Technique], micro: Micro) -> ForeignRun:
    """A plan's run in the words of ``ranks`` and ``slices``. States are there already, in the type they are computed in."""
    mesh, kind = mesh_of(techniques), next(t.kind for t in techniques if isinstance(t, Precision))
    full = not any(isinstance(t, Lora) for t in techniques)
    blocks = next((t.blocks for t in techniques if isinstance(t, Checkpointing)), 0)
    steps = next((t.most_steps for t in techniques if isinstance(t, Accumulation)), 1)
    compute: Dtype = "float32" if kind == "fp32" else "bfloat16"
    sharded = mesh.stage >= 2
    masters = full and sharded and kind == "bf16_mixed"
    spread = Spread(
        mesh.data, mesh.tensor, mesh.stages, shard_stage=3 if sharded else mesh.stage, shards=mesh.shards,
        engine="fsdp2" if sharded else "", reduce_dtype="float32", stays="all" if mesh.stage == 2 else "",
        micro_batches=steps,
    )  # fmt: skip
    return ForeignRun(
        "finefit", "", "full" if full else "lora", 1, micro.tokens, steps, trained_dtype="float32" if masters else compute,
        compute_dtype=compute, optimizer="sgd", foreach=False, checkpointing="full" if blocks else "none", spread=spread,
    )  # fmt: skip


def planned(question: Mapping[str, Any]) -> dict[str, Any]:
    """All readings of a plan's micro-batch, as JSON values; a CPU has no caching allocator."""
    start = time.perf_counter()
    techniques = [from_json(t) for t in question["techniques"]]
    found = plan_streams(question["config"], techniques, Micro(*question["micro"]), question["kind"])
    stream = max(found, key=lambda part: replay(part.allocations()).allocated_bytes)
    moments = stream.moments()
    live = max(sum(parts.values()) for parts in moments.values())
    readings = {"allocated_bytes": live, "reserved_bytes": live, "capacity_bytes": live}
    if question["kind"] == "cuda":
        readings = readings_of(stream, question["workspace_bytes"])
    return {"moments": moments, "live_bytes": live, **readings, "seconds": time.perf_counter() - start}


def readings_of(
    stream: Stream, workspace_bytes: int, segments: Kind = "classic", sent: Sequence[Event] = ()
) -> dict[str, int]:
    """What the caching allocator counts: tensors rounded, what it holds, and the least it goes through with.

    ``sent``: the load of a rank that is sent its weights, which stay where it leaves them. How far its host gets ahead
    is a matter of time, so it is in what every rank must go through with, not in what is held.
    """
    taken, held = workspaces_of(workspace_bytes), stream.allocations()
    free, least = replay([*taken, *held], None, segments), smallest_capacity([*taken, *held], segments)
    if sent:
        step = [event for event in held if stream.entries[event[0]].owner != "parameter"]
        least = max(least, smallest_capacity([*sent, *taken, *step], segments))
    return {
        "allocated_bytes": free.allocated_bytes, "reserved_bytes": free.reserved_bytes, "capacity_bytes": least,
    }  # fmt: skip


def workspaces_of(n_bytes: int) -> list[Event]:
    """What libraries take once for each of the two threads of a step."""
    return [(-1 - i, n_bytes) for i in range(2 * (n_bytes > 0))]


def foreseen(config: Mapping[str, Any], run: ForeignRun, workspace_bytes: int, whole: bool = False) -> dict[str, Any]:
    """All readings of one rank's run, as JSON values."""
    start = time.perf_counter()
    simulated, stream = rank_stream(config, run, whole)
    if run.longest_first:
        stream = stream.until("optimizer")
    load = loaded(simulated, stream, run)
    moments = {"load": load, **stream.moments("start" if run.longest_first else STEADY)}
    readings = {
        name: max(n, sum(load.values()))
        for name, n in readings_of(stream, workspace_bytes, run.segments, arrivals(simulated, run)).items()
    }
    notes = []
    if run.lengths and (family := _family(config, run, stream, whole)):
        varied = lasting(family, run, workspaces_of(workspace_bytes))
        readings |= {key: max(value, readings[key]) for key, value in varied.items()}
    elif run.lengths and not run.longest_first:
        notes.append(
            "every micro-batch counts as the longest: what shorter ones leave in the allocator is not replayed"
        )
    return {
        "moments": moments, "live_bytes": max(sum(parts.values()) for parts in moments.values()), **readings,
        "seconds": time.perf_counter() - start, "notes": notes,
    }  # fmt: skip


def rank_stream(config: Mapping[str, Any], run: ForeignRun, whole: bool = False) -> tuple[Stream, Stream]:
    """What the model allocates on the device before it is sharded, and what the rank that needs most does."""
    whole = whole or (run.tool == "torchtune" and run.activations_on_host)  # its streams move copies across blocks
    whole = whole or run.adapter.get("peft_type") == "PREFIX_TUNING"  # one tensor has the keys of all blocks
    simulated = sliced(step_stream(part_of(config, run), computed_as(run), whole), run)
    found = [placed(of_rank(part, run, buckets_of(config, run)), run) for part in stages(simulated, run)]
    return simulated, max(found, key=lambda part: replay(part.allocations()).allocated_bytes)


def _family(config: Mapping[str, Any], run: ForeignRun, known: Stream, whole: bool) -> Family | None:
    """The run at the lengths it may meet; None where it is not one course of things at all of them."""
    at = probes(run.max_length)
    if run.longest_first or not at:
        return None
    others = (n for n in at if n != run.max_length)
    streams = {n: rank_stream(config, replace(run, max_length=n), whole)[1] for n in others}
    return Family.of({**streams, **({run.max_length: known} if run.max_length in at else {})})


def buckets_of(config: Mapping[str, Any], run: ForeignRun) -> Buckets:
    hidden = config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 4096
    return Buckets.of(int(hidden), run.spread)


def part_of(config: Mapping[str, Any], run: ForeignRun) -> dict[str, Any]:
    """The blocks one rank computes: all, or those of the largest share of a pipeline; in torchtitan, whose later stages
    take what is left over (``generate_split_points``), those of the first."""
    out, ranks, stages = dict(config), run.spread.pipeline, run.spread.stages_a_rank
    if ranks > 1:
        name = depth_key(config)
        depth = int(config[name])
        each, left = divmod(depth, ranks * stages)
        short = sum(each + (0 < i * ranks <= left) for i in range(stages))
        out[name] = max(short if run.tool == "torchtitan" else -(-depth // ranks), 1)
    return out


def foreign(question: Mapping[str, Any]) -> dict[str, Any]:
    run = question["run"]
    run = ForeignRun(**{
        **run, "spread": Spread(**run["spread"]), "lengths": Lengths(**run["lengths"]) if run["lengths"] else None,
        **{key: tuple(run[key]) for key in ("targets", "trained_modules", "notes")},
    })  # fmt: skip
    return foreseen(question["config"], run, question["workspace_bytes"], question["whole"])


def serve(answers: TextIO) -> None:
    """Answer questions, a line of JSON each, until there are no more."""
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = planned(question) if "techniques" in question else foreign(question)
        except Exception as error:  # told to whoever asks; the next question may be answered
            answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr  # libraries that print must not answer
    serve(real)
