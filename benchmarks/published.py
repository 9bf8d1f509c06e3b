"""A published case (``published_memory.jsonl``) as a ``ForeignRun``: what the record says, the tool's habits for the rest.

Nothing here is fitted to a figure: a habit is the tool's code of that time. What a record leaves open is assumed and
said in the run's notes; what cannot be expressed is refused with a reason.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from published_adapters import adapter_of
from published_words import CONTRADICTED

from finefit.foreign import ForeignRun, Lengths, Spread

Record = Mapping[str, Any]
TOOLS = {"litgpt": "litgpt", "torchtune": "torchtune", "torchtitan": "torchtitan",
         "peft-bench": "loop"}  # method_comparison/MetaMathQA/run.py holds its outputs, and the model's cache is on  # fmt: skip
OWN_CODE = ("litgpt", "torchtune", "torchtitan")
WORDS = {"llm-foundry": "composer"}  # tools whose model code transformers' stands for
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
QUANTISED = {"nf4": "nf4", "fp4": "nf4", "nf4-double-quant": "nf4_double", "int8": "int8", "gptq-int4": "gptq4",
             "awq-int4": "gptq4", "int4": "nf4"}  # fmt: skip
# What stands for "GPTQ" in fms-acceleration's scenarios: TheBloke/…-GPTQ, main branch; without groups in these two
# (quantize_config.json: group_size -1).
UNGROUPED = ("meta-llama/Llama-2-70b-hf", "mistralai/Mixtral-8x7B-Instruct-v0.1")
# Runs under accelerate's fsdp_cpu_ram_efficient_loading, by the configuration published with them: the first rank reads
# the weights. GPTQ's too: on the others the norms are on the meta device, and then all of a unit is made empty.
READ_ONCE = ("fms-ref", "fms-gran", "peft-docs-fsdp", "phil-70b-fsdp")
# transformers at the time of a source: before 4.46 the model's code copies the shifted logits, until 4.48 the loss's.
INSIDE = ("fms-gran", "fms-moe", "qwen", "swift-lora", "swift-full", "lf-", "peft-docs", "hf4bit", "hf-", "llmem", "phil",
          "lowrank", "lomo", "ds-", "oom-alpaca", "oom-cookbook", "oom-axo", "oom-xtuner", "oom-dscoder",
          *(f"oom-lf-{n}" for n in (2, 3, 4, 50, 57)))  # fmt: skip
APART = ("fms-ref", "oom-s1", "oom-lf-59")
DROPOUTS = {"litgpt": 0.05, "torchtune": 0.0, "peft-docs": 0.1}  # lit-gpt's finetune/lora.py and its config_hub
# What ms-swift asked for in January 2024: peft 0.7 makes adapters in the type of the weight they belong to, packed ones
# apart. Whether the peft of other sources of that time did is not known to us.
OLD_PEFT = ("swift-lora",)
UNEXPRESSED = ("lisa", "llamapro", "badam", "component")
# Whole models by another update: in a low-rank space, or in backward. Rank 128 is GaLore's own and transformers' default,
# 1024 of the projects' scripts/single_gpu/llama_7b*.sh.
LOW_RANK = {"galore": 128, "q-galore": 128, "apollo-mini": 1}
WHOLE = ("full", "badam", "lomo", *LOW_RANK)
FUSED_C_ATTN = {"c_attn": ("q_proj", "k_proj", "v_proj"), "query_key_value": ("q_proj", "k_proj", "v_proj"),
                "W_pack": ("q_proj", "k_proj", "v_proj"), "w1": ("up_proj",), "w2": ("gate_proj",),
                "c_proj": ("o_proj", "down_proj"), "mlp_all": ("gate_proj", "up_proj", "down_proj")}  # fmt: skip


# Data whose rows are padded to the longest of their micro-batch, by the sources that used them.
# ms-swift's scripts/benchmark/test_memory_time/run_single.py of 2 January 2024: all 4,959 items up to a length of 2048,
# else 1,000, what is longer is dropped; token statistics as its Benchmark.md states them.
NEWS = Lengths(mean=3234.4, deviation=2547.5, least=91, over="dropped")
# torchtune's config of April 2024 (recipes/configs/llama2/7B_lora_single_device.yaml, datasets/_alpaca.py): the whole of
# alpaca-cleaned once, cut at 512 tokens.
ALPACA = Lengths(samples=51760)


class Refused(Exception):
    """The case cannot be expressed; the text says why."""


def run_of(record: Record, config: Mapping[str, Any]) -> ForeignRun:
    """The run a record describes; ``Refused`` with a reason where that is not possible."""
    method = record["method"]
    adapter_config = adapter_of(record["id"])
    if method in UNEXPRESSED and _group(record) != "litgpt":
        raise Refused(f"method {method} has no stand-in")
    if record.get("arch") not in (None, "decoder", "decoder-moe"):
        raise Refused(f"an {record['arch']} is not a causal language model")
    notes = [CONTRADICTED[record["id"]]["en"]] if record["id"] in CONTRADICTED else []
    full = method in WHOLE
    tables = _group(record) == "litgpt" and "-hub-" not in record["id"]  # lit-gpt of October 2023
    adapter = method in ("adapter", "adapter_v2")
    settings: dict[str, Any] = {
        "tool": "lit_gpt" if tables else TOOLS.get(_group(record)) or WORDS.get(record["group"], "transformers"),
        "use_cache": _group(record) == "peft-bench", "model": record["model"],
        "method": method if adapter else "full" if full else "lora", "longest_first": tables,
        "micro_batch_size": _assumed(record, "micro_batch", 4 if tables else 1, notes),  # lit-gpt's finetune/*.py of 2023
        "max_length": _assumed(record, "seq_len", _usual_length(record), notes) // max(_degrees(record).get("cp", 1), 1),
        "accumulation": record["grad_accum"] or 1,
        "packed": bool(record["packing"]) or _group(record) in ("torchtune", "torchtitan"),
        **_numbers(record, full), **_optimizer(record), **_graph(record),
        "spread": _spread(record), "clipped": True,
    }  # fmt: skip
    settings["lengths"] = _lengths(record["id"], settings["max_length"])
    if record["group"] == "torchtitan":
        settings["segments"] = "expandable"  # its run_llama_train.sh
    if adapter_config:
        settings |= {"adapter": adapter_config}
    elif not full and not adapter:
        settings |= _adapters(record, config)
    spread = settings["spread"]
    if spread.engine == "fsdp1" and record["id"].startswith(READ_ONCE):
        settings["load"] = "first"
    if spread.micro_batches > 1:
        settings |= {"micro_batch_size": max(settings["micro_batch_size"] // spread.micro_batches, 1),
                     "accumulation": spread.micro_batches}  # fmt: skip
    return ForeignRun(**settings, notes=tuple(notes))


def _group(record: Record) -> str:
    """The source family; an issue of lit-gpt is a run of lit-gpt."""
    return "litgpt" if record["source"].startswith("Lightning-AI/") else str(record["group"])


def _assumed(record: Record, key: str, value: int, notes: list[str]) -> int:
    if record[key] is None:
        notes.append(f"{key} is not stated: {value} is assumed")
        return value
    return int(record[key])


def _usual_length(record: Record) -> int:
    """Where none is stated: the cut of rows whose longest makes the figure (peft's MetaMathQA/data.py keeps rows up to the
    characters that reach it), else the tools' own default for a verdict and short instructions for a figure."""
    cut = re.search(r"cap (\d+) tokens", _text(record))
    return int(cut[1]) if cut else 2048 if record["scope"] == "verdict" else 512


def _lengths(name: str, longest: int) -> Lengths | None:
    """How a source's rows vary, where its figures are of a whole run on data that are known."""
    if name.startswith(("swift-lora", "swift-full")):
        return replace(NEWS, samples=4959 if longest <= 2048 else 1000)
    if name.startswith(("tune-tut", "tune-pr527")):
        return ALPACA
    return None


def _degrees(record: Record) -> dict[str, Any]:
    found = dict(record["parallel"] or {})
    if record["id"].startswith("titan-405b-4d-"):  # its table: 32,768 tokens of a row on each card, data × context = 8
        found |= {"cp": record["seq_len"] // 32768, "dp": 8 * 32768 // record["seq_len"], "fsdp_shards": 8}
    return found


def _text(record: Record) -> str:
    return record["notes"] or ""


def _numbers(record: Record, full: bool) -> dict[str, Any]:
    """Types of weights, training and computing, and how weights are packed."""
    compute = DTYPES.get(record["compute_dtype"] or "bf16", "bfloat16")
    weight = record["weight_dtype"] or "bf16"
    quantised = QUANTISED.get(weight, "")
    if _group(record) == "fms-acceleration" and quantised == "nf4":
        quantised = "nf4_double"  # its framework_plugin_bnb.py and TRL's own baseline set double quantisation
    elif _group(record) == "fms-acceleration" and quantised == "gptq4" and record["model"] in UNGROUPED:
        quantised = "gptq4_rows"
    bits, note = record["optimizer_bits"], _text(record)
    own_code, early = _group(record) in OWN_CODE, record["id"].startswith("hf4bit")  # of May 2023
    old = False
    if full:
        trained = DTYPES.get(weight, compute)
        raised = record["id"].startswith("oom-s1")  # train/sft*.sh: the Trainer's bf16 under FSDP, so accelerate raises
        if bits == 32 or raised:
            trained = "float32"  # torch's moments have the weights' type; DeepSpeed's belong to fp32 masters
    else:
        old = record["id"].startswith(OLD_PEFT) and not quantised
        trained = compute if own_code or bits == 16 else DTYPES.get(weight, compute) if old else "float32"
    if own_code:
        trained = DTYPES.get(weight, compute) if full or not quantised else compute
        trained = compute if not full and weight in ("bf16", "fp16") else trained
    autocast = (
        "no autocast" not in note and not own_code and (trained == "float32" or old or (bool(quantised) and not full))
    )
    if _group(record) == "llm-foundry":
        autocast = False  # its low_precision_layernorm, the default, leaves autocast; all else is bf16 by FSDP
    if own_code and weight == "fp32" and compute != "float32":
        autocast, trained = True, "float32"
    if str(_degrees(record).get("impl")).startswith(("deepspeed", "colossalai")):
        autocast = False  # the engine casts the module (runtime/engine.py; model.half()), nothing adds autocast to it
    return {
        "frozen_dtype": DTYPES.get(weight, compute), "trained_dtype": trained, "compute_dtype": compute,
        "autocast": autocast, "quantised": quantised,
        # TRL leaves the preparation out when the packed base is sharded; peft's own raises all (Hugging Face's notebooks).
        "raised": "all" if early else "norms" if "upcasts norms" in note and _degrees(record).get("zero", 0) != 3 else "",
        "inputs_kept": early,
    }  # fmt: skip


def _optimizer(record: Record) -> dict[str, Any]:
    name, bits, method = record["optimizer"] or "adamw", record["optimizer_bits"], record["method"]
    packed = "8bit" in name or bits == 8
    in_backward = "in backward" in _text(record) or "fused into backward" in _text(record)
    kind = "galore_adamw" if method in LOW_RANK else next((k for k in ("muon", "sgd") if k in name), "adamw")
    projected = {}
    if method in LOW_RANK:
        rank = re.search(r"rank (\d+)", _text(record))
        scripts = record["id"].startswith("lowrank") and method != "apollo-mini"
        projected, bits = {"rank": int(rank[1]) if rank else 1024 if scripts else LOW_RANK[method]}, bits or 16
    # DeepSpeed's own fused update where its configuration names AdamW, as Qwen's and DeepSeek's do; these name none.
    unnamed = record["source"].startswith(("hiyouga/LlamaFactory", "modelscope/ms-swift"))
    fused = _degrees(record).get("impl") == "deepspeed" and not unnamed
    return {
        **projected, "optimizer": "sgd" if method == "lomo" else kind,
        "optimizer_bits": 8 if packed else bits or 32,
        "foreach": not fused and "fused" not in name and "hybrid" not in name and _group(record) not in ("torchtune", "llm-foundry"),
        "paged": "paged" in name, "step_in_backward": in_backward or "per_layer" in name or method == "lomo",
        "optimizer_on_host": name == "cpu_adam" or ("cpu" in (record["offload"] or "") and "zero" in record["offload"]),
        "frozen_stay": record["id"] == "oom-cookbook-118",  # its report says torch 2.0.1
        "rounded_on_host": record["id"].startswith("ds-gpt2"),  # of 2020
        "parameters_on_host": (record["offload"] or "") in ("fsdp-cpu", "zero3-cpu"),
        "activations_on_host": record["offload"] == "activations-cpu",
    }  # fmt: skip


def _graph(record: Record) -> dict[str, Any]:
    loss = record["cross_entropy"] or "plain"
    shift = "inside" if record["id"].startswith(INSIDE) else "apart" if record["id"].startswith(APART) else ""
    note = _text(record)
    foundry = record["group"] == "llm-foundry"
    loss = "kernel" if foundry else loss  # modeling_mpt.py: fused_crossentropy by default; its yamls: not reentrant
    return {
        "checkpointing": record["checkpointing"] or "full", "reentrant": _group(record) not in OWN_CODE and not foundry, "attention": record["attention"] or "sdpa",
        "loss_raised": not _left(record), "loss": loss, "shift": shift, "compiled": "compile" in note and "compile off" not in note,
        "fused_kernels": "Liger kernels" in note or "foak" in note or "unsloth" in _group(record),
        "fused_mlp": "foak" not in note,  # its models/llama.py: "llama-mlp" asks for adapters in the MLP, which none has
        "loss_chunks": 8,
    }  # fmt: skip


def _left(record: Record) -> bool:
    """Whether logits stay in the type of the head: Qwen 1's and GaLore's own modelling code, and the copies of
    transformers 4.29's that LLMem's repository runs (``real_models``), but for CodeGen and GPT-Neo."""
    name, model = record["id"], record["model"] or ""
    raises = "codegen" in model or "gpt-neo" in model
    return bool(re.search(r"Qwen-\d", model)) or name.startswith("lowrank") or (name.startswith("llmem") and not raises)


def _adapters(record: Record, config: Mapping[str, Any]) -> dict[str, Any]:
    targets = record["lora_targets"]
    if targets is None and record["id"].startswith("hf4bit"):
        targets = ["q_proj", "v_proj"]  # peft/utils/other.py's default for Llama
    if isinstance(targets, str) or targets is None:
        names: tuple[str, ...] = () if targets is None or targets.startswith("all-linear") else (targets,)
    else:  # by the name of the model's own code, and by that of the family that stands for it
        names = tuple(dict.fromkeys(part for t in targets for part in (t, *FUSED_C_ATTN.get(t, ()))))
    dropout = re.search(r"dropout (0?\.\d+)", _text(record))
    words = "embedding and output layer are trained|training embeddings"
    beside = re.search(words, _text(record)) or "embeddings" in str(targets)
    whole = ("lm_head", "embed_tokens") if beside else ()
    return {
        "rank": record["lora_rank"] or 8, "targets": names, "lora_dropout": float(dropout[1]) if dropout else DROPOUTS.get(_group(record), 0.0),
        "dora": record["method"] == "dora", "trained_modules": whole,
    }  # fmt: skip


def _spread(record: Record) -> Spread:
    degrees = _degrees(record)
    stage, impl = degrees.get("zero") or 0, str(degrees.get("impl") or "")
    data, tensor, pipeline = (degrees.get(key) or 1 for key in ("dp", "tp", "pp"))
    context = degrees.get("cp") or 1
    if impl == "naive layer split":
        engine = "naive"
    elif impl.startswith("fsdp2"):
        engine = "fsdp2"
    elif "colossalai" in impl:
        engine, stage = "gemini", 3  # the paper's dp_real.py and tp_real.py: its plugin at any degree, model.half()
    elif impl.startswith("fsdp"):
        engine = "fsdp1"
    elif impl == "deepspeed":
        engine = "deepspeed"
    else:
        engine = "fsdp1" if stage == 3 else "ddp" if data > 1 else ""
    shards = degrees.get("fsdp_shards") or (data * context if stage else 1)
    return Spread(data, tensor, pipeline, context, stage, shards, engine, **_habits(record, engine))  # type: ignore[arg-type]


def _habits(record: Record, engine: str) -> dict[str, Any]:
    """What tools do with gradients: Fabric's and accelerate's accumulation leave them whole until the last micro-step."""
    tool = TOOLS.get(record["group"], record["group"])
    if tool == "torchtitan":  # its config_manager.py reduces in fp32; parallelize_llama.py keeps the last block
        pipeline = _degrees(record).get("pp") or 1
        fused = "405b" in record["id"] or re.search(r"async(hronous)? TP", _text(record))
        held = {"reduce_dtype": "float32", "stays": "last", "gathers": "symmetric" if fused else "allocated"}
        if pipeline == 1:
            return held
        # parallelize_llama.py lets no block go under a pipeline; as many micro-batches as ranks (pipelining_utils.py)
        schedule = "interleaved" if "interleaved" in _text(record) else "1f1b"
        return held | {"stays": "all", "reduces": "last", "micro_batches": pipeline, "schedule": schedule,
                       "stages_a_rank": 2 if schedule == "interleaved" else 1}  # fmt: skip
    if engine == "gemini":
        return {"gathers": "whole"}
    if not engine.startswith("fsdp") or tool in ("torchtune", "llm-foundry") or "ep" in _degrees(record):
        return {}
    return {"reduces": "last", "units": "mixed" if tool == "litgpt" else "apart"}
