"""The rule of each kind of optimizer."""

from collections.abc import Callable

from ..updating import OptimizerKind, Update
from .elementwise import Adam, Descent, Elementwise, Lion
from .factored import Adafactor
from .low_rank_step import Apollo
from .optimizers import AdamW, Rule

_RULES: dict[OptimizerKind, Callable[[Update], Rule]] = {
    "adamw": lambda how: AdamW() if how.is_fused else Elementwise(Adam(), how),
    "adamw_8bit": lambda how: Elementwise(Adam(), how),
    "adamw_4bit": lambda how: Elementwise(Adam(), how),
    "lion": lambda how: Elementwise(Lion(), how),
    "lion_8bit": lambda how: Elementwise(Lion(), how),
    "sgd": lambda how: Elementwise(Descent(), how),
    "adafactor": Adafactor,
    "apollo": Apollo,
    "apollo_mini": Apollo,
}


def rule_of(how: Update) -> Rule:
    return _RULES[how.kind](how)
