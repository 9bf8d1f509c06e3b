"""The allocator's settings do what they say, in a process of their own; and a step leaves nothing behind."""

import subprocess
import sys

import pytest

from finefit import predict
from finefit.ledger import Ledger
from finefit.loop import optimizer_step
from finefit.techniques import (
    Accumulation,
    Checkpointing,
    Clipping,
    FusedLoss,
    FusedOps,
    Lora,
    Packing,
    Precision,
    QuantizedBase,
)  # fmt: skip
from tiny import config_of, examples_of, layout_for, run_of

HOLES = """
import sys, torch
from pathlib import Path
from finefit.techniques import Allocator
from finefit.run import Run
def resident():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
run = Run(None, torch.device("cpu"))
if sys.argv[1] != "default":
    technique = Allocator(sys.argv[1])
    technique.apply(run)
    technique.verify(run, None)
before = resident()
for _ in range(3):
    tensors = [torch.ones(int(sys.argv[2])) for _ in range(60)]
    kept = tensors[::12]
    del tensors
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("kind", "elements"), [("trimmed", 2**21), ("tight", 2**18)])
def test_a_trimmed_heap_keeps_what_is_alive_and_no_more(kind, elements):
    """Tensors of 8 MiB, and of 1 MiB."""
    left = {}
    for one in ("default", kind):
        command = [sys.executable, "-c", HOLES, one, str(elements)]
        left[one] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    alive = 5 * elements * 4 // 1024
    assert 0.8 * alive <= left[kind] < 2 * alive < left["default"]


PLANS = {
    "full": (Precision("bf16_mixed"), FusedOps(), Packing(), FusedLoss(32), Clipping()),
    "lora": (Precision("bf16"), Lora(4, dropout=0.1), FusedOps(), Packing(), FusedLoss(32), Checkpointing(2), Clipping()),
    "qlora": (Precision("bf16"), QuantizedBase(chunk=2**14), Lora(4), FusedOps(), Packing(), FusedLoss(32)),
    "padded": (Precision("fp32"), Accumulation(1, most_steps=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_after_a_step_what_is_alive_is_the_plans_steady_state_to_the_byte(name):
    """No reference is kept past its need: no activation, no gradient, no batch, nobody's temporary."""
    run = run_of(PLANS[name], config_of())
    held = [*run.model.parameters(), *(t for p in run.model.parameters() for t in run.optimizer.held(p))]
    said = predict.states(layout_for(config_of(), PLANS[name], run.collate(examples_of((40,)))))
    counted = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert sum(counted.values()) == said["parameter"] + said["optimizer_state"]
    ledger = Ledger()
    ledger.own(held, "parameter")
    with ledger:
        for seed in range(2):
            examples = examples_of((40, 60), seed)
            groups = run.split([len(ids) for ids, _ in examples])
            optimizer_step(run, [run.collate([examples[i] for i in group]) for group in groups], 1e-3)
    left = sum(entry.n_bytes for i, entry in enumerate(ledger.entries) if i in ledger._live.values())
    assert left == said["parameter"] + said["optimizer_state"]
