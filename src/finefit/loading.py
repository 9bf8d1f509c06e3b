"""The load: how a tool brings the weights to a rank's device, and what is there at its highest point. Torch-free.

- whole: all of the model, as it is read, on each device before it is cut (ColossalAI's Gemini after ``.to("cuda")``);
- units: a unit whole, and its flat copy, beside the shards that are done: FSDP 1 from meta tensors or from the host
  (``_init_utils.py``: ``_init_param_handle_from_module``), which is what Fabric's ``empty_init`` and accelerate's
  ``cpu_ram_efficient_loading`` come to;
- tensors: one tensor whole beside what is done: accelerate's ``fsdp2_load_full_state_dict``, torchtune's
  ``load_from_full_model_state_dict``, DeepSpeed's ``zero.Init`` (``partition_parameters.py``), and bitsandbytes, which
  packs tensor by tensor;
- shards: nothing but what a rank keeps: torchtitan initialises or reads shards.

Nothing beyond the weights is there on one device: tensors are moved, or read in their place.
"""

from .foreign import ForeignRun
from .sharding import BYTES
from .stream import Stream, block_of

_WAYS = {
    ("lit_gpt", "fsdp1"): "units", ("litgpt", "fsdp1"): "units", ("composer", "fsdp1"): "units",
    ("torchtune", "fsdp2"): "tensors", ("torchtitan", "fsdp2"): "shards", ("colossalai", "fsdp1"): "whole",
}  # fmt: skip
_ENGINES = {"fsdp1": "units", "fsdp2": "tensors", "deepspeed": "tensors"}


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
    kept = sum(e.n_bytes for e in held.entries if e.owner == "parameter")
    stored = run.trained_dtype if run.method == "full" else run.frozen_dtype
    wide = BYTES[stored] / BYTES[run.compute_dtype] if run.spread.shard_stage else 1.0
    tensors: dict[int, list[float]] = {}
    for entry in whole.entries:
        if entry.owner == "parameter":
            block = block_of(whole.sections[entry.section])
            tensors.setdefault(-1 if block is None else block, []).append(entry.n_bytes * wide)
    units = [sum(unit) for unit in tensors.values()] or [0.0]
    largest = max((n for unit in tensors.values() for n in unit), default=0.0)
    if run.quantised:  # a packed tensor comes in the type it is computed in: four bits become sixteen
        largest *= 16 / (8 if run.quantised == "int8" else 4)
    beside = {"whole": sum(units) + max(units) - kept, "units": 2 * max(units), "tensors": largest, "shards": 0.0}
    return {"parameter": kept, "temporary": max(round(beside[way_of(run)]), 0)}
