"""Ways out when nothing fits: what the user could change, what each would need, and how fast it would be.

Mildest first: memory.* left to the plan, shorter examples, another method, then more memory (a larger budget where the
device has it, else more of the same devices, else the smallest catalogued GPU that is enough). Another method is named as what it is, a choice of
quality. Each way has been tried by the search before it is named. Declines to take one of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Literal

from .batches import Uniform
from .catalog import find_gpu, whole_gpus
from .errors import ConfigError
from .hardware import HardwareSpec
from .spec import JobSpec
from .units import format_bytes, parse_budget

if TYPE_CHECKING:
    from .candidates import Question

STEP = 64  # lengths that are tried are multiples of this, and at least it
MIB = 2**20
_MEANT = (
    "max_grad_norm",
    "optimizer",
    "rounding",
    "qlora.bits",
    "qlora.scales",
)  # pins that say what is trained, not how memory is used
_SMALLER: dict[str, tuple[Literal["lora", "qlora"], ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",)}
_PRICE = {
    "lora": "adapters on a frozen base instead of all weights: a choice of quality",
    "qlora": "adapters on a quantised base: a choice of quality",
}
_MOST_IN_MACHINE = 8  # GPUs
_MOST_OF_DEVICE = 0.96  # no larger budget is proposed: something else is always on a device


@dataclass(frozen=True, slots=True)
class Way:
    """One change, in the user's words, with what the best plan after it would need; ``price`` is what it costs."""

    says: str
    needs_bytes: int
    tokens_per_s: float
    price: str = ""

    def text(self) -> str:
        speed = f"{self.tokens_per_s:,.0f}" if self.tokens_per_s >= 10 else f"{self.tokens_per_s:.2g}"
        price = f" ({self.price})" if self.price else ""
        return f"{self.says} would fit: {format_bytes(self.needs_bytes)}, {speed} tokens/s{price}"


@dataclass(frozen=True, slots=True)
class Trials:
    """How the search answers a changed question; None where it has no answer."""

    least: "Callable[[Question], int | None]"
    """Bytes of the smallest combination."""
    best: "Callable[[Question], tuple[int, float] | None]"
    """Bytes and tokens per second of the plan."""


def hint(question: "Question", trials: Trials, most: int = 3) -> str:
    """The cheapest ways as lines of a hint, or an empty string where none of ours would help."""
    return "\n  or: ".join(way.text() for way in islice(ways_out(question, trials), most))


def ways_out(question: "Question", trials: Trials) -> Iterator[Way]:
    """Changes that really fit, mildest first; a second smaller method comes last."""
    free = replace(question, job=_freed(question))
    also = ""
    if free.job != question.job:
        yield from _way("leave memory.* to the plan (auto)", free, trials)
        also = "memory.* auto and "
    yield from _shorter(also, free, trials, "longer examples are truncated")
    in_bf16 = list(_bf16(also, question if not also else free, trials))
    yield from in_bf16
    yield from _unclipped(also, question if not also else free, trials)
    yield from _fewer_bits(also, free, trials)
    if not in_bf16:
        yield from _smaller_states(also, question if not also else free, trials)
    smaller = [way for method in _SMALLER.get(question.job.method, ()) for way in _method(also, method, free, trials)]
    yield from smaller[:1]
    yield from _more_memory(question, trials)
    yield from smaller[1:]


def _freed(question: "Question") -> JobSpec:
    """The job without what the user fixed about memory."""
    return replace(question.job, pins=tuple(pin for pin in question.job.pins if pin[0] in _MEANT))


def _way(says: str, question: "Question", trials: Trials, price: str = "") -> Iterator[Way]:
    """The change if it fits. Bytes of the smallest combination are asked first: that is less work than a search."""
    needed = trials.least(question)
    if needed is None or needed > question.budget.limit_bytes:
        return
    if found := trials.best(question):
        yield Way(says, *found, price)


def _bf16(also: str, question: "Question", trials: Trials) -> Iterator[Way]:
    """Weights, and what is kept of them while they train, in bf16, where the plan would hold them in fp32."""
    if question.job.precision != "auto" or not question.hardware.supports_bf16:
        return
    trained = question.job.method == "full"
    price = "updates are rounded to bf16: a choice of quality" if trained else "the frozen weights are rounded to bf16"
    other = replace(question, job=replace(question.job, precision="bf16"))
    yield from _way(f"{also}memory.precision=bf16", other, trials, price)


def _unclipped(also: str, question: "Question", trials: Trials) -> Iterator[Way]:
    """Without clipping, which is all that keeps some steps from being taken in backward."""
    job = question.job
    if job.pin("max_grad_norm") is None or not float(job.pin("max_grad_norm") or 0.0):
        return
    pins = (*(pin for pin in job.pins if pin[0] != "max_grad_norm"), ("max_grad_norm", "0.0"))
    price = "each weight is stepped in backward, and gradients are not clipped: a choice of quality"
    yield from _way(f"{also}train.max_grad_norm=0", replace(question, job=replace(job, pins=pins)), trials, price)


def _fewer_bits(also: str, question: "Question", trials: Trials) -> Iterator[Way]:
    """A quantised base in the most bits below what was asked for that fit."""
    job = question.job
    fewer = [bits for bits in (4, 3, 2) if bits < int(job.pin("qlora.bits") or 4)] if job.method == "qlora" else []
    for bits in fewer:
        pins = (*(pin for pin in job.pins if pin[0] != "qlora.bits"), ("qlora.bits", str(bits)))
        price = f"the base is rounded to {2**bits} levels: a choice of quality"
        says = f"{also}qlora.bits={bits}"
        if found := list(_way(says, replace(question, job=replace(job, pins=pins)), trials, price)):
            yield from found
            return


def _smaller_states(also: str, question: "Question", trials: Trials) -> Iterator[Way]:
    """AdamW's moments in 8 bits where all weights train and nothing else was said, with weights in bf16 if need be."""
    job = question.job
    if job.method != "full" or job.pin("optimizer") not in (None, "adamw"):
        return
    other = replace(job, pins=(*(p for p in job.pins if p[0] != "optimizer"), ("optimizer", "adamw_8bit")))
    price = "moments are rounded to 8 bits: a choice of quality"
    alone = list(_way(f"{also}train.optimizer=adamw_8bit", replace(question, job=other), trials, price))
    yield from alone
    if not alone and job.precision == "auto" and question.hardware.supports_bf16:
        both = replace(question, job=replace(other, precision="bf16"))
        price = "updates are rounded to bf16, moments to 8 bits: a choice of quality"
        yield from _way(f"{also}train.optimizer=adamw_8bit memory.precision=bf16", both, trials, price)


def _shorter(says: str, question: "Question", trials: Trials, price: str) -> Iterator[Way]:
    """With the longest examples that fit, found by bisection: what is needed grows with the length."""
    low, high = 0, -(-question.batches.longest // STEP)  # low fits, high does not or is no shorter
    while high - low > 1:
        middle = (low + high) // 2
        needed = trials.least(_at_length(question, middle * STEP))
        if needed is None:
            return
        low, high = (middle, high) if needed <= question.budget.limit_bytes else (low, middle)
    if low:
        yield from _way(f"{says}train.max_length={low * STEP}", _at_length(question, low * STEP), trials, price)


def _method(also: str, method: Literal["lora", "qlora"], question: "Question", trials: Trials) -> Iterator[Way]:
    """Another method alone, or with shorter examples where it alone does not fit."""
    other = replace(question, job=replace(question.job, method=method))
    alone = list(_way(f"{also}method={method}", other, trials, _PRICE[method]))
    yield from alone or _shorter(f"{also}method={method} ", other, trials, _PRICE[method])


def _at_length(question: "Question", length: int) -> "Question":
    job = replace(question.job, max_length=length, longest=length)
    return replace(question, job=job, batches=Uniform(job.global_batch_size, length, job.labelled_share))


def _more_memory(question: "Question", trials: Trials) -> Iterator[Way]:
    """The budget that would be enough, if the device has so much; else more devices, and the smallest GPU that would do."""
    device = question.hardware
    needed = trials.least(question)
    if needed is not None and needed <= _MOST_OF_DEVICE * device.memory_bytes:
        text = f"{ceil(needed / MIB)}MiB"
        larger = replace(question, budget=parse_budget(text, device.memory_bytes))
        yield from _way(f"memory.budget={text}", larger, trials)
        return
    yield from _more_devices(question, trials)
    yield from _larger_device(question, trials)


def _more_devices(question: "Question", trials: Trials) -> Iterator[Way]:
    """The fewest of the same devices that are enough, twice as many at a time, in one machine or in whole ones."""
    device = question.hardware
    most = device.count * 16 if device.nodes > 1 else _MOST_IN_MACHINE
    count = device.count * 2
    while device.kind == "cuda" and count <= most:
        on = replace(device, count=count, nodes=device.nodes * count // device.count if device.nodes > 1 else 1)
        if found := list(_way(f"with --gpu '{on.says}', it", replace(question, hardware=on), trials)):
            yield from found
            return
        count *= 2


def _larger_device(question: "Question", trials: Trials) -> Iterator[Way]:
    """As many of the smallest catalogued GPU of the same maker on which the budget would be enough."""
    device = question.hardware
    known = find_gpu(device.name)
    maker = known.maker if known else "NVIDIA"
    tensors: dict[bool, int] = {}  # bytes needed beside the context, by whether the device knows bf16
    for gpu in sorted(whole_gpus(), key=lambda gpu: gpu.memory_mib):
        if gpu.maker != maker or gpu.memory_mib * MIB <= device.memory_bytes:
            continue
        on = replace(HardwareSpec.from_name(gpu.name), count=device.count, nodes=device.nodes)
        on = replace(on, network_bytes_per_s=device.network_bytes_per_s)
        try:
            budget = parse_budget(question.budget.text, on.memory_bytes)
        except ConfigError:  # a budget that is no part of this device
            continue
        if on.supports_bf16 not in tensors:
            least = trials.least(replace(question, hardware=on))
            tensors[on.supports_bf16] = 2**62 if least is None else least - on.context_bytes
        if tensors[on.supports_bf16] + on.context_bytes > budget.limit_bytes:
            continue
        which = "on a larger device" if device.count == 1 else f"on {device.count} larger devices"
        says = f"{which}, {gpu.name} ({format_bytes(on.memory_bytes)}), it"
        if found := list(_way(says, replace(question, hardware=on, budget=budget), trials)):
            yield from found
            return
