"""LLaMA-Factory's own training entry point (run_exp) on the benchmark's job: one run, one result file.

    python benchmarks/peers/llamafactory_run.py --model MODEL --data demo.jsonl --micro-batch 1 --out lf.json

Everything it is told is in the settings dictionary below, the same keys as in its YAML files. Weights stay bf16, the
adapters float32, the step runs under bf16 autocast. Packing is its ``neat_packing``: rows of fixed length with a
block-diagonal mask; its plain packing lets examples see each other and is declined, padding-free it does not have.
It imports torchaudio though text needs none of it: an empty module stands in where it is not installed.
"""

import importlib.machinery
import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from job import (
    ALPHA,
    GLOBAL_BATCH,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MAX_LENGTH,
    RANK,
    SEED,
    TARGETS,
    Arguments,
    arguments,
)

_TEMPLATE = "smollm2_end_of_turn"


def main() -> None:
    given = arguments(__doc__.partition("\n")[0], packings=("none", "packing"), adapters=("float32",), autocast=("on",))
    _stand_in("torchaudio")
    from llamafactory.train.tuner import run_exp

    from measure import Recorder, write

    _register_template()
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as scratch:
        run_exp(_settings(given, Path(scratch)), callbacks=[recorder])
    packages = ("torch", "transformers", "peft", "accelerate", "datasets")
    write(recorder, given, tool="LLaMA-Factory", distribution="llamafactory", packages=packages)


def _settings(given: Arguments, scratch: Path) -> dict[str, Any]:
    return {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(given.model),
        "template": _TEMPLATE,
        "dataset": "examples",
        "dataset_dir": str(_data_folder(given, scratch)),
        "cutoff_len": MAX_LENGTH,
        "neat_packing": given.packing == "packing",
        "disable_shuffling": True,
        "overwrite_cache": True,
        "finetuning_type": "lora",
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "lora_target": ",".join(TARGETS),
        "output_dir": str(scratch / "out"),
        "max_steps": given.steps,
        "per_device_train_batch_size": given.micro_batch,
        "gradient_accumulation_steps": given.accumulation,
        "disable_gradient_checkpointing": not given.checkpointing,
        "bf16": True,
        "use_cpu": True,
        "optim": "adamw_torch_fused",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": SEED,
    }


def _data_folder(given: Arguments, scratch: Path) -> Path:
    """The data set as LLaMA-Factory registers one: a file, and dataset_info.json that names its columns."""
    lines = given.data.read_text(encoding="utf-8").split("\n")
    wanted = lines if given.packing == "packing" else lines[: given.steps * GLOBAL_BATCH]
    (scratch / "examples.jsonl").write_text("\n".join(line for line in wanted if line) + "\n", encoding="utf-8")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    info = {"file_name": "examples.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    (scratch / "dataset_info.json").write_text(json.dumps({"examples": info}), encoding="utf-8")
    return scratch


def _register_template() -> None:
    """Its ``smollm2`` template with the system message of the model's own, and ending at the end of turn.

    The stock one puts a full stop after that message and trains the line break after each turn.
    """
    from llamafactory.data.formatter import StringFormatter
    from llamafactory.data.template import TEMPLATES, register_template

    stock = TEMPLATES["smollm2"]
    register_template(
        name=_TEMPLATE,
        format_user=stock.format_user,
        format_assistant=StringFormatter(slots=["{{content}}<|im_end|>"]),
        format_system=stock.format_system,
        stop_words=list(stock.stop_words),
        default_system=stock.default_system.removesuffix("."),
    )


def _stand_in(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
        sys.modules[name] = module


if __name__ == "__main__":
    main()
