"""How the examples of one step are shared out over micro-batches: few, full, and never over a number of tokens.

First-fit decreasing: longest first, each into the first micro-batch with room. Where only tokens are limited it makes
at most 11/9 of the fewest possible, and one (Dósa 2007). Deterministic, so a resumed run makes the same micro-batches.
Declined: cutting an example in two, and padding (packed sequences have none).
"""

from collections.abc import Sequence


def split(lengths: Sequence[int], max_sequences: int, max_tokens: int) -> list[list[int]]:
    """Positions in ``lengths`` (tokens) by micro-batch: each within both limits, or one single longer example."""
    if max_sequences < 1 or max_tokens < 1:
        raise ValueError(f"a micro-batch holds at least 1 sequence of 1 token, not {max_sequences} of {max_tokens}")
    groups: list[list[int]] = []
    room: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = int(lengths[position])
        for number, group in enumerate(groups):
            if length <= room[number] and len(group) < max_sequences:
                group.append(position)
                room[number] -= length
                break
        else:
            groups.append([position])
            room.append(max_tokens - length)
    return groups
