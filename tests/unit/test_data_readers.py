"""Files to conversations, and one message with a place and a hint for each way a file can be wrong."""

import gzip
import json

import pytest

from finefit.data.readers import open_source
from finefit.errors import DataError

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CHAT = (USER, ANSWER)


def _file(folder, text, name="data.jsonl"):
    path = folder / name
    path.write_text(text if isinstance(text, str) else "\n".join(map(json.dumps, text)), encoding="utf-8")
    return path


def _refusal(path):
    with pytest.raises(DataError) as refused:
        list(open_source(path))
    return refused.value


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("messages", {"messages": [USER, ANSWER]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}),
        ("alpaca", {"instruction": "2+2?", "input": "", "output": "4"}),
        ("prompt", {"prompt": "2+2?", "completion": "4"}),
        ("prompt", {"prompt": [USER], "completion": [ANSWER]}),
    ],
)
def test_every_format_gives_the_same_conversation(tmp_path, form, row):
    source = open_source(_file(tmp_path, [row]))
    assert form == source.format
    assert [example.messages for example in source] == [CHAT]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '\n{"prompt": "2+2?", "completion": "4"}\n\n'),
        ("a.json", '[\n{"prompt": "2+2?",\n "completion": "4"}\n]\n'),
        ("b.json", '\n{"prompt": "2+2?", "completion": "4"}'),
        ("a.csv", 'id,prompt,completion\n7,"2+2?",4\n'),
    ],
)
def test_every_kind_of_file_is_read_with_its_line(tmp_path, name, text):
    source = open_source(_file(tmp_path, text, name))
    assert [(CHAT, f"{tmp_path / name}:2")] == [(example.messages, example.where) for example in source]


def test_lines_of_a_json_array_and_of_csv_rows_over_several_lines(tmp_path):
    row = '{"prompt": "2+2?",\n\n "completion": "4"}'
    array = _file(tmp_path, f"\n[{row}\n,\n{row},\n{row}]", "a.json")
    assert [int(example.where.rsplit(":", 1)[1]) for example in open_source(array)] == [2, 6, 9]
    table = _file(tmp_path, 'prompt,completion\n"two\nlines",4\nx,y\n', "a.csv")
    assert [int(example.where.rsplit(":", 1)[1]) for example in open_source(table)] == [2, 4]


def test_gz_byte_order_mark_and_plain_text(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf{"prompt": "2+2?", "completion": "4"}\n'))
    assert [example.messages for example in open_source(path)] == [CHAT]
    text = open_source(_file(tmp_path, "one\ntwo\n\n\nthree", "a.txt"))
    assert [(e.text, int(e.where.rsplit(":", 1)[1])) for e in text] == [("one\ntwo", 1), ("three", 5)]


def test_system_history_and_input_of_alpaca(tmp_path):
    row = {"system": "s", "history": [["q", "a"]], "instruction": "i", "input": "n", "output": "o"}
    (example,) = open_source(_file(tmp_path, [row]))
    assert [(message["role"], message["content"]) for message in example.messages] == [
        ("system", "s"),
        ("user", "q"),
        ("assistant", "a"),
        ("user", "i\nn"),
        ("assistant", "o"),
    ]


def test_tool_calls_keep_their_place(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    row = {"messages": [USER, call, {"role": "tool", "content": "4"}, ANSWER], "tools": '[{"name": "add"}]'}
    (example,) = open_source(_file(tmp_path, [row]))
    assert [message["role"] for message in example.messages] == ["user", "assistant", "tool", "assistant"]
    assert (
        example.messages[1]["content"],
        example.messages[1]["tool_calls"],
    ) == ("", [{"function": {"name": "add"}}])
    assert example.tools == ({"name": "add"},)


def test_columns_can_be_renamed_and_the_unused_are_named(tmp_path):
    path = _file(tmp_path, [{"question": "2+2?", "answer": "4", "id": 1}])
    source = open_source(path, columns={"prompt": "question", "completion": "answer"})
    assert source.unused_columns == ("id",)
    assert [example.messages for example in source] == [CHAT]


def test_digest_follows_content_and_renaming_not_the_name(tmp_path):
    rows = [{"prompt": "2+2?", "completion": "4", "answer": "5"}]
    one, two = _file(tmp_path, rows, "a.jsonl"), _file(tmp_path, rows, "b.jsonl")
    assert open_source(one).digest == open_source(two).digest
    assert open_source(one).digest != open_source(one, columns={"completion": "answer"}).digest
    two.write_text(two.read_text() + "\n" + json.dumps(rows[0]))
    assert open_source(one).digest != open_source(two).digest


def test_built_in_set_and_its_held_out_part():
    train, held_out = open_source("stdlib-docstrings"), open_source("stdlib-docstrings:held-out")
    assert train.digest != held_out.digest
    assert len(list(train)) > 10 * len(list(held_out)) > 0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [USER, USER, ANSWER]}, "message 2 is from 'user' directly after 'user'"),
        (
            {"messages": [USER, {"role": "system", "content": "s"}, ANSWER]},
            "message 2 is from 'system' but only the first",
        ),
        ({"messages": [ANSWER]}, "message 1 is from 'assistant' but a conversation begins with system or user"),
        ({"messages": [USER, ANSWER, USER]}, "ends with a turn from 'user'"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": []}, "no messages"),
        ({"messages": "hi"}, "'messages' is a string, not a list"),
        ({"messages": [USER, "4"]}, "message 2 of 'messages' is a string, not an object"),
        ({"messages": [USER, {"role": "asistant", "content": "4"}]}, "did you mean 'assistant'?"),
        (
            {"messages": [USER, {"role": "assistant", "content": ["4"]}]},
            "message 2 of 'messages' is a list, not a string",
        ),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "message 2 of 'messages', an answer, is empty"),
        ({"messages": [USER, {"content": "4"}]}, "has no 'role' (it has 'content')"),
        ({"messages": [USER, {"role": "assistant", "content": "\ud83d"}]}, "half a character"),
        ({"prompt": "2+2?", "completion": "4"}, "column 'messages' is missing"),
        ([1], "not a JSON object"),
    ],
)
def test_a_wrong_second_row_is_refused_with_its_line(tmp_path, row, said):
    path = _file(tmp_path, [{"messages": [USER, ANSWER]}, row])
    refused = _refusal(path)
    assert f"{path}:2" == refused.where
    assert said in str(refused)


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a" "completion": "b"}', ":2:16", "invalid JSON"),
        ('{\n"prompt": "a", "completion": "b"\n}', ":1:2", "one JSON object a line"),
        ('[{"prompt": "a", "completion": "b"},\n {"prompt" "a"}]', ":2:12", "invalid JSON"),
        ('[{"prompt": "a", "completion": "b"},\n]', ":2:1", "trailing comma"),
        ('[{"prompt": "a", "completion": "b"}\n{}]', ":2:1", "Expecting ',' delimiter"),
        ('[{"prompt": "a", "completion": "b"}', ":1:36", "Expecting ',' delimiter"),
        ('[{"prompt": "a", "completion": "b"}]\n[]', ":2", "more after the end of the JSON array"),
        ('\n{"prompt": "a", "completion": "b", "prompt": "c"}', ":2", "key 'prompt' stands twice"),
        ('{"messages": [{"role": "user", "role": "user"}]}', ":1", "key 'role' stands twice"),
        ('[{"prompt": "a", "completion": "b"},\n{"prompt": "a", "prompt": "c"}]', ":2", "key 'prompt' stands twice"),
        ('{"prompt": ' + "9" * 5000 + "}", ":1", "invalid JSON: "),
        ('{"prompt": ' + "[" * 100_000, ":1", "nested too deeply"),
        ("[]", "", "no rows"),
        ("\n\n", "", "no rows"),
        ("", "", "the file is empty"),
        ('{"prompt": "a", "compeltion": "b"}', ":1", "did you mean 'completion'?"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', ":1", "preference set"),
        ('{"input_ids": [1], "labels": [1]}', ":1", "token ids"),
    ],
)
def test_broken_files_are_refused_with_line_and_column(tmp_path, text, place, said):
    path = _file(tmp_path, text)
    refused = _refusal(path)
    assert f"{path}{place}" == refused.where
    assert said in str(refused)


def test_csv_with_wrong_cells_bad_bytes_and_damaged_gz(tmp_path):
    assert "more cells than the header" in str(_refusal(_file(tmp_path, "prompt,completion\na,b,c\n", "a.csv")))
    assert "fewer cells than the header" in str(_refusal(_file(tmp_path, "prompt,completion\na\n", "b.csv")))
    for cells in ('a,"b\nc,d\n', '"a,b\nc,d\n'):  # or the rest of the file would be one answer, or one bad row
        unclosed = _file(tmp_path, f"prompt,completion\n{cells}", "q.csv")
        assert "invalid CSV: unexpected end of data" in str(_refusal(unclosed))
        with pytest.raises(DataError, match="unexpected end of data"):
            list(open_source(unclosed, bad_rows="skip").examples([].append))
    twice = _refusal(_file(tmp_path, "prompt,completion,prompt\na,b,c\n", "c.csv"))
    assert "c.csv:1: column 'prompt' stands twice in the header" in str(twice)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "a", "completion": "b"}\n{"prompt": "\xe9"}')
    assert f"{latin}:2:13: not UTF-8 text: byte 0xe9" in str(_refusal(latin))
    short = tmp_path / "short.jsonl.gz"
    short.write_bytes(gzip.compress(b'{"prompt": "a", "completion": "b"}')[:-9])
    assert "compressed file is damaged" in str(_refusal(short))


def test_missing_file_folder_and_unknown_ending(tmp_path):
    _file(tmp_path, "x", "train.jsonl")
    assert _refusal(tmp_path / "trian.jsonl").hint == "did you mean 'train.jsonl'?"
    assert _refusal("stdlib-docstring").hint == "did you mean 'stdlib-docstrings'?"
    assert "does not exist either" in _refusal(tmp_path / "no" / "a.jsonl").hint
    assert "train.jsonl" in _refusal(tmp_path).hint
    assert "JSON lines" in _refusal(_file(tmp_path, "x", "a.parquet")).hint
