"""Arithmetic of the device beside the processor's: types, attention, quantised weights, rules of optimizers, rounding."""

import functools
from typing import Any, get_args

import torch
from torch import Tensor, nn

from checks.common import (
    CPU,
    At,
    Check,
    Figures,
    Wrong,
    at_most,
    config_of,
    equal,
    error,
    examples_of,
    loss_and_gradients,
    micro_batches,
    run_of,
    trained,
)  # fmt: skip
from finefit.loop import optimizer_step
from finefit.nn.attention import Form, SegmentAttention
from finefit.nn.blockwise import Tables
from finefit.nn.flash import PackedFlash
from finefit.nn.optimizers import Optimizer, Optimizing
from finefit.nn.quantised_linear import QuantisedLinear
from finefit.nn.rules import rule_of
from finefit.spec import PrecisionKind
from finefit.techniques import Accumulation, Clipping, FusedLoss, FusedOps, Lora, Packing, Precision
from finefit.updating import OptimizerKind, Update

_HALF = 2**-8  # a rounding to bf16
_LOOSE: dict[str, float] = {"fp32": 2e-4, "bf16": 6e-2, "bf16_mixed": 6e-2, "fp16": 1e-2, "fp16_mixed": 1e-2}


def precision(kind: str, at: At) -> Figures:
    """Loss and gradients beside the processor's in fp32, and a step that is taken."""
    config = config_of(at)
    examples = examples_of(at, config)
    common = (Packing(), FusedOps(), FusedLoss(64), Accumulation(2, most_steps=2), Lora(8))
    expected_loss, expected = loss_and_gradients(run_of(common, config, CPU), examples)
    run = run_of((Precision(kind), *common), config, at.device)
    loss, gradients = loss_and_gradients(run, examples)
    off = error(gradients, expected)
    at_most("loss", abs(loss / expected_loss - 1), _LOOSE[kind])
    at_most("gradients", off, _LOOSE[kind])
    before = trained(run)
    first = optimizer_step(run, micro_batches(run, examples), 1e-3)[0]
    second = optimizer_step(run, micro_batches(run, examples), 1e-3)[0]
    if not second < first:
        raise Wrong(f"the loss went from {first} to {second} by a step")
    return {"gradient_error": off, "update": error(trained(run), before)}


def overflow(offloaded: bool, at: At) -> Figures:
    """A scale beyond fp16's range: the update is skipped, the scale halved; a sane one after it is taken."""
    from finefit.techniques import OptimizerOffload

    config = config_of(at)
    examples = examples_of(at, config)
    extra = (OptimizerOffload("host", "host"),) if offloaded else ()
    run = run_of((Precision("fp16_mixed"), Packing(), FusedOps(), FusedLoss(64), Clipping(1.0), *extra),
                 config, at.device)  # fmt: skip
    batches, start = micro_batches(run, examples), trained(run)
    high = 2.0**80
    run.scaler.update(high)
    optimizer_step(run, batches, 1e-3)
    at_most("weights after a step that is to be skipped", error(trained(run), start), 0.0)
    scale = run.scaler.get_scale()
    if scale != high / 2:
        raise Wrong(f"the scale is {scale:g} after a skipped step, not {high / 2:g}")
    run.scaler.update(2.0**10)
    optimizer_step(run, batches, 1e-3)
    moved = error(trained(run), start)
    if moved == 0:
        raise Wrong("a step with a sane scale was skipped")
    return {"moved": moved}


def attended(function: Any, device: torch.device, dtype: torch.dtype, form: Form, groups: int) -> list[Tensor]:
    """Output and gradients of attention over four packed sequences, in fp32 on the host."""
    bounds, generator = (0, 48, 176, 1200, 1216), torch.Generator().manual_seed(0)
    shapes = [(bounds[-1], 8, 64), (bounds[-1], 8 // groups, 64), (bounds[-1], 8 // groups, 64)]
    drawn = [torch.randn(shape, generator=generator) for shape in (*shapes, shapes[0])]
    q, k, v, grad = (x.to(device, dtype) for x in drawn)
    for x in (q, k, v):
        x.requires_grad_()
    out = function.apply(q, k, v, bounds, form)
    out.backward(grad)
    return [out.detach().float().cpu(), *(x.grad.float().cpu() for x in (q, k, v))]


def attention(function: Any, dtype: torch.dtype, at: At) -> Figures:
    """Beside finefit's own on the processor in fp32: one kind of heads and four of grouped ones, with a window and without."""
    most = 2e-5 if dtype is torch.float32 else 2 * _HALF
    found: Figures = {}
    for window in (None, 100):
        for groups in (1, 4):
            form = Form(0.125, window)
            exact = attended(SegmentAttention, CPU, torch.float32, form, groups)
            ours = attended(function, at.device, dtype, form, groups)
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]
            found[f"window {window}, {groups} queries a key"] = errors
            at_most(f"window {window}, {groups} queries a key", max(errors), most)
    return found


def packed_or_not(at: At) -> Figures:
    """Each example alone and all in one row: the same loss and gradients."""
    config = config_of(at)
    examples = examples_of(at, config)
    loss, one = loss_and_gradients(run_of((FusedOps(), FusedLoss(64)), config, at.device), examples)
    whole = (Packing(), Accumulation(len(examples)), FusedOps(), FusedLoss(64))
    packed_loss, packed = loss_and_gradients(run_of(whole, config, at.device), examples)
    at_most("loss", abs(packed_loss / loss - 1), 1e-5)
    at_most("gradients", error(packed, one), 2e-4)
    return {"gradient_error": error(packed, one)}


def quantised(bits: int, scales: str, at: At) -> Figures:
    """Codes made on the processor are brought back on the device to the bit; those it makes itself are nearly all the same."""
    rows, columns, chunk = (96, 130, 2**14) if at.quick else (1000, 1030, 2**18)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    made = {}
    for device in (CPU, at.device):
        tables = Tables(bits, scales, device)
        tables.reset()
        linear = QuantisedLinear(nn.Linear(columns, rows, bias=False, device=device), bits, scales, chunk, tables)
        linear.weight.copy_(weight)
        made[device] = linear.weight
    ours, theirs = made[CPU], made[at.device]
    same = float((theirs.codes.cpu() == ours.codes).double().mean())
    own_off = float((theirs.dense(torch.float32).cpu() - ours.dense(torch.float32)).norm() / weight.norm())
    at_most("share of codes that differ", 1 - same, 1e-3)
    at_most("values it quantised itself", own_off, 1e-3)
    with torch.no_grad():
        for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
            p.copy_(q)
    for dtype in (torch.float32, torch.bfloat16):
        if not torch.equal(theirs.dense(dtype).cpu(), ours.dense(dtype)):
            raise Wrong(f"the same codes are other values in {dtype}")
    return {"codes_that_differ": 1 - same, "own_error": own_off}


def _stepped(kind: OptimizerKind, device: torch.device, at: At) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Updates of some tensors after three steps of the same gradients, and the states."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((300, 520), (520, 300), (5000,), (70,))
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    start = [p.detach().cpu().clone() for p in parameters]
    optimizer = Optimizer()
    optimizer.rule = rule_of(Update(kind, "nearest", 2**14))
    optimizer.begin(parameters, Optimizing(1e-2, 0.1))
    for _ in range(3):
        for p in parameters:
            p.grad = (torch.randn(p.shape, generator=generator) * 0.1).to(device)
        optimizer.step()
    updates = {str(i): (p.detach().cpu() - s) for i, (p, s) in enumerate(zip(parameters, start, strict=True))}
    kept = {f"{i} {key}": t.float().cpu() for i, p in enumerate(parameters)
            for key, t in optimizer.states_of(p).items() if t.dtype != torch.uint8}  # fmt: skip
    return updates, kept


def rule(kind: OptimizerKind, at: At) -> Figures:
    """Three steps of the same gradients on the device and on the processor."""
    (ours, states), (theirs, others) = _stepped(kind, at.device, at), _stepped(kind, CPU, at)
    # A code that falls to the other side is off by its distance to the next one.
    most = 2e-2 if "bit" in kind else 1e-3
    at_most("updates", error(ours, theirs), most)
    return {"update_error": error(ours, theirs), "state_error": error(states, others) if others else 0.0}


def rounded_by_chance(at: At) -> Figures:
    """A tenth of a step of bf16 moves a tenth of the weights by a step; to the nearest it moves none."""
    n, tenth = 2**18, 0.1 * 2**-8
    moved = {}
    for rounding in ("nearest", "stochastic"):
        weight = nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device=at.device))
        optimizer = Optimizer()
        optimizer.rule = rule_of(Update("sgd", rounding, 2**14))
        optimizer.begin([weight], Optimizing(1.0))
        torch.manual_seed(0)
        weight.grad = torch.full_like(weight, tenth)
        optimizer.step()
        moved[rounding] = float((weight != 1).double().mean())
    at_most("share moved by the nearest", moved["nearest"], 0.0)
    at_most("share moved by chance less a tenth", abs(moved["stochastic"] - 0.1), 0.005)
    return moved


def norm(at: At) -> Figures:
    """The global norm and gradients clipped to it, on the device."""
    config = config_of(at)
    examples = examples_of(at, config)
    plain = [loss_and_gradients(run_of((Packing(),), config, at.device), examples) for _ in range(2)]
    clipped = loss_and_gradients(run_of((Packing(), Clipping(0.01)), config, at.device), examples)
    size = sum(float(t.double().square().sum()) for t in clipped[1].values()) ** 0.5
    at_most("norm of what is clipped to 0.01, less that", abs(size / 0.01 - 1), 1e-3)
    wide = loss_and_gradients(run_of((Packing(), Clipping(1e6)), config, at.device), examples)
    return {"norm": size, **equal("gradients that are clipped to more than they are", wide, plain)}


CHECKS = {
    **{f"precision {kind}": Check(functools.partial(precision, kind)) for kind in get_args(PrecisionKind)},
    "fp16, an overflow": Check(functools.partial(overflow, False)),
    "fp16, an overflow, stepped on the host": Check(functools.partial(overflow, True)),
    "attention in segments": Check(functools.partial(attention, SegmentAttention, torch.float32)),
    "attention in segments, bf16": Check(functools.partial(attention, SegmentAttention, torch.bfloat16)),
    "flash attention, bf16": Check(functools.partial(attention, PackedFlash, torch.bfloat16), cuda=True),
    "flash attention, fp16": Check(functools.partial(attention, PackedFlash, torch.float16), cuda=True),
    "packed or one by one": Check(packed_or_not),
    **{f"values in {bits} bits, scales {scales}": Check(functools.partial(quantised, bits, scales))
       for bits in (8, 4, 3, 2) for scales in ("double", "plain")},
    **{f"rule of {kind}": Check(functools.partial(rule, kind)) for kind in get_args(OptimizerKind)},
    "rounding by chance": Check(rounded_by_chance),
    "clipping by the norm": Check(norm),
}  # fmt: skip
