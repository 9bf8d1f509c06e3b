"""`finefit catalog`: rows, tables and JSON of models, GPUs and machines; what a word finds, and what it suggests."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from finefit import cli
from finefit.errors import ConfigError
from finefit.inventory import rows
from finefit.terminal.listing import count_text, show


def names(kind: str, word: str | None = None) -> list[str]:
    return [row["name"] for row in rows(kind, word)]


def table(kind: str, word: str, width: int = 80) -> list[str]:
    out = Console(file=io.StringIO(), width=width)
    show(kind, rows(kind, word), console=out)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


def test_a_model_says_what_a_plan_reckons_with():
    (row,) = rows("models", "olmoe")
    assert {key: row[key] for key in ("name", "hub_id", "parameters", "active_parameters", "context", "family")} == {
        "name": "OLMoE-1B-7B", "hub_id": "allenai/OLMoE-1B-7B-0924", "parameters": 6_919_161_856,
        "active_parameters": 1_282_017_280, "context": 4096, "family": "olmoe",
    }  # fmt: skip
    assert "active_parameters" not in rows("models", "llama-3.1-8b")[0]


@pytest.mark.parametrize(
    ("kind", "word", "found"),
    [
        ("models", "mixtral", ["Mixtral-8x7B", "Mixtral-8x22B"]),
        ("models", "deepseek_v3", ["DeepSeek-V3", "Moonlight-16B-A3B"]),
        ("models", "R1-Distill-Llama-8B", ["Llama-3.1-8B"]),
        ("gpus", "h100 3g.40gb", ["H100 SXM 3g.40gb"]),
        ("gpus", "l4", ["L4"]),
        ("gpus", "rtx 409", ["RTX 4090", "RTX 4090 D", "RTX 4090 Laptop"]),
        ("hosts", "dgx h", ["DGX H100", "DGX H200"]),
        ("hosts", "L40S", ["g6e.xlarge", "g6e.12xlarge", "g6e.48xlarge"]),
    ],
)
def test_a_word_finds_names_spellings_and_families(kind, word, found):
    assert found == names(kind, word)


def test_a_number_is_not_cut_in_two():
    """Qwen-32B has the letters of Qwen3 in it."""
    assert {name.partition("-")[0] for name in names("models", "qwen3")} == {"Qwen3"}


def test_without_a_word_all_are_there():
    assert (len(rows("models")) >= 105, len(rows("gpus")) >= 150, len(rows("hosts")) >= 30) == (True, True, True)


@pytest.mark.parametrize(
    ("kind", "word", "message", "hint"),
    [
        ("models", "qwne3-8b", "no name among the catalogue's models has 'qwne3-8b' in it", "did you mean 'Qwen3-8B'?"),
        ("gpus", "RTX 4900", "no name among the catalogue's gpus has 'RTX 4900' in it", "did you mean 'RTX 4090'?"),
        ("hosts", "zzz", "no name among the catalogue's hosts has 'zzz' in it", "finefit catalog hosts lists all"),
        ("gpu", None, "the catalogue has no 'gpu'", "did you mean 'gpus'?"),
    ],
)
def test_what_finds_nothing_suggests(kind, word, message, hint):
    with pytest.raises(ConfigError) as caught:
        rows(kind, word)
    assert (message, hint) == (caught.value.message, caught.value.hint)


def test_tables_are_readable_at_eighty_columns():
    assert table("models", "gpt-oss") == [
        "model         parameters  active  context  family",
        "gpt-oss-20b        20.9B   4.19B  131,072  gpt_oss",
        "gpt-oss-120b        117B   5.71B  131,072  gpt_oss",
    ]
    assert table("models", "phi-2") == ["model  parameters  context  family", "Phi-2       2.78B    2,048  phi"]
    assert table("gpus", "a30") == [
        "GPU             memory  bf16 TFLOP/s  GB/s",
        "A30          24.00 GiB           165   933",
        "A30 1g.6gb    5.81 GiB            41   233",
        "A30 2g.12gb  11.69 GiB            82   466",
        "A30 4g.24gb  23.44 GiB           165   933",
    ]
    assert table("gpus", "h100 nvl") == [
        "GPU          memory  bf16 TFLOP/s  fp8   GB/s  to peers",
        "H100 NVL  93.58 GiB           835  yes  3,900       300",
    ]
    assert table("hosts", "p4d") == [
        "machine        GPUs           host memory  network",
        "p4d.24xlarge   8 x A100 40GB     1152 GiB  50 GB/s",
        "p4de.24xlarge  8 x A100 80GB     1152 GiB  50 GB/s",
    ]
    for kind in ("models", "gpus", "hosts"):
        assert max(map(len, table(kind, ""))) <= 80
        assert not any("…" in line for line in table(kind, ""))


def test_a_narrow_terminal_has_whole_numbers_below_the_names():
    for kind in ("models", "gpus", "hosts"):
        out = Console(file=io.StringIO(), width=32)
        show(kind, rows(kind), console=out)
        text = out.file.getvalue()
        assert (kind, "…" in text, max(map(len, text.splitlines())) <= 32) == (kind, False, True)
    out = Console(file=io.StringIO(), width=32)
    show("hosts", rows("hosts", "p4de"), console=out)
    text = " ".join(out.file.getvalue().split())
    assert text == "p4de.24xlarge GPUs 8 x A100 80GB, host memory 1152 GiB, network 50 GB/s"


@pytest.mark.parametrize(
    ("n", "text"),
    [(671_026_404_352, "671B"), (8_030_261_248, "8.03B"), (134_515_008, "135M"), (999, "999"), (2e12, "2T")],
)
def test_counts_have_three_digits(n, text):
    assert text == count_text(n)


def test_the_command_prints_json_without_torch():
    code = (
        "import sys; sys.argv = ['finefit', 'catalog', 'gpus', 'DGX', '--json']; from finefit import cli\n"
        "sys.argv[2:] = ['hosts', 'DGX H100', '--json']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)
    assert (row["gpu"], row["count"], row["host_memory_bytes"], done.stderr) == ("H100 SXM", 8, 2**41, "[]\n")


def test_the_command_is_there():
    done = CliRunner().invoke(cli.app, ["catalog", "models", "mixtral"])
    assert (done.exit_code, done.output.splitlines()[0].split()) == (
        0, ["model", "parameters", "active", "context", "family"],
    )  # fmt: skip
