"""The job every tool is given, its command line, and the environment the process must have. No torch here.

Same model, same examples in file order (16 a step, nothing shuffled), LoRA of rank 16 on all linear layers, bf16,
AdamW at a constant rate, loss on the assistant's answer and its end of turn only. Declined: anything a tool would do
differently from its own recommended way, except to make the job the same.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

RANK, ALPHA = 16, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GLOBAL_BATCH = 16
PACKED_ROWS = 4  # of MAX_LENGTH tokens: with packing, about as many tokens a step as 16 examples of the demo data
MAX_LENGTH = 1024
LEARNING_RATE = 2e-4
MAX_GRAD_NORM = 1.0
SEED = 0

# To measure memory, glibc must give freed memory back at once: only then is the peak of the resident set the peak of
# what was in use (else the reading is off by up to three times). Every tensor then costs page faults, half
# as much time again and more, so seconds are taken in a run of their own.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "2000",  # idle OpenMP threads spin for a moment, then sleep: best on an idle and on a busy machine
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True, slots=True)
class Arguments:
    model: Path
    data: Path
    micro_batch: int
    packing: str
    checkpointing: bool
    adapters: str
    autocast: bool
    measure: str
    steps: int
    out: Path

    @property
    def rows_per_step(self) -> int:
        return PACKED_ROWS if self.packing == "packing" else GLOBAL_BATCH

    @property
    def accumulation(self) -> int:
        if self.rows_per_step % self.micro_batch:
            raise SystemExit(f"--micro-batch {self.micro_batch} does not divide {self.rows_per_step} rows a step")
        return self.rows_per_step // self.micro_batch

    def setting(self) -> dict[str, object]:
        return {
            "micro_batch": self.micro_batch,
            "packing": self.packing,
            "checkpointing": self.checkpointing,
            "adapters": self.adapters,
            "autocast": self.autocast,
            "measure": self.measure,
            "rows_per_step": self.rows_per_step,
            "threads": int(os.environ["OMP_NUM_THREADS"]),
        }


def arguments(
    description: str, *, packings: tuple[str, ...], adapters: tuple[str, ...], autocast: tuple[str, ...]
) -> Arguments:
    """The command line, the same for every tool; a setting that the tool does not have is refused."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model, transformers' format")
    parser.add_argument("--data", type=Path, required=True, help="the .jsonl file of demo_examples.py")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--packing", choices=packings, default="none")
    parser.add_argument("--checkpointing", choices=("on", "off"), default="off")
    parser.add_argument("--adapters", choices=adapters, default="float32", help="the adapters' parameters")
    parser.add_argument("--autocast", choices=autocast, default="on", help="bf16 autocast around the forward pass")
    parser.add_argument("--measure", choices=("memory", "speed"), default="memory", help="memory: malloc gives back")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True, help="the result.json to write")
    given = parser.parse_args()
    _restart_with_environment(given.measure)
    return Arguments(
        model=given.model.resolve(),
        data=given.data.resolve(),
        micro_batch=given.micro_batch,
        packing=given.packing,
        checkpointing=given.checkpointing == "on",
        adapters=given.adapters,
        autocast=given.autocast == "on",
        measure=given.measure,
        steps=given.steps,
        out=given.out.resolve(),
    )


def _restart_with_environment(measure: str) -> None:
    """malloc and OpenMP read their variables once, at the start of the process: start again where one is different."""
    wanted = _ENVIRONMENT | (_MALLOC if measure == "memory" else dict.fromkeys(_MALLOC))
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    environment = {name: value for name, value in {**os.environ, **wanted}.items() if value is not None}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)
