"""Optimizer states off the device (ZeRO-Offload and ZeRO-Infinity on one device: arXiv:2101.06840, 2104.07857).

``host``: gradients go to the host as they appear, are summed, clipped and stepped there by the processor, and the weights
come back: the device holds neither gradients nor states. ``disk``: states are pages of a file that are in the host's memory
only while their parameter is stepped; with a GPU gradients go to the host as well. Both are exact: the same update of the
same sum. Declines to step while the next forward runs, which is not.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..layout import Layout
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

AT_ONCE = 2**25  # elements whose weights go back while the next are stepped: 64 to 128 MiB, some milliseconds of a link


@dataclass(frozen=True, slots=True)
class OptimizerOffload(Technique):
    name = "optimizer_offload"
    exact = True

    place: Literal["host", "disk"] = "host"
    """Where the states are."""
    steps: Literal["device", "host"] = "host"
    """Where the update is made; on a CPU the two are one."""

    def rewrite(self, layout: Layout) -> Layout:
        if self.place == "host" and self.steps == "device":
            raise Unsuitable("states on the host are stepped there")
        return replace(layout, states_on=self.place, steps_on=self.steps)

    def apply(self, run: "Run") -> None:
        from ..nn.host_step import OnHost
        from ..nn.mapped_states import Mapped
        from ..nn.scratch import Scratch

        if self.steps == "host":
            run.optimizer.home, run.optimizer.at_once = OnHost(run.device), AT_ONCE
        if self.place == "disk":
            run.optimizer.rule = Mapped(run.optimizer.rule, Scratch())

    def setting(self) -> str:
        return self.place

    def describe(self) -> str:
        where = "the host" if self.place == "host" else "disk"
        stepped = ", gradients go to the host as they appear and the update is made there" * (self.steps == "host")
        return f"optimizer states are on {where}{stepped}"

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        held = sum(t.nbytes for p in run.model.parameters() for t in run.optimizer.held(p) if t.dim())
        if held:
            raise NotAsPlanned(f"optimizer_offload: {held} bytes of states are on the device")
