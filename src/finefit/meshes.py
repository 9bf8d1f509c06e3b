"""Ways to divide a run over the devices there are: data, sharded, tensor and pipeline parallel, and their products.

Tensor parallel stays inside a machine; shards are all data-parallel ranks, or those of a machine with replicas across
machines (hybrid). Every device is used and every data-parallel rank has at least one example of the global batch. Declines
context and expert parallel. Torch-free.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .hardware import HardwareSpec
from .mesh import Mesh, Stage
from .techniques import DataParallel, PipelineParallel, Technique, TensorParallel, Zero
from .traffic import per_machine

_MOST_STAGES = 16


def meshes(hardware: HardwareSpec, examples: int) -> Iterator[Mesh]:
    """Each way to use all of the devices for a global batch of so many examples; the simplest first."""
    here = per_machine(hardware)
    for data, tensor, stages in _grids(hardware, here):
        if data <= examples:
            yield from _of_data(data, max(here // tensor, 1), Mesh(tensor=tensor, stages=stages))


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
    if data == 1:
        yield mesh
        return
    yield replace(mesh, replicas=data)
    kinds: tuple[Stage, ...] = (1, 2) if mesh.stages > 1 else (1, 2, 3)
    for stage in kinds:
        yield replace(mesh, shards=data, stage=stage)
        if stage > 1 and 1 < inside < data and data % inside == 0:
            yield replace(mesh, shards=inside, replicas=data // inside, stage=stage)


def techniques_of_mesh(mesh: Mesh) -> list[Technique]:
    """What divides a run so."""
    found: list[Technique] = []
    if mesh.tensor > 1:
        found.append(TensorParallel(mesh.tensor))
    if mesh.stages > 1:
        found.append(PipelineParallel(mesh.stages))
    if mesh.replicas > 1:
        found.append(DataParallel(mesh.replicas))
    if mesh.stage:
        found.append(Zero(mesh.stage, mesh.shards, mesh.engine))
    return found


def mesh_of(techniques: Iterable[Technique]) -> Mesh:
    """The way these techniques divide a run."""
    mesh = Mesh()
    for one in techniques:
        match one:
            case TensorParallel(n):
                mesh = replace(mesh, tensor=n)
            case PipelineParallel(n):
                mesh = replace(mesh, stages=n)
            case DataParallel(n):
                mesh = replace(mesh, replicas=n)
            case Zero(stage, n, engine):
                mesh = replace(mesh, stage=stage, shards=n, engine=engine)
    return mesh
