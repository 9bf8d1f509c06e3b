"""Inputs of checkpointed blocks on paper: which are on the device when, and what computing again costs. Torch-free.

A traced block keeps its input from its forward to the end of its backward. Where inputs are elsewhere meanwhile, or come
from that of another block, a pass through a block has so many inputs more or less than traced: before it, if more, after
it, if less. How large an input is the trace says.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import ceil, prod
from typing import NamedTuple

from .batches import Work
from .coefficients import evaluation_is_traced, sections_for
from .layout import Layout
from .sections import Section
from .spec import HardwareSpec

Blocks = list[tuple[int, str, int]]  # number of the traced block, kind of graph, how many


class Pass(NamedTuple):
    section: str
    kind: str
    """Of the graph."""
    times: int
    more: int = 0
    """Inputs that are there beside those traced; so many fewer afterwards if less than zero."""
    returned: int = 0
    """1 where the block's own input came back and did not stay: no activation, but temporary."""


WRITTEN_AT_ONCE = 2  # pinned buffers on their way to the disk
_BLOCK = "forward 1"  # any block of the checkpointed step: it ends with one input more


def forward(layout: Layout, blocks: Blocks) -> Iterator[Pass]:
    yield from _passes("forward", layout, blocks, 1)


def backward(layout: Layout, blocks: Blocks) -> Iterator[Pass]:
    yield from _passes("backward", layout, blocks, -1)


def after(layout: Layout) -> int:
    """Inputs less after the forward: the first block's is held by who called the blocks."""
    return -1 if layout.offloaded and _is_held(layout) else 0


def _passes(way: str, layout: Layout, blocks: Blocks, order: int) -> Iterator[Pass]:
    if not layout.offloaded and layout.nested == 1:
        yield from (Pass(f"{way} {number}", kind, times) for number, kind, times in blocks[::order])
        return
    each = [(number, kind) for number, kind, times in blocks for _ in range(times)]
    of_block = _forward if way == "forward" else _backward
    passes = [Pass(f"{way} {number}", kind, 1, *(of_block(layout, i) if kind != "plain" else ()))
              for i, (number, kind) in enumerate(each)]  # fmt: skip
    for one, alike in groupby(passes[::order]):
        yield one._replace(times=len(list(alike)))


def _forward(layout: Layout, i: int) -> tuple[int, int]:
    """What a pass has ``more`` and ``returned``, through the checkpointed block ``i``."""
    leaves = not (i == 0 and _is_held(layout)) if layout.offloaded else i % layout.nested > 0
    return -leaves, 0


def _backward(layout: Layout, i: int) -> tuple[int, int]:
    """The same of a backward pass."""
    last = layout.checkpointed - 1
    if layout.offloaded:
        return (i == last) + (i > 0), 1  # its own, where nobody asked for it before; the next
    place = i % layout.nested
    is_last = i == last or place == layout.nested - 1  # the group's first backward brings all inputs but the kept one
    return place if is_last else 0, int(place > 0)


def changed(section: Section, one: Pass, n_bytes: int) -> Section:
    """The section as this pass has it, with inputs of so many bytes."""
    if one.more < 0:
        return Section(_plus(section.end, "activation", one.more * n_bytes), section.top, section.top_bytes)
    ahead = one.more * n_bytes
    end = _plus(_plus(section.end, "activation", one.returned * n_bytes), "temporary", ahead - one.returned * n_bytes)
    return Section(end, _plus(section.top, "temporary", ahead), section.top_bytes + ahead)


def _plus(parts: Mapping[str, int], component: str, n_bytes: int) -> dict[str, int]:
    return {**parts, component: parts.get(component, 0) + n_bytes}


def input_bytes(layout: Layout, tokens: float) -> int:
    """Of one checkpointed block's input, as the trace has it: all that grows with the tokens."""
    sizes: Mapping[str, float] = {**layout.model.symbols(), "T": tokens, "U": tokens / layout.mesh.tensor}
    return round(sum(c * prod(sizes[s] for s in word.split("*")) for word, c in _input(layout).items()))


def _input(layout: Layout) -> dict[str, float]:
    sections = sections_for(layout, "checkpointed")
    kept = next(s for s in sections if s["name"] == _BLOCK)["end"]["activation"]
    return {word: c for word, c in kept.items() if {"T", "U"} & set(word.split("*"))}


def _is_held(layout: Layout) -> bool:
    """Whether the first block's input stays with its caller until the last block is through; so it is if unknown."""
    if not evaluation_is_traced(layout):
        return True
    ends = {s["name"]: s["end"] for s in sections_for(layout, "eval")}
    return set(_input(layout)) <= set(ends.get("eval 0", {}).get("temporary", {}))


def on_host(layout: Layout) -> int:
    """Bytes of pinned buffers beside a CUDA device; each takes a power of two (c10 CachingHostAllocator)."""
    if not layout.offloaded:
        return 0
    buffers = layout.checkpointed if layout.offloaded == "host" else WRITTEN_AT_ONCE
    return int(buffers * 2 ** (input_bytes(layout, layout.micro.tokens) - 1).bit_length())


def offloading_s(layout: Layout, work: Work, hardware: HardwareSpec, busy_s: float) -> float:
    """Seconds of a step that computing does not hide: forward hides the way out, backward the way back but the first."""
    if not layout.offloaded:
        return 0.0
    rate = hardware.offload_bytes_per_s(layout.offloaded) or hardware.disk_bytes_per_s  # a link nobody knows
    one_way = layout.checkpointed * input_bytes(layout, work.mean_tokens) / rate
    forward_s = busy_s / (3 + again(layout).rest)
    exposed = max(one_way - forward_s, 0.0) + max(one_way - (busy_s - forward_s), 0.0)
    return exposed + one_way / layout.checkpointed


@dataclass(frozen=True, slots=True)
class Again:
    """Forwards made again, in units of one of the whole model: of products, of attention, of all that is between."""

    products: float
    attention: float
    rest: float


def again(layout: Layout) -> Again:
    """Of one step."""
    share = layout.checkpointed / layout.model.num_hidden_layers
    if layout.recomputed == "selective":
        return Again(0, 0, share)
    if layout.recomputed == "checkpointed":
        times = share * (1 + _twice(layout))
        return Again(times, times, times)
    half = _attention_share(layout) if layout.recomputed == "attention" else 1 - _attention_share(layout)
    return Again(share * half, share * (layout.recomputed == "attention"), share * half)


def _twice(layout: Layout) -> float:
    """The part of the checkpointed blocks that run a third time."""
    k = layout.checkpointed
    return (k - ceil(k / layout.nested)) / k if k else 0.0


def _attention_share(layout: Layout) -> float:
    """Of a block's products."""
    model = layout.model
    inner = model.experts_per_token * model.moe_intermediate_size + model.shared_intermediate_size
    attention = 2 * model.q_width + 2 * model.kv_width
    return attention / (attention + 3 * (inner or model.intermediate_size))
