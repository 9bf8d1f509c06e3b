"""Every family against transformers' own eager model, with all exact techniques on, in fp32.

Windows are smaller than the sequences, soft caps bite, and there are blocks of every kind the family mixes. Models are in
evaluation: some routers draw numbers in training.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from finefit import coefficients, models
from finefit.catalog import structures
from finefit.errors import ModelError
from finefit.nn.lora_linear import is_transposed
from finefit.run import blocks_of, is_linear
from finefit.stored import Place, Places
from finefit.techniques import Checkpointing, FusedLoss, FusedOps, Lora, Packing, Unsuitable
from finefit.techniques.packing import packed
from tiny import (
    CPU,
    FAMILIES,
    examples_of,
    family_config,
    layout_for,
    loss_and_gradients,
    relative_error,
    run_of,
    stock,
    stock_loss_and_gradients,
    worst_error,
)  # fmt: skip

LENGTHS = (140, 3, 45, 1)
FUSED = (FusedOps(), Packing(), FusedLoss(16))


def test_every_family_whose_coefficients_ship_is_here():
    assert {name.split(" ")[0] for name in FAMILIES} == set(coefficients.shipped())


def test_what_would_be_trained_wrongly_is_refused():
    """Attention outside the registry would let packed sequences mix: rows are whole, or a family is not known."""
    layout = layout_for(family_config("llama"), (), packed(examples_of((16,))))
    for family in structures.OWN_ATTENTION:
        with pytest.raises(Unsuitable, match="takes whole rows"):
            Packing().rewrite(replace(layout, model=replace(layout.model, family=family)))
    with pytest.raises(ModelError, match="the attention of 'xglm' models is their own and cannot be packed yet"):
        models.on_meta(AutoConfig.for_model("xglm"))
    with pytest.raises(ModelError, match="a 't5' model is no decoder"):
        models.on_meta(AutoConfig.for_model("t5"))


@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_transformers_are_read(name, tmp_path):
    """By their names in a file: experts one by one, modules renamed since, a router's balance among the buffers."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(family_config(name))
    for buffer in models.kept_buffers(theirs).values():
        buffer.copy_(torch.rand(buffer.shape))
    theirs.save_pretrained(tmp_path)
    ours = models.on_meta(models.config_of(tmp_path))
    models.fill_from(tmp_path)(ours, CPU)
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


def test_a_model_that_also_sees_is_read_for_its_text(tmp_path):
    theirs = stock(family_config("gemma3_text"))
    theirs.config.save_pretrained(tmp_path)
    stored = {
        f"language_model.{name}": tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"
    }
    save_file({**stored, "vision_tower.patch.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    ours = models.on_meta(models.config_of(tmp_path))
    models.fill_from(tmp_path)(ours, CPU)
    expected = theirs.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.state_dict().items())


def test_a_layout_that_is_not_followed_is_named():
    places = Places(family_config("mixtral"), {"model.layers.0.mlp.experts.down_proj": 0})
    assert places.of("model.layers.0.block_sparse_moe.experts.5.w2.weight") == Place(
        "model.layers.0.mlp.experts.down_proj", 5
    )
    up = places.of("model.layers.0.block_sparse_moe.experts.2.w3.weight")
    assert up == Place("model.layers.0.mlp.experts.gate_up_proj", 2, (1, 2, 0))
    whole = torch.arange(24).view(3, 4, 2)
    assert up.of(whole).tolist() == [[20, 21], [22, 23]]
    places._stacking[0].operations.append(places._stacking[0].operations[0])
    with pytest.raises(ModelError, match="MergeModulelist then Concatenate then MergeModulelist"):
        places.of("model.layers.0.block_sparse_moe.experts.2.w3.weight")


USUAL = (
    "llama",
    "qwen2",
    "gemma2",
    "phi3",
    "mixtral",
    "deepseek_v2",
    "gpt2",
    "opt",
    "falcon",
    "cohere",
)  # one of each kind
PACKED = [name for name in FAMILIES if name.split(" ")[0] not in structures.OWN_ATTENTION]


def usual(names):
    """The same, those that one of the usual ones stands for marked as slow."""
    return [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in names]


def both(techniques, name):
    """Our run of a family's tiny model, packed where it can be, and transformers' own with the same weights."""
    techniques = [t for t in techniques if not isinstance(t, Packing) or name in PACKED]
    run = run_of(techniques, family_config(name))
    run.model.eval()
    return run, stock(family_config(name), run).eval()


@pytest.mark.parametrize("name", usual(PACKED))
def test_hidden_states_are_those_of_transformers(name):
    run, model = both(FUSED, name)
    examples = examples_of(LENGTHS)
    batch = run.collate(examples)
    with torch.no_grad():
        hidden = run.model.get_decoder()(batch.ids_bs, position_ids=batch.position_bs, bounds=batch.bounds)
        for (ids, _), start in zip(examples, batch.bounds, strict=False):
            expected = model.get_decoder()(torch.tensor([ids])).last_hidden_state[0]
            assert relative_error(hidden.last_hidden_state[0, start : start + len(ids)], expected) <= 2e-5


@pytest.mark.parametrize("name", usual(FAMILIES))
def test_loss_and_gradients_are_those_of_transformers(name):
    run, model = both((*FUSED, Checkpointing(2)), name)
    examples = examples_of(LENGTHS)
    loss, found = loss_and_gradients(run, [run.collate(examples)])
    expected_loss, expected = stock_loss_and_gradients(model, examples)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst_error(*(without_nothing(name, gradients) for gradients in (found, expected)))[0] <= 1e-4


def without_nothing(name, gradients):
    """OPT's keys are not turned, so their bias shifts all scores of a query alike: its gradient is rounding alone."""
    return {key: g for key, g in gradients.items() if name != "opt" or not key.endswith("k_proj.bias")}


@pytest.mark.parametrize("name", ["cohere", "granite", "phi", "gemma2"])
def test_the_plain_loss_is_that_of_transformers(name):
    """Scaled, shifted or capped logits, by the model's own forward with labels; the head's bias trains too."""
    run, model = both((Packing(),), name)
    ids, mask = examples_of((45,))[0]
    loss, found = loss_and_gradients(run, [run.collate([(ids, mask)])])
    labels = [token if trained else -100 for token, trained in zip(ids, mask, strict=True)]
    expected = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert worst_error(found, gradients)[0] <= 1e-5


@pytest.mark.parametrize("name", usual(FAMILIES))
def test_adapters_are_an_update_of_the_weight(name):
    """Loss and adapters' gradients from the stock model with merged weights: dA = s·B^T dW, dB = s·dW A^T."""
    run, _ = both((*FUSED, Lora(4, alpha=6.0)), name)
    generator = torch.Generator().manual_seed(4)
    layers = {n: m for n, m in run.model.named_modules() if hasattr(m, "lora_A")}
    linears = [m for m in blocks_of(stock(family_config(name)))[0].modules() if is_linear(m) or is_transposed(m)]
    assert len(layers) == 3 * len(linears)
    with torch.no_grad():
        for layer in layers.values():
            layer.lora_B.normal_(std=0.05, generator=generator)
    merged = stock(family_config(name), run).eval()
    with torch.no_grad():
        for path, layer in layers.items():
            update = layer.scale * layer.lora_B @ layer.lora_A
            merged.get_submodule(path).weight.add_(update.t() if layer.transposed else update)
    examples = examples_of(LENGTHS)
    loss, found = loss_and_gradients(run, [run.collate(examples)])
    expected_loss, full = stock_loss_and_gradients(merged, examples)
    expected = {}
    for path, layer in layers.items():
        dweight = full[f"{path}.weight"].double()
        dweight = dweight.t() if layer.transposed else dweight
        expected[f"{path}.lora_A"] = layer.scale * layer.lora_B.detach().double().t() @ dweight
        expected[f"{path}.lora_B"] = layer.scale * dweight @ layer.lora_A.detach().double().t()
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst_error(found, expected)[0] <= 1e-4


def test_an_adapted_model_is_pefts():
    """The whole llama with ``peft.get_peft_model``, adapters on some linears only."""
    from peft import LoraConfig, get_peft_model

    targets = ("q_proj", "v_proj", "down_proj")
    run = run_of((*FUSED, Lora(4, alpha=6.0, targets=targets)), family_config("llama"))
    generator = torch.Generator().manual_seed(4)
    adapters = LoraConfig(r=4, lora_alpha=6.0, target_modules=list(targets), task_type="CAUSAL_LM")
    theirs = get_peft_model(stock(family_config("llama"), run), adapters)
    parameters = {n.removeprefix("base_model.model."): p for n, p in theirs.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.1, generator=generator)
                parameters.pop(f"{name}.default.weight").copy_(p)
    assert not parameters
    examples = examples_of(LENGTHS)
    loss, found = loss_and_gradients(run, [run.collate(examples)])
    expected_loss, expected = stock_loss_and_gradients(theirs, examples)
    renamed = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): g for name, g in expected.items()
    }
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst_error(found, renamed)[0] <= 1e-5


@pytest.mark.parametrize("name", usual(FAMILIES))
def test_generating_with_a_cache_is_reading_at_once(name):
    """Without boundaries the attention is plainly causal, token by token the same as all at once."""
    run, model = both((FusedOps(), Lora(4)), name)
    ids = torch.tensor([examples_of((60,))[0][0]])
    with torch.no_grad():
        whole = run.model(ids, use_cache=False).logits
        first = run.model(ids[:, :30], use_cache=True)
        logits, cache = [first.logits], first.past_key_values
        for position in range(30, 60):
            out = run.model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            logits.append(out.logits)
        assert relative_error(torch.cat(logits, 1), whole) <= 1e-5
        assert relative_error(whole, model(ids, use_cache=False).logits) <= 1e-5
