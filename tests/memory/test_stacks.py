"""Foreign tools' blocks keep what follows from their code by hand, in bytes for each token of a row.

h hidden, f MLP width, w = heads × head size, k = key heads × head size, n heads, r rank; fp32 counts 4 a number, bf16 2.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from finefit.allocator import MIB
from finefit.answers import readings_of
from finefit.foreign import ForeignRun
from finefit.ledger import Ledger
from finefit.simulate import STEADY, fake_world, step
from finefit.stacks import litgpt, titan, torchtune, transformers
from finefit.stacks.base import Stepped
from finefit.stacks.compiled import Piece
from finefit.stream import Entry, Stream

h, n, f, V, T = 64, 4, 96, 128, 128
w, k, r = h, h // 2, 8
GROUPED = {
    "model_type": "llama", "hidden_size": h, "num_attention_heads": n, "num_key_value_heads": n // 2,
    "intermediate_size": f, "vocab_size": V, "max_position_embeddings": T,
}  # fmt: skip
EQUAL = {**GROUPED, "num_key_value_heads": n}
SEED = 16  # flash attention's


def stepped(build: Any, config: dict[str, Any], blocks: int = 3, **fields: Any) -> tuple[Ledger, Stepped]:
    plain = {"tool": "", "model": "", "method": "full", "micro_batch_size": 1, "max_length": T}
    run = ForeignRun(**{**plain, "trained_dtype": "bfloat16", "clipped": False, **fields})
    ledger = Ledger()
    with fake_world():
        made = build(config, run, blocks)
        step(made, run, ledger, torch.device("cpu"))
    return ledger, made


def kept(build: Any, config: dict[str, Any], block: int = 1, blocks: int = 3, **fields: Any) -> int:
    """Bytes born in a block's forward pass that the loss finds alive."""
    ledger, _ = stepped(build, config, blocks, **fields)
    steady = ledger.sections.index(STEADY)
    at, loss = (ledger.sections.index(name, steady) for name in (f"forward {block}", "loss"))
    mine = [entry for entry in ledger.entries if entry.section == at]
    return sum(entry.n_bytes for entry in mine if entry.died < 0 or entry.died_section >= loss)


def lora(tool: str, **fields: Any) -> dict[str, Any]:
    return {"tool": tool, "method": "lora", "rank": r, **fields}


QV = {"targets": ("q_proj", "v_proj"), "lora_dropout": 0.05}
# Norms in fp32 and their roots; the fused projection, of which v is a part; q and k turned; attention; the gated MLP.
LIT_BLOCK = (4 * h + 4) * 2 + 2 * 3 * h + 2 * 2 * h + (2 * h + 4 * n) + 6 * f
# The dropped input of LoRA and its mask, the low-rank product of two parts, and what is copied among the columns.
LIT_LORA = 3 * h + 2 * 2 * r + 2 * 2 * h


def test_lit_gpt_keeps_its_fused_projection_whole_and_the_places_of_loras_columns() -> None:
    places = 8 * 2 * h
    assert kept(litgpt.build, EQUAL, **lora("lit_gpt", **QV)) == T * (LIT_BLOCK + LIT_LORA) + places + SEED


def test_litgpt_has_the_places_once_but_copies_of_the_norms_weights() -> None:
    assert kept(litgpt.build, EQUAL, **lora("litgpt", **QV)) == T * (LIT_BLOCK + LIT_LORA) + 2 * 4 * h + SEED


def test_bitsandbytes_before_0_43_2_keeps_the_input_of_every_layer() -> None:
    places = 8 * 2 * h
    inputs = 2 * h + 2 * h + 2 * h + 2 * f  # projection, output (a copy: the heads lie one after another), MLP's two
    got = kept(litgpt.build, EQUAL, **lora("lit_gpt", **QV, quantised="nf4", paged=True))
    assert got == T * (LIT_BLOCK + LIT_LORA + inputs) + places + SEED


def test_what_bitsandbytes_keeps_lives_until_the_next_loss_is_there() -> None:
    fields = lora("litgpt", **QV, quantised="nf4", paged=True)
    ledger, _ = stepped(litgpt.build, EQUAL, **fields)
    at = ledger.sections.index("forward 1")
    losses = [i for i, name in enumerate(ledger.sections) if name == "loss"]
    late = [e for e in ledger.entries if e.section == at and e.died_section >= losses[1]]
    assert sum(e.n_bytes for e in late) == T * (2 * h + 2 * h + 2 * h + 2 * f)


def test_litgpt_trained_whole_keeps_normalised_inputs_and_products_too() -> None:
    more = 2 * 4 * h + 2 * 2 * h + 2 * h + 2 * f  # fp32 before the norm's weight, layers' inputs, joined heads, product
    assert kept(litgpt.build, EQUAL, tool="litgpt") == T * (LIT_BLOCK + more) + 2 * 4 * h + SEED


@pytest.mark.parametrize("method", ["adapter", "adapter_v2"])
def test_a_later_block_of_an_adapter_run_adds_the_prefixs_attention(method: str) -> None:
    neox = {**EQUAL, "model_type": "gpt_neox", "rotary_pct": 0.25}
    norms, mask = 2 * 2 * 2, 2 * 16 * T  # a CPU's moments are bf16
    block = norms + 2 * 2 * h + 6 * h + 2 * 2 * h + (2 * h + 4 * n) + 2 * f + (2 * h + 4 * n)
    if method == "adapter":
        # Both norms read the same input, which is then kept once.
        assert kept(litgpt.build, neox, 3, 5, tool="lit_gpt", method=method) == T * (block - 2 * h) + mask + SEED
        return
    # Trained norms change nothing, being LayerNorm; scaled layers keep what they scale.
    scaled = 2 * (3 * h + h + f + h)
    assert kept(litgpt.build, neox, 3, 5, tool="lit_gpt", method=method) == T * (block - 2 * h + scaled) + mask + SEED


def test_under_autocast_each_use_of_a_frozen_weight_leaves_a_copy() -> None:
    mixed = {"frozen_dtype": "float32", "trained_dtype": "float32", "autocast": True}
    plain = kept(litgpt.build, EQUAL, **lora("lit_gpt", **QV))
    weights = 3 * h * h + h * h + 3 * h * f
    got = kept(litgpt.build, EQUAL, **lora("lit_gpt", **QV, **mixed))
    lora_copies = 2 * (2 * r * h + 2 * h * r)  # of A and B
    # The dropped input is fp32 and its copy is kept, not it; all else keeps its type.
    assert got == plain + 2 * weights + lora_copies


def test_torchtune_layer() -> None:
    block = 2 * (4 * h + 4 + 2 * h + 2 * h) + 4 * 2 * w + 4 * n + 8 * f
    assert kept(torchtune.build, GROUPED, tool="torchtune") == T * block + SEED


def test_torchtune_lora_layer_keeps_inputs_of_adapted_layers_and_low_rank_products() -> None:
    block = 2 * (4 * h + 4) + 2 * h + 4 * 2 * w + 4 * n + 6 * f + 2 * 2 * r
    fields = lora("torchtune", targets=("q_proj", "v_proj"))
    assert kept(torchtune.build, GROUPED, **fields) == T * block + SEED


@pytest.mark.parametrize("loss", ["plain", "chunked", "fused"])
def test_torchtune_checkpointed_layer_keeps_its_output_for_the_next(loss: Any) -> None:
    assert kept(torchtune.build, GROUPED, tool="torchtune", checkpointing="full", loss=loss) == T * 2 * h


COMPILED = 4 * 2 * h + 2 * 4 + 4 * 2 * w + 4 * n + 6 * f  # inputs of both norms and what they give, two roots


def test_torchtune_compiled_layer_recomputes_what_lies_between_products() -> None:
    assert kept(torchtune.build, GROUPED, tool="torchtune", compiled=True, packed=True) == T * COMPILED


def test_torchtune_offloading_leaves_the_last_layers_output_on_the_device() -> None:
    fields = {"tool": "torchtune", "checkpointing": "full", "activations_on_host": True}
    ledger, _ = stepped(torchtune.build, GROUPED, 9, **fields)
    steady = ledger.sections.index(STEADY)
    loss, at = ledger.sections.index("loss", steady), [ledger.sections.index(f"forward {i}", steady) for i in range(9)]
    alive = [e for e in ledger.entries if e.section in at and (e.died < 0 or e.died_section >= loss)]
    assert sum(e.n_bytes for e in alive) == T * 2 * h


TITAN = 2 * (4 * h + 4 + 2 * h + 2 * h) + 4 * 2 * w + 4 * n + 8 * f
SAVED = 2 * w + 2 * k + 2 * f + (2 * w + 4 * n)  # every other product, and attention


@pytest.mark.parametrize(
    ("mode", "compiled", "expected"),
    [
        ("none", False, TITAN),
        ("selective", False, 2 * h + SAVED + 2 * h),  # the block's output, and that of its last product
        ("full", False, 2 * h),
        ("none", True, COMPILED),
        ("selective", True, 2 * h + SAVED),
        ("full", True, 2 * h),
    ],
)
def test_titan_layer(mode: Any, compiled: bool, expected: int) -> None:
    got = kept(titan.build, GROUPED, tool="torchtitan", checkpointing=mode, compiled=compiled)
    random_state = got - T * expected
    assert 0 <= random_state <= 2 * SEED


def test_a_compiled_function_writes_only_what_its_kernels_read_and_what_it_returns() -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(x.dtype)
        return (x + torch.nn.functional.silu(normed @ weight),)

    ledger = Ledger()
    with FakeTensorMode():
        x, weight = torch.empty(T, h, dtype=torch.bfloat16), torch.empty(h, h, dtype=torch.bfloat16)
        x.requires_grad_()
        weight.requires_grad_()
        piece = Piece(function)
        piece(x, weight)
        ledger.own((x, weight), "parameter")
        with ledger:
            ledger.mark("forward 0")
            (out,) = piece(x, weight)
            ledger.mark("loss")
            total = sum(e.n_bytes for e in ledger.entries if e.died < 0 and not e.owner)
    normed, product, root = 2 * h, 2 * h, 4
    assert out.shape == x.shape
    assert total == T * (normed + product + root + 2 * h)


def galore_states(**fields: Any) -> int:
    """Bytes of states that a middle block's weights have after a step."""
    settings = {"optimizer": "galore_adamw", "optimizer_bits": 8, "rank": r, "step_in_backward": True, **fields}
    ledger, _ = stepped(transformers.build, EQUAL, **settings)
    states = [e for e in ledger.entries if e.owner == "optimizer_state"]
    return sum(e.n_bytes for e in states if ledger.sections[e.section] == "backward 1")


# Rows of the shorter side and moments, in fp32 below 4,096 numbers, of the longer one; two norms have whole moments.
SQUARE, LONG = r * h, r * f
MOMENTS = 2 * 4 * (4 * SQUARE + 3 * LONG + 2 * h)


def test_galore_keeps_a_basis_and_moments_of_the_rank() -> None:
    assert galore_states() == 2 * 7 * SQUARE + MOMENTS


def test_q_galores_basis_takes_a_byte_a_number_and_two_numbers_for_256() -> None:
    assert galore_states(quantised="int8") == 7 * (SQUARE + 2 * 2 * SQUARE // 256) + MOMENTS


def test_an_adapter_that_is_no_lora_is_put_in_by_peft_itself() -> None:
    pytest.importorskip("peft")
    vectors = {"peft_type": "IA3", "target_modules": ["v_proj"], "feedforward_modules": [], "task_type": "CAUSAL_LM"}
    _, made = stepped(transformers.build, EQUAL, method="lora", adapter=vectors)
    assert sum(p.numel() for p in made.model.parameters() if p.requires_grad) == 3 * h


@pytest.mark.parametrize("packed", [{"quantised": "int8"}, {"quantised": "nf4", "inputs_kept": True}])
def test_packed_layers_that_keep_their_inputs_keep_what_no_other_does(packed: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"method": "lora", "rank": 1, "targets": ("none",), "trained_modules": ("embed_tokens",)}
    plain = kept(transformers.build, EQUAL, **fields, quantised="nf4")
    # What the norms made, for q, k, v and for the gated MLP, and the MLP's product; attention keeps its own result.
    assert kept(transformers.build, EQUAL, **fields, **packed) == plain + T * (2 * h + 2 * h + 2 * f)


PACKED = {**lora("transformers", **QV), "autocast": True, "attention": "flash"}


def _stored(**fields: Any) -> tuple[int, int]:
    """Bytes of the parameters of a block, and of what hangs on them."""
    ledger, _ = stepped(transformers.build, GROUPED, **{**PACKED, **fields})
    own = [e for e in ledger.entries if ledger.sections[e.section] == "own 1"]
    return sum(e.n_bytes for e in own), sum(e.n_bytes for e in own if e.whole)


def test_scales_of_bitsandbytes_hang_on_the_weight_and_gptqs_are_parameters() -> None:
    weights = 2 * h * w + 2 * h * k + 3 * h * f
    scales, matrices = 4 * weights // 64, 7
    assert _stored(quantised="nf4")[1] == scales + matrices * 16 * 4
    assert _stored(quantised="gptq4")[1] == _stored(quantised="gptq4_rows")[1] == 0


def test_gptq_without_groups_has_a_scale_a_row() -> None:
    wide = {**GROUPED, "hidden_size": 4 * h}  # 256 columns: two groups of 128
    sizes = [
        sum(e.n_bytes for e in stepped(transformers.build, wide, **{**PACKED, "quantised": kind})[0].entries
            if e.owner == "parameter" and e.itemsize == 2 and e.shape in {(2 * rows,), (rows,)})
        for kind, rows in (("gptq4", f), ("gptq4_rows", f))
    ]  # fmt: skip
    assert sizes[0] > sizes[1] > 0


def test_an_mlp_without_its_kernel_keeps_the_activated_gate_too() -> None:
    kernels = {"fused_kernels": True, "attention": "flash"}
    fused = kept(transformers.build, GROUPED, **kernels)
    assert kept(transformers.build, GROUPED, fused_mlp=False, **kernels) == fused + 2 * f * T


def test_a_load_that_cuts_segments_up_asks_for_more_capacity() -> None:
    stream = Stream()
    stream.born(Entry(30 * MIB, 0, 0, (), 1, "parameter"))
    for _ in range(2):
        stream.born(Entry(45 * MIB, 0, 0, (), 1))
    sent = [(-9, 80 * MIB), (-9, -1), (-10, 30 * MIB)]  # the shard lies in what a bucket was
    plain, after = readings_of(stream, 0), readings_of(stream, 0, "classic", sent)
    assert {key: after[key] - plain[key] for key in plain} == {
        "allocated_bytes": 0, "reserved_bytes": 0, "capacity_bytes": after["capacity_bytes"] - plain["capacity_bytes"],
    }  # fmt: skip
    assert after["capacity_bytes"] > plain["capacity_bytes"]
