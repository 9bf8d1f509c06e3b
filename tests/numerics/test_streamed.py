"""Streamed weights give the loss and the gradients of resident ones, to the bit; and what is not there is never used."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from finefit import evaluate, models
from finefit.build import build
from finefit.errors import EngineError
from finefit.nn.optimizers import Optimizing
from finefit.nn.streamed import BROUGHT
from finefit.rehearse import rehearse
from finefit.run import blocks_of, summed_loss
from finefit.techniques import (
    Accumulation,
    Checkpointing,
    FusedLoss,
    FusedOps,
    Lora,
    NotAsPlanned,
    Packing,
    ParameterOffload,
    Precision,
    QuantizedBase,
)  # fmt: skip
from tiny import CPU, FAMILIES, VOCAB, config_of, examples_of, family_config, gradients, loss_and_gradients, run_of

DISK = ParameterOffload("disk")
FUSED = (FusedOps(), Packing(), FusedLoss(32))
LENGTHS = (100, 3, 60, 17)


def result(run, seed=7):
    """Loss and gradients of two micro-batches, with dropout drawn the same each time."""
    groups = run.split([len(ids) for ids, _ in examples_of(LENGTHS)])
    examples = examples_of(LENGTHS)
    torch.manual_seed(seed)
    return loss_and_gradients(run, [run.collate([examples[i] for i in group]) for group in groups])


def assert_equal(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert [name for name in expected[1] if not torch.equal(found[1][name], expected[1][name])] == []


def poisoned(run):
    """Whatever leaves the arena becomes not-a-number at once: what is used without being there shows in the loss."""
    arena, begin = run.model.streamed, run.model.streamed.store.begin

    def after_poison(unit):
        assert not any(arena.units[i].overlaps(arena.units[unit]) for i in arena.held)
        start = arena.units[unit].start
        arena._storage[0].data[start : start + arena.units[unit].n_bytes].fill_(0xFF)
        begin(unit)

    arena.store.begin = after_poison
    return run


@pytest.mark.parametrize("blocks", [0, 1, 3, 4])
@pytest.mark.parametrize(
    "techniques",
    [
        (Lora(4),),
        (Precision("bf16"), Lora(4, dropout=0.1), *FUSED),
        (Precision("bf16_mixed"), Lora(4), Packing()),
        (Precision("bf16"), QuantizedBase(chunk=2**14), Lora(4, dropout=0.1), *FUSED),
        (Precision("bf16"), QuantizedBase(8, "plain", chunk=2**14), Lora(4), *FUSED),
        (Precision("fp16"), Lora(4, targets=("q_proj", "up_proj")), *FUSED),
        (Precision("fp32"), QuantizedBase(chunk=2**14)),
    ],
    ids=["plain", "lora", "mixed", "qlora", "qlora in 8 bits", "some targets", "norms and tables train"],
)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_loss_and_gradients_are_those_of_resident_weights(techniques, blocks, tied):
    used = (*techniques, Accumulation(2, most_steps=2), *([Checkpointing(blocks)] if blocks else []))
    config = functools.partial(config_of, tie_word_embeddings=tied, attention_bias=True)
    expected = result(run_of(used, config()))
    run = poisoned(run_of((*used, DISK), config()))
    assert_equal(result(run), expected)
    assert_equal(result(run), expected)
    assert run.evidence[BROUGHT] > 2 * 2 * (4 - 2)


@pytest.mark.parametrize("kind", ["attention", "mlp", "selective"])
def test_parts_of_blocks_are_computed_again_in_their_turn(kind):
    used = (Precision("bf16"), Lora(4), *FUSED, Checkpointing(4, kind))
    assert_equal(result(poisoned(run_of((*used, DISK)))), result(run_of(used)))


def test_a_block_that_runs_out_of_its_turn_is_noticed():
    """Nested groups do; on paper they are refused. Their weights might be there, by chance, and might not."""
    run = run_of((Lora(4), DISK, Checkpointing(4, "nested")))
    with pytest.raises(AssertionError, match="runs out of its turn"):
        result(run)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_streamed(name):
    """Three blocks; embeddings that scale their rows, blocks of two kinds, stacks of experts, windows, biases."""
    used = (Lora(4), Packing()) if models._attention_of(family_config(name)) == "finefit" else (Lora(4),)
    resident, run = run_of(used, family_config(name)), poisoned(run_of((*used, DISK), family_config(name)))
    assert_equal(result(run), result(resident))


# --- from the files of a model


def stored(tmp_path, config, dtype=torch.float32):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(tmp_path, max_shard_size="60KB")
    return tmp_path


def from_files(folder, techniques):
    config = models.config_of(folder)
    return build(config, techniques, models.fill_from(folder), CPU, Optimizing())


def scratch_bytes(run):
    """What was written to the scratch file rather than read where it is."""
    scratch = run.model.streamed.store._scratch
    return 0 if scratch is None else scratch._end


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "gemma3_text", "deepseek_v3", "gpt2"])
@pytest.mark.parametrize("held", ["fp32", "bf16"])
def test_weights_of_files_are_streamed_as_they_are_loaded(family, held, tmp_path):
    """Experts, each of them alone in the files, whose stacks take turns in the arena while they are put together."""
    folder = stored(tmp_path, family_config(family))
    used = (Precision(held), Lora(4), *((Packing(),) if family != "gpt2" else ()))
    run = poisoned(from_files(folder, (*used, DISK)))
    assert_equal(result(run), result(from_files(folder, used)))
    assert (scratch_bytes(run) == 0) is (held == "fp32")


def test_a_quantised_weight_is_written_once_and_a_plain_one_not_at_all(tmp_path):
    folder = stored(tmp_path, config_of(tie_word_embeddings=False), torch.bfloat16)
    used = (Precision("bf16"), QuantizedBase(chunk=2**14), Lora(4), *FUSED)
    run = poisoned(from_files(folder, (*used, DISK)))
    assert_equal(result(run), result(from_files(folder, used)))
    codes = sum(unit.n_bytes for unit in run.model.streamed.blocks)
    assert codes <= scratch_bytes(run) <= codes + 4 * 4096
    norms = [run.model.streamed.store.of(i) for i in range(4)]
    assert all(len({type(piece.file).__name__ for piece in pieces}) == 2 for pieces in norms)


def test_files_that_are_moved_away_do_not_matter_and_a_cut_one_is_told(tmp_path):
    folder = stored(tmp_path, config_of())
    run = from_files(folder, (Precision("fp32"), Lora(4), DISK))
    expected = result(run)
    for path in folder.glob("*.safetensors"):
        path.rename(tmp_path / f"moved-{path.name}")
    run.model.streamed.held.clear()
    assert_equal(result(run), expected)
    for path in folder.glob("moved-*"):
        path.write_bytes(path.read_bytes()[:2000])
    run.model.streamed.held.clear()
    with pytest.raises(EngineError, match="not there any more"):
        result(run)


def test_no_more_than_the_arena_is_there_while_weights_are_loaded(tmp_path):
    """The storages of all weights together, when everything is loaded."""
    folder = stored(tmp_path, config_of(num_hidden_layers=12))
    run = from_files(folder, (Precision("fp32"), Lora(4), DISK))
    frozen = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
              for name, p in run.model.named_parameters() if "lora_" not in name and name != "model.norm.weight"}  # fmt: skip
    assert list(frozen.values()) == [run.model.streamed.n_bytes]


# --- without a backward


def test_evaluating_and_answering_go_forward_alone():
    used = (Precision("bf16"), Lora(4), *FUSED)
    resident, streamed = run_of(used), poisoned(run_of((*used, DISK)))
    examples = examples_of((50, 20))
    assert evaluate.held_out_loss(streamed, examples)[:2] == evaluate.held_out_loss(resident, examples)[:2]
    said = [evaluate.answer(run, examples[0][0], [VOCAB + 1], 6) for run in (resident, streamed)]
    assert said[0] == said[1] and len(said[0]) == 6
    assert evaluate.answer(streamed, examples[0][0], [VOCAB + 1], 6, most_s=0.0) == said[0][:1]


def test_an_evaluation_between_forward_and_backward_does_no_harm():
    """What was evicted comes again; a table the loss has saved would not, and that is found."""
    used = (Precision("fp32"), Lora(4), Packing(), DISK)
    expected = result(run_of((*used, FusedLoss(32))))[1]
    run = poisoned(run_of((*used, FusedLoss(32))))
    examples = examples_of(LENGTHS)
    torch.manual_seed(7)
    groups = [run.collate([examples[i] for i in group]) for group in run.split([len(ids) for ids, _ in examples])]
    for batch in groups:
        loss = summed_loss(run, batch) / sum(len(one.label_l) for one in groups)
        with torch.no_grad():
            summed_loss(run, batch)
        loss.backward()
    assert [n for n, g in gradients(run.model).items() if not torch.equal(g, expected[n])] == []
    plain = run_of(used)
    loss = summed_loss(plain, groups[0])
    with torch.no_grad():
        plain.model.get_decoder()(input_ids=groups[0].ids_bs[:, :16], position_ids=groups[0].position_bs[:, :16],
                                  bounds=(0, 16), use_cache=False)  # fmt: skip
        plain.model.streamed.held.discard(4)
    with pytest.raises(AssertionError, match=r"embed_tokens.weight were not there"):
        loss.backward()


# --- what must never happen


def test_a_block_that_is_not_there_is_not_run():
    schedule = schedule_of(run_of((Lora(4), DISK)))
    schedule.begins(0)
    with pytest.raises(AssertionError, match="block 1 begins while block 0 is at work"):
        schedule.begins(1)
    schedule.arena.held.discard(0)
    with pytest.raises(AssertionError, match="the weights of block 0 were not there"):
        schedule.ends(0)


def test_nothing_is_brought_over_what_is_at_work():
    schedule = schedule_of(run_of((Lora(4), DISK)))
    schedule.begins(0)
    with pytest.raises(AssertionError, match="block 2 would be brought over block 0, which is at work"):
        schedule.prefetch(2)
    with pytest.raises(AssertionError, match="block 2 would be brought over block 0"):
        schedule.bring(2)


def test_a_backward_out_of_order_is_found():
    schedule = schedule_of(run_of((Lora(4), DISK)))
    schedule.turns(3)
    with pytest.raises(AssertionError, match="backward of block 1 begins while block 3 is at work"):
        schedule.turns(1)


def test_a_step_that_broke_off_leaves_no_trace():
    run = run_of((Lora(4), DISK))
    expected = result(run_of((Lora(4),)))
    block = blocks_of(run.model)[2]
    forward, block.forward = block.forward, None
    with pytest.raises(TypeError):
        result(run)
    block.forward = forward
    assert_equal(result(run), expected)


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_a_rehearsal_sees_that_weights_were_streamed(family):
    """Of a family whose first blocks have no adapter too: backward ends where the first one is."""
    lora = Lora(4) if family == "llama" else Lora(4, targets=("gate_proj",))
    used = (Precision("bf16"), lora, DISK)
    run = run_of(used, family_config(family))
    rehearse(run, examples_of((60, 20)), (), used, 2)
    first = 0 if family == "llama" else 1
    assert run.evidence[BROUGHT] >= 2 * (2 * 3 - first - 4)


def test_a_rehearsal_sees_that_weights_were_not_streamed():
    used = (Precision("bf16"), Lora(4), DISK)
    run = run_of(used)
    block = blocks_of(run.model)[1]
    block._forward_pre_hooks.clear()
    block._forward_hooks.clear()
    with pytest.raises(AssertionError, match="block 1 runs out of its turn"):
        rehearse(run, examples_of((60, 20)), (), used, 1)
    run = run_of(used)
    weight = blocks_of(run.model)[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(NotAsPlanned, match="in 2 places, not in one"):
        rehearse(run, examples_of((60, 20)), (), used, 1)
    run = run_of(used)
    run.model.streamed.held.update(range(5))
    with pytest.raises(NotAsPlanned, match="brought 0 times"):
        rehearse(run, examples_of((60, 20)), (), used, 1)


def schedule_of(run):
    from finefit.nn.streamed import Schedule

    return Schedule(run.model.streamed, {})


def test_one_block_is_on_its_way_while_another_is_at_work():
    """In the order of a step: what is begun, and where it is waited for; the table is larger than both slots."""
    run = run_of((Precision("bf16"), Lora(4), *FUSED, DISK), config_of(num_hidden_layers=5, vocab_size=2000))
    store, told = run.model.streamed.store, []
    begin, finish = store.begin, store.finish
    store.begin = lambda unit: (told.append(f"begin {unit}"), begin(unit))
    store.finish = lambda: (told.append("wait"), finish())
    for i, block in enumerate(blocks_of(run.model)):
        block.register_forward_hook(lambda *_, i=i: told.append(f"forward {i}"))
    batch = run.collate(examples_of((32,)))
    loss = summed_loss(run, batch)
    told.append("loss")
    loss.backward()
    assert told == [
        "begin 0", "wait", "begin 1", "forward 0", "wait", "begin 2", "forward 1", "wait", "begin 3", "forward 2",
        "wait", "begin 4", "forward 3", "wait", "forward 4", "begin 5", "wait", "loss",
        "begin 4", "wait", "begin 3", "wait", "begin 2", "wait", "begin 1", "wait", "begin 0", "wait",
    ]  # fmt: skip
    told.clear()
    summed_loss(run, batch)
    assert told[:4] == ["forward 0", "begin 2", "forward 1", "wait"]  # 0 and 1 are there from the backward before


# --- at a size where kernels are those of real models


@pytest.mark.slow
@pytest.mark.parametrize("base", [(), (QuantizedBase(8),)], ids=["bf16", "int8"])
def test_blocks_of_real_size_are_streamed_to_the_bit(base):
    """Three blocks of Llama 3.1 8B's shape, 416 MiB each in bf16, 211 in 8 bits."""
    config = config_of(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        num_hidden_layers=3, vocab_size=512, tie_word_embeddings=False,
    )  # fmt: skip
    used = (Precision("bf16"), *base, Lora(8), *FUSED, Checkpointing(2))
    found = []
    for more in ((), (DISK,)):
        run = run_of((*used, *more), config)
        found.append(loss_and_gradients(run, [run.collate(examples_of((160, 90)))]))
        del run
    assert_equal(found[1], found[0])
