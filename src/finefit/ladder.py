"""What the search turns on, a rung at a time, where nothing fits without: exact techniques that pay in time.

A rung is what is turned on, as (key of ``memory.*``, value) pairs; the first is nothing. What the user said of a key
stands, so a rung that says otherwise is left out. All of them are exact: nothing here buys memory with quality.
"""

from collections.abc import Iterator, Sequence

from .spec import JobSpec
from .techniques import Technique

Rung = tuple[tuple[str, str], ...]
# Cheapest first, each alone and then together.
_INPUTS = {place: ("activation_offload", place) for place in ("host", "disk")}
_NESTED = ("checkpointing_kind", "nested")
_STEP = ("fused_backward_step", "true")
_STATES = {place: ("optimizer_offload", place) for place in ("host", "disk")}
_SUMS = (
    "gradients_on_disk",
    "true",
)  # of states on disk: their gradients' sums too, for a write of all in each micro-batch
_WEIGHTS = {place: ("parameter_offload", place) for place in ("host", "disk")}
RUNGS: dict[str, tuple[Rung, ...]] = {
    "cpu": (
        (_INPUTS["disk"],), (_NESTED,), (_STEP,), (_STATES["disk"],), (_INPUTS["disk"], _STATES["disk"]),
        (_STATES["disk"], _SUMS), (_INPUTS["disk"], _STATES["disk"], _SUMS), (_WEIGHTS["disk"],), (_INPUTS["disk"], _WEIGHTS["disk"]),
    ),
    "cuda": (
        (_INPUTS["host"],), (_INPUTS["disk"],), (_NESTED,), (_STEP,), (_STATES["host"],), (_INPUTS["host"], _STATES["host"]),
        (_WEIGHTS["host"],), (_INPUTS["host"], _WEIGHTS["host"]), (_INPUTS["disk"], _STATES["disk"]),
        (_WEIGHTS["disk"],), (_INPUTS["disk"], _WEIGHTS["disk"]),
    ),
}  # fmt: skip


def rungs(job: JobSpec, kind: str) -> Iterator[Rung]:
    """Nothing turned on, then every rung the user left open on such a device."""
    yield ()
    states = job.pin("optimizer_offload") == "disk"  # of what was said, the part that was not
    for rung in RUNGS[kind]:
        open_to = tuple(pair for pair in rung if not (states and pair == _STATES["disk"] and _SUMS in rung))
        if all(job.pin(key) is None for key, _ in open_to):
            yield open_to


def turned_on(techniques: Sequence[Technique], job: JobSpec, kind: str) -> Rung:
    """The rung a plan with these techniques stands on."""
    keys = {key for rung in RUNGS[kind] for key, _ in rung}
    on = (pair for t in techniques for pair in t.turned_on())
    return tuple((key, value) for key, value in on if key in keys and job.pin(key) is None)


def single(kind: str) -> Iterator[tuple[str, str]]:
    """Each thing that may be turned on, by itself."""
    yield from dict.fromkeys(pair for rung in RUNGS[kind] for pair in rung if pair != _SUMS)
