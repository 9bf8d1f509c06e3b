"""The load: how a tool brings the weights to a rank's device, and what is there at its highest point. Torch-free.

- whole: all of the model, as it is read, on each device before it is cut, and one tensor as it is computed in
  (ColossalAI's Gemini after ``.to("cuda")`` and ``.half()``);
- units: a unit whole, and its flat copy, beside the shards that are done: FSDP 1 from meta tensors or from the host
  (``_init_utils.py``: ``_init_param_handle_from_module``), which is what Fabric's ``empty_init`` comes to;
- first: as units, with the weights read by the first rank alone and sent to the others (accelerate's
  ``cpu_ram_efficient_loading``, ``sync_module_states``), whose load is the one that is followed (``arrivals``);
- tensors: one tensor whole beside what is done: accelerate's ``fsdp2_load_full_state_dict``, torchtune's
  ``load_from_full_model_state_dict``, DeepSpeed's ``zero.Init`` (``partition_parameters.py``), and bitsandbytes, which
  packs tensor by tensor;
- shards: nothing but what a rank keeps: torchtitan initialises or reads shards.

Nothing beyond the weights is there on one device: tensors are moved, or read in their place.
"""

from collections.abc import Iterator, Sequence
from itertools import count

from .allocator import AWAITED, MIB, Event
from .foreign import ForeignRun
from .sharding import BYTES
from .stream import Entry, Stream, block_of

_WAYS = {
    ("lit_gpt", "fsdp1"): "units", ("litgpt", "fsdp1"): "units", ("composer", "fsdp1"): "units",
    ("torchtune", "fsdp2"): "tensors", ("torchtitan", "fsdp2"): "shards",
}  # fmt: skip
_BUCKET = 250 * MIB
_SENT_AT_ONCE = 2
"""``PARAM_BROADCAST_BUCKET_SIZE`` of ``_init_utils.py``, filled by whole tensors until it is reached; ``broadcast_coalesced``
of ``csrc/distributed/c10d/comm.cpp`` has two buckets under way."""
_UNPACKED = {"int8": 2, "nf4": 4, "nf4_double": 4}  # 16-bit bytes of a byte; GPTQ's are packed in the file
_FIRST_KEY = -(10**6)  # below those of workspaces
_ENGINES = {"fsdp1": "units", "fsdp2": "tensors", "deepspeed": "tensors", "gemini": "whole"}


def way_of(run: ForeignRun) -> str:
    """The run's own word, or that of its tool."""
    if run.load:
        return run.load
    if run.spread.shard_stage == 3:
        found = _WAYS.get((run.tool, run.spread.engine)) or _ENGINES.get(run.spread.engine, "shards")
        return "tensors" if run.quantised and found == "shards" else found
    return "tensors" if run.quantised else "shards"


def loaded(whole: Stream, held: Stream, run: ForeignRun) -> dict[str, int]:
    """Bytes by component at the highest point of the load: ``whole`` is one device's stream, ``held`` the rank's."""
    kept = sum(e.n_bytes for e in held.entries if e.owner == "parameter" and held.sections[e.section].startswith("own"))
    units = [sum(unit) for unit in _units(whole, run)] or [0.0]
    largest = max((_beside(e, run) for e in whole.entries if e.owner == "parameter" and not e.whole), default=0.0)
    pair = 2 * max(units)
    read = run.spread.tensor * (sum(units) + max((max(unit) for unit in _units(whole, run)), default=0.0) / _width(run))
    beside = {"whole": read - kept, "units": pair, "first": pair, "tensors": largest, "shards": 0.0}
    return {"parameter": kept, "temporary": max(round(beside[way_of(run)]), 0)}


def _beside(entry: Entry, run: ForeignRun) -> float:
    """What one tensor takes beside what is kept, as it comes: packed here, it is there in the type it is computed in."""
    if entry.itemsize == 1:
        return entry.n_bytes * _UNPACKED.get(run.quantised, 0)
    return entry.n_bytes * _width(run) if run.spread.shard_stage else 0.0


def _width(run: ForeignRun) -> float:
    """Bytes as stored for a byte as computed, where engines cut what is stored."""
    stored = run.trained_dtype if run.method == "full" else run.frozen_dtype
    return BYTES[stored] / BYTES[run.compute_dtype] if run.spread.shard_stage else 1.0


def _units(whole: Stream, run: ForeignRun) -> list[list[float]]:
    """Bytes of the tensors of each unit as they are stored, blocks first, then all outside them."""
    wide = _width(run)
    tensors: dict[float, list[float]] = {}
    for entry in whole.entries:
        if entry.owner == "parameter" and not entry.whole:
            block = block_of(whole.sections[entry.section])
            tensors.setdefault(float("inf") if block is None else block, []).append(entry.n_bytes * wide)
    return [tensors[block] for block in sorted(tensors)]


def arrivals(whole: Stream, run: ForeignRun) -> list[Event]:
    """What the load makes the allocator of a rank do that is sent the weights, up to its shards, which stay.

    Its parameters come from the meta device, so nothing on its way waits for the device: its host is through with all
    units while the first rank still copies, and each bucket is freed with the communication that fills it ahead. None of
    them is used again before the end, and activations are then put into segments of a bucket's size.
    """
    cut = run.spread.engine == "fsdp1" and run.spread.shard_stage == 3
    if not cut or way_of(run) != "first" or run.parameters_on_host:
        return []
    keys = count(_FIRST_KEY, -1)
    events: list[Event] = [(next(keys), e.n_bytes) for e in whole.entries if e.owner == "parameter" and e.whole]
    for unit in _units(whole, run):
        events += _unit_arrives([round(n) for n in unit], run.spread.shards, keys)
    sent = [event[0] for event in events if event[2:] == (AWAITED,)]
    return [*events, (sent[-1], 0, AWAITED)]


def _unit_arrives(tensors: Sequence[int], shards: int, keys: Iterator[int]) -> Iterator[Event]:
    """Its tensors, empty; the buckets they are filled from; a flat copy instead of them; a shard instead of that."""
    made = [(next(keys), n) for n in tensors]
    yield from made
    under_way: list[int] = []
    for n_bytes in _buckets(tensors):
        if len(under_way) == _SENT_AT_ONCE:
            yield under_way.pop(0), -1, AWAITED
        under_way.append(next(keys))
        yield under_way[-1], n_bytes
    for key in under_way:
        yield key, -1, AWAITED
    flat, whole = next(keys), sum(tensors)
    yield flat, whole
    for key, _ in made:
        yield key, -1
    yield next(keys), -(-whole // shards)
    yield flat, -1


def _buckets(tensors: Sequence[int]) -> Iterator[int]:
    filled = 0
    for n_bytes in tensors:
        filled += n_bytes
        if filled >= _BUCKET:
            yield filled
            filled = 0
    if filled:
        yield filled
