"""The stream of the rank that needs most: of a plan divided over devices, and of another tool's run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .allocator import replay
from .catalog.configs import depth_key
from .foreign import Dtype, ForeignRun, Spread
from .layout import Micro
from .meshes import mesh_of
from .placement import placed
from .ranks import of_rank
from .sharding import Buckets, computed_as
from .simulate import plan_stream, step_stream
from .slices import sliced, stages
from .stream import Stream
from .techniques import DIVIDING, Accumulation, Checkpointing, Lora, Precision, Technique, TensorParallel


def plan_streams(config: Mapping[str, Any], techniques: Sequence[Technique], micro: Micro, kind: str) -> list[Stream]:
    """The streams of the devices that may need most: one, or of a pipeline the first and the last. A tensor-parallel rank is
    stepped as it is."""
    techniques = [t.as_wide if isinstance(t, Precision) else t for t in techniques]
    run = run_of_mesh(techniques, micro)
    spread = run.spread
    if spread.devices == 1:
        return [plan_stream(config, techniques, micro, kind)]
    cast = spread.shard_stage == 3  # the gather's cast takes the place of autocast's
    alone = [
        replace(t, kind="bf16") if cast and isinstance(t, Precision) and t.kind == "bf16_mixed" else t
        for t in techniques
        if not isinstance(t, DIVIDING) or isinstance(t, TensorParallel)
    ]
    own, depth = part_of(config, run), int(config[depth_key(config)])
    stage = int(own[depth_key(config)])
    alone = [replace(t, blocks=-(-t.blocks * stage // depth)) if isinstance(t, Checkpointing) else t for t in alone]
    whole = plan_stream(own, alone, micro, kind, context=mesh_of(techniques).context)
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
        mesh.copies * mesh.sharing, mesh.tensor, mesh.stages, shard_stage=3 if sharded else mesh.stage, shards=mesh.sharing,
        engine="fsdp2" if sharded else "", reduce_dtype="float32", stays="step" if mesh.stage == 2 else "",
        micro_batches=steps,
    )  # fmt: skip
    return ForeignRun(
        "finefit", "", "full" if full else "lora", 1, micro.tokens, steps, trained_dtype="float32" if masters else compute,
        compute_dtype=compute, optimizer="sgd", foreach=False, checkpointing="full" if blocks else "none", spread=spread,
    )  # fmt: skip


def rank_stream(config: Mapping[str, Any], run: ForeignRun, whole: bool = False) -> tuple[Stream, Stream]:
    """What the model allocates on the device before it is sharded, and what the rank that needs most does."""
    whole = whole or (run.tool == "torchtune" and run.activations_on_host)  # its streams move copies across blocks
    whole = whole or run.adapter.get("peft_type") == "PREFIX_TUNING"  # one tensor has the keys of all blocks
    simulated = sliced(step_stream(part_of(config, run), computed_as(run), whole), run)
    found = [placed(of_rank(part, run, buckets_of(config, run)), run) for part in stages(simulated, run)]
    return simulated, max(found, key=lambda part: replay(part.allocations()).allocated_bytes)


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
