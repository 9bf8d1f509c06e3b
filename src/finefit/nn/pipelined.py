"""A pipeline of stages by torch's schedules (``torch.distributed.pipelining``): micro-batches are those of the accumulation.

Every process of a pipeline knows the micro-batches, so only hidden states and their gradients are sent: a stage is told the
number of a micro-batch. All rows of a step are as wide as its widest, filled up with tokens that none sees. Stages and
schedule are made anew for each step, whose shape they have. torch's stage keeps a buffer for each micro-batch from the
start to the end; here one is there from when something is received into it to when it is used up.

A held-out micro-batch goes through the stages by itself. Declines schedules that part a backward in two.

Shapes: T tokens of a row, h hidden, M micro-batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import Parameter

from ..data.micro import ALIGNMENT
from ..ledger import Ledger, NoLedger
from ..parts import local
from ..run import MicroBatch, Passes, Run, decoded, filled, summed_loss, through
from .staged import Stage

Told = Callable[[Tensor], None]


class Pipelined(Passes):
    """``stages``: this process's, by their number among all ``count``."""

    def __init__(self, stages: Mapping[int, Stage], count: int, schedule: str, group: dist.ProcessGroup) -> None:
        self.stages, self.count, self.schedule, self.group = stages, count, schedule, group
        self.turn: tuple[Stage, Tensor | None]
        """The stage whose forward is made, and what it was given."""

    def forward(self, run: Run, batch: MicroBatch, ledger: Ledger | NoLedger) -> Tensor:
        """A stage's forward: what it gives to the next, the last one the summed loss."""
        stage, hidden_1th = self.turn
        with stage.running(hidden_1th):
            return through(run, batch, ledger) if stage.is_last else decoded(run, batch)

    def through_stage(
        self, run: Run, stage: Stage, hidden_1th: Tensor | None, batch: MicroBatch, ledger: Ledger | NoLedger
    ) -> Tensor:
        self.turn = stage, hidden_1th
        try:
            return summed_loss(run, batch, ledger)
        finally:
            self.turn = stage, None

    def learn(
        self, run: Run, batches: Sequence[MicroBatch], labelled: float, told: Told, ledger: Ledger | NoLedger
    ) -> None:
        rows = alike([batch.to(run.device) for batch in batches])
        more = run.world.mesh.turns(len(rows)) - len(rows)
        rows += [unlabelled(rows[-1])] * more
        run.evidence["micro_steps"] = run.evidence.get("micro_steps", 0) + more
        turns = Turns(self, run, rows, labelled, told, ledger)
        stages = [self._stage(turns, number) for number in self.stages]
        number_m = torch.arange(len(rows))
        self._schedule(stages, len(rows)).step(target=number_m)

    def _stage(self, turns: "Turns", number: int) -> "HeldStage":
        stage = self.stages[number]
        rows_1th = torch.empty(self._shape(turns.run, turns.rows[0]), dtype=_dtype(turns.run), device="meta")
        given = () if stage.is_first else (rows_1th.requires_grad_(),)
        loss_1 = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
        gives = (loss_1 if stage.is_last else rows_1th.detach().requires_grad_(),)
        return HeldStage(Turn(turns, stage), number, self.count, turns.run.device, given, gives, group=self.group)

    def _schedule(self, stages: "list[HeldStage]", micro_steps: int) -> Any:
        told: dict[str, Any] = {
            "n_microbatches": micro_steps,
            "loss_fn": lambda loss_1, _: loss_1,
            "scale_grads": False,
        }
        if self.schedule == "interleaved":
            return ScheduleInterleaved1F1B(list(stages), **told)
        is_short = (
            micro_steps < self.count
        )  # which 1F1B takes to be a mistake: there is no second half to alternate with
        return (ScheduleGPipe if self.schedule == "gpipe" or is_short else Schedule1F1B)(stages[0], **told)

    @staticmethod
    def _shape(run: Run, row: MicroBatch) -> tuple[int, int, int]:
        tokens = row.ids_bs.numel() // run.world.mesh.tensor
        return 1, tokens, run.model.config.get_text_config().hidden_size

    def score(self, run: Run, batch: MicroBatch, ledger: Ledger | NoLedger) -> Tensor:
        row, ranks, loss = (
            in_one_row(batch.to(run.device)),
            dist.get_world_size(self.group),
            torch.zeros((), device=run.device),
        )
        for number, stage in self.stages.items():
            hidden_1th = None
            if not stage.is_first:
                hidden_1th = torch.empty(self._shape(run, row), dtype=_dtype(run), device=run.device)
                dist.recv(hidden_1th, group=self.group, group_src=(number - 1) % ranks)
            out = self.through_stage(run, stage, hidden_1th, row, ledger)
            if stage.is_last:
                loss = out
            else:
                dist.send(out, group=self.group, group_dst=(number + 1) % ranks)
        dist.broadcast(loss, group=self.group, group_src=(self.count - 1) % ranks)
        return loss


class Turns:
    """The micro-batches of a step, as a process's stages take them."""

    def __init__(
        self, pipeline: Pipelined, run: Run, rows: Sequence[MicroBatch], labelled: float, told: Told,
        ledger: Ledger | NoLedger,
    ) -> None:  # fmt: skip
        self.pipeline, self.run, self.rows = pipeline, run, rows
        self.labelled, self.told, self.ledger = labelled, told, ledger
        self.backwards = len(rows) * len(pipeline.stages)
        """How many are left."""

    def forward(self, stage: Stage, hidden_1th: Tensor | None, number: int) -> Tensor:
        run = self.run
        self.ledger.mark("forward before")
        run.doing.moment, run.doing.micro = "forward_end", number
        out = self.pipeline.through_stage(run, stage, hidden_1th, self.rows[number], self.ledger)
        if not stage.is_last:
            return out
        loss = out / self.labelled
        self.told(loss.detach())
        return torch.stack((run.scaler.scale(loss),))  # no view, which torch's stage would not part from its graph

    def before_backward(self, number: int) -> None:
        self.backwards -= 1
        self.run.optimizer.home.before(is_last=self.backwards == 0)
        self.ledger.mark("backward start")
        self.run.doing.moment, self.run.doing.micro = "backward_peak", number


class Turn(nn.Module):
    """What torch's stage takes to be its module: it has no parameters, so that nobody else handles them."""

    def __init__(self, turns: Turns, stage: Stage) -> None:
        super().__init__()
        self.turns, self.stage, self.number = turns, stage, 0

    def forward(self, hidden_1th: Tensor | None = None) -> Tensor:
        return self.turns.forward(self.stage, hidden_1th, self.number)


class HeldStage(PipelineStage):
    """Buffers are there while something is in them."""

    submod: Turn

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_begun = False

    def _begin(self) -> None:
        """Let go of the buffers that are there since the stage knows how many micro-batches there are."""
        if not self._is_begun:
            self._is_begun = True
            for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
                self._let_go(infos)

    def _let_go(self, infos: Any) -> None:
        for info in infos:
            if getattr(info, "buffer", None) is not None:
                info.buffer = torch.empty(0, dtype=info.buffer.dtype, device=self.device)

    def _take(self, infos: Any) -> None:
        self._begin()
        pipeline, turns = self.submod.turns.pipeline, self.submod.turns
        for info in infos:
            if getattr(info, "buffer", None) is not None:
                shape = pipeline._shape(turns.run, turns.rows[0])
                info.buffer = torch.empty(shape, dtype=info.buffer.dtype, device=self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._take(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        self.submod.number = fwd_chunk_id
        out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._let_go(self.args_recv_info[fwd_chunk_id])
        return out

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._take(self.grad_recv_info.get(bwd_chunk_id, ()))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        turns = self.submod.turns
        turns.before_backward(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._let_go(self.grad_recv_info.get(bwd_chunk_id, ()))
        turns.ledger.mark("idle")


def _dtype(run: Run) -> torch.dtype:
    assert run.passed is not None
    return run.passed


def in_one_row(batch: MicroBatch) -> MicroBatch:
    """The same as a packed row: attention goes by its bounds."""
    return replace(batch, ids_bs=batch.ids_bs.view(1, -1), position_bs=batch.position_bs.reshape(1, -1))


def alike(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """As rows of the widest's tokens; what fills them are short sequences of their own, without labels."""
    widest = max(batch.ids_bs.numel() for batch in batches)
    return [_wide(in_one_row(batch), widest) for batch in batches]


def _wide(row: MicroBatch, tokens: int) -> MicroBatch:
    missing = tokens - row.ids_bs.numel()
    if not missing:
        return row
    bounds = (*row.bounds, *range(row.bounds[-1] + ALIGNMENT, tokens, ALIGNMENT), tokens)
    position = torch.arange(missing, device=row.ids_bs.device) % ALIGNMENT
    return replace(
        row, ids_bs=nn.functional.pad(row.ids_bs, (0, missing)), bounds=bounds,
        position_bs=torch.cat((row.position_bs, position[None]), 1),
    )  # fmt: skip


def unlabelled(row: MicroBatch) -> MicroBatch:
    """The same, of which nothing is learnt."""
    none = row.label_l[:0]
    return replace(row, row_r=filled(none), label_l=none, tokens=0)


def share_ends(run: Run, group: dist.ProcessGroup, is_first: bool) -> None:
    """A weight that is the embedding's on a pipeline's first stage is the head's on its last: the gradient of either is the
    sum of both, and counts once."""

    model, world = run.model, run.world  # all of the run would be there for as long as its optimizer

    def complete(stepped: Mapping[Parameter, Parameter]) -> None:
        tied: Parameter = model.get_input_embeddings().weight  # storages come later
        if tied.grad is None:
            tied.grad = torch.zeros_like(tied)
        dist.all_reduce(local(tied.grad), group=group)
        if not is_first:
            world.copies.add(stepped[tied])

    run.optimizer.completing.append(complete)
