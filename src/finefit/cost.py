"""Seconds of one optimizer step, from operation counts and the device's rates: what the search compares plans by.

Counts matrix products (forward, both backward products where the weight trains, recomputation), attention, the head and
the loss on the rows that meet them, low-rank updates, quantised weights brought back, what each micro-batch moves of the
weights and their gradients, the optimizer's memory traffic and a fixed cost per micro-batch; over several devices also what they send each other and wait for (``traffic``). Good for
ranking plans; absolute values are as good as the rates.
"""

from dataclasses import dataclass

from . import recompute
from .batches import Work
from .layout import Layout
from .spec import HardwareSpec
from .traffic import shards_brought, with_traffic
from .updating import OptimizerKind


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What one kind of device makes of its two rates, of products and of memory."""

    peak_share: float
    """What large products reach of the peak rate."""
    half_rows: float
    """Rows a product needs to reach half of that."""
    attention_share: float
    """What attention's products reach of what the others do."""
    score_bytes: float
    """Memory traffic of one attention score, forward and backward; 0 where the scores never leave the chip."""
    rows_s: float
    """Time that calls take for each 128 rows attention works on at once, forward and backward, whatever their keys."""
    call_s: float
    """Time of one operator call."""
    passes: float
    """Passes over memory per byte of a block's intermediate values, forward and backward."""
    low_rank_passes: float
    """The same per byte of what goes into and comes out of a low-rank product."""
    logit_bytes: tuple[float, float]
    """Traffic of the loss per logit, in units of a 2-byte element's: in chunks that stay in cache or are reused, and
    whole, where on a CPU each copy is of fresh pages."""
    fresh_bytes: float
    """Traffic that the first touch of a byte costs beside it, where memory comes fresh from the system."""


# CPU: from a profile of single operators within the steps of 12 plans of a 135M model on 2 cores with AMX (torch 2.13,
# 2026-11-30): a score takes 72 bytes' time at the rate of a copy, a logit 53 in a chunk and 520 whole. CUDA: the usual
# 0.6 of the data sheet and counts of reads and writes; not measured by us. A fresh page: 113 MB were filled at 1.9 GB/s
# where a copy moves 22.7 (there).
_ON = {
    "cpu": Efficiency(0.9, 24, 1.0, 72, 2.5e-3, 8e-6, 12, 12, (53, 520), 11),
    "cuda": Efficiency(0.6, 256, 0.4, 0, 0, 6e-6, 4, 4, (34, 42), 0),
}
# Bytes of one allocation that the C library always asks the system for (mallopt(3), M_MMAP_THRESHOLD).
_FRESH_FROM = 2**25
_MULTIPLIED = ("linear", "transposed", "matrix", "expert")  # roles of tensors that activations are multiplied with
# A processor's memory beside a GPU, that a step on the host moves: a guess, two DDR4 channels. A machine of several has as
# many more: torchtune's 70B with all of it on the host of eight (1,568 tokens/s) are 1,379 by that.
_HOST_BYTES_PER_S = 20e9
_QUERY_ROWS = 128  # that attention on a CPU works on at once (nn.attention)
_CALLS_PER_BLOCK = 120  # forward and backward
_STEP_CALLS = 8  # for each tensor that is stepped in backward: its norm, whether it is finite, its update
# A quantised weight is brought back in chunks: bytes read and written an element by its bits (codes and lookups, fp32
# values scaled in place, the result), and operator calls a chunk.
_DEQUANTISED_BYTES, _DEQUANTISED_CALLS = {2: 22, 3: 33, 4: 25, 8: 15}, 12


# Bytes an element that an update moves, or takes the time of. CPU: of the processor time beside fused AdamW's, whose 28
# bytes memory alone sets (benchmarks/results/optimizers-cpu.json), half on each of two cores, but of lookups, which torch
# runs on one; no time of both cores measured. CUDA: reads and writes of the operators, each a pass; not measured.
_UPDATED: dict[OptimizerKind, dict[str, float]] = {
    "adamw": {"cpu": 75, "cuda": 64}, "adamw_8bit": {"cpu": 140, "cuda": 176}, "adamw_4bit": {"cpu": 120, "cuda": 178},
    "lion": {"cpu": 28, "cuda": 44}, "lion_8bit": {"cpu": 66, "cuda": 104}, "sgd": {"cpu": 14, "cuda": 12},
    "adafactor": {"cpu": 42, "cuda": 80}, "apollo": {"cpu": 115, "cuda": 60}, "apollo_mini": {"cpu": 42, "cuda": 32},
}  # fmt: skip
_BY_CHANCE = {"cpu": 30, "cuda": 180}  # more, where weights in bf16 are rounded so


def seconds_per_step(layout: Layout, work: Work, hardware: HardwareSpec) -> float:
    """Seconds of one optimizer step with the mean work of the run, of one rank's share of it."""
    mesh = layout.mesh
    busy = _blocks_s(layout, work, hardware) / (mesh.tensor * mesh.context * mesh.stages)
    busy += recompute.offloading_s(layout, work, hardware, busy)
    busy = _streaming_s(busy, layout, work, hardware) if layout.arena else busy
    divided = mesh.sharing * mesh.stages
    trained = sum(g.numel * g.count * g.bits // 8 for g in layout.groups if g.trainable) / divided
    if layout.gradients_on != "device":  # they go as they come
        brought = shards_brought(layout, work)
        busy = max(
            busy,
            work.mean_steps * trained / hardware.offload_bytes_per_s(layout.gradients_on),
            brought / hardware.offload_bytes_per_s("host"),
        )
    if mesh.devices > 1:
        busy = with_traffic(busy, layout, work, hardware)
    return busy + _update_s(layout, trained, divided, hardware)


def _update_s(layout: Layout, trained: float, divided: int, hardware: HardwareSpec) -> float:
    """Seconds of the update of ``trained`` bytes of weights, on one of ``divided`` devices."""
    if layout.gradients_on == "device" or hardware.kind == "cpu":
        seconds = _update_bytes(layout, hardware.kind) / divided / hardware.bandwidth_bytes_per_s
    else:  # the weights go back while the next are stepped, each device's by its share of the host
        moved = _update_bytes(layout, "cpu") / divided
        seconds = max(moved / _HOST_BYTES_PER_S, trained / hardware.offload_bytes_per_s("host"))
    if layout.steps_in_backward:
        seconds += sum(g.count for g in layout.groups if g.trainable) * _STEP_CALLS * _ON[hardware.kind].call_s
    if layout.states_on == "disk":
        kept = sum(sum(layout.update.tensors(g.piece())) * g.count for g in layout.groups if g.trainable)
        seconds += 2 * kept / divided / hardware.disk_bytes_per_s
    return seconds


def _update_bytes(layout: Layout, kind: str) -> float:
    """Memory traffic of the optimizer's step: fused AdamW reads four tensors of the weight's size and writes three."""
    update = layout.update
    trained = [(g.numel * g.count, g.bits // 8) for g in layout.groups if g.trainable]
    if update.is_fused:
        return sum(elements * width for elements, width in trained) * 7
    each = _UPDATED[update.kind][kind] + (_BY_CHANCE[kind] if update.rounding == "stochastic" else 0)
    return each * sum(elements for elements, _ in trained)


def _blocks_s(layout: Layout, work: Work, hardware: HardwareSpec) -> float:
    """Seconds of forward and backward on one device."""
    on = _ON[hardware.kind]
    among = layout.mesh.context
    rows = work.mean_tokens / max(work.mean_steps, 1e-9) / among
    rate = hardware.flops_per_s(_dtype(layout)) * on.peak_share * rows / (rows + on.half_rows)
    depth = layout.model.num_hidden_layers
    made_again = recompute.again(layout)
    again, attended = made_again.rest, made_again.attention
    slower = hardware.flops_per_s(_dtype(layout)) / hardware.flops_per_s("float32")
    products = _linear_flops(layout, made_again.products, slower) * work.mean_tokens + _head_flops(layout, work, slower)
    attention = 2 * layout.model.q_width * work.mean_square * depth * (1 + attended + 2.5) / on.attention_share
    scores = layout.model.num_attention_heads * work.mean_square * depth * (1 + attended / 3) * on.score_bytes
    # a rank that has a part of the heads or of the tokens makes as many calls as a device alone
    calls = work.mean_steps * depth * _CALLS_PER_BLOCK * (1 + again / 2) * on.call_s * layout.mesh.tensor * among
    calls += work.mean_tokens / _QUERY_ROWS * among * depth * (1 + attended / 3) * on.rows_s
    moved = on.passes * work.mean_tokens * depth * _elementwise_bytes(layout) * (1 + again / 2)
    moved += on.low_rank_passes * work.mean_tokens * _low_rank_bytes(layout) * (1 + again / 4)
    moved += (scores + _loss_bytes(layout, work, on)) * layout.element_bytes / 2
    moved += _weight_bytes(layout, work, on, made_again.products)
    traffic = moved / hardware.bandwidth_bytes_per_s
    return (products + attention) / rate + calls + traffic + _dequantising_s(layout, work, hardware)


def _dequantising_s(layout: Layout, work: Work, hardware: HardwareSpec) -> float:
    """Each quantised weight is brought back forward, backward and where its block is computed again."""
    times = work.mean_steps * (2 + recompute.again(layout).rest)
    seconds = 0.0
    for g in layout.groups:
        if g.role == "linear" and g.bits in _DEQUANTISED_BYTES:
            chunks = -(-g.numel // layout.dequantised)
            moved = g.numel * _DEQUANTISED_BYTES[g.bits] / hardware.bandwidth_bytes_per_s
            seconds += g.count * (moved + chunks * _DEQUANTISED_CALLS * _ON[hardware.kind].call_s)
    return seconds * times * layout.mesh.context


def _dtype(layout: Layout) -> str:
    return "float32" if layout.graph[0] == "fp32" else layout.half


def _linear_flops(layout: Layout, again: float, slower: float) -> float:
    """Floating-point operations of the blocks' linears for one token, those of islands for so many times as many."""
    linears = [g for g in layout.groups if g.role in _MULTIPLIED and g.name.startswith("block.")]
    base = sum(
        g.numel * g.count * _met_share(layout, g.role) * (slower if g.is_island else 1.0)
        for g in linears if "lora_" not in g.name
    )  # fmt: skip
    base *= layout.mesh.tensor  # a rank's groups are its part
    trains = any(g.trainable for g in linears if "lora_" not in g.name)
    return 2 * base * (2 + trains + again)


def _met_share(layout: Layout, role: str) -> float:
    """The part of such tensors that one token is multiplied with: of the experts those it is sent to."""
    model = layout.model
    return model.experts_per_token / model.num_experts if role == "expert" and model.num_experts else 1.0


def _low_rank_bytes(layout: Layout) -> float:
    """Bytes of one token going into and coming out of all low-rank products, whose arithmetic is nothing beside them."""
    adapters = sum(g.numel * g.count for g in layout.groups if "lora_" in g.name)
    return adapters * layout.mesh.tensor / max(layout.rank, 1) * layout.element_bytes


def _rows(layout: Layout, work: Work) -> float:
    """Rows that meet the head and the loss."""
    return work.mean_labelled if layout.loss_chunk else work.mean_tokens


def _head_flops(layout: Layout, work: Work, slower: float) -> float:
    """The same of the head for a whole step."""
    head = layout.model.hidden_size * layout.model.vocab_size
    held = [g for g in layout.groups if g.role in ("head", "embedding")]
    times = slower if any(g.is_island for g in held) else 1.0
    return 2 * head * _rows(layout, work) * (2 + any(g.trainable for g in held)) * times


def _chunks(layout: Layout, work: Work) -> float:
    """Chunks of the loss in a step."""
    chunks = _rows(layout, work) / layout.loss_chunk if layout.loss_chunk else 0.0
    return max(chunks, work.mean_steps)


def _loss_bytes(layout: Layout, work: Work, on: Efficiency) -> float:
    """Traffic of the loss, and of the head's weight, which each chunk reads forward and backward."""
    model = layout.model
    weight = 2 * 2 * model.hidden_size * model.vocab_size * _chunks(layout, work)
    return _rows(layout, work) * model.vocab_size * on.logit_bytes[not layout.loss_chunk] + weight


def _weight_bytes(layout: Layout, work: Work, on: Efficiency, again: float) -> float:
    """What a step moves of weights that train and of their gradients, beside the update.

    Each micro-batch reads them, or casts them to the type of the products, writes a gradient and brings it into the
    type of the weight; from the second on it is added to the sum. An embedding's gradient is all zeros first; a head's
    is added up over the chunks of the loss, and where the two are one tensor over both of its uses.
    """
    element, tied = layout.element_bytes, layout.model.tie_word_embeddings
    later = max(work.mean_steps - 1, 0.0)
    total = 0.0
    for g in layout.groups:
        if not g.trainable:
            continue
        width = g.bits // 8
        new = {n: n * (1 + on.fresh_bytes * (g.numel * n >= _FRESH_FROM)) for n in (element, width)}  # written first
        cast = width + new[element] if width != element else 0.0
        read, added = 2 * element + cast, 3 * width
        if g.role in ("embedding", "head"):
            each = read + new[width] * (1 + tied) + (added + 2 * width) * tied
            chunk = (new[element] + element + 2 * width) * (g.role == "head" or tied)
        else:
            each = read + again * (cast or element) + new[element] + (element + new[width] if cast else 0.0)
            chunk = 0.0
        moved = work.mean_steps * each + later * added + _chunks(layout, work) * chunk
        total += g.numel * g.count * moved
    return total * layout.mesh.tensor * layout.mesh.context  # a rank's groups are its part; all of a context have all


def _elementwise_bytes(layout: Layout) -> float:
    """Bytes of one block's intermediate values for one token."""
    model = layout.model
    inner = model.experts_per_token * model.moe_intermediate_size + model.shared_intermediate_size
    width = 6 * model.hidden_size + 2 * model.q_width + 2 * model.kv_width + 3 * (inner or model.intermediate_size)
    fused = 1.0 if "fused_ops" in layout.graph else 1.6
    return width * fused * layout.element_bytes


def _streaming_s(busy: float, layout: Layout, work: Work, hardware: HardwareSpec) -> float:
    """Forward and backward where weights are streamed: every micro-batch brings the blocks' once in each of the two, beside
    the products; nothing hides the first block, the head, and the rows of the embedding."""
    gone = [(g, g.numel * g.count * g.bits / 8) for g in layout.groups if g.place]
    rate, depth = hardware.offload_bytes_per_s(gone[0][0].place), layout.model.num_hidden_layers
    blocks = sum(n_bytes for g, n_bytes in gone if g.kinds)
    tied = layout.model.tie_word_embeddings
    alone = sum(n_bytes for g, n_bytes in gone if not g.kinds and (tied or g.role == "head")) + blocks / depth
    each, steps = busy / max(work.mean_steps, 1e-9), work.mean_steps
    forward = each / (2 + layout.checkpointed / depth)
    hidden = max(forward, blocks / rate) + max(each - forward, blocks / rate)
    rows = work.mean_tokens * layout.model.hidden_size * layout.element_bytes
    return steps * (hidden + alone / rate) + rows / rate
