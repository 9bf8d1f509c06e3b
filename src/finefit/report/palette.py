"""The seven components of memory and the moments of a step: one order, one name, one colour, wherever they are shown.

Colours are Okabe and Ito's (told apart with any colour vision), grey for what the allocator and context keep.
"""

from collections.abc import Mapping
from typing import Any

from ..footprint import LABELS as LABELS
from ..footprint import MOMENT_LABELS

#: Moment -> how people call it, in the order of a step.
MOMENTS = MOMENT_LABELS

#: Component -> colour; the order is the order of stacks, tables and legends.
COLOURS: dict[str, str] = {
    "parameter": "#0072B2",
    "gradient": "#009E73",
    "optimizer_state": "#E69F00",
    "activation": "#D55E00",
    "temporary": "#CC79A7",
    "input": "#56B4E9",
    "reserved": "#999999",
}


def at_peak(footprint: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by component at the moment of the peak, every component in stack order."""
    return of_moment(footprint, str(footprint.get("peak_moment", "")))


def with_reserved(footprint: Mapping[str, Any]) -> dict[str, int]:
    """`at_peak` with what the device must have beside live tensors in its place: the parts of `total_bytes`."""
    parts = at_peak(footprint)
    return {**parts, "reserved": parts["reserved"] + int(footprint.get("reserved_bytes", 0))}


def total_bytes(footprint: Mapping[str, Any]) -> int:
    """What the device must have: the peak of live tensors, and what is reserved beside them."""
    return int(footprint["peak_bytes"]) + int(footprint.get("reserved_bytes", 0))


def of_moment(footprint: Mapping[str, Any], moment: str) -> dict[str, int]:
    """Bytes by component at one moment; zeros where the footprint has nothing."""
    found = footprint.get("moments", {}).get(moment, {})
    return {component: int(found.get(component, 0)) for component in COLOURS}


def moment_bytes(footprint: Mapping[str, Any], moment: str) -> int | None:
    """All bytes at one moment, or None where the footprint does not know it."""
    found = footprint.get("moments", {}).get(moment)
    return None if found is None else sum(map(int, found.values()))
