"""What leaves the device comes back as it was: runs with and without each offload, on the device, step by step."""

import functools

from checks.common import (
    At,
    Check,
    Figures,
    after_steps,
    at_most,
    config_of,
    equal,
    error,
    examples_of,
    loss_and_gradients,
    run_of,
    trained,
)  # fmt: skip
from finefit.techniques import (
    Accumulation,
    ActivationOffload,
    Checkpointing,
    Clipping,
    FusedLoss,
    FusedOps,
    Lora,
    OptimizerOffload,
    Packing,
    ParameterOffload,
    Precision,
    QuantizedBase,
    Technique,
)  # fmt: skip

COMMON = (FusedOps(), Packing(), FusedLoss(64), Accumulation(2, most_steps=2), Clipping(1.0))
# The processor's fused AdamW rounds in another order than a device's: a part of the update itself.
BETWEEN_KERNELS = 2e-3


def without(techniques: tuple[Technique, ...], offload: Technique, at: At) -> Figures:
    """Loss and gradients, and weights after three steps, to the bit as the device repeats itself."""
    config = config_of(at)
    examples = examples_of(at, config)
    plain = [run_of((*COMMON, *techniques), config, at.device) for _ in range(2)]
    run = run_of((*COMMON, *techniques, offload), config, at.device)
    # FlashAttention adds up its gradient of queries in an order of its own.
    floor = 2e-3 if at.is_cuda and Precision("bf16") in techniques else 0.0
    both = [loss_and_gradients(r, examples) for r in plain]
    first = equal("gradients", loss_and_gradients(run, examples), both, floor)
    last = equal("weights", after_steps(run, examples), [after_steps(r, examples) for r in plain], floor)
    return {"gradients": first, "weights": last}


def optimizer(kind: str, offload: OptimizerOffload, at: At) -> Figures:
    """Three updates on the host beside three on the device: the same sums stepped by another device's kernel."""
    config = config_of(at)
    examples = examples_of(at, config)
    adapted = (Lora(8),) if kind == "fp16" else ()
    plain = run_of((Precision(kind), *COMMON, *adapted), config, at.device)
    run = run_of((Precision(kind), *COMMON, *adapted, offload), config, at.device)
    start = trained(plain)
    _, expected = after_steps(plain, examples)
    _, found = after_steps(run, examples)
    updates = [{name: after[name] - start[name] for name in start} for after in (found, expected)]
    off = error(*updates)
    if not at.is_cuda:
        at_most("updates", off, 0.0)
    # A bf16 weight keeps 8 bits, so an update that is rounded the other way is off by a large part of itself.
    at_most("updates", off, 0.2 if kind == "bf16" else BETWEEN_KERNELS)
    return {"update_error": off, "bitwise": off == 0}


def _cases() -> dict[str, Check]:
    found = {}
    checkpointed, adapted = (Checkpointing(6),), (Lora(8),)
    for place in ("host", "disk"):
        on_cuda = place == "host"
        for kind in ("fp32", "bf16"):
            precise = Precision(kind)
            run = functools.partial(without, (precise, *checkpointed), ActivationOffload(place))
            found[f"activation_offload {place}, {kind}, with and without"] = Check(run, on_cuda)
            run = functools.partial(without, (precise, *adapted, Checkpointing(3)), ParameterOffload(place))
            found[f"parameter_offload {place}, {kind}, with and without"] = Check(run, on_cuda)
        run = functools.partial(without, (*adapted, QuantizedBase(4, "double", 2**14)), ParameterOffload(place))
        found[f"parameter_offload {place}, 4 bits, with and without"] = Check(run, on_cuda)
    places = {"host": ("host", "host"), "disk": ("disk", "host"), "disk, sums too": ("disk", "disk")}
    for name, place in places.items():
        kinds = ("fp32", "bf16", "bf16_mixed", "fp16", "fp16_mixed")
        for kind in kinds if name == "host" else kinds[::2]:
            run = functools.partial(optimizer, kind, OptimizerOffload(*place))
            found[f"optimizer_offload {name}, {kind}, with and without"] = Check(run)
    return found


CHECKS = _cases()
