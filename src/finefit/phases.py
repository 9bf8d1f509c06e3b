"""What is held beside a run's steps: loading, resuming, saving and merging on the device, and every moment on the host.

Read off our own code. `models.fill_from` makes all parameters first, then copies one tensor of the file at a time into
them; a quantised weight takes, for that moment, what `QuantisedWeight.copy_` does. `adapter.write_tensors` writes
tensor by tensor and `adapter.read_tensors` copies out of the mapped file, so neither holds anything twice. Evaluation
is walked in ``predict``, as the step is. ``merge`` is a process of its own on the host, whatever the device: it holds
pieces of one weight. On a CPU the device *is* the host.

Declines what is not there: data-loader workers and pinned buffers (batches are made where the loop runs).
Pages of mapped files (weights, checkpoints, token shards) are told apart: the system takes them back when it must.
"""

from collections.abc import Mapping
from typing import Literal

from .layout import BITS, Layout, ParamGroup
from .techniques.optimizer_offload import host_bytes
from .techniques.parameter_offload import pinned_bytes

Kind = Literal["cpu", "cuda"]
Bytes = dict[str, int]

MIB = 2**20
# Of a file of weights is mapped at once while it is read; a tensor more where one is larger.
MAPPED_AT_ONCE = 64 * MIB
# Interpreter, torch, transformers, a tokenizer and finefit, without any tensor: resident, 96 MiB of it the libraries'
# own pages. Measured: Python 3.11, torch 2.13 for CPUs, transformers 5.24, 2 threads, Linux, 2026-11-30.
PROGRAM = 388 * MIB
# What a CPU's process has more once steps have run: oneDNN's kernels for the shapes that came, threads' heaps. Measured
# there: 50 to 120 MiB with the 135M model.
WARM = 64 * MIB
# The first with a CUDA device in use: libraries and driver map and copy their kernels. 2,056,600 kB resident by
# pytorch/pytorch#113326 (torch 2.2, CUDA 11.8, lazy loading, RTX 3090); not measured by us yet.
CUDA_PROGRAM = 2008 * MIB
# What `data` and `batches` keep of an example beside the mapped shards: three arrays of 8 bytes (offset, labelled,
# length), and five Python numbers in lists (length, labelled, width, row, its place in a step), 8 + 28 bytes each.
EXAMPLE = 3 * 8 + 5 * 36
_PIECE = 2**22  # elements of a weight that are merged at once: 40 MiB with what they need


def beside(layout: Layout, states: Mapping[str, int], kind: Kind) -> dict[str, Bytes]:
    """Bytes on the device by component while weights are loaded, a run is resumed and a checkpoint is saved; and while
    an adapter is merged."""
    held = {component: n for component, n in states.items() if n and component != "gradient"}
    loading = {"parameter": states["parameter"], "temporary": _in_flight(layout, kind)}
    found = {"load": {c: n for c, n in loading.items() if n}, "resume": held, "save": dict(held)}
    if layout.rank:
        found["merge"] = {"temporary": _merged_at_once(layout)} if kind == "cpu" else {}
    return found


def _in_flight(layout: Layout, kind: Kind) -> int:
    """Beside the parameters while they are given their values, on the device.

    A plain weight is converted on the host on its way to CUDA (a copy that blocks; aten/src/ATen/native/cuda/Copy.cu),
    so only one that is to be quantised is there as the file has it. On a CPU the file's mapping is read in place, and an
    adapter's start is drawn beside it.
    """
    if kind == "cuda":
        return layout.in_flight + (_stored_linear(layout) if layout.in_flight else 0)
    return max(layout.in_flight, _drawn(layout))


def _stored_linear(layout: Layout) -> int:
    """Bytes of a block's largest linear weight as the file has it."""
    return max(p.numel for p in layout.model.linears()) * _stored_bits(layout) // 8


def _stored_bits(layout: Layout) -> int:
    return BITS.get(layout.model.dtype, 32)


def _drawn(layout: Layout) -> int:
    """An adapter's A while it is drawn, in fp32 on the host (`build.reset_adapters`)."""
    return max((_bytes(g) for g in layout.groups if g.name.endswith("lora_A")), default=0)


def rows_at_once(rows: int, columns: int) -> int:
    """Rows of a weight that are merged at once."""
    return min(rows, max(1, _PIECE // columns))


def _merged_at_once(layout: Layout) -> int:
    """Of a piece: the weight and its update in fp32, the sum in the file's type, and a norm (``merge``)."""
    adapted = {g.name.removesuffix(".lora_A") for g in layout.groups if g.name.endswith(".lora_A")}
    shapes = [p.shape for p, _ in layout.model.block_tensors() if f"block.{p.name}" in adapted]
    bits = _stored_bits(layout)
    return max(rows_at_once(*shape) * shape[1] for shape in shapes) * (32 + 32 + (bits if bits < 32 else 0)) // 8 + 4


def _bytes(group: ParamGroup) -> int:
    """Of one tensor."""
    return group.numel * group.bits // 8


def host(layout: Layout, moments: Mapping[str, Mapping[str, int]], kind: Kind) -> dict[str, Bytes]:
    """Bytes on the host by ``footprint.HOST`` at each of these moments."""
    copies, mapped = _copies(layout) if kind == "cuda" else {}, _mapped(layout)
    pinned = pinned_bytes(layout) + host_bytes(layout) if kind == "cuda" else 0
    found: dict[str, Bytes] = {}
    for moment, parts in moments.items():
        tensors = sum(parts.values()) if kind == "cpu" else 0
        here = {
            "program": _program(moment, kind),
            "tensors": tensors,
            "copies": copies.get(moment, 0) + (0 if moment == "merge" else pinned),
            "mapped": mapped.get(moment, 0),
        }
        found[moment] = {component: n for component, n in here.items() if n}
    return found


def together(one: Mapping[str, Mapping[str, int]], other: Mapping[str, Mapping[str, int]]) -> dict[str, Bytes]:
    """Bytes of both at the moments of the first."""
    return {
        moment: {c: here.get(c, 0) + more.get(c, 0) for c in {**here, **more}}
        for moment, here in one.items()
        for more in [other.get(moment, {})]
    }


def _program(moment: str, kind: Kind) -> int:
    if kind == "cuda" and moment != "merge":
        return CUDA_PROGRAM
    return PROGRAM + (0 if moment in ("load", "resume", "merge") else WARM)


def _copies(layout: Layout) -> dict[str, int]:
    """What is on the host for a moment because it is on its way to or from a CUDA device, or merged beside one."""
    bits = _stored_bits(layout)
    plain = [g for g in layout.groups if g.role != "scale" and g.bits >= 16 and not _is_adapter(g)]
    converted = max((_bytes(g) for g in plain if g.bits != bits), default=0)
    written = max(
        (max(_bytes(g), *layout.update.tensors(g.piece()), 0) for g in layout.groups if g.trainable), default=0
    )
    found = {"load": max(converted, _drawn(layout)), "save": written}
    return {**found, "merge": _merged_at_once(layout)} if layout.rank else found


def _is_adapter(group: ParamGroup) -> bool:
    return group.name.endswith(("lora_A", "lora_B"))


def checkpoint_bytes(layout: Layout) -> tuple[int, int]:
    """Of a checkpoint's files, headers apart: trained weights, and the optimizer's states wherever a run has them."""
    trained = [g for g in layout.groups if g.trainable]
    return sum(_bytes(g) * g.count for g in trained), sum(
        sum(layout.update.tensors(g.piece())) * g.count for g in trained
    )


def _mapped(layout: Layout) -> dict[str, int]:
    """Pages of files at each moment: a part of the model's while it is loaded, the checkpoint's larger one, its states, and the
    model's with its adapter's."""
    trained, kept = checkpoint_bytes(layout)
    stored = layout.model.num_parameters * _stored_bits(layout) // 8
    found = {"load": min(stored - _linked(layout), MAPPED_AT_ONCE), "resume": max(trained, kept)}
    return {**found, "merge": stored + trained} if layout.rank else found


def _linked(layout: Layout) -> int:
    """What is streamed straight from the model's files: nothing of it is mapped."""
    return sum(
        _bytes(g) * g.count for g in layout.groups if g.place and g.role != "scale" and g.bits == _stored_bits(layout)
    )


def with_data(parts: Mapping[str, Mapping[str, int]], examples: int, tokens: int) -> dict[str, Bytes]:
    """The host's bytes with those of the data: what is kept of each example, and the shards' pages (5 bytes a token).

    A merge has none of it.
    """
    kept = EXAMPLE * examples
    return {
        moment: dict(here)
        if moment == "merge"
        else {**here, "data": kept, "mapped": here.get("mapped", 0) + 5 * tokens}
        for moment, here in parts.items()
    }


def needed(parts: Mapping[str, Mapping[str, int]]) -> tuple[str, int]:
    """(moment, bytes) of the host's highest need; what is only mapped is not needed."""
    sums = {moment: sum(n for c, n in here.items() if c != "mapped") for moment, here in parts.items()}
    moment = max(sums, key=lambda name: sums[name], default="")
    return moment, sums.get(moment, 0)
