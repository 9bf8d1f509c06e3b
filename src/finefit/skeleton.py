"""The tensors that transformers itself gives a config: the model is built on the meta device and its names are read.

Run as ``python -m finefit.skeleton CONFIG.json OUT.json``, in a process of its own, for families that
`catalog/structures.json` does not have; ``scripts/derive_structures.py`` makes that file with it. Needs torch; code of
repositories is never run. Declines encoder-decoders and what `AutoModelForCausalLM` does not know.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .files import write_atomically
from .run import is_linear

Row = tuple[str, tuple[int, ...], str]
# Attributes by which transformers' configuration classes answer, whatever config.json calls them.
ASKED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "tie_word_embeddings", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size",
)  # fmt: skip


def config_of(config: Mapping[str, Any]) -> Any:
    """transformers' configuration object of a config.json's text part."""
    from transformers import AutoConfig

    settings = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    return AutoConfig.for_model(config["model_type"], **settings)


def rows_of(config: Any) -> list[Row]:
    """Name, shape and role of every parameter, in ``named_parameters()``'s order."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    head = model.get_output_embeddings()
    rows = []
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        role = _role(name, parameter, owner)
        rows.append((name, tuple(parameter.shape), "head" if owner is head and role == "linear" else role))
    return rows


def _role(name: str, parameter: nn.Parameter, owner: nn.Module) -> str:
    """What a tensor is for, by the module that owns it."""
    if isinstance(owner, nn.Embedding):
        return "embedding"
    is_stack = any(other.dim() > 2 for other in owner.parameters(recurse=False))
    if is_stack and not isinstance(owner, nn.Conv1d | nn.Conv2d):
        return "expert"  # a stack, one slice an expert; its biases are matrices
    if name.endswith("bias"):
        return "bias"
    if is_linear(owner):
        return "linear"
    if isinstance(owner, Conv1D):
        return "transposed"
    return "matrix" if parameter.dim() > 1 and "Norm" not in type(owner).__name__ else "norm"


def main(source: str, path: str) -> None:
    """Write the rows of the config at ``source``, and the sizes its class answers with."""
    import transformers

    config = config_of(json.loads(Path(source).read_text("utf-8")))
    answers = {key: getattr(config, key, None) for key in ASKED}
    said = {key: value for key, value in answers.items() if isinstance(value, int)}
    found = {"transformers": transformers.__version__, "config": said, "rows": rows_of(config)}
    write_atomically(Path(path), json.dumps(found, separators=(",", ":")).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
