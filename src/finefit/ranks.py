"""Which rank's stream a spread run is read as, and FSDP's units: gathered, let go, reduced.

Follows ``torch/distributed/fsdp/_runtime_utils.py`` and ``flat_param.py`` (FSDP 1), ``_fully_shard/
_fsdp_param_group.py`` and ``_fsdp_collectives.py`` (FSDP 2), PyTorch 2.13. A unit a block, all else the root, which stays
whole from the start of forward to the end of backward.

- FSDP 2 gathers on a stream of its own, then copies out where it computes: the gathered buffer of a unit lives until the
  next one is copied out in forward, and in backward it is the next unit's. A unit's whole gradients are copied into the
  reduction's input, which lives until the next unit's takes its place; shards are born on the stream that reduces.
- FSDP 1 gathers a flat parameter, in backward one ahead (not under a reentrant checkpoint: its forward left no hooks, and
  it gathers twice). The stream that computes reads what was let go while the host asks for the next, up to two behind.
  The gradients of its views are joined in a flat one, which is reduced. Where frozen weights share the flat parameter
  with trained ones its gradient is of all of it. Inputs of units whose parameters are frozen are hooked, and the hooks
  are kept to the end of backward: a reentrant checkpoint's inputs and their gradients live as long.

Where gradients wait for the last micro-step (``no_sync``) they stay whole until then.
"""

from dataclasses import dataclass, field, replace

from .deepspeed import Partitioned, Replicated
from .foreign import ForeignRun
from .gemini import Gemini
from .sharding import BYTES, GATHER, REDUCE, Buckets, Rank, padded_share
from .stream import Entry, Stream, block_of

ROOT = -1
_STEPPED = 2  # micro-steps of a plan's step that are simulated
_IN_FLIGHT = 2
"""``_limiter_utils.py``: a gather waits for the last but one of the units that were let go."""
LOSS_OUTSIDE = ("torchtitan", "torchtune", "litgpt", "lit_gpt")
"""Tools whose model returns logits: backward is under way before it comes to the model."""


def of_rank(stream: Stream, run: ForeignRun, buckets: Buckets | None = None) -> Stream:
    """The stream of one of ``run.spread``'s ranks."""
    spread = run.spread
    if spread.shard_stage == 0 and spread.engine != "ddp":
        return stream
    kinds: dict[str, type[Rank]] = {
        "fsdp1": FlatUnits,
        "fsdp2": Units,
        "deepspeed": Partitioned if spread.shard_stage == 3 else Replicated,
        "gemini": Gemini,
    }
    return kinds.get(spread.engine, Rank)(stream, run, buckets or Buckets()).made()


@dataclass
class Gathering(Rank):
    """FSDP 2's whole parameters: gathered, copied out, let go."""

    def unshard(self, unit: int) -> None:
        """Gather it if that was not done ahead, copy it out."""
        if self.stage != 3 or f"unit {unit}" in self.open:
            return
        before = [name for name in self.open if name.startswith("gathered") and name != f"gathered {unit}"]
        self._gathered(unit)
        for name in before:
            self.release(name)
        self.hold(f"unit {unit}", self.unit_bytes.get(unit, 0))
        if self.new.sections[-1].startswith("backward"):
            self.release(f"gathered {unit}")

    def _gathered(self, unit: int) -> None:
        n_bytes = self.unit_bytes.get(unit, 0)
        if f"gathered {unit}" in self.open or not n_bytes:
            return
        if self.stored != 1.0:  # shards in the type that is gathered
            self.hold("cast", n_bytes // self.ranks, GATHER)
        self.hold(f"gathered {unit}", n_bytes, GATHER)
        self.release("cast")

    def ready(self, unit: int) -> None:
        """Gather the unit whose backward comes next."""
        if unit >= 0 and self.stage == 3 and f"unit {unit}" not in self.open:
            self._gathered(unit)

    def resharded(self, unit: int) -> None:
        stays = self.run.spread.stays
        if unit >= 0 and stays not in ("all", "step") and not (unit == self.depth - 1 and stays == "last"):
            self.release(f"unit {unit}")


@dataclass
class Units(Gathering):
    """FSDP 2, and what it shares with FSDP 1."""

    grads: dict[int, list[int]] = field(default_factory=dict)
    """The step's gradients of each unit, as entries of the old stream."""
    used: set[int] = field(default_factory=set)
    """Those that were let go before they were reduced."""
    running: int | None = None
    """The unit whose backward runs."""
    micro: int = -1
    steady: bool = False

    def made(self) -> Stream:
        self.reduced = BYTES[self.run.spread.reduce_dtype or self.run.compute_dtype] / BYTES[self.run.compute_dtype]
        old = self.old
        outside = [e for e in old.entries if e.owner == "parameter" and block_of(old.sections[e.section]) is None]
        inside = {e.shape for e in old.entries if e.owner == "parameter"} - {e.shape for e in outside}
        self.root_shapes = {e.shape for e in outside if e.shape not in inside and len(e.shape) > 1}
        return super().made()

    def share(self, old: Entry) -> int:
        shape = old.shape
        while old.owner == "gradient" and len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]  # summed over rows, kept as dimensions of one
        return padded_share(shape, self.ranks) * old.itemsize if shape else super().share(old)

    def held_numel(self) -> float:
        return sum(self.share(e) // e.itemsize for e in self.first_gradients())

    def enter(self, name: str) -> None:
        block = block_of(name)
        if name == "steady":
            self.steady = True
        elif name == "forward before":
            self.micro += 1
            self.unshard(ROOT)
        elif name.startswith("forward"):
            self.resharded(block - 1 if block is not None else self.depth - 1)
            if block is not None:
                self.unshard(block)
        elif name in ("loss", "backward start"):
            if name == "backward start" or self.run.tool in LOSS_OUTSIDE:  # the model's forward is over
                self.release_all("gathered")
            self.resharded(self.depth - 1)
            if name != "loss" and self.run.tool not in LOSS_OUTSIDE:
                self.ready(self.depth - 1)
        elif name.startswith("backward") and block is not None:
            self.post_backward()
            self.running = block
            self.unshard(block)
            self.ready(block - 1)
        elif name == "idle":
            self.finish()
        elif name == "optimizer":
            self.last_reduced()
            self.micro = -1
            self.grads.clear()
            self.used.clear()

    # Whole gradients

    @property
    def waits(self) -> bool:
        """Whether this micro-step leaves gradients whole."""
        run = self.run
        if run.spread.reduces == "each" or run.accumulation == 1:
            return False
        return run.longest_first if not self.steady else self.micro < min(run.accumulation, 3) - 1

    @property
    def stays_whole(self) -> bool:
        """Whether what is gathered is not let go of after this micro-step's backward."""
        run = self.run
        if run.spread.stays == "step":
            return self.micro < min(run.accumulation, _STEPPED) - 1
        return self.waits and run.spread.stays == "all"

    def copy(self, name: str, events: list[tuple[int, int]]) -> None:
        for entry, sign in events:
            old = self.old.entries[entry]
            if sign > 0 and old.owner == "gradient" and self.stage >= 2:
                unit = ROOT if old.shape in self.root_shapes or self.running is None else self.running
                if unit == ROOT:
                    self.post_backward()
                if name == "backward start":  # the gradient has reached what the model returned
                    self.ready(self.depth - 1)
                self.grads.setdefault(unit, []).append(entry)
            if sign > 0:
                self.at[entry] = self.new.born(replace(old, n_bytes=self.size(old)))
            elif entry in self.at:
                self.used.add(entry)
                self.let_go(name, old, self.at.pop(entry))

    def post_backward(self) -> None:
        """Let go of the unit whose backward ran, and reduce its gradients."""
        unit, self.running = self.running, None
        if unit is None:
            return
        self.reduce(unit)
        if not self.stays_whole:
            self.release(f"unit {unit}")

    def finish(self) -> None:
        """The root's turn, when all of backward is through."""
        self.post_backward()
        self.release_all("gathered")
        self.reduce(ROOT)
        self.release_all("summed")
        if not self.stays_whole:
            self.release_all("unit")
        self.release("reducing")

    def last_reduced(self) -> None:
        """A last micro-step that is not simulated: no more than one that waits, but it leaves shards."""
        if self.waits:
            for unit in [u for u in self.grads if self.waiting(u)]:
                self.hold("reducing", self.input_bytes(unit))
                self.release(f"flat {unit}")
                self._shards(unit)
                self.release("reducing")
            self.release_all("unit")

    def input_bytes(self, unit: int) -> int:
        """Of the reduction's input, where that is not the gradients themselves."""
        return round(self.trained_bytes(unit) * self.reduced)

    def trained_bytes(self, unit: int) -> int:
        """Of the unit's trained parameters, as computed."""
        return sum(self.old.entries[entry].n_bytes for entry in self.grads.get(unit, ()))

    @property
    def again(self) -> bool:
        """Whether shards of the micro-steps before are there to be added to."""
        return self.micro > 0 and (
            self.run.spread.reduces == "each" or self.run.spread.stages_whole < self.run.spread.stages_a_rank
        )

    def reduce(self, unit: int) -> None:
        """Whole gradients of the unit become shards, or stay."""
        n_bytes = self.trained_bytes(unit)
        if not self.stays_whole:
            self.release(f"unit {unit}")
        if self.waiting(unit):
            self._widened(unit)
        if self.stage < 2 or self.waiting(unit) or not n_bytes:
            return
        if self.again:  # gradients of this micro-step, which the stream of one device adds one by one
            self.hold("again", n_bytes)
        self.release("reducing")
        self.hold("reducing", self.input_bytes(unit))
        self.release("again")
        self.sharded(unit, n_bytes)

    def waiting(self, unit: int) -> bool:
        """Whether the unit's gradients stay whole after this micro-step."""
        spread = self.run.spread
        return self.waits and unit < -(-self.depth * spread.stages_whole // spread.stages_a_rank)

    def _widened(self, unit: int) -> None:
        """Whole gradients that wait are kept in the type of the reduction."""
        for entry in self.grads.get(unit, ()):
            old = self.old.entries[entry]
            if self.reduced != 1.0 and self.micro == 0 and entry in self.at:
                wide = self.new.born(replace(old, n_bytes=round(old.n_bytes * self.reduced)))
                self.new.died(self.at.pop(entry))
                self.at[entry] = wide

    def sharded(self, unit: int, n_bytes: int) -> None:
        """Shards are born in the type of the reduction, and cast to that of the parameters."""
        spread = self.run.spread
        if self.again and spread.engine == "fsdp2" and 0 < spread.shards < spread.data:
            self.hold(
                f"summed {unit}", round(n_bytes * self.reduced) // self.ranks, REDUCE
            )  # by replicas, added, and kept
        elif self.again:
            self.passing(round(n_bytes * self.reduced) // self.ranks, REDUCE)
        else:
            self._shards(unit)

    def _shards(self, unit: int) -> None:
        for entry in self.grads[unit]:
            old = self.old.entries[entry]
            if entry in self.at:
                self.new.died(self.at.pop(entry))
            if self.reduced != self.stored:
                self.hold(f"narrow {entry}", round(self.share(old) * self.reduced), REDUCE)
            made = self.new.born(replace(old, n_bytes=round(self.share(old) * self.stored), lane=REDUCE))
            if entry in self.used:
                self.new.died(made)
            else:
                self.at[entry] = made
        self.release_all("narrow")


class FlatUnits(Units):
    """FSDP 1."""

    kept: list[int]
    freed: list[int]

    def made(self) -> Stream:
        self.kept = []  # entries that live to the end of backward
        self.freed = []  # units let go, whose products the host has not waited for
        return super().made()

    def share(self, old: Entry) -> int:
        return -(-old.n_bytes // self.ranks)

    def unshard(self, unit: int) -> None:
        if self.stage == 3 and f"unit {unit}" not in self.open:
            if len(self.freed) >= _IN_FLIGHT:
                self.new.through(self.freed.pop(0))
            if self.stored != 1.0:
                self.hold("cast", self.unit_bytes.get(unit, 0) // self.ranks, GATHER)
            self.hold(f"unit {unit}", self.unit_bytes.get(unit, 0), GATHER)
            self.release("cast")

    def ready(self, unit: int) -> None:
        if not self.blind and unit >= 0:
            self.unshard(unit)

    @property
    def blind(self) -> bool:
        """Whether units are computed again by a forward pass that FSDP takes for another one."""
        return self.run.reentrant and self.run.checkpointing != "none"

    def release(self, name: str) -> None:
        """Before torch 2.1 (``_register_post_backward_reshard_only_hook``) nothing let a frozen unit go in backward."""
        is_unit, index = name.startswith("unit"), self.open.get(name)
        if self.run.frozen_stay and is_unit and self.new.sections[-1].startswith("backward"):
            return
        if is_unit and index is not None:
            self.new.entries[index].awaited = True
            self.freed.append(index)
        super().release(name)

    def enter(self, name: str) -> None:
        if name in ("forward before", "optimizer", "end") and self.freed:  # loops read each micro-step's loss
            self.new.through(self.freed[-1])
            self.freed.clear()
        super().enter(name)
        block = block_of(name)
        if (
            block is not None and name.startswith("backward") and self.blind
        ):  # once to compute it again, once for backward
            self.release(f"unit {block}")
            self.unshard(block)

    def let_go(self, name: str, old: Entry, index: int) -> None:
        """Free it, unless a hook on the input of a frozen unit keeps it, and its gradient, to the end of backward."""
        run = self.run
        hooked = run.method == "lora" and run.reentrant and run.checkpointing == "full"
        born = self.old.sections[old.section]
        if hooked and name.startswith("backward") and born.startswith("forward") and block_of(born) is not None:
            self.kept += [index, self.new.born(replace(old, owner="temporary"))]
        else:
            self.new.died(index)

    def finish(self) -> None:
        super().finish()
        while self.kept:
            self.new.died(self.kept.pop())
        if self.waits and not self.steady and self.grads:
            self._short_rows()

    def reduce(self, unit: int) -> None:
        n_bytes = self.trained_bytes(unit)
        if self.stage < 2 or not n_bytes:
            return
        whole = self.flat_bytes(unit)
        self.hold("views", whole - n_bytes * (self.micro == 0))  # gradients the stream of one device has not, or adds
        self.hold("joined", whole, owner="gradient")
        self.release("views")
        if self.micro == 0:
            for entry in [e for e in self.grads[unit] if e in self.at]:
                self.new.died(self.at.pop(entry))
        self.release(f"unit {unit}")
        if not self.waits:
            self.release(f"flat {unit}")
            if self.reduced != 1.0:
                self.passing(round(whole * self.reduced))
            self.sharded(unit, n_bytes)
        elif f"flat {unit}" not in self.open:
            self.open[f"flat {unit}"] = self.open.pop("joined")
        self.release("joined")

    def input_bytes(self, unit: int) -> int:
        return 0

    def flat_bytes(self, unit: int) -> int:
        """Of the gradient of its flat parameter."""
        mixed = self.run.method == "lora" and self.run.spread.units == "mixed"
        return self.unit_bytes[unit] if mixed else self.trained_bytes(unit)

    def _short_rows(self) -> None:
        """A later micro-step whose rows hardly take a place: a unit's gradients beside all that are there."""
        largest = max(self.grads, key=self.flat_bytes)
        self.unshard(ROOT)
        self.unshard(largest)
        self.ready(largest - 1)
        self.hold("views", self.flat_bytes(largest))
        self.passing(self.flat_bytes(largest))
        self.release("views")
        self.release_all("unit")
