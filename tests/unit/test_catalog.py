"""The catalogue's facts against published sizes, and every family's parameters against transformers' own models."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

from finefit import catalog
from finefit.catalog import configs, structures
from finefit.layout import Micro, layout_of
from finefit.spec import HardwareSpec, ModelSpec

KNOWN = {
    "SmolLM2-135M": 134_515_008, "Llama-3.1-8B": 8_030_261_248, "Qwen2.5-7B": 7_615_616_512,
    "Mistral-7B-v0.1": 7_241_732_096, "Gemma-2-2B": 2_614_341_888, "Phi-3-mini": 3_821_079_552,
    "Qwen3-8B": 8_190_735_360, "Llama-2-70B": 68_976_648_192, "Phi-4": 14_659_507_200,
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_published_exact_counts(name):
    found = catalog.find_model(name)
    assert KNOWN[name] == ModelSpec.from_config(found.config, name).num_parameters


def test_every_entry_has_its_published_size():
    specs = {model.name: (ModelSpec.from_config(model.config, model.name), model) for model in catalog.models()}
    assert len(specs) == len(catalog.models())
    assert {
        name: (spec.num_parameters, model.parameters)
        for name, (spec, model) in specs.items()
        if model.parameters not in (None, spec.num_parameters)
    } == {}
    assert {
        name: (spec.num_parameters, model.parameters_b)
        for name, (spec, model) in specs.items()
        if abs(spec.num_parameters / 1e9 / model.parameters_b - 1) > 0.01
    } == {}


def test_every_entry_is_of_a_verified_family_and_says_everything_itself():
    specs = [ModelSpec.from_config(model.config, model.name) for model in catalog.models()]
    assert {()} == {spec.notes for spec in specs if spec.packs}
    assert {(configs._OWN,)} == {spec.notes for spec in specs if not spec.packs}
    assert {model.config["model_type"] for model in catalog.models()} <= set(structures.families())
    assert len(json.loads((Path(catalog.__file__).parent / "models.json").read_text())["models"]) >= 105


def test_every_spelling_leads_to_its_own_model():
    for model in catalog.models():
        assert model is catalog.find_model(model.name)
        assert (
            model.name.partition("/")[2]
            == catalog.find_model(model.name.partition("/")[2].lower()).name.partition("/")[2]
        )
    data = json.loads((Path(catalog.__file__).parent / "models.json").read_text())
    for name, entry in data["models"].items():
        config = entry["config"]
        for alias in (name, *entry["aliases"]):
            found = catalog.find_model(alias).config
            assert (config["hidden_size"], config["num_hidden_layers"]) == (
                found["hidden_size"], found["num_hidden_layers"],
            )  # fmt: skip
    assert catalog.find_model("someone/Llama-3.1-8B") is None


def test_devices_are_plausible_and_no_alias_is_taken_twice():
    assert len(catalog.gpus()) >= 150
    for gpu in catalog.gpus():
        for spelling in (gpu.name, f"NVIDIA {gpu.name}"):
            assert gpu is catalog.find_gpu(spelling), spelling
        assert 4096 <= gpu.memory_mib < 400_000
        assert gpu.fp32_tflops <= gpu.bf16_tflops <= gpu.fp16_tflops or not gpu.supports_bf16
        assert gpu.visible_mib is None or 0.97 < gpu.visible_mib / gpu.memory_mib < 1
        assert gpu.peer_gb_per_s < 1000 and (gpu.supports_bf16 or not gpu.supports_fp8)
        spec = HardwareSpec.from_name(gpu.name)
        assert 0 < spec.context_bytes < 0.17 * spec.memory_bytes
    whole = [gpu for gpu in catalog.gpus() if "g." not in gpu.name]
    assert {(gpu.name, alias) for gpu in whole for alias in gpu.aliases if catalog.find_gpu(alias) is not gpu} == set()


def test_hosts_name_catalogued_devices():
    assert len(catalog.hosts()) >= 30
    for host in catalog.hosts():
        for spelling in (host.name, host.name.lower(), *host.aliases):
            assert host is catalog.find_host(spelling) and catalog.find_gpu(spelling) is None, spelling
        spec = HardwareSpec.from_name(host.name)
        assert (spec.count, spec.nodes) == (host.count, 1)
        assert spec.host_memory_bytes == host.host_memory_gib * 2**30
        assert spec.memory_bytes == catalog.find_gpu(host.gpu).memory_mib * 2**20


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100 40GB 1g.5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "H100 SXM 3g.40gb"),
        ("NVIDIA H200 MIG 1g.18gb", "H200 1g.18gb"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770"),
        ("Apple M2 Max", "M2 Max 32GB"),
    ],
)
def test_names_as_drivers_say_them(driver, name):
    assert name == catalog.find_gpu(driver).name


# One small config per family, and one for every switch that changes its tensors; transformers' own class is the judge.
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 80, "pad_token_id": 0,
}  # fmt: skip
MIXTURE = {
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "n_shared_experts": 2,
    "moe_num_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_start_index": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {"kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14}
FAMILY_KEYS = {
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "hunyuan_v1_dense": {"head_dim": 16},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
}
SWITCHED = [
    *[(family, {}) for family in structures.families()],
    *[(family, {switch: on}) for family in structures.families() for switch in structures.switches(family)
      for on in (True, False)],
    *[(family, {"head_dim": 32}) for family in structures.families()
      if structures.entry_of(family).get("head_dim") == "own"],
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
    ("mistral", {"head_dim": 24}),
    ("deepseek_v2", {"q_lora_rank": None}),
    ("deepseek_v3", {"first_k_dense_replace": 3}),
    ("qwen3_moe", {"mlp_only_layers": [1]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 1}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": False}),
    ("gpt2", {"n_inner": 72, "n_positions": 40}),
]  # fmt: skip


def small(family: str, switches: dict) -> dict:
    mixture = MIXTURE if "moe" in structures.entry_of(family) else {}
    return {"model_type": family, **SMALL, **mixture, **FAMILY_KEYS.get(family, {}), **switches}


def transformers_parameters(config: dict) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in order, of the model that transformers builds on the meta device."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    settings = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **settings)
        )
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize(("family", "switches"), SWITCHED)
def test_parameters_equal_those_of_transformers(family, switches):
    config = small(family, switches)
    expected = transformers_parameters(config)
    spec = ModelSpec.from_config({**config, "dtype": "float32"}, family)
    assert expected == [(p.name, p.shape) for p in spec.parameters()]
    prefix = structures.entry_of(family)["prefix"]
    for layer in range(3):
        first = f"{prefix}{layer}."
        assert [(name.removeprefix(first), shape) for name, shape in expected if name.startswith(first)] == [
            (p.name, p.shape) for p in spec.block_parameters(layer)
        ]
    assert sum(math.prod(shape) for _, shape in expected) == spec.num_parameters


@pytest.mark.parametrize("name", sorted({m.config["model_type"]: m.name for m in catalog.models()}.values()))
def test_a_catalogued_model_of_each_family_at_depth_two(name):
    found = catalog.find_model(name)
    family = found.config["model_type"]
    config = {**found.config, "num_hidden_layers": 2, "pad_token_id": 0}
    config |= {"attention_types": [[["global"], 2]]} if family == "gpt_neo" else {}
    spec = ModelSpec.from_config(config, found.name)
    assert transformers_parameters(config) == [(p.name, p.shape) for p in spec.parameters()]


@pytest.mark.parametrize("family", ["llama", "granitemoe"])
def test_the_templates_are_what_the_script_derives(family):
    pytest.importorskip("torch")
    script = Path(__file__).parents[2] / "scripts" / "derive_structures.py"
    spec = importlib.util.spec_from_file_location("derive_structures", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert structures.entry_of(family) == json.loads(json.dumps(module.derived(family)))


def test_a_mixture_has_kinds_of_blocks_and_active_parameters():
    spec = ModelSpec.from_config(catalog.find_model("DeepSeek-V3").config, "m")
    assert [(kind.name, len(kind.layers), kind.layers[0]) for kind in spec.block_kinds()] == [
        ("dense", 3, 0), ("moe", 58, 3),
    ]  # fmt: skip
    one_expert = 3 * 7168 * 2048
    assert 58 * (256 - 8) * one_expert == spec.num_parameters - spec.active_parameters
    assert spec.block_parameters() == spec.block_parameters(60) != spec.block_parameters(2)
    counts = {p.name: count for p, count in spec.block_tensors()}
    assert (counts["self_attn.o_proj.weight"], counts["mlp.gate_proj.weight"], counts["mlp.gate.weight"]) == (61, 3, 58)
    assert {key: spec.symbols()[key] for key in "EKws"} == {"E": 256, "K": 8, "w": 2048, "s": 2048}
    layout = layout_of(spec, Micro(1, 1, 1))
    assert sum(group.numel * group.count for group in layout.groups) == spec.num_parameters


def test_a_dense_model_knows_nothing_of_experts():
    spec = ModelSpec.from_config(catalog.find_model("Llama-3.1-8B").config, "m")
    assert [kind.name for kind in spec.block_kinds()] == ["dense"]
    assert spec.active_parameters == spec.num_parameters
    assert {"num_experts", "dense_layers", "options"}.isdisjoint(spec.to_json())
    assert {(p.name, 32) for p in spec.block_parameters()} == {(p.name, count) for p, count in spec.block_tensors()}


@pytest.mark.parametrize(
    ("name", "active_b"),
    [("Mixtral-8x7B", 12.9), ("Qwen3-30B-A3B", 3.3), ("Qwen3-235B-A22B", 22), ("DeepSeek-V3", 37), ("OLMoE-1B-7B", 1.3),
     ("Phi-3.5-MoE", 6.6), ("Qwen1.5-MoE-A2.7B", 2.7), ("Qwen2-57B-A14B", 14), ("dots.llm1", 14)],
)  # fmt: skip
def test_published_active_counts(name, active_b):
    spec = ModelSpec.from_config(catalog.find_model(name).config, name)
    assert spec.active_parameters / 1e9 == pytest.approx(active_b, rel=0.025)


def test_roles_follow_the_modules_of_transformers():
    spec = ModelSpec.from_config({"model_type": "qwen2", **SMALL}, "m")
    roles = {p.name: p.role for p in spec.block_parameters()}
    assert {r: list(roles.values()).count(r) for r in ("linear", "bias", "norm")} == {"linear": 7, "bias": 3, "norm": 2}
    assert [p.role for p in spec.outer_parameters()] == ["embedding", "norm", "head"]
