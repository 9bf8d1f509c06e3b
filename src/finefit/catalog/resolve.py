"""From what a user typed to where a model's config is: a path, a catalogue entry, the Hugging Face cache, the hub.

Only config.json is ever downloaded. Without huggingface_hub, or without a network, the answer is an error with a hint.
"""

import os
import urllib.parse
from pathlib import Path

from ..errors import ModelError, did_you_mean
from . import CatalogModel, find_mirrored, find_model, model_names

_PROXY_VARIABLES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def locate_model(text: str) -> Path | CatalogModel:
    """A folder, a config file or a catalogue entry. ModelError suggests the nearest name."""
    path = Path(text).expanduser()
    if text.strip() and (path.is_dir() or path.is_file()):
        return _local(path)
    if _looks_like_path(text):
        raise ModelError(f"there is no model folder or config at '{text}'", hint="give a folder that has config.json")
    found = find_model(text)
    if found:
        return found
    if _is_hub_id(text):
        return cached_snapshot(text) or find_mirrored(text) or _from_hub(text)
    raise ModelError(f"no model is called '{text}'", hint=_suggestion(text))


def cached_snapshot(hub_id: str) -> Path | None:
    """The newest snapshot of ``org/name`` with a config.json in the Hugging Face cache, or None."""
    repository = cache_folder() / f"models--{hub_id.replace('/', '--')}"
    main = repository / "refs" / "main"
    named = [repository / "snapshots" / main.read_text("utf-8").strip()] if main.is_file() else []
    others = sorted((repository / "snapshots").glob("*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    return next((folder for folder in (*named, *others) if (folder / "config.json").is_file()), None)


def cache_folder() -> Path:
    """Where huggingface_hub keeps repositories: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    direct = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if direct:
        return Path(direct).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def _local(path: Path) -> Path:
    if path.is_dir():
        return path
    if path.suffix == ".json":
        return path
    weights = path.suffix in (".safetensors", ".bin", ".gguf")
    hint = "give the folder that holds it" if weights else "give a folder that has config.json"
    raise ModelError(f"'{path}' is not a model folder or a config.json", hint=hint)


def _from_hub(hub_id: str) -> Path:
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if offline:
        raise ModelError(f"'{hub_id}' is not in the cache and HF_HUB_OFFLINE is set", hint=_suggestion(hub_id))
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.constants import ENDPOINT
    except ImportError as error:
        hint = f"{_suggestion(hub_id)}; or `pip install huggingface-hub` to read its config from the hub"
        raise ModelError(f"'{hub_id}' is not in the catalogue or the cache", hint=hint) from error
    if not _is_reachable(ENDPOINT):
        raise ModelError(
            f"'{hub_id}' is not in the catalogue or the cache, and there is no network", hint=_suggestion(hub_id)
        )
    try:
        return Path(hf_hub_download(hub_id, "config.json", etag_timeout=5))
    except Exception as error:  # its own tree plus requests', httpx's and OSError, varying by version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"'{hub_id}' could not be read from the hub: {reason}", hint=_suggestion(hub_id)) from error


def _is_reachable(endpoint: str) -> bool:
    """Whether the host's name resolves: spares the client's half minute of retries. Behind a proxy only it can know."""
    if any(os.environ.get(name) for name in _PROXY_VARIABLES):
        return True
    import socket  # only this rare way needs it, and start-up counts in milliseconds

    try:
        socket.getaddrinfo(urllib.parse.urlsplit(endpoint).hostname, 443)
    except OSError:
        return False
    return True


def _suggestion(text: str) -> str:
    if _is_hub_id(text) and (same := find_model(text.rpartition("/")[2])):
        return f"did you mean '{same.name}'?"  # the same name by whoever made it, before names that only look alike
    near = did_you_mean(text, model_names()) or did_you_mean(text.rpartition("/")[2], model_names())
    return near or "give a model folder, a config.json, a hub id (org/name) or a catalogued name (SmolLM2-135M)"


def _is_hub_id(text: str) -> bool:
    organisation, slash, name = text.partition("/")
    return bool(organisation and slash and name) and "/" not in name and " " not in text


def _looks_like_path(text: str) -> bool:
    return not text.strip() or text.startswith((".", "/", "~", "\\")) or text.endswith(".json")
