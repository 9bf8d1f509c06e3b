"""What an optimizer keeps of each trained tensor and what it takes while it steps: exact bytes, by arithmetic alone.

Torch-free twin of the rules of ``nn``: they make their buffers from ``Update.buffers``, so that what is predicted and what
is allocated are one list. A rule works in chunks, so that what is alive beside the states does not grow with the model.

Of a tensor that is divided among ranks each rank steps its shard as a tensor of its own, cut along the first dimension.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

OptimizerKind = Literal[
    "adamw", "adamw_8bit", "adamw_4bit", "lion", "lion_8bit", "sgd", "adafactor", "apollo", "apollo_mini"
]
# Other tools' words for the same: transformers' and Axolotl's ``optim``, class names of torch, bitsandbytes and torchao.
# Paging is not taken over: what is paged there is held here.
OPTIMIZERS: dict[str, OptimizerKind] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(
        ("adamw_bnb_8bit", "adamw8bit", "adamw_torch_8bit", "ao_adamw_8bit", "paged_adamw_8bit"), "adamw_8bit"
    ),
    **dict.fromkeys(("adamw4bit", "adamw_torch_4bit", "ao_adamw_4bit"), "adamw_4bit"),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "paged_lion"), "lion"),
    **dict.fromkeys(("lion8bit", "paged_lion_8bit"), "lion_8bit"),
    "apollo_adamw": "apollo",
}
Rounding = Literal["nearest", "stochastic"]
Buffers = dict[str, tuple[int, int]]
"""Name → (elements, bytes of each) of what is alive together while a chunk is stepped."""

# Elements stepped at once. CPU: see benchmarks/results/optimizers-cpu.json; CUDA: enough to be worth its calls, not measured.
CHUNK = {"cpu": 2**17, "cuda": 2**22}
# Smaller tensors keep fp32 moments: bitsandbytes (``optim/optimizer.py``, min_8bit_size) and torchao (``optim/adam.py``).
SMALLEST_CODED = 4096
BLOCK = {8: 256, 4: 128}  # elements that share a scale: theirs too
ALIGNED = 256  # a chunk is whole blocks of either
_ENCODE = 2**16  # a code for every pattern of 16 bits
_DECODE = {8: 256 * 4, 4: 256 * 8}  # a value a code; two values a byte of two codes
_CODED: dict[str, int] = {"adamw_8bit": 8, "adamw_4bit": 4, "lion_8bit": 8}
_MOMENTS: dict[str, int] = {"adamw": 2, "adamw_8bit": 2, "adamw_4bit": 2, "lion": 1, "lion_8bit": 1, "sgd": 0}
RANK: dict[str, int] = {"apollo": 256, "apollo_mini": 1}  # of the space gradients are projected into: its authors' own
_ADAM = ("adamw", "adamw_8bit", "adamw_4bit")
_COUNT = 4  # bytes of a step count


@dataclass(frozen=True, slots=True)
class Piece:
    """A trained tensor, or a rank's shard of it. ``rows`` and ``columns`` are its first and its last dimension, 0 of a
    vector; where they are not all of it, it is a stack of ``rows`` matrices."""

    numel: int
    rows: int
    columns: int
    bits: int

    @property
    def is_matrix(self) -> bool:
        return bool(self.columns) and self.rows * self.columns == self.numel

    @property
    def stacked(self) -> int:
        """Matrices in it; 0 of a vector."""
        return 0 if not self.columns else 1 if self.is_matrix else self.rows


def together(pieces: Iterable[Piece]) -> Piece:
    """Stands for all that an elementwise rule steps in one call: as large as the largest, as narrow as the narrowest."""
    known = list(pieces)
    return Piece(max(piece.numel for piece in known), 0, 0, min(piece.bits for piece in known))


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer by its kind. ``rounding``: how a value that is kept in bfloat16 is written back."""

    kind: OptimizerKind = "adamw"
    rounding: Rounding = "nearest"
    chunk: int = CHUNK["cpu"]

    @property
    def is_fused(self) -> bool:
        """One kernel of torch's for all of it, which takes nothing beside the states."""
        return self.kind == "adamw" and self.rounding == "nearest"

    @property
    def coded_bits(self) -> int:
        """Of a moment that is quantised; 0 where none is."""
        return _CODED.get(self.kind, 0)

    @property
    def by_matrix(self) -> bool:
        """Whether what is kept depends on rows and columns."""
        return self.kind == "adafactor" or self.kind in RANK

    def projects(self, piece: Piece) -> bool:
        """Whether the gradient is projected to a low rank: a matrix with more of both sides."""
        return self.kind in RANK and piece.is_matrix and min(piece.rows, piece.columns) > RANK[self.kind]

    def factors(self, piece: Piece) -> bool:
        """Whether the second moment is kept as rows and columns."""
        return self.kind == "adafactor" and piece.columns > 0

    def codes(self, numel: int) -> bool:
        """Whether the moments of a tensor of that size are quantised."""
        return bool(self.coded_bits) and numel >= SMALLEST_CODED

    def tensors(self, piece: Piece) -> list[int]:
        """Bytes of every state of one tensor."""
        if self.factors(piece):
            return [4 * piece.numel // piece.columns, 4 * piece.stacked * piece.columns, _COUNT]
        if self.kind == "adafactor":
            return [4 * piece.numel, _COUNT]
        if self.projects(piece):
            moment = 4 * RANK[self.kind] * max(piece.rows, piece.columns)
            return [moment, moment, 4, _COUNT]
        as_elements = "adamw" if self.kind in RANK else self.kind
        counts = [_COUNT] if as_elements in _ADAM else []
        return [*_MOMENTS[as_elements] * self._moment(piece), *counts]

    def scalar_bytes(self, piece: Piece) -> int:
        """Of its states, those that are single numbers: a step count, APOLLO's norm."""
        projects = self.projects(piece)
        counted = projects or self.kind == "adafactor" or self.kind in (*_ADAM, *RANK)
        return _COUNT * counted + 4 * projects

    def _moment(self, piece: Piece) -> list[int]:
        if not self.coded_bits:
            return [piece.numel * piece.bits // 8]
        if not self.codes(piece.numel):
            return [4 * piece.numel]
        block = BLOCK[self.coded_bits]
        blocks = -(-piece.numel // block)
        return [blocks * block * self.coded_bits // 8, 4 * blocks]

    def table_bytes(self, pieces: Iterable[Piece]) -> int:
        """The tables of codes, which all tensors share; made where the first moment is quantised."""
        if not any(self.codes(piece.numel) for piece in pieces):
            return 0
        return _MOMENTS[self.kind] * (_DECODE[self.coded_bits] + _ENCODE)

    def temporary_bytes(self, pieces: Iterable[Piece], skips: bool) -> int:
        """Beside the states while these are stepped; ``skips``: with a scaler, so that a step may have to change nothing."""
        if self.is_fused:
            return 0
        known = list(pieces)
        if self.by_matrix:
            return max((_sum(self.buffers(piece, skips)) for piece in known), default=0)
        return _sum(self.buffers(together(known), skips)) if known else 0

    def buffers(self, largest: Piece, skips: bool) -> Buffers:
        """What is alive together while ``largest`` is stepped; an elementwise rule steps smaller ones in the same."""
        if self.projects(largest):
            found = self._projecting(largest, skips)
        elif self.kind == "adafactor":
            found = self._factoring(largest, skips)
        elif self.kind in RANK:
            return (
                Update("adamw", self.rounding, self.chunk).buffers(largest, skips) if self.rounding != "nearest" else {}
            )
        elif self.is_fused:
            return {}
        else:
            found = self._elementwise(largest, skips)
        if skips:
            found["skip"] = (1, 1)
        if self.rounding == "stochastic":
            found["seed"] = (1, 4)
        return found

    def _elementwise(self, largest: Piece, skips: bool) -> Buffers:
        n = min(self.chunk, -(-largest.numel // ALIGNED) * ALIGNED)
        coded, half = self.codes(largest.numel), largest.bits < 32
        found = _weights(n, half, skips)
        if self.kind != "sgd" or self.rounding == "stochastic":
            found["scratch"] = (n, 4)
        if coded or skips or (half and not self.coded_bits):
            found |= {f"moment {i}": (n, 4) for i in range(_MOMENTS[self.kind])}
        if coded:
            found |= dict.fromkeys(("scale", "inverse"), (n // BLOCK[self.coded_bits], 4))
        if coded or (half and skips):
            found["narrow"] = (n, 2)
        if self.rounding == "stochastic":
            found["noise"] = (n, 4)
        if self.kind in _ADAM:
            found["scalars"] = (3, 8)
        return found

    def _factoring(self, piece: Piece, skips: bool) -> Buffers:
        half = piece.bits < 32
        if not piece.columns:
            rows, columns, sums = piece.numel, 1, {}
            n = min(self.chunk, piece.numel)
        else:
            rows, columns = piece.numel // piece.columns // piece.stacked, piece.columns
            sums = {"rows": (rows, 4), "columns": (columns, 4), "part": (columns, 4)}
            n = min(max(1, self.chunk // columns), rows) * columns
        found = {**_weights(n, half, skips), "scratch": (n, 4), **sums, "scalars": (4, 4)}
        return self._written(found, n, half, skips)

    def _projecting(self, piece: Piece, skips: bool) -> Buffers:
        half, rank = piece.bits < 32, RANK[self.kind]
        short, long = sorted((piece.rows, piece.columns))
        n = min(max(1, self.chunk // piece.columns), piece.rows) * piece.columns
        found = {
            **_weights(n, half, skips), **dict.fromkeys(("bits", "turn", "projection"), (rank * short, 4)),
            **dict.fromkeys(("low", "direction"), (rank * long, 4)), "channels": (long, 4), "norms": (long, 4), "scalars": (5, 4),
        }  # fmt: skip
        if piece.rows == short:
            found["part"] = (long, 4)
        if skips:
            found["moment"] = (rank * long, 4)
        if self.rounding == "stochastic" and half:
            found["scratch"] = (n, 4)
        return self._written(found, n, half, skips)

    def _written(self, found: Buffers, n: int, half: bool, skips: bool) -> Buffers:
        if half and skips:
            found["narrow"] = (n, 2)
        if self.rounding == "stochastic" and half:
            found["noise"] = (n, 4)
        return found


def _weights(n: int, half: bool, skips: bool) -> Buffers:
    """fp32 copies: of the gradient and the weight where they are not fp32, of a weight that may have to stay as it is."""
    found: Buffers = {"gradient": (n, 4)} if half else {}
    return {**found, "weight": (n, 4)} if half or skips else found


def _sum(buffers: Buffers) -> int:
    return sum(count * width for count, width in buffers.values())
