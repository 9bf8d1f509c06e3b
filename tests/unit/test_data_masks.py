"""Exactly the answers and the tokens that end them are trained, whatever the chat template does."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from finefit.data.formats import Example
from finefit.data.masks import Masker, segments
from finefit.data.readers import open_source
from finefit.data.tokens import TokenStore, prepare
from finefit.errors import DataError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)
STRIPS = CHATML.replace("m['content']", "m['content'] | trim")
BEGINS = "{{ bos_token }}" + CHATML
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{%- generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)
# The generation prompt of some reasoning models opens a thought that a finished answer does not have.
OTHER_PROMPT = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
PLAIN_END = CHATML.replace("<|im_end|>", "[END]")
NO_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
THINKS = (
    "{% for m in messages %}{% set c = m['content'] %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and '</think>' in c and not loop.last %}"
    "{{ c.split('</think>')[-1].lstrip('\n') }}{% else %}{{ c }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWO_TURNS = (
    {"role": "user", "content": "hé? <b>"},
    {"role": "assistant", "content": " one \U0001f600  two"},
    {"role": "user", "content": "3"},
    {"role": "assistant", "content": "3"},
)


@pytest.fixture(scope="module")
def tiny():
    """A byte-level tokenizer without merges: one token a byte, and the special tokens of ChatML."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>")


def _trained(tokenizer, template, messages, **more):
    tokenizer.chat_template = template
    masker = Masker(tokenizer)
    (encoded,) = masker.encode([Example("f:1", messages=tuple(messages), **more)])
    (method,) = masker.methods
    return method, [text for text, trained in segments(tokenizer, encoded) if trained], encoded


@pytest.mark.parametrize(
    ("template", "method", "trained"),
    [
        (CHATML, "prefix", [" one \U0001f600  two<|im_end|>", "3<|im_end|>"]),
        (DEFAULT_SYSTEM, "prefix", [" one \U0001f600  two<|im_end|>", "3<|im_end|>"]),
        (BEGINS, "prefix", [" one \U0001f600  two<|im_end|>", "3<|im_end|>"]),
        (STRIPS, "prefix", ["one \U0001f600  two<|im_end|>", "3<|im_end|>"]),
        (MARKED, "markers", [" one \U0001f600  two<|im_end|>", "3<|im_end|>"]),
        (OTHER_PROMPT, "sentinel", [" one \U0001f600  two<|im_end|>", "3<|im_end|>"]),
        (PLAIN_END, "prefix", [" one \U0001f600  two[END]", "3[END]"]),
        (NO_END, "prefix", [" one \U0001f600  two", "3<|im_end|>"]),
    ],
)
def test_answers_and_their_ends_are_trained_and_nothing_else(tiny, template, method, trained):
    found, said, encoded = _trained(tiny, template, TWO_TURNS)
    assert (method, trained) == (found, said)
    if template is not NO_END:  # there an end is added, which the template does not write
        assert tiny.apply_chat_template(list(TWO_TURNS), return_dict=True)["input_ids"] == encoded.ids.tolist()


def test_the_beginning_of_the_text_is_there_once(tiny):
    _, _, encoded = _trained(tiny, BEGINS, TWO_TURNS)
    assert encoded.ids.tolist().count(tiny.bos_token_id) == 1
    assert tiny.bos_token_id == encoded.ids[0]


def test_old_thoughts_that_the_template_strips_are_not_missed(tiny):
    turns = [dict(turn) for turn in TWO_TURNS]
    turns[1]["content"], turns[3]["content"] = "<think>\nhm\n</think>\n\n4", "<think>\n3\n</think>\n\n3"
    assert _trained(tiny, THINKS, turns)[1] == ["4<|im_end|>", "<think>\n3\n</think>\n\n3<|im_end|>"]


def test_an_answer_that_is_a_word_of_the_template(tiny):
    template = CHATML.replace("+ m['content'] +", "+ ('final:' if m['role'] == 'assistant' else '') + m['content'] +")
    turns = [TWO_TURNS[0], {"role": "assistant", "content": "final"}]
    assert _trained(tiny, template, turns)[1] == ["final:final<|im_end|>"]


def test_an_answer_that_holds_the_end_of_turn_token(tiny):
    turns = [TWO_TURNS[0], {"role": "assistant", "content": "it is <|im_end|>"}]
    assert _trained(tiny, CHATML, turns)[1] == ["it is <|im_end|><|im_end|>"]


def test_an_answer_of_weight_zero_is_not_trained(tiny):
    turns = [dict(turn) for turn in TWO_TURNS]
    turns[1]["weight"] = 0
    assert _trained(tiny, CHATML, turns)[1] == ["3<|im_end|>"]


def test_tool_calls_are_trained_and_their_results_not(tiny):
    template = CHATML.replace(
        "m['content'] +", "m['content'] + (m['tool_calls'] | tojson if m['tool_calls'] else '') +"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    turns = [TWO_TURNS[0], call, {"role": "tool", "content": "4"}, TWO_TURNS[3]]
    assert _trained(tiny, template, turns)[1] == ['[{"name": "add"}]<|im_end|>', "3<|im_end|>"]


def test_plain_text_is_trained_whole_but_for_its_first_token(tiny):
    (encoded,) = Masker(tiny).encode([Example("f:1", text="abc")])
    assert segments(tiny, encoded) == [("a", False), ("bc<|im_end|>", True)]


def test_what_cannot_be_told_apart_is_refused(tiny):
    tiny.chat_template = CHATML.replace("m['content']", "m['content'] | upper")
    with pytest.raises(DataError, match="f:1: cannot tell the answers from the rest"):
        Masker(tiny).encode([Example("f:1", messages=({"role": "user", "content": "a"}, TWO_TURNS[1]))])
    tiny.chat_template = MARKED.replace("{{ m['content'] }}{% endgeneration %}", "{{ '' }}{% endgeneration %}")
    with pytest.raises(DataError, match="cannot tell"):
        Masker(tiny).encode([Example("f:1", messages=TWO_TURNS)])
    tiny.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(DataError, match="refuses the conversation: no system turn"):
        Masker(tiny).encode([Example("f:1", messages=TWO_TURNS)])
    tiny.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        Masker(tiny).encode([Example("f:1", messages=TWO_TURNS)])


def _source(folder, rows):
    return open_source(_written(folder, rows))


def _written(folder, rows):
    path = folder / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in rows))
    return path


@pytest.fixture
def rows():
    return [("a", "b" * 5), ("a" * 50, "b"), ("a", "b" * 50), ("a", "b")]


def test_store_gives_back_what_the_masker_made(tiny, tmp_path, rows):
    tiny.chat_template = CHATML
    source = _source(tmp_path, rows)
    store = prepare(source, tiny, max_length=200, cache=tmp_path / "cache")
    made = Masker(tiny).encode(list(source))
    assert [(e.ids.tolist(), e.mask.tolist()) for e in made] == [
        (store[i].ids.tolist(), store[i].mask.tolist()) for i in range(len(store))
    ]
    assert [len(e.ids) for e in made] == store.lengths.tolist()
    assert [int(e.mask.sum()) for e in made] == store.labelled.tolist() == [6, 2, 51, 2]
    assert [f"{tmp_path / 'data.jsonl'}:{line}" for line in (1, 2, 3, 4)] == [store.where(i) for i in range(4)]
    assert sum(store.labelled) / sum(store.lengths) == store.labelled_share
    assert store.says() == ()
    assert (int(store.lengths.max()), store.where(int(store.lengths.argmax()))) == (
        store.index["longest"],
        store.index["longest_where"],
    )


def test_long_examples_are_cut_dropped_or_refused_and_counted(tiny, tmp_path, rows):
    tiny.chat_template = CHATML
    source, cache = _source(tmp_path, rows), tmp_path / "cache"
    cut = prepare(source, tiny, max_length=40, cache=cache)
    assert cut.labelled.tolist() == [6, 20, 2]
    assert [f"{tmp_path / 'data.jsonl'}:{line}" for line in (1, 3, 4)] == [cut.where(i) for i in range(3)]
    assert (cut.index["truncated"], cut.index["dropped_unlabelled"]) == (1, 1)
    assert list(cut.says()[:1]) == ["1 of 4 examples were longer than 40 tokens and cut there: 32 tokens left out"]
    dropped = prepare(source, tiny, max_length=40, too_long="drop", cache=cache)
    assert (dropped.labelled.tolist(), dropped.index["dropped_long"]) == ([6, 2], 2)
    with pytest.raises(DataError, match=r"data.jsonl:2: 72 tokens, more than 40"):
        prepare(source, tiny, max_length=40, too_long="error", cache=cache)
    with pytest.raises(DataError, match="none of the 4 examples has a token to learn"):
        prepare(source, tiny, max_length=8, cache=cache)
    assert len(list(cache.iterdir())) == 2, "a refused build leaves nothing behind"


def test_rows_that_cannot_be_used_are_left_out_and_told(tiny, tmp_path, rows):
    """By the reader, by the format, and by the template; what is left is as without them."""
    tiny.chat_template = "{% if 'no!' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}" + CHATML
    path, cache = _written(tmp_path, rows), tmp_path / "cache"
    whole = prepare(open_source(path), tiny, max_length=200, cache=cache)
    good = path.read_bytes().split(b"\n")
    bad = [b'{"prompt": "\xff", "completion": "b"}', b'{"prompt": "a"', b'{"prompt": "a", "completion": ""}',
           b'{"prompt": "no!", "completion": "b"}', b'{"text": "other columns"}', b"7"]  # fmt: skip
    path.write_bytes(b"\n".join([*bad[:2], *good[:2], *bad[2:], *good[2:]]))
    with pytest.raises(DataError, match=f"{path}:1:13: not UTF-8"):
        prepare(open_source(path), tiny, max_length=200, cache=cache)
    store = prepare(open_source(path, bad_rows="skip"), tiny, max_length=200, cache=cache)
    assert [store[i].ids.tolist() for i in range(len(store))] == [whole[i].ids.tolist() for i in range(len(whole))]
    assert [store.where(i) for i in range(4)] == [f"{path}:{line}" for line in (3, 4, 9, 10)]
    told = (store.folder / "refused.txt").read_text().splitlines()
    assert [line.partition(": ")[0] for line in told] == [f"{path}:{at}" for at in ("1:13", "2:15", 5, 6, 7, 8)]
    (said,) = store.says()
    assert said.startswith(f"6 of 10 rows cannot be used and are left out: {told[0]}; all of them are in")


def test_nothing_but_rows_that_cannot_be_used_is_an_error(tiny, tmp_path):
    tiny.chat_template = "{{ raise_exception('no') }}"
    path = _written(tmp_path, [("a", "b")] * 3)
    with pytest.raises(
        DataError, match=rf"{path}:1: none of the 3 rows can be used; the first: this model's chat template"
    ):
        prepare(open_source(path, bad_rows="skip"), tiny, max_length=200, cache=tmp_path / "cache")
    path.write_text("{\n[1\n")
    with pytest.raises(DataError, match="invalid JSON"):
        open_source(path, bad_rows="skip")


def test_a_store_is_found_again_and_not_for_anything_else(tiny, tmp_path, rows):
    cache = tmp_path / "cache"
    tiny.chat_template = CHATML
    first = prepare(_source(tmp_path, rows), tiny, max_length=200, cache=cache)
    made = (first.folder / "index.json").stat().st_mtime_ns
    tiny("x", truncation=True, max_length=7)  # leaves a setting behind in the tokenizer that means nothing here
    again = prepare(_source(tmp_path, rows), tiny, max_length=200, cache=cache)
    assert (first.folder, made) == (again.folder, (again.folder / "index.json").stat().st_mtime_ns)
    others = {
        prepare(_source(tmp_path, rows), tiny, max_length=199, cache=cache).folder,
        prepare(_source(tmp_path, rows), tiny, max_length=200, too_long="drop", cache=cache).folder,
        prepare(_source(tmp_path, rows[:3]), tiny, max_length=200, cache=cache).folder,
    }
    tiny.chat_template = DEFAULT_SYSTEM
    others.add(prepare(_source(tmp_path, rows), tiny, max_length=200, cache=cache).folder)
    assert len(others - {first.folder}) == 4


@pytest.mark.parametrize("name", ["ids.bin", "mask.bin", "offsets.bin", "labelled.bin", "where.txt", "index.json"])
def test_a_damaged_store_is_seen_and_made_again(tiny, tmp_path, rows, name):
    tiny.chat_template = CHATML
    cache = tmp_path / "cache"
    store = prepare(_source(tmp_path, rows), tiny, max_length=200, cache=cache)
    wanted = store[3].ids.tolist()
    os.truncate(store.folder / name, (store.folder / name).stat().st_size - 1)
    with pytest.raises(DataError, match="damaged"):
        TokenStore(store.folder)
    assert wanted == prepare(_source(tmp_path, rows), tiny, max_length=200, cache=cache)[3].ids.tolist()


def test_a_disk_that_takes_nothing_is_said(tiny, tmp_path, rows):
    tiny.chat_template = CHATML
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot write the token cache"):
        prepare(_source(tmp_path, rows), tiny, max_length=200, cache=tmp_path / "cache")


def _real_model():
    demo = Path.home() / ".cache" / "finefit" / "models" / "SmolLM2-135M-Instruct"
    return Path(os.environ.get("FINEFIT_MODEL", demo))


@pytest.mark.model
@pytest.mark.skipif(not (_real_model() / "tokenizer.json").exists(), reason="set FINEFIT_MODEL to the model's folder")
def test_the_real_tokenizer_trains_exactly_answer_and_end(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(_real_model())
    examples = list(open_source("stdlib-docstrings:held-out"))
    for example, encoded in zip(examples, Masker(tokenizer).encode(examples), strict=True):
        trained = "".join(text for text, trained in segments(tokenizer, encoded) if trained)
        assert example.messages[-1]["content"] + "<|im_end|>" == trained
        assert tokenizer.apply_chat_template(list(example.messages))["input_ids"] == encoded.ids.tolist()
