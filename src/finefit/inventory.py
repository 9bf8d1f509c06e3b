"""What the catalogue holds, as rows of plain values that a table or JSON can show: `rows`. Torch-free.

Counts of parameters are those of `ModelSpec`, so a row says what a plan will reckon with.
"""

import re
from collections.abc import Iterable
from typing import Any

from . import catalog
from .catalog import CatalogGpu
from .errors import ConfigError, did_you_mean
from .spec import ModelSpec

KINDS = ("models", "gpus", "hosts")
Row = dict[str, Any]


def rows(kind: str, word: str | None = None) -> list[Row]:
    """All models, gpus or hosts, or those with ``word`` in a name; ConfigError suggests one where none has."""
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or "finefit catalog models, gpus or hosts"
        raise ConfigError(f"the catalogue has no '{kind}'", hint=hint)
    maker = {"models": _models, "gpus": _gpus, "hosts": _hosts}[kind]
    spelled = r"[\s_-]*".join(map(re.escape, catalog.plain_name(word or "")))
    # "qwen3" is not meant to find Qwen-32B; "rtx 40", after which no name ends, is meant to find the RTX 4090
    found = maker(re.compile(rf"{spelled}(?!(?<=\d)\d)")) or maker(re.compile(spelled))
    if not found:
        names = catalog.model_names() if kind == "models" else catalog.gpu_names()
        hint = did_you_mean(word or "", names) or f"finefit catalog {kind} lists all"
        raise ConfigError(f"no name among the catalogue's {kind} has '{word}' in it", hint=hint)
    return found


def _models(spelled: re.Pattern[str]) -> list[Row]:
    found = []
    for name, model, others in catalog.main_models():
        if not _has(spelled, (name, *others, model.config["model_type"])):
            continue
        spec = ModelSpec.from_config(model.config, model.name)
        row: Row = {
            "name": name,
            "hub_id": model.name,
            "parameters": spec.num_parameters,
            "context": spec.max_position_embeddings,
            "family": spec.family,
            "other_names": [other for other in others if other != model.name],
        }
        found.append({**row, "active_parameters": spec.active_parameters} if spec.num_experts else row)
    return found


def _gpus(spelled: re.Pattern[str]) -> list[Row]:
    return [_gpu(gpu) for gpu in catalog.gpus() if _has(spelled, (gpu.name, *gpu.aliases))]


def _gpu(gpu: CatalogGpu) -> Row:
    return {
        "name": gpu.name,
        "memory_bytes": gpu.memory_mib * 2**20,
        "bf16_flops_per_s": gpu.bf16_tflops * 1e12,
        "supports_bf16": gpu.supports_bf16,
        "supports_fp8": gpu.supports_fp8,
        "bandwidth_bytes_per_s": gpu.bandwidth_gb_per_s * 1e9,
        "link_bytes_per_s": gpu.link_gb_per_s * 1e9,
        "peer_bytes_per_s": gpu.peer_gb_per_s * 1e9,
        "note": gpu.note,
        "other_names": list(gpu.aliases),
    }


def _hosts(spelled: re.Pattern[str]) -> list[Row]:
    return [
        {
            "name": host.name,
            "gpu": host.gpu,
            "count": host.count,
            "host_memory_bytes": host.host_memory_gib * 2**30,
            "network_bytes_per_s": host.network_gb_per_s * 1e9,
            "note": host.note,
            "other_names": list(host.aliases),
        }
        for host in catalog.hosts()
        if _has(spelled, (host.name, host.gpu, *host.aliases))
    ]


def _has(spelled: re.Pattern[str], names: Iterable[str]) -> bool:
    return any(spelled.search(name.lower()) for name in names)
