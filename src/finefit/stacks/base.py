"""Stepped: what a foreign tool's model code looks like to ``simulate``: blocks to watch, a loss to call."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ..ledger import Ledger, NoLedger


@dataclass(slots=True)
class Stepped:
    """``loss(ids_bs, label_bs, ledger)`` runs the forward pass, marks ``loss`` where the loss begins, and returns it.

    ``model`` holds every parameter in its stored type, frozen ones without gradient; each block is called once in a
    forward pass.
    """

    model: nn.Module
    blocks: nn.ModuleList
    loss: Callable[[Tensor, Tensor, Ledger | NoLedger], Tensor]
