"""Optimizer states off the device (ZeRO-Offload and ZeRO-Infinity on one device: arXiv:2101.06840, 2104.07857).

Gradients go to the host as they appear, are summed, clipped and stepped there by the processor, and the weights come
back: the device holds neither gradients nor states. On ``disk`` states, or sums, are pages of a file that are in the host's
memory only while they are used. Exact: the same update of the same sum. Declines to step while the next forward runs,
which is not.

Of ranks that share weights (ZeRO-2 and ZeRO-3) the shards are on the host, their gradients and states with them, and the
device has what is gathered: FSDP2's own offload.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..layout import Layout
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

AT_ONCE = 2**25  # elements whose weights go back while the next are stepped: 64 to 128 MiB, some milliseconds of a link


def host_bytes(layout: Layout) -> int:
    """Of a GPU's host between steps, of one device's: states that are there, each trained weight's twin, and the sum of its
    gradients, with two buffers of each size that gradients come by. Shards that are there anyway need no twins."""
    trained, ranks = [g for g in layout.groups if g.trainable], layout.mesh.sharing
    tensors = [(layout.update.tensors(g.piece(ranks)), g.count) for g in trained]
    states = sum(sum(each) * count for each, count in tensors) if layout.states_on == "host" else 0
    weights = sum(g.shard_bytes(ranks) for g in trained)
    if layout.mesh.devices > 1:  # DeepSpeed's masters are there beside its gradients
        each = 2 if layout.mesh.engine == "deepspeed" else 1
        return states + weights * each * (layout.gradients_on == "host")
    by_size = {(g.numel, g.bits) for g in trained} if layout.gradients_on != "device" else set()
    buffers = 2 * sum(numel * bits // 8 for numel, bits in by_size)
    return states + buffers + weights * {"device": 0, "disk": 1, "host": 2}[layout.gradients_on]


@dataclass(frozen=True, slots=True)
class OptimizerOffload(Technique):
    name = "optimizer_offload"
    exact = True

    place: Literal["host", "disk"] = "host"
    """Where the states are."""
    gradients: Literal["device", "host", "disk"] = "host"
    """Where gradients are summed: elsewhere than on the device they are clipped and stepped by on the host."""

    def rewrite(self, layout: Layout) -> Layout:
        if self.place == "host" and self.gradients == "device":
            raise Unsuitable("states on the host are stepped there, with gradients that are there")
        if layout.mesh.engine == "deepspeed":
            raise Unsuitable("DeepSpeed offloads as its own file says: offload_optimizer there")
        layout = replace(layout, states_on=self.place, gradients_on=self.gradients)
        return layout if self.gradients == "device" or layout.mesh.devices == 1 else self._of_shards(layout)

    def _of_shards(self, layout: Layout) -> Layout:
        mesh = layout.mesh
        if mesh.stage < 2 or mesh.stages > 1 or mesh.tensor > 1:
            raise Unsuitable(
                "of several devices those that share weights (zero2, zero3) leave gradients to the host, no others"
            )
        if self.gradients == "disk":
            raise Unsuitable("several ranks sum their gradients in memory")
        groups = tuple(g if g.is_whole else replace(g, place="host") for g in layout.groups)
        return replace(layout, groups=groups)

    def apply(self, run: "Run") -> None:
        import torch

        from ..nn.host_step import Elsewhere, pinned
        from ..nn.mapped_states import Mapped
        from ..scratch import Scratch

        scratch = Scratch() if "disk" in (self.place, self.gradients) else None
        if self.gradients != "device" and run.world.size > 1:
            run.at_rest = torch.device("cpu")
        elif self.gradients != "device":
            sums = scratch.mapped if scratch and self.gradients == "disk" else pinned
            run.optimizer.home, run.optimizer.at_once = Elsewhere(run.device, sums), AT_ONCE
        if scratch and self.place == "disk":
            run.optimizer.rule = Mapped(run.optimizer.rule, scratch)

    def setting(self) -> str:
        return self.place

    def turned_on(self) -> tuple[tuple[str, str], ...]:
        sums = (("gradients_on_disk", "true"),) if self.gradients == "disk" else ()
        return ((self.name, self.place), *sums)

    def describe(self) -> str:
        said = {"host": "the host", "disk": "disk", "device": ""}
        sums = said[self.gradients] and f", gradients are summed on {said[self.gradients]} as they appear"
        return f"optimizer states are on {said[self.place]}{sums}"

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        held = sum(t.nbytes for p in run.model.parameters() for t in run.optimizer.held(p) if t.dim())
        kept = [name for name, p in run.model.named_parameters() if p.grad is not None and self.gradients != "device"]
        if held or kept:
            raise NotAsPlanned(
                f"optimizer_offload: {held} bytes of states are on the device, gradients too: {kept[:3]}"
            )
