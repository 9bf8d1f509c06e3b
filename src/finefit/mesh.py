"""Mesh: how a run is divided over devices. Degrees only; what each of them means in bytes is ``predict``'s, in seconds
``traffic``'s."""

from dataclasses import dataclass
from typing import Literal

Stage = Literal[0, 1, 2, 3]
Engine = Literal["torch", "deepspeed"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """``shards`` times ``replicas`` ranks have data of their own; each is ``tensor`` times ``stages`` devices."""

    replicas: int = 1
    """Mesh, or groups of shards, that hold the same."""
    shards: int = 1
    """Mesh that optimizer states (stage 1), gradients too (2), weights too (3) are divided among."""
    stage: Stage = 0
    engine: Engine = "torch"
    """Who divides what is sharded."""
    tensor: int = 1
    """Devices that share every weight matrix, and the rows between them (sequence parallel)."""
    stages: int = 1
    """Devices with some of the blocks each: a pipeline."""

    @property
    def data(self) -> int:
        return self.replicas * self.shards

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.stages

    def says(self) -> str:
        """``8 tensor parallel x 16 sharded``; ``one device`` where nothing is divided."""
        parts = [
            (self.tensor, f"{self.tensor} tensor parallel"),
            (self.stages, f"{self.stages} pipeline stages"),
            (self.shards, f"{self.shards} sharded (ZeRO-{self.stage})"),
            (self.replicas, f"{self.replicas} data parallel"),
        ]
        return " x ".join(text for degree, text in parts if degree > 1) or "one device"
