"""Talking to a run's result in the terminal: the base with the trained adapter (or the trained model), greedy, streamed.

Lines starting with ``/`` are commands: ``/new`` forgets the talk, ``/quit`` ends it.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from . import adapter, models
from .assets import model_folder
from .build import rewritten
from .errors import CheckpointError, ModelError
from .examples import tokenizer_of
from .plan import load as load_plan
from .session import base_of
from .techniques import Lora, ParameterOffload, Precision, QuantizedBase, Technique


def loaded(run: Path, base: bool) -> tuple[Any, Any]:
    """(model, tokenizer) of a run's result, of its base, or of a plain model named instead of a run."""
    if not (run / "plan.json").is_file():
        if run.exists() and not (run / "config.json").is_file():
            raise CheckpointError("there is no run and no model here", where=str(run))
        folder = model_folder(str(run)).folder
        return _model(folder, [Precision("bf16")], folder), tokenizer_of(folder)
    from .config import load

    config, plan = load(run / "config.yaml"), load_plan(run / "plan.json")
    folder = base_of(run, config)[0]
    kept = [t for t in plan.techniques if _is_kept(t, base)]
    if plan.method == "full" and not base:
        _result(run, adapter.MODEL)
        return _model(run, kept, run), tokenizer_of(folder)
    model = _model(folder, kept, folder)
    if not base:
        _result(run, adapter.ADAPTER)
        adapter.load_trained(model, run)
    return model, tokenizer_of(folder)


def _is_kept(technique: Technique, base: bool) -> bool:
    """What says how the model is held, here as it was trained: a base without its adapters, or all of it."""
    if isinstance(technique, ParameterOffload) and technique.place == "host":
        return torch.cuda.is_available()  # without a device of its own the host is where the weights are anyway
    return isinstance(technique, (Precision, QuantizedBase, ParameterOffload)) or (
        isinstance(technique, Lora) and not base
    )


def _result(run: Path, name: str) -> None:
    if not (run / name).is_file():
        raise CheckpointError(f"the run has no {name} yet", where=str(run), hint=f"finefit resume {run} finishes it")


def _model(config_folder: Path, techniques: list[Any], weights: Path) -> Any:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = rewritten(models.config_of(config_folder), techniques, device)
    models.fill_from(weights)(run.model, device)
    return run.model.eval()


def talk(run: Path, base: bool, max_tokens: int) -> None:
    """Read, answer, until the input ends."""
    model, tokenizer = loaded(run, base)
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("this model has no chat template", where=str(run), hint="chat needs an instruct model")
    print(f"talking to {'the base of ' if base else ''}{run} (/new forgets, /quit ends)", file=sys.stderr)
    history: list[dict[str, str]] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line == "/new":
            history.clear()
        elif line:
            history.append({"role": "user", "content": line})
            history.append({"role": "assistant", "content": reply(model, tokenizer, history, max_tokens)})


def reply(model: Any, tokenizer: Any, history: list[dict[str, str]], max_tokens: int) -> str:
    """The model's answer, printed as it comes."""
    from transformers import TextStreamer

    ids = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = ids.to(model.device)
    with torch.no_grad():
        out = model.generate(
            **ids, max_new_tokens=max_tokens, do_sample=False, use_cache=True, pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id, streamer=TextStreamer(tokenizer, True, skip_special_tokens=True),
            temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
    text: str = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
