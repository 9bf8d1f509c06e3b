"""The arena: one storage in which a model's streamed weights take turns, and where their bytes are meanwhile.

Every block's frozen tensors are for good views into one of two slots, the even blocks' or the odd ones', and each large
table outside the blocks (embedding, head) is one into the arena's beginning. Only the content of the arena changes, so a
view that autograd saved in forward is right again as soon as its block is back for its backward: the same address. Offsets
are multiples of ``ALIGNED``. What is in the arena when is the schedule's business (``nn.streamed``).

While weights are loaded each is put into its view and from there to its store; the next may be of another block, in the
same place. A tensor that its file has in the type it is held in is not touched at all: its store reads it there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..parts import put
from .quantised_linear import QuantisedWeight
from .stores import Extent, Origin, Store, store_for

ALIGNED = 64  # bytes
Weight = Tensor | QuantisedWeight


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a parameter is: ``start`` in its unit, in bytes."""

    start: int
    n_bytes: int
    shape: torch.Size
    dtype: torch.dtype


class Unit:
    """Tensors that come and go together: a block's, or one table. ``start`` is its place in the arena."""

    def __init__(self, start: int, tensors: Mapping[str, Tensor]) -> None:
        self.start, self.spots, self.n_bytes = start, {}, 0
        for name, tensor in tensors.items():
            n_bytes = tensor.numel() * tensor.element_size()
            self.spots[name] = Spot(self.n_bytes, n_bytes, tensor.shape, tensor.dtype)
            self.n_bytes += -(-n_bytes // ALIGNED) * ALIGNED

    @property
    def extent(self) -> Extent:
        return Extent(self.start, self.n_bytes)

    def overlaps(self, other: "Unit") -> bool:
        return self.start < other.start + other.n_bytes and other.start < self.start + self.n_bytes


class Arena(nn.Module):
    """Of ``blocks``' streamed parameters by their names in the model, one mapping a block, and of ``tables``.

    It has no parameter of its own: those of the model are views of it once it is laid out. ``place``: host or disk.
    """

    def __init__(self, blocks: Sequence[Mapping[str, Tensor]], tables: Mapping[str, Tensor], place: str) -> None:
        super().__init__()
        slot = max(Unit(0, tensors).n_bytes for tensors in blocks)
        self.blocks = [Unit(slot * (i % 2), tensors) for i, tensors in enumerate(blocks)]
        self.tables = {name: Unit(0, {name: tensor}) for name, tensor in tables.items()}
        self.units = [*self.blocks, *self.tables.values()]
        self.n_bytes = max(2 * slot, *(unit.n_bytes for unit in self.tables.values()), 0)
        self.place = place
        self._home = {name: (i, spot) for i, unit in enumerate(self.units) for name, spot in unit.spots.items()}
        self.held: set[int] = set()
        """Numbers of the units whose bytes are in the arena, whole."""
        self._storage: list[Tensor] = []  # no parameter and no buffer
        self.store: Store | None = None

    def lay(self, device: torch.device) -> None:
        """Take the storage."""
        self._storage[:] = [torch.empty(self.n_bytes, dtype=torch.uint8, device=device)]
        self.held.clear()
        self.store = store_for(self.place, self._storage[0], [unit.extent for unit in self.units])

    def empty(self, name: str, parameter: Tensor, device: torch.device) -> Tensor:
        """The tensor that stands for parameter ``name`` from now on: its view, or one of its own where it stays."""
        if name not in self._home:
            return torch.empty_like(parameter, device=device)
        unit, spot = self._home[name]
        start = self.units[unit].start + spot.start
        return self._storage[0][start : start + spot.n_bytes].view(spot.dtype).view(spot.shape)

    def put(self, name: str, weight: Weight, value: Tensor, origin: Origin | None = None) -> None:
        """Give ``weight``, the model's tensor ``name`` or a part of it, its value; ``origin`` is where a file has it."""
        self.held.clear()
        if isinstance(weight, QuantisedWeight):
            weight.copy_(value)
            for inner, parameter in weight.named_parameters():
                self._keep(f"{name}.{inner}", parameter)
            return
        if name in self._home and origin and value.dtype == weight.dtype and weight.is_contiguous():
            unit, start = self._place(name, weight)
            self._stored.link(unit, start, weight.numel() * weight.element_size(), origin)
            return
        weight.copy_(value)
        self._keep(name, weight)

    def _keep(self, name: str, weight: Tensor) -> None:
        """The bytes of a view that has just been filled, to the store."""
        if name not in self._home or isinstance(weight, FakeTensor):
            return
        for run in _runs(weight.detach()):
            self._stored.put(*self._place(name, run), run)

    def _place(self, name: str, view: Tensor) -> tuple[int, int]:
        """(unit, start in it) of the parameter ``name`` or a part of it."""
        unit = self._home[name][0]
        return unit, int(view.storage_offset()) * view.element_size() - self.units[unit].start

    @property
    def _stored(self) -> Store:
        assert self.store is not None, "the arena is not laid out yet"
        return self.store

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows of the table ``name``, which need not be in the arena: ``(*ids, width)``."""
        unit, spot = self._home[name]
        out = torch.empty(*ids.shape, spot.shape[1], dtype=spot.dtype, device=ids.device)
        if not isinstance(ids, FakeTensor):
            self._stored.rows(unit, ids.flatten().tolist(), out)
        return out


class Resident:
    """Stands where an arena may be: every parameter has a tensor of its own."""

    def lay(self, device: torch.device) -> None:
        return None

    def empty(self, name: str, parameter: Tensor, device: torch.device) -> Tensor:
        return torch.empty_like(parameter, device=device)

    def put(self, name: str, weight: Weight, value: Tensor, origin: Origin | None = None) -> None:
        if isinstance(weight, QuantisedWeight):
            weight.copy_(value)
        else:
            put(weight, value)


def home_of(model: Any) -> Arena | Resident:
    """Where the model's parameters have their storage."""
    return next((module for module in model.modules() if isinstance(module, Arena)), None) or Resident()


def _runs(view: Tensor) -> Iterator[Tensor]:
    """Its contiguous parts, in order."""
    if view.is_contiguous():
        yield view
        return
    for row in view:
        yield from _runs(row)
