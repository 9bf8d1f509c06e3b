"""Run: the slots techniques fill, and the one forward-and-loss every reader shares (loop, rehearsal, trace, evaluation).

A run has no methods and no technique's name in it. What is off is a null object: an infinite clip norm, a disabled
scaler, an empty context.

Shapes: B rows, S columns, T = B·S tokens, L labelled tokens, R = width(L), h hidden.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .data.micro import shared_out, width
from .engines.alone import Alone
from .ledger import Ledger, NoLedger
from .nn.attend import ATTENTION
from .nn.chunked_loss import Logits
from .nn.exchanged import Here
from .nn.gradients import global_norm
from .nn.optimizers import Optimizer


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens of one forward pass. ``label_l`` are the tokens that are trained, ``row_r`` the flat positions before them,
    filled up with the last of them to a `width`."""

    ids_bs: Tensor
    position_bs: Tensor
    bounds: tuple[int, ...]
    row_r: Tensor
    label_l: Tensor
    tokens: int
    exchange: Here = field(default_factory=Here)
    """How attention gets at the tokens that are with other ranks; ``bounds`` are of all of them."""

    def tensors(self) -> tuple[Tensor, ...]:
        return self.ids_bs, self.position_bs, self.row_r, self.label_l

    def to(self, device: torch.device) -> "MicroBatch":
        ids, position, row, label = (t.to(device, non_blocking=True) for t in self.tensors())
        return replace(self, ids_bs=ids, position_bs=position, row_r=row, label_l=label)


Example = tuple[Sequence[int], Sequence[int]]  # token ids, 1 where the token is trained


def plain_loss(model: Any, hidden_bsh: Tensor, batch: MicroBatch) -> Tensor:
    """Sum of cross-entropy over labelled tokens from full fp32 logits, as transformers computes it."""
    head = model.get_output_embeddings()
    logits, form = head(hidden_bsh), Logits.of(model.config, head)
    if form.scale != 1.0:
        logits = logits * form.scale
    if form.softcap is not None:
        logits = torch.tanh(logits / form.softcap) * form.softcap
    target = torch.full((logits.shape[0] * logits.shape[1],), -100, dtype=torch.long, device=logits.device)
    target[batch.row_r[: len(batch.label_l)]] = batch.label_l
    return form.vocabulary.cross_entropy(logits.float().flatten(0, 1), target)


def padded(examples: Sequence[Example]) -> MicroBatch:
    """One example a row, padded on the right: causal attention never looks at what follows, so no mask is needed."""
    longest = width(max(len(ids) for ids, _ in examples))
    ids_bs = torch.zeros(len(examples), longest, dtype=torch.long)
    rows: list[int] = []
    for i, (ids, mask) in enumerate(examples):
        ids_bs[i, : len(ids)] = torch.as_tensor(ids, dtype=torch.long)
        rows += [i * longest + t for t in range(len(ids) - 1) if mask[t + 1]]
    row_l = torch.tensor(rows, dtype=torch.long)
    bounds = tuple(range(0, longest * len(examples) + 1, longest))
    position = torch.arange(longest).expand(len(examples), longest)
    tokens = sum(len(ids) for ids, _ in examples)
    return MicroBatch(ids_bs, position, bounds, filled(row_l), ids_bs.flatten()[row_l + 1], tokens)


def filled(row_l: Tensor) -> Tensor:
    """``row_r``: rows whose loss nobody asks for make products of ever new numbers of rows few (`data.micro.ALIGNMENT`)."""
    last = row_l[-1:] if len(row_l) else row_l.new_zeros(1)
    return torch.cat((row_l, last.expand(width(max(len(row_l), 1)) - len(row_l))))


def of_share(run: "Run", examples: Sequence[Example], group: Sequence[int]) -> MicroBatch:
    """A micro-batch of a rank's; where it has none left while others do, one that nothing is learnt from."""
    if group:
        return run.collate([examples[i] for i in group])
    ids, mask = min(examples, key=lambda example: len(example[0]))
    return replace(run.collate([(ids, [0] * len(mask))]), tokens=0)


def batches_of(run: "Run", examples: Sequence[Example]) -> list[MicroBatch]:
    """The micro-batches of a global batch that are this rank's; of a process alone all of them."""
    world = run.world
    groups = shared_out([len(ids) for ids, _ in examples], run.split, world.data_size, world.lockstep)
    return [of_share(run, examples, group) for group in groups[world.data_rank]]


def one_by_one(lengths: Sequence[int]) -> list[list[int]]:
    """Each example is a micro-batch of its own."""
    return [[i] for i in range(len(lengths))]


@dataclass(slots=True)
class Doing:
    """Where a run is: told where it happens, so that an error can say what it came to."""

    moment: str = "load"
    """Of ``footprint.MOMENTS``."""
    step: int = 0
    """Updates that are made."""
    micro: int = 0
    """Which micro-batch of the step, from 0."""


Forward = Callable[["Run", MicroBatch, Ledger | NoLedger], Tensor]
"""A micro-batch through the model, to its summed loss."""


class Passes:
    """The passes of micro-batches through the model: each by itself, forward and backward, one after the other."""

    def learn(
        self, run: "Run", batches: Sequence[MicroBatch], labelled: float, told: Callable[[Tensor], None],
        ledger: Ledger | NoLedger,
    ) -> None:  # fmt: skip
        """Gradients of a step's micro-batches, of their loss divided by ``labelled``; ``told`` each loss where it is known."""
        for run.doing.micro, batch in enumerate(batches):
            ledger.mark("forward before")
            run.doing.moment = "forward_end"
            run.optimizer.home.before(is_last=run.doing.micro == len(batches) - 1)
            loss = summed_loss(run, batch.to(run.device), ledger) / labelled
            told(loss.detach())
            ledger.mark("backward start")
            loss = run.scaler.scale(loss)
            run.doing.moment = "backward_peak"
            loss.backward()
            del loss
            ledger.mark("idle")

    def score(self, run: "Run", batch: MicroBatch, ledger: Ledger | NoLedger) -> Tensor:
        """A micro-batch's summed loss without a backward, on every rank."""
        return summed_loss(run, batch, ledger)


@dataclass(slots=True)
class Run:
    model: Any
    """A transformers model; its attributes differ by family, so it is typed where it is used."""
    device: torch.device
    world: Alone = field(default_factory=Alone)
    split: Callable[[Sequence[int]], list[list[int]]] = one_by_one
    collate: Callable[[Sequence[Example]], MicroBatch] = padded
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    forward: "Forward" = field(default_factory=lambda: through)
    passes: Passes = field(default_factory=Passes)
    passed: torch.dtype | None = None
    """The type in which blocks pass on what they give, where it is not that of the embedding's weight."""
    loss: Callable[[Any, Tensor, MicroBatch], Tensor] = plain_loss
    clip: Callable[[Sequence[nn.Parameter], Alone], Tensor] = global_norm
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False))
    optimizer: Optimizer = field(default_factory=Optimizer)
    doing: Doing = field(default_factory=Doing)
    at_rest: torch.device | None = None
    """Where the shards of weights are that ranks share, and are stepped, if not on the device."""
    evidence: dict[str, int] = field(default_factory=dict)
    """What really happened, counted where it happens; post-conditions compare it with the plan."""


def blocks_of(model: Any) -> nn.ModuleList:
    """The decoder blocks, in order."""
    decoder = model.get_decoder()
    blocks = next(getattr(decoder, name) for name in ("layers", "h", "blocks") if hasattr(decoder, name))
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def own_blocks(model: Any) -> list[nn.Module]:
    """Of the blocks those whose weights this process has, in order."""
    return [block for block in blocks_of(model) if any(True for _ in block.parameters())]


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """A linear layer: no router that inherits from one and gives its choices instead (Phi 3.5 MoE)."""
    return isinstance(module, nn.Linear) and "Router" not in type(module).__name__


def trainable(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def summed_loss(run: Run, batch: MicroBatch, ledger: Ledger | NoLedger | None = None) -> Tensor:
    """Forward of one micro-batch: fp32 sum of cross-entropy over its labelled tokens."""
    with run.context():
        return run.forward(run, batch, ledger or NoLedger())


def through(run: Run, batch: MicroBatch, ledger: Ledger | NoLedger) -> Tensor:
    """The decoder, and the loss of what it gives."""
    hidden = decoded(run, batch)
    ledger.mark("loss")
    if run.doing.moment == "forward_end":
        run.doing.moment = "loss"
    return run.loss(run.model, hidden, batch)


def decoded(run: Run, batch: MicroBatch) -> Tensor:
    """What the decoder gives."""
    told = {"position_ids": batch.position_bs, "bounds": batch.bounds, "exchange": batch.exchange}
    if run.model.config._attn_implementation != ATTENTION:
        told = {}  # every row is one sequence, from its first position on
    hidden: Tensor = run.model.get_decoder()(input_ids=batch.ids_bs, use_cache=False, **told).last_hidden_state
    return hidden
