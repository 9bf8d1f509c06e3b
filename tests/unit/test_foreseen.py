"""What data and machine say about a plan beside its steps: the held-out examples, the host's memory."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from finefit import coefficients, phases, words
from finefit.batches import Uniform
from finefit.candidates import Question, rewrite
from finefit.config import Config
from finefit.data.order import Order
from finefit.errors import ConfigError
from finefit.examples import Data
from finefit.layout import Micro
from finefit.plan import WARNING
from finefit.planning import budget_of, foreseen, hardware_of, make_plan, warnings_of
from finefit.search import search
from finefit.spec import HardwareSpec, JobSpec, resolve_model
from finefit.units import parse_budget

GIB = 2**30
CARD = HardwareSpec.from_name("RTX 3060")
MODEL = resolve_model("SmolLM2-135M-Instruct")


class Store:
    """A token store of examples half of whose tokens are trained."""

    def __init__(self, *lengths):
        self.lengths = np.array(lengths)
        self.labelled = self.lengths // 2
        self.folder, self.index = Path(str(lengths)), {"tokens": sum(lengths)}

    def __len__(self):
        return len(self.lengths)


def planned(hardware, budget="90%"):
    job = JobSpec(method="lora", global_batch_size=4, max_length=256, longest=256)
    return search(Question(MODEL, hardware, job, Uniform(4, 256), parse_budget(budget, hardware.memory_bytes)))


def data_of(*held_out):
    rows = tuple(range(8))
    return Data(Store(*[256] * 8), Store(*held_out), tuple(range(len(held_out))), Order(8, 4, 0), rows, 2)


def test_without_data_a_plan_stays_as_it_is():
    plan = planned(CARD)
    told = foreseen(plan, MODEL, CARD, None)
    assert dataclasses.replace(told, predicted=plan.predicted) == plan
    assert (told.predicted.moments, list(told.predicted.host)) == (plan.predicted.moments, list(plan.predicted.moments))


def test_the_held_out_examples_are_what_is_evaluated():
    plan = planned(CARD)
    short, long = (foreseen(plan, MODEL, CARD, data_of(*[n] * 4)).predicted for n in (64, 2048))
    assert short.at("eval") < plan.predicted.at("eval") < long.at("eval")
    assert short.moments["loss"] == long.moments["loss"] == plan.predicted.moments["loss"]


def test_an_evaluation_that_was_never_traced_is_before_it_is_planned():
    """A search does without; here the graph's steps are at hand, and its evaluation is not."""
    job = JobSpec(method="lora", global_batch_size=4, max_length=256, longest=256, precision="bf16",
                  pins=(("fp32_islands", "model.norm"), ("checkpointing", "0")))  # fmt: skip
    plan = search(Question(MODEL, CARD, job, Uniform(4, 256), parse_budget("90%", CARD.memory_bytes)))
    layout = rewrite(MODEL, Micro(1, 1, 1), plan.techniques)
    graphs = coefficients._cache(MODEL.family)
    kept = {
        key: found
        for key, found in coefficients.read(graphs).items()
        if not (key.startswith(coefficients.key_of(layout)) and key.endswith(" eval"))
    }
    coefficients.write(graphs, {"graphs": kept})
    coefficients.read.cache_clear()
    coefficients._graphs.cache_clear()
    assert not coefficients.evaluation_is_traced(layout)
    assert foreseen(plan, MODEL, CARD, data_of(64)).predicted.at("eval") > 0


def test_held_out_examples_that_need_more_than_the_budget_are_warned_of():
    plan = planned(CARD)
    tight = dataclasses.replace(plan, budget_bytes=plan.predicted.total_bytes)
    assert warnings_of(foreseen(tight, MODEL, CARD, data_of(64))) == ()
    (said,) = warnings_of(foreseen(tight, MODEL, CARD, data_of(60_000)))
    assert said.startswith("the held-out examples are longer than the rest: evaluating them needs")


@pytest.mark.parametrize(("memory", "warned"), [(0, False), (1 * GIB, True), (64 * GIB, False)])
def test_a_host_with_too_little_memory_is_warned_of_and_an_unknown_one_is_not(memory, warned):
    hardware = dataclasses.replace(CARD, host_memory_bytes=memory)
    plan = foreseen(planned(hardware), MODEL, hardware, None)
    assert bool(warnings_of(plan)) == warned
    if warned:
        assert plan.notes[-1].startswith(f"{WARNING}load needs 1.9") and "which is 1.00 GiB" in plan.notes[-1]


def test_data_takes_a_little_of_the_host_and_pages_of_its_shards():
    host = {"load": {"program": 5, "mapped": 7}, "eval": {"program": 6}}
    assert phases.with_data(host, 10, 100) == {
        "load": {"program": 5, "mapped": 507, "data": 10 * phases.EXAMPLE},
        "eval": {"program": 6, "mapped": 500, "data": 10 * phases.EXAMPLE},
    }
    assert phases.needed({"load": {"program": 5, "mapped": 7}, "eval": {"program": 6}}) == ("eval", 6)
    assert phases.needed({}) == ("", 0)


def test_a_budget_beyond_the_device_is_refused() -> None:
    config = Config.model_validate({"model": "m", "memory": {"budget": "500GiB"}})
    with pytest.raises(ConfigError, match=r"memory\.budget=500GiB is more than H100 SXM has, 79\.65 GiB"):
        budget_of(config, HardwareSpec.from_name("H100"))


def test_a_length_beyond_the_models_positions_is_said() -> None:
    config = Config.model_validate({"model": "m", "train": {"max_length": 10**6}})
    plan = make_plan(config, MODEL, HardwareSpec.from_name("H100"), None)
    said = f"the model has positions for {MODEL.max_position_embeddings:,} tokens: examples count as that long, not 1,000,000"
    assert said in warnings_of(plan)


def test_two_devices_that_contradict_each_other_are_refused() -> None:
    config = Config.model_validate({"model": "m", "hardware": {"device": "cpu"}})
    with pytest.raises(ConfigError, match=r"hardware\.device=cpu and --gpu H100 contradict each other"):
        hardware_of(config, "H100")


def test_an_option_and_a_setting_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="method is said twice: full and lora"):
        words.config_of(["m", "method=qlora", "method=full"], ["method=lora"])
    assert words.config_of(["m", "method=qlora", "method=lora"], ["method=lora"]).method == "lora"
