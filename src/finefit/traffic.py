"""Seconds that several devices add to a step: collectives that compute does not hide, and a pipeline's bubble.

Ring collectives: gathering or scattering ``b`` bytes over a group takes b over the slowest link of the ring, summing twice
that. Inside a machine the link is the devices' own, or the host's where they have none; between machines it is the
machine's network, which all its devices share. Sharded weights are gathered while the block before runs and gradients are
reduced while the next one does, so only what exceeds compute counts, and one block's; tensor and context parallel wait for
every collective. Torch-free.
"""

from .batches import Work
from .layout import Layout
from .mesh import Mesh
from .spec import HardwareSpec

MACHINE = 8  # devices of a machine of which only the number of devices is known
NETWORK = 50e9  # bytes/s out of a machine whose network is not known: 400 Gb/s
_LINK_SHARE = 0.8  # of a link's peak that collectives reach: NCCL's own tests on NVLink and InfiniBand
_COLLECTIVE_S = 20e-6  # one collective's start, by the same tests


def with_traffic(busy_s: float, layout: Layout, work: Work, hardware: HardwareSpec) -> float:
    """Seconds of forward and backward, of which ``busy_s`` are compute on each device, with all waiting."""
    waits = _tensor_s(layout, work, hardware) + _context_s(layout, work, hardware)
    busy = (busy_s + waits) * (1 + bubble(layout.mesh, work.mean_steps))
    sent = _data_s(layout, work, hardware)
    if hardware.kind == "cpu":  # the cores that would compute meanwhile are those that send
        return busy + sent
    return max(busy, sent) + min(busy, sent) / layout.depth


def bubble(mesh: Mesh, micro_steps: float) -> float:
    """Of a pipeline's work, what each device waits beside it: with several stages a device, turns are as much shorter."""
    return (mesh.stages - 1) / (mesh.stages_a_rank * max(micro_steps, 1.0))


def per_machine(hardware: HardwareSpec) -> int:
    """Devices of one machine."""
    return hardware.count // hardware.nodes if hardware.nodes > 1 else min(hardware.count, MACHINE)


def _link(hardware: HardwareSpec) -> float:
    return (hardware.peer_bytes_per_s or hardware.link_bytes_per_s) * _LINK_SHARE


def _network(hardware: HardwareSpec) -> float:
    return (hardware.network_bytes_per_s or NETWORK) * _LINK_SHARE


def _ring_s(n_bytes: float, ranks: int, beside: int, hardware: HardwareSpec) -> float:
    """Each of ``ranks`` gets ``n_bytes`` past it; ``beside`` such rings run at once, their ranks next to each other."""
    if ranks < 2:
        return 0.0
    n_bytes *= (ranks - 1) / ranks
    inside = n_bytes / _link(hardware)
    here = per_machine(hardware)
    if ranks * beside <= here:
        return inside
    return max(inside, n_bytes * min(beside, here) / _network(hardware))


def _tensor_s(layout: Layout, work: Work, hardware: HardwareSpec) -> float:
    """Gathers and scatters of rows: two each a block in forward, as many in backward and where it is computed again; and
    of the embedding and the loss one each way."""
    mesh = layout.mesh
    if mesh.tensor == 1:
        return 0.0
    width = layout.element_bytes
    depth = layout.model.num_hidden_layers
    passes = 4 * (2 * depth + layout.checkpointed + 1) / mesh.stages
    rows = work.mean_tokens * layout.model.hidden_size * width
    return passes * (_ring_s(rows, mesh.tensor, 1, hardware) + _COLLECTIVE_S * work.mean_steps)


def _context_s(layout: Layout, work: Work, hardware: HardwareSpec) -> float:
    """All-to-alls of queries, keys, values and of what attention gives: forward, backward and where it is computed again."""
    ranks, model = layout.mesh.context, layout.model
    if ranks == 1:
        return 0.0
    width = 2 * (model.q_width + max(model.kv_width, ranks * model.head_dim))
    sent = work.mean_tokens / ranks * width * layout.element_bytes
    passes = 2 * model.num_hidden_layers + layout.checkpointed
    return passes * (_ring_s(sent, ranks, 1, hardware) + 4 * _COLLECTIVE_S * work.mean_steps)


def _data_s(layout: Layout, work: Work, hardware: HardwareSpec) -> float:
    """Gradients reduced and weights gathered."""
    mesh = layout.mesh
    if mesh.copies * mesh.sharing == 1:
        return 0.0
    weights, gradients = _held_bytes(layout)
    once, micro_steps = 1.0, max(work.mean_steps, 1.0)
    gathers = {0: 0.0, 1: once, 2: once, 3: 2 * micro_steps}[mesh.stage]
    reductions = micro_steps if mesh.stage >= 2 else 2 * once
    sharded = gathers * (weights if mesh.stage >= 2 else gradients) + reductions * gradients
    if mesh.stage == 0:
        return _ring_s(sharded, mesh.copies, mesh.tensor, hardware)
    copies = 2 * gradients / mesh.sharing
    among = _ring_s(sharded, mesh.sharing, mesh.tensor, hardware)
    return among + _ring_s(copies, mesh.copies, mesh.tensor * mesh.sharing, hardware)


def shards_brought(layout: Layout, work: Work) -> float:
    """Bytes of shards that a step brings to a device from its host: whenever weights are gathered."""
    times = {2: 1.0, 3: 2 * max(work.mean_steps, 1.0)}.get(layout.mesh.stage, 0.0)
    placed = [g for g in layout.groups if g.place == "host"]
    return times * sum(g.shard_bytes(layout.mesh.sharing) for g in placed)


def _held_bytes(layout: Layout) -> tuple[float, float]:
    """Bytes of all weights as they are gathered, and of all gradients, of one stage's device."""
    bf16 = layout.graph[0] == "bf16"
    sizes = [(g.numel * g.count * (min(g.bits, 16) if bf16 else g.bits) / 8, g) for g in layout.groups]
    stages = layout.mesh.stages
    weights = sum(n_bytes for n_bytes, _ in sizes) / stages
    return weights, sum(g.numel * g.count * g.bits / 8 for _, g in sizes if g.trainable) / stages
