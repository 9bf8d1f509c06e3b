"""What a technique is: one memory idea that says the same thing twice, on paper (``rewrite``) and for real (``apply``).

The law of the house, tested for every technique and pair: bytes counted after ``apply`` equal bytes counted after
``rewrite``. A technique knows no other technique; ``rewrite`` raises ``Unsuitable`` where the layout is not as it
needs, and the search keeps the reason.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from ..layout import Layout

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..run import Run


class Unsuitable(Exception):
    """This technique cannot be used on this layout; the text is a reason of the plan."""


class NotAsPlanned(Exception):
    """A post-condition failed: what ran is not what the plan says. A mistake of ours, never the user's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Technique:
    """Settings are the fields. ``exact``: loss and gradients are those of the plain run, up to rounding."""

    name: ClassVar[str]
    exact: ClassVar[bool]

    def rewrite(self, layout: Layout) -> Layout:
        return layout

    def apply(self, run: "Run") -> None:
        """Change the model, which is on meta, and the run's slots."""
        raise AssertionError(f"{self.name} has no real half")

    def divide(self, run: "Run") -> None:
        """Divide among the ranks what all techniques together have made of the model."""

    def describe(self) -> str:
        raise AssertionError(f"{self.name} does not say what it does")

    def setting(self) -> str:
        """The value of its key of ``memory.*`` that turns it on so, where it has one key of its name."""
        return "true"

    def turned_on(self) -> tuple[tuple[str, str], ...]:
        """What of ``memory.*`` is on by it: (key, value) pairs."""
        return ((self.name, self.setting()),)

    def verify(self, run: "Run", ledger: "Ledger") -> None:
        """Compare what really ran, on the run and in the rehearsal's ledger, with the settings; raise NotAsPlanned."""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **dataclasses.asdict(self)}
