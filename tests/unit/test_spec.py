"""ModelSpec from configs and folders, JobSpec, resolve_model, and the JSON of all three specs."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from finefit.catalog import derived
from finefit.errors import ModelError
from finefit.spec import HardwareSpec, JobSpec, ModelSpec, Parameter, resolve_model

TINY = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": -8, "n_layer": 2, "n_head": 2, "vocab_size": 32}
MIXTURE = {
    **TINY, "model_type": "deepseek_v3", "q_lora_rank": None, "kv_lora_rank": 4, "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2, "v_head_dim": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 4, "first_k_dense_replace": 1,
}  # fmt: skip


def folder_with(
    path: Path, config: dict, tensors: dict[str, tuple[int, ...]] | None = None, dtype: str = "BF16"
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        header = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return path


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in spec.parameters()}


def test_import_brings_no_torch_and_reads_no_data_file():
    code = (
        "import sys, finefit.spec, finefit.catalog.data as data; "
        "print([m for m in ('torch', 'pydantic', 'psutil', 'pynvml', 'huggingface_hub') if m in sys.modules], "
        "data.read_data.cache_info().misses)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] 0\n"


def test_block_and_outer_parameters_of_a_tiny_llama_by_hand():
    spec = ModelSpec.from_config(TINY, "tiny")
    assert (
        Parameter("self_attn.q_proj.weight", (8, 8), "linear"),
        Parameter("self_attn.k_proj.weight", (4, 8), "linear"),
        Parameter("self_attn.v_proj.weight", (4, 8), "linear"),
        Parameter("self_attn.o_proj.weight", (8, 8), "linear"),
        Parameter("mlp.gate_proj.weight", (16, 8), "linear"),
        Parameter("mlp.up_proj.weight", (16, 8), "linear"),
        Parameter("mlp.down_proj.weight", (8, 16), "linear"),
        Parameter("input_layernorm.weight", (8,), "norm"),
        Parameter("post_attention_layernorm.weight", (8,), "norm"),
    ) == spec.block_parameters()
    assert [p.name for p in spec.outer_parameters()] == ["model.embed_tokens.weight", "model.norm.weight"]
    assert spec.num_parameters == 2 * (64 + 32 + 32 + 64 + 3 * 128 + 16) + 32 * 8 + 8
    assert spec.num_parameters == sum(p.numel for p in spec.parameters())
    assert spec.symbols() == {"h": 8, "q": 8, "k": 4, "f": 16, "n": 2, "m": 1, "d": 4, "V": 32}
    assert [p.short_name for p in spec.linears()] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]


def test_an_untied_head_is_listed_and_counted():
    tied, untied = (ModelSpec.from_config({**TINY, "tie_word_embeddings": tie}, "tiny") for tie in (True, False))
    assert Parameter("lm_head.weight", (32, 8), "head") == untied.outer_parameters()[-1]
    assert untied.num_parameters - tied.num_parameters == 32 * 8


def test_json_both_ways():
    for config in (TINY, MIXTURE):
        spec = ModelSpec.from_config(config, "tiny").with_note("a note")
        assert spec == ModelSpec.from_json(json.loads(json.dumps(spec.to_json())))
    gpu = HardwareSpec.from_name("2x RTX 4090")
    assert gpu == HardwareSpec.from_json(json.loads(json.dumps(gpu.to_json())))
    job = JobSpec(targets=("q_proj",), lengths=(3, 5), pins=(("checkpointing", "10"),))
    assert job == JobSpec.from_json(json.loads(json.dumps(job.to_json())))
    assert (job.pin("checkpointing"), job.pin("packing")) == ("10", None)


def test_defaults_of_families_fill_what_hub_configs_leave_out():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    spec = ModelSpec.from_config(
        {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {**text, "sliding_window": 1024}}, "gemma"
    )
    assert (
        spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.vocab_size,
    ) == (8, 4, 256, 262_208)  # fmt: skip
    assert (
        spec.family, spec.tie_word_embeddings, spec.dtype, spec.sliding_window,
    ) == ("gemma3_text", True, "bfloat16", 1024)  # fmt: skip
    assert spec.notes == ("multimodal model: only its text part is planned",)


@pytest.mark.parametrize(
    ("family", "keys", "window"),
    [
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 4096}, None),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True}, 4096),
        ("phi3", {"sliding_window": 2047}, 2047),
        ("llama", {}, None),
    ],
)
def test_sliding_window_as_transformers_reads_it(family, keys, window):
    assert window == ModelSpec.from_config({**TINY, "model_type": family, **keys}, "m").sliding_window


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setattr(derived, "_can_build", lambda: False)


def test_an_unknown_family_with_the_same_keys_is_read_as_llama_without_torch_and_says_so(without_torch):
    spec = ModelSpec.from_config({**TINY, "model_type": "newcomer", "qkv_bias": True}, "m")
    assert spec.notes == ("family 'newcomer' is not verified: read as llama-shaped",)
    assert (spec.family, spec.attention_bias) == ("newcomer", True)


def test_a_family_transformers_does_not_know_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config({**TINY, "model_type": "llamma"}, "m")
    assert caught.value.message == "transformers does not know the architecture 'llamma'"
    assert caught.value.hint == "did you mean 'llama'?"


def test_a_family_without_a_template_is_built_once_and_kept(tmp_path, monkeypatch):
    """transformers' own list of tensors is the spec's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {"model_type": "codegen", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40, "rotary_dim": 4,
              "dtype": "float32"}  # fmt: skip
    spec = ModelSpec.from_config(config, "m")
    assert (spec.hidden_size, spec.intermediate_size, spec.num_attention_heads, spec.head_dim) == (32, 128, 4, 8)
    assert [(kind.name, kind.layers) for kind in spec.block_kinds()] == [("dense", (0, 1))]
    assert spec.parameters()[0] == Parameter("transformer.wte.weight", (40, 32), "embedding")
    assert Parameter("attn.qkv_proj.weight", (96, 32), "linear") in spec.block_parameters()
    assert len(spec.notes) == 1 and "is not catalogued: its tensors are those transformers" in spec.notes[0]
    monkeypatch.setattr("subprocess.run", None)  # the second time comes from the cache
    assert spec == ModelSpec.from_config(config, "m")


def test_a_mixture_without_a_template_has_its_experts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {**TINY, "model_type": "qwen3_next", "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
              "moe_intermediate_size": 4, "shared_expert_intermediate_size": 4, "linear_num_value_heads": 2,
              "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
              "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    spec = ModelSpec.from_config(config, "m")
    assert [kind.name for kind in spec.block_kinds()] == ["moe", "moe 2"]
    assert (spec.num_experts, spec.experts_per_token, spec.moe_intermediate_size) == (4, 2, 4)
    assert spec.num_parameters - spec.active_parameters == 2 * 2 * 3 * 4 * 8
    assert spec.num_parameters == sum(p.numel for p in spec.parameters())
    assert spec == ModelSpec.from_json(json.loads(json.dumps(spec.to_json())))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "gpt2", "n_embd": 768, "vocab_size": 50257}, "lacks n_layer, n_head"),
        ({"model_type": "llama", "vocab_size": 1}, "lacks hidden_size, intermediate_size, num_hidden_layers, num_att"),
        ({"hidden_size": 8}, "no model_type"),
        ({**TINY, "model_type": ["llama"]}, "no model_type"),
        ({**TINY, "hidden_size": "8"}, "hidden_size must be a positive whole number, not '8'"),
        ({**TINY, "hidden_size": 8.0}, "hidden_size must be a positive whole number, not 8.0"),
        ({**TINY, "hidden_size": -8}, "hidden_size must be a positive whole number, not -8"),
        ({**TINY, "hidden_size": True}, "hidden_size must be a positive whole number, not True"),
        ({**TINY, "vocab_size": float("nan")}, "vocab_size must be a positive whole number, not nan"),
        ({**TINY, "num_attention_heads": 0}, "num_attention_heads must be a positive whole number, not 0"),
        ({**TINY, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than any model has"),
        ({**TINY, "vocab_size": 10**5000}, "vocab_size is about 10^5000, more than any model has"),
        ({**TINY, "num_attention_heads": 3}, "hidden_size 8 cannot be divided among 3 attention heads"),
        ({**TINY, "num_key_value_heads": 4}, "2 attention heads cannot share 4 key/value heads"),
        ({**TINY, "num_attention_heads": 8, "num_key_value_heads": 3}, "8 attention heads cannot share 3 key/value"),
        ({**TINY, "model_type": "phi", "head_dim": 3}, "2 heads of head_dim 3 contradict hidden_size 8"),
        ({**TINY, "attention_bias": "no"}, "attention_bias must be true or false, not 'no'"),
        ({**TINY, "tie_word_embeddings": [1]}, "tie_word_embeddings must be true or false, not [1]"),
        (
            {**TINY, "model_type": "gemma2", "final_logit_softcapping": "30"},
            "final_logit_softcapping must be a positive",
        ),
        ({**TINY, "model_type": "mistral", "sliding_window": "all"}, "sliding_window must be a whole number from 0 on"),
        ({**TINY, "text_config": "llama"}, "text_config must be an object"),
        ({"model_type": "x", "text_config": {"text_config": TINY}}, "text_config must be an object"),
        ({**MIXTURE, "num_experts_per_tok": 5}, "5 experts a token, but there are 4"),
        ({**MIXTURE, "n_routed_experts": 0}, "n_routed_experts must be a positive whole number, not 0"),
        ({**MIXTURE, "model_type": "mixtral", "num_local_experts": -8}, "num_local_experts must be a positive whole"),
        (GPT2, "n_embd must be a positive whole number, not -8"),
        ({**GPT2, "n_embd": 9}, "n_embd 9 cannot be divided among 2 attention heads"),
        ({**TINY, "hidden_act": "silly"}, "hidden_act 'silly' is no activation that transformers knows"),
        ({**TINY, "hidden_act": ["silu"]}, "hidden_act ['silu'] is no activation"),
        ({**GPT2, "n_embd": 8, "activation_function": "gelly"}, "activation_function 'gelly' is no activation"),
        ({**TINY, "dtype": "float7"}, "dtype 'float7' is no type that torch knows"),
        ({**TINY, "dtype": None, "torch_dtype": 16}, "torch_dtype 16 is no type that torch knows"),
        ({**MIXTURE, "first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number from 0 on, not -1"),
        ({**MIXTURE, "kv_lora_rank": "4"}, "kv_lora_rank must be a whole number from 0 on, not '4'"),
        ({**TINY, "model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers must be a list of whole numbers"),
        ({**TINY, "model_type": "dots1"}, "lacks n_routed_experts, num_experts_per_tok"),
    ],
)
def test_configs_that_cannot_be_read_name_the_key(config, says):
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config(config, "m")
    assert says in caught.value.message
    assert caught.value.hint and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**TINY, "model_type": "newcomer", "n_routed_experts": 8}, "a mixture of experts ('newcomer'"),
        ({**TINY, "model_type": "newcomer", "state_size": 16}, "a state-space model ('newcomer'"),
        ({**TINY, "model_type": "stablelm", "qk_layernorm": True}, "only transformers can read this form"),
        ({"model_type": "newcomer", "d_model": 8}, "lacks hidden_size, intermediate_size"),
    ],
)
def test_what_only_transformers_can_read_says_so_without_torch(without_torch, config, says):
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config(config, "m")
    assert says in caught.value.message


def test_a_mixture_stored_expert_by_expert_is_the_same_model(tmp_path):
    """Hub files hold each expert apart, and DeepSeek's an extra block for predicting two tokens; loading stacks them."""
    spec = ModelSpec.from_config(MIXTURE, "m")
    stored = {p.name: p.shape for p in spec.parameters() if p.role != "expert"}
    for i in range(4):
        for part, shape in (("gate_proj", (4, 8)), ("up_proj", (4, 8)), ("down_proj", (8, 4))):
            stored[f"model.layers.1.mlp.experts.{i}.{part}.weight"] = shape
    stored |= {"model.layers.1.mlp.gate.e_score_correction_bias": (4,), "model.layers.2.eh_proj.weight": (8, 16)}
    read = ModelSpec.from_folder(folder_with(tmp_path / "m", MIXTURE, stored))
    assert read.notes == ("1 tensors outside the text model are left out",)
    assert spec.parameters() == read.parameters()


def test_files_without_the_base_models_prefix_are_the_same_model(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 12, "dtype": "bfloat16"}
    spec = ModelSpec.from_config(config, "m")
    stored = {name.removeprefix("transformer."): shape for name, shape in shapes(spec).items()}
    assert spec == ModelSpec.from_folder(folder_with(tmp_path / "m", config, {**stored, "h.0.attn.bias": (1, 1, 4, 4)}))


def test_headers_equal_to_the_config_leave_no_note(tmp_path):
    spec = ModelSpec.from_config(TINY, "m")
    stored = {**shapes(spec), "lm_head.weight": (32, 8), "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    read = ModelSpec.from_folder(folder_with(tmp_path / "m", TINY, stored))
    assert spec == read


def test_headers_win_over_the_config_and_the_difference_is_a_note(tmp_path):
    spec = ModelSpec.from_config(TINY, "m")
    norms = {f"model.layers.{i}.self_attn.q_norm.weight": (4,) for i in range(2)}
    stored = {**shapes(spec), **norms, "model.embed_tokens.weight": (40, 8)}
    read = ModelSpec.from_folder(folder_with(tmp_path / "m", TINY, stored, "F16"))
    assert spec.num_parameters + 8 * 8 + 2 * 4 == read.num_parameters
    assert (read.dtype, len(read.notes)) == ("float16", 1)
    assert (
        "3 tensors differ from config.json, such as model.embed_tokens.weight: 40x8 in the files, 32x8" in read.notes[0]
    )
    assert "self_attn.q_norm.weight" in [p.name for p in read.block_parameters()]
    assert read == ModelSpec.from_json(json.loads(json.dumps(read.to_json())))


def test_vision_tensors_and_prefixes_of_multimodal_checkpoints(tmp_path):
    spec = ModelSpec.from_config(TINY, "m")
    stored = {f"language_model.{name}": shape for name, shape in shapes(spec).items()}
    stored |= {"vision_tower.patch.weight": (3, 3), "multi_modal_projector.weight": (3, 3)}
    read = ModelSpec.from_folder(folder_with(tmp_path / "m", TINY, stored))
    assert read.notes == ("2 tensors outside the text model are left out",)
    assert spec.num_parameters == read.num_parameters


def test_missing_weights_are_only_a_note(tmp_path):
    spec = ModelSpec.from_folder(folder_with(tmp_path / "m", TINY))
    assert spec.notes == ("the folder has no safetensors files: shapes come from config.json alone",)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    folder = folder_with(tmp_path / "sharded", TINY, {"a": (1,)})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ModelSpec.from_folder(folder).notes == ("2 of 2 weight files are missing, such as model-1.safetensors",)
    few = dict(list(shapes(spec).items())[:5])
    assert "the files lack 15 of 20 tensors" in ModelSpec.from_folder(folder_with(tmp_path / "few", TINY, few)).notes[0]


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..\\x", "a\0", 7.0]
)
def test_an_index_names_no_file_outside_its_folder(tmp_path, name):
    folder = folder_with(tmp_path / "m", TINY, {"a": (1,)})
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    if isinstance(name, str):
        with pytest.raises(ModelError, match="it names a file outside its folder"):
            ModelSpec.from_folder(folder)
    else:
        assert "weight files are missing, such as 7.0" in ModelSpec.from_folder(folder).notes[0]


def test_a_quantised_checkpoint_keeps_the_shapes_of_the_config(tmp_path):
    config = {**TINY, "quantization_config": {"quant_method": "bitsandbytes"}}
    spec = ModelSpec.from_folder(folder_with(tmp_path / "m", config, {"model.layers.0.x.weight.absmax": (9,)}))
    assert spec.notes == ("the checkpoint is quantised already (bitsandbytes): shapes come from config.json alone",)


@pytest.mark.parametrize(
    ("text", "says", "where"),
    [
        (None, "not there", "config.json"),
        ("", "the file is empty", "config.json"),
        ('{"a": 1,\n "b": }', "invalid JSON at line 2", "config.json:2:7"),
        ("[1]", "not a JSON object", "config.json"),
        ("null", "not a JSON object", "config.json"),
        ("[" * 100_000, "JSON that cannot be read", "config.json"),
        ('{"a": ' + "1" * 5000 + "}", "JSON that cannot be read", "config.json"),
    ],
)
def test_a_broken_config_is_told_with_its_place(tmp_path, text, says, where):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path))
    assert says in caught.value.message
    assert caught.value.where.endswith(where)


def test_a_wrong_value_is_told_with_its_file_and_the_nearest_one(tmp_path):
    for key, value, says, hint in (
        ("num_hidden_layers", -2, "num_hidden_layers must be a positive whole number, not -2", "mend the config.json"),
        ("hidden_act", "silly", "hidden_act 'silly' is no activation that transformers knows", "did you mean 'silu'?"),
        ("torch_dtype", "bfloat61", "torch_dtype 'bfloat61' is no type that torch knows", "did you mean 'bfloat16'?"),
    ):
        folder = folder_with(tmp_path / key, {**TINY, "dtype": None, key: value})
        for named in (folder, folder / "config.json"):
            with pytest.raises(ModelError) as caught:
                resolve_model(str(named))
            told = caught.value
            assert (told.message, told.where, told.hint) == (says, str(folder / "config.json"), hint)


@pytest.mark.parametrize(
    ("said", "dtype"),
    [("float", "float32"), ("torch.half", "float16"), ("auto", "float32"), ({"": "bfloat16"}, "float32")],
)
def test_other_names_of_types(said, dtype):
    assert ModelSpec.from_config({**TINY, "dtype": said}, "m").dtype == dtype


def test_a_byte_order_mark_is_no_trouble(tmp_path):
    folder_with(tmp_path, TINY)
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert resolve_model(str(tmp_path)).hidden_size == 8


def test_a_huge_config_is_refused_unread(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    with file.open("wb") as handle:
        handle.truncate(10 * 10**9)
    monkeypatch.setattr(Path, "read_text", None)
    with pytest.raises(ModelError) as caught:
        resolve_model(str(file))
    assert (caught.value.message, caught.value.where) == ("too large to read: 9.31 GiB", str(file))


def test_a_config_that_is_no_file_is_told(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="not a file"):
        resolve_model(str(tmp_path))


def test_a_cut_safetensors_file_is_told(tmp_path):
    folder = folder_with(tmp_path / "m", TINY, shapes(ModelSpec.from_config(TINY, "m")))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="header cannot be read"):
        ModelSpec.from_folder(folder)


def test_resolve_by_folder_file_name_alias_and_hub_id(tmp_path):
    folder = folder_with(tmp_path / "mine", TINY)
    assert (resolve_model(str(folder)).name, resolve_model(str(folder / "config.json")).name) == ("mine", "mine")
    for text in ("SmolLM2-135M", "smollm2 135m", "HuggingFaceTB/SmolLM2-135M"):
        assert (
            resolve_model(text).name, resolve_model(text).num_parameters,
        ) == ("HuggingFaceTB/SmolLM2-135M", 134_515_008)  # fmt: skip
    assert resolve_model("SmolLM2-135M-Instruct").name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (
        resolve_model("Mistral-7B-Instruct-v0.2").sliding_window, resolve_model("mistral 7b").sliding_window,
    ) == (None, 4096)  # fmt: skip


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_resolve_finds_a_snapshot_in_the_cache(tmp_path, monkeypatch, variable):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    hub = tmp_path / "hub" if variable == "HF_HOME" else tmp_path
    repository = hub / "models--me--my-model"
    folder_with(repository / "snapshots" / "old", {**TINY, "hidden_size": 16})
    folder_with(repository / "snapshots" / "new", TINY)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("new")
    os.utime(repository / "snapshots" / "new", (1, 1))
    spec = resolve_model("me/my-model")
    assert (spec.name, spec.hidden_size) == ("me/my-model", 8)


def test_unknown_models_get_a_suggestion(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for text, hint in (
        ("Lama-3.1-8B", "did you mean 'Llama-3.1-8B'?"),
        ("meta-llama/Lama-3.1-8B", "did you mean 'meta-llama/Llama-3.1-8B'?"),
        ("somebody/Qwen3-8B", "did you mean 'Qwen/Qwen3-8B'?"),
        ("somebody/Llama-3.2-1B", "did you mean 'meta-llama/Llama-3.2-1B'?"),
        ("./nowhere", "give a folder that has config.json"),
        ("", "give a folder that has config.json"),
        (str(tmp_path / "x.json"), "give a folder that has config.json"),
    ):
        with pytest.raises(ModelError) as caught:
            resolve_model(text)
        assert hint == caught.value.hint


@pytest.mark.parametrize(
    ("hub_id", "first"),
    [
        ("NousResearch/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("NousResearch/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("unsloth/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("unsloth/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ],
)
def test_a_mirror_of_a_catalogued_model_is_that_model_with_a_note(tmp_path, monkeypatch, hub_id, first):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    spec, original = resolve_model(hub_id), resolve_model(first)
    assert (spec.name, shapes(spec)) == (hub_id, shapes(original))
    assert spec.notes == (*original.notes, f"read as the model it is a copy of: {first}")


def test_hub_without_network_is_an_error_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("finefit.catalog.resolve._is_reachable", lambda endpoint: False)
    with pytest.raises(ModelError, match="there is no network"):
        resolve_model("somebody/Qwen3-8B")
