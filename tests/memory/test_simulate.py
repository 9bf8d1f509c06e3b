"""The simulated witness against the predicted one, against real steps on a GPU, and against itself at full depth."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from finefit.allocator import replay
from finefit.candidates import rewrite
from finefit.catalog import find_model
from finefit.foreign import ForeignRun, Lengths
from finefit.layout import Micro
from finefit.predict import footprint, states
from finefit.simulate import STEADY, plan_stream, step_stream
from finefit.spec import resolve_model
from finefit.techniques import (
    Accumulation,
    Checkpointing,
    Clipping,
    FusedLoss,
    FusedOps,
    Lora,
    Packing,
    ParameterOffload,
    Precision,
    Technique,
)  # fmt: skip
from finefit.witness import Simulator, workspace_bytes

MODELS = (
    "SmolLM2-135M", "Llama-3.2-1B", "Llama-3.1-8B", "Qwen2.5-0.5B", "Qwen3-4B", "Mistral-7B", "Gemma-2-2B",
    "Phi-3-mini",
)  # fmt: skip
LENGTHS = (512, 2048)
ALL = 10**6
# Graphs whose coefficients are shipped: nothing is traced here.
SETS: dict[str, list[Technique]] = {
    "full fp32": [Precision("fp32"), FusedOps(), FusedLoss(256)],
    "full mixed": [Precision("bf16_mixed"), FusedOps(), FusedLoss(256)],
    "full mixed, checkpointed": [Precision("bf16_mixed"), FusedOps(), FusedLoss(256), Checkpointing(ALL)],
    "full bf16": [Precision("bf16"), FusedOps(), FusedLoss(256)],
    "full bf16, checkpointed": [Precision("bf16"), FusedOps(), FusedLoss(256), Checkpointing(ALL)],
    "full bf16, accumulated": [Precision("bf16"), FusedOps(), FusedLoss(256), Accumulation(4, most_steps=4)],
    "lora": [Precision("bf16"), Lora(16), FusedOps(), FusedLoss(256)],
    "lora, checkpointed": [Precision("bf16"), Lora(16), FusedOps(), FusedLoss(256), Checkpointing(ALL)],
    "lora, mixed": [Precision("bf16_mixed"), Lora(8), FusedOps(), FusedLoss(256)],
    "lora, accumulated": [Precision("bf16"), Lora(64), FusedOps(), FusedLoss(1024), Accumulation(4, most_steps=2)],
}
OWNED = ("parameter", "gradient", "optimizer_state")


def _config(model: str) -> dict[str, Any]:
    found = find_model(model)
    assert found is not None
    return dict(found.config)


def _techniques(name: str, depth: int) -> list[Technique]:
    chosen = [replace(t, blocks=depth) if isinstance(t, Checkpointing) else t for t in SETS[name]]
    split = [] if any(isinstance(t, Accumulation) for t in chosen) else [Accumulation(4)]
    return [*chosen, *split, Packing(), Clipping()]


def both_witnesses(model: str, name: str, length: int) -> tuple[dict[str, int], dict[str, int], int, int]:
    """States predicted and simulated at the update, and both peaks."""
    spec, micro = resolve_model(model), Micro(length, length // 2, length // 4)
    techniques = _techniques(name, spec.num_hidden_layers)
    layout = rewrite(spec, micro, techniques)
    moments = plan_stream(_config(model), techniques, micro).moments()
    seen = {key: moments["optimizer_step"].get(key, 0) for key in OWNED}
    predicted = footprint(layout)
    peaks = (
        max(map(predicted.at, moments)),
        max(sum(parts.values()) for parts in moments.values()),
    )  # loading is no step
    return states(layout), seen, *peaks


@pytest.fixture(scope="module")
def grid() -> dict[tuple[str, str, int], tuple[dict[str, int], dict[str, int], int, int]]:
    """All 160 combinations with FINEFIT_GRID=all (a minute of each of two cores when they are free), else one in thirteen."""
    cases = [(model, name, length) for model in MODELS for name in SETS for length in LENGTHS]
    cases = cases if os.environ.get("FINEFIT_GRID") == "all" else cases[::13]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return dict(zip(cases, pool.map(both_witnesses, *zip(*cases, strict=True), chunksize=8), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_states_are_equal_to_the_byte(grid: Any, model: str) -> None:
    found = {case: result for case, result in grid.items() if case[0] == model}
    assert {case: r[1] for case, r in found.items()} == {case: r[0] for case, r in found.items()}


@pytest.mark.parametrize("model", MODELS)
def test_peaks_are_within_a_hundredth(grid: Any, model: str) -> None:
    found = {case: result[2] / result[3] - 1 for case, result in grid.items() if case[0] == model}
    assert {case: e for case, e in found.items() if abs(e) > 0.01} == {}


RUN = ForeignRun("transformers", "m", "lora", 2, 512, rank=8, packed=True)


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(changes, marks=pytest.mark.slow) for changes in (
            {}, {"checkpointing": "full", "accumulation": 4}, {"quantised": "nf4_double", "raised": "all", "autocast": True},
            {"method": "full", "rank": 0, "autocast": True, "packed": False},
            {"method": "full", "rank": 0, "optimizer_bits": 8, "trained_dtype": "bfloat16", "step_in_backward": True},
        )),
    ],
)  # fmt: skip
def test_a_repeated_block_is_as_good_as_the_whole_model(changes: dict[str, Any]) -> None:
    run, config = replace(RUN, **changes), _config("Llama-3.2-1B")
    shallow, whole = step_stream(config, run), step_stream(config, run, whole=True)
    assert shallow.moments(STEADY) == whole.moments(STEADY)
    assert replay(shallow.allocations()) == replay(whole.allocations())


@pytest.mark.slow
def test_blocks_that_alternate_are_repeated_by_their_period() -> None:
    config = {**_config("Gemma-2-2B"), "num_hidden_layers": 14}
    run = replace(RUN, attention="math")
    assert step_stream(config, run).moments(STEADY) == step_stream(config, run, whole=True).moments(STEADY)


TRUTH = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-truth.json").read_text())


@pytest.mark.parametrize(
    ("model", "first"),
    [
        ("SmolLM2-135M", 13),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("SmolLM2-135M", 27), ("Gemma-2-2B", 11), ("DeepSeek-V2-Lite", 9))
        ),
    ],
)
def test_some_blocks_checkpointed_are_as_all_of_them_stepped(model, first):
    """Two runs of blocks that are alike, of each five groups stepped; of the update one tensor is as long as there are
    tensors, which is not repeated."""
    techniques = [Precision("bf16"), Lora(8), FusedOps(), FusedLoss(256), Checkpointing(first)]
    shown, whole = (plan_stream(_config(model), techniques, Micro(256, 256, 256), "cuda", way) for way in (False, True))
    update = shown.section_start[shown.sections.index("optimizer")]
    assert [(sign, shown.entries[i].n_bytes) for i, sign in shown.events[:update]] == [
        (sign, whole.entries[i].n_bytes) for i, sign in whole.events[:update]
    ]
    assert shown.sections == whole.sections
    assert {m: parts for m, parts in shown.moments().items() if m != "optimizer_step"} == {
        m: parts for m, parts in whole.moments().items() if m != "optimizer_step"
    }
    assert replay(shown.allocations()) == replay(whole.allocations())


@pytest.mark.parametrize("case", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (10, 19))])
def test_a_simulated_step_is_what_a_gpu_measured(case: int) -> None:
    """Peak allocated within 0.3 %: an H200, PyTorch 2.11; see benchmarks/gpu_truth.py."""
    row = next(r for r in TRUTH["rows"] if r["case"] == case)
    settings = {key: tuple(v) if isinstance(v, list) else v for key, v in row["settings"].items()}
    run = ForeignRun(**{"tool": "transformers", "model": row["model"], "packed": True, **settings})
    with Simulator() as simulator:
        found = simulator.ask(_config(row["model"]), run, workspace_bytes(TRUTH["device"]))
    assert abs(found.allocated_bytes / row["allocated_bytes"] - 1) < 0.003


def test_a_model_that_cannot_be_stepped_is_an_error_and_the_next_question_is_answered() -> None:
    config = _config("SmolLM2-135M")
    with Simulator() as simulator:
        with pytest.raises(Exception, match="the step could not be simulated"):
            simulator.ask({**config, "model_type": "nobody"}, RUN, 0)
        assert simulator.ask(config, RUN, 0).allocated_bytes > 0


def test_a_process_that_dies_is_an_error_and_a_new_one_answers() -> None:
    with Simulator() as simulator:
        process = simulator._running()
        process.kill()
        process.wait()
        assert simulator.ask(_config("SmolLM2-135M"), RUN, 0).allocated_bytes > 0


def test_an_answer_that_does_not_come_in_time_is_an_error() -> None:
    with Simulator(timeout_s=0.01) as simulator, pytest.raises(Exception, match="no answer within"):
        simulator.ask(_config("SmolLM2-135M"), RUN, 0)


def test_what_shorter_rows_leave_is_replayed_or_its_absence_said() -> None:
    """48 tokens are too few to tell three lengths apart."""
    config, varied = _config("SmolLM2-135M"), replace(RUN, packed=False, lengths=Lengths())
    with Simulator() as simulator:
        said = [simulator.ask(config, replace(varied, max_length=n), 0).notes for n in (512, 48)]
    assert said == [
        (),
        ("every micro-batch counts as the longest: what shorter ones leave in the allocator is not replayed",),
    ]


@pytest.mark.parametrize("kind", ["fp32", "bf16_mixed"])
def test_experts_of_any_type_are_simulated(kind: str) -> None:
    """The grouped product has a kernel for bf16 alone; elsewhere transformers takes another way."""
    config = {
        **_config("Mixtral-8x7B"),
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 128,
    }
    micro = Micro(64, 64, 64)
    stream = plan_stream(config, [Precision(kind), Lora(2), FusedLoss(64)], micro, "cuda")  # type: ignore[arg-type]
    assert max(stream.moments()["backward_peak"].values()) > 0


@pytest.mark.parametrize(("model", "place"), [
    ("SmolLM2-135M", "host"), ("Llama-3.1-8B", "disk"),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (("SmolLM2-135M", "disk"), ("Llama-3.1-8B", "host"))),
])  # fmt: skip
def test_streamed_weights_are_simulated_without_any(model, place):
    """The step is that of resident weights, at every moment, but for the weights themselves: one arena, counted once."""
    spec, micro = resolve_model(model), Micro(256, 256, 256)
    resident = [Precision("bf16"), Lora(4), FusedOps(), Packing(), FusedLoss(64), Checkpointing(4), Clipping()]
    streamed = [*resident, ParameterOffload(place)]  # type: ignore[arg-type]
    seen = [plan_stream(_config(model), techniques, micro).moments() for techniques in (resident, streamed)]
    said = [states(rewrite(spec, micro, techniques))["parameter"] for techniques in (resident, streamed)]
    for moment, parts in seen[0].items():
        assert parts["parameter"] == said[0]
        assert seen[1][moment] == {**parts, "parameter": said[1]}
