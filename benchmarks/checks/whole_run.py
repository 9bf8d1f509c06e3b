"""``finefit train`` as a user has it, in a process of its own: a tiny random model with a tokenizer of words, and a resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from checks.common import At, Check, Figures, Wrong, at_most

SOURCE = Path(__file__).resolve().parents[2] / "src"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|> ' + message['role'] + ' ' + message['content'] + ' <|im_end|> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
STEPS, SAVED = 8, 4
WORDS = [str(n) for n in range(60)]
SETTINGS = ("lora.rank=4", "train.global_batch_size=8", "train.max_length=128", "train.learning_rate=1e-2",
            f"train.steps={STEPS}", f"train.save_every={SAVED}", "train.log_every=1")  # fmt: skip


def write_model(folder: Path) -> None:
    """A llama of four layers, its tokenizer, its chat template."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    special = ["<|im_start|>", "<|im_end|>", "<unk>"]
    words = [*special, "user", "assistant", "Count", "from", "please", ".", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=len(words), max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_data(path: Path) -> None:
    def chat(i: int) -> dict[str, Any]:
        question = f"Count from {i} ." + " please" * (i % 5)
        answer = " ".join(WORDS[n] for n in range(i, i + 2 + i % 7))
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    path.write_text("".join(json.dumps(chat(i)) + "\n" for i in range(48)))


class Folder:
    """A model, its data, and runs beside them."""

    def __init__(self, at: At) -> None:
        self.at, self.path = at, at.folder / "whole"
        if not self.path.exists():
            self.path.mkdir(parents=True)
            write_model(self.path / "model")
            write_data(self.path / "chats.jsonl")

    def command(self, name: str, *more: str) -> list[str]:
        kind = f"hardware.device={self.at.device.type}"
        return [*_FINEFIT, "train", str(self.path / "model"), str(self.path / "chats.jsonl"), *SETTINGS, kind,
                f"output_dir={self.path}", f"name={name}", *more]  # fmt: skip

    def environment(self) -> dict[str, str]:
        home = str(self.path / "home")
        others = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
        return {
            **os.environ,
            "HOME": home,
            "XDG_CACHE_HOME": f"{home}/cache",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": others,
        }

    def done(self, words: list[str]) -> float:
        """Seconds of a command that must end well."""
        started = time.perf_counter()
        ended = subprocess.run(words, env=self.environment(), capture_output=True, text=True, timeout=240)
        if ended.returncode:
            raise Wrong(f"exit {ended.returncode}: {(ended.stdout + ended.stderr)[-1500:]}")
        return time.perf_counter() - started

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Whole lines of the run's log so far."""
        path = self.path / name / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [event for event in map(json.loads, (x for x in lines if x.endswith("\n"))) if event["event"] == kind]

    def losses(self, name: str) -> list[float]:
        last = {event["step"]: event["loss"] for event in self.events(name, "step")}
        return [last[step] for step in sorted(last)]


_FINEFIT = [sys.executable, "-m", "finefit"]


def trained(method: str, at: At) -> Figures:
    """To its end: the loss falls, every technique is verified, the adapter or model is there."""
    folder, name = Folder(at), f"whole-{method}"
    seconds = folder.done(folder.command(name, f"method={method}"))
    before, after = (folder.events(name, "eval")[i]["loss"] for i in (0, -1))
    if not after < before:
        raise Wrong(f"the held-out loss went from {before} to {after}")
    left = [t["name"] for t in folder.events(name, "build")[-1]["techniques"] if not t["verified"]]
    wanted = folder.path / name / ("model.safetensors" if method == "full" else "adapter_model.safetensors")
    if left or not wanted.is_file():
        raise Wrong(f"not verified: {left}; {wanted.name} is {'' if wanted.is_file() else 'not '}there")
    memory = folder.events(name, "memory")[0]
    steps = folder.events(name, "step")
    return {
        "seconds": seconds, "loss_before": before, "loss_after": after, "losses": folder.losses(name),
        "predicted_bytes": memory["predicted"]["peak_bytes"], "measured_bytes": memory["measured"]["peak_bytes"],
        "allocated_bytes": max((step.get("allocated_bytes", 0) for step in steps), default=0),
    }  # fmt: skip


def resumed(at: At) -> Figures:
    """Killed after its first checkpoint and resumed: the losses of a run that was left alone."""
    folder = Folder(at)
    if not folder.events("whole-lora", "end"):
        folder.done(folder.command("whole-lora", "method=lora"))
    process = subprocess.Popen(folder.command("killed", "method=lora"), env=folder.environment(),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.perf_counter() + 240
    while process.poll() is None and not folder.events("killed", "save") and time.perf_counter() < deadline:
        time.sleep(0.005)
    was_killed = process.poll() is None
    if was_killed:
        process.send_signal(signal.SIGKILL)
    process.wait()
    if was_killed:  # or it was through before it could be
        folder.done([*_FINEFIT, "resume", str(folder.path / "killed")])
    found, expected = folder.losses("killed"), folder.losses("whole-lora")
    if len(found) != STEPS:
        raise Wrong(f"{len(found)} steps in the log, not {STEPS}")
    off = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    at_most("losses beside those of a run left alone", off, 1e-3 if at.is_cuda else 0.0)
    return {"error": off, "killed": was_killed, "losses": found}


def _lora(at: At) -> Figures:
    return trained("lora", at)


def _full(at: At) -> Figures:
    return trained("full", at)


def _qlora(at: At) -> Figures:
    return trained("qlora", at)


CHECKS = {
    "finefit train, lora": Check(_lora),
    "finefit train, full": Check(_full),
    "finefit train, qlora": Check(_qlora),
    "finefit resume": Check(resumed),
}
