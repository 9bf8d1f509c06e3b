"""One row of a data file to one conversation, in the shapes people keep their data in.

OpenAI ``messages``, ShareGPT ``conversations``, Alpaca ``instruction``/``output``, ``prompt``/``completion`` (strings
or message lists) and plain ``text``. Told apart by their columns, once for a whole file. Every conversation is checked:
optional system turn, then user, assistant, (tool, assistant,) user, ... and an assistant turn at the end. Declined:
preference pairs, rows that are already token ids, pictures and other parts inside a message.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from finefit.errors import DataError, did_you_mean

Message = dict[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation (``messages``), or one plain ``text`` trained as a whole; ``where`` is ``file:line``."""

    where: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    read: Callable[[Row, str], Example]


_MESSAGE_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "weight")
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
_MAY_FOLLOW = {
    "": {"system", "user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user", "tool"},
    "tool": {"tool", "assistant"},
}


def detect(row: Row, where: str) -> Format:
    """The format of a file whose first row is ``row``."""
    columns = set(row)
    if {"chosen", "rejected"} <= columns:
        raise DataError(
            "this is a preference set (columns 'chosen' and 'rejected'), which supervised fine-tuning cannot use",
            where=where,
            hint="keep the chosen answers only, as 'messages' or as 'prompt' and 'completion'",
        )
    if "input_ids" in columns and not any(set(f.needs) <= columns for f in FORMATS):
        raise DataError(
            "this file holds token ids ('input_ids') instead of text",
            where=where,
            hint="give the conversations as text: token ids fit one tokenizer only and hide which turns are answers",
        )
    for known in FORMATS:
        if set(known.needs) <= columns:
            return known
    wanted = sorted({column for known in FORMATS for column in known.needs})
    guesses = [hint for column in sorted(map(str, columns - set(wanted))) if (hint := did_you_mean(column, wanted))]
    accepted = "; ".join(f"{f.name}: {' + '.join(f.needs)}" for f in FORMATS)
    raise DataError(
        f"no known format has the columns {_listed(columns)}",
        where=where,
        hint=" ".join([*guesses[:1], f"accepted are {accepted}"]),
    )


def unused_columns(known: Format, row: Row) -> tuple[str, ...]:
    """The columns of ``row`` that this format does not look at."""
    return tuple(sorted(str(column) for column in set(row) - set(known.needs) - set(known.may_have)))


def _from_messages(row: Row, where: str) -> Example:
    return _example(row["messages"], "messages", where, tools=row.get("tools"))


def _from_sharegpt(row: Row, where: str) -> Example:
    turns = row["conversations"]
    if system := row.get("system"):
        turns = [{"from": "system", "value": system}, *_list(turns, "conversations", where)]
    return _example(turns, "conversations", where, tools=row.get("tools"))


def _from_alpaca(row: Row, where: str) -> Example:
    turns: list[Message] = []
    if row.get("system"):
        turns.append({"role": "system", "content": row["system"]})
    for number, pair in enumerate(_list(row.get("history") or [], "history", where), 1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"turn {number} of 'history' is not a [question, answer] pair", where=where)
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = _string(row["instruction"], "'instruction'", where)
    if row.get("input"):
        question += "\n" + _string(row["input"], "'input'", where)
    turns.append({"role": "user", "content": question})
    turns.append({"role": "assistant", "content": row["output"]})
    return _example(turns, "alpaca row", where)


def _from_prompt(row: Row, where: str) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        prompt, completion = [{"role": "user", "content": prompt}], [{"role": "assistant", "content": completion}]
    turns = [*_list(prompt, "prompt", where), *_list(completion, "completion", where)]
    return _example(turns, "prompt and completion", where, tools=row.get("tools"))


def _from_text(row: Row, where: str) -> Example:
    text = _string(row["text"], "'text'", where)
    if not text.strip():
        raise DataError("'text' is empty", where=where, hint="remove the row")
    return Example(where, text=text)


FORMATS = (
    Format("messages", ("messages",), ("tools",), _from_messages),
    Format("sharegpt", ("conversations",), ("system", "tools"), _from_sharegpt),
    Format("alpaca", ("instruction", "output"), ("input", "system", "history"), _from_alpaca),
    Format("prompt", ("prompt", "completion"), ("tools",), _from_prompt),
    Format("text", ("text",), (), _from_text),
)


def example(known: Format, row: Row, where: str) -> Example:
    """The conversation in ``row``, which must have the columns of the file's format."""
    missing = [column for column in known.needs if row.get(column) is None]
    if missing:
        raise DataError(
            f"column '{missing[0]}' is missing; the file began in the {known.name} format",
            where=where,
            hint="every row of a file must have the same columns; this one has " + _listed(row),
        )
    return known.read(row, where)


def _example(turns: object, column: str, where: str, *, tools: object = None) -> Example:
    messages = tuple(
        _message(turn, f"message {number} of '{column}'", where)
        for number, turn in enumerate(_list(turns, column, where), 1)
    )
    _check_order(messages, where)
    return Example(where, messages=messages, tools=_tools(tools, where))


def _message(turn: object, name: str, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{name} is {_kind(turn)}, not an object with 'role' and 'content'", where=where)
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in _ROLES:
        found = f"has the role {role!r}" if role is not None else f"has no 'role' (it has {_listed(turn)})"
        hint = did_you_mean(str(role), _ROLES) if role is not None else ""
        raise DataError(f"{name} {found}", where=where, hint=hint or "roles are system, user, assistant and tool")
    message = {"role": _ROLES[role], **{key: turn[key] for key in _MESSAGE_KEYS if turn.get(key) is not None}}
    if content is None and message.get("tool_calls"):
        content = ""  # the API's own form of a turn that only calls tools
    message["content"] = _string(content, f"the content of {name}", where)
    if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
        raise DataError(f"{name}, an answer, is empty", where=where, hint="remove the row or write the answer")
    return message


def _check_order(messages: tuple[Message, ...], where: str) -> None:
    if not messages:
        raise DataError("the conversation has no messages", where=where, hint="remove the row")
    if all(message["role"] != "assistant" for message in messages):
        raise DataError("the conversation has no assistant turn: nothing to learn", where=where, hint="remove the row")
    before = ""
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in _MAY_FOLLOW[before]:
            raise DataError(
                f"message {number} is from '{role}' {_place(before, role)}",
                where=where,
                hint="a conversation is [system,] user, assistant, user, assistant, ...; join neighbours into one turn",
            )
        before = role
    if before != "assistant":
        raise DataError(
            f"the conversation ends with a turn from '{before}'",
            where=where,
            hint="it must end with the assistant's answer; remove the last turn",
        )


def _place(before: str, role: str) -> str:
    if role == "system":
        return "but only the first message may be"
    return f"directly after '{before}'" if before else "but a conversation begins with system or user"


def _tools(tools: object, where: str) -> tuple[Any, ...]:
    if not tools:
        return ()
    if isinstance(tools, str):  # ShareGPT files keep the list as a string
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(f"'tools' is a string that is not JSON ({error})", where=where) from None
    found = _list(tools, "tools", where)
    for number, tool in enumerate(found, 1):
        if not isinstance(tool, dict):
            raise DataError(f"tool {number} of 'tools' is {_kind(tool)}, not an object", where=where)
    return tuple(found)


def _list(value: object, name: str, where: str) -> list[Any]:
    if isinstance(value, list):
        return value
    hint = (
        "in CSV only alpaca, prompt/completion and text can be kept; use JSON lines" if isinstance(value, str) else ""
    )
    raise DataError(f"'{name}' is {_kind(value)}, not a list", where=where, hint=hint)


def _string(value: object, name: str, where: str) -> str:
    if not isinstance(value, str):
        hint = "pictures and other parts are not supported; give the text as one string"
        raise DataError(
            f"{name} is {_kind(value)}, not a string", where=where, hint=hint if isinstance(value, list) else ""
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{name} holds half a character ({value[error.start]!r}) at position {error.start}",
                where=where,
                hint="a lone surrogate escape: the text was cut inside an emoji; repair or remove the row",
            ) from None
    return value


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def _listed(columns: Iterable[object]) -> str:
    return ", ".join(f"'{column}'" for column in sorted(map(str, columns))) or "(none)"
