"""Ways to divide a run over the devices there are: data, sharded, tensor and pipeline parallel, and their products.

Tensor parallel stays inside a machine; shards are all data-parallel ranks, or those of a machine with replicas across
machines (hybrid). Every device is used and every data-parallel rank has at least one example of the global batch. Declines
context and expert parallel. Torch-free.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .hardware import HardwareSpec
from .ranks import Ranks, Stage
from .techniques import DataParallel, PipelineParallel, Technique, TensorParallel, Zero
from .traffic import per_machine

_MOST_STAGES = 16


def meshes(hardware: HardwareSpec, examples: int) -> Iterator[Ranks]:
    """Each way to use all of the devices for a global batch of so many examples; the simplest first."""
    here = per_machine(hardware)
    for tensor in _divisors(here):
        for stages in _divisors(hardware.count // tensor):
            data = hardware.count // (tensor * stages)
            if stages > _MOST_STAGES or hardware.count % (tensor * stages) or data > examples:
                continue
            yield from _of_data(data, max(here // tensor, 1), Ranks(tensor=tensor, stages=stages))


def _of_data(data: int, inside: int, ranks: Ranks) -> Iterator[Ranks]:
    if data == 1:
        yield ranks
        return
    yield replace(ranks, replicas=data)
    kinds: tuple[Stage, ...] = (1, 2) if ranks.stages > 1 else (1, 2, 3)
    for stage in kinds:
        yield replace(ranks, shards=data, stage=stage)
        if stage > 1 and 1 < inside < data and data % inside == 0:
            yield replace(ranks, shards=inside, replicas=data // inside, stage=stage)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0] if n <= 4096 else [d for d in range(1, 65) if n % d == 0]


def techniques_of_ranks(ranks: Ranks) -> list[Technique]:
    """What divides a run so."""
    found: list[Technique] = []
    if ranks.tensor > 1:
        found.append(TensorParallel(ranks.tensor))
    if ranks.stages > 1:
        found.append(PipelineParallel(ranks.stages))
    if ranks.replicas > 1:
        found.append(DataParallel(ranks.replicas))
    if ranks.stage:
        found.append(Zero(ranks.stage, ranks.shards))
    return found


def ranks_of(techniques: Iterable[Technique]) -> Ranks:
    """The way these techniques divide a run."""
    ranks = Ranks()
    for one in techniques:
        match one:
            case TensorParallel(n):
                ranks = replace(ranks, tensor=n)
            case PipelineParallel(n):
                ranks = replace(ranks, stages=n)
            case DataParallel(n):
                ranks = replace(ranks, replicas=n)
            case Zero(stage, n):
                ranks = replace(ranks, stage=stage, shards=n)
    return ranks
