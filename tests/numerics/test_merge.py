"""A merged model against peft's own merge of the same adapter, and what is refused rather than merged wrongly."""

import json
import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finefit import merge, phases
from finefit.errors import CheckpointError, ConfigError, FinefitError, ModelError
from tiny import family_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEPS = {"float32": 2**-20, "bfloat16": 2**-8, "float16": 2**-11}  # half of the last place, or fp32's sums


@pytest.fixture(autouse=True)
def untokenised(monkeypatch):
    """A tiny model has no tokenizer; the command's own test has one."""
    monkeypatch.setattr(merge, "tokenizer_of", lambda *_: None)
    monkeypatch.setattr(merge, "read_tokenizer", lambda *_: None)
    monkeypatch.setattr(merge, "save_tokenizer", lambda *_: None)


def base_in(folder, family="llama", dtype="bfloat16", shard="1GB"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family)).to(DTYPES[dtype])
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def adapter_in(folder, base, **settings):
    """peft's own adapter of the base, its B drawn so that it changes something."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", **settings}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return folder


def pefts(base, adapter):
    """peft's merge in fp32 of the base as it is stored, as tensors by name."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


def tensors_of(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama with biases", {"use_rslora": True}),
        ("gpt2", {"fan_in_fan_out": True}),
        ("exaone", {}),
        ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
        ("phi3", {"target_modules": ["qkv_proj"]}),
        ("gemma2", {"r": 1, "rank_pattern": {"q_proj": 8}, "lora_alpha": 0.5}),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_is_pefts_merge_rounded_once(tmp_path, family, settings, dtype):
    base = base_in(tmp_path / "base", family, dtype)
    adapter = adapter_in(tmp_path / "adapter", base, **settings)
    done = merge.merge(adapter, tmp_path / "merged")
    found, stored, exact = tensors_of(done.folder), tensors_of(base), pefts(base, adapter)
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in stored.items()}
    changed = [name for name in found if not torch.equal(found[name], stored[name])]
    assert len(changed) == done.adapted > 0 and done.tensors == len(stored)
    model = AutoModelForCausalLM.from_pretrained(done.folder, dtype="auto")
    assert model.dtype is DTYPES[dtype]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor.float(), exact[name], rtol=STEPS[dtype], atol=1e-6)


def test_rounding_is_told_and_another_type_has_none(tmp_path):
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    rounded, exact = (merge.merge(adapter, tmp_path / word, dtype=word) for word in ("bfloat16", "float32"))
    found, stored, whole = (tensors_of(folder) for folder in (rounded.folder, base, exact.folder))
    updates = {name: whole[name] - stored[name].float() for name in whole}
    lost = sum(float((whole[name] - found[name].float()).norm() ** 2) for name in whole)
    share = (lost / sum(float(update.norm() ** 2) for update in updates.values())) ** 0.5
    assert rounded.rounding == pytest.approx(share, rel=1e-3) and exact.rounding == 0.0 and not exact.minds()
    assert json.loads((exact.folder / "config.json").read_text())["dtype"] == "float32"
    assert {t.dtype for t in whole.values()} == {torch.float32}


def test_what_is_beyond_a_type_is_refused(tmp_path):
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    stored = load_file(base / "model.safetensors")
    stored["model.norm.weight"] *= 1e6
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has numbers beyond the range of torch\.float16"):
        merge.merge(adapter, dtype="float16")
    assert not (adapter / "merged").exists() and merge.merge(adapter).adapted == 21


def test_a_base_in_several_files_stays_so(tmp_path):
    base = base_in(tmp_path / "base", shard="60KB")
    adapter = adapter_in(tmp_path / "adapter", base)
    done = merge.merge(adapter)
    assert done.folder == adapter / "merged"
    names = {path.name for path in base.glob("*.safetensors*")}
    assert names == {path.name for path in done.folder.glob("*.safetensors*")} and len(names) > 2
    model = AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.float32).state_dict()
    exact = pefts(base, adapter)
    assert all(torch.allclose(model[name], exact[name], rtol=2**-8, atol=1e-6) for name in exact)


def test_pieces_are_what_is_held(tmp_path, monkeypatch):
    """Bytes at once: the weight's piece and its update in fp32, their sum in the file's type, one norm."""
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    monkeypatch.setattr(phases, "_PIECE", 960)  # 10 rows of 96: not a divisor of 64
    whole = merge.merge(adapter, tmp_path / "pieces")
    assert whole.seen.device == {"temporary": 15 * 64 * (4 + 4 + 2) + 4}
    monkeypatch.setattr(phases, "_PIECE", 2**22)
    again = merge.merge(adapter, tmp_path / "whole")
    assert again.seen.device == {"temporary": 96 * 64 * (4 + 4 + 2) + 4}
    one, other = tensors_of(whole.folder), tensors_of(again.folder)
    assert all(torch.allclose(one[name].float(), other[name].float(), rtol=2**-7) for name in one)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"use_dora": True}, "use_dora is set"),
        ({"bias": "all"}, "bias is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is set"),
        ({"peft_type": "IA3"}, "it is IA3 of rank 4"),
        ({"r": 0}, "it is LORA of rank 0"),
        ({"r": 8}, "has rank 4, the adapter's config says 8"),
        ({"lora_alpha": 0}, "it is LORA of rank 4 and alpha 0"),
        ({"lora_alpha": float("nan")}, "it is LORA of rank 4 and alpha nan"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is set"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is set"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
        ({"something_of_next_year": True}, "something_of_next_year is set"),
        ({"r": "four"}, "not the config of a LoRA adapter: ValueError"),
        ({"lora_alpha": "loud"}, "not the config of a LoRA adapter: ValueError"),
        ({"lora_alpha": None}, "not the config of a LoRA adapter: TypeError"),
        ({"base_model_name_or_path": None}, "the adapter does not say its base"),
        ({"base_model_name_or_path": "no/where"}, "no/where"),
    ],
)
def test_an_adapter_that_is_more_is_refused(tmp_path, settings, expected):
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(FinefitError, match=expected):
        merge.merge(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal"])
def test_ways_to_begin_that_leave_the_base_are_merged(tmp_path, init):
    base = base_in(tmp_path / "base", dtype="float32")
    adapter = adapter_in(tmp_path / "adapter", base, init_lora_weights=init)
    done, exact = merge.merge(adapter, tmp_path / "merged"), pefts(base, adapter)
    for name, tensor in tensors_of(done.folder).items():
        torch.testing.assert_close(tensor, exact[name], rtol=2**-20, atol=1e-6)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("config.json", "{", "invalid JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("model.safetensors.index.json", "{", "invalid JSON"),
        ("model.safetensors.index.json", "{}", "there is no weight_map in it"),
        ("model.safetensors", "not tensors", "model.safetensors"),
    ],
)
def test_a_damaged_base_is_one_message(tmp_path, file, content, expected):
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    (base / file).write_text(content)
    with pytest.raises(FinefitError, match=expected):
        merge.merge(adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_the_room_is_asked_for_by_the_type_that_is_written(tmp_path, monkeypatch):
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    stored = sum(t.numel() for t in tensors_of(base).values())
    monkeypatch.setattr(merge.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 3 * stored}))
    with pytest.raises(CheckpointError, match="the merged model takes"):
        merge.merge(adapter, tmp_path / "wide", dtype="fp32")
    done = merge.merge(adapter, tmp_path / "merged", dtype="bf16")
    assert done.n_bytes == 2 * stored


def test_what_a_killed_merge_left_is_removed_by_the_next(tmp_path):
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    dead, mine = tmp_path / ".merged.2000000000.tmp", tmp_path / f".merged.{os.getppid()}.tmp"
    for folder in (dead, mine):
        folder.mkdir()
    merge.merge(adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine.name, "adapter", "base", "merged"]


def spoiled(adapter, change):
    tensors = change(load_file(adapter / "adapter_model.safetensors"))
    save_file(tensors, adapter / "adapter_model.safetensors")


FIRST = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "error", "expected"),
    [
        (lambda t: {n: x * 0 for n, x in t.items()}, CheckpointError, "changes nothing"),
        (lambda t: {n: x * float("nan") for n, x in t.items()}, CheckpointError, "is not a number"),
        (
            lambda t: {n: x for n, x in t.items() if n != FIRST.format("A")},
            CheckpointError,
            "up_proj has no pair of A and B",
        ),
        (lambda t: {**t, "base_model.model.lm_head.weight": torch.ones(2)}, CheckpointError, "neither an A nor a B"),
        (
            lambda t: {**t, FIRST.format("A"): torch.ones(4, 3)},
            ModelError,
            "is of another model: model.layers.0.mlp.up_proj",
        ),
        (
            lambda t: {**t, **{f"base_model.model.other.lora_{h}.weight": torch.ones(4, 4) for h in "AB"}},
            ModelError,
            "other.weight, which the adapter changes, is not in the base",
        ),
        (lambda t: {}, CheckpointError, "it is empty"),
    ],
)
def test_tensors_that_do_not_belong_are_named_and_nothing_is_left(tmp_path, change, error, expected):
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    spoiled(adapter, change)
    with pytest.raises(error, match=expected):
        merge.merge(adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_nothing_is_written_over(tmp_path):
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    merge.merge(adapter)
    with pytest.raises(ConfigError, match="there is something already"):
        merge.merge(adapter)
    with pytest.raises(ConfigError, match="there is something already"):
        merge.merge(adapter, base)


def test_a_path_that_means_another_folder_once_it_is_made(tmp_path, monkeypatch):
    """new/.. is nowhere before new is made, and then it is the folder that has everything in it."""
    base = base_in(tmp_path / "base")
    adapter_in(tmp_path / "adapter", base)
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "mine").write_text("kept")
    monkeypatch.chdir(tmp_path)
    for name in ("new/..", ".", "..", "", "new/../adapter"):
        with pytest.raises(ConfigError, match="there is something already"):
            merge.merge(Path("adapter"), Path(name))
    (tmp_path / "empty").mkdir()
    for name in ("new/../out", "empty"):
        assert merge.merge(Path("adapter"), Path(name)).adapted == 21
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.tmp", "adapter", "base", "empty", "out"]
    assert (tmp_path / ".out.tmp" / "mine").read_text() == "kept"


def test_a_folder_that_comes_while_it_is_written_stays(tmp_path):
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)

    def somebody(_file):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("kept")

    with pytest.raises(CheckpointError, match="was not written"):
        merge.merge(adapter, tmp_path / "out", tell=somebody)
    assert (tmp_path / "out" / "theirs").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


def test_a_folder_without_an_adapter(tmp_path):
    base = base_in(tmp_path / "base")
    with pytest.raises(CheckpointError, match="all of the model was trained") as told:
        merge.merge(base)
    assert told.value.hint == "it is a plain model folder already"
    with pytest.raises(CheckpointError, match="there is no adapter here"):
        merge.merge(tmp_path)
