"""One rank's stream from a single device's: parameters, gradients and states sharded, gathers and buckets put in.

Follows FSDP (``torch/distributed/fsdp/_runtime_utils.py``, ``_fully_shard/_fsdp_param_group.py``): a unit a block, all
else the root, whose parameters stay gathered from the start of forward to the end of backward; in backward the next
block is gathered while one runs (FSDP 1 under a reentrant checkpoint cannot look ahead: its forward left no hooks);
a block's whole gradients live until they are reduced after its backward. FSDP 1 hooks the inputs of units whose
parameters are frozen and keeps the hooks to the end of backward: a reentrant checkpoint's inputs and their gradients
live as long. DeepSpeed's
ZeRO (``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``partitioned_param_coordinator.py``): buckets of fixed size,
fp32 master copies. DDP: a bucket copy of all gradients. The step was simulated in the type it is computed in; the
stored types are put right here. Streams of communication have pools of their own: not modelled.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .foreign import ForeignRun
from .stream import Entry, Stream, block_of

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Buckets:
    """DeepSpeed's sizes in elements: its own defaults, or ``auto`` of transformers by the hidden size."""

    reduce: int = 500_000_000
    gather: int = 500_000_000
    group: int = 1_000_000_000

    @classmethod
    def auto(cls, hidden_size: int) -> "Buckets":
        return cls(reduce=hidden_size**2, gather=200_000_000)


def of_rank(stream: Stream, run: ForeignRun, buckets: Buckets | None = None) -> Stream:
    """The stream of one of ``run.spread``'s ranks."""
    spread = run.spread
    if spread.tensor > 1:
        stream = _share_of_weights(stream, spread.tensor)
    if spread.shard_stage == 0 and spread.engine != "ddp":
        return stream
    return _Rank(stream, run, buckets or Buckets()).made()


def computed_as(run: ForeignRun) -> ForeignRun:
    """The run to simulate: under sharding parameters are gathered in the type they are computed in.

    Tensor parallel ranks (with sequence parallel: arXiv:2205.05198) hold each their share of every activation: of the
    heads, the MLP and the vocabulary, or of the rows; so one computes a share of the rows, and holds one of the weights.
    """
    if run.spread.tensor > 1:
        run = replace(run, max_length=max(run.max_length // run.spread.tensor, 1))
    if run.spread.shard_stage == 0:
        return run
    compute = run.compute_dtype
    frozen = run.frozen_dtype if run.quantised else compute
    return replace(run, trained_dtype=compute, frozen_dtype=frozen, optimizer="sgd", foreach=False)


def _share_of_weights(stream: Stream, ranks: int) -> Stream:
    """Parameters, gradients and states in ``ranks`` parts."""
    held = ("parameter", "gradient", "optimizer_state")
    entries = [replace(e, n_bytes=-(-e.n_bytes // ranks)) if e.owner in held else e for e in stream.entries]
    return Stream(entries, stream.events, stream.sections, stream.section_start)


@dataclass
class _Rank:
    old: Stream
    run: ForeignRun
    buckets: Buckets
    new: Stream = field(default_factory=lambda: Stream(sections=[], section_start=[]))
    at: dict[int, int] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)  # entries that live to the end of backward

    def made(self) -> Stream:
        self.stage, self.ranks = self.run.spread.shard_stage, max(self.run.spread.shards, 1)
        self.stored = self._stored()
        self.block_bytes = self._block_bytes()
        self.depth = 1 + max((b for b in self.block_bytes if b >= 0), default=-1)
        for name, events in self.old.by_section():
            self._enter(name)
            if name == "optimizer":
                self._update(events)
            else:
                self._copy(name, events)
        return self.new

    # Facts of the whole model

    def _stored(self) -> float:
        """Bytes a trained element takes in its stored type, over those it was computed in."""
        if self.run.spread.engine == "deepspeed":  # its masters are states
            return 1.0
        return _BYTES[self.run.trained_dtype] / _BYTES[self.run.compute_dtype]

    def _block_bytes(self) -> dict[int, int]:
        """Bytes of the parameters of each block, and of all outside the blocks at -1, as computed."""
        out: Counter[int] = Counter()
        for entry in self.old.entries:
            if entry.owner == "parameter":
                block = block_of(self.old.sections[entry.section])
                out[-1 if block is None else block] += entry.n_bytes
        return out

    def _trained_numel(self) -> int:
        grads = [e for e in self.old.entries if e.owner == "gradient"]
        first = self.old.sections.index("steady")
        return sum(e.n_bytes // e.itemsize for e in grads if e.section < first)

    # Events

    def _enter(self, name: str) -> None:
        self.new.opened(name)
        block = block_of(name)
        if self.stage == 3:
            if name == "forward before":
                self._hold("gather -1", self.block_bytes.get(-1, 0))
            elif block is not None and name.startswith(("forward", "backward")):
                self._gather(block, 1 if name.startswith("forward") else -1)
            elif name in ("backward start", "loss"):
                self._release(f"gather {self.depth - 1}")
            elif name in ("idle", "optimizer"):
                for held in [h for h in self.open if h.startswith("gather")]:
                    self._release(held)
        if name == "forward before" and self.run.spread.engine == "ddp" and "bucket" not in self.open:
            self._hold("bucket", sum(e.n_bytes for e in self.old.entries if e.owner == "gradient") // 2)
        if self.run.spread.engine == "deepspeed" and self.stage >= 2 and name == "backward start":
            self._hold("bucket", 2 * 2 * min(self.buckets.reduce, self._trained_numel()))

    def _gather(self, block: int, step: int) -> None:
        """The unit that runs and the one after it are whole; all others are let go."""
        fsdp1 = self.run.spread.engine == "fsdp1"
        ahead = not fsdp1 or (step < 0 and not (self.run.reentrant and self.run.checkpointing != "none"))
        wanted = {f"gather {b}" for b in (block, block + step * ahead) if 0 <= b < self.depth} | {"gather -1"}
        for held in [h for h in self.open if h.startswith("gather") and h not in wanted]:
            self._release(held)
        for name in sorted(wanted - {"gather -1"}):
            self._hold(name, self.block_bytes.get(int(name.split(" ")[1]), 0))

    def _hold(self, name: str, n_bytes: int) -> None:
        if name not in self.open and n_bytes:
            self.open[name] = self.new.born(Entry(n_bytes, 0, 0, (n_bytes,), 1, owner="temporary"))

    def _release(self, name: str) -> None:
        index = self.open.pop(name, None)
        if index is not None:
            self.new.died(index)

    def _copy(self, name: str, events: list[tuple[int, int]]) -> None:
        whole: list[int] = []
        if name in ("idle", "optimizer"):
            while self.kept:
                self.new.died(self.kept.pop())
        for entry, sign in events:
            old = self.old.entries[entry]
            if sign > 0:
                self.at[entry] = self.new.born(replace(old, n_bytes=self._size(old)))
                if old.owner == "gradient" and self.stage >= 2:
                    whole.append(entry)
            elif entry in self.at:
                self._let_go(name, old, self.at.pop(entry))
        self._reduce(whole)

    def _let_go(self, name: str, old: Entry, index: int) -> None:
        """Free it, unless a hook on the input of a frozen unit keeps it, and its gradient, to the end of backward."""
        run = self.run
        hooked = run.spread.engine == "fsdp1" and run.method == "lora" and run.reentrant and run.checkpointing == "full"
        born = self.old.sections[old.section]
        if hooked and name.startswith("backward") and born.startswith("forward") and block_of(born) is not None:
            self.kept += [index, self.new.born(replace(old, owner="temporary"))]
        else:
            self.new.died(index)

    def _reduce(self, whole: list[int]) -> None:
        """Whole gradients of the section become shards."""
        for entry in whole:
            old = self.old.entries[entry]
            shard = replace(old, n_bytes=round(old.n_bytes * self.stored) // self.ranks)
            made = self.new.born(shard)
            if entry in self.at:
                self.new.died(self.at[entry])
                self.at[entry] = made
            else:
                self.new.died(made)

    def _size(self, old: Entry) -> int:
        """A share of a parameter in its stored type; frozen ones are held as they are computed."""
        if old.owner != "parameter" or self.stage != 3:
            return old.n_bytes
        stored = self.stored if self.run.method == "full" else 1.0
        return -(-round(old.n_bytes * stored) // self.ranks)

    def _update(self, events: list[tuple[int, int]]) -> None:
        """States once, the update's temporaries, then what the old update let go of."""
        numel = self._trained_numel() / (self.ranks if self.stage >= 1 else 1)
        engine, bits = self.run.spread.engine, self.run.optimizer_bits
        if "states" not in self.open and not self.run.optimizer_on_host:
            each = bits / 8 if bits in (4, 8, 32) else _BYTES[self.run.compute_dtype]
            master = 4 if engine == "deepspeed" else 0
            moments = 1 if self.run.optimizer in ("lion", "muon") else 0 if self.run.optimizer == "sgd" else 2
            n_bytes = round(numel * (master + moments * each * (not self.run.paged)))
            if n_bytes:
                self.open["states"] = self.new.born(Entry(n_bytes, 0, 0, (n_bytes,), 1, owner="optimizer_state"))
        for n_bytes in self._temporaries(numel):
            self.new.died(self.new.born(Entry(n_bytes, 0, 0, (n_bytes,), 1, owner="temporary")))
        for entry, sign in events:
            if sign < 0 and entry in self.at:
                self.new.died(self.at.pop(entry))
        if engine == "deepspeed":
            self._release("bucket")

    def _temporaries(self, numel: float) -> Iterator[int]:
        if self.run.spread.engine == "deepspeed":
            if not self.run.optimizer_on_host:
                yield round(4 * min(numel, self.buckets.group))  # the gradient in fp32
            if self.stage in (1, 2):
                yield 2 * min(self.buckets.gather, self._trained_numel())
        elif self.run.foreach and self.run.optimizer_bits in (16, 32) and self.run.optimizer.startswith("adam"):
            yield round(numel * _BYTES[self.run.trained_dtype])
