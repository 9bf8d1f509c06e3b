"""Held-out loss, and one held-out example answered: what the report shows before and after training."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .ledger import Ledger, NoLedger
from .run import Example, MicroBatch, Run, batches_of

Watching = Callable[[MicroBatch], AbstractContextManager[object]]


def held_out_loss(
    run: Run, examples: Sequence[Example], watching: Watching = lambda _: nullcontext()
) -> tuple[float, int, float]:
    """(loss per labelled token, labelled tokens, seconds) without dropout; the run is in training mode afterwards.

    The largest micro-batch, and no other, is within ``watching``.
    """
    started, run.doing.moment = time.perf_counter(), "eval"
    total, mine = 0.0, 0
    batches = batches_of(run, examples)
    largest = max(range(len(batches)), key=lambda i: batches[i].tokens, default=0)
    for i, batch in enumerate(batches):
        with watching(batch) if i == largest else nullcontext():
            total += unlearned_loss(run, batch.to(run.device)).item()
        mine += len(batch.label_l)
    total, labelled = run.world.summed([total, mine])
    return total / labelled, int(labelled), time.perf_counter() - started


def unlearned_loss(run: Run, batch: MicroBatch, ledger: Ledger | NoLedger | None = None) -> Tensor:
    """A micro-batch's summed loss, of the tokens this rank has, without dropout and with nothing kept for a backward. The run is
    in training mode afterwards."""
    run.doing.moment = "eval"
    run.model.eval()
    with torch.no_grad(), _no_casts_kept():
        loss = run.passes.score(run, batch, ledger or NoLedger())
    run.model.train()
    return loss


@contextmanager
def _no_casts_kept() -> Iterator[None]:
    """Autocast lets go of each cast weight: without a backward it is used once, and all of them are half the weights."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


def answer(
    run: Run, ids: Sequence[int], stop: Sequence[int], most_tokens: int, most_s: float | None = None
) -> list[int]:
    """Greedy continuation of ``ids``, up to a token of ``stop``; the model is in training mode afterwards.

    After ``most_s`` seconds no further token is begun: a model whose weights are unpacked or streamed for every single
    token would take as long for a sentence as for an epoch.
    """
    prompt = torch.tensor([list(ids)], device=run.device)
    run.model.eval()
    with torch.no_grad(), run.optimizer.home.whole():
        out = run.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most_tokens, do_sample=False,
            use_cache=True, eos_token_id=list(stop), pad_token_id=stop[0], temperature=None, top_p=None, top_k=None,
            stopping_criteria=[_InTime(run, most_s)] if most_s is not None else [],
        )  # fmt: skip
    run.model.train()
    new: list[int] = out[0, len(ids) :].tolist()
    return new[: next((i for i, token in enumerate(new) if token in stop), len(new))]


class _InTime:
    """Says when the seconds are over, on all ranks at the same token: they make it together."""

    def __init__(self, run: Run, seconds: float) -> None:
        self.run, self.until = run, time.perf_counter() + seconds

    def __call__(self, ids: Tensor, _scores: Tensor, **_: Any) -> Tensor:
        is_over = self.run.world.any(time.perf_counter() > self.until)
        return torch.full((ids.shape[0],), is_over, dtype=torch.bool, device=ids.device)


def prompt_of(example: Example) -> list[int]:
    """The tokens before the first trained one."""
    ids, mask = example
    first = next(i for i, trained in enumerate(mask) if trained)
    return [int(t) for t in ids[:first]]


def sample_row(examples: Sequence[Example], most_prompt: int = 250, answer_range: tuple[int, int] = (15, 60)) -> int:
    """A short example with a real answer to show: the shortest whose answer is within the range, else the shortest."""

    def rank(i: int) -> tuple[bool, int]:
        ids, mask = examples[i]
        trained = sum(bool(on) for on in mask)
        fits = answer_range[0] <= trained <= answer_range[1] and len(ids) - trained <= most_prompt
        return not fits, abs(len(ids) - most_prompt // 2)

    return min(range(len(examples)), key=rank)
