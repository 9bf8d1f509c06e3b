"""What a run keeps on the host instead of the device, on a stream of allocations."""

from dataclasses import replace

from .foreign import ForeignRun
from .stream import Stream, block_of


def placed(stream: Stream, run: ForeignRun) -> Stream:
    """The stream without what the run keeps on the host: saved activations between their uses, shards, states."""
    on_host = run.activations_on_host and run.tool != "torchtune"  # there the model code itself moves them
    if not (on_host or run.parameters_on_host or run.optimizer_on_host):
        return stream
    away: set[int] = set()
    for i, entry in enumerate(stream.entries):
        held = stream.component(entry)
        cut = held == "parameter" and not entry.whole
        if (held == "optimizer_state" and run.optimizer_on_host) or (cut and run.parameters_on_host):
            away.add(i)
    moved = _waiting(stream) if on_host else {}
    out = Stream(sections=[], section_start=[])
    at: dict[int, int] = {}
    gone: dict[int, int] = {}
    for number, (name, events) in enumerate(stream.by_section()):
        out.opened(name)
        for i in moved.get((number, "back"), ()):
            at[i] = out.born(replace(stream.entries[i]))
        for i, sign in events:
            if i in away:
                continue
            if sign > 0:
                at[i] = out.born(replace(stream.entries[i]))
            elif sign == 0 and i in gone:
                out.through(gone[i])
            elif i in at:
                gone[i] = at.pop(i)
                out.died(gone[i])
        for i in moved.get((number, "out"), ()):
            out.died(at.pop(i))
    return out


def _waiting(stream: Stream) -> dict[tuple[int, str], list[int]]:
    """Activations of the blocks that wait for another section: where each leaves, and where it must be back."""
    out: dict[tuple[int, str], list[int]] = {}
    for i, entry in enumerate(stream.entries):
        born, died = stream.sections[entry.section], stream.sections[entry.died_section] if entry.died >= 0 else ""
        inside = block_of(born) is not None and block_of(died) is not None
        if inside and born.startswith("forward") and died.startswith("backward"):
            out.setdefault((entry.section + 1, "out"), []).append(i)  # the next block has read it by then
            out.setdefault((entry.died_section, "back"), []).append(i)
    return out
