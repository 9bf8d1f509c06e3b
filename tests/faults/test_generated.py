"""Inputs that nobody would write: each is read, or refused with one of our own errors; and masks are those of the answers.

``FINEFIT_GENERATED=N`` makes N of each kind instead of a few: 2,500 are more than 20,000 in all.
"""

import gzip
import json
import os

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finefit.config import load
from finefit.config.dialects import is_foreign, read
from finefit.config.dialects.known import AXOLOTL, LLAMAFACTORY, TORCHTUNE, TRL
from finefit.config.schema import Config
from finefit.data.masks import Masker
from finefit.data.readers import open_source
from finefit.errors import ConfigError, DataError, FinefitError

MANY = settings(
    max_examples=int(os.environ.get("FINEFIT_GENERATED", "30")), deadline=None, database=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
START, END = "<|im_start|>", "<|im_end|>"

# --- what stands in files

odd = st.sampled_from(
    [
        "",
        " ",
        "\0",
        "\ufeff",
        "\u2028",
        "\x85",
        "\r",
        "\n",
        "\U0001f600",
        "e\u0301",
        "\ud83d",
        "<think>",
        END,
        "{{",
        "assistant",
    ]
)
text = st.lists(odd | st.text(max_size=8), max_size=4).map("".join)
scalar = st.none() | st.booleans() | st.integers() | st.floats() | text
value = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6
)
role = st.sampled_from(["system", "user", "assistant", "tool", "human", "gpt", "asistant", ""]) | value
turn = st.fixed_dictionaries(
    {"role": role, "content": text | value}, optional={"weight": value, "tool_calls": value, "name": value}
)
chat = st.lists(text, min_size=1, max_size=3).map(
    lambda said: [m for s in said for m in ({"role": "user", "content": s}, {"role": "assistant", "content": "a" + s})]
)
row = st.one_of(
    st.fixed_dictionaries({"messages": chat}, optional={"tools": value}),
    st.fixed_dictionaries({"messages": st.lists(turn | value, max_size=4) | value}, optional={"tools": value}),
    st.fixed_dictionaries({"prompt": text | chat | value, "completion": text | value}),
    st.fixed_dictionaries({"instruction": text | value, "output": text | value}, optional={"input": value, "history": value, "system": value}),
    st.fixed_dictionaries({"conversations": st.lists(turn | value, max_size=3) | value}, optional={"system": value}),
    st.fixed_dictionaries({"text": text | value}),
    st.dictionaries(st.sampled_from(["messages", "text", "prompt", "completion", "chosen", "rejected", "input_ids"]) | text, value, max_size=4),
)  # fmt: skip


def as_json(found):
    return json.dumps(found).encode()


@st.composite
def spoilt(draw, content):
    """Bytes with a piece gone, doubled, or other bytes in it; or as they were."""
    data = draw(content)
    for _ in range(draw(st.integers(0, 2))):
        at, to = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        data = draw(
            st.sampled_from(
                [data[:at] + data[to:], data[:to] + data[at:], data[:at] + draw(st.binary(max_size=4)) + data[at:]]
            )
        )
    return data


lines = st.lists(row.map(as_json) | value.map(as_json) | st.binary(max_size=20), max_size=5)
jsonl = spoilt(lines.map(b"\n".join))
array = spoilt(st.lists(row | value, max_size=4).map(lambda rows: json.dumps(rows, indent=1).encode()))
table = spoilt(st.lists(st.lists(text, min_size=1, max_size=3), max_size=4).map(
    lambda rows: "\n".join(["prompt,completion", *(",".join(json.dumps(c) for c in r) for r in rows)]).encode("utf-8", "surrogatepass")
))  # fmt: skip
prose = spoilt(st.lists(text, max_size=5).map(lambda t: "\n\n".join(t).encode("utf-8", "surrogatepass")))
FILES = {"jsonl": jsonl, "json": array, "csv": table, "txt": prose}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("generated")


@pytest.fixture(scope="module")
def masker():
    """A token a byte, and the special ones of ChatML."""
    core = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in (START, END)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)
    tokenizer.chat_template = CHATML
    return Masker(tokenizer)


def read_all(path, bad_rows):
    """(examples, errors), or the error that ended it."""
    refused = []
    try:
        source = open_source(path, bad_rows=bad_rows)
        return list(source if bad_rows == "strict" else source.examples(refused.append)), refused
    except DataError as error:
        assert error.message and (error.where == str(path) or error.where.startswith(f"{path}:"))
        return error, refused


@pytest.mark.parametrize("kind", FILES)
def test_files_are_read_or_refused_with_their_place(place, masker, kind):
    @MANY
    @given(FILES[kind], st.booleans())
    def check(data, packed):
        path = place / f"data.{kind}{'.gz' * packed}"
        path.write_bytes(gzip.compress(data, 1) if packed else data)
        strict, _ = read_all(path, "strict")
        skipped, refused = read_all(path, "skip")
        if isinstance(strict, list):
            assert (skipped, refused) == (strict, [])
        elif isinstance(skipped, list):
            assert refused, "what ends a strict reading is told by one that skips"
            assert refused[0].where == strict.where
        for example in skipped if isinstance(skipped, list) else ():
            check_mask(masker, example)

    check()


def check_mask(masker, example):
    """Exactly the answers and what ends them are trained, or the conversation is refused."""
    try:
        (encoded,) = masker.encode([example])
    except DataError as error:
        assert error.where == example.where
        return
    if example.text:
        return
    turns, at, trained = example.messages, 0, []
    for message in turns:  # the template, by hand: a token a byte, the special ones apart
        weight = message["role"] == "assistant" and bool(message.get("weight", 1))
        pieces = ((START, 0), (f"{message['role']}\n", 0), (message["content"], weight), (END, weight), ("\n", 0))
        for piece, on in pieces:
            whole = masker._tokenize([piece], special=False)["input_ids"][0]
            trained += [int(on)] * len(whole)
            at += len(whole)
    assert len(encoded.ids) == at
    if any(message.get("tool_calls") or message.get("reasoning_content") for message in turns):
        return  # this template does not show them
    assert encoded.mask.tolist() == trained


# --- run files


def words_of(keys):
    plain = st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats() | text
    usual = st.sampled_from(
        [
            "auto",
            "none",
            "true",
            "lora",
            "qlora",
            "bf16",
            "1e-4",
            "8GiB",
            "all",
            "zero3",
            "sft",
            "nf4",
            "adamw_torch",
            ".",
            "/",
        ]
    )
    inner = st.recursive(
        plain | usual, lambda x: st.lists(x, max_size=3) | st.dictionaries(keys | text, x, max_size=3), max_leaves=5
    )
    return st.dictionaries(keys, inner, max_size=8)


def ours():
    found = list(Config.model_fields)
    for name, field in Config.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            found += [f"{name}.{inner}" for inner in field.annotation.model_fields]
    return found


@st.composite
def yaml_of(draw, base, keys):
    document = {**base, **draw(words_of(st.sampled_from(sorted(keys))))}
    try:
        written = yaml.safe_dump(
            document, allow_unicode=draw(st.booleans()), default_flow_style=draw(st.sampled_from([None, True, False]))
        )
    except yaml.YAMLError:
        written = "a: b"
    return draw(spoilt(st.just(written.encode("utf-8", "surrogatepass"))))


def test_our_own_run_files_are_taken_or_refused(place):
    @MANY
    @given(yaml_of({}, ours()), st.lists(st.tuples(st.sampled_from(ours()) | text, text), max_size=3))
    def check(data, overrides):
        path = place / "run.yaml"
        path.write_bytes(data)
        try:
            assert isinstance(load(path, [f"{key}={said}" for key, said in overrides]), Config)
        except ConfigError as error:
            assert error.message

    check()


OTHERS = {
    "axolotl": ({"base_model": "x"}, AXOLOTL),
    "llamafactory": ({"model_name_or_path": "x", "stage": "sft", "finetuning_type": "lora"}, LLAMAFACTORY),
    "trl": ({"model_name_or_path": "x", "dataset_name": "d"}, TRL),
    "torchtune": ({"model": {"_component_": "torchtune.models.llama3_2.lora_llama3_2_1b"}}, TORCHTUNE),
}


@pytest.mark.parametrize("tool", OTHERS)
def test_other_tools_run_files_are_taken_or_refused(place, tool):
    @MANY
    @given(yaml_of(*OTHERS[tool]), st.none() | st.integers(1, 8))
    def check(data, devices):
        path = place / f"{tool}.yaml"
        path.write_bytes(data)
        assert is_foreign(path) in (True, False)
        try:
            read(path, devices)
        except FinefitError as error:
            assert error.message

    check()
