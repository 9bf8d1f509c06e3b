"""Every family against transformers' own eager model, with all exact techniques on, in fp32.

Windows are smaller than the sequences, soft caps bite, and there are blocks of every kind the family mixes.
"""

import pytest
import torch

from finefit import coefficients, models
from finefit.errors import ModelError
from finefit.run import blocks_of
from finefit.techniques import Checkpointing, FusedLoss, FusedOps, Lora, Packing
from tiny import (
    FAMILIES,
    config_of,
    examples_of,
    family_config,
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
    assert {name.split(" ")[0] for name in FAMILIES} == {path.stem for path in coefficients.SHIPPED.glob("*.json")}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bloom", {}),
        ("stablelm", {}),
        ("gpt_oss", {}),
        ("cohere", {}),
        ("granite", {"logits_scaling": 8.0}),
        ("phi", {}),
    ],
)
def test_what_would_be_trained_wrongly_is_refused(family, changes):
    """Attention outside the registry would let packed sequences mix; scaled or shifted logits have another loss."""
    with pytest.raises(ModelError, match=r"cannot be packed yet|scaled or shifted"):
        models.on_meta(config_of(family, **changes))


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_are_those_of_transformers(name):
    run = run_of(FUSED, family_config(name))
    model = stock(family_config(name), run)
    examples = examples_of(LENGTHS)
    batch = run.collate(examples)
    with torch.no_grad():
        hidden = run.model.get_decoder()(batch.ids_bs, position_ids=batch.position_bs, bounds=batch.bounds)
        for (ids, _), start in zip(examples, batch.bounds, strict=False):
            expected = model.get_decoder()(torch.tensor([ids])).last_hidden_state[0]
            assert relative_error(hidden.last_hidden_state[0, start : start + len(ids)], expected) <= 2e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(name):
    run = run_of((*FUSED, Checkpointing(2)), family_config(name))
    examples = examples_of(LENGTHS)
    loss, found = loss_and_gradients(run, [run.collate(examples)])
    expected_loss, expected = stock_loss_and_gradients(stock(family_config(name), run), examples)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst_error(found, expected)[0] <= 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_are_an_update_of_the_weight(name):
    """Loss and adapters' gradients from the stock model with merged weights: dA = s·B^T dW, dB = s·dW A^T."""
    run = run_of((*FUSED, Lora(4, alpha=6.0)), family_config(name))
    generator = torch.Generator().manual_seed(4)
    layers = {n: m for n, m in run.model.named_modules() if hasattr(m, "lora_A")}
    linears = [m for m in blocks_of(stock(family_config(name)))[0].modules() if isinstance(m, torch.nn.Linear)]
    assert len(layers) == 3 * len(linears)
    with torch.no_grad():
        for layer in layers.values():
            layer.lora_B.normal_(std=0.05, generator=generator)
    merged = stock(family_config(name), run)
    with torch.no_grad():
        for path, layer in layers.items():
            merged.get_submodule(path).weight.add_(layer.scale * layer.lora_B @ layer.lora_A)
    examples = examples_of(LENGTHS)
    loss, found = loss_and_gradients(run, [run.collate(examples)])
    expected_loss, full = stock_loss_and_gradients(merged, examples)
    expected = {}
    for path, layer in layers.items():
        dweight = full[f"{path}.weight"].double()
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


@pytest.mark.parametrize("name", FAMILIES)
def test_generating_with_a_cache_is_reading_at_once(name):
    """Without boundaries the attention is plainly causal, token by token the same as all at once."""
    run = run_of((FusedOps(), Lora(4)), family_config(name))
    run.model.eval()
    ids = torch.tensor([examples_of((60,))[0][0]])
    with torch.no_grad():
        whole = run.model(ids, use_cache=False).logits
        first = run.model(ids[:, :30], use_cache=True)
        logits, cache = [first.logits], first.past_key_values
        for position in range(30, 60):
            out = run.model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            logits.append(out.logits)
        assert relative_error(torch.cat(logits, 1), whole) <= 1e-5
        assert relative_error(whole, stock(family_config(name), run).eval()(ids, use_cache=False).logits) <= 1e-5
