"""Writes what the documentation repeats of the code: both reference pages, and the marked places of the other pages.

    python scripts/reference.py

``reference/config.md`` comes from the schema of run files, ``reference/events.md`` from ``events.FIELDS`` and the
comments there. Places: ``kept: KEY`` is what one block of the Llama family keeps for backward, ``loss: KEY`` the
highest point of the loss, both read from the shipped coefficients; ``does-not-fit`` is that error as it is. So formulas
and messages are never typed by hand. Declines to write prose.
"""

import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from finefit import events, planning
from finefit import words as words_of
from finefit.coefficients import SHIPPED, read
from finefit.config import Config
from finefit.config.schema import SECTIONS
from finefit.errors import DoesNotFit
from finefit.spec import resolve_model

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LANGUAGES = ("en", "zh")
TOO_LARGE = ("meta-llama/Llama-3.1-8B", "RTX 4090", ["method=full", "train.max_length=4096"])

_MADE = "<!-- made by scripts/reference.py: change the code and run it again -->"
_PLACE = re.compile(r"<!-- (kept|loss): ([^>]+?) -->.*?<!-- /\1 -->")
_DOES_NOT_FIT = re.compile(r"<!-- does-not-fit -->.*?<!-- /does-not-fit -->", re.DOTALL)

WORDS: dict[str, dict[str, str]] = {
    "en": {
        "config": "Keys of a run file",
        "config says": "A run file is YAML with these keys; on the command line a key is `section.key=value` and wins "
        "over the file. Unknown keys are errors, with the nearest known key as a hint. A `memory` key that is not "
        "`auto` is a constraint the plan keeps to.",
        "top": "top level", "key": "key", "values": "values", "default": "default", "meaning": "meaning",
        "required": "required", "none": "none", "text": "text", "names": "list of names", "count": "whole number",
        "number": "number", "or": ", ",
        "events": "Events of a run",
        "events says": "`events.jsonl` in the run folder is the run's only record: one JSON object a line with `v` "
        "(version of the log), `t` (Unix seconds), `event` (a name below) and at least these fields. Readers pass "
        "over fields they do not know. Floats without a JSON word are the strings `\"nan\"`, `\"inf\"` and "
        "`\"-inf\"`. Lines are flushed to the disk at `save` and `end`.",
        "event": "event", "fields": "fields", "notes": "notes",
        "footprint": "A *footprint* has `witness`, `peak_bytes`, `peak_moment`, `reserved_bytes`, `notes` and "
        "`moments`: `{moment: {component: bytes}}`; `host` is the same of the host's memory, where it is predicted: "
        "`program`, `tensors` (a CPU's), `copies`, `data`, and `mapped` files, which the system can take back.",
    },
    "zh": {
        "config": "运行文件的键",
        "config says": "运行文件是 YAML，可用的键如下；命令行上写作 `section.key=value`，优先于文件。"
        "未知的键会报错，并提示最接近的已知键。`memory` 下不是 `auto` 的值是计划必须遵守的约束。"
        "含义一栏保留英文，与代码一致。",
        "top": "顶层", "key": "键", "values": "取值", "default": "默认值", "meaning": "含义",
        "required": "必填", "none": "无", "text": "文本", "names": "名称列表", "count": "整数", "number": "数",
        "or": "、",
        "events": "运行事件",
        "events says": "运行目录里的 `events.jsonl` 是一次运行的唯一记录：每行一个 JSON 对象，"
        "含 `v`（日志版本）、`t`（Unix 秒）、`event`（下列名称之一），并至少含所列字段。读取方忽略不认识的字段。"
        "JSON 无法表示的浮点数写成字符串 `\"nan\"`、`\"inf\"`、`\"-inf\"`。写入 `save` 与 `end` 时同步到磁盘。"
        "说明一栏保留英文，与代码一致。",
        "event": "事件", "fields": "字段", "notes": "说明",
        "footprint": "*footprint* 含 `witness`、`peak_bytes`、`peak_moment`、`reserved_bytes`、`notes` 与 "
        "`moments`：`{moment: {component: bytes}}`；`host` 是主机内存的同样数据（有预测时）：`program`、"
        "`tensors`（设备为 CPU 时）、`copies`、`data`，以及系统可以收回的 `mapped` 文件页。",
    },
}  # fmt: skip


def pages() -> dict[Path, str]:
    """Every page this script has a part in, as it should be."""
    made = {DOCS / lang / "reference" / "config.md": config_page(lang) for lang in LANGUAGES}
    made |= {DOCS / lang / "reference" / "events.md": events_page(lang) for lang in LANGUAGES}
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text("utf-8")
        if path not in made and (_PLACE.search(text) or _DOES_NOT_FIT.search(text)):
            made[path] = filled(text)
    return made


def config_page(lang: str) -> str:
    """The keys of each section with values, default and meaning."""
    words = WORDS[lang]
    parts = [_MADE, f"# {words['config']}", words["config says"]]
    for section, keys in SECTIONS.items():
        model = type(Config.model_fields[section].default) if section else Config
        said = (model.__doc__ or "").replace("``", "`")
        parts += [f"## {section}", said] if section else [f"## {words['top']}"]
        parts.append(_keys({key: model.model_fields[key] for key in keys}, words))
    return "\n\n".join(parts) + "\n"


def events_page(lang: str) -> str:
    """Each event, its fields and the comments of its entry in the code."""
    words, notes = WORDS[lang], _event_notes()
    rows = [
        (f"`{event}`", ", ".join(f"`{field}`" for field in fields), "; ".join(notes.get(event, [])))
        for event, fields in events.FIELDS.items()
    ]
    table = _table((words["event"], words["fields"], words["notes"]), rows)
    parts = (_MADE, f"# {words['events']}", words["events says"], table, words["footprint"])
    return "\n\n".join(parts) + "\n"


def filled(text: str) -> str:
    """``text`` with every marked place as the code has it."""

    def place(match: re.Match[str]) -> str:
        kind, key = match[1], match[2]
        return f"<!-- {kind}: {key} -->`{_formula(kind, key)}`<!-- /{kind} -->"

    text = _PLACE.sub(place, text)
    if _DOES_NOT_FIT.search(text):
        block = f"<!-- does-not-fit -->\n```text\n{does_not_fit()}\n```\n<!-- /does-not-fit -->"
        text = _DOES_NOT_FIT.sub(lambda _: block, text)
    return text


def does_not_fit() -> str:
    """The error of a plan that cannot be, as the terminal shows it; one technique a line."""
    model, gpu, overrides = TOO_LARGE
    config = words_of.config_of([model], overrides)
    try:
        planning.make_plan(config, resolve_model(model), planning.hardware_of(config, gpu), None)
    except DoesNotFit as error:
        return f"error: {error}".replace("; ", ";\n              ")
    raise AssertionError(f"{model} fits a {gpu}: choose another example")


def _formula(kind: str, key: str) -> str:
    graph = read(SHIPPED / "llama.json.gz")[key]
    name = {"kept": "forward 1", "loss": "loss"}[kind]
    section = next(s for s in graph if s["name"] == name and s["again"])
    if kind == "kept":
        return polynomial(section["end"]["activation"])
    totals = [_total(mark) for mark in section["landmarks"]]
    return polynomial(max(totals, key=lambda t: max((c for word, c in t.items() if "V" in word), default=0)))


def _total(mark: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for poly in mark.values():
        for word, c in poly.items():
            total[word] = total.get(word, 0) + c
    return {word: c for word, c in total.items() if c}


def polynomial(poly: Mapping[str, float]) -> str:
    """``16·T·h + 4·T·q``, most factors first, T before widths."""

    def order(word: str) -> tuple[int, list[int]]:
        return -len(word.split("*")) if word else 0, ["TSQLCVhfqkr".find(s) for s in word.split("*") if s]

    terms = []
    for word, c in sorted(poly.items(), key=lambda item: order(item[0])):
        symbols = sorted(word.split("*"), key="TSQLCVhfqkr".find) if word else []
        terms.append("·".join([f"{c:g}", *symbols]))
    return " + ".join(terms)


def _keys(fields: Mapping[str, Any], words: Mapping[str, str]) -> str:
    rows = [
        (
            f"`{key}`",
            words["or"].join(_values(one.annotation, one.metadata, words)),
            _default(one, words),
            one.description,
        )
        for key, one in fields.items()
    ]
    return _table((words["key"], words["values"], words["default"], words["meaning"]), rows)


def _values(kind: Any, limits: Sequence[Any], words: Mapping[str, str]) -> Iterator[str]:
    """What an annotation allows, in words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        yield from _values(inner[0], inner[1:], words)
    elif origin in (typing.Union, types.UnionType):
        for one in inner:
            yield from _values(one, limits, words)
    elif origin is typing.Literal:
        yield from (f"`{word}`" for word in inner)
    elif kind is bool:
        yield from ("`true`", "`false`")
    elif kind in (int, float):
        yield words["count" if kind is int else "number"] + "".join(_bounds(limits))
    elif kind is str or origin is tuple:
        yield words["text" if kind is str else "names"]


def _bounds(limits: Sequence[Any]) -> Iterator[str]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    for limit in limits:
        inside = limit.metadata if isinstance(limit, FieldInfo) else [limit]
        for one in inside:
            yield from (f" {sign} {getattr(one, name):g}" for name, sign in signs.items() if hasattr(one, name))


def _default(one: FieldInfo, words: Mapping[str, str]) -> str:
    if one.is_required():
        return words["required"]
    return words["none"] if one.default is None else f"`{one.default}`"


def _event_notes() -> dict[str, list[str]]:
    """The comments above each entry of ``FIELDS``."""
    source = inspect.getsource(events).partition("FIELDS: dict")[2].partition("\n}")[0]
    notes: dict[str, list[str]] = {}
    waiting: list[str] = []
    for line in source.splitlines():
        if line.strip().startswith("#"):
            waiting += [part.strip() for part in line.strip().lstrip("# ").split(" | ")]
        elif entry := re.match(r'\s*"(\w+)": \(', line):
            notes[entry[1]], waiting = waiting, []
    return notes


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> None:
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
