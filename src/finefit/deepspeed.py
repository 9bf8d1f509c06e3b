"""One rank's stream under DeepSpeed's ZeRO, version 0.14 (``runtime/zero``).

Stages 1 and 2 (``stage_1_and_2.py``) keep parameters whole. Backward takes buckets of fixed size, whatever is trained; a
gradient is copied into one and gone, unless it is larger. What a rank owns is in one tensor, another one for each
micro-step, added to the first as the micro-step ends.

Stage 3 (``stage3.py``): one tensor for the gradients of all that a rank updates and one bucket are there from the start.
Updates go by groups: a group's gradients are joined, raised to fp32, then its moments and torch's own temporary come.
Which parameters are whole (``partitioned_param_coordinator.py``): those in use, those that follow in the order of the
step up to ``LIVE`` elements, and after their use those that are used again within ``LIVE`` elements. So the last blocks
stay from forward to backward, and a block from its forward to its backward when it is computed twice.

Masters are made with the engine, moments at the first update. With the optimizer on the host so are gradients.
"""

from dataclasses import dataclass, field
from itertools import accumulate

from .sharding import BYTES, GATHER, REDUCE, Rank
from .stream import Stream, block_of

LIVE = 1_000_000_000
"""``stage3_max_live_parameters`` and ``stage3_max_reuse_distance``, DeepSpeed's defaults and in all the tools' files."""
_NORM = 250_000_000  # elements whose norm is taken at once on the way to the host


class DeepSpeed(Rank):
    micro: int
    waiting: list[int]
    """Gradients larger than a bucket: they go when the next one comes."""

    def made(self) -> Stream:
        self.micro, self.waiting = 0, []
        self.gathers, self.reduces = (GATHER, REDUCE) if self.run.spread.overlaps else (0, 0)
        gradients = self.first_gradients()
        self.largest = max((e.n_bytes // e.itemsize for e in gradients), default=0)
        return super().made()

    def _stored(self) -> float:
        return 1.0  # its masters are states

    def enter(self, name: str) -> None:
        if name == "forward before":
            self._engine()
        elif name == "idle":
            self.reduced()
            self.micro += 1

    def _engine(self) -> None:
        """What is there before the first step: masters, of copies, and for a moment a gradient of them."""
        groups = self.groups()
        if self.run.optimizer_on_host or "master 0" in self.open or not groups:
            return
        for i, group in enumerate(groups):
            self.hold("copy", BYTES[self.run.compute_dtype] * group)
            self.hold(f"master {i}", 4 * group, owner="optimizer_state")
            self.release("copy")
        self.passing(4 * max(groups))

    def groups(self) -> list[int]:
        """Elements that are updated together."""
        numel = round(self.held_numel())
        return [numel] if numel else []

    # Gradients

    def copy(self, name: str, events: list[tuple[int, int]]) -> None:
        for event in events:
            super().copy(name, [event])
            entry, sign = event
            if sign > 0 and self.old.entries[entry].owner == "gradient":
                self.arrived(entry)

    def arrived(self, entry: int) -> None:
        """A whole gradient is there."""
        for index in self.waiting:
            self.new.died(index)
        self.waiting.clear()
        old = self.old.entries[entry]
        numel = old.n_bytes // old.itemsize
        if numel > self.buckets.reduce:
            self.waiting.append(self.at.pop(entry))
        else:
            self.new.died(self.at.pop(entry))

    def reduced(self) -> None:
        """The end of backward."""
        for index in self.waiting:
            self.new.died(index)
        self.waiting.clear()

    # The update

    def update(self, events: list[tuple[int, int]]) -> None:
        self.micro = 0
        if not self.run.optimizer_on_host:
            self.passing(8 * self.largest_share())  # a gradient's norm is taken in fp64
            for i, numel in enumerate(self.groups()):
                self._step(i, numel)
        self.drop(events)

    def largest_share(self) -> int:
        return -(-self.largest // self.ranks)

    def _step(self, group: int, numel: int) -> None:
        self.hold("joined", BYTES[self.run.compute_dtype] * numel)
        self.hold("raised", 4 * numel)
        self.release("joined")
        self.joined()
        for moment in range(self.moments()):
            self.hold(f"moment {moment} of {group}", round(self.moment_bytes() * numel), owner="optimizer_state")
        if self.has_temporary():
            self.passing(4 * numel)
        self.release("raised")

    def joined(self) -> None:
        """A group's gradients have been copied."""


class Replicated(DeepSpeed):
    """Stages 1 and 2."""

    def enter(self, name: str) -> None:
        super().enter(name)
        on_host = self.run.optimizer_on_host
        if name == "forward before" and on_host:
            self.hold("on its way", BYTES[self.run.compute_dtype] * self.largest)
        elif name == "backward start":
            for buffer in range(1 + self.run.spread.overlaps):
                self.hold(f"bucket {buffer}", BYTES[self.run.compute_dtype] * self.buckets.reduce)
            if self.stage == 2 and not on_host:
                self.hold(f"gradients {self.micro}", self._owned(), owner="gradient")

    def _owned(self) -> int:
        """Bytes of the gradients a rank keeps: tensors that begin or end in its part are kept whole."""
        return BYTES[self.run.compute_dtype] * max(round(self.held_numel()), self.largest)

    def arrived(self, entry: int) -> None:
        if self.stage == 2:
            super().arrived(entry)

    def reduced(self) -> None:
        super().reduced()
        self.release_all("bucket")
        if self.micro > 0:
            self.release(f"gradients {self.micro}")

    def update(self, events: list[tuple[int, int]]) -> None:
        if self.stage == 1 and not self.run.optimizer_on_host:
            self.hold("gradients 0", self._owned(), owner="gradient")
            self.drop(events, "gradient")
        super().update(events)
        if self.run.optimizer_on_host and not self.run.rounded_on_host:
            self.passing(4 * round(self.held_numel()))

    def largest_share(self) -> int:
        return min(self.largest, round(self.held_numel()))

    def joined(self) -> None:
        self.release_all("gradients")


class Partitioned(DeepSpeed):
    """Stage 3."""

    def made(self) -> Stream:
        run = self.run
        order = Order(self.old, self.buckets.persistent, run.checkpointing != "none")
        alone = run.spread.shards == 1
        self.whole = Coordinator(self, order, alone, alone and not run.parameters_on_host, self.buckets.prefetch)
        return super().made()

    def enter(self, name: str) -> None:
        super().enter(name)
        self.whole.entered(name)

    def _engine(self) -> None:
        super()._engine()
        width = BYTES[self.run.compute_dtype]
        if self.largest:
            self.hold("bucket", width * self.buckets.reduce)
        if not self.run.optimizer_on_host:
            self.hold("gradients", round(width * self.held_numel()), owner="gradient")
        if not self.whole.free:
            self.hold("small", self.whole.order.small, self.gathers)

    def groups(self) -> list[int]:
        whole, rest = divmod(round(self.held_numel()), self.buckets.group)
        return [self.buckets.group] * whole + [rest] * (rest > 0)

    def update(self, events: list[tuple[int, int]]) -> None:
        if self.run.compute_dtype == "float16" and not self.run.optimizer_on_host:  # whether a gradient is infinite
            numel = round(self.held_numel())
            self.hold("absolute", 2 * numel, self.reduces)
            self.passing(numel, self.reduces)
            self.release("absolute")
        super().update(events)

    def arrived(self, entry: int) -> None:
        super().arrived(entry)
        old = self.old.entries[entry]
        if self.run.optimizer_on_host:
            self.passing(8 * min(-(-old.n_bytes // old.itemsize // self.ranks), _NORM), self.reduces)


class Order:
    """The order in which a micro-step uses parameters: entries of the stream of one device. Small ones are left out."""

    def __init__(self, stream: Stream, persistent: int, twice: bool) -> None:
        self.twice, self.due = twice, list[int]()
        found = {i: e for i, e in enumerate(stream.entries) if e.owner == "parameter"}
        self.numel = {i: e.n_bytes // e.itemsize for i, e in found.items()}
        self.small = sum(e.n_bytes for i, e in found.items() if self.numel[i] <= persistent)
        self.blocks: dict[int | None, list[int]] = {None: []}
        for i, entry in found.items():
            if self.numel[i] > persistent:
                self.blocks.setdefault(block_of(stream.sections[entry.section]), []).append(i)
        outside = self.blocks.pop(None)
        alike = [i for i in outside[1:] if found[i].shape == found[outside[0]].shape]
        self.head = alike or outside[:1]  # the embedding itself where the model is tied
        self.front = [i for i in outside if i not in alike]
        first = stream.sections.index("forward before")
        names = stream.sections[first : stream.sections.index("idle", first) + 1]
        self.trace = [i for name in names for i in self.uses(name)]

    def uses(self, name: str) -> list[int]:
        """What is used as the section begins; a block's second use, in backward, comes as its section ends."""
        block = block_of(name)
        if name == "forward before":
            return self.front
        if name in ("loss", "backward start"):
            return self.head
        if name == "idle":
            due, self.due = self.due, []
            return due + self.front
        if block is None or not name.startswith(("forward", "backward")):
            return []
        now = self.blocks.get(block, [])
        if name.startswith("forward"):
            return now
        due, self.due = self.due, now[::-1]
        if self.twice:
            return due + now
        due, self.due = self.due, []
        return due


@dataclass
class Coordinator:
    """Which parameters are whole (``partitioned_param_coordinator.py``)."""

    rank: DeepSpeed
    order: Order
    alone: bool
    """One rank: nothing is gathered, but parameters may come from the host."""
    free: bool
    """Nothing comes at all."""
    bucket: int
    """Elements that are asked for together, or the one parameter that goes beyond."""
    place: int = 0
    """Uses of the micro-step so far."""
    ahead: int = 0
    """Uses whose parameters have been asked for."""
    live: int = 0
    last: int = -1
    flat: dict[int, list[int]] = field(default_factory=dict)
    """Parameters gathered together, by each of them that has not been used."""

    def __post_init__(self) -> None:
        trace = self.order.trace
        self.mile = list(accumulate((self.order.numel[i] for i in trace), initial=0))
        self.next: list[int] = [len(trace)] * len(trace)
        seen: dict[int, int] = {}
        for place in reversed(range(len(trace))):
            self.next[place] = seen.get(trace[place], len(trace))
            seen[trace[place]] = place

    def entered(self, name: str) -> None:
        for part in self.order.uses(name):
            self._leave()
            self._use(part)
            self.last, self.place = self.place, self.place + 1
            self.ahead = max(self.ahead, self.place)
            while self.live < LIVE and self.ahead < len(self.order.trace):
                self._ask()
        if name == "idle":
            self.rank.release_all("whole")
            self.flat.clear()
            self.place = self.ahead = self.live = 0
            self.last = -1

    def _ask(self) -> None:
        """Gather what follows: one parameter in its place, several in a flat tensor."""
        numel, parts = 0, list[int]()
        most = min(LIVE - self.live, self.bucket)
        while numel < most and self.ahead < len(self.order.trace):
            part = self.order.trace[self.ahead]
            self.ahead += 1
            if part not in parts and part not in self.flat and f"whole {part}" not in self.rank.open:
                parts.append(part)
                numel += self.order.numel[part]
        self.live += numel
        if len(parts) > 1 and not self.alone:
            self.flat |= dict.fromkeys(parts, parts)
            self._hold(f"whole of {parts[0]}", parts)
        else:
            for part in parts:
                self._hold(f"whole {part}", [part])

    def _use(self, part: int) -> None:
        """At the first use of what was gathered together all of it is copied out; the flat tensor goes with the last use."""
        parts = self.flat.get(part)
        if parts is None:
            if f"whole {part}" not in self.rank.open:
                self.live += self.order.numel[part]
                self._hold(f"whole {part}", [part])
            return
        for one in parts:
            self._hold(f"whole {one}", [one])
        del self.flat[part]
        if not any(one in self.flat for one in parts):
            self.rank.release(f"whole of {parts[0]}")

    def _hold(self, name: str, parts: list[int]) -> None:
        if not self.free:
            self.rank.hold(name, sum(self.rank.old.entries[part].n_bytes for part in parts), self.rank.gathers)

    def _leave(self) -> None:
        """Let go of what was used last, unless it is asked for again or used again soon."""
        place, trace = self.last, self.order.trace
        if place < 0:
            return
        again = self.next[place]
        soon = again < len(trace) and (again < self.ahead or self.mile[again] - self.mile[place + 1] < LIVE)
        if not soon:
            self.rank.release(f"whole {trace[place]}")
            self.live -= self.order.numel[trace[place]]
