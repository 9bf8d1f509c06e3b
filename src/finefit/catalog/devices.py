"""Devices and machines of the catalogue: `gpus.json`, `hosts.json`. Slices of a GPU and sizes of Apple's unified memory
are made of their short tables.

Spelling is forgiving (case, spaces, hyphens, "NVIDIA GeForce", "Tesla", "MIG"), and a label of memory behind a name is
checked, not believed: "L40S-48GB" is the L40S, "A100-64GB" is nothing.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .data import plain_name, read_data

_VENDOR_WORDS = re.compile(
    r"\b(nvidia|geforce|tesla|amd|instinct|radeon|intel|apple|generation|gpu|graphics|mig)\b|\((r|tm)\)"
)
_LABELLED = re.compile(r"^(.+?)[\s_-]+(\d{1,4})\s*g(?:i?b)?$", re.IGNORECASE)
#: A label of memory is met by this much of it: ECC and the driver take up to a sixteenth (a "48GB" L40S reports 45 GiB).
_LABEL_SHARE = (0.92, 1.03)
_APPLE_SHARES = {True: (2, 3), False: (3, 4)}  # what Metal recommends of 32 GB or less, and of more


@dataclass(frozen=True, slots=True)
class CatalogGpu:
    """One device; units as in `gpus.json`. ``visible_mib`` is None where only the driver's number is known."""

    name: str
    memory_mib: int
    fp32_tflops: float
    fp16_tflops: float
    bf16_tflops: float
    bandwidth_gb_per_s: float
    link_gb_per_s: float
    supports_bf16: bool
    aliases: tuple[str, ...] = ()
    visible_mib: int | None = None
    note: str = ""
    peer_gb_per_s: float = 0.0
    supports_fp8: bool = False
    maker: str = "NVIDIA"


@dataclass(frozen=True, slots=True)
class CatalogHost:
    """One kind of machine: ``count`` equal devices by their catalogued name; units as in `hosts.json`."""

    name: str
    gpu: str
    count: int
    host_memory_gib: int
    network_gb_per_s: float
    note: str = ""
    aliases: tuple[str, ...] = ()


def find_gpu(text: str) -> CatalogGpu | None:
    """The catalogued device of a name as people write it or as its driver says it, or None."""
    return _gpu_index().get(_plain_gpu(text)) or _by_label(text)


def find_host(text: str) -> CatalogHost | None:
    """The catalogued machine of a name ("DGX H100", "p4d.24xlarge"), or None."""
    return _host_index().get(plain_name(text))


@functools.cache
def gpus() -> tuple[CatalogGpu, ...]:
    """Every device: whole ones, slices, and Apple's by size of memory."""
    data = read_data("gpus.json")
    whole = tuple(CatalogGpu(**{**entry, "aliases": tuple(entry["aliases"])}) for entry in data["gpus"])
    by_name = {gpu.name: gpu for gpu in whole}
    slices = (one for entry in data["slices"] for one in _slices(by_name[entry["of"]], entry))
    return (*whole, *slices, *(one for entry in data["apple"] for one in _apple(entry)))


def whole_gpus() -> tuple[CatalogGpu, ...]:
    """Devices that can be had by themselves: no slices, no laptops' ones, none that share the machine's memory."""
    names = {entry["name"] for entry in read_data("gpus.json")["gpus"]}
    return tuple(gpu for gpu in gpus() if gpu.name in names and "Laptop" not in gpu.name)


@functools.cache
def hosts() -> tuple[CatalogHost, ...]:
    return tuple(
        CatalogHost(**{**entry, "aliases": tuple(entry["aliases"])}) for entry in read_data("hosts.json")["hosts"]
    )


def gpu_names() -> tuple[str, ...]:
    """Spellings to suggest: names and aliases of devices and machines, and the number alone ("4090")."""
    names = tuple(name for gpu in gpus() for name in (gpu.name, *gpu.aliases))
    machines = tuple(name for host in hosts() for name in (host.name, *host.aliases))
    return names + tuple(_without_series(name) for name in names) + machines


def _slices(gpu: CatalogGpu, entry: dict[str, Any]) -> Iterator[CatalogGpu]:
    """MIG profiles: their own memory, a share of the rates, no link to other devices."""
    for profile, (memory_mib, multiprocessors, eighths) in entry["profiles"].items():
        share = multiprocessors / entry["sms"]
        parents = (*gpu.aliases, *entry["also_of"])
        yield CatalogGpu(
            name=f"{gpu.name} {profile}",
            memory_mib=memory_mib,
            fp32_tflops=round(gpu.fp32_tflops * share, 1),
            fp16_tflops=round(gpu.fp16_tflops * share, 1),
            bf16_tflops=round(gpu.bf16_tflops * share, 1),
            bandwidth_gb_per_s=round(gpu.bandwidth_gb_per_s * eighths / 8),
            link_gb_per_s=gpu.link_gb_per_s,
            supports_bf16=gpu.supports_bf16,
            aliases=tuple(dict.fromkeys(f"{parent} {profile}" for parent in parents)),
            note=f"a MIG slice: {multiprocessors} of {entry['sms']} multiprocessors",
            supports_fp8=gpu.supports_fp8,
            maker=gpu.maker,
        )


def _apple(entry: dict[str, Any]) -> Iterator[CatalogGpu]:
    """A chip with each size of its memory; the least is what the chip's name alone means."""
    note = "unified memory: the part that Metal gives a GPU by default" + (
        f"; {entry['note']}" if "note" in entry else ""
    )
    for size in entry["memory_gb"]:
        part, of = _APPLE_SHARES[size <= 32]
        yield CatalogGpu(
            name=f"{entry['name']} {size}GB",
            memory_mib=size * 1024 * part // of,
            fp32_tflops=entry["fp32_tflops"],
            fp16_tflops=entry["fp32_tflops"],
            bf16_tflops=entry["fp32_tflops"],
            bandwidth_gb_per_s=entry["bandwidth_gb_per_s"],
            link_gb_per_s=entry["bandwidth_gb_per_s"],
            supports_bf16=entry["supports_bf16"],
            aliases=(entry["name"],) if size == entry["memory_gb"][0] else (),
            note=note,
            maker="Apple",
        )


@functools.cache
def _gpu_index() -> dict[str, CatalogGpu]:
    index = {_plain_gpu(gpu.name): gpu for gpu in gpus()}
    for gpu in gpus():
        for alias in (*gpu.aliases, *map(_without_series, (gpu.name, *gpu.aliases))):
            index.setdefault(_plain_gpu(alias), gpu)
    return index


@functools.cache
def _host_index() -> dict[str, CatalogHost]:
    return {plain_name(name): host for host in hosts() for name in (*host.aliases, host.name)}


def _by_label(text: str) -> CatalogGpu | None:
    """``L40S-48GB``: the device ``L40S`` if that label fits its memory, else one whose name goes on from there."""
    match = _LABELLED.match(text.strip())
    if not match:
        return None
    name, (least, most) = _plain_gpu(match[1]), (share * int(match[2]) * 1024 for share in _LABEL_SHARE)
    index = _gpu_index()
    others = [gpu for key, gpu in index.items() if key.startswith(name) and name in index]
    # a device that has a size in its name is found by that: 48 GB of unified memory are no 36
    near = [gpu for gpu in (index.get(name), *others) if gpu and not _LABELLED.match(gpu.name)]
    return next((gpu for gpu in near if "g." not in gpu.name and least <= gpu.memory_mib <= most), None)


def _plain_gpu(text: str) -> str:
    return plain_name(_VENDOR_WORDS.sub(" ", text.lower()))


def _without_series(name: str) -> str:
    return re.sub(r"^(GTX|RTX) ", "", name)
