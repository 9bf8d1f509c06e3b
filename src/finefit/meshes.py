"""Ways to divide a run over the devices there are: data, sharded, tensor, pipeline and context parallel, and their products.

Tensor and context parallel stay inside a machine, the latter is offered where examples are long; shards are all data-parallel ranks, or those of a machine with replicas across
machines (hybrid). Every device is used and every data-parallel rank has at least one example of the global batch. Declines
context parallel with tensor and pipeline parallel, and expert parallel. Torch-free.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from .config.deepspeed import Place
from .data.micro import ALIGNMENT
from .errors import ConfigError
from .hardware import HardwareSpec
from .mesh import Mesh, Stage
from .techniques import ContextParallel, DataParallel, PipelineParallel, Technique, TensorParallel, Zero
from .traffic import per_machine

_MOST_STAGES = 16
# Keys of memory.* and the degree of a mesh that each of them is.
DEGREES = {"zero": "stage", "tensor_parallel": "tensor", "pipeline_parallel": "stages", "context_parallel": "context"}
LONG = 16_384  # tokens of an example, from which one device may not have room for it and others do


def meshes(
    hardware: HardwareSpec, examples: int, contexts: Sequence[int] = (1,), deepspeed: str | None = None
) -> Iterator[Mesh]:
    """Each way to use all of the devices for a global batch of so many examples; the simplest first. So many devices may
    share an example's tokens as ``contexts`` says. By DeepSpeed, whose stage is said then, all of them are shards."""
    if deepspeed is not None:
        if hardware.count <= examples:
            yield Mesh(shards=hardware.count, stage=cast(Stage, int(deepspeed)), engine="deepspeed")
        return
    here = per_machine(hardware)
    for data, tensor, stages in _grids(hardware, here):
        if data <= examples and 1 in contexts:
            yield from _of_data(data, max(here // tensor, 1), Mesh(tensor=tensor, stages=stages))
    for context in contexts:
        if context > 1 and hardware.count // context <= examples:
            yield from _of_data(hardware.count // context, here // context, Mesh(context=context))


def contexts(hardware: HardwareSpec, longest: int, said: str | None) -> tuple[int, ...]:
    """How many devices may share the tokens of a micro-batch: as many as were said; else of a machine 2, 4 ... where the
    ``longest`` example has many, and 1."""
    here = per_machine(hardware)
    suited = [n for n in range(1, here + 1) if here % n == 0 and hardware.count % n == 0]
    if said is not None:
        if int(said) not in suited:
            hint = f"say one of {', '.join(map(str, suited))}"
            raise ConfigError(f"memory.context_parallel: {said} devices do not divide {hardware.count}", hint=hint)
        return (int(said),)
    return tuple(n for n in suited if n == 1 or (longest >= LONG and ALIGNMENT % n == 0))


def fewest_ranks(hardware: HardwareSpec) -> int:
    """The least data-parallel degree that uses all of the devices."""
    here = per_machine(hardware)
    return min(data for data, _, _ in _grids(hardware, here))


def _grids(hardware: HardwareSpec, here: int) -> Iterator[tuple[int, int, int]]:
    """(data, tensor, stages) whose product is the devices."""
    for tensor in range(1, here + 1):
        if here % tensor or hardware.count % tensor:
            continue
        for stages in range(1, _MOST_STAGES + 1):
            if hardware.count // tensor % stages == 0:
                yield hardware.count // (tensor * stages), tensor, stages


def _of_data(data: int, inside: int, mesh: Mesh) -> Iterator[Mesh]:
    ranks = data * mesh.context
    yield replace(mesh, replicas=data)
    if ranks == 1:
        return
    kinds: tuple[Stage, ...] = (1, 2) if mesh.stages > 1 else (1, 2, 3)
    for stage in kinds:
        yield replace(mesh, shards=data, stage=stage)
        if stage > 1 and 1 < inside * mesh.context < ranks and data % inside == 0:
            yield replace(mesh, shards=inside, replicas=data // inside, stage=stage)


def techniques_of_mesh(mesh: Mesh, offload: str | None = None) -> list[Technique]:
    """What divides a run so. ``offload``: where DeepSpeed has states and weights, and the folder of a disk, with colons between."""
    found: list[Technique] = []
    if mesh.tensor > 1:
        found.append(TensorParallel(mesh.tensor))
    if mesh.stages > 1:
        found.append(PipelineParallel(mesh.stages, mesh.schedule, mesh.stages_a_rank))
    if mesh.context > 1:
        found.append(ContextParallel(mesh.context))
    if mesh.replicas > 1:
        found.append(DataParallel(mesh.replicas))
    if mesh.stage:
        states, weights, nvme = (offload or "none:none:").split(":", 2)
        found.append(Zero(mesh.stage, mesh.shards, mesh.engine, cast(Place, states), cast(Place, weights), nvme))
    return found


def mesh_of(techniques: Iterable[Technique]) -> Mesh:
    """The way these techniques divide a run."""
    mesh = Mesh()
    for one in techniques:
        match one:
            case TensorParallel(n):
                mesh = replace(mesh, tensor=n)
            case PipelineParallel(n, schedule, stages_a_rank):
                mesh = replace(mesh, stages=n, schedule=schedule, stages_a_rank=stages_a_rank)
            case ContextParallel(n):
                mesh = replace(mesh, context=n)
            case DataParallel(n):
                mesh = replace(mesh, replicas=n)
            case Zero(stage, n, engine):
                mesh = replace(mesh, stage=stage, shards=n, engine=engine)
    return mesh
