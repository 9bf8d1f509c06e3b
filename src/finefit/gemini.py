"""One rank's stream under ColossalAI's Gemini, version 0.3 (``colossalai/zero/gemini``), all of it on the device.

Weights lie in chunks of one size, in the model's order (``chunk/manager.py``); a larger tensor has a chunk of its own.
The size is searched for once (``chunk/search_utils.py``): the one that leaves least empty, at least 32 Mi elements and
at most as many above that; tensors beyond three deviations do not count. A rank holds its part of each chunk, and of a
second one in fp32; moments are of the tensors alone. With one rank, or where all weights are less than the least
chunk, chunks stay whole, as that of vectors does under tensor parallel.

The placement policy ``cuda`` lets no chunk go (``placement_policy.py``): what forward has gathered stays until the last
gradient of a chunk is there. A gradient is written where its weight was (``gemini_ddp.py``: ``grad_handle``, beside an
empty tensor of its size), the chunk is reduced into the rank's part, and the update rounds the masters into that.
Both gather and reduction go through a flat tensor of the whole chunk, as NCCL's are asked for lists. Gradients in fp16
are searched for what is infinite, which waits for the device: tensors of communication are free at once.

The load is that of the scripts that published figures (LLMem's ``dp_real.py``, ``tp_real.py``): all of the model in fp32
on each device, then ``half()``, then chunks. Parts lie where that left room, between them is place for no whole chunk.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, pstdev

from .sharding import BYTES, Rank
from .stream import Stream, block_of

LEAST = RANGE = 32 * 2**20
"""``min_chunk_size_mb`` and ``search_range_mb`` of ``GeminiPlugin``: bytes by name, compared with elements."""
_STEP = 1024


@dataclass(frozen=True)
class Chunk:
    numel: int
    """With what fills it up."""
    ranks: int
    parts: dict[int, int]
    """Weights, as entries of the stream of one device, to their elements, in order."""

    @property
    def share(self) -> int:
        return self.numel // self.ranks

    def own(self) -> dict[int, int]:
        """Elements of each weight in the first rank's part."""
        found, left = dict[int, int](), self.share
        for part, numel in self.parts.items():
            if left > 0:
                found[part] = min(numel, left)
            left -= numel
        return found


def chunk_numel(sizes: Sequence[int], ranks: int) -> int:
    """Elements of a chunk for weights of these sizes: the smallest of the sizes that leave least empty."""
    most = fmean(sizes) + 3 * pstdev(sizes)
    ends = list(accumulate((n for n in sizes if n <= most), initial=0))
    largest = max((b - a for a, b in pairwise(ends)), default=0)
    start = size = -(-max(LEAST, largest) // _STEP) * _STEP
    best, empty = size, -1
    while size <= start + RANGE:
        chunks, at, grows = 0, 0, 2 * (start + RANGE)
        while at < len(ends) - 1:
            end = bisect_right(ends, ends[at] + size) - 1
            if end < len(ends) - 1:
                grows = min(grows, ends[end + 1] - ends[at])
            chunks, at = chunks + 1, end
        if empty < 0 or chunks * size - ends[-1] < empty:
            best, empty = size, chunks * size - ends[-1]
        size = -(-grows // _STEP) * _STEP  # all sizes below fill as many chunks, with more left empty
    return best + -best % ranks


def chunks_of(sizes: Iterable[tuple[int, int]], size: int, ranks: int) -> list[Chunk]:
    """The chunks that (weight, elements) fill in order; one is closed when the next weight does not fit."""
    out: list[Chunk] = []
    for part, numel in sizes:
        if not out or sum(out[-1].parts.values()) + numel > out[-1].numel:
            out.append(Chunk(size if numel <= size else numel + -numel % ranks, ranks, {}))
        out[-1].parts[part] = numel
    return out


class Gemini(Rank):
    blocks: dict[int, list[int]]
    front: list[int]
    """Weights outside the blocks that are used before them; their gradients are whole at the end of backward."""
    back: list[int]
    late: list[tuple[int, int]]
    missing: set[int]
    """Weights whose gradients are not there yet."""

    def made(self) -> Stream:
        self.width = BYTES[self.run.compute_dtype]
        self._order()
        self.late, self.missing = [], set()
        return super().made()

    def _order(self) -> None:
        """Weights by use: buffers are of another type."""
        of: dict[int | None, list[int]] = {None: []}
        for i, entry in enumerate(self.old.entries):
            if entry.owner == "parameter" and entry.itemsize == self.width and not entry.whole:
                of.setdefault(block_of(self.old.sections[entry.section]), []).append(i)
        outside = of.pop(None)
        table = [n for n, i in enumerate(outside) if self._shape(i) == self._shape(outside[0])]
        head = table[1] if len(table) > 1 else len(outside)  # none of its own where it is the embedding
        self.front, self.back = outside[:head], outside[head:]
        self.blocks = {block: of[block] for block in sorted(b for b in of if b is not None)}
        order = [*self.front, *(i for block in self.blocks.values() for i in block), *self.back]
        self.order, self.vectors = order, set[int]()
        self.chunks = self._chunks(order)
        self.chunk_of = {part: i for i, chunk in enumerate(self.chunks) for part in chunk.parts}

    def _chunks(self, order: list[int]) -> list[Chunk]:
        tensor = self.run.spread.tensor
        if tensor > 1:  # all tensor parallel ranks have whole ones
            self.vectors = {i for i in order if len(self._shape(i)) == 1}
        cut = [(i, self._numel(i)) for i in order if i not in self.vectors]
        ranks, whole = max(self.run.spread.shards, 1), sum(numel for _, numel in cut)
        if whole < LEAST:
            found = [Chunk(whole, 1, dict(cut))]
        else:
            size = chunk_numel([numel for _, numel in cut], ranks * tensor)
            found = chunks_of(cut, size, ranks)
        vectors = {i: self._numel(i) * tensor for i in order if i in self.vectors}
        return found + ([Chunk(sum(vectors.values()), 1, vectors)] if vectors else [])

    def _shape(self, index: int) -> tuple[int, ...]:
        return self.old.entries[index].shape

    def _numel(self, index: int) -> int:
        return self.old.entries[index].n_bytes // self.width

    # The step

    def enter(self, name: str) -> None:
        block = block_of(name)
        if name == "own rest":
            self._load()
            self._fill()
        elif name == "forward before":
            self.missing = set(self.chunk_of)
            self._gather(self.front)
        elif name.startswith("forward") and block is not None:
            self._gather(self.blocks.get(block, []))
        elif name == "loss":
            self._gather(self.back)
        elif name == "idle":
            self._end()
        elif name == "optimizer" and "steady" not in self.new.sections:
            self.new.emptied()  # the scripts' own, after the first backward

    def _load(self) -> None:
        """The model as it is read, then as it is computed in, then a tensor parallel rank's part of it."""
        tensor = self.run.spread.tensor
        for i in self.order:
            self.hold(f"read {i}", 4 * self._numel(i) * tensor)
        if tensor > 1 and not self.back:  # made on the device, where the head is a table of its own until it is tied
            self.passing(4 * self._numel(self.front[0]) * tensor)
        for i in self.order:
            self.hold(f"half {i}", self.width * self._numel(i) * tensor)
            self.release(f"read {i}")
        self.new.emptied()
        for i in self.order:
            if tensor > 1 and i not in self.vectors:
                self.hold(f"cut {i}", self.width * self._numel(i))
                self.release(f"half {i}")
        self.new.emptied()

    def _fill(self) -> None:
        """Weights go into pairs of chunks, the last of which are open; a chunk is cut when it is closed."""
        last: int | None = None
        opened: dict[tuple[str, bool], int] = {}
        kinds = {"part": (self.width, "parameter"), "master": (4, "optimizer_state")}

        def close(kind: str, i: int) -> None:
            self.hold(f"{kind} {i}", kinds[kind][0] * self.chunks[i].share, owner=kinds[kind][1])
            self.release(f"filling {kind} {i}")

        for weight in self.order:
            i, kept = self.chunk_of[weight], weight in self.vectors
            self.hold(f"raised {weight}", 4 * self.chunks[i].parts[weight])
            self.release(f"raised {last}")
            last = weight
            for kind, (width, owner) in kinds.items():
                before = opened.get((kind, kept))
                if before != i:
                    if before is not None:
                        close(kind, before)
                    opened[kind, kept] = i
                    whole = self.chunks[i].ranks == 1
                    n_bytes = width * self.chunks[i].numel
                    self.hold(
                        f"{kind} {i}" if whole else f"filling {kind} {i}",
                        n_bytes,
                        owner=owner if whole else "temporary",
                    )
                if kind == "part":
                    self.release(f"cut {weight}")
                    self.release(f"half {weight}")
        for (kind, _), i in opened.items():
            close(kind, i)
        self.release(f"raised {last}")
        self.new.emptied()

    def _gather(self, parts: list[int]) -> None:
        for i in dict.fromkeys(self.chunk_of[part] for part in parts):
            chunk = self.chunks[i]
            if chunk.ranks > 1 and f"whole {i}" not in self.open:
                self.hold(f"whole {i}", self.width * chunk.numel)
                self.passing(self.width * chunk.numel)
                self.release(f"part {i}")

    def copy(self, name: str, events: list[tuple[int, int]]) -> None:
        for entry, sign in events:
            if entry in self.chunk_of:
                continue
            super().copy(name, [(entry, sign)])
            if sign > 0 and self.old.entries[entry].owner == "gradient":
                self._arrived(entry, block_of(name))

    def _arrived(self, entry: int, block: int | None) -> None:
        """A gradient is there: of the block, or of what is outside."""
        inside = [] if block is None else self.blocks.get(block, [])
        numel = self._numel(entry)
        found = (i for i in (*inside[::-1], *self.back, *self.front) if i in self.missing and self._numel(i) == numel)
        part = next(found, None)
        if part is None:
            return
        self.missing.discard(part)
        if part in self.front:
            self.late.append((entry, part))
        else:
            self._taken(entry, part)

    def _taken(self, entry: int, part: int) -> None:
        """Its gradient is written into the chunk, and goes."""
        self.passing(self.old.entries[entry].n_bytes)
        i = self.chunk_of[part]
        waits = {late for _, late in self.late}
        if not any(other in self.missing or other in waits for other in self.chunks[i].parts):
            self._reduce(i)
        if entry in self.at:
            self.new.died(self.at.pop(entry))

    def _reduce(self, i: int) -> None:
        chunk = self.chunks[i]
        if f"whole {i}" in self.open:
            self.hold(f"part {i}", self.width * chunk.share, owner="parameter")
            self.passing(self.width * chunk.numel)
            self.release(f"whole {i}")
        if self.run.compute_dtype == "float16":  # absolute values, and which of them are infinite
            numel = min(chunk.share, sum(chunk.parts.values()))
            self.hold("absolute", 2 * numel)
            self.passing(numel)
            self.release("absolute")

    def _end(self) -> None:
        while self.late:
            self._taken(*self.late.pop())
        for i in range(len(self.chunks)):
            if f"whole {i}" in self.open:  # where a weight has no gradient
                self._reduce(i)

    def update(self, events: list[tuple[int, int]]) -> None:
        """HybridAdam's kernel needs nothing but moments, tensor by tensor."""
        for chunk in self.chunks:
            for part, numel in chunk.own().items():
                for moment in range(self.moments()):
                    n_bytes = round(self.moment_bytes() * numel)
                    self.hold(f"moment {moment} of {part}", n_bytes, owner="optimizer_state")
        self.drop(events)
