"""The built-in data set: real functions, exact source, a split that leaks nothing."""

import ast
import sysconfig
import textwrap
from pathlib import Path

from finefit.data import stdlib_docstrings

STDLIB = Path(sysconfig.get_paths()["stdlib"])


def _source(pair):
    return pair["messages"][0]["content"].split("```python\n", 1)[1].removesuffix("\n```")


def test_about_five_thousand_pairs_and_a_twentieth_held_out():
    pairs, held_out = stdlib_docstrings.pairs(), stdlib_docstrings.held_out()
    assert 4_500 < len(pairs) < 6_500
    assert 0.03 < len(held_out) / len(pairs) < 0.07
    assert len(pairs) == len(held_out) + len(stdlib_docstrings.train())


def test_no_function_is_in_both_halves_nor_inside_another_example():
    train = {_source(pair) for pair in stdlib_docstrings.train()}
    held_out = {_source(pair) for pair in stdlib_docstrings.held_out()}
    assert train & held_out == set()
    whole = "\0".join(train)
    long_enough = [source for source in held_out if source.count("\n") > 3]
    assert [source for source in long_enough if source in whole] == []


def test_prompt_is_the_function_less_its_docstring():
    pair = next(pair for pair in stdlib_docstrings.pairs() if pair["where"].startswith("textwrap.py:"))
    line = int(pair["where"].split(":")[1])
    original = (STDLIB / "textwrap.py").read_text().split("\n")[line - 1]
    assert original in _source(pair)
    assert pair["messages"][1]["content"].split("\n")[0] not in _source(pair)


def test_what_is_left_of_every_fiftieth_function_has_the_same_code():
    compared = 0
    for pair in stdlib_docstrings.pairs()[::50]:
        name, line = pair["where"].rsplit(":", 1)
        tree = ast.parse((STDLIB / name).read_bytes())
        node = next(n for n in ast.walk(tree) if getattr(n, "lineno", 0) == int(line) and hasattr(n, "body"))
        if len(node.body) > 1:
            left = ast.parse(textwrap.dedent(_source(pair))).body[0]
            assert [ast.dump(part) for part in node.body[1:]] == [ast.dump(part) for part in left.body], pair["where"]
            compared += 1
    assert compared > 50


def test_docstring_beside_code_on_its_line_is_cut_out_exactly(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        '@deco\ndef f(ä): "é docstring of more than forty characters, surely"; return "ü"\n', encoding="utf-8"
    )
    assert list(stdlib_docstrings._functions(file)) == [
        (2, '@deco\ndef f(ä): ; return "ü"', "é docstring of more than forty characters, surely")
    ]
