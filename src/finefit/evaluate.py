"""Held-out loss, and one held-out example answered: what the report shows before and after training."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from .run import Example, Run, summed_loss

EXAMPLES = 64  # evenly spaced over the held-out set: about a quarter of a minute on two cores for a 135M model


def held_out_loss(run: Run, examples: Sequence[Example]) -> tuple[float, int, float]:
    """(loss per labelled token, labelled tokens, seconds) without dropout; the run is in training mode afterwards."""
    started = time.perf_counter()
    total, labelled = 0.0, 0
    run.model.eval()
    with torch.no_grad():
        for group in run.split([len(ids) for ids, _ in examples]):
            batch = run.collate([examples[i] for i in group]).to(run.device)
            total += summed_loss(run, batch).item()
            labelled += len(batch.label_l)
    run.model.train()
    return total / labelled, labelled, time.perf_counter() - started


def spaced(n: int, most: int) -> list[int]:
    """At most ``most`` of ``n`` row numbers, evenly spaced."""
    return list(range(n)) if n <= most else [i * n // most for i in range(most)]


def answer(model: Any, ids: Sequence[int], stop: Sequence[int], most_tokens: int) -> list[int]:
    """Greedy continuation of ``ids``, up to a token of ``stop``; the model is in training mode afterwards."""
    device = next(model.parameters()).device
    prompt = torch.tensor([list(ids)], device=device)
    model.eval()
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most_tokens, do_sample=False,
            use_cache=True, eos_token_id=list(stop), pad_token_id=stop[0], temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
    model.train()
    new: list[int] = out[0, len(ids) :].tolist()
    return new[: next((i for i, token in enumerate(new) if token in stop), len(new))]


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
