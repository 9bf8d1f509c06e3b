"""What a run keeps on the host instead of the device, on a stream of allocations."""

from dataclasses import replace

from .foreign import ForeignRun
from .stream import Entry, Stream


def placed(stream: Stream, run: ForeignRun) -> Stream:
    """The stream without what the run keeps on the host: saved activations between their uses, shards, states."""
    on_host = run.activations_on_host and run.tool != "torchtune"  # there the model code itself moves them
    if not (on_host or run.parameters_on_host or run.optimizer_on_host):
        return stream
    away: set[int] = set()
    for i, entry in enumerate(stream.entries):
        held = stream.component(entry)
        if (held == "optimizer_state" and run.optimizer_on_host) or (held == "parameter" and run.parameters_on_host):
            away.add(i)
    moved = _waiting(stream) if on_host else {}
    out = Stream(sections=[], section_start=[])
    at: dict[int, int] = {}
    for number, (name, events) in enumerate(stream.by_section()):
        out.sections.append(name)
        out.section_start.append(len(out.events))
        for i in moved.get((number, "back"), ()):
            at[i] = _born(out, stream.entries[i])
        for i, sign in events:
            if i in away:
                continue
            if sign > 0:
                at[i] = _born(out, stream.entries[i])
            elif i in at:
                _died(out, at.pop(i))
        for i in moved.get((number, "out"), ()):
            _died(out, at.pop(i))
    return out


def _waiting(stream: Stream) -> dict[tuple[int, str], list[int]]:
    """Activations of the blocks that wait for another section: where each leaves, and where it must be back."""
    out: dict[tuple[int, str], list[int]] = {}
    for i, entry in enumerate(stream.entries):
        born = stream.sections[entry.section].split(" ")
        died = stream.sections[entry.died_section].split(" ") if entry.died >= 0 else [""]
        if born[0] == "forward" and born[-1].isdigit() and died[0] == "backward" and died[-1].isdigit():
            out.setdefault((entry.section + 1, "out"), []).append(i)  # the next block has read it by then
            out.setdefault((entry.died_section, "back"), []).append(i)
    return out


def _born(stream: Stream, entry: Entry) -> int:
    index = len(stream.entries)
    made = replace(entry, section=len(stream.sections) - 1, born=len(stream.events), died=-1, died_section=-1)
    stream.entries.append(made)
    stream.events.append((index, 1))
    return index


def _died(stream: Stream, index: int) -> None:
    entry = stream.entries[index]
    entry.died, entry.died_section = len(stream.events), len(stream.sections) - 1
    stream.events.append((index, -1))
