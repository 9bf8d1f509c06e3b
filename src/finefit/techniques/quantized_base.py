"""QLoRA's base (arXiv:2305.14314): the blocks' linear weights in 8, 4, 3 or 2 bits, frozen, a matrix again for each product.

Chosen by the user as a method (``qlora``), never by the planner for memory's sake. The formats are ``nn.blockwise``'s, the
layer is ``nn.quantised_linear.QuantisedLinear``. Head, embedding, norms and biases stay as they are. Declines expert weights
of three dimensions, and training of what is quantised.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..layout import BITS, Layout, ParamGroup
from .base import NotAsPlanned, Technique, Unsuitable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run

BLOCK, GROUP = 64, 256  # elements that share a scale, scales that share one in turn: nn.blockwise's
# On a CPU 2**18 to 2**20 are equally fast (2 cores, torch 2.13, 2026-11-29); on CUDA enough to be worth its calls, not measured.
CHUNK = {"cpu": 2**19, "cuda": 2**23}
# Bytes an element of a chunk while it is quantised: the same over their scale and its codes before they are packed; its
# values in fp32 beside them, unless they are stored so. Then the bounds between codes, of the weight and of its scales.
_ENCODING, _VALUES, _BOUNDS, _SCALE_BOUNDS = {2: 8, 3: 8, 4: 8, 8: 5}, 4, {2: 4 * 3, 3: 4 * 7, 4: 4 * 15, 8: 0}, 4 * 255
_GRIDS = {2: "four levels", 3: "eight levels", 4: "NF4", 8: "int8"}
_TABLES = {2: {"fours": (256, 128)}, 3: {"fours": (4096, 128), "upper": (256, 128)}, 4: {"pairs": (256, 64)}, 8: {}}
Bits = Literal[2, 3, 4, 8]
Scales = Literal["double", "plain"]
FORMS: dict[str, tuple[Bits, Scales]] = {
    "nf4": (4, "double"), "nf4_plain": (4, "plain"), "int8": (8, "double"), "int8_plain": (8, "plain"),
    "lloyd3": (3, "double"), "lloyd3_plain": (3, "plain"), "lloyd2": (2, "double"), "lloyd2_plain": (2, "plain"),
}  # fmt: skip
# Whose name is the word of the traced graph: what is alive while a weight is brought back is the same for both.
_TRACED: dict[Bits, Bits] = {2: 4, 3: 4, 4: 4, 8: 8}


@dataclass(frozen=True, slots=True)
class QuantizedBase(Technique):
    name = "quantized_base"
    exact = False

    bits: Bits = 4
    scales: Scales = "double"
    """``double``: the scales of the blocks are quantised again."""
    chunk: int = CHUNK["cpu"]
    """Elements brought back at once, a multiple of 16,384."""

    def rewrite(self, layout: Layout) -> Layout:
        if any(len(p.shape) > 2 for p in layout.model.block_parameters()):
            raise Unsuitable("its blocks have expert weights of three dimensions, which are not quantised yet")
        if self.chunk < 1 or self.chunk % (BLOCK * GROUP):
            raise Unsuitable(f"a chunk of {self.chunk} elements is not whole groups of {BLOCK * GROUP}")
        packed = [group for group in layout.groups if _is_packed(group)]
        if not packed:
            raise Unsuitable("the model has no linear layers to quantise")
        kept = tuple(group for group in layout.groups if not _is_packed(group))
        groups = (*(part for group in packed for part in self._parts(group)), *self._tables(), *kept)
        word = next(word for word, form in FORMS.items() if form == (_TRACED[self.bits], self.scales))
        at_once = min(self.chunk, max(_blocks(group) for group in packed) * BLOCK)
        return replace(
            layout, groups=groups, graph=(*layout.graph, word), dequantised=at_once,
            in_flight=max(self._in_flight(group, layout.model.dtype) for group in packed),
        )  # fmt: skip

    def _parts(self, group: ParamGroup) -> Iterator[ParamGroup]:
        """Codes and scales of a group of weights, the last block of each filled up."""
        blocks = _blocks(group)
        yield replace(group, numel=blocks * BLOCK, bits=self.bits, trainable=False, rows=0)
        scale = replace(group, trainable=False, role="scale", rows=0)
        if self.scales == "plain":
            yield replace(scale, name=f"{group.name}.scale", numel=blocks, bits=32)
            return
        yield replace(scale, name=f"{group.name}.scale_code", numel=blocks, bits=8)
        yield replace(scale, name=f"{group.name}.group_scale", numel=-(-blocks // GROUP), bits=32)
        yield replace(scale, name=f"{group.name}.mean", numel=1, bits=32)

    def _tables(self) -> Iterator[ParamGroup]:
        for name, (numel, bits) in _TABLES[self.bits].items():
            yield ParamGroup(f"tables.{name}", numel, 1, bits, False, "scale")
        if self.scales == "double":
            yield ParamGroup("tables.dynamic", 256, 1, 32, False, "scale")

    def _in_flight(self, group: ParamGroup, dtype: str) -> int:
        """Bytes beside the model and the weight itself: its scales, and a chunk's codes or the codes of the scales."""
        blocks, chunk = _blocks(group), min(self.chunk, _blocks(group) * BLOCK)
        each = _ENCODING[self.bits] + (0 if BITS.get(dtype, 32) == 32 else _VALUES)
        scales = 12 * GROUP * -(-blocks // GROUP) + _SCALE_BOUNDS if self.scales == "double" else 0
        return 4 * blocks + max(each * chunk + _BOUNDS[self.bits], scales)

    def apply(self, run: "Run") -> None:
        from ..nn.blockwise import Tables
        from ..nn.quantised_linear import QuantisedLinear
        from ..run import blocks_of, is_linear

        device = next(run.model.parameters()).device
        tables = Tables(self.bits, self.scales, device)
        for block in blocks_of(run.model):
            for parent in list(block.modules()):
                for name, child in list(parent.named_children()):
                    if is_linear(child):
                        setattr(parent, name, QuantisedLinear(child, self.bits, self.scales, self.chunk, tables))

    def describe(self) -> str:
        scales = "their scales quantised again" if self.scales == "double" else "their scales in fp32"
        form = f"{self.bits} bits ({_GRIDS[self.bits]}, blocks of {BLOCK}, {scales})"
        return f"linear weights of the blocks in {form}; a matrix again for each product, never kept"

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        from ..nn.quantised_linear import QuantisedWeight
        from ..run import blocks_of, is_linear

        linears = {
            name: module.weight
            for name, module in blocks_of(run.model).named_modules()
            if is_linear(module) or hasattr(module, "lora_A")
        }
        other = [n for n, w in linears.items() if not (isinstance(w, QuantisedWeight) and w.bits == self.bits)]
        if other or not linears:
            raise NotAsPlanned(f"quantized_base: {len(other)} of {len(linears)} weights are not so: {other[:3]}")


def _is_packed(group: ParamGroup) -> bool:
    """A linear layer's weight inside a block."""
    return group.role == "linear" and group.name.startswith("block.")


def _blocks(group: ParamGroup) -> int:
    return -(-group.numel // BLOCK)
