"""Polynomials of sizes and the trace that makes them: exact at any sizes, and loud where they are not."""

import copy
import json
import random
from dataclasses import replace

import pytest

from finefit import catalog, coefficients, reading, trace
from finefit.errors import ModelError
from finefit.layout import Micro, layout_of
from finefit.poly import dominates, plus, times, value
from finefit.reading import MARKERS, OTHERS
from finefit.spec import ModelSpec
from finefit.techniques import Checkpointing, Clipping, FusedLoss, FusedOps, Lora, Packing, Precision
from finefit.techniques.packing import packed
from tiny import config_of, examples_of, layout_for

# Independent sizes respecting what always holds: T ≥ S ≥ Q, T ≥ L ≥ C, f ≥ h ≥ r, V ≥ h, n a multiple of m.
BY_HAND = {"T": 257, "S": 256, "Q": 128, "L": 62, "C": 31, "h": 105, "n": 15, "m": 3, "d": 22, "f": 176, "V": 211}


def random_sizes(rng):
    s, labelled = rng.randint(1, 900), rng.randint(1, 400)
    tokens = max(s, labelled, rng.randint(1, 2000))
    h, m = rng.randint(1, 300), rng.randint(1, 6)
    given = {
        "S": s, "Q": rng.randint(1, s), "L": labelled, "C": rng.randint(1, labelled), "T": tokens,
        "h": h, "r": rng.randint(1, h), "f": rng.randint(h, 3 * h), "V": rng.randint(h, 5 * h),
        "m": m, "n": m * rng.randint(1, 5), "d": rng.randint(1, 64),
    }  # fmt: skip
    return {**reading.derived(given), "P": rng.randint(1, 50)}


def random_poly(rng, symbols="TSQLChqkfnmgdVr"):
    words = ("*".join(sorted(rng.choices(symbols, k=rng.randint(0, 3)))) for _ in range(rng.randint(1, 5)))
    return {word: rng.randint(1, 6) for word in words}


def test_value_of_a_polynomial():
    assert value({"T*h": 2, "C*V": 4, "": 8}, BY_HAND) == 2 * 257 * 105 + 4 * 31 * 211 + 8
    assert value({}, BY_HAND) == 0


def test_heads_times_head_size_are_a_width():
    assert times({"T*n": 1}, {"d": 1}) == {"T*q": 1}
    assert times({"d": 3}, {"T*m": 1}) == {"T*k": 3}
    assert times(times({"g": 2}, {"m": 1}), {"T*d": 1}) == {"T*q": 2}


def test_a_sum_has_no_zero_terms():
    assert plus({"T*h": 2, "h": 1}, {"T*h": 2}, -1) == {"h": 1}
    assert plus({"T": 3}, {"T": 3}, -1) == {}


def test_sums_and_products_are_those_of_their_values():
    rng = random.Random(0)
    for _ in range(300):
        a, b, sizes = random_poly(rng), random_poly(rng), random_sizes(rng)
        assert value(a, sizes) + value(b, sizes) == value(plus(a, b), sizes)
        assert value(a, sizes) * value(b, sizes) == pytest.approx(value(times(a, b), sizes), rel=1e-12)


def test_a_dominated_polynomial_is_never_larger():
    rng = random.Random(1)
    found = 0
    for _ in range(4000):
        a, b = random_poly(rng, "TSQLChfqk"), random_poly(rng, "TSQLChfqk")
        if not dominates(a, b):
            continue
        found += 1
        for _ in range(20):
            sizes = random_sizes(rng)
            assert value(a, sizes) >= value(b, sizes), (a, b, sizes)
    assert found > 100


@pytest.mark.parametrize(
    ("larger", "smaller", "certain"),
    [
        ({"T*h": 4}, {"T*h": 4}, True),
        ({"T*h": 4}, {"T*h": 2, "S*h": 2}, True),
        ({"T*f": 1}, {"T*h": 1}, True),
        ({"T*V": 1}, {"T*f": 1}, False),
        ({"T*h": 4}, {"T*h": 2, "T*f": 1}, False),
        ({"S*Q": 1}, {"T": 1}, False),
        ({"T*h": 1}, {"T*h": 1, "": 1}, False),
    ],
)  # fmt: skip
def test_dominance_is_certain_or_not_claimed(larger, smaller, certain):
    assert dominates(larger, smaller) == certain


def test_landmarks_left_out_are_nowhere_the_highest():
    rng = random.Random(2)
    for _ in range(60):
        marks = [{"activation": random_poly(rng, "TSQh"), "temporary": random_poly(rng, "TSQf")} for _ in range(8)]
        kept = trace._undominated(marks)
        assert kept
        for _ in range(20):
            sizes = random_sizes(rng)
            tops = [max(value(trace._total(mark), sizes) for mark in some) for some in (marks, kept)]
            assert tops[0] == tops[1]


EVERYTHING = "bf16 lora dropout fused_ops fused_loss tied checkpointed"


def everything(sizes):
    return (
        Precision("bf16"), Lora(sizes["r"], dropout=0.1), FusedOps(), Packing(), FusedLoss(sizes["C"]), Clipping(),
        Checkpointing(trace.BLOCKS),
    )  # fmt: skip


def ledger_at(sizes):
    config = trace.family_of("llama", EVERYTHING).config(sizes, {"tie_word_embeddings": True})
    return trace.traced(config, everything(sizes), sizes)


@pytest.fixture(scope="module")
def found():
    return trace.variants(trace.sections(ledger_at(MARKERS), MARKERS))


def test_a_trace_holds_at_other_sizes(found):
    sizes = {**MARKERS, "T": 650, "S": 512, "L": 33, "C": 11, "h": 48, "n": 6, "d": 20, "f": 200, "V": 97, "r": 3}
    trace.check(found, ledger_at(sizes), sizes)


def test_a_trace_read_at_wrong_sizes_fails(found):
    ledger = ledger_at(OTHERS)
    trace.check(found, ledger, OTHERS)
    for symbol in ("T", "h", "f", "V", "r"):
        with pytest.raises(AssertionError, match="bytes by a second trace"):
            trace.check(found, ledger, {**OTHERS, symbol: OTHERS[symbol] + 1})


def test_a_wrong_coefficient_fails(found):
    wrong = copy.deepcopy(found)
    block = next(s for s in wrong if s["name"] == "forward 1")
    block["end"]["activation"]["T*h"] += 2
    with pytest.raises(AssertionError, match="forward 1"):
        trace.check(wrong, ledger_at(OTHERS), OTHERS)


def test_sizes_that_two_symbols_share_are_refused():
    with pytest.raises(AssertionError, match="share a size"):
        reading.Reader({**MARKERS, "P": 45, "f": MARKERS["h"]})


def test_a_size_no_symbol_explains_is_an_error(found):
    reader = reading.Reader({**MARKERS, "P": 45})
    with pytest.raises(ValueError, match="a size of 12345679"):
        reader.dimension(12345679)


def test_every_later_micro_batch_has_its_own_variant(found):
    """Of a section of the first micro-batch there is one of the second; what follows both is neither's."""
    blocks = [(s["name"], s["again"]) for s in found if s["name"].startswith("forward ")]
    assert sorted(name for name, again in blocks if again) == sorted(name for name, again in blocks if not again)
    assert {None} == {s["again"] for s in found if s["name"] == "optimizer"}


USUAL = ("gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")


@pytest.mark.parametrize("family", USUAL)
def test_the_usual_families_have_their_evaluations(family):
    """A plan of another family does without that moment rather than wait for a trace."""
    known = coefficients.read(coefficients.SHIPPED / f"{family}.json.gz").keys()
    graphs = {key.removesuffix(" plain") for key in known if key.endswith(" plain")}
    finer = {key for key in known if key.rpartition(" ")[2] in coefficients.FINER}
    assert {key for graph in graphs for key in coefficients.kinds_of(graph)} == set(known) - finer
    assert bool(finer) == (family == "llama")


def test_an_evaluation_leaves_nothing_behind():
    """Whatever its blocks and outer sections add, they free: beside the loss, a scalar."""
    key = "bf16 lora fused_ops fused_loss eval"
    sections = [s for s in trace.first_trace(trace.family_of("llama", key), key) if s["name"] != "held"]
    left = {}
    for section in sections:
        for poly in section["end"].values():
            left = plus(left, poly)
    assert left == {}
    assert {None} == {section["again"] for section in sections}


def test_blocks_in_the_middle_are_alike(found):
    """What the walk repeats for every depth must not differ from the last block's forward."""
    ends = {s["name"]: s["end"] for s in found if s["again"] is False}
    assert ends["forward 1"] == ends["forward 2"]


def by_name(sections):
    """What is freed after the step is freed in no order of its own."""
    return sorted(sections, key=lambda section: (section["name"], str(section["again"])))


@pytest.mark.parametrize("last", ["plain", "checkpointed", "eval"])
def test_shipped_coefficients_are_what_a_trace_gives(last):
    graphs = coefficients.read(coefficients.SHIPPED / "llama.json.gz")
    key = next(key for key in graphs if key.startswith("bf16 lora") and key.endswith(last))
    assert by_name(graphs[key]) == by_name(json.loads(json.dumps(trace.graph(trace.family_of("llama", key), key))))


def graphs_of_a_model(config, key, tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    return trace.first_trace(trace.subject_of(str(path), key), key)


def at_real_sizes(sections, sizes):
    """Each section's end and highest point in bytes."""
    tops = (max((value(trace._total(m), sizes) for m in s["landmarks"]), default=0) for s in sections)
    return {
        (s["name"], s["again"]): (value(trace._total(s["end"]), sizes), top)
        for s, top in zip(sections, tops, strict=True)
    }


@pytest.mark.parametrize("key", ["bf16 lora fused_ops fused_loss tied plain"])
def test_a_models_own_trace_is_its_familys_at_its_sizes(tmp_path, key):
    model = catalog.find_model("Qwen3-0.6B")
    spec = ModelSpec.from_config(model.config, model.name)
    sizes = {**spec.symbols(), "g": 2, "T": 4096, "S": 1024, "Q": 128, "L": 500, "C": 128, "r": 16, "P": 99}
    of_family = coefficients.read(coefficients.SHIPPED / "qwen3.json.gz")[key]
    own = graphs_of_a_model(dict(model.config), key, tmp_path)
    assert at_real_sizes(own, sizes) == at_real_sizes(of_family, sizes)


@pytest.mark.slow
def test_a_model_of_a_family_without_a_template_is_traced_as_it_is(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "hyperclovax", **shape, "num_hidden_layers": 5, "vocab_size": 300, "head_dim": 16}
    spec = ModelSpec.from_config(config, "uncatalogued")
    layout = replace(layout_of(spec, Micro(512, 256, 100)), graph=("bf16", "fused_ops", "fused_loss"), loss_chunk=32)
    assert not coefficients.is_traced(layout)
    assert {s["name"] for s in coefficients.sections_for(layout, "plain")} >= {"forward 0", "forward 1", "backward 2"}
    assert list(coefficients._cache("x").parent.glob(f"hyperclovax-{spec.digest}-*.json.gz"))


@pytest.fixture(scope="module")
def layout():
    return layout_for(config_of(), (Precision("fp32"), FusedOps(), FusedLoss(8)), packed(examples_of((16,))))


def test_a_subprocess_derives_what_this_process_does(traced_in_process, layout, tmp_path):
    key = "fp32 fused_ops fused_loss tied plain"
    traced_in_process("llama", [key], tmp_path / "llama.json.gz")
    (found,) = coefficients.read(tmp_path / "llama.json.gz").items()
    assert (key, by_name(coefficients.sections_for(layout, "plain"))) == (found[0], by_name(found[1]))


def test_what_cannot_be_traced_says_why(traced_in_process, tmp_path):
    with pytest.raises(ModelError, match="does not know the architecture 'nonesuch'"):
        traced_in_process("nonesuch", ["fp32 tied plain"], tmp_path / "nonesuch.json.gz")


def test_coefficients_are_read_once(layout):
    assert coefficients.sections_for(layout, "plain") is coefficients.sections_for(layout, "plain")
