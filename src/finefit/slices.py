"""The dimensions of a mesh that cut the model: tensor and pipeline parallel, on the stream of one device. Torch-free.

Tensor parallel with sequence parallel (arXiv:2205.05198, torchtitan's ``parallelize_llama.py``): between the sub-layers a
rank holds its rows only; what goes into attention and MLP is gathered, what comes out is a sum of parts until it is
scattered, and so are the gradients on their way back: two products that read one input each make a gradient of all
rows, and their sum is a third, as subclasses of tensors are not added in place. The step was simulated with a rank's
share of the rows (``sharding.computed_as``), so what is whole is put in here.

Pipeline parallel (``torch/distributed/pipelining/schedules.py``, ``stage.py``): the first stage holds the activations of
as many micro-batches as are in flight and no head, the last one those of one, and the loss.
"""

from collections.abc import Iterator
from dataclasses import replace

from .foreign import ForeignRun
from .sharding import BYTES
from .stream import Entry, Stream, block_of

_GRADIENTS = 3
_HEAD = -1


def sliced(stream: Stream, run: ForeignRun) -> Stream:
    """One of ``spread.tensor`` ranks: parameters, gradients and states in parts, inputs of sub-layers gathered."""
    ranks = run.spread.tensor
    if ranks == 1:
        return stream
    held = ("parameter", "gradient", "optimizer_state")
    matrices = {e.shape for e in stream.entries if e.owner == "parameter" and len(e.shape) > 1}  # and their casts
    entries = [_slice(e, ranks) if e.owner in held or e.shape in matrices else e for e in stream.entries]
    sliced = Stream(entries, stream.events, stream.sections, stream.section_start)
    if run.spread.gathers != "allocated":
        return sliced
    tokens = run.micro_batch_size * (run.max_length // ranks)
    width = max((stream.entries[i].shape[-1] for i in _tables(stream)), default=0)
    share = tokens * width * BYTES[run.compute_dtype]
    return _gathered(sliced, run, share * ranks, share)


def _slice(entry: Entry, ranks: int) -> Entry:
    rows = -(-entry.shape[0] // ranks) if entry.shape else 0
    return replace(entry, n_bytes=-(-entry.n_bytes // ranks), shape=(rows, *entry.shape[1:]) if rows else ())


def _tables(stream: Stream) -> list[int]:
    """Entries of the matrices outside the blocks: embedding first, head last."""
    found = [i for i, e in enumerate(stream.entries) if e.owner == "parameter" and len(e.shape) > 1]
    return [i for i in found if block_of(stream.sections[stream.entries[i].section]) is None]


def _gathered(stream: Stream, run: ForeignRun, whole: int, share: int) -> Stream:
    """Inputs of both sub-layers, and of the head, for as long as they are saved; sums of parts at each block's top."""
    out, at, saved = Stream(sections=[], section_start=[]), dict[int, int](), dict[int, list[int]]()
    tops = list(_tops(stream))
    event = 0
    for number, (name, events) in enumerate(stream.by_section()):
        out.opened(name)
        block, forward = block_of(name), name.startswith("forward")
        inside = block is not None and (forward or name.startswith("backward"))
        if block is not None and inside and block not in saved:
            kept = "activation" if run.checkpointing == "none" else "temporary"
            saved[block] = [out.born(replace(_temporary(whole - share), owner=kept)) for _ in range(2)]
        if name == "loss":
            saved[_HEAD] = [out.born(_temporary(whole - share))]
        for i, sign in events:
            if sign > 0:
                at[i] = out.born(replace(stream.entries[i]))
            else:
                out.died(at.pop(i))
            if inside and event == tops[number]:
                sums = [out.born(_temporary(whole - share)) for _ in range(1 if forward else _GRADIENTS)]
                for one in sums:
                    out.died(one)
            event += 1
        ends = _HEAD if name == "backward start" else block
        if ends is not None and (not forward or run.checkpointing != "none"):
            for one in saved.pop(ends, ()):
                out.died(one)
    return out


def _tops(stream: Stream) -> Iterator[int]:
    """For each section the event at which most is alive."""
    live = event = 0
    for _, events in stream.by_section():
        best = top = -1
        for i, sign in events:
            live += sign * stream.entries[i].n_bytes
            if live > best:
                best, top = live, event
            event += 1
        yield top


def _temporary(n_bytes: int) -> Entry:
    return Entry(n_bytes, 0, 0, (n_bytes,), 1, "temporary")


def stages(stream: Stream, run: ForeignRun) -> list[Stream]:
    """The streams of the first and the last of ``spread.pipeline`` stages; of a model in one piece, that."""
    spread = run.spread
    if spread.pipeline == 1 or spread.engine == "naive":
        return [stream]
    tables = _tables(stream)
    embedding, head = (tables[0], tables[-1]) if len(tables) > 1 else (-1, -1)  # a tied one is on both
    outside = {i for i, e in enumerate(stream.entries) if stream.sections[e.section] in ("loss", "backward start")}
    first = _copied(stream, outside | {head} | _states(stream, head, slice(-2, None)))
    last = _copied(stream, {embedding} | _gradients(stream, embedding) | _states(stream, embedding, slice(2)))
    return [_held(first, spread.in_flight), last]


def _states(stream: Stream, table: int, which: slice) -> set[int]:
    """A table's two moments, where they are there from the start: the embedding's come first, the head's last."""
    shape = stream.entries[table].shape if table >= 0 else None
    return set([i for i, e in enumerate(stream.entries) if e.owner == "optimizer_state" and e.shape == shape][which])


def _gradients(stream: Stream, embedding: int) -> set[int]:
    """The embedding's: of its shape, and born after a block's backward; the head's come before."""
    if embedding < 0:
        return set()
    shape = stream.entries[embedding].shape
    found = [i for i, e in enumerate(stream.entries) if e.owner == "gradient" and e.shape == shape]
    return {i for i in found if block_of(stream.sections[stream.entries[i].section]) is not None}


def _copied(stream: Stream, gone: set[int]) -> Stream:
    """The stream without some entries."""
    out, at = Stream(sections=[], section_start=[]), dict[int, int]()
    for name, events in stream.by_section():
        out.opened(name)
        for i, sign in events:
            if sign > 0 and i not in gone:
                at[i] = out.born(replace(stream.entries[i]))
            elif i in at:
                out.died(at.pop(i))
    return out


def _held(stream: Stream, in_flight: int) -> Stream:
    """Each forward activation as often as there are micro-batches in flight, to the end of the step's backward."""
    out, at, others = Stream(sections=[], section_start=[]), dict[int, int](), list[int]()
    for name, events in stream.by_section():
        out.opened(name)
        if name == "optimizer":
            while others:
                out.died(others.pop())
        for i, sign in events:
            entry = stream.entries[i]
            if sign < 0:
                out.died(at.pop(i))
                continue
            at[i] = out.born(replace(entry))
            lives = stream.component(entry) == "activation" and entry.died_section >= 0
            if lives and name.startswith("forward") and not _repeated(stream, entry):
                others += [out.born(replace(entry)) for _ in range(in_flight - 1)]
    return out


def _repeated(stream: Stream, entry: Entry) -> bool:
    """Whether the step has had a micro-batch before: those in flight are there already."""
    start = max(i for i in range(entry.section) if stream.sections[i] in ("start", "steady", "end", "own rest"))
    return stream.sections[start : entry.section + 1].count("forward before") > 1
