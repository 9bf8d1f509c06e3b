"""Watches a transformers Trainer from outside: seconds, tokens, loss and resident memory of each optimizer step.

What counts as a token is read off the tensors that reach the model, not off the data set, so padding, truncation,
order and masks are what the tool really did. A step's time runs from the end of the step before it, so whatever the
tool does between steps is in it. Memory is the kernel's own high-water mark, reset once the model is loaded. Declined:
more than one process; evaluation during the run.
"""

import ctypes
import gc
import hashlib
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from job import GLOBAL_BATCH, Arguments

IGNORED = -100
_Example = tuple[list[int], list[int]]  # token ids, labelled positions


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []  # of all threads: tells a slow tool from a busy machine
        self.real_tokens: list[int] = []
        self.labelled_tokens: list[int] = []
        self.computed_tokens: list[int] = []
        self.examples: list[_Example] = []  # of the first step
        self.dtypes: dict[str, str] = {}
        self.rss_model_loaded = self.peak_rss = 0
        self._step = {"real": 0, "labelled": 0, "computed": 0}
        self._since = self._cpu_since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any) -> None:
        model.register_forward_pre_hook(self._see_batch, with_kwargs=True)
        trainable = {str(p.dtype) for p in model.parameters() if p.requires_grad}
        frozen = {str(p.dtype) for p in model.parameters() if not p.requires_grad}
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.dtypes = {"weights": ",".join(frozen), "adapters": ",".join(trainable), "trainable_parameters": str(count)}
        # Weights mapped from the file become resident when first read; that belongs to loading.
        for parameter in model.parameters():
            parameter.detach().view(-1)[::64].float().sum()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
        self.rss_model_loaded = _status_bytes("VmRSS")
        self._since, self._cpu_since = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now, cpu_now = time.perf_counter(), time.process_time()
        self.seconds.append(now - self._since)
        self.cpu_seconds.append(cpu_now - self._cpu_since)
        self.real_tokens.append(self._step["real"])
        self.labelled_tokens.append(self._step["labelled"])
        self.computed_tokens.append(self._step["computed"])
        self._step = dict.fromkeys(self._step, 0)
        self.peak_rss = _status_bytes("VmHWM")
        self._since, self._cpu_since = now, cpu_now

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self.grad_norms.append(float(logs["grad_norm"]))

    def _see_batch(self, model: torch.nn.Module, positional: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        ids, labels = inputs["input_ids"], inputs["labels"]
        real = _real_tokens(inputs)
        self._step["computed"] += ids.numel()
        self._step["real"] += int(real.sum())
        self._step["labelled"] += int((labels != IGNORED).sum())
        if self.seconds:
            return
        for row in range(len(ids)):
            kept = real[row]
            starts = _starts(inputs, row, kept)
            for first, last in zip(starts, [*starts[1:], int(kept.sum())], strict=True):
                piece_ids, piece_labels = ids[row][kept][first:last], labels[row][kept][first:last]
                self.examples.append((piece_ids.tolist(), (piece_labels != IGNORED).nonzero().flatten().tolist()))


def write(recorder: Recorder, arguments: Arguments, *, tool: str, distribution: str, packages: tuple[str, ...]) -> None:
    """The result file; rates leave out the first step, in which kernels are chosen and libraries loaded."""
    warm = slice(1, None) if len(recorder.seconds) > 1 else slice(None)
    seconds = sum(recorder.seconds[warm])
    memory = arguments.measure == "memory"
    result = {
        "tool": tool,
        "tool_version": version(distribution),
        "packages": {name: version(name) for name in packages},
        "setting": arguments.setting(),
        "dtypes": recorder.dtypes,
        "losses": recorder.losses,
        "grad_norms": recorder.grad_norms,
        "seconds_per_step": recorder.seconds,
        "cpu_seconds_per_step": recorder.cpu_seconds,
        "real_tokens_per_step": recorder.real_tokens,
        "computed_tokens_per_step": recorder.computed_tokens,
        "labelled_tokens_per_step": recorder.labelled_tokens,
        "real_tokens_per_s": sum(recorder.real_tokens[warm]) / seconds,
        # Without malloc giving back, the resident set says little; it is left out rather than compared by mistake.
        "rss_model_loaded": recorder.rss_model_loaded if memory else None,
        "peak_rss": recorder.peak_rss if memory else None,
        "peak_above_model_bytes": recorder.peak_rss - recorder.rss_model_loaded if memory else None,
        "batch_sha256": _batch_digest(recorder.examples) if arguments.packing != "packing" else None,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _real_tokens(inputs: dict[str, Any]) -> torch.Tensor:
    """True where ``input_ids`` holds a token rather than padding, from whichever mask the tool made."""
    mask = inputs.get("attention_mask")
    if mask is None:  # padding-free
        return torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    if mask.dim() == 4:  # additive and block-diagonal: a real token attends to itself
        return mask[:, 0].diagonal(dim1=-2, dim2=-1) == 0
    return mask != 0


def _starts(inputs: dict[str, Any], row: int, kept: torch.Tensor) -> list[int]:
    positions = inputs.get("position_ids")
    if positions is None:
        return [0]
    return (positions[row][kept] == 0).nonzero().flatten().tolist()


def _batch_digest(examples: list[_Example]) -> dict[str, Any]:
    """SHA-256 of the first 16 examples as compact JSON lists of integers.

    Ids end with the last labelled token: what a template prints after it can reach no loss, and tools differ there.
    """
    first = examples[:GLOBAL_BATCH]
    ids = [tokens[: positions[-1] + 1] for tokens, positions in first]
    labelled = [positions for _, positions in first]
    return {
        "examples": len(first),
        "input_ids": _digest(ids),
        "labelled_positions": _digest(labelled),
        "each": [[_digest(a)[:16], _digest(b)[:16]] for a, b in zip(ids, labelled, strict=True)],
    }


def _digest(numbers: list[Any]) -> str:
    return hashlib.sha256(json.dumps(numbers, separators=(",", ":")).encode()).hexdigest()


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this kernel reports no {field}")
