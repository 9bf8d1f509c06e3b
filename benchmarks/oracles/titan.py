"""Compares ``finefit.stacks.titan`` with the real model code, wrappers and loss, by a fake step of three layers.

Needs ``torchtitan`` of December 2024 (commit 9dec370) importable; Triton may be missing. Compiled layers go through
AOTAutograd only: of them what each keeps is compared, as fused temporaries are not made there.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from common import BLOCKS, Numbers, compared, fake_run, finish, numbers

from finefit.foreign import ForeignRun
from finefit.stacks.base import Stepped
from finefit.stacks.titan import build

TRITON = ("triton", "triton.language")

H, N, M, VOCAB = 256, 8, 2, 1024
CONFIG = {
    "model_type": "llama", "hidden_size": H, "num_attention_heads": N, "num_key_value_heads": M,
    "intermediate_size": 768, "vocab_size": VOCAB,
}  # fmt: skip


def theirs(run: ForeignRun, depth: int) -> Stepped:
    _norms()
    from torch._functorch import partitioners
    from torchtitan.models.llama import model as code
    from torchtitan.parallelisms.parallelize_llama import _apply_ac_to_transformer_block

    arguments = code.ModelArgs(
        dim=H, n_layers=depth, n_heads=N, n_kv_heads=M, vocab_size=VOCAB, multiple_of=256, max_seq_len=run.max_length
    )
    code.Transformer.init_weights = lambda *_, **__: None  # draws until all values are within bounds
    torch.set_default_dtype(torch.bfloat16)
    model = code.Transformer(arguments)
    torch.set_default_dtype(torch.float32)
    if run.compiled or run.checkpointing == "selective":
        torch.nn.functional.scaled_dot_product_attention = lambda q, k, v, is_causal: (
            torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
        )
    for name, block in list(model.layers.items()):
        if run.checkpointing != "none":
            block = _apply_ac_to_transformer_block(
                block, SimpleNamespace(mode=run.checkpointing, selective_ac_option="op")
            )
        if run.compiled:
            # A ledger cannot watch the operator that wraps attention to repeat its random state.
            partitioners.functionalize_rng_ops = lambda _joint, forward, backward, _n: (forward, backward)
            block = torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True)
        model.layers.register_module(name, block)
    blocks = torch.nn.ModuleList(model.layers.values())

    def loss(ids: torch.Tensor, labels: torch.Tensor, ledger: Any) -> torch.Tensor:
        for name, block in zip(model.layers, blocks, strict=True):  # those that are watched
            model.layers.register_module(name, block)
        head = model.output.register_forward_pre_hook(lambda *_: ledger.mark("loss"))
        pred = model(ids)
        head.remove()
        value = torch.nn.functional.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))
        del pred
        return value

    return Stepped(model, blocks, loss)


def _norms() -> None:
    """Import the norms, among which there is a Triton kernel that is not used here."""
    absent = [name for name in TRITON if name not in sys.modules and find_spec(TRITON[0]) is None]
    sys.modules.update(dict.fromkeys(absent, MagicMock()))
    import_module("torchtitan.models.norms")
    for name in absent:
        del sys.modules[name]


def main() -> int:
    worst = {}
    for compiled in (False, True):
        for mode in ("none", "selective", "full"):
            run = fake_run(tool="torchtitan", method="full", micro_batch_size=2, checkpointing=mode, compiled=compiled)
            real = numbers(lambda r=run: theirs(r, BLOCKS), run)
            name = f"checkpointing {mode}{', compiled' * compiled}"
            ours = numbers(lambda r=run: build(CONFIG, r, BLOCKS), run)
            worst[name] = compared(name, ours, _kept(real) if compiled else real)
    return finish(worst)


def _kept(real: Numbers) -> Numbers:
    return {key: n for key, n in real.items() if key.startswith("kept")}


if __name__ == "__main__":
    sys.exit(main())
