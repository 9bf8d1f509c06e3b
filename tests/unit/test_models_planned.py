"""Every catalogued model plans with what is shipped, or says why not: no trace, no torch."""

import pytest

from finefit import catalog, coefficients
from finefit.batches import Uniform
from finefit.candidates import Question, candidate, rewrite, techniques_of
from finefit.spec import HardwareSpec, JobSpec, ModelSpec
from finefit.techniques import Unsuitable
from finefit.units import parse_budget

CARD = HardwareSpec.from_name("H100")
SPECS = {name: ModelSpec.from_config(model.config, model.name) for name, model, _ in catalog.main_models()}


def question(spec, method):
    job = JobSpec(method=method, global_batch_size=16)
    return Question(spec, CARD, job, Uniform(16, 512), parse_budget("96%", CARD.memory_bytes))


def smallest(spec, method):
    """Bytes with every block checkpointed; "trace" where one would be needed, else why the method does not suit."""
    asked = question(spec, method)
    work = asked.batches.work(1, 0, not spec.packs)
    try:
        techniques = techniques_of(asked, 1, 0, work, spec.num_hidden_layers)
        if not coefficients.is_traced(rewrite(spec, work.largest[0], techniques)):
            return "trace"
        return candidate(asked, 1, 0, work, spec.num_hidden_layers).predicted.total_bytes
    except Unsuitable as error:
        return str(error)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_every_model_plans_from_what_is_shipped(monkeypatch, method):
    monkeypatch.setattr(coefficients, "derive", lambda *_: pytest.fail("a plan must not trace"))
    found = {name: smallest(spec, method) for name, spec in SPECS.items()}
    assert {name: why for name, why in found.items() if isinstance(why, str)} == {}
    assert len(found) >= 189
    states = {"full": 8, "lora": 2}[method]  # at least: two bytes of weights, fp32 or 16-bit gradients and moments
    assert all(found[name] > states * spec.num_parameters for name, spec in SPECS.items())


def test_four_bits_are_refused_for_named_reasons():
    found = {name: smallest(spec, "qlora") for name, spec in SPECS.items()}
    reasons = {why for why in found.values() if isinstance(why, str)}
    assert reasons <= {
        "its blocks have expert weights of three dimensions, which are not quantised yet",
        "the model has no linear layers to quantise",
    }
    assert sum(isinstance(need, int) for need in found.values()) >= 155


def test_rows_are_whole_where_attention_is_a_models_own():
    asked = question(SPECS["BLOOM-560m"], "lora")
    assert asked.job.pin("packing") == "false" and question(SPECS["Pythia-70M"], "lora").job.pin("packing") is None
    work = asked.batches.work(2, 0, True)
    assert "packing" not in [t.name for t in techniques_of(asked, 2, 0, work, 0)]
