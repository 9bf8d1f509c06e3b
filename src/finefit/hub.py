"""Whether the Hugging Face hub can be reached, told in seconds: its own client retries for half a minute.

A name lookup and a TCP connection, nothing more: what a firewall or the hub itself then refuses shows in the download.
"""

import os
import queue
import socket
import threading
import urllib.parse
import urllib.request

DEFAULT_ENDPOINT = "https://huggingface.co"
_PORTS = {"https": 443, "http": 80}


def endpoint() -> str:
    """The hub's address, or the mirror that HF_ENDPOINT names."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def is_switched_off() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def is_reachable(timeout_s: float = 3.0) -> bool:
    """Whether somebody answers where the client will connect to: the hub, or the proxy before it."""
    return not is_switched_off() and _answers(*_first_hop(endpoint()), timeout_s)


def why_not() -> str:
    """The reason there is no hub, as the end of a sentence, or an empty string when it is there."""
    if is_switched_off():
        return "HF_HUB_OFFLINE is set"
    return "" if is_reachable() else f"{endpoint()} cannot be reached"


def _first_hop(address: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(address)
    host = parts.hostname or ""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(host):
        return host, parts.port or _PORTS.get(parts.scheme, 443)
    through = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return through.hostname or "", through.port or _PORTS.get(through.scheme, 1080)


def _answers(host: str, port: int, timeout_s: float) -> bool:
    """A lookup cannot be given a time limit, so it runs aside and is left behind."""
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def knock() -> None:
        try:
            socket.create_connection((host, port), timeout_s).close()
        except (OSError, UnicodeError):  # UnicodeError: what HF_ENDPOINT says is no host name
            answers.put(False)
        else:
            answers.put(True)

    threading.Thread(target=knock, daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return False
