"""How the examples of one step are shared out over micro-batches: few, full, and never over a number of tokens.

First-fit decreasing: longest first, each into the first micro-batch with room. Where only tokens are limited it makes
at most 11/9 of the fewest possible, and one (Dósa 2007). Deterministic, so a resumed run makes the same micro-batches.
Declined: cutting an example in two.
"""

from collections.abc import Callable, Sequence

ALIGNMENT = 16
"""An example starts at a multiple of 16 tokens. Ever new lengths mean ever new kernels, compiled and kept by the library
that multiplies: on a CPU the 135M model's process was 380 MB above its steady state after 8 steps without alignment, 315
with 8, 274 with 16, 242 with 32, for 0.5, 1.2, 2.6 and 5.3 % of padding at a mean length of 290."""


def width(length: int) -> int:
    """Tokens an example of ``length`` takes in a batch."""
    return -(-length // ALIGNMENT) * ALIGNMENT


ROW = 64
"""A packed row is filled up to a multiple of 64 tokens, for the same reason: what was compiled for a shape stays until the
process ends (oneDNN 3.12: 256 KiB for each product of each new number of rows, however small its cache of primitives)."""


def row_of(widths: Sequence[int]) -> tuple[int, ...]:
    """The widths of all that a packed row of examples of these widths has: what fills it is of the shortest there can be."""
    return (*widths, *(ALIGNMENT,) * (-sum(widths) % ROW // ALIGNMENT))


def split(lengths: Sequence[int], max_sequences: int, max_tokens: int) -> list[list[int]]:
    """Positions in ``lengths`` (tokens) by micro-batch: each within both limits by widths, before its row is
    filled, or one single longer example."""
    if max_sequences < 1 or max_tokens < 1:
        raise ValueError(f"a micro-batch holds at least 1 sequence of 1 token, not {max_sequences} of {max_tokens}")
    groups: list[list[int]] = []
    room: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        taken = width(int(lengths[position]))
        for number, group in enumerate(groups):
            if taken <= room[number] and len(group) < max_sequences:
                group.append(position)
                room[number] -= taken
                break
        else:
            groups.append([position])
            room.append(max_tokens - taken)
    return groups


Split = Callable[[Sequence[int]], list[list[int]]]


def shared_out(lengths: Sequence[int], split: Split, ranks: int, as_many: bool) -> list[list[list[int]]]:
    """Of each of ``ranks`` its micro-batches: positions in ``lengths``, every ``ranks``-th of them split by itself.

    ``as_many``: all get the same number of micro-batches. Whoever has fewer halves those with most examples, and has
    empty ones where there are none left to halve.
    """
    shares = [range(rank, len(lengths), ranks) for rank in range(ranks)]
    made = [[[share[i] for i in group] for group in split([lengths[i] for i in share])] for share in shares]
    most = max(map(len, made)) if as_many else 0
    for groups in made:
        while len(groups) < most:
            largest = max(range(len(groups)), key=lambda i: len(groups[i])) if groups else 0
            half = len(groups[largest]) // 2 if groups else 0
            groups.append(groups[largest][half:] if half else [])
            if half:
                groups[largest] = groups[largest][:half]
    return made
