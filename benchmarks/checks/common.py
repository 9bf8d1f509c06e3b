"""What the checks share: a model from its shape, a step of it, and two ways to say that numbers are the same."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finefit import models
from finefit.build import build
from finefit.loop import optimizer_step
from finefit.nn.optimizers import Optimizing
from finefit.run import Example, MicroBatch, Run, summed_loss
from finefit.techniques import Precision, Technique

CPU = torch.device("cpu")
Figures = dict[str, Any]
Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class At:
    """Where checks run: the device, whether with tiny shapes, and a folder for files."""

    device: torch.device
    quick: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class Check:
    """``run`` gives figures, or raises with what is wrong. ``cuda``: it says nothing elsewhere."""

    run: Callable[[At], Figures]
    cuda: bool = False


class Wrong(Exception):
    """A number is not what it should be."""


def config_of(at: At, **changes: Any) -> Any:
    """A llama of six blocks: of 0.2 million parameters, or of 22 million."""
    wide = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
            "intermediate_size": 1408, "vocab_size": 8000}  # fmt: skip
    tiny = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "intermediate_size": 96, "vocab_size": 211}  # fmt: skip
    shape = tiny if at.quick else wide
    return models.config_from({
        "model_type": "llama", **shape, "num_hidden_layers": 6, "max_position_embeddings": 4096,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **changes,
    })  # fmt: skip


def examples_of(at: At, config: Any, seed: int = 0, lengths: Sequence[int] = ()) -> list[Example]:
    """Random tokens; the second half of each example is labelled."""
    lengths = lengths or ((40, 29, 64, 17) if at.quick else (300, 211, 520, 130))
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    return [(row, [int(2 * i >= len(row)) for i in range(len(row))]) for row in ids]


def run_of(techniques: Sequence[Technique], config: Any, device: torch.device, rate: float = 1e-3) -> Run:
    """The same small random weights on every device; fp32 unless a precision is said."""
    if not any(isinstance(t, Precision) for t in techniques):
        techniques = (Precision("fp32"), *techniques)
    run = build(config, techniques, models.fill_random(0), device, Optimizing(rate, 0.01))
    for name, p in run.model.named_parameters():
        if name.endswith("lora_B"):  # or half of the adapters would have no gradient
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    return run


def micro_batches(run: Run, examples: Sequence[Example]) -> list[MicroBatch]:
    return [run.collate([examples[i] for i in some]) for some in run.split([len(ids) for ids, _ in examples])]


def loss_and_gradients(run: Run, examples: Sequence[Example]) -> tuple[float, Weights]:
    """Of one global batch as the loop forms them, clipped, in fp32 on the host; the run is as before afterwards."""
    batches = micro_batches(run, examples)
    labelled, total = sum(len(batch.label_l) for batch in batches), 0.0
    for batch in batches:
        loss = summed_loss(run, batch.to(run.device)) / labelled
        loss.backward()
        total += loss.item()
    run.clip(run.optimizer.gradients())
    of = run.optimizer.stepped
    found = {
        name: of[p].grad.detach().float().cpu().clone()
        for name, p in run.model.named_parameters()
        if p in of and of[p].grad is not None
    }
    run.optimizer.zero_grad(set_to_none=True)
    return total, found


def after_steps(run: Run, examples: Sequence[Example], steps: int = 3, rate: float = 1e-3) -> tuple[float, Weights]:
    """The last step's loss, and what trains, on the host."""
    torch.manual_seed(0)
    for _ in range(steps):
        loss = optimizer_step(run, micro_batches(run, examples), rate)[0]
    return loss, trained(run)


def trained(run: Run) -> Weights:
    synchronise(run.device)
    return {name: p.detach().float().cpu().clone() for name, p in run.model.named_parameters() if p.requires_grad}


def error(found: Weights, expected: Weights) -> float:
    """Norm of the difference of all tensors together, over the expected norm."""
    if found.keys() != expected.keys():
        raise Wrong(f"other tensors: {sorted(found.keys() ^ expected.keys())[:4]}")
    off = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in expected)
    return math.sqrt(off / max(sum(float(t.double().square().sum()) for t in expected.values()), 1e-300))


def at_most(what: str, found: float, most: float) -> None:
    if not found <= most:
        raise Wrong(f"{what}: {found:.3g}, at most {most:.3g}")


def equal(
    what: str, found: tuple[float, Weights], twice: Sequence[tuple[float, Weights]], floor: float = 0.0
) -> Figures:
    """``found`` is what a run without the technique gives: to the bit where two such runs on the device agree to it.

    ``floor``: what is let pass in any case, where kernels add up in an order that is another at times.
    """
    (loss, expected), (other_loss, other) = twice
    noise, off = error(other, expected), error(found[1], expected)
    loss_noise, loss_off = abs(other_loss - loss), abs(found[0] - loss)
    at_most(what, off, max(4 * noise, floor))
    at_most(f"{what}, loss", loss_off, max(4 * loss_noise, floor * abs(loss)))
    return {"error": off, "of_the_device_itself": noise, "bitwise": off == 0 == loss_off}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    """Whatever is not alive is given back, and peaks start anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
