"""TRL's SFTTrainer with PEFT on the benchmark's job: one run, one result file.

    python benchmarks/peers/trl_run.py --model MODEL --data demo.jsonl --micro-batch 1 --out trl.json

Weights are bf16. By default the step runs under bf16 autocast and adapters are float32, as TRL and PEFT have it;
``--autocast off`` and ``--adapters bfloat16`` (or both) are choices that both libraries document. With ``--packing
packing`` TRL chooses which examples share a row, so a step is four rows of 1,024 tokens rather than 16 given examples,
and its losses are not comparable.
"""

import json
import tempfile
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

# SmolLM2's own template with TRL's markers around what is trained: the answer and its end of turn.
_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> None:
    given = arguments(
        __doc__.partition("\n")[0],
        packings=("none", "padding_free", "packing"),
        adapters=("float32", "bfloat16"),
        autocast=("on", "off"),
    )
    from measure import Recorder, write

    recorder = Recorder()
    with tempfile.TemporaryDirectory() as scratch:
        _trainer(given, scratch, recorder).train()
    packages = ("torch", "transformers", "peft", "accelerate", "datasets")
    write(recorder, given, tool="TRL", distribution="trl", packages=packages)


def _trainer(given: Arguments, scratch: str, recorder: Any) -> Any:
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    conversations = _conversations(given)
    _install_template(tokenizer, conversations, may_truncate=given.packing != "padding_free")
    lora = LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=list(TARGETS), bias="none", task_type="CAUSAL_LM"
    )
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
    if given.adapters == "bfloat16":
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    config = SFTConfig(
        output_dir=str(Path(scratch, "out")),
        max_steps=given.steps,
        per_device_train_batch_size=given.micro_batch,
        gradient_accumulation_steps=given.accumulation,
        # Padding-free refuses a maximum without packing; _install_template has checked the lengths.
        max_length=None if given.packing == "padding_free" else MAX_LENGTH,
        packing=given.packing == "packing",
        padding_free=given.packing == "padding_free",
        assistant_only_loss=True,
        gradient_checkpointing=given.checkpointing,
        bf16=given.autocast,
        use_cpu=True,
        optim="adamw_torch_fused",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
    )
    return SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(conversations),
        processing_class=tokenizer,
        peft_config=None if given.adapters == "bfloat16" else lora,
        callbacks=[recorder],
    )


def _conversations(given: Arguments) -> list[dict[str, Any]]:
    """The examples of the run, in file order; all of them for packing, which fills rows from the whole set."""
    with given.data.open(encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return found if given.packing == "packing" else found[: given.steps * GLOBAL_BATCH]


def _install_template(tokenizer: Any, conversations: list[dict[str, Any]], *, may_truncate: bool) -> None:
    for number, conversation in enumerate(conversations, start=1):
        messages = conversation["messages"]
        own = tokenizer.apply_chat_template(messages, tokenize=False)
        if own != tokenizer.apply_chat_template(messages, tokenize=False, chat_template=_TEMPLATE):
            raise SystemExit("this model's chat template is not SmolLM2's: give _TEMPLATE its text, with markers")
        if not may_truncate and len(tokenizer(own, add_special_tokens=False)["input_ids"]) > MAX_LENGTH:
            raise SystemExit(f"example {number} is longer than {MAX_LENGTH} tokens: padding-free does not truncate")
    tokenizer.chat_template = _TEMPLATE


if __name__ == "__main__":
    main()
