"""Questions about a step, answered by simulating it: what `witness` asks of another process, a line of JSON each."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from .allocator import Event, Kind, replay, smallest_capacity
from .foreign import ForeignRun, Lengths, Spread
from .layout import Micro
from .lengths import Family, lasting, probes
from .loading import arrivals, loaded
from .rank_streams import plan_streams, rank_stream
from .simulate import STEADY
from .stream import Stream
from .techniques import Allocator, from_json


def planned(question: Mapping[str, Any]) -> dict[str, Any]:
    """All readings of a plan's micro-batch, as JSON values; a CPU has no caching allocator."""
    start = time.perf_counter()
    techniques = [from_json(t) for t in question["techniques"]]
    found = plan_streams(question["config"], techniques, Micro(*question["micro"]), question["kind"])
    stream = max(found, key=lambda part: replay(part.allocations()).allocated_bytes)
    moments = stream.moments()
    live = max(sum(parts.values()) for parts in moments.values())
    readings = {"allocated_bytes": live, "reserved_bytes": live, "capacity_bytes": live}
    if question["kind"] == "cuda":
        grows = any(isinstance(t, Allocator) and t.kind == "expandable" for t in techniques)
        readings = readings_of(stream, question["workspace_bytes"], "expandable" if grows else "classic")
    return {"moments": moments, "live_bytes": live, **readings, "seconds": time.perf_counter() - start}


def readings_of(
    stream: Stream, workspace_bytes: int, segments: Kind = "classic", sent: Sequence[Event] = ()
) -> dict[str, int]:
    """What the caching allocator counts: tensors rounded, what it holds, and the least it goes through with.

    ``sent``: the load of a rank that is sent its weights, which stay where it leaves them. How far its host gets ahead
    is a matter of time, so it is in what every rank must go through with, not in what is held.
    """
    taken, held = workspaces_of(workspace_bytes), stream.allocations()
    free, least = replay([*taken, *held], None, segments), smallest_capacity([*taken, *held], segments)
    if sent:
        step = [event for event in held if stream.entries[event[0]].owner != "parameter"]
        least = max(least, smallest_capacity([*sent, *taken, *step], segments))
    return {
        "allocated_bytes": free.allocated_bytes, "reserved_bytes": free.reserved_bytes, "capacity_bytes": least,
    }  # fmt: skip


def workspaces_of(n_bytes: int) -> list[Event]:
    """What libraries take once for each of the two threads of a step."""
    return [(-1 - i, n_bytes) for i in range(2 * (n_bytes > 0))]


def foreseen(config: Mapping[str, Any], run: ForeignRun, workspace_bytes: int, whole: bool = False) -> dict[str, Any]:
    """All readings of one rank's run, as JSON values."""
    start = time.perf_counter()
    simulated, stream = rank_stream(config, run, whole)
    if run.longest_first:
        stream = stream.until("optimizer")
    load = loaded(simulated, stream, run)
    moments = {"load": load, **stream.moments("start" if run.longest_first else STEADY)}
    readings = {
        name: max(n, sum(load.values()))
        for name, n in readings_of(stream, workspace_bytes, run.segments, arrivals(simulated, run)).items()
    }
    notes = []
    if run.lengths and (family := _family(config, run, stream, whole)):
        varied = lasting(family, run, workspaces_of(workspace_bytes))
        readings |= {key: max(value, readings[key]) for key, value in varied.items()}
    elif run.lengths and not run.longest_first:
        notes.append(
            "every micro-batch counts as the longest: what shorter ones leave in the allocator is not replayed"
        )
    return {
        "moments": moments, "live_bytes": max(sum(parts.values()) for parts in moments.values()), **readings,
        "seconds": time.perf_counter() - start, "notes": notes,
    }  # fmt: skip


def _family(config: Mapping[str, Any], run: ForeignRun, known: Stream, whole: bool) -> Family | None:
    """The run at the lengths it may meet; None where it is not one course of things at all of them."""
    at = probes(run.max_length)
    if run.longest_first or not at:
        return None
    others = (n for n in at if n != run.max_length)
    streams = {n: rank_stream(config, replace(run, max_length=n), whole)[1] for n in others}
    return Family.of({**streams, **({run.max_length: known} if run.max_length in at else {})})


def foreign(question: Mapping[str, Any]) -> dict[str, Any]:
    run = question["run"]
    run = ForeignRun(**{
        **run, "spread": Spread(**run["spread"]), "lengths": Lengths(**run["lengths"]) if run["lengths"] else None,
        **{key: tuple(run[key]) for key in ("targets", "trained_modules", "notes")},
    })  # fmt: skip
    return foreseen(question["config"], run, question["workspace_bytes"], question["whole"])


def serve(answers: TextIO) -> None:
    """Answer questions, a line of JSON each, until there are no more."""
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = planned(question) if "techniques" in question else foreign(question)
        except Exception as error:  # told to whoever asks; the next question may be answered
            answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr  # libraries that print must not answer
    serve(real)
