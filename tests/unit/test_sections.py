"""Sections with numbers in them: each polynomial's own value, whatever was asked before."""

import itertools

import pytest

from finefit.candidates import rewrite
from finefit.coefficients import sections_for
from finefit.layout import Micro
from finefit.poly import value
from finefit.predict import sizes_of
from finefit.sections import numbers
from finefit.spec import resolve_model
from finefit.techniques import FusedLoss, FusedOps, Lora, Precision

MICROS = [Micro(1024, 1024, 700), Micro(16_384, 2048, 9000), Micro(48, 16, 1)]


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen/Qwen2.5-7B", "google/gemma-2-2b", "meta-llama/Llama-3.1-70B"])
def test_numbers_are_the_polynomials_to_the_byte(name):
    model = resolve_model(name)
    for micro, kind, again in itertools.product(MICROS * 2, ("plain", "checkpointed"), (True, False)):
        layout = rewrite(model, micro, (Precision("bf16"), Lora(16), FusedOps(), FusedLoss(256)))
        sections, sizes = sections_for(layout, kind), sizes_of(layout)
        found = numbers(sections, again, sizes)
        used = [s for s in sections if s["again"] in (again, None)]
        assert {s["name"] for s in used} == set(found)
        for section in used:
            marks = [{c: value(p, sizes) for c, p in mark.items()} for mark in section["landmarks"]]
            top = max(marks, key=lambda mark: sum(mark.values()), default={})
            one = found[section["name"]]
            assert {c: value(p, sizes) for c, p in section["end"].items()} == one.end
            assert (top, sum(top.values())) == (one.top, one.top_bytes)


def test_the_same_question_is_answered_from_what_is_kept():
    layout = rewrite(
        resolve_model("SmolLM2-135M"), MICROS[0], (Precision("bf16"), Lora(16), FusedOps(), FusedLoss(256))
    )
    sections, sizes = sections_for(layout, "plain"), sizes_of(layout)
    assert numbers(sections, True, sizes) is numbers(sections, True, dict(sizes))
    assert numbers(sections, True, sizes) is not numbers(sections, False, sizes)
