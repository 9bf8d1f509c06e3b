"""The documentation says what the code does: generated parts are current, links, commands and examples are real."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

from finefit import cli
from finefit import words as words_of
from finefit.config import load
from finefit.data.readers import open_source

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CHANGELOG.md"])
MEASURED = {DOCS / "accuracy.svg"}  # written by benchmarks/accuracy.py, so it may not be there yet
COMMANDS = typer.main.get_command(cli.app).commands


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def commands(path):
    """Every ``finefit …`` of the page's shell blocks; several may stand in a line, apart by two blanks."""
    lines = [line.partition(" #")[0] for block in blocks(path, "sh") for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"\s{2,}(?=finefit )", line)]
    return [part for part in parts if part.startswith("finefit ")]


def anchors(path):
    """Headings as the anchors a forge makes of them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_is_written_from_the_code_is_up_to_date():
    stale = [name_of(path) for path, text in script("reference").pages().items() if path.read_text("utf-8") != text]
    assert stale == [], "run scripts/reference.py"


def test_the_page_of_what_fits_is_up_to_date():
    """One card stands for all: each takes as long as the command."""
    made = script("fits_page")
    size, name = made.CARDS[2]
    found = made.fits(made.HardwareSpec.from_name(name))
    stale = [lang for lang, said in made.WORDS.items()
             if made.table(found, said) not in (DOCS / lang / "reference" / "fits.md").read_text("utf-8")]  # fmt: skip
    assert stale == [], f"run scripts/fits_page.py ({size})"


def test_both_languages_have_the_same_pages():
    english, chinese = (
        {p.relative_to(DOCS / lang).as_posix() for p in (DOCS / lang).rglob("*.md")} for lang in ("en", "zh")
    )
    assert english == chinese


def test_both_languages_have_the_same_commands_and_marked_places():
    def shown(path):
        places = re.findall(r"<!-- [^>]+ -->", path.read_text("utf-8"))
        return commands(path), blocks(path, "yaml"), blocks(path, "jsonl"), [p for p in places if "made by" not in p]

    pairs = {path: DOCS / "zh" / path.relative_to(DOCS / "en") for path in (DOCS / "en").rglob("*.md")}
    pairs[ROOT / "README.md"] = ROOT / "README.zh-CN.md"
    assert [name_of(path) for path, other in pairs.items() if shown(path) != shown(other)] == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_resolve(path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not (file.exists() or file in MEASURED) or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_are_real(path, tmp_path, monkeypatch):
    """Verb, options and arguments parse, and so does every key=value; nothing is run."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: m\ndata: d\n")
    for line in commands(path):
        verb, *words = shlex.split(line)[1:]
        given = COMMANDS[verb].make_context(verb, words).params
        if verb in ("plan", "train") and not given.get("diff"):
            assert words_of.config_of(given["words"], []).model


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_examples_are_read(path, tmp_path):
    for block in blocks(path, "yaml"):
        (tmp_path / "run.yaml").write_text(block)
        assert load(tmp_path / "run.yaml").model
    for block in blocks(path, "jsonl"):
        (tmp_path / "data.jsonl").write_text(block)
        assert len(list(open_source(tmp_path / "data.jsonl"))) == len(block.splitlines())


def test_the_checks_see_something():
    """Every check above finds its subject on the pages, so none passes for want of one."""
    guide = DOCS / "en" / "guide"
    assert len(commands(ROOT / "README.md")) == 15
    assert len(blocks(guide / "data.md", "jsonl")) == 5
    assert "the-rehearsal" in anchors(DOCS / "en" / "prediction.md")
    assert len(re.findall("<!-- kept: ", (DOCS / "en" / "concepts" / "precision.md").read_text("utf-8"))) == 3
    with pytest.raises(Exception, match="No such option"):
        COMMANDS["plan"].make_context("plan", ["--no-such-option"])
