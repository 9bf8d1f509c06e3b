"""Mesh: how a run is divided over devices. Degrees only; what each of them means in bytes is ``predict``'s, in seconds
``traffic``'s."""

import itertools
from dataclasses import dataclass, replace
from typing import Literal, cast

Stage = Literal[0, 1, 2, 3]
Schedule = Literal["gpipe", "1f1b", "interleaved"]
Engine = Literal["torch", "deepspeed"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """``shards`` times ``replicas`` ranks have data of their own; each is ``context`` times ``tensor`` times ``stages`` devices."""

    replicas: int = 1
    """Mesh, or groups of shards, that hold the same."""
    shards: int = 1
    """Mesh that optimizer states (stage 1), gradients too (2), weights too (3) are divided among."""
    stage: Stage = 0
    tensor: int = 1
    """Devices that share every weight matrix, and the rows between them (sequence parallel)."""
    stages: int = 1
    """Devices with some of the blocks each: a pipeline."""
    schedule: Schedule = "1f1b"
    """The order of a pipeline's forwards and backwards."""
    stages_a_rank: int = 1
    """Stages that each device of a pipeline has, every ``stages``-th of all: more than one where they are interleaved."""
    context: int = 1
    """Devices that share the tokens of every micro-batch."""
    engine: Engine = "torch"
    """Who divides what is sharded. DeepSpeed lays it out flat."""

    @property
    def data(self) -> int:
        return self.replicas * self.shards

    @property
    def devices(self) -> int:
        return self.data * self.context * self.tensor * self.stages

    @property
    def order(self) -> str:
        """A pipeline's, as the user says it: ``1f1b``, ``gpipe``, ``interleaved2``."""
        return self.schedule + (str(self.stages_a_rank) if self.stages_a_rank > 1 else "")

    def ordered(self, order: str) -> "Mesh":
        """The same with such an order, where there is a pipeline."""
        schedule, _, count = order.partition("interleaved")
        if self.stages == 1:
            return self
        name = cast(Schedule, schedule or "interleaved")
        return replace(self, schedule=name, stages_a_rank=int(count or 1))

    @property
    def sharing(self) -> int:
        """Ranks that states are divided among: those that share tokens hold the same weights, too."""
        return self.shards * self.context if self.stage else 1

    @property
    def copies(self) -> int:
        """Ranks, or groups of those, that hold the same."""
        return self.data * self.context // self.sharing

    def slices(self, depth: int) -> list[range]:
        """The blocks of each stage, of all devices, in order; the first ones have one more where they do not divide."""
        count = self.stages * self.stages_a_rank
        each, left = divmod(depth, count)
        starts = [i * each + min(i, left) for i in range(count + 1)]
        return [range(a, b) for a, b in itertools.pairwise(starts)]

    def shares(self, depth: int) -> list[list[int]]:
        """The blocks of each device of a pipeline."""
        slices = self.slices(depth)
        return [[i for blocks in slices[rank :: self.stages] for i in blocks] for rank in range(self.stages)]

    def turns(self, micro_steps: int) -> int:
        """Micro-batches that a pipeline takes for so many: interleaved ones come in rounds, each of as many."""
        while self.schedule == "interleaved" and micro_steps % max(1, micro_steps // self.stages):
            micro_steps += 1
        return micro_steps

    def says(self) -> str:
        """``8 tensor parallel x 16 sharded``; ``one device`` where nothing is divided."""
        alone = f" (ZeRO-{self.stage})" if self.stage and self.shards == 1 else ""
        parts = [
            (self.tensor, f"{self.tensor} tensor parallel"),
            (self.stages, f"{self.stages} pipeline stages{self._order_says()}"),
            (self.shards, f"{self.shards} sharded (ZeRO-{self.stage})"),
            (self.context, f"{self.context} context parallel{alone}"),
            (self.replicas, f"{self.replicas} data parallel"),
        ]
        return " x ".join(text for degree, text in parts if degree > 1) or "one device"

    def _order_says(self) -> str:
        return {"1f1b": "", "gpipe": " (GPipe)"}.get(self.schedule, f" (each of {self.stages_a_rank}, interleaved)")
