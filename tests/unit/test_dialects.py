"""Other tools' run files: how each would run there, the wish in our keys, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finefit.config import Config
from finefit.config.dialects import Foreign, is_foreign, read, recognise
from finefit.errors import ConfigError
from finefit.foreign import ForeignRun, Lengths, Spread

PLAIN = ForeignRun(tool="", model="", method="full", micro_batch_size=0, max_length=0)


def foreign(folder: Path, text: str, devices: int | None = None) -> Foreign:
    path = folder / "run.yaml"
    path.write_text(text)
    return read(path, devices)


def said(run: ForeignRun) -> dict[str, Any]:
    """What of a run differs from ForeignRun's own defaults, notes apart."""
    names = [one.name for one in dataclasses.fields(run) if one.name != "notes"]
    return {name: getattr(run, name) for name in names if getattr(run, name) != getattr(PLAIN, name)}


def complaint(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        foreign(folder, text)
    return str(caught.value).replace(f"{folder}/", "")


def config_of(found: Foreign) -> Config:
    nested: dict[str, Any] = {}
    for key, value in found.wish:
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return Config.model_validate(nested)


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("model: {_component_: a.b}\nbase_model: x", "torchtune"),
        ("base_model: x\nmodel_name_or_path: y\nstage: sft", "axolotl"),
        ("model_name_or_path: x\nstage: sft\ndataset_name: d", "llamafactory"),
        ("model: x\npeft_config: {name: lora}", "llamafactory"),
        ("model_name_or_path: x\ndataset_name: d", "trl"),
        ("model: x\ntuner_type: lora", "swift"),
        ("model: x\ntraining: {a: 1}\nlora: {rank: 8}", "unsloth"),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP", "accelerate"),
        ("model: x\ndata: y\nlora: {rank: 8}", None),
        ("model_name_or_path: x", None),
    ],
)
def test_the_tool_is_known_by_its_keys(text: str, tool: str | None) -> None:
    assert recognise(yaml.safe_load(text)) == tool


def test_files_that_are_no_runs_say_so(tmp_path: Path) -> None:
    assert (
        complaint(tmp_path, "distributed_type: FSDP\nmixed_precision: bf16\n")
        == "run.yaml:1:1: this is an accelerate launch file, not a run"
    )
    assert (
        complaint(tmp_path, "model: x\ndata: y\n")
        == "run.yaml: this is no run file of LLaMA-Factory, Axolotl, TRL or torchtune"
    )
    assert (
        complaint(tmp_path, "a: [1\n") == "run.yaml:2:1: this is not YAML: expected ',' or ']', but got '<stream end>'"
    )


LF_LORA = """\
model_name_or_path: org/base-8b
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: q_proj,v_proj
dataset: one,two
template: default
cutoff_len: 1001
per_device_train_batch_size: 2
gradient_accumulation_steps: 3
learning_rate: 2e-4
warmup_ratio: 0.1
lr_scheduler_type: cosine
bf16: true
"""


def test_llamafactory_lora(tmp_path: Path) -> None:
    found = foreign(tmp_path, LF_LORA)
    assert {
        "tool": "llamafactory", "model": "org/base-8b", "method": "lora", "micro_batch_size": 2, "accumulation": 3,
        "max_length": 1008, "lengths": Lengths(multiple=8), "autocast": True, "rank": 4, "targets": ("q_proj", "v_proj"),
        "foreach": False, "reentrant": True, "checkpointing": "full",
    } == said(found.run)  # fmt: skip
    assert {
        "model": "org/base-8b", "method": "lora", "lora.rank": 4, "lora.alpha": 8.0, "lora.dropout": 0.0,
        "lora.targets": ["q_proj", "v_proj"], "train.global_batch_size": 6, "train.max_length": 1001,
        "train.epochs": 3.0, "train.learning_rate": 2e-4, "train.warmup_steps": 0.1, "train.weight_decay": 0.0,
        "train.max_grad_norm": 1.0, "seed": 42,
    } == dict(found.wish)  # fmt: skip
    assert ("lr_scheduler_type", "dataset") == found.ignored
    assert 4 == config_of(found).lora.rank


def test_llamafactory_full_under_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    )
    text = (
        "model_name_or_path: m\nfinetuning_type: full\ndo_train: true\nbf16: true\nflash_attn: fa2\n"
        "enable_liger_kernel: true\noptim: adamw_bnb_8bit\nneat_packing: true\ndeepspeed: zero.json\n"
    )
    found = foreign(tmp_path, text, devices=4)
    assert {
        "tool": "llamafactory", "model": "m", "micro_batch_size": 8, "max_length": 2048, "packed": True,
        "optimizer_bits": 8, "foreach": False, "reentrant": True, "checkpointing": "full", "attention": "flash", "loss": "fused",
        "fused_kernels": True, "optimizer_on_host": True,
        "spread": Spread(data=4, shard_stage=2, shards=4, engine="deepspeed", overlaps=False, bucket=500_000_000),
    } == said(found.run)  # fmt: skip
    assert 32 == dict(found.wish)["train.global_batch_size"]


def test_llamafactory_deepspeed_file_that_is_not_there(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: m\nfinetuning_type: full\ndo_train: true\ndeepspeed: nowhere/ds_z3_offload_config.json\n"
    )
    found = foreign(tmp_path, text)
    assert Spread(data=2, shard_stage=3, shards=2, engine="deepspeed") == found.run.spread
    assert (True, True) == (found.run.optimizer_on_host, found.run.parameters_on_host)
    assert "the file does not say on how many devices it runs: 2 are assumed" in found.run.notes
    assert complaint(tmp_path, text.replace("ds_z3_offload_config", "mine")) == (
        "run.yaml:4:12: 'deepspeed' names 'nowhere/mine.json', which is not there, and its name does not tell the ZeRO stage"
    )


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("finetuning_type: full\npure_bf16: true", ("bfloat16", "bfloat16", False, 16)),
        ("finetuning_type: full\nbf16: true", ("float32", "bfloat16", True, 32)),
        ("finetuning_type: full\nfp16: true", ("float32", "float16", True, 32)),
        ("finetuning_type: full", ("float32", "float32", False, 32)),
        ("finetuning_type: lora\npure_bf16: true", ("float32", "bfloat16", False, 32)),
    ],
)
def test_llamafactory_types(tmp_path: Path, lines: str, expected: tuple[Any, ...]) -> None:
    run = foreign(tmp_path, f"model_name_or_path: m\ndo_train: true\n{lines}\n").run
    assert expected == (run.trained_dtype, run.compute_dtype, run.autocast, run.optimizer_bits)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("finetuning_type: full\nfp16: true", {"memory.precision": "fp16_mixed"}),
        ("finetuning_type: lora\nfp16: true", {"memory.precision": "fp16"}),
        ("finetuning_type: lora\nbf16: true\nupcast_layernorm: true", {"memory.fp32_islands": ["norms"]}),
        ("finetuning_type: lora\nbf16: true", {}),
    ],
)
def test_llamafactory_what_was_said_of_types_is_wished(tmp_path: Path, lines: str, expected: dict[str, Any]) -> None:
    """fp16 is no choice of a plan's: it comes from the file alone."""
    wish = dict(foreign(tmp_path, f"model_name_or_path: m\ndo_train: true\n{lines}\n").wish)
    assert expected == {key: value for key, value in wish.items() if key.startswith("memory.")}


def test_llamafactory_reads_the_file_behind_a_dataset_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.json").write_text("[]")
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"ours": {"file_name": "mine.json"}}))
    found = foreign(tmp_path, "model_name_or_path: m\nstage: sft\ndo_train: true\ndataset: ours\n")
    assert str(tmp_path / "data" / "mine.json") == dict(found.wish)["data"]
    assert () == found.ignored


def test_llamafactory_refuses_all_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    assert complaint(
        tmp_path, "model_name_or_path: m\nstage: dpo\ndo_train: true\nuse_apollo: true\ncutof_len: 9\n"
    ) == (
        "3 problems\n"
        "run.yaml:2:1: 'stage': dpo: preference and reinforcement training is not supervised fine-tuning\n"
        "run.yaml:4:1: 'use_apollo': gradients projected to a low rank are not expressed\n"
        "run.yaml:5:1: 'cutof_len': unknown to LLaMA-Factory (did you mean 'cutoff_len'?)"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cutoff_len: long", "'cutoff_len' must be a whole number of at least 1, not 'long'"),
        ("bf16: 3", "'bf16' must be true or false, not 3"),
        ("flash_attn: fa9", "'flash_attn' must be one of auto, sdpa, disabled, fa2, fa3, not 'fa9'"),
        ("lora_target: {a: 1}", "'lora_target' must be a list of names, not {'a': 1}"),
    ],
)
def test_a_wrong_value_is_told_where_it_stands(tmp_path: Path, line: str, message: str) -> None:
    place = f"run.yaml:4:{line.index(':') + 3}"
    assert complaint(tmp_path, f"model_name_or_path: m\nstage: sft\ndo_train: true\n{line}\n") == f"{place}: {message}"


def test_llamafactory_v1_full(tmp_path: Path) -> None:
    text = (
        "model: m\nmodel_class: llm\nmicro_batch_size: 2\nglobal_batch_size: 8\ntrain_dataset: d.yaml\nmax_steps: 5\n"
    )
    assert {
        "tool": "llamafactory", "model": "m", "micro_batch_size": 2, "max_length": 2048, "accumulation": 4,
        "compute_dtype": "float32", "checkpointing": "full", "lengths": Lengths(),
    } == said(foreign(tmp_path, text).run)  # fmt: skip
    sharded = foreign(tmp_path, f"{text}dist_config: {{name: fsdp2, offload_params: true}}\n", devices=4)
    assert {
        "tool": "llamafactory", "model": "m", "micro_batch_size": 2, "max_length": 2048, "checkpointing": "full",
        "optimizer_on_host": True, "parameters_on_host": True, "lengths": Lengths(),
        "spread": Spread(data=4, shard_stage=3, shards=4, engine="fsdp2"),
    } == said(sharded.run)  # fmt: skip
    assert 5 == dict(sharded.wish)["train.steps"]


def test_llamafactory_v1_packed_adapter(tmp_path: Path) -> None:
    text = (
        "model: m\nflash_attn: flash_attention_2\nbatching_strategy: padding_free\ncutoff_len: 64\n"
        "peft_config: {name: lora, r: 16, target_modules: all, use_dora: true}\nquant_config: {name: bnb, quantization_bit: 8}\n"
    )
    found = foreign(tmp_path, text)
    assert {
        "tool": "llamafactory", "model": "m", "method": "lora", "micro_batch_size": 1, "max_length": 64, "packed": True,
        "quantised": "int8", "rank": 16, "lora_dropout": 0.05, "dora": True, "checkpointing": "full",
        "attention": "flash",
    } == said(found.run)  # fmt: skip
    assert ("peft_config.use_dora", "train_dataset") == found.ignored
    assert ("qlora", 8) == (config_of(found).method, config_of(found).qlora.bits)


def test_llamafactory_v1_refuses(tmp_path: Path) -> None:
    text = "model: m\npeft_config:\n  name: freeze\ntrain_dataset: data/my_dpo.yaml\n"
    assert complaint(tmp_path, text) == (
        "2 problems\n"
        "run.yaml:3:3: 'peft_config.name': freeze: training some layers and freezing the rest is not expressed\n"
        "run.yaml:4:1: 'train_dataset': preference and reinforcement training is not supervised fine-tuning"
    )
    assert complaint(tmp_path, "model: m\npeft_config:\n  name: lora\n  lora_alhpa: 3\n") == (
        "run.yaml:4:3: 'peft_config.lora_alhpa': unknown to LLaMA-Factory\nhint: did you mean 'peft_config.lora_alpha'?"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base_model:\n", "run.yaml:1:12: 'base_model' names no model"),
        ("base_model: m\nseed: 2001-99-99\n", "run.yaml:2:7: '2001-99-99' is not a valid timestamp"),
        ("base_model: &m {again: *m}\n", "run.yaml:1:17: 'base_model.again' contains itself"),
        ("base_model: m\ndatasets: &d\n  - path: *d\n", "run.yaml:3:5: 'datasets.path' contains itself"),
        (
            "base_model: m\nseed: !!python/name:os.system\n",
            "run.yaml:2:7: the tag '!!python/name:os.system' makes no plain value",
        ),
        ("base_model: m\nseed: !mine {a: 1}\n", "run.yaml:2:7: the tag '!mine' makes no plain value"),
        ("base_model: m\n? [a, b]\n: 1\n", "run.yaml:2:3: a list cannot be a key"),
        ("!!set {base_model, stage}\n", "run.yaml:1:1: key: value lines are needed here"),
        (
            "base_model: m\nk0: &k0 [1]\n" + "".join(f"k{i}: &k{i} [{f'*k{i - 1},' * 9}]\n" for i in range(1, 9)),
            "run.yaml:7:1: this is too large for a run file",
        ),
    ],
)
def test_files_that_cannot_be_taken_in(tmp_path: Path, text: str, message: str) -> None:
    assert complaint(tmp_path, text).partition("\n")[0] == message


@pytest.mark.parametrize(
    "line", ["seed: !!python/name:os.system", "datasets: &d [*d]", "? [a, b]\n: 1", "seed: 2001-99-99", "<<: 3"]
)
def test_a_file_stays_another_tools_where_a_value_cannot_be_made(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"base_model: m\n{line}\n")
    assert is_foreign(path)
    path.write_text(f"model: m\n{line}\n")
    assert not is_foreign(path)


def test_a_key_that_stands_twice_is_told_as_the_tools_parser_has_it(tmp_path: Path) -> None:
    text = "model_name_or_path: m\nstage: sft\ndo_train: true\ncutoff_len: 64\ncutoff_len: 128\n"
    assert complaint(tmp_path, text) == "run.yaml:5:1: key 'cutoff_len' stands here twice\nhint: first at run.yaml:4:1"
    nested = TORCHTUNE.replace("  lora_rank: 8\n", "  lora_rank: 8\n  lora_rank: 16\n")
    assert complaint(tmp_path, nested) == (
        "run.yaml:8:3: key 'model.lora_rank' stands here twice\nhint: first at run.yaml:7:3"
    )
    found = foreign(tmp_path, "base_model: m\nsequence_len: 64\nsequence_len: 128\n")
    path = tmp_path / "run.yaml"
    assert 128 == found.run.max_length
    assert f"'sequence_len' stands twice, at {path}:2:1 and {path}:3:1: the last one counts there" in found.run.notes
    merged = "base: &b {path: d, type: alpaca}\nbase_model: m\ndatasets: [{<<: *b, path: e}, {<<: *b, path: f}]\n"
    assert not [note for note in foreign(tmp_path, merged).run.notes if "twice" in note]


AXOLOTL_QLORA = """\
base_model: org/base-8b
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
sequence_len: 4000
sample_packing: true
attn_implementation: flash_attention_2
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: paged_adamw_8bit
gradient_checkpointing: true
learning_rate: 0.0002
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
wandb_project:
tf32: true
"""


def test_axolotl_qlora(tmp_path: Path) -> None:
    found = foreign(tmp_path, AXOLOTL_QLORA)
    assert {
        "tool": "axolotl", "model": "org/base-8b", "method": "lora", "micro_batch_size": 2, "accumulation": 4,
        "max_length": 4032, "packed": True, "autocast": True, "quantised": "nf4_double", "rank": 32, "foreach": False,
        "optimizer_bits": 8, "paged": True, "reentrant": True, "checkpointing": "full", "attention": "flash", "loss": "fused",
        "fused_kernels": True,
    } == said(found.run)  # fmt: skip
    assert {
        "model": "org/base-8b", "method": "qlora", "qlora.bits": 4, "qlora.scales": "double", "lora.rank": 32, "lora.alpha": 16.0, "lora.dropout": 0.0,
        "lora.targets": "all", "train.global_batch_size": 8, "train.max_length": 4000, "train.epochs": 1.0,
        "train.learning_rate": 2e-4, "train.warmup_steps": 0.03, "train.weight_decay": 0.0, "train.max_grad_norm": 1.0,
        "seed": 42, "train.too_long": "drop", "train.optimizer": "adamw_8bit",
    } == dict(found.wish)  # fmt: skip
    assert ("tf32",) == found.ignored
    assert 8 == config_of(found).train.global_batch_size


def test_axolotl_full_without_flash_attention_raises_norms_and_embedding(tmp_path: Path) -> None:
    found = foreign(tmp_path, "base_model: m\nmicro_batch_size: 4\nbatch_size: 8\npad_to_sequence_len: false\n")
    assert {
        "tool": "axolotl", "model": "m", "micro_batch_size": 4, "accumulation": 2, "max_length": 512,
        "trained_dtype": "bfloat16", "autocast": True, "raised": "all", "foreach": False, "optimizer_bits": 16,
        "lengths": Lengths(over="dropped", multiple=64),
    } == said(found.run)  # fmt: skip


def test_axolotl_mesh(tmp_path: Path) -> None:
    text = (
        "base_model: m\nfsdp_version: 2\nfsdp_config: {offload_params: false, activation_checkpointing: true}\n"
        "dp_shard_size: 2\ndp_replicate_size: 2\ntensor_parallel_size: 2\ncontext_parallel_size: 2\nflash_attention: true\n"
    )
    found = foreign(tmp_path, text)
    assert {
        "tool": "axolotl", "model": "m", "micro_batch_size": 1, "max_length": 512, "autocast": True, "foreach": False,
        "checkpointing": "full", "attention": "flash",
        "spread": Spread(data=4, tensor=2, context=2, shard_stage=3, shards=4, engine="fsdp2", reduces="last"),
    } == said(found.run)  # fmt: skip
    assert 16 == found.run.spread.devices


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("adapter: lora\nlora_r: 8\ngradient_checkpointing: true\nactivation_offloading: true", ("none", True)),
        ("gradient_checkpointing: true\nactivation_offloading: legacy", ("full", True)),
        ("gradient_checkpointing: offload", ("full", True)),
        ("gradient_checkpointing: true\nselective_checkpointing: true", ("selective", False)),
        ("gradient_checkpointing: false", ("none", False)),
    ],
)
def test_axolotl_checkpointing(tmp_path: Path, lines: str, expected: tuple[str, bool]) -> None:
    run = foreign(tmp_path, f"base_model: m\n{lines}\n").run
    assert expected == (run.checkpointing, run.activations_on_host)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model.layers.[\\d]+.(mlp|self_attn).(gate|up|down|q|k|v|o)_proj", ()),
        ("model.language_model.layers.[\\d]+.self_attn.(q|v)_proj", ("q_proj", "v_proj")),
        ("all-linear", ()),
        ("q_proj", ("q_proj",)),
    ],
)
def test_one_text_of_targets_is_a_pattern(tmp_path: Path, pattern: str, expected: tuple[str, ...]) -> None:
    text = f"base_model: m\nadapter: lora\nlora_r: 8\nlora_target_modules: '{pattern}'\n"
    assert expected == foreign(tmp_path, text).run.targets


def test_axolotl_refuses(tmp_path: Path) -> None:
    text = (
        "base_model: m\nplugins:\n  - axolotl.integrations.diffusion.DiffusionPlugin\nunfrozen_parameters: [a]\nrl:\n"
    )
    assert complaint(tmp_path, text) == (
        "2 problems\n"
        "run.yaml:2:1: 'plugins': DiffusionPlugin: a diffusion language model is not expressed\n"
        "run.yaml:4:1: 'unfrozen_parameters': training some layers and freezing the rest is not expressed"
    )
    assert complaint(tmp_path, "base_model: m\ncontext_paralel_size: 2\n") == (
        "run.yaml:2:1: 'context_paralel_size': unknown to Axolotl\nhint: did you mean 'context_parallel_size'?"
    )
    assert complaint(tmp_path, "base_model: m\nload_in_4bit: true\n") == (
        "run.yaml:2:1: 'load_in_4bit': packed weights cannot be trained without an adapter; Axolotl refuses this too"
    )


def test_trl_defaults(tmp_path: Path) -> None:
    found = foreign(tmp_path, "model_name_or_path: m\ndataset_name: org/d\nreport_to: none\n")
    assert {
        "tool": "trl", "model": "m", "micro_batch_size": 8, "max_length": 1024, "lengths": Lengths(),
        "frozen_dtype": "float32",
        "autocast": True, "foreach": False, "checkpointing": "full", "loss": "fused", "loss_chunks": 32,
    } == said(found.run)  # fmt: skip
    assert {
        "model": "m", "method": "full", "train.global_batch_size": 8, "train.max_length": 1024, "train.epochs": 3.0,
        "train.learning_rate": 2e-5, "train.warmup_steps": 0.0, "train.weight_decay": 0.0, "train.max_grad_norm": 1.0,
        "seed": 42,
    } == dict(found.wish)  # fmt: skip
    assert ("report_to", "dataset_name") == found.ignored


def test_trl_qlora(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: org/llama\ndataset_name: d\nuse_peft: true\nload_in_4bit: true\ndtype: bfloat16\n"
        "packing: true\nattn_implementation: flash_attention_2\nuse_liger_kernel: true\nmax_grad_norm: 0\n"
        "gradient_checkpointing: false\nmax_length: null\n"
    )
    found = foreign(tmp_path, text)
    assert {
        "tool": "trl", "model": "org/llama", "method": "lora", "micro_batch_size": 8, "max_length": 2048,
        "packed": True, "trained_dtype": "bfloat16", "autocast": True, "quantised": "nf4", "rank": 16,
        "targets": ("q_proj", "v_proj"), "lora_dropout": 0.05, "foreach": False, "optimizer_bits": 16,
        "clipped": False, "attention": "flash", "loss": "fused", "fused_kernels": True,
    } == said(found.run)  # fmt: skip
    assert ("qlora", 4, "plain") == (
        config_of(found).method,
        config_of(found).qlora.bits,
        config_of(found).qlora.scales,
    )
    assert "max_length is null, rows are as long as the longest example: 2048 is assumed" in found.run.notes


def test_trl_launch_and_packing_without_flash(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndatasets: [{path: d}]\naccelerate_config: zero3\npacking: true\nloss_type: nll\n"
    found = foreign(tmp_path, text)
    assert {
        "tool": "trl", "model": "m", "micro_batch_size": 8, "max_length": 1024, "frozen_dtype": "float32",
        "foreach": False, "checkpointing": "full",
        "spread": Spread(data=8, shard_stage=3, shards=8, engine="deepspeed"),
    } == said(found.run)  # fmt: skip
    assert "packed rows without flash attention: transformers builds the mask between examples" in found.run.notes
    assert 2 == foreign(tmp_path, text, devices=2).run.spread.shards


def test_trl_fsdp_of_the_trainer(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\nfsdp: shard_grad_op auto_wrap\nfsdp_config: {fsdp_version: 1}\n"
    assert Spread(data=2, shard_stage=2, shards=2, engine="fsdp1", reduces="last") == foreign(tmp_path, text).run.spread
    efficient = text.replace("_version: 1", "_version: 1, fsdp_cpu_ram_efficient_loading: true")
    assert ["", "first", ""] == [
        foreign(tmp_path, one).run.load for one in (text, efficient, efficient.replace("n: 1", "n: 2"))
    ]  # fmt: skip


def test_trl_refuses_other_trainers(tmp_path: Path) -> None:
    assert complaint(tmp_path, "model_name_or_path: m\ndataset_name: d\nbeta: 0.1\noptim: galore_adafactor\n") == (
        "2 problems\n"
        "run.yaml:3:1: 'beta': a key of another TRL trainer; only trl sft can be read\n"
        "run.yaml:4:1: 'optim': the optimizer galore_adafactor projects gradients to a low rank, "
        "which a simulated step cannot express"
    )
    assert complaint(tmp_path, "model_name_or_path: m\ndataset_name: d\nmax_lenght: 4\n") == (
        "run.yaml:3:1: 'max_lenght': unknown to TRL\nhint: did you mean 'max_length'?"
    )


TORCHTUNE = """\
# tune run --nnodes 1 --nproc_per_node 4 lora_finetune_distributed --config mine
output_dir: /tmp/out
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: True
  lora_rank: 8
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 512
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: True
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
batch_size: 2
batch_size_val: ${batch_size}
gradient_accumulation_steps: 8
epochs: 1
dtype: bf16
metric_logger:
  log_dir: ${output_dir}/logs
"""


def test_torchtune_lora(tmp_path: Path) -> None:
    found = foreign(tmp_path, TORCHTUNE)
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj")
    assert {
        "tool": "torchtune", "model": "meta-llama/Llama-3.1-8B-Instruct", "method": "lora", "micro_batch_size": 2,
        "accumulation": 8, "max_length": 512, "packed": True, "trained_dtype": "bfloat16", "rank": 8,
        "targets": targets, "optimizer_bits": 16, "foreach": False, "clipped": False, "attention": "flash",
        "loss": "chunked", "spread": Spread(data=4, shard_stage=3, shards=4, engine="fsdp2"),
    } == said(found.run)  # fmt: skip
    assert {
        "model": "meta-llama/Llama-3.1-8B-Instruct", "method": "lora", "lora.rank": 8, "lora.alpha": 16.0,
        "lora.dropout": 0.0, "lora.targets": list(targets), "train.global_batch_size": 64, "train.max_length": 512,
        "train.epochs": 1.0, "train.learning_rate": 3e-4, "train.warmup_steps": 0, "train.weight_decay": 0.01,
        "train.max_grad_norm": 0.0, "train.order": "shuffled", "output_dir": "/tmp/out",
    } == dict(found.wish)  # fmt: skip
    assert ("batch_size_val", "metric_logger", "dataset") == found.ignored
    assert config_of(found).train.max_length == 512


def test_torchtune_full_on_one_device(tmp_path: Path) -> None:
    text = """\
# tune run full_finetune_single_device --config mine
model: {_component_: torchtune.models.qwen2_5.qwen2_5_1_5b_instruct}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 2e-5}
loss: {_component_: torch.nn.CrossEntropyLoss}
optimizer_in_bwd: True
enable_activation_checkpointing: True
batch_size: ${size.rows}
size: {rows: 3}
"""
    found = foreign(tmp_path, text, devices=2)
    assert {
        "tool": "torchtune", "model": "Qwen/Qwen2.5-1.5B-Instruct", "micro_batch_size": 3, "max_length": 2048,
        "trained_dtype": "bfloat16", "optimizer_bits": 8, "foreach": False, "paged": True, "step_in_backward": True,
        "clipped": False, "checkpointing": "full", "attention": "flash", "lengths": Lengths(),
    } == said(found.run)  # fmt: skip


@pytest.mark.parametrize(
    ("builder", "hub_id", "packs"),
    [
        ("llama3_2.qlora_llama3_2_1b", "meta-llama/Llama-3.2-1B-Instruct", True),
        ("llama2.llama2_70b", "meta-llama/Llama-2-70b-hf", False),
        ("qwen2.qwen2_0_5b", "Qwen/Qwen2-0.5B-Instruct", False),
        ("qwen2_5.lora_qwen2_5_7b_base", "Qwen/Qwen2.5-7B", False),
        ("qwen3.qwen3_0_6b_instruct", "Qwen/Qwen3-0.6B", False),
        ("qwen3.lora_qwen3_8b_base", "Qwen/Qwen3-8B-Base", False),
        ("gemma2.gemma2_27b", "google/gemma-2-27b", False),
        ("phi4.phi4_14b", "microsoft/phi-4", False),
    ],
)
def test_torchtune_builders(tmp_path: Path, builder: str, hub_id: str, packs: bool) -> None:
    text = TORCHTUNE.replace("llama3_1.lora_llama3_1_8b", builder)
    run = foreign(tmp_path, text).run
    assert (hub_id, "nf4_double" if packs else "") == (run.model, run.quantised)


def test_torchtune_refuses(tmp_path: Path) -> None:
    assert complaint(tmp_path, TORCHTUNE + "quantizer:\n  _component_: a.b\n") == (
        "run.yaml:27:1: 'quantizer': quantisation-aware training is not expressed"
    )
    assert complaint(tmp_path, TORCHTUNE.replace("LinearCrossEntropyLoss", "DPOLoss")) == (
        "run.yaml:18:1: 'loss': DPOLoss: preference and reinforcement training is not supervised fine-tuning"
    )
    assert complaint(tmp_path, TORCHTUNE.replace("lora_rank", "lora_rnak")) == (
        "run.yaml:7:3: 'model.lora_rnak': unknown to torchtune\nhint: did you mean 'model.lora_rank'?"
    )
    assert complaint(tmp_path, TORCHTUNE.replace("${batch_size}", "${rows}")) == (
        "run.yaml:21:17: 'batch_size_val' refers to 'rows', which is not in this file"
    )
    assert complaint(tmp_path, "model: {_component_: torchtune.models.llama2.llama2_7b}\n") == (
        "run.yaml:1:1: 'model': a file without 'loss' trains nothing"
    )


def test_devices_that_a_mesh_cannot_fill(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("base_model: m\ntensor_parallel_size: 2\n")
    with pytest.raises(ConfigError, match="3 devices cannot be divided into groups of 2"):
        read(path, devices=3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model_name_or_path: m\ndataset_name: d\noptim: galore_adamw_8bit\noptim_args: rank=64, scale=0.1\n",
            ("galore_adamw", 8, 64, False),
        ),
        (
            "model_name_or_path: m\ndataset_name: d\noptim: galore_adamw_layerwise\noptim_target_modules: all-linear\n",
            ("galore_adamw", 32, 128, True),
        ),
        (
            "model_name_or_path: m\nstage: sft\ndo_train: true\nfinetuning_type: full\nuse_galore: true\npure_bf16: true\n",
            ("galore_adamw", 16, 16, False),
        ),
    ],
)
def test_galore(tmp_path: Path, text: str, expected: tuple[str, int, int, bool]) -> None:
    found = foreign(tmp_path, text)
    run = found.run
    assert expected == (run.optimizer, run.optimizer_bits, run.rank, run.step_in_backward)
    assert f"GaLore projects the linear layers of attention and MLP to rank {run.rank}" in run.notes
    assert found.ignored[0] in ("optim", "use_galore")


def test_galore_of_adapters_is_refused(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\nuse_peft: true\noptim: galore_adamw\n"
    assert complaint(tmp_path, text) == (
        "run.yaml:4:1: 'optim': a low-rank space of adapters' gradients is not expressed\nhint: train whole weights with it"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LF_LORA + "fp16: true\n", "16:1: 'fp16': bf16 and fp16 are both on; transformers refuses this too"),
        (
            LF_LORA.replace("batch_size: 2", f"batch_size: {10**15}"),
            "10:30: 'per_device_train_batch_size' must be at most 16,384, not 1000000000000000",
        ),
        (
            LF_LORA.replace("1001", f"{10**12}"),
            "9:13: 'cutoff_len' must be at most 16,777,216, not 1000000000000",
        ),
        (
            LF_LORA.replace("1001", "4000000").replace("batch_size: 2", "batch_size: 1000"),
            "9:13: 'cutoff_len': 1,000 rows of 4,000,000 tokens are more than a step can have",
        ),
        (LF_LORA.replace("lora_rank: 4", f"lora_rank: {10**400}"), None),
        (LF_LORA + "lora_dropout: 2\n", "16:15: 'lora_dropout' must be from 0 to 1, not 2"),
        (LF_LORA.replace("one,two", "5"), "7:10: 'dataset' must be a list of names, not 5"),
        ("base_model: m\ndatasets: 5\n", "2:11: 'datasets' must be a list of sections, not 5"),
        (
            "base_model: m\nadapter: qlora\nlora_r: 8\nload_in_4bit: true\nload_in_8bit: true\n",
            "5:1: 'load_in_8bit': qlora packs in 4 bits; Axolotl refuses this too",
        ),
        (
            "model_name_or_path: m\ndatasets: 5\n",
            "2:11: 'datasets' must be a list of sections, not 5",
        ),
        (
            "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nload_in_4bit: true\nload_in_8bit: true\n",
            "5:1: 'load_in_8bit': weights in 4 and in 8 bits at once; TRL refuses this too",
        ),
        (
            TORCHTUNE.replace("  _component_: torchtune.models.llama3_1.lora_llama3_1_8b\n", ""),
            "3:1: 'model': names no _component_; torchtune refuses this too",
        ),
        (
            TORCHTUNE.replace("  _component_: torch.optim.AdamW\n", ""),
            "14:1: 'optimizer': names no _component_; torchtune refuses this too",
        ),
        (
            TORCHTUNE.replace("[q_proj, v_proj, output_proj]", "[q_proj, w_proj]"),
            "5:3: 'model.lora_attn_modules': q_proj, w_proj: one or more of q_proj, k_proj, v_proj, output_proj are needed",
        ),
        (
            TORCHTUNE.replace("[q_proj, v_proj, output_proj]", "[]"),
            "5:3: 'model.lora_attn_modules': nothing: one or more of q_proj, k_proj, v_proj, output_proj are needed",
        ),
    ],
)
def test_what_the_tools_refuse_is_refused(tmp_path: Path, text: str, message: str | None) -> None:
    said = complaint(tmp_path, text).partition("\n")[0]
    assert f"run.yaml:{message}" == said if message else said.startswith("run.yaml:5:12: 'lora_rank' must be")


def test_axolotl_takes_bf16_where_both_are_on(tmp_path: Path) -> None:
    run = foreign(tmp_path, "base_model: m\nbf16: true\nfp16: true\n").run
    assert ("bfloat16", True) == (run.compute_dtype, run.autocast)
    assert "bf16 and fp16 are both on: Axolotl takes bf16" in run.notes


def test_numbers_of_files_beside_the_run_file_are_read_with_care(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\noptim: galore_adamw\noptim_args: {rank: x}\n"
    assert complaint(tmp_path, text) == (
        "run.yaml:4:20: 'optim_args.rank' must be a whole number of at least 1, not 'x'"
    )
    zero = "{zero_optimization: {stage: 2, reduce_bucket_size: .inf}, tensor_parallel: {autotp_size: x}}"
    found = foreign(tmp_path, f"model_name_or_path: m\ndataset_name: d\ndeepspeed: {zero}\n").run.spread
    assert (-1, 1) == (found.bucket, found.tensor)


@pytest.mark.parametrize(
    ("words", "ours", "lost"),
    [
        ("optim: paged_adamw_8bit", "adamw_8bit", ()),
        ("optim: adamw_torch_4bit", "adamw_4bit", ()),
        ("optim: lion_32bit", "lion", ()),
        ("optim: paged_lion_8bit", "lion_8bit", ()),
        ("optim: adafactor", "adafactor", ()),
        ("optim: sgd", "sgd", ()),
        ("optim: adamw_torch", None, ()),
        ("optim: adagrad", None, ("optim",)),
        ("optim: schedule_free_adamw", None, ("optim",)),
        ("optim: galore_adamw_8bit", None, ("optim",)),
    ],
)
def test_an_optimizer_is_taken_over_where_it_is_the_same(
    tmp_path: Path, words: str, ours: str | None, lost: tuple[str, ...]
) -> None:
    found = foreign(tmp_path, f"model_name_or_path: m\ndataset_name: d\n{words}\n")
    assert dict(found.wish).get("train.optimizer") == ours
    assert tuple(key for key in found.ignored if key == "optim") == lost


def test_momentum_of_sgd_is_not_taken_over(tmp_path: Path) -> None:
    text = TORCHTUNE.replace("torch.optim.AdamW", "torch.optim.SGD")
    plain = foreign(tmp_path, text)
    assert dict(plain.wish)["train.optimizer"] == "sgd"
    found = foreign(tmp_path, text.replace("torch.optim.SGD", "torch.optim.SGD\n  momentum: 0.9"))
    assert "train.optimizer" not in dict(found.wish)
    assert "optimizer.momentum" in found.ignored
