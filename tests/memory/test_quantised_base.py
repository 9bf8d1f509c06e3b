"""A quantised base in memory: what it takes at rest, while it is loaded, and while it is a matrix again."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from finefit import checkpoint, models, predict
from finefit.build import build, rewritten
from finefit.layout import layout_of
from finefit.ledger import Ledger
from finefit.nn import blockwise
from finefit.nn.optimizers import Optimizing
from finefit.nn.quantised_linear import QuantisedWeight
from finefit.run import blocks_of, padded
from finefit.spec import Parameter
from finefit.techniques import (
    Checkpointing,
    FusedLoss,
    FusedOps,
    Lora,
    NotAsPlanned,
    Packing,
    Precision,
    QuantizedBase,
    Unsuitable,
    quantized_base,
)  # fmt: skip
from finefit.techniques.quantized_base import FORMS
from finefit.watch import PhaseLedger
from tiny import CPU, config_of, examples_of, layout_for, measured, micro_of, run_of, spec_of

CHUNK = 2**14
WIDE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 192}
TRAINED = (Lora(4), FusedOps(), Packing(), FusedLoss(32))


def matrices(run):
    return [m for m in blocks_of(run.model).modules() if isinstance(m, QuantisedWeight)]


# --- at rest


@pytest.mark.parametrize("form", FORMS)
def test_bytes_at_rest_are_counted_by_hand(form):
    """A llama block has 147,456 weights in its linears: all whole blocks; groups of scales are not."""
    bits, scales = FORMS[form]
    run = run_of((QuantizedBase(bits, scales, CHUNK), Lora(4)), config_of(**WIDE))
    sizes = [256 * 128, 128 * 128, 128 * 128, 128 * 256, *[128 * 192] * 3]
    blocks = [n // 64 for n in sizes]
    codes = sum(sizes) * bits // 8
    held = 4 * sum(blocks) if scales == "plain" else sum(blocks) + sum(4 * -(-b // 256) + 4 for b in blocks)
    tables = {2: 4096, 3: 65_536 + 4096, 4: 2048, 8: 0}[bits] + (1024 if scales == "double" else 0)
    base = [p for n, p in blocks_of(run.model).named_parameters() if "lora_" not in n and "norm" not in n]
    assert sum(p.untyped_storage().nbytes() for p in base) == 4 * (codes + held) + tables
    assert {False} == {p.requires_grad for p in base}


@pytest.mark.parametrize("form", [2, 3, 4, 8])
def test_a_weight_takes_its_bits_and_an_eighth_of_one_for_scales(form):
    """At the sizes of an 8B model the rest is nothing: 4.127 bits a weight, as the paper counts."""
    spec = spec_of(config_of(hidden_size=4096, head_dim=128, num_attention_heads=32, num_key_value_heads=8,
                             intermediate_size=14_336, num_hidden_layers=32, vocab_size=128_256))  # fmt: skip
    layout = QuantizedBase(form).rewrite(layout_of(spec, micro_of(padded(examples_of((8,))))))
    weights = spec.num_hidden_layers * sum(p.numel for p in spec.linears())
    packed = [g for g in layout.groups if g.role == "scale" or g.bits == form]
    bits = sum(g.numel * g.count * g.bits for g in packed) / weights
    assert form + 0.1269 < bits < form + 0.1272


# --- while a weight is brought back


@pytest.mark.parametrize("others", [(), (Checkpointing(4),)], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16_mixed"])
def test_one_matrix_at_a_time_and_none_is_kept(kind, others):
    """No number of tokens or features is a weight's, so a matrix is known by its shape."""
    run = run_of((Precision(kind), QuantizedBase(chunk=CHUNK), *TRAINED, *others), config_of(**WIDE))
    ledger = measured(run, run.collate(examples_of((48, 100, 112))), 2)
    shapes = {tuple(m.shape) for m in matrices(run)}
    live = top = born = 0
    for index, sign in ledger.events:
        entry = ledger.entries[index]
        if entry.shape in shapes and ledger.sections[entry.section] != "start":
            live, born = live + sign, born + (sign > 0)
            top = max(top, live)
            assert sign > 0 or entry.died_section == entry.section
    blocks, linears, passes = 4, 7, 2 * (3 if others else 2)
    # The first block's queries, keys and values have no input to give a gradient to, its other layers have.
    assert (top, live, born) == (1, 0, passes * blocks * linears - 2 * 3)


def test_activations_are_those_of_a_dense_base():
    """What is kept from forward to backward does not know how the base is stored."""
    kept = []
    for base in ((), (QuantizedBase(chunk=CHUNK),)):
        run = run_of((Precision("bf16"), *base, *TRAINED), config_of(**WIDE))
        ledger = measured(run, run.collate(examples_of((48, 64))))
        kept.append(sum(e.n_bytes for e in ledger.entries if ledger.component(e) == "activation"))
    assert kept[0] == kept[1]


# --- while it is loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in bf16 files whose MLP weights are larger than its embedding."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = config_of(hidden_size=256, head_dim=64, intermediate_size=768, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(path)
    return path


def loading(techniques, folder, monkeypatch):
    """(largest bytes beside the parameters while a folder is read, the run, what is predicted for it)."""
    run, ledger, empty = rewritten(models.config_of(folder), techniques, CPU), PhaseLedger(), models.fill_empty

    def then_watch(model, device):
        empty(model, device)
        ledger.own(model.parameters(), "parameter")
        ledger.__enter__()

    with monkeypatch.context() as patch:  # the layout below fills models too
        patch.setattr(models, "fill_empty", then_watch)
        models.fill_from(folder)(run.model, CPU)
    ledger.__exit__(None, None, None)
    live = top = 0
    for index, sign in ledger.events:
        if not ledger.entries[index].owner:
            live += sign * ledger.entries[index].n_bytes
            top = max(top, live)
    config = models.config_of(folder)
    layout = layout_for(config, techniques, padded(examples_of((8,))))
    return top, run, predict.footprint(layout).moments["load"]


@pytest.mark.parametrize("chunk", [2**14, *(pytest.param(n, marks=pytest.mark.slow) for n in (2**16, 2**20))])
@pytest.mark.parametrize("form", ["nf4", *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS if f != "nf4")])
def test_loading_holds_a_chunk_beside_the_model_and_reads_the_file_in_place(form, chunk, folder, monkeypatch):
    techniques = (Precision("bf16"), QuantizedBase(*FORMS[form], chunk), Lora(4))
    top, run, said = loading(techniques, folder, monkeypatch)
    assert said["parameter"] == sum(p.untyped_storage().nbytes() for p in run.model.parameters())
    assert said["temporary"] == top
    values, bounds = {2: (12, 12), 3: (12, 28), 4: (12, 60), 8: (9, 0)}[
        FORMS[form][0]
    ]  # bytes an element, and of the bounds between codes
    assert top == 4 * 768 * 4 + values * min(chunk, 768 * 256) + bounds


def test_loaded_weights_are_those_of_the_file_quantised(folder, monkeypatch):
    """Straight from the file's type: not by way of the run's own."""
    _, run, _ = loading((Precision("bf16"), QuantizedBase(8, "plain", CHUNK), Lora(4)), folder, monkeypatch)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in blocks_of(run.model).named_modules():
        if isinstance(weight, QuantisedWeight):
            source = blocks_of(whole).get_parameter(name)
            off = (weight.dense(torch.float32) - source).view(-1, 64).abs().amax(1)
            assert bool((off <= source.view(-1, 64).abs().amax(1) / 253).all())


# --- on disk


def test_a_checkpoint_has_no_base_in_it(folder, tmp_path):
    techniques = (Precision("bf16"), QuantizedBase(chunk=CHUNK), *TRAINED)
    run = build(models.config_of(folder), techniques, models.fill_from(folder), CPU, Optimizing())
    path, _ = checkpoint.save(run, 1, tmp_path, str(folder), 1)
    names = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    assert all("lora_" in name for name in names - {"cpu"})
    assert json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)


def test_a_resumed_run_has_the_base_it_began_with(folder, tmp_path):
    """Quantising the files again gives the same codes, so nothing but the adapters needs to be kept."""
    techniques = (Precision("bf16"), QuantizedBase(chunk=CHUNK), *TRAINED)
    first, second = (
        build(models.config_of(folder), techniques, models.fill_from(folder), CPU, Optimizing()) for _ in range(2)
    )
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# --- what is noticed and what is declined


def test_parameters_are_counted_as_the_matrices_they_stand_for():
    counts = [
        models.num_parameters(run_of((*base, Lora(4)), config_of(**WIDE)).model)
        for base in ((), (QuantizedBase(chunk=CHUNK),))
    ]
    assert counts[0] == counts[1]


def undo(run):
    block = blocks_of(run.model)[2]
    block.mlp.up_proj.weight = torch.nn.Parameter(block.mlp.up_proj.weight.dense(torch.bfloat16))


def other_bits(run):
    weight = blocks_of(run.model)[1].self_attn.o_proj.weight
    weight.bits = 8


@pytest.mark.parametrize(("change", "named"), [(undo, "2.mlp.up_proj"), (other_bits, "1.self_attn.o_proj")])
def test_a_weight_that_is_not_as_planned_is_named(change, named):
    technique = QuantizedBase(chunk=CHUNK)
    run = run_of((Precision("bf16"), technique, Lora(4)), config_of(**WIDE))
    technique.verify(run, Ledger())
    change(run)
    with pytest.raises(NotAsPlanned, match=f"quantized_base: 1 of 28 weights are not so: .*{named}"):
        technique.verify(run, Ledger())


def test_paper_and_layer_have_the_same_blocks():
    assert (quantized_base.BLOCK, quantized_base.GROUP) == (blockwise.BLOCK, blockwise.GROUP)


@pytest.mark.parametrize("chunk", [0, 64, 2**14 + 1])
def test_a_chunk_that_is_not_whole_groups_is_unsuitable(chunk):
    with pytest.raises(Unsuitable, match="not whole groups of 16384"):
        QuantizedBase(chunk=chunk).rewrite(layout_of(spec_of(config_of(**WIDE)), micro_of(padded(examples_of((8,))))))


def test_expert_weights_of_three_dimensions_are_unsuitable():
    spec = spec_of(config_of(**WIDE))
    experts = Parameter("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 16), "expert")
    mixture = dataclasses.replace(spec, extra=(*spec.parameters(), experts))
    with pytest.raises(Unsuitable, match="three dimensions"):
        QuantizedBase().rewrite(layout_of(mixture, micro_of(padded(examples_of((8,))))))
