"""A tiny model with a tokenizer and a chat template, and a data file: fixtures of whole runs."""

import json

import pytest


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A llama of four layers with random weights."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "chats.jsonl")


def make_model(folder, **changes):
    """``changes`` are of the model's config."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<|im_start|>": 0, "<|im_end|>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": True}  # fmt: skip
    config = LlamaConfig(**{**shape, **changes}, vocab_size=len(words), bos_token_id=0, eos_token_id=1, pad_token_id=1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_data(path):
    rows = [
        chat(f"Count from {i}." + " Please." * (i % 5), " ".join(str(n) for n in range(i, i + 2 + i % 7)))
        for i in range(48)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job_of(model, data, folder, words):
    """A new run in ``folder`` with these settings."""
    from finefit import config, session

    said = [f"{key}={word}" for key, word in {"output_dir": str(folder), **words}.items()]
    return session.new(config.load(None, said, {"model": str(model), "data": str(data)}), None)


def events_of(folder):
    """Of a run's log, by name."""
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {kind: [e for e in found if e["event"] == kind] for kind in {e["event"] for e in found}}


def losses(found, kind="step"):
    """The last that was told of each step."""
    last = {event["step"]: event["loss"] for event in found[kind]}
    return [last[step] for step in sorted(last)]
