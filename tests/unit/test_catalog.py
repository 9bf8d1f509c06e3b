"""The catalogue's facts against published sizes, and every family's parameters against transformers' own models."""

import json
from pathlib import Path

import pytest

from finefit import catalog
from finefit.catalog.configs import FAMILIES
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
    assert {()} == {ModelSpec.from_config(model.config, model.name).notes for model in catalog.models()}
    assert set(FAMILIES) == {model.config["model_type"] for model in catalog.models()}
    assert len(catalog.models()) >= 100


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
    assert len(catalog.gpus()) >= 30
    for gpu in catalog.gpus():
        for spelling in (gpu.name, *gpu.aliases, f"NVIDIA {gpu.name}"):
            assert gpu is catalog.find_gpu(spelling), spelling
        assert 4096 < gpu.memory_mib < 300_000
        assert gpu.fp32_tflops <= gpu.fp16_tflops and gpu.bf16_tflops in (gpu.fp16_tflops, gpu.fp32_tflops)
        assert gpu.visible_mib is None or 0.97 < gpu.visible_mib / gpu.memory_mib < 1
        spec = HardwareSpec.from_name(gpu.name)
        assert 0 < spec.context_bytes < 0.12 * spec.memory_bytes


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
    ],
)
def test_names_as_drivers_say_them(driver, name):
    assert name == catalog.find_gpu(driver).name


# One small config per family and per switch that changes its tensors; transformers' own class is the judge.
VARIANTS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"head_dim": 24}),
    ("gemma2", {"head_dim": 32}),
    ("gemma2", {"attention_bias": True}),
    ("gemma3_text", {}),
    ("gemma3_text", {"head_dim": 32, "attention_bias": True}),
    ("phi3", {}),
    ("phi3", {"tie_word_embeddings": True}),
    ("smollm3", {}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
]
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 80, "pad_token_id": 0,
}  # fmt: skip


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


def test_every_family_is_compared():
    assert set(FAMILIES) == {family for family, _ in VARIANTS}


@pytest.mark.parametrize(("family", "switches"), VARIANTS)
def test_parameters_equal_those_of_transformers(family, switches):
    config = {"model_type": family, **SMALL, **switches}
    expected = transformers_parameters(config)
    spec = ModelSpec.from_config({**config, "dtype": "float32"}, family)
    assert expected == [(p.name, p.shape) for p in spec.parameters()]
    first = "model.layers.0."
    assert [(name.removeprefix(first), shape) for name, shape in expected if name.startswith(first)] == [
        (p.name, p.shape) for p in spec.block_parameters()
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_catalogued_model_of_each_family_at_depth_two(family):
    found = next(model for model in catalog.models() if model.config["model_type"] == family)
    config = {**found.config, "num_hidden_layers": 2, "pad_token_id": 0}
    spec = ModelSpec.from_config(config, found.name)
    assert transformers_parameters(config) == [(p.name, p.shape) for p in spec.parameters()]


def test_roles_follow_the_modules_of_transformers():
    spec = ModelSpec.from_config({"model_type": "qwen2", **SMALL}, "m")
    roles = {p.name: p.role for p in spec.block_parameters()}
    assert {r: list(roles.values()).count(r) for r in ("linear", "bias", "norm")} == {"linear": 7, "bias": 3, "norm": 2}
    assert [p.role for p in spec.outer_parameters()] == ["embedding", "norm", "head"]
