"""Seconds of one optimizer step, from operation counts and the device's rates: what the search compares plans by.

Counts matrix products (forward, both backward products where the weight trains, recomputation), attention, the head on
labelled tokens, low-rank updates, quantised weights brought back, the optimizer's memory traffic and a fixed cost per
micro-batch; over several devices also what they send each other and wait for (``traffic``). Good for ranking plans;
absolute values are as good as the rates.
"""

from dataclasses import dataclass

from .batches import Work
from .layout import Layout
from .spec import HardwareSpec
from .traffic import with_traffic


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What is reached of the peak matmul rate by large products, rows a product needs to reach half of that, the rate
    of attention against it, the time of one operator call, and passes over memory per saved byte."""

    peak_share: float
    half_rows: float
    attention_share: float
    call_s: float
    passes: float


# CPU: 2 cores of a Zen 4 server, torch 2.13, 2026-11-29: products at 0.9 of the 2,048-cubed rate, attention at 0.25 of
# it, about 60 calls a block. CUDA: the usual 0.6 of the data sheet; not measured by us.
_ON = {"cpu": Efficiency(0.9, 24, 0.25, 8e-6, 6), "cuda": Efficiency(0.6, 256, 0.4, 6e-6, 4)}
_MULTIPLIED = ("linear", "transposed", "matrix", "expert")  # roles of tensors that activations are multiplied with
_CALLS_PER_BLOCK = 120  # forward and backward
# A quantised weight is brought back in chunks: bytes read and written an element by its bits (codes and lookups, fp32
# values scaled in place, the result), and operator calls a chunk.
_DEQUANTISED_BYTES, _DEQUANTISED_CALLS = {4: 25, 8: 15}, 12


def seconds_per_step(layout: Layout, work: Work, hardware: HardwareSpec) -> float:
    """Seconds of one optimizer step with the mean work of the run, of one rank's share of it."""
    mesh = layout.mesh
    busy = _blocks_s(layout, work, hardware) / (mesh.tensor * mesh.stages)
    updated = sum(g.numel * g.count * g.bits // 8 for g in layout.groups if g.trainable) * 7
    shards = mesh.shards if mesh.stage else 1
    update = updated / (shards * mesh.stages) / hardware.bandwidth_bytes_per_s
    if mesh.devices == 1:
        return busy + update
    return with_traffic(busy, layout, work, hardware) + update


def _blocks_s(layout: Layout, work: Work, hardware: HardwareSpec) -> float:
    """Seconds of forward and backward on one device."""
    on = _ON[hardware.kind]
    rows = work.mean_tokens / max(work.mean_steps, 1e-9)
    rate = hardware.flops_per_s(_dtype(layout)) * on.peak_share * rows / (rows + on.half_rows)
    depth = layout.model.num_hidden_layers
    again = layout.checkpointed / depth
    products = _linear_flops(layout, again) * work.mean_tokens + _head_flops(layout, work)
    attention = 2 * layout.model.q_width * work.mean_square * depth * (1 + again + 2.5) / on.attention_share
    # a tensor-parallel rank makes as many calls as a device alone
    calls = work.mean_steps * depth * _CALLS_PER_BLOCK * (1 + again / 2) * on.call_s * layout.mesh.tensor
    moved = on.passes * work.mean_tokens * depth * _elementwise_bytes(layout) * (1 + again / 2)
    traffic = moved / hardware.bandwidth_bytes_per_s
    return (products + attention) / rate + calls + traffic + _dequantising_s(layout, work, hardware)


def _dequantising_s(layout: Layout, work: Work, hardware: HardwareSpec) -> float:
    """Each quantised weight is brought back forward, backward and where its block is computed again."""
    times = work.mean_steps * (2 + layout.checkpointed / layout.model.num_hidden_layers)
    seconds = 0.0
    for g in layout.groups:
        if g.role == "linear" and g.bits in _DEQUANTISED_BYTES:
            chunks = -(-g.numel // layout.dequantised)
            moved = g.numel * _DEQUANTISED_BYTES[g.bits] / hardware.bandwidth_bytes_per_s
            seconds += g.count * (moved + chunks * _DEQUANTISED_CALLS * _ON[hardware.kind].call_s)
    return seconds * times


def _dtype(layout: Layout) -> str:
    return "float32" if layout.graph[0] == "fp32" else "bfloat16"


def _linear_flops(layout: Layout, again: float) -> float:
    """Floating-point operations of the blocks' linears for one token."""
    linears = [g for g in layout.groups if g.role in _MULTIPLIED and g.name.startswith("block.")]
    base = sum(g.numel * g.count * _met_share(layout, g.role) for g in linears if "lora_" not in g.name)
    base *= layout.mesh.tensor  # a rank's groups are its part
    adapters = sum(g.numel * g.count for g in linears if "lora_" in g.name)
    trains = any(g.trainable for g in linears if "lora_" not in g.name)
    passes = 2 + trains + again
    # Low-rank products are memory-bound: three times their operation count.
    return 2 * base * passes + 3 * 2 * adapters * (4 + again)


def _met_share(layout: Layout, role: str) -> float:
    """The part of such tensors that one token is multiplied with: of the experts those it is sent to."""
    model = layout.model
    return model.experts_per_token / model.num_experts if role == "expert" and model.num_experts else 1.0


def _head_flops(layout: Layout, work: Work) -> float:
    head = layout.model.hidden_size * layout.model.vocab_size
    rows = work.mean_labelled if layout.loss_chunk else work.mean_tokens
    trains = any(g.trainable for g in layout.groups if g.role in ("head", "embedding"))
    return 2 * head * rows * (2 + trains)


def _elementwise_bytes(layout: Layout) -> float:
    """Bytes of one block's intermediate values for one token."""
    model = layout.model
    inner = model.experts_per_token * model.moe_intermediate_size + model.shared_intermediate_size
    width = 6 * model.hidden_size + 2 * model.q_width + 2 * model.kv_width + 3 * (inner or model.intermediate_size)
    fused = 1.0 if "fused_ops" in layout.graph else 1.6
    return width * fused * (4 if layout.graph[0] == "fp32" else 2)
