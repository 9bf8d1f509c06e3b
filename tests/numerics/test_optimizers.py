"""Every optimizer against its source or a plain unchunked reference; skipped steps, resuming, and rounding by chance."""

import functools
import math
from typing import get_args

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from finefit import checkpoint
from finefit.loop import optimizer_step
from finefit.nn import low_rank_step
from finefit.nn.low_bit import CODES, decoding, encoding
from finefit.nn.optimizers import Optimizer, Optimizing
from finefit.nn.rules import rule_of
from finefit.nn.work import Work, mixed, piece_of
from finefit.techniques import Clipping, FusedLoss, OptimizerStates, Packing, Precision
from finefit.updating import OptimizerKind, Update
from tiny import examples_of, relative_error, run_of

KINDS = get_args(OptimizerKind)
RATE, DECAY, STEPS = 1e-2, 0.1, 4
# A matrix either way, a vector that is coded and no whole blocks, a small one, a stack, a matrix of few columns.
SHAPES = ((64, 300), (300, 65), (50001,), (64,), (3, 40, 50), (5000, 2))


def tensors(seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def stepped(how, dtype=torch.float32, found_inf=None, steps=STEPS, gradients=None, shapes=SHAPES, decay=DECAY):
    """Weights after some steps, and the optimizer."""
    weights = [Parameter(w.to(dtype)) for w in tensors(shapes=shapes)]
    optimizer = Optimizer()
    optimizer.rule = rule_of(how)
    optimizer.begin(weights, Optimizing(RATE, decay))
    for step in range(steps):
        for w, g in zip(weights, gradients or tensors(step + 1, shapes), strict=True):
            w.grad = (g * 0.1).to(dtype)
        optimizer.found_inf = found_inf
        optimizer.step()
    return weights, optimizer


def states_of(optimizer):
    return [tensor for state in optimizer.state.values() for tensor in state.values()]


@pytest.mark.parametrize("shape", [*SHAPES, (4095,), (4096,), (1, 300), (300, 1), (256, 257), (257, 300), (600, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_states_take_what_is_planned(kind, dtype, shape):
    how = Update(kind)
    parameter = Parameter(torch.zeros(shape, dtype=dtype))
    kept = [tensor.untyped_storage().nbytes() for tensor in rule_of(how).start(parameter).values()]
    assert sorted(kept) == sorted(how.tensors(piece_of(parameter)))


# --- codes ---


@pytest.mark.parametrize(("bits", "sign"), CODES)
def test_a_code_is_the_nearest_up_to_a_rounding_of_float16(bits, sign):
    values = CODES[bits, sign]
    x = torch.rand(2**18, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.cat([x, x**8, torch.tensor([0.0, 1.0])])
    x = torch.cat([x, -x]) if sign == 0 else x
    patterns = x.float().half().view(torch.int16).int() & 0xFFFF
    found = values.double()[encoding(values)[patterns].long()]
    distances = functools.reduce(torch.minimum, ((x - v).abs() for v in values.double().tolist()))
    excess = (found - x).abs() - distances
    # A float16 is within 2^-11 of the value, or within 2^-25 where it is subnormal: off by twice that at most.
    assert (excess <= 2 * (x.abs() * 2**-11 + 2**-25)).all()
    assert (excess > 0).any()  # or the bound says nothing


def test_every_value_is_its_own_code():
    for values in CODES.values():
        patterns = values.half().view(torch.int16).int() & 0xFFFF
        assert encoding(values)[patterns].tolist() == list(range(len(values)))
        both = decoding(values)
        if len(values) == 16:
            pairs = both.view(torch.float32).view(256, 2)
            assert torch.equal(pairs, torch.stack([values[torch.arange(256) >> 4], values[torch.arange(256) & 15]], 1))


class Unchunked:
    """A moment in codes, of a whole tensor at once, in as few words as it takes."""

    def __init__(self, bits, sign, numel):
        self.block, self.values, self.numel = {8: 256, 4: 128}[bits], CODES[bits, sign], numel
        self.codes = torch.zeros(-(-numel // self.block), self.block, dtype=torch.long)
        self.scale = torch.zeros(len(self.codes))

    def times(self, kept):
        return (self.values[self.codes] * (self.scale * kept)[:, None]).view(-1)[: self.numel]

    def put(self, x):
        blocks = torch.nn.functional.pad(x, (0, -self.numel % self.block)).view(-1, self.block)
        self.scale = blocks.abs().amax(1)
        normal = blocks * self.scale.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()[:, None]
        bounds = (self.values[1:].double() + self.values[:-1].double()) / 2
        self.codes = torch.bucketize(normal.half().double(), bounds)


def reference(kind, w, gradients):
    """AdamW or Lion with coded moments on one vector."""
    bits = 4 if "4" in kind else 8
    moments = [Unchunked(bits, sign, w.numel()) for sign in range(1 if kind == "lion_8bit" else 2)]
    for step, g in enumerate(gradients, 1):
        w = w * (1 - RATE * DECAY)
        if kind == "lion_8bit":
            m = moments[0].times(1)
            w = w.add(torch.lerp(m, g, 0.1).sign(), alpha=-RATE)
            moments[0].put(torch.lerp(m, g, 1 - 0.99))
            continue
        m = moments[0].times(0.9).add(g, alpha=1 - 0.9)
        v = moments[1].times(0.999).addcmul(g, g, value=1 - 0.999)
        floor = torch.tensor(1 - 0.9**step, dtype=torch.float64)
        slope = floor / math.sqrt(1 - 0.999**step)
        w = w.addcdiv(m, v.sqrt().mul(slope).add(floor * 1e-8), value=-RATE)
        for moment, x in zip(moments, (m, v), strict=True):
            moment.put(x)
    return w, moments


@pytest.mark.parametrize("chunk", [1024, 2**18])
@pytest.mark.parametrize("kind", ["adamw_8bit", "adamw_4bit", "lion_8bit"])
def test_coded_moments_are_an_unchunked_reference_to_the_bit(kind, chunk):
    shape = (40, 1001)
    weights, optimizer = stepped(Update(kind, chunk=chunk), shapes=(shape,))
    gradients = [tensors(step + 1, (shape,))[0].view(-1) * 0.1 for step in range(STEPS)]
    expected, moments = reference(kind, tensors(shapes=(shape,))[0].view(-1), gradients)
    assert torch.equal(weights[0].detach().view(-1), expected)
    (state,) = optimizer.state.values()
    for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=False):
        assert torch.equal(state[f"{name}_scale"], moment.scale)
        codes = moment.codes.view(-1)
        packed = codes if kind != "adamw_4bit" else codes[::2] * 16 + codes[1::2]
        assert torch.equal(state[name].long(), packed)


def test_8_bits_are_those_of_bitsandbytes():
    """Weights and dequantised moments after some steps: theirs and ours differ by what either does from exact AdamW."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    shape = ((64, 512),)
    ours, optimizer = stepped(Update("adamw_8bit"), shapes=shape)
    exact, exact_states = stepped(Update("adamw"), shapes=shape)
    w = Parameter(tensors(shapes=shape)[0])
    theirs = bitsandbytes.optim.AdamW8bit([w], lr=RATE, weight_decay=DECAY)
    for step in range(STEPS):
        w.grad = tensors(step + 1, shape)[0] * 0.1
        theirs.step()
    start = tensors(shapes=shape)[0]
    moved = [(one.detach() - start) for one in (ours[0], w, exact[0])]
    assert relative_error(moved[0], moved[2]) <= 1.2 * relative_error(moved[1], moved[2]) < 0.02
    assert relative_error(moved[0], moved[1]) < 0.02
    (state,), (exact_state,) = optimizer.state.values(), exact_states.state.values()
    for name, their, sign in (("exp_avg", "1", 0), ("exp_avg_sq", "2", 1)):
        assert torch.allclose(theirs.state[w][f"absmax{their}"], state[f"{name}_scale"], rtol=0.02)
        found = (CODES[8, sign][state[name].long()].view(-1, 256) * state[f"{name}_scale"][:, None]).view(shape[0])
        assert relative_error(found, exact_state[name]) < 0.02
        assert (theirs.state[w][f"state{their}"].view(-1).int() - state[name].int()).abs().float().mean() < 0.5


@pytest.mark.parametrize(("kind", "most"), [("adamw_8bit", 0.02), ("adamw_4bit", 0.25), ("adamw", 0.0)])
def test_coded_adamw_is_near_adamw(kind, most):
    exact, _ = stepped(Update("adamw"), steps=10)
    found, _ = stepped(Update(kind), steps=10)
    for one, other, start in zip(found, exact, tensors(), strict=True):
        assert relative_error(one.detach() - start, other.detach() - start) <= most


# --- the others ---


def test_sgd_is_that_of_torch():
    found, optimizer = stepped(Update("sgd", chunk=1024))
    weights = [Parameter(w) for w in tensors()]
    groups = [{"params": [w], "weight_decay": DECAY if w.dim() > 1 else 0.0} for w in weights]
    theirs = torch.optim.SGD(groups, lr=RATE)
    for step in range(STEPS):
        for w, g in zip(weights, tensors(step + 1), strict=True):
            w.grad = g * 0.1
        theirs.step()
    assert not states_of(optimizer)
    for one, other in zip(found, weights, strict=True):
        assert relative_error(one.detach(), other.detach()) < 1e-6


def test_lion_is_the_papers_algorithm():
    """arXiv:2302.06675, algorithm 2, in double precision."""
    found, _ = stepped(Update("lion", chunk=1024))
    for i, (one, w) in enumerate(zip(found, tensors(), strict=True)):
        w, m = w.double(), torch.zeros_like(w).double()
        for step in range(STEPS):
            g = (tensors(step + 1)[i] * 0.1).double()
            w = w - RATE * ((0.9 * m + 0.1 * g).sign() + (DECAY if w.dim() > 1 else 0.0) * w)
            m = 0.99 * m + 0.01 * g
        assert relative_error(one.detach(), w) < 1e-6


@pytest.mark.parametrize("chunk", [1024, 2**18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adafactor_is_that_of_transformers(dtype, chunk):
    """As the trainer makes it; a matrix of one column is factored there too."""
    from transformers.optimization import Adafactor

    found, _ = stepped(Update("adafactor", chunk=chunk), dtype)
    weights = [Parameter(w.to(dtype)) for w in tensors()]
    groups = [{"params": [w], "weight_decay": DECAY if w.dim() > 1 else 0.0} for w in weights]
    theirs = Adafactor(groups, lr=RATE, scale_parameter=False, relative_step=False)
    for step in range(STEPS):
        for w, g in zip(weights, tensors(step + 1), strict=True):
            w.grad = (g * 0.1).to(dtype)
        theirs.step()
    for one, other, start in zip(found, weights, tensors(), strict=True):
        moved = other.detach().double() - start.to(dtype).double()
        # A sum in another order moves a bf16 weight now and then to the neighbour of what it would be.
        most = 1e-4 if dtype is torch.float32 else 0.02
        assert relative_error(one.detach().double() - start.to(dtype).double(), moved) < most


def apollo(w, gradients, projections, scale, channels):
    """arXiv:2412.05270, algorithm 1 for a wide matrix, in double precision; ``projections`` is P of each step."""
    m = v = before = 0.0
    for step, (g, p) in enumerate(zip(gradients, projections, strict=True), 1):
        low = p @ g
        m, v = 0.9 * m + 0.1 * low, 0.999 * v + 0.001 * low**2
        direction = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        factor = direction.norm(dim=0) / low.norm(dim=0) if channels else direction.norm() / low.norm()
        scaled = g * factor
        if before and scaled.norm() > 1.01 * before:
            scaled *= 1.01 * before / scaled.norm()
        before = scaled.norm()
        w = w * (1 - RATE * DECAY) - RATE * scale * scaled
    return w


def projection_of(parameter, number, step, how):
    """P of a tensor at a step, drawn by the rule itself."""
    parameter.grad = torch.zeros_like(parameter)
    rule = rule_of(how)
    state = rule.start(parameter)
    state["step"].fill_(step)
    work = Work(how.buffers(piece_of(parameter), skips=False), parameter.device, None, "nearest")
    return low_rank_step._Step(parameter, state, work, how)._projection(number, work.buffers["scalars"][-1]).clone()


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("kind", ["apollo", "apollo_mini"])
def test_apollo_is_the_papers_algorithm(kind, tall):
    how, wide = Update(kind, chunk=4096), (260, 300)
    shape = wide[::-1] if tall else wide
    sizes = (1.0, 3.0, 3.1, 0.2)  # the second grows by far more than is let
    gradients = [torch.randn(wide, generator=torch.Generator().manual_seed(i)) * size for i, size in enumerate(sizes)]
    w = Parameter(tensors(shapes=(wide,))[0].t().contiguous() if tall else tensors(shapes=(wide,))[0])
    p = projection_of(Parameter(torch.empty(shape)), 0, 1, how).double()
    expected = apollo(
        tensors(shapes=(wide,))[0].double(), [g.double() for g in gradients], [p.t() if tall else p] * len(sizes),
        math.sqrt(128) if kind == "apollo_mini" else 1.0, kind == "apollo",
    )  # fmt: skip
    optimizer = Optimizer()
    optimizer.rule = rule_of(how)
    optimizer.begin([w], Optimizing(RATE, DECAY))
    for g in gradients:
        w.grad = g.t().contiguous() if tall else g.clone()
        optimizer.step()
    assert relative_error((w.t() if tall else w).detach(), expected) < 1e-5


def test_a_projection_is_normal_and_drawn_again_in_time():
    how, parameter = Update("apollo"), Parameter(torch.empty(600, 700))
    draws = {(n, step): projection_of(parameter, n, step, how) for n in (0, 1) for step in (1, 200, 201, 401)}
    assert torch.equal(draws[0, 1], draws[0, 200])
    different = [draws[key].flatten() for key in ((0, 1), (0, 201), (0, 401), (1, 1), (1, 201))]
    together = torch.corrcoef(torch.stack(different)).fill_diagonal_(0)
    assert together.abs().max() < 0.02
    p = draws[0, 1].double() * 16
    assert abs(p.mean()) < 0.01 and abs(p.var() - 1) < 0.01 and abs((p**4).mean() - 3) < 0.1
    gram = (draws[0, 1].double().T @ draws[0, 1].double()) if p.shape[0] == 256 else None
    assert gram is not None and abs(gram.diagonal().mean() - 1) < 0.01
    assert gram.fill_diagonal_(0).abs().mean() < 0.06  # √(2/π)/16 = 0.05


# --- what holds for all ---


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_changes_nothing(kind, dtype, rounding):
    how = Update(kind, rounding, 1024)
    before, optimizer = stepped(how, dtype, torch.tensor(0.0))
    kept = [tensor.clone() for tensor in (*before, *states_of(optimizer))]
    for value in (float("inf"), float("nan"), float("-inf")):
        for w in before:
            w.grad.view(-1)[::3] = value
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
    for tensor, was in zip((*before, *states_of(optimizer)), kept, strict=True):
        assert torch.equal(tensor, was)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scaler_that_finds_nothing_changes_nothing(kind):
    plain, _ = stepped(Update(kind, chunk=1024))
    scaled, _ = stepped(Update(kind, chunk=1024), found_inf=torch.tensor(0.0))
    assert all(torch.equal(one, other) for one, other in zip(plain, scaled, strict=True))


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("adamw", "apollo") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_nothing_is_asked_of_a_device(kind):
    """Fake tensors have no values to tell."""
    for dtype, rounding in ((torch.float32, "nearest"), (torch.bfloat16, "stochastic")):
        with FakeTensorMode(allow_non_fake_inputs=True):
            weights = [Parameter(torch.empty(shape, dtype=dtype)) for shape in SHAPES]
            optimizer = Optimizer()
            optimizer.rule = rule_of(Update(kind, rounding, 1024))
            optimizer.begin(weights, Optimizing())
            for found_inf in (None, torch.zeros(())):
                for w in weights:
                    w.grad = torch.empty_like(w)
                optimizer.found_inf = found_inf
                optimizer.step()
        assert all(w.shape == shape for w, shape in zip(weights, SHAPES, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_may_be_stepped_one_by_one(kind, dtype):
    together, _ = stepped(Update(kind, chunk=1024), dtype)
    weights = [Parameter(w.to(dtype)) for w in tensors()]
    optimizer = Optimizer()
    optimizer.rule = rule_of(Update(kind, chunk=1024))
    optimizer.begin(weights, Optimizing(RATE, DECAY))
    for step in range(STEPS):
        for w, g in zip(weights, tensors(step + 1), strict=True):
            w.grad = (g * 0.1).to(dtype)
            group = next(group for group in optimizer.param_groups if any(p is w for p in group["params"]))
            optimizer.update(group, [w])
    assert all(torch.equal(one, other) for one, other in zip(weights, together, strict=True))


@pytest.mark.parametrize("kind", ["adamw_8bit", "lion", "sgd", "adafactor", "apollo_mini"])
def test_tensors_of_two_types_may_be_stepped_together(kind):
    alone = [stepped(Update(kind, chunk=1024), dtype)[0] for dtype in (torch.float32, torch.bfloat16)]
    weights = [Parameter(w.to(dtype)) for dtype in (torch.float32, torch.bfloat16) for w in tensors()]
    optimizer = Optimizer()
    optimizer.rule = rule_of(Update(kind, chunk=1024))
    optimizer.begin(weights, Optimizing(RATE, DECAY))
    for step in range(STEPS):
        for w, g in zip(weights, tensors(step + 1) * 2, strict=True):
            w.grad = (g * 0.1).to(w.dtype)
        optimizer.step()
    same = [torch.equal(one, other) for one, other in zip(weights, alone[0] + alone[1], strict=True)]
    projected = kind == "apollo_mini"  # projections are drawn by the order of tensors
    assert all(same[: len(SHAPES)]) and (all(same) or projected)


@pytest.mark.parametrize(
    ("kind", "precision", "rounding"),
    [
        *((kind, "bf16_mixed", "nearest") for kind in KINDS),
        *((kind, "bf16", "stochastic") for kind in ("adamw", "adamw_8bit", "adamw_4bit", "adafactor", "apollo_mini")),
        ("adamw_8bit", "fp16_mixed", "nearest"),
    ],
)
def test_a_resumed_run_is_the_undisturbed_one(tmp_path, kind, precision, rounding):
    """Three steps, saved, put back into a fresh run, three more: weights and states to the bit."""
    used = (Precision(precision), OptimizerStates(kind, rounding, 2**12), Packing(), FusedLoss(32), Clipping())

    def train(run, steps):
        for step in steps:
            batch = run.collate(examples_of((60, 30), seed=step))
            optimizer_step(run, [batch], 1e-3)

    torch.manual_seed(0)
    whole = run_of(used)
    train(whole, range(3))
    checkpoint.save(whole, 3, tmp_path, "tiny", 1)
    train(whole, range(3, 6))
    torch.manual_seed(5)
    resumed = run_of(used, seed=9)
    assert checkpoint.load_newest(resumed, tmp_path, lambda *told: pytest.fail(str(told))) == 3
    train(resumed, range(3, 6))
    for (name, one), (_, other) in zip(resumed.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert all(
        torch.equal(one, other)
        for one, other in zip(resumed.optimizer.all_held(), whole.optimizer.all_held(), strict=True)
    )


# --- rounding by chance ---


def written(values, times):
    """bf16 (times, n): fp32 ``values`` rounded by chance so many times."""
    n = values.numel()
    work = Work({"scratch": (n, 4), "noise": (n, 4), "seed": (1, 4)}, values.device, None, "stochastic")
    out = torch.empty(times, n, dtype=torch.bfloat16)
    for row in out:
        work.begin()
        work.draw(0, n)
        work.put(row, values.clone())
    return out


def test_rounding_by_chance_is_right_on_average_and_to_a_neighbour():
    torch.manual_seed(0)
    values = torch.randn(4096) * torch.logspace(-8, 8, 4096)
    found = written(values, 2000).double()
    step = 2.0 ** (values.double().abs().log2().floor() - 7)  # between neighbours in bf16
    assert ((found - values.double()).abs() < step).all()
    off = (found.mean(0) - values.double()) / step
    assert off.abs().max() < 5 * 0.5 / math.sqrt(2000)  # five standard errors of a coin at most
    assert abs(off.mean()) < 5 * 0.5 / math.sqrt(2000 * 4096)
    exact = torch.randn(4096).bfloat16()
    assert torch.equal(written(exact.float(), 3), exact.expand(3, -1))


def test_random_bits_are_even():
    """Every bit is set half of the time, neighbours and seeds have nothing in common."""
    rows = torch.stack([mixed(torch.arange(2**16, dtype=torch.int32) + seed, torch.empty(2**16, dtype=torch.int32))
                        for seed in (0, 1, 2**20, 2**31 - 2**17)])  # fmt: skip
    bits = (rows[..., None] >> torch.arange(32, dtype=torch.int32) & 1).double()
    assert (bits.mean(1) - 0.5).abs().max() < 0.01
    assert (bits[:, 1:] * bits[:, :-1]).mean(1).sub(0.25).abs().max() < 0.01
    assert (bits[2] * bits[3]).mean(0).sub(0.25).abs().max() < 0.01


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "adamw_4bit"])
def test_chance_keeps_updates_that_the_nearest_loses(kind):
    """A tenth of half a step of a bf16 weight, two hundred times: nearest stays where it was, chance arrives."""
    moved = {}
    for rounding in ("nearest", "stochastic"):
        torch.manual_seed(1)
        w = Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
        optimizer = Optimizer()
        optimizer.rule = rule_of(Update(kind, rounding))
        optimizer.begin([w], Optimizing(2.0**-9 / 10))
        for _ in range(200):
            w.grad = torch.full_like(w, 0.5)
            optimizer.step()
        moved[rounding] = 1 - w.detach().double().mean().item()
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(200 * 2.0**-9 / 10, rel=0.03)
