"""Run files: what is read, and what a user is told when something is wrong."""

from pathlib import Path

import pytest
import yaml

from finefit.config import Config, dump, json_schema, load
from finefit.config.schema import FOREIGN, FOREIGN_NOTES, SECTIONS
from finefit.errors import ConfigError

FULL = """\
model: SmolLM2-135M-Instruct
data: docs.jsonl
lora:
  rank: 8
train:
  learning_rate: 2e-4
  steps: 20
memory:
  budget: 80%
  checkpointing: 10
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("run.yaml")


def complaint(path: Path | None, *overrides: str, **positional: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, list(overrides), positional)
    return str(caught.value)


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return complaint(path)


def test_file_then_positional_then_overrides(run_file: Path) -> None:
    run_file.write_text(FULL)
    config = load(
        run_file, ["lora.rank=32", "lora.rank=64", "train.learning_rate=5e-5"], {"data": "mine", "model": None}
    )
    assert (config.model, config.data) == ("SmolLM2-135M-Instruct", "mine")
    assert (
        config.lora.rank,
        config.lora.alpha,
        config.train.learning_rate,
        config.train.steps,
    ) == (64, 128.0, 5e-5, 20)
    assert config.memory.pins() == (("checkpointing", "10"),)


def test_two_words_are_enough() -> None:
    config = load(None, [], {"model": "m", "data": "d"})
    assert Config(model="m", data="d") == config
    assert config.memory.pins() == ()


def test_alpha_follows_rank_unless_given() -> None:
    assert load(None, [], {"model": "m"}).lora.alpha == 32.0
    assert load(None, ["lora.rank=4"], {"model": "m"}).lora.alpha == 8.0
    assert load(None, ["lora.rank=4", "lora.alpha=5"], {"model": "m"}).lora.alpha == 5.0


def test_no_more_keys_than_the_house_allows_each_described_and_memory_is_auto() -> None:
    keys = [key for inner in SECTIONS.values() for key in inner]
    assert len(keys) <= 51
    assert len(keys) == len(set(keys)), "a hint by exact name needs names that are unique across sections"
    assert {"auto"} == set(Config(model="m").memory.model_dump().values())
    schema = json_schema()
    described = [
        (name, key)
        for name, part in [("Config", schema), *schema["$defs"].items()]
        for key, value in part["properties"].items()
        if "description" not in value and "$ref" not in value
    ]
    assert described == []
    assert False is schema["additionalProperties"] is schema["$defs"]["Train"]["additionalProperties"]


def test_dump_loads_as_the_same_configuration(run_file: Path) -> None:
    run_file.write_text(FULL)
    texts = ["lora.targets=[q_proj, v_proj]", "memory.packing=on", "memory.budget=6GiB..8GiB", "seed=3", "name=名字"]
    config = load(run_file, texts)
    run_file.write_text(dump(config))
    assert config == load(run_file)
    assert "name: 名字\n" in dump(config)


@pytest.mark.parametrize(
    ("override", "section", "key", "expected"),
    [
        ("memory.checkpointing=none", "memory", "checkpointing", 0),
        ("memory.checkpointing=off", "memory", "checkpointing", 0),
        ("memory.checkpointing=true", "memory", "checkpointing", "all"),
        ("memory.packing=off", "memory", "packing", False),
        ("memory.budget=8GiB", "memory", "budget", "8GiB"),
        ("memory.budget=-1GiB", "memory", "budget", "-1GiB"),
        ("memory.budget=8000000000", "memory", "budget", "8000000000"),
        ("lora.targets=q_proj,v_proj", "lora", "targets", ("q_proj", "v_proj")),
        ("lora.targets=[all]", "lora", "targets", "all"),
        ("memory.fp32_islands=norms,head,norm", "memory", "fp32_islands", ("head", "norms")),
        ("memory.fp32_islands=[q_norm, mlp.*]", "memory", "fp32_islands", ("mlp.*", "q_norm")),
        ("memory.fp32_islands=none", "memory", "fp32_islands", ()),
        ("train.warmup_steps=0.1", "train", "warmup_steps", 0.1),
        ("train.learning_rate=2e-4", "train", "learning_rate", 2e-4),
        ("hardware.device=cuda:1", "hardware", "device", "cuda:1"),
        ("train={steps: 3}", "train", "steps", 3),
    ],
)
def test_spellings_of_values(override: str, section: str, key: str, expected: object) -> None:
    config = load(None, [override], {"model": "m"})
    assert expected == getattr(getattr(config, section), key)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model: m\ntrain:\n    learning_rte: 1\n",
            "run.yaml:3:5: unknown key 'train.learning_rte'\nhint: did you mean 'train.learning_rate'?",
        ),
        ("model: m\nrank: 3\n", "run.yaml:2:1: unknown key 'rank'\nhint: it belongs at lora.rank"),
        ("model: m\ntrain: {rank: 3}\n", "run.yaml:2:9: unknown key 'train.rank'\nhint: it belongs at lora.rank"),
        ("model: m\nlora: {data: 3}\n", "run.yaml:2:8: unknown key 'lora.data'\nhint: it belongs at data"),
        (
            "model: m\ntrain:\n  lora:\n    rank: 3\n",
            "run.yaml:3:3: unknown key 'train.lora'\nhint: 'lora' is a section of its own, at the left margin",
        ),
        ("model: m\ncutoff_len: 9\n",
         "run.yaml:2:1: unknown key 'cutoff_len'\nhint: it is called train.max_length here"),
        ("model: m\nlorra:\n  rank: 3\n", "run.yaml:2:1: unknown key 'lorra'\nhint: did you mean 'lora'?"),
        ("model: m\nlearningrate: 3\n",
         "run.yaml:2:1: unknown key 'learningrate'\nhint: did you mean 'train.learning_rate'?"),
        ("model: m\nzzz: 3\n", "run.yaml:2:1: unknown key 'zzz'"),
        (
            "model: m\ngradient_accumulation_steps: 4\n",
            "run.yaml:2:1: unknown key 'gradient_accumulation_steps'\nhint: say train.global_batch_size, "
            "the examples of one optimizer step; the plan chooses how to split it",
        ),
        ("data: d\n", "run.yaml: 'model' is missing\nhint: say model: <folder or name>"),
        (
            "",
            "run.yaml: the file is empty\nhint: start with two lines, model: <folder or name> and data: <file or name>",
        ),
        (
            "# only words\n- a\n",
            "run.yaml:2:1: key: value lines are needed here\n"
            "hint: start with two lines, model: <folder or name> and data: <file or name>",
        ),
        ("model: m\nlora:\n  rank: [\n",
         "run.yaml:4:1: this is not YAML: expected the node content, but found '<stream end>'"),
        ("model: m\n\ttrain: 3\n", "run.yaml:2:1: this is not YAML: found character '\\t' that cannot start any token"),
        ("model: m\nseed: 1\nseed: 2\n", "run.yaml:3:1: key 'seed' stands here twice\nhint: first at run.yaml:2:1"),
        (
            "model: m\nlora: {rank: 3, rank: 4}\n",
            "run.yaml:2:17: key 'lora.rank' stands here twice\nhint: first at run.yaml:2:8",
        ),
        (
            "model: m\nlora: 3\n",
            "run.yaml:2:7: 'lora' is a section of keys, not a value\n"
            "hint: its keys are rank, alpha, dropout, …, indented below it",
        ),
        ("model: m\ntrain:\n  steps: many\n", "run.yaml:3:10: 'train.steps' must be a whole number, not 'many'"),
        ("model: m\ntrain:\n  steps: true\n", "run.yaml:3:10: 'train.steps': a number is needed, not true"),
        ("model: m\ntrain:\n  steps: 2.5\n", "run.yaml:3:10: 'train.steps' must be a whole number, not 2.5"),
        ("model: m\ntrain:\n  learning_rate: .nan\n", "run.yaml:3:18: 'train.learning_rate' must be auto or a number, not nan"),
        ("model: m\nlora:\n  rank: 0\n", "run.yaml:3:9: 'lora.rank' must be at least 1, not 0"),
        (
            "model: m\nmethod: lorra\n",
            "run.yaml:2:9: 'method' must be auto, full, lora or qlora, not 'lorra'\nhint: did you mean 'lora'?",
        ),
        (
            "model: m\nqlora: {bits: 5}\n",
            "run.yaml:2:15: 'qlora.bits': must be 2, 3, 4 or 8, not 5; did you mean 4?",
        ),
        ("model: m\nqlora: {bits: 7}\n", "run.yaml:2:15: 'qlora.bits': must be 2, 3, 4 or 8, not 7; did you mean 8?"),
        ("model: m\nqlora: {bits: four}\n", "run.yaml:2:15: 'qlora.bits' must be 2, 3, 4 or 8, not 'four'"),
        (
            "model: m\nqlora: {scales: duoble}\n",
            "run.yaml:2:17: 'qlora.scales' must be double or plain, not 'duoble'\nhint: did you mean 'double'?",
        ),
        (
            "model: m\nload_in_4bit: true\n",
            "run.yaml:2:1: unknown key 'load_in_4bit'\nhint: say method: qlora; qlora.bits is 4 unless you say 8, 3 or 2",
        ),
        (
            "model: m\nmemory: {checkpointing: some}\n",
            "run.yaml:2:25: 'memory.checkpointing' must be auto or all or a whole number, not 'some'",
        ),
        (
            "model: m\nmemory:\n  budget: lots\n",
            "run.yaml:3:11: 'memory.budget': 'lots' is not an amount of memory; "
            "say 8GiB, 24GB, 80%, -1GiB (leave that much) or 6GiB..8GiB",
        ),
        ("model: m\nhardware: {device: tpu}\n",
         "run.yaml:2:20: 'hardware.device' must be auto, cpu, cuda or cuda:<number>, not 'tpu'"),
        ("model: [a]\n", "run.yaml:1:8: 'model' must be text, not ['a']"),
        ("model: ''\n", "run.yaml:1:8: 'model' must be a name, not ''"),
        ("model: !!python/name:os.system m\n", "run.yaml:1:8: this is not YAML: could not determine a constructor"),
    ],
)  # fmt: skip
def test_one_complaint(run_file: Path, text: str, expected: str) -> None:
    told = written(run_file, text)
    assert expected == told[: len(expected)] if "constructor" in expected else expected == told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nmodel: a\0b\n", "run.yaml:2:9: this is not YAML: the character U+0000 cannot stand here"),
        ("model: 2026-13-45\n", "run.yaml:1:8: '2026-13-45' is not a valid timestamp"),
        ("model: m\nlora: {rank: 2026-13-45}\n", "run.yaml:2:14: '2026-13-45' is not a valid timestamp"),
        ("model: m\n2026-13-45: 1\n", "run.yaml:2:1: '2026-13-45' is not a valid timestamp"),
        ("model: [2026-13-45]\n", "run.yaml:1:8: something in here is not a valid value"),
        ("model: m\nseed: !!int many\n", "run.yaml:2:7: 'many' is not a valid int"),
        ("model: m\nseed: !!bool many\n", "run.yaml:2:7: 'many' is not a valid bool"),
        ("model: m\nseed: !!timestamp many\n", "run.yaml:2:7: 'many' is not a valid timestamp"),
        ("model: m\nseed: 0b_\n", "run.yaml:2:7: '0b_' is not a valid int"),
        (f"model: m\nseed: {'9' * 5000}\n", "run.yaml:2:7: '999999999999...9999999999999' is not a valid int"),
        ('model: "\\UFFFFFFFF"\n', "run.yaml:1:11: this is not YAML: "),
        ("model: " + "[" * 5000, "run.yaml: this is nested too deeply"),
        ('model: "a\\0b"\n', "run.yaml:1:8: 'model': a NUL character cannot be in a name"),
        ("model: m\nname: ../../esc\n",
         "run.yaml:2:7: 'name': '../../esc' is not the name of one folder; "
         "say where with output_dir, and name without / and .."),
        ("model: m\nname: ..\n", "run.yaml:2:7: 'name': '..' is not the name of one folder"),
        ("model: m\nname: /tmp\n", "run.yaml:2:7: 'name': '/tmp' is not the name of one folder"),
        ("model: m\nname: ''\n", "run.yaml:2:7: 'name': '' is not the name of one folder"),
        ("model: m\nmemory: {budget: 0}\n", "run.yaml:2:18: 'memory.budget': the budget '0' is no memory at all; say 8GiB"),
        ("model: m\nmemory: {budget: 8GiB..6GiB}\n",
         "run.yaml:2:18: 'memory.budget': the budget '8GiB..6GiB' ends below where it begins; say"),
    ],
)  # fmt: skip
def test_what_yaml_and_the_system_would_choke_on_is_one_complaint(run_file: Path, text: str, expected: str) -> None:
    assert written(run_file, text).startswith(expected)


def test_an_override_that_yaml_chokes_on_is_text() -> None:
    assert load(None, ["name=2026-13-45"], {"model": "m"}).name == "2026-13-45"


def test_everything_wrong_is_told_at_once_in_the_order_of_the_file(run_file: Path) -> None:
    run_file.write_text("model: m\ntrain:\n    steps: many\n    learning_rte: 2e-4\nrank: 8\nseed: 1\nseed: -1\n")
    expected = """\
7 problems
run.yaml:3:12: 'train.steps' must be a whole number, not 'many'
run.yaml:4:5: unknown key 'train.learning_rte' (did you mean 'train.learning_rate'?)
run.yaml:5:1: unknown key 'rank' (it belongs at lora.rank)
run.yaml:7:1: key 'seed' stands here twice (first at run.yaml:6:1)
run.yaml:7:7: 'seed' must be at least 0, not -1
command line: 'lora.rank' is not key=value (as in lora.rank=32)
command line: unknown key 'lora.rnk' (did you mean 'lora.rank'?)"""
    assert expected == complaint(run_file, "lora.rank", "lora.rnk=3")


def test_an_override_of_a_wrong_value_mends_it(run_file: Path) -> None:
    run_file.write_text("model: m\ntrain:\n  steps: many\n")
    assert load(run_file, ["train.steps=7"]).train.steps == 7


def test_missing_file_folder_and_bytes(run_file: Path) -> None:
    run_file.write_text(FULL)
    assert complaint(Path("runn.yaml")) == "there is no file 'runn.yaml'\nhint: did you mean 'run.yaml'?"
    assert complaint(Path("x")) == "there is no file 'x'\nhint: in that folder: run.yaml"
    assert complaint(Path("nowhere/x")) == "there is no file 'nowhere/x'"
    Path("folder").mkdir()
    assert complaint(Path("folder")) == "'folder' is a folder\nhint: name the YAML file in it"
    Path("folder/config.yaml").write_text(FULL)
    assert complaint(Path("folder")) == "'folder' is a folder\nhint: did you mean 'folder/config.yaml'?"
    run_file.write_bytes(b"model: \xff\n")
    assert complaint(run_file) == "run.yaml: byte 7 is not UTF-8 text"
    run_file.write_bytes(b"\xef\xbb\xbfmodel: m\n")
    assert load(run_file).model == "m"


def test_anchors_and_merges_are_yaml(run_file: Path) -> None:
    run_file.write_text("model: &m m\ndata: *m\nlora: &a {rank: 3}\ntrain:\n  steps: 2\n")
    assert (load(run_file).data, load(run_file).lora.rank) == ("m", 3)
    run_file.write_text("model: m\nlora:\n  <<: {rank: 3, dropout: 0.1}\n  rank: 4\n")
    assert (load(run_file).lora.rank, load(run_file).lora.dropout) == (4, 0.1)


def test_an_empty_section_is_its_defaults(run_file: Path) -> None:
    run_file.write_text("model: m\nlora:\n")
    assert Config(model="m") == load(run_file)


def test_foreign_spellings_lead_to_keys_that_exist() -> None:
    ours = {f"{section}.{key}" if section else key for section, keys in SECTIONS.items() for key in keys}
    assert set() == set(FOREIGN.values()) - ours
    assert set() == set(FOREIGN_NOTES) - set(FOREIGN)
    assert set() == set(FOREIGN) & {key.rpartition(".")[2] for key in ours}


def test_override_values_that_are_no_yaml_are_text() -> None:
    assert load(None, ["name=%x"], {"model": "m"}).name == "%x"
    assert None is load(None, ["name="], {"model": "m"}).name


def test_dump_is_plain_yaml() -> None:
    assert yaml.safe_load(dump(Config(model="m")))["model"] == "m"
