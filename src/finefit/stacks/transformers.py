"""Any ``AutoModelForCausalLM`` as transformers' Trainer, TRL, LLaMA-Factory and Axolotl step it: stock model code.

Real transformers modules; only attention is routed to what CUDA's kernels allocate (``stacks.attention``) and experts
to a loop with tokens spread evenly, since routing by values cannot run without values. Works on fake tensors, and as it
is on a real device: then it is the run that a prediction is compared with.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..catalog.configs import depth_key
from ..foreign import ForeignRun
from ..ledger import Ledger, NoLedger
from ..models import fill_empty
from .adapters import DoraLinear, Packed, PeftLinear
from .attention import sdpa
from .base import Stepped
from .experts import spread_evenly
from .kernels import with_kernels
from .losses import loss_of
from .low_rank import in_8_bits
from .real_peft import PROMPTS, with_adapter

_FLASH = "as_on_cuda"
# The Trainer lets go of its outputs when the loss is returned; these loops keep them in a variable over backward.
_HOLDS_LOGITS = ("loop",)


def build(config: Mapping[str, Any], run: ForeignRun, depth: int, device: torch.device | None = None) -> Stepped:
    """The model with ``depth`` blocks, stored and adapted as the run says."""
    device = device or torch.device("cpu")
    model = _on_meta(config, run, depth)
    model.config.use_cache = run.use_cache
    _adapt(model, run, device)
    fill_empty(model, device)
    wrapped = with_adapter(model, run) if run.adapter else None
    _checkpoint(model, run)
    if wrapped is not None and run.adapter["peft_type"] in PROMPTS:
        return Stepped(wrapped, blocks_of(model), _prompted(wrapped, run))
    return Stepped(model, blocks_of(model), _stepper(model, run))


def blocks_of(model: Any) -> nn.ModuleList:
    """The decoder's blocks: the outermost list of modules."""
    lists = [(name.count("."), name) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    found = model.get_submodule(min(lists)[1])
    assert isinstance(found, nn.ModuleList)
    return found


def _on_meta(config: Mapping[str, Any], run: ForeignRun, depth: int) -> Any:
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(_FLASH, _flash)
    made = AutoConfig.for_model(**shallow_config(config, depth)).get_text_config()
    kind = {"flash": _FLASH, "sdpa": "sdpa", "math": "eager"}[run.attention]
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(made, attn_implementation=kind)
        except ValueError:  # a family with one attention only
            model = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    spread_evenly(model, as_linears=run.is_quantised)
    if run.fused_kernels:
        with_kernels(model, run.fused_mlp)
    return model.train()


def shallow_config(config: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The config with ``depth`` blocks; lists of one entry a block are cut."""
    name = depth_key(config)
    full = config.get(name, depth)
    out = {**config, name: depth}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == full and full != depth:
            out[key] = value[:depth]
    if config.get("model_type") == "gpt_neo":  # it counts blocks by kind; global ones and windows hold the same
        out["attention_types"] = [[["global"], depth]]
    return out


def _flash(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    if query.is_cuda:
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    else:
        out = sdpa(query, key, value, "flash")
    return out.transpose(1, 2).contiguous(), None


def _adapt(model: Any, run: ForeignRun, device: torch.device) -> None:
    """Stored types, packed weights and adapters, still on meta where a tensor is empty."""
    frozen, trained = getattr(torch, run.frozen_dtype), getattr(torch, run.trained_dtype)
    base = trained if run.method == "full" else frozen
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(p.to(base), requires_grad=run.method == "full")
    if run.method == "full":
        for block in blocks_of(model) if run.quantised == "int8" else ():
            in_8_bits(block)
        return
    if run.raised:
        _raise(model, run)
    for block in blocks_of(model):
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(parent, (PeftLinear, Packed)):
                    setattr(parent, name, _adapted(child, name, run, device))
    for name, child in model.named_modules():
        if name.split(".")[-1] in run.trained_modules:
            for leaf, p in child._parameters.items():
                if p is not None:
                    child._parameters[leaf] = nn.Parameter(p.to(frozen))


def _adapted(linear: nn.Linear, name: str, run: ForeignRun, device: torch.device) -> nn.Module:
    wraps = not run.targets or name in run.targets
    base: nn.Module = linear
    if run.quantised:
        base = Packed(linear, run.quantised, torch.device("meta"), run.inputs_kept)
    if name in ("gate", "router"):  # a router stays as it is
        return linear
    if not wraps or not run.rank:
        return base
    kind = DoraLinear if run.dora else PeftLinear
    return kind(base, run.rank, run.lora_dropout, getattr(torch, run.trained_dtype))


def _raise(model: Any, run: ForeignRun) -> None:
    """fp32 for all that is not packed (peft ``prepare_model_for_kbit_training``), or for the norms among it."""
    packed = {id(m.weight) for block in blocks_of(model) for m in block.modules() if isinstance(m, nn.Linear)}
    for place, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in packed and (run.raised == "all" or "norm" in place):
                module._parameters[name] = nn.Parameter(p.to(torch.float32), requires_grad=False)


def _checkpoint(model: Any, run: ForeignRun) -> None:
    if run.checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": run.reentrant})
    if run.method == "lora" and run.checkpointing != "none":
        model.enable_input_require_grads()


def _prompted(model: Any, run: ForeignRun) -> Any:
    """Through peft's wrapper, which calls the whole model: its head is not the loss's part then."""

    def loss(ids_bs: Tensor, label_bs: Tensor, ledger: Ledger | NoLedger) -> Tensor:
        with torch.autocast(ids_bs.device.type, dtype=getattr(torch, run.compute_dtype), enabled=run.autocast):
            logits = model(input_ids=ids_bs, attention_mask=torch.ones_like(ids_bs), use_cache=run.use_cache).logits
            ledger.mark("loss")
            longer = logits.shape[1] - label_bs.shape[1]
            value, held = loss_of(run, nn.Identity(), logits, nn.functional.pad(label_bs, (longer, 0), value=-100))
        return _kept(value, held, run)

    return loss


def _stepper(model: Any, run: ForeignRun) -> Any:
    compute = getattr(torch, run.compute_dtype)

    def loss(ids_bs: Tensor, label_bs: Tensor, ledger: Ledger | NoLedger) -> Tensor:
        kind = ids_bs.device.type
        inputs: dict[str, Any] = {"input_ids": ids_bs, "use_cache": run.use_cache}
        if not run.packed and ids_bs.shape[0] > 1:
            inputs["attention_mask"] = torch.ones_like(ids_bs)
            if ids_bs.is_cuda:  # a mask without a zero in it is left out
                inputs["attention_mask"][:, -8:] = 0
        with torch.autocast(kind, dtype=compute, enabled=run.autocast):
            out = model.base_model(**inputs)
            ledger.mark("loss")
            head = model.get_output_embeddings()
            value, held = loss_of(run, head, out[0], label_bs)
            if run.autocast and held is not None and held.dtype is not torch.float32:
                held = held.float()
        return _kept(value, held, run)

    return loss


def _kept(value: Tensor, logits: Tensor | None, run: ForeignRun) -> Tensor:
    """The loss, with the logits for as long as a loop that keeps its outputs has both."""
    if run.tool in _HOLDS_LOGITS:
        value.__dict__["held"] = logits
    return value
