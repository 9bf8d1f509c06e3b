"""The autograd functions of ``nn``: gradients against finite differences in fp64, rounding against the plain modules.

The norm and the chunked loss reduce in fp32 by design, so there the reference is autograd in fp64, not differences.

Shapes: T tokens, n query heads, m key/value heads, d head size, h hidden, V vocabulary, L labelled tokens, r rank.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from finefit.nn.attend import Rotation
from finefit.nn.attention import Form, SegmentAttention
from finefit.nn.chunked_loss import ChunkedCrossEntropy, Logits
from finefit.nn.gated import ACTIVATIONS, GatedDown
from finefit.nn.lora_linear import LoRALinear, _LowRank, _LowRankDropped
from finefit.nn.norm import _RMSNorm
from tiny import relative_error


def random(*shape, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return drawn.to(dtype).requires_grad_()


def results(function, inputs, dtype):
    """Output and gradients of ``function`` at ``inputs`` in ``dtype``, for the same upstream gradient."""
    cast = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    out = function(*cast)
    out.backward(random(*out.shape, seed=9).detach().to(out.dtype))
    return [out.detach(), *(x.grad for x in cast if x is not None)]


def assert_no_worse(ours, plain, inputs, times=2.0):
    """In bf16 our error against fp64 is at most ``times`` the plain implementation's own."""
    rounded = [None if x is None else x.detach().bfloat16().double() for x in inputs]
    exact = results(plain, rounded, torch.float64)
    for found, theirs, reference in zip(
        results(ours, rounded, torch.bfloat16), results(plain, rounded, torch.bfloat16), exact, strict=True
    ):
        assert relative_error(found, reference) <= times * relative_error(theirs, reference)


# --- norm


def plain_norm(offset):
    """Transformers' modules: Llama rounds before it multiplies, Gemma multiplies by 1 + weight and rounds once."""

    def llama(x, weight):
        wide = x.float() if x.dtype == torch.bfloat16 else x
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * normal.to(x.dtype)

    def gemma(x, weight):
        wide = x.float() if x.dtype == torch.bfloat16 else x
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normal * (1.0 + weight.to(wide.dtype))).to(x.dtype)

    return gemma if offset else llama


def our_norm(offset):
    return lambda x, weight: _RMSNorm.apply(x, weight, 1e-6, offset, offset != 0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(2, 37, 64), (5, 16), (1, 3, 4, 8)], ids=str)
def test_norm_against_fp64(shape, offset):
    inputs = [random(*shape, scale=3.0), random(shape[-1], seed=1)]
    exact = results(plain_norm(offset), [x.float().double() for x in inputs], torch.float64)
    for found, expected in zip(results(our_norm(offset), inputs, torch.float32), exact, strict=True):
        assert relative_error(found, expected) <= 1e-6


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0])
def test_norm_in_bf16_is_no_worse_than_plain(offset, scale):
    assert_no_worse(our_norm(offset), plain_norm(offset), [random(400, 96, scale=scale), random(96, seed=1)])


def test_norm_of_a_frozen_weight_asks_for_no_gradient():
    x, weight = random(4, 8, dtype=torch.float32), random(8, dtype=torch.float32).detach()
    our_norm(0.0)(x, weight).sum().backward()
    assert weight.grad is None and x.grad is not None


# --- gated product


def gated_inputs(rank=0, bias=False, tokens=5, dtype=torch.float64):
    """gate, up, then the down projection's weight, bias, A and B, None where there is none."""
    shapes = [(tokens, 6), (tokens, 6), (4, 6), (4,) if bias else None]
    shapes += [(rank, 6), (4, rank)] if rank else [None, None]
    return [None if shape is None else random(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def our_gated(kind, scale=1.7):
    return lambda gate, up, *down: GatedDown.apply(gate, up, kind, scale, *down)


def plain_gated(kind, scale=1.7):
    def mlp(gate, up, weight, bias, a, b):
        product = ACTIVATIONS[kind][0](gate) * up
        y = F.linear(product, weight, bias)
        return y if a is None else y + scale * F.linear(F.linear(product, a), b)

    return mlp


DOWN = {"linear": {}, "bias": {"bias": True}, "low rank": {"rank": 3}, "low rank and bias": {"rank": 3, "bias": True}}


@pytest.mark.parametrize("down", DOWN.values(), ids=DOWN)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_mlp_against_differences(kind, down):
    """A bias has its gradient summed in fp32, so it is compared by autograd below."""
    gate, up, weight, bias, *low = gated_inputs(**down)
    bias = None if bias is None else bias.detach()
    assert torch.autograd.gradcheck(our_gated(kind), (gate, up, weight, bias, *low))


@pytest.mark.parametrize("down", DOWN.values(), ids=DOWN)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_mlp_is_the_plain_one(kind, down):
    inputs = gated_inputs(**down)
    for found, expected in zip(
        results(our_gated(kind), inputs, torch.float32), results(plain_gated(kind), inputs, torch.float64), strict=True
    ):
        assert relative_error(found, expected) <= 1e-6


@pytest.mark.parametrize("frozen", ["weight", "weight and low rank"])
def test_gated_mlp_of_a_frozen_base(frozen):
    gate, up, weight, _, a, b = gated_inputs(rank=0 if frozen == "weight" else 2)
    weight = weight.detach()
    out = our_gated("silu")(gate, up, weight, None, a, b)
    expected = plain_gated("silu")(gate, up, weight, None, a, b)
    leaves = [x for x in (gate, up, a, b) if x is not None]
    grads = [torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (out, expected)]
    assert all(relative_error(mine, plain) <= 1e-12 for mine, plain in zip(*grads, strict=True))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_mlp_in_bf16_is_no_worse_than_plain(kind, rank):
    inputs = gated_inputs(rank=rank, tokens=300)
    assert_no_worse(our_gated(kind), plain_gated(kind), inputs)


# --- attention


def plain_attention(bounds, form):
    """Full scores under a mask that is block-diagonal, causal and as wide as the window; in fp32 at least."""

    def attention(q_tnd, k_tmd, v_tmd):
        tokens, heads, _ = q_tnd.shape
        groups = heads // k_tmd.shape[1]
        owner = torch.bucketize(torch.arange(tokens), torch.tensor(bounds[1:]), right=True)
        query, key = torch.arange(tokens)[:, None], torch.arange(tokens)
        seen = (owner[:, None] == owner) & (key <= query)
        if form.window is not None:
            seen &= key > query - form.window
        k_tnd, v_tnd = (x.repeat_interleave(groups, 1) for x in (k_tmd, v_tmd))
        scores = torch.einsum("tnd,snd->nts", q_tnd, k_tnd) * form.scale
        if form.softcap is not None:
            scores = torch.tanh(scores / form.softcap) * form.softcap
        scores = scores.masked_fill(~seen, float("-inf"))
        wide = scores.float() if scores.dtype == torch.bfloat16 else scores
        return torch.einsum("nts,snd->tnd", wide.softmax(-1).to(q_tnd.dtype), v_tnd)

    return attention


def our_attention(bounds, form):
    return lambda q, k, v: SegmentAttention.apply(q, k, v, bounds, form)


def angles(tokens, turned):
    angle = torch.arange(tokens)[:, None] * 0.3 ** torch.arange(turned // 2)
    return (torch.cat([part, part], -1) for part in (angle.cos(), angle.sin()))


def plain_rotation(x, cos, sin):
    """Transformers' own, of Phi 3: it turns the first part of a head."""
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    x_1ntd = x.transpose(0, 1)[None]
    return apply_rotary_pos_emb(x_1ntd, x_1ntd, cos[None].to(x.dtype), sin[None].to(x.dtype))[0][0].transpose(0, 1)


def our_rotation(x, cos, sin):
    return Rotation.apply(x, cos.to(x.dtype), sin.to(x.dtype))


@pytest.mark.parametrize("turned", [8, 4])
def test_rotation_is_that_of_transformers(turned):
    x, (cos, sin) = random(7, 3, 8), (t.double() for t in angles(7, turned))
    assert torch.autograd.gradcheck(lambda x: Rotation.apply(x, cos, sin), (x,))
    assert relative_error(Rotation.apply(x, cos, sin).detach(), plain_rotation(x, cos, sin).detach()) <= 1e-15


def test_rotation_in_bf16_is_no_worse_than_plain():
    cos, sin = angles(300, 16)
    cos, sin = cos.bfloat16(), sin.bfloat16()
    ours, plain = (partial(turn, cos=cos, sin=sin) for turn in (our_rotation, plain_rotation))
    assert_no_worse(ours, plain, [random(300, 3, 16)], 1.0)


SEQUENCES = [(0, 1), (0, 1, 4, 5), (0, 130), (0, 300), (0, 128, 256), (0, 3, 260, 261, 400)]
FORMS = {
    "causal": Form(0.5), "window": Form(0.5, window=5), "wide window": Form(0.5, window=150),
    "softcap": Form(0.5, softcap=2.0), "window and softcap": Form(0.3, window=20, softcap=1.5),
}  # fmt: skip


def qkv(tokens, heads=4, groups=2, dim=6, scale=1.0):
    shapes = ((tokens, heads, dim), (tokens, groups, dim), (tokens, groups, dim))
    return [random(*shape, seed=i, scale=scale) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("bounds", SEQUENCES, ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_attention_is_the_masked_softmax(form, bounds):
    inputs = qkv(bounds[-1])
    exact = results(plain_attention(bounds, form), inputs, torch.float64)
    for found, expected in zip(results(our_attention(bounds, form), inputs, torch.float64), exact, strict=True):
        assert (found - expected).abs().max() <= 1e-12 * max(1.0, expected.abs().max())


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_attention_against_differences(form, heads):
    """A random direction of all differences at once (fast mode): over 128 rows there are thousands."""
    bounds = (0, 1, 140, 144)
    inputs = qkv(144, *heads, dim=3)
    assert torch.autograd.gradcheck(our_attention(bounds, form), tuple(inputs), fast_mode=True)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_attention_in_bf16_is_no_worse_than_plain(form):
    bounds = (0, 200, 201, 330)
    assert_no_worse(our_attention(bounds, form), plain_attention(bounds, form), qkv(330, dim=16, scale=2.0))


# --- chunked loss


def plain_loss(label_l, softcap):
    def loss(hidden_lh, weight_vh):
        logits = F.linear(hidden_lh, weight_vh)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return F.cross_entropy(logits, label_l, reduction="sum")

    return loss


def our_loss(label_l, softcap, chunk):
    form = Logits(softcap=softcap)
    return lambda hidden_lh, weight_vh: ChunkedCrossEntropy.apply(hidden_lh, weight_vh, None, label_l, chunk, form)


def labels(count, vocab=50):
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 16, 37, 1000])
def test_chunked_loss_against_fp64(chunk, softcap):
    label_l = labels(37)
    inputs = [x.float().double() for x in (random(37, 24), random(50, 24, seed=1))]
    exact = results(plain_loss(label_l, softcap), inputs, torch.float64)
    for found, expected in zip(results(our_loss(label_l, softcap, chunk), inputs, torch.float32), exact, strict=True):
        assert relative_error(found, expected) <= 2e-6


@pytest.mark.parametrize("form", [Logits(), Logits(0.0625), Logits(2.0, softcap=3.0)])
def test_chunked_loss_of_a_shifted_and_scaled_head_against_fp64(form):
    label_l = labels(37)
    inputs = [x.float().double() for x in (random(37, 24), random(50, 24, seed=1), random(50, seed=2))]

    def plain(hidden_lh, weight_vh, bias_v):
        logits = form.scale * F.linear(hidden_lh, weight_vh, bias_v)
        capped = logits if form.softcap is None else torch.tanh(logits / form.softcap) * form.softcap
        return F.cross_entropy(capped, label_l, reduction="sum")

    def ours(hidden_lh, weight_vh, bias_v):
        return ChunkedCrossEntropy.apply(hidden_lh, weight_vh, bias_v, label_l, 16, form)

    exact = results(plain, inputs, torch.float64)
    for found, expected in zip(results(ours, inputs, torch.float32), exact, strict=True):
        assert relative_error(found, expected) <= 2e-6


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_chunked_loss_of_a_frozen_side(frozen):
    label_l = labels(20)
    hidden, weight = random(20, 8, dtype=torch.float32), random(50, 8, dtype=torch.float32, seed=1)
    both = results(our_loss(label_l, 2.0, 6), (hidden, weight), torch.float32)
    trained = {"hidden": [weight], "weight": [hidden], "both": []}[frozen]
    for side in (hidden, weight):
        side.requires_grad_(any(side is t for t in trained))
    loss = our_loss(label_l, 2.0, 6)(hidden, weight)
    assert loss.item() == both[0].item() and loss.requires_grad == bool(trained)
    if trained:
        loss.backward(random(seed=9).detach().float())
        assert torch.equal(trained[0].grad, both[2 if trained[0] is weight else 1])


@pytest.mark.parametrize("chunk", [1, 16, 24, 1000])
def test_rows_after_the_last_label_have_no_loss_and_no_gradient(chunk):
    hidden, weight, bias = random(32, 8), random(50, 8, seed=1), random(50, seed=2)
    form = Logits(0.5, softcap=3.0)

    def loss(rows):
        return lambda h, w, b: ChunkedCrossEntropy.apply(h[:rows], w, b, labels(21), chunk, form)

    found, expected = (results(loss(rows), (hidden, weight, bias), torch.float32) for rows in (32, 21))
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) <= 1e-6
    assert not found[1][21:].any()


def test_chunked_loss_of_no_labels_is_zero():
    loss = our_loss(labels(0), None, 4)(random(0, 8, dtype=torch.float32), random(50, 8, dtype=torch.float32))
    loss.backward()
    assert loss.item() == 0.0


def test_chunked_loss_cannot_be_used_twice_by_mistake():
    """Its gradients are scaled in place; a second backward through it must be an error, not a wrong number."""
    hidden, weight = random(9, 8, dtype=torch.float32), random(50, 8, dtype=torch.float32, seed=1)
    loss = our_loss(labels(9), None, 4)(hidden, weight)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize(("chunk", "times"), [(256, 2.0), (32, 4.0)])
def test_chunked_loss_in_bf16_is_little_worse_than_plain(chunk, times, softcap):
    """A bf16 head's gradient is summed in bf16 over chunks: 4 of them are within 2 of the plain error, 32 within 4."""
    label_l = labels(1024)
    inputs = [random(1024, 64), random(50, 64, seed=1, scale=0.3)]
    assert_no_worse(our_loss(label_l, softcap, chunk), plain_loss(label_l, softcap), inputs, times)


def test_chunked_loss_of_an_fp32_head_does_not_mind_many_chunks():
    label_l = labels(1024)
    hidden, weight = random(1024, 64, dtype=torch.bfloat16), random(50, 64, seed=1, scale=0.3, dtype=torch.float32)
    grads = []
    for chunk in (1024, 8):
        loss = our_loss(label_l, None, chunk)(hidden, weight)
        grads.append(torch.autograd.grad(loss, weight)[0])
    exact = torch.autograd.grad(plain_loss(label_l, None)(hidden.double(), weight.bfloat16().double()), weight)[0]
    errors = [relative_error(grad, exact) for grad in grads]
    assert errors[1] <= 1.1 * errors[0]


# --- low rank


def low_rank_layers(sides, bias):
    """For each output side: weight (frozen), bias, A, B as ``_LowRank`` takes them, and its scale."""
    tensors, scales = [], []
    for n, side in enumerate(sides):
        tensors += [random(side, 6, seed=10 * n + 1).detach(), random(side, seed=10 * n + 4).detach() if bias else None]
        tensors += [random(2, 6, seed=10 * n + 2), random(side, 2, seed=10 * n + 3)]
        scales.append(1.7 + n)
    return tensors, tuple(scales)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sides", [(4,), (4, 3, 5)], ids=str)
def test_low_rank_against_differences(bias, sides):
    x, (tensors, scales) = random(5, 6), low_rank_layers(sides, bias)
    trained = [t for t in tensors if t is not None and t.requires_grad]

    def layers(x, *trained):
        given = iter(trained)
        return _LowRank.apply(x, scales, *(next(given) if t is not None and t.requires_grad else t for t in tensors))

    assert torch.autograd.gradcheck(layers, (x, *trained))
    for n, found in enumerate(layers(x, *trained)):
        weight, offset, a, b = tensors[4 * n : 4 * n + 4]
        expected = F.linear(x, weight + scales[n] * b @ a, offset)
        assert relative_error(found.detach(), expected.detach()) <= 1e-14


def test_low_rank_of_a_first_layer_gives_no_gradient_to_its_input():
    x, (tensors, scales) = random(5, 6).detach(), low_rank_layers((4, 3), bias=False)
    sum(y.sum() for y in _LowRank.apply(x, scales, *tensors)).backward()
    assert x.grad is None
    assert [t.grad is not None for t in tensors if t is not None] == [False, True, True] * 2


def test_low_rank_with_dropout_against_differences():
    x, a, b = random(5, 6), random(2, 6, seed=2), random(4, 2, seed=3)

    def layer(x, a, b):
        torch.manual_seed(0)
        return _LowRankDropped.apply(x, a, b, 1.7, 0.4)

    assert torch.autograd.gradcheck(layer, (x, a, b))


def both_lora_layers(bias, dropout, rank=4, dtype=torch.float32):
    """Our layer and peft's, over the same linear, with the same A and a B that is not zero."""
    from peft.tuners.lora.config import LoraConfig
    from peft.tuners.lora.layer import Linear

    linear = nn.Linear(24, 10, bias=bias).requires_grad_(False).to(dtype)
    config = LoraConfig(r=rank, lora_alpha=8.0, lora_dropout=dropout)
    peft = Linear(linear, "default", config=config, r=rank, lora_alpha=8.0)
    ours = LoRALinear(linear, rank, 8.0, dropout)
    with torch.no_grad():
        for mine, theirs, seed in ((ours.lora_A, peft.lora_A, 5), (ours.lora_B, peft.lora_B, 6)):
            mine.copy_(random(*mine.shape, seed=seed))
            theirs["default"].weight.copy_(mine)
    return ours.train(), peft.train()


@pytest.mark.parametrize("bias", [False, True])
def test_lora_layer_is_pefts(bias):
    ours, peft = both_lora_layers(bias, 0.0)
    inputs = [random(3, 7, 24)]
    for found, expected in zip(results(ours, inputs, torch.float32), results(peft, inputs, torch.float32), strict=True):
        assert relative_error(found, expected) <= 1e-6
    assert relative_error(ours.lora_A.grad, peft.lora_A["default"].weight.grad) <= 1e-6
    assert relative_error(ours.lora_B.grad, peft.lora_B["default"].weight.grad) <= 1e-6
    assert ours.weight.grad is None


def test_lora_layer_drops_as_often_as_pefts_and_the_same_in_the_mean():
    ours, peft = both_lora_layers(False, 0.25)
    x = random(1, 24, dtype=torch.float32).detach()
    many = x.expand(20_000, 24).contiguous()
    torch.manual_seed(0)
    means = [layer(many).double().mean(0) for layer in (ours, peft)]
    spreads = [layer(many).double().std(0) for layer in (ours, peft)]
    exact = both_lora_layers(False, 0.0)[0]
    with torch.no_grad():
        exact.weight.copy_(ours.weight)
    assert relative_error(means[0].detach(), exact(x)[0].detach()) <= 0.02
    assert relative_error(spreads[0].detach(), spreads[1].detach()) <= 0.03
    assert torch.equal(ours.eval()(x), ours(x))


def test_dropout_of_a_lora_layer_is_of_single_elements():
    """With weight 0, A = B = 1 and x = 1 the output is a binomial count over the kept share."""
    linear = nn.Linear(1000, 1, bias=False)
    nn.init.zeros_(linear.weight)
    layer = LoRALinear(linear, 1, 1.0, 0.2).train()
    nn.init.ones_(layer.lora_A)
    nn.init.ones_(layer.lora_B)
    torch.manual_seed(0)
    kept = layer(torch.ones(2000, 1000)).detach().flatten() * 0.8
    assert kept.mean().item() == pytest.approx(800, abs=3 * (1000 * 0.16 / 2000) ** 0.5)
    assert kept.var().item() == pytest.approx(160, rel=0.1)


def test_lora_layer_in_bf16_is_no_worse_than_pefts():
    ours, peft = both_lora_layers(False, 0.0, dtype=torch.bfloat16)
    weight = ours.weight.double()
    a, b = ours.lora_A.detach().double(), ours.lora_B.detach().double()
    x = random(300, 24, dtype=torch.bfloat16)
    exact = x.double() @ (weight + 2.0 * b @ a).t()
    assert relative_error(ours(x).detach(), exact.detach()) <= 2 * relative_error(peft(x).detach(), exact.detach())
