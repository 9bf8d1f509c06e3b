"""One rank's stream from a single device's: parameters, gradients and states sharded, gathers and buckets put in.

The step was simulated in the type it is computed in; the stored types are put right here. What all engines share, and
DDP: a bucket copy of all gradients. FSDP is the business of ``ranks``, DeepSpeed and Gemini are that of their own.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod

from .foreign import ForeignRun, Spread
from .stream import Entry, Stream, block_of

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GATHER, REDUCE = 1, 2
"""The streams that gather and that reduce; 0 is the one that computes."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """DeepSpeed's sizes in elements: its own defaults, or ``auto`` of transformers by the hidden size."""

    reduce: int = 500_000_000
    group: int = 1_000_000_000
    prefetch: int = 50_000_000
    persistent: int = 100_000
    """Parameters up to this size stay whole."""

    @classmethod
    def of(cls, hidden_size: int, spread: Spread) -> "Buckets":
        """As the run says; ``auto`` as transformers fills it in. Where nothing is said stage 3 is taken to be auto, and the
        others what the tools' own files have (Qwen's, ms-swift's, transformers' documentation)."""
        auto = hidden_size**2
        reduce = {0: auto if spread.shard_stage == 3 else 200_000_000, -1: auto}.get(spread.bucket, spread.bucket)
        return cls(reduce, prefetch=int(0.9 * auto), persistent=10 * hidden_size)


def computed_as(run: ForeignRun) -> ForeignRun:
    """The run to simulate: under sharding parameters are gathered in the type they are computed in.

    Tensor parallel ranks (with sequence parallel: arXiv:2205.05198) hold each their share of every activation: of the
    heads, the MLP and the vocabulary, or of the rows; so one computes a share of the rows, and holds one of the weights.
    """
    if run.spread.tensor > 1 and run.spread.gathers != "whole":
        run = replace(run, max_length=max(run.max_length // run.spread.tensor, 1))
    if run.spread.shard_stage == 0:
        return run
    compute = run.compute_dtype
    frozen = run.frozen_dtype if run.quantised else compute
    return replace(run, trained_dtype=compute, frozen_dtype=frozen, optimizer="sgd", foreach=False)


@dataclass
class Rank:
    """Walks the sections of the whole stream and writes those of one rank."""

    old: Stream
    run: ForeignRun
    buckets: Buckets = field(default_factory=Buckets)
    new: Stream = field(default_factory=lambda: Stream(sections=[], section_start=[]))
    at: dict[int, int] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)

    def made(self) -> Stream:
        self.stage, self.ranks = self.run.spread.shard_stage, max(self.run.spread.shards, 1)
        self.stored = self._stored()
        self.unit_bytes = self._unit_bytes()
        self.depth = 1 + max((b for b in self.unit_bytes if b >= 0), default=-1)
        for name, events in self.old.by_section():
            self.new.opened(name)
            self.enter(name)
            if name == "optimizer":
                self.update(events)
            else:
                self.copy(name, events)
        return self.new

    # Facts of the whole model

    def _stored(self) -> float:
        """Bytes a trained element takes in its stored type, over those it was computed in."""
        return BYTES[self.run.trained_dtype] / BYTES[self.run.compute_dtype]

    def _unit_bytes(self) -> dict[int, int]:
        """Bytes of the parameters of each block, and of all outside the blocks at -1, as computed."""
        out: Counter[int] = Counter()
        for entry in self.old.entries:
            if entry.owner == "parameter" and not entry.whole:
                block = block_of(self.old.sections[entry.section])
                out[-1 if block is None else block] += entry.n_bytes
        return out

    def trained_numel(self) -> int:
        return sum(e.n_bytes // e.itemsize for e in self.first_gradients())

    def first_gradients(self) -> list[Entry]:
        """Of the first step, if there are two."""
        sections = self.old.sections
        first = sections.index("steady") if "steady" in sections else len(sections)
        return [e for e in self.old.entries if e.owner == "gradient" and e.section < first]

    def held_numel(self) -> float:
        """Trained elements whose states this rank holds."""
        return self.trained_numel() / (self.ranks if self.stage >= 1 else 1)

    # Events

    def enter(self, name: str) -> None:
        """What comes and goes as the section begins."""
        if name == "forward before" and self.run.spread.engine == "ddp":
            self.hold("bucket", sum(e.n_bytes for e in self.old.entries if e.owner == "gradient") // 2)

    def hold(self, name: str, n_bytes: int, lane: int = 0, owner: str = "temporary") -> None:
        if name not in self.open and n_bytes:
            self.open[name] = self.new.born(Entry(n_bytes, 0, 0, (n_bytes,), 1, owner, lane=lane))

    def release(self, name: str) -> None:
        index = self.open.pop(name, None)
        if index is not None:
            self.new.died(index)

    def release_all(self, prefix: str) -> None:
        for name in [n for n in self.open if n.startswith(prefix)]:
            self.release(name)

    def passing(self, n_bytes: int, lane: int = 0) -> None:
        """Bytes that are there for a moment."""
        if n_bytes:
            self.new.died(self.new.born(Entry(n_bytes, 0, 0, (n_bytes,), 1, "temporary", lane=lane)))

    def copy(self, name: str, events: list[tuple[int, int]]) -> None:
        for entry, sign in events:
            old = self.old.entries[entry]
            if sign > 0:
                self.at[entry] = self.new.born(replace(old, n_bytes=self.size(old)))
            elif entry in self.at:
                self.let_go(name, old, self.at.pop(entry))

    def let_go(self, name: str, old: Entry, index: int) -> None:
        self.new.died(index)

    def size(self, old: Entry) -> int:
        """A share of a parameter in its stored type, and of states; frozen ones are held as they are computed."""
        counts_steps = old.owner == "optimizer_state" and not old.shape
        if old.whole or self.stage < {"parameter": 3, "optimizer_state": 1}.get(old.owner, 4) or counts_steps:
            return old.n_bytes
        stored = self.stored if self.run.method == "full" else 1.0
        return round(self.share(old) * stored)

    def share(self, old: Entry) -> int:
        """Bytes of the largest rank's part of it, as it is."""
        return -(-old.n_bytes // self.ranks)

    def update(self, events: list[tuple[int, int]]) -> None:
        """States once, the update's temporaries, then what the old update let go of."""
        numel = self.held_numel()
        if not self.run.optimizer_on_host:
            self.hold("states", round(numel * self.moments() * self.moment_bytes()), owner="optimizer_state")
        if self.has_temporary():
            self.passing(round(numel * BYTES[self.run.trained_dtype]))
        self.drop(events)

    def moments(self) -> int:
        """Tensors of states on the device."""
        return 0 if self.run.paged else {"lion": 1, "muon": 1, "sgd": 0}.get(self.run.optimizer, 2)

    def moment_bytes(self) -> float:
        """Of an element of one of them."""
        bits = self.run.optimizer_bits
        return bits / 8 if bits in (4, 8, 32) else BYTES[self.run.compute_dtype]

    def has_temporary(self) -> bool:
        """Whether torch's own update makes a tensor as large as what it updates."""
        return self.run.foreach and self.run.optimizer_bits in (16, 32) and self.run.optimizer.startswith("adam")

    def drop(self, events: list[tuple[int, int]], owner: str = "") -> None:
        """What the old update let go of: all of it, or an owner's."""
        for entry, sign in events:
            if sign < 0 and entry in self.at and owner in ("", self.old.entries[entry].owner):
                self.new.died(self.at.pop(entry))


def padded_share(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of the first rank's part of a tensor cut along its first dimension, as FSDP 2 and DTensor cut it."""
    return -(-shape[0] // ranks) * prod(shape[1:]) if shape else 1
