"""The ledger on real tensors: nothing is lost or counted twice, and what techniques do not keep is not there."""

import gc
import itertools

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from finefit import trace
from finefit.ledger import Ledger
from finefit.run import summed_loss
from finefit.stream import moment_of
from finefit.techniques import Checkpointing, FusedLoss, FusedOps, Lora, Packing, Precision
from tiny import VOCAB, config_of, examples_of, measured, run_of

LENGTHS = (128, 128, 64)
TOKENS = sum(LENGTHS)
ALL = (Lora(4), FusedOps(), Packing(), FusedLoss(32), Checkpointing(4))


def step_of(techniques, micro_steps=1, lengths=LENGTHS):
    run = run_of(techniques)
    batch = run.collate(examples_of(lengths))
    return run, batch, measured(run, batch, micro_steps)


def alive(ledger):
    return [e for e in ledger.entries if e.died < 0]


def born_in(ledger, section):
    return [e for e in ledger.entries if ledger.sections[e.section] == section]


def test_sections_name_their_moments():
    said = {name: moment_of(name) for name in ("start", "forward 3", "loss", "backward start", "optimizer", "end")}
    assert list(said.values()) == ["", "forward_end", "loss", "backward_peak", "optimizer_step", ""]


def test_a_storage_is_one_entry_however_many_views_it_has():
    ledger = Ledger()
    with ledger:
        x = torch.ones(8, 4)
        views = (x[:2], x.t(), x.view(-1), x.detach())
    assert [e.n_bytes for e in alive(ledger)] == [8 * 4 * 4]
    del x, views
    assert alive(ledger) == []


def test_components_by_birth_and_death():
    ledger = Ledger()
    kept = torch.ones(3)
    ledger.own([kept], "parameter")
    with ledger:
        ledger.mark("forward 0")
        saved = kept * 2
        brief = kept * 3
        del brief
        ledger.mark("backward 0")
        late = saved + 1
        del saved
        ledger.mark("end")
        del late
    assert [ledger.component(e) for e in ledger.entries] == ["parameter", "activation", "temporary", "temporary"]


def test_moments_are_the_compositions_at_the_highest_points():
    ledger = Ledger()
    with ledger:
        ledger.mark("forward 0")
        saved = torch.ones(100)
        brief = torch.ones(50)
        del brief
        ledger.mark("loss")
        small = torch.ones(10)
        del small
        ledger.mark("backward 0")
        del saved
        last = torch.ones(5)
        del last
    assert ledger.moments() == {
        "forward_end": {"activation": 400, "temporary": 200},
        "loss": {"activation": 400, "temporary": 40},
        "backward_peak": {"temporary": 20},
    }


def test_what_a_section_opens_with_the_next_allocation_belongs_to_it():
    ledger = Ledger()
    with ledger:
        ledger.mark("forward 0")
        first = torch.ones(1)
        ledger.mark_at_next_birth("forward after")
        del first
        second = torch.ones(2)
    first_entry, second_entry = ledger.entries
    assert ledger.sections[first_entry.died_section] == "forward 0"
    assert ledger.sections[second_entry.section] == "forward after"
    assert second.numel() == 2


@pytest.mark.parametrize("techniques", [(), (FusedOps(), FusedLoss(32)), ALL], ids=["plain", "fused", "all"])
@pytest.mark.parametrize("kind", [pytest.param("fp32", marks=pytest.mark.slow), "bf16", "bf16_mixed"])
def test_live_bytes_return_to_the_start(techniques, kind):
    """Without a garbage collection: a cycle through a tensor would keep memory for as long as Python pleases."""
    gc.disable()
    try:
        run, _, ledger = step_of((Precision(kind), *techniques), micro_steps=2)
        assert {"parameter", "optimizer_state", "input", "gradient"} == {e.owner for e in alive(ledger)}
        run.optimizer.zero_grad(set_to_none=True)
        assert {"parameter", "optimizer_state", "input"} == {e.owner for e in alive(ledger)}
        assert {"own"} == {ledger.sections[e.section].split(" ")[0] for e in alive(ledger)}
    finally:
        gc.enable()


def test_no_composition_is_ever_negative_and_the_highest_are_the_moments():
    _, _, ledger = step_of(ALL, micro_steps=2)
    tops = {}
    for _, _, moment, live in ledger.curve():
        assert min(live.values()) >= 0
        tops[moment] = max(tops.get(moment, 0), sum(live.values()))
    assert {moment: sum(parts.values()) for moment, parts in ledger.moments().items()} == {
        moment: top for moment, top in tops.items() if moment
    }


def peak_by_profiler(run, batch):
    """Bytes above the start at the highest point, by PyTorch's own allocator reports."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        summed_loss(run, batch).backward()
    changes = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("techniques", [(), (FusedOps(), FusedLoss(32)), ALL], ids=["plain", "fused", "all"])
def test_the_profiler_sees_the_same_peak(techniques):
    """Another witness. It also sees what a kernel takes inside one operator: up to 5 % here."""
    run, batch, ledger = step_of(techniques)
    fixed = sum(e.n_bytes for e in alive(ledger) if e.owner != "gradient")
    moments = ledger.moments()
    highest = max(sum(moments[m].values()) for m in ("forward_end", "loss", "backward_peak"))
    run.optimizer.zero_grad(set_to_none=True)
    assert 1.0 <= peak_by_profiler(run, batch) / (highest - fixed) <= 1.05


def test_a_checkpointed_block_keeps_its_input_alone():
    """Of each block's forward the next block's input is what is left: T·h elements."""
    _, _, ledger = step_of((Packing(), FusedOps(), Checkpointing(4)))
    for block in range(4):
        kept = [e for e in born_in(ledger, f"forward {block}") if e.died_section != e.section]
        assert [e.n_bytes for e in kept] == [TOKENS * 64 * 4]


def test_checkpointing_fewer_blocks_keeps_the_others_as_they_are():
    def kept(blocks):
        _, _, ledger = step_of((Packing(), FusedOps(), Checkpointing(blocks)))
        return [
            sum(e.n_bytes for e in born_in(ledger, f"forward {i}") if e.died_section != e.section) for i in range(4)
        ]

    none, some = kept(0), kept(2)
    assert [TOKENS * 64 * 4] * 2 + none[2:] == some


def test_fused_ops_keep_no_fp32_copy_of_a_bf16_input():
    _, _, ledger = step_of((Precision("bf16"), Packing(), FusedOps()))
    kept = [e for e in born_in(ledger, "forward 1") if e.died_section != e.section]
    assert {(TOKENS, 1)} == {e.shape[-2:] for e in kept if e.itemsize == 4}


def logits(ledger):
    """Allocations as large as the logits of all tokens or of all labelled tokens, by section."""
    labelled = sum((n + 1) // 2 for n in LENGTHS)
    return [ledger.sections[e.section] for e in ledger.entries if e.shape[-1:] == (VOCAB,) and len(e.shape) > 1
            and e.n_bytes // e.itemsize >= labelled * VOCAB]  # fmt: skip


@pytest.mark.parametrize("lora", [(), (Lora(4),)], ids=["full", "lora"])
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fp32", "bf16")), "bf16_mixed"]
)
def test_full_logits_never_exist_with_a_fused_loss(kind, lora):
    _, _, ledger = step_of((Precision(kind), *lora, Packing(), FusedOps(), FusedLoss(32)), micro_steps=2)
    assert logits(ledger) == []
    in_step = [e for e in ledger.entries if ledger.sections[e.section] != "start"]
    assert max(e.n_bytes // e.itemsize for e in in_step) < TOKENS * VOCAB
    chunk = [e for e in born_in(ledger, "loss") if e.shape == (32, VOCAB)]
    assert chunk and all(e.died_section == e.section for e in chunk)


def test_full_logits_do_exist_without_it():
    _, _, ledger = step_of((Packing(), FusedOps()))
    assert {"loss", "backward start"} == set(logits(ledger))


def test_one_chunk_of_logits_at_a_time():
    """At most two fp32 copies of a chunk (its logits, exponentiated in place, and what the head's product needs)."""
    _, _, ledger = step_of((Packing(), FusedOps(), FusedLoss(16)))
    live = top = 0
    for index, sign in ledger.events:
        entry = ledger.entries[index]
        if entry.shape == (16, VOCAB):
            live += sign
            top = max(top, live)
    assert 1 <= top <= 2


def test_attention_never_holds_a_square_of_scores():
    _, _, ledger = step_of((Packing(), FusedOps(), FusedLoss(32)), lengths=(512,))
    heads = config_of().num_attention_heads
    assert max(e.n_bytes for e in ledger.entries if ledger.sections[e.section] != "start") < heads * 512 * 512 * 4


def test_packed_sequences_cost_no_more_than_their_tokens():
    """Four times 64 tokens against 256 in one row: the same activations kept, smaller scores."""
    kept, peak = [], []
    for lengths in ((64, 64, 64, 64), (256,)):
        _, _, ledger = step_of((Packing(), FusedOps(), FusedLoss(32)), lengths=lengths)
        activations = [e for e in born_in(ledger, "forward 1") if ledger.component(e) == "activation"]
        kept.append(sum(e.n_bytes for e in activations))
        peak.append(max(sum(m.values()) for m in ledger.moments().values()))
    assert kept[0] == kept[1]
    assert peak[0] < peak[1]


def test_a_second_micro_batch_allocates_no_new_gradients():
    def gradient_bytes(micro_steps):
        _, _, ledger = step_of(ALL, micro_steps)
        return sum(e.n_bytes for e in ledger.entries if e.owner == "gradient")

    assert gradient_bytes(1) == gradient_bytes(2)


def test_block_marks_leave_no_hooks_behind():
    run, _, _ = step_of(())
    blocks = run.model.get_decoder().layers
    assert all(not block._forward_hooks and not block._forward_pre_hooks for block in blocks)


def test_a_leak_is_seen():
    """The test of returning bytes can fail: a block that hoards its outputs shows up alive after the step."""
    run = run_of(())
    hoard = []
    run.model.get_decoder().layers[0].register_forward_hook(lambda _m, _i, out: hoard.append(out))
    ledger = Ledger()
    trace.run_step(run, run.collate(examples_of((16,))), ledger, 1)
    run.optimizer.zero_grad(set_to_none=True)
    assert [e.n_bytes for e in alive(ledger) if not e.owner] == [16 * 64 * 4]
    assert isinstance(hoard[0], torch.Tensor) and isinstance(run.model, nn.Module)


def test_the_prediction_knows_the_attention_s_block():
    from finefit.nn import attention
    from finefit.predict import QUERY_BLOCK

    assert attention.QUERY_BLOCK == QUERY_BLOCK
