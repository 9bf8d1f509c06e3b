"""Quantised weights: codes, scales and what is brought back; and that a layer of them is a layer of that matrix.

``tests/golden/nf4.json`` is what bitsandbytes makes of a small matrix. Renew it, where bitsandbytes is installed:
    python tests/numerics/test_quantised.py

Shapes: o outputs, i inputs, N = o·i, b blocks of 64, g groups of 256 blocks.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from finefit.nn.blockwise import BLOCK, DYNAMIC, GROUP, LLOYD2, LLOYD3, NF4, Tables
from finefit.nn.lora_linear import LoRALinear, linears
from finefit.nn.quantised_linear import QuantisedLinear, QuantisedWeight
from finefit.run import blocks_of
from finefit.techniques import Checkpointing, FusedLoss, FusedOps, Lora, Packing, Precision, QuantizedBase
from finefit.techniques.quantized_base import FORMS
from tiny import config_of, examples_of, loss_and_gradients, relative_error, run_of

GOLDEN = Path(__file__).parents[1] / "golden" / "nf4.json"
CHUNK = 2**14


def quantised(weight, bits=4, scales="double", chunk=CHUNK):
    tables = Tables(bits, scales, weight.device)
    tables.reset()
    made = QuantisedWeight(weight, bits, scales, chunk, tables)
    made.copy_(weight)
    return made


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(rows=8, columns=128):
    """A matrix that is the same on every machine: quotients of whole numbers."""
    index = torch.arange(rows * columns)
    return (((index * 7919) % 1009 - 504).float() / 251).view(rows, columns)


# --- codes


def test_codes_are_those_of_the_papers_appendix():
    """Appendix E: quantiles of a normal distribution, an exact zero, ends of −1 and 1."""
    quantile = torch.distributions.Normal(0.0, 1.0).icdf
    below, above = torch.linspace(0.9677083, 0.5, 8)[:-1], torch.linspace(0.9677083, 0.5, 9)[:-1]
    both = torch.cat([-quantile(below), torch.zeros(1), quantile(above).flip(0)])
    assert torch.allclose(NF4, both / both.abs().max(), atol=1e-6)
    assert (len(NF4), NF4[7].item(), NF4[0].item(), NF4[15].item()) == (16, 0.0, -1.0, 1.0)


def test_scale_codes_are_sorted_and_hold_zero_and_one():
    assert len(DYNAMIC) == 256 and torch.equal(DYNAMIC, DYNAMIC.sort().values)
    assert {0.0, 1.0} <= set(DYNAMIC.tolist())


def test_a_small_matrix_is_what_bitsandbytes_makes_of_it():
    golden, found = json.loads(GOLDEN.read_text()), quantised(exact(), 4, "plain")
    assert found.codes.numpy().tobytes().hex() == golden["codes"]
    assert found.scales.scale_b.tolist() == golden["scales"]
    assert found.dense(torch.float32)[0, :BLOCK].tolist() == golden["first block"]


def test_levels_are_the_means_of_what_is_nearest_to_them():
    """For a block of 64 normal weights over its largest, by quadrature: one in 64 is the largest itself, given which the
    others are normal within it; a weight counts by its square before it was divided."""
    normal, n = torch.distributions.Normal(0.0, 1.0), BLOCK
    largest_m = torch.linspace(1e-3, 8, 4001, dtype=torch.float64)
    within_m = 2 * normal.cdf(largest_m) - 1
    step = largest_m[1] - largest_m[0]
    weight_m = largest_m.square() * n * within_m ** (n - 1) * 2 * normal.log_prob(largest_m).exp() * step
    z = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    given_zm = normal.log_prob(z[:, None] * largest_m).exp() * largest_m / within_m
    mass_z = (n - 1) / n * given_zm @ weight_m / 4000
    for levels in (LLOYD3, LLOYD2):
        half = levels[len(levels) // 2 :].double()
        assert torch.equal(levels, -levels.flip(0))
        cell_z = torch.bucketize(z, (half[1:] + half[:-1]) / 2)
        mass, moment = (
            torch.zeros(len(half), dtype=torch.float64).index_add_(0, cell_z, w) for w in (mass_z, mass_z * z)
        )
        mass[-1] += weight_m.sum() / n / 2
        moment[-1] += weight_m.sum() / n / 2
        assert torch.allclose(moment / mass, half, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 3])
def test_codes_lie_where_the_format_says(bits):
    """Brought back bit by bit in plain Python, with scales of 1: several chunks, and a last one that is not full."""
    weight = exact(300, 128)
    weight.view(-1, BLOCK)[:, 0] = 1.0
    weight.clamp_(-1, 1)
    found, stored = quantised(weight, bits, "plain"), quantised(weight, bits, "plain").codes.tolist()
    codes, blocks = [], weight.numel() // BLOCK
    for i in range(weight.numel() // 4):
        index = stored[i]
        if bits == 3:
            index += (stored[16 * blocks + i // 2] >> 4 * (i % 2) & 15) << 8
        codes += [index >> bits * place & 2**bits - 1 for place in (3, 2, 1, 0)]
    assert len(stored) == weight.numel() * bits // 8
    assert torch.equal(found.scales.scale_b, torch.ones(blocks))
    assert torch.equal(found.dense(torch.float32).flatten(), LEVELS[bits][codes])
    nearest = (weight.flatten()[:, None] - LEVELS[bits]).abs().argmin(1)
    assert codes == nearest.tolist()


KINDS = {
    "normal": lambda x: x, "heavy": lambda x: x**3, "tiny": lambda x: x * 1e-6, "few values": lambda x: (4 * x).round(),
    "zeros": lambda x: x * (x > 0), "a row of zeros": lambda x: torch.cat([torch.zeros_like(x[:1]), x[1:]]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 64), (576, 192), (100, 64)], ids=str)
def test_against_bitsandbytes(shape, kind, dtype):
    """Codes and scales of blocks to the bit, and what comes back of *its* state too. Its CPU kernel takes the farther of
    two scale codes that are nearly as near; ours is never farther."""
    theirs = pytest.importorskip("bitsandbytes.functional")
    weight = KINDS[kind](normal(*shape)).to(dtype)
    codes, state = theirs.quantize_4bit(weight, quant_type="nf4")
    plain = quantised(weight, 4, "plain")
    assert torch.equal(plain.codes, codes.flatten()) and torch.equal(plain.scales.scale_b, state.absmax)
    codes, state = theirs.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    double = quantised(weight)
    assert torch.equal(double.codes, codes.flatten())
    assert torch.equal(double.scales.mean, state.offset) and torch.equal(double.scales.scale_g, state.state2.absmax)
    rest = (plain.scales.scale_b - state.offset) / state.state2.absmax.repeat_interleave(GROUP)[: plain.blocks]
    ours_off, theirs_off = ((DYNAMIC[code.long()] - rest).abs() for code in (double.scales.code_b, state.absmax))
    assert bool((ours_off <= theirs_off + 1e-7).all())
    with torch.no_grad():
        double.scales.code_b.copy_(state.absmax)
    for kind_of in (torch.float32, torch.bfloat16):
        state.dtype = kind_of
        assert torch.equal(double.dense(kind_of), theirs.dequantize_4bit(codes, state))


def test_against_bitsandbytes_dynamic_codes():
    assert torch.equal(DYNAMIC, pytest.importorskip("bitsandbytes.functional").create_dynamic_map())


# --- what comes back


LEVELS = {2: LLOYD2, 3: LLOYD3, 4: NF4, 8: torch.arange(-127, 128) / 127}


def by_hand(weight, bits, scales):
    """The definition, with plain indexing and no chunks: nearest code times scale."""
    x_b64 = F.pad(weight.float().flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scale_b = x_b64.abs().amax(1)
    grid = LEVELS[bits]
    nearest = ((x_b64 / scale_b.clamp(min=1e-38)[:, None])[..., None] - grid).abs().argmin(-1)
    if scales == "double":
        rest = F.pad(scale_b - scale_b.mean(), (0, -len(scale_b) % GROUP)).view(-1, GROUP)
        scale_g = rest.abs().amax(1, keepdim=True)
        code = ((rest / scale_g.clamp(min=1e-38))[..., None] - DYNAMIC).abs().argmin(-1)
        scale_b = (DYNAMIC[code] * scale_g).flatten()[: len(scale_b)] + scale_b.mean()
    return (grid[nearest] * scale_b[:, None]).flatten()[: weight.numel()].view(weight.shape)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(64, 64), (130, 576), (33, 7)], ids=str)
def test_nearest_code_times_scale(shape, form):
    """Several chunks, a last group that is not full, a last block that is not."""
    weight = normal(*shape, seed=1)
    assert torch.allclose(
        quantised(weight, *FORMS[form]).dense(torch.float32), by_hand(weight, *FORMS[form]), rtol=1e-5
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_value_is_off_by_half_a_gap_at_most(form):
    bits, scales = FORMS[form]
    weight = normal(256, 576)
    levels = LEVELS[bits]
    gap = max((levels[1:] - levels[:-1]).max().item(), 2 - 2 * levels[-1].item())
    scale_b = weight.view(-1, BLOCK).abs().amax(1)
    off_b = (quantised(weight, bits, scales).dense(torch.float32) - weight).view(-1, BLOCK).abs().amax(1)
    inexact_scale = 0.0 if scales == "plain" else 0.02
    assert bool((off_b <= scale_b * (gap / 2 + inexact_scale + 1e-6)).all())


@pytest.mark.parametrize(
    ("form", "expected"),
    [("nf4", 0.0921), ("int8", 0.0065), ("int8_plain", 0.0061), ("lloyd3", 0.178), ("lloyd2", 0.344)],
)
def test_error_of_a_layer_of_real_size(form, expected):
    """An 8B model's MLP weight, normally distributed: the relative error, a bf16 result's rounding in it."""
    weight = normal(4096, 14_336, dtype=torch.bfloat16)
    found = quantised(weight, *FORMS[form], chunk=2**19).dense(torch.bfloat16)
    error = (found - weight).float().norm() / weight.float().norm()
    assert error.item() == pytest.approx(expected, rel=0.02)


def test_chunks_do_not_change_a_bit():
    weight = normal(300, 576)
    small, large = (quantised(weight, chunk=chunk) for chunk in (2**14, 2**20))
    assert torch.equal(small.dense(torch.float32), large.dense(torch.float32))
    assert torch.equal(small.codes, large.codes)


def test_quantising_twice_is_quantising_once():
    once = quantised(normal(64, 256), 4, "plain").dense(torch.float32)
    assert torch.equal(once, quantised(once, 4, "plain").dense(torch.float32))


def test_a_weight_of_zeros_stays():
    assert not quantised(torch.zeros(64, 64)).dense(torch.float32).any()


def test_a_chunk_is_whole_groups():
    with pytest.raises(AssertionError, match="whole groups"):
        quantised(normal(64, 64), chunk=64)


# --- a layer


def linear_of(o=96, i=128, bias=True, dtype=torch.float32):
    layer = nn.Linear(i, o, bias=bias, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(normal(o, i, seed=2) / i**0.5)
    return layer


def as_dense(layer, weight):
    """A frozen linear layer of the matrix that the quantised one stands for."""
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=weight.dtype)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().clone())
    return plain


def pair_of(form, bias, dtype=torch.float32):
    source = linear_of(bias=bias, dtype=dtype)
    tables = Tables(*FORMS[form], torch.device("cpu"))
    tables.reset()
    ours = QuantisedLinear(source, *FORMS[form], CHUNK, tables)
    ours.weight.copy_(source.weight)
    return ours, as_dense(ours, ours.weight.dense(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_that_of_its_matrix(form, bias, dtype):
    """Output and gradients of input and bias, to the bit."""
    ours, plain = pair_of(form, bias, dtype)
    results = []
    for layer in (ours, plain):
        x = normal(2, 5, 128, dtype=dtype).requires_grad_()
        y = layer(x)
        y.backward(normal(*y.shape, seed=3, dtype=dtype))
        results.append([y, x.grad, *([layer.bias.grad] if bias else [])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(p.grad is None for p in ours.weight.parameters())


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("form", ["nf4", "int8", "lloyd3", "lloyd2"])
def test_adapters_on_a_quantised_base_are_those_on_its_matrix(form, dropout, layers):
    results = []
    pairs = [pair_of(form, True) for _ in range(layers)]
    for kind in (0, 1):
        adapted = [LoRALinear(pair[kind], 4, 8.0, dropout) for pair in pairs]
        for seed, layer in enumerate(adapted):
            for half in (layer.lora_A, layer.lora_B):
                nn.init.normal_(half, generator=torch.Generator().manual_seed(seed))
        x = normal(7, 128).requires_grad_()
        torch.manual_seed(5)
        ys = linears(x, adapted)
        sum(y.square().sum() for y in ys).backward()
        results.append([*ys, x.grad, *(p.grad for layer in adapted for p in (layer.lora_A, layer.lora_B))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- a model

WIDE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 192}
SETS = {
    "adapters": (Lora(4),), "fused": (Lora(4), FusedOps(), FusedLoss(32), Packing()),
    "dropout": (Lora(4, dropout=0.2), FusedOps(), Packing()), "some": (Lora(4, targets=("q_proj", "up_proj")), FusedOps()),
    "checkpointed": (Lora(4), FusedOps(), FusedLoss(32), Packing(), Checkpointing(3)), "base alone": (FusedOps(),),
}  # fmt: skip


def matrices(run):
    return {name: m for name, m in blocks_of(run.model).named_modules() if isinstance(m, QuantisedWeight)}


def twin(run, techniques, config):
    """A run of the same techniques on the dense matrices that ``run`` stands for."""
    plain = run_of(techniques, config)
    blocks = blocks_of(plain.model)
    with torch.no_grad():
        for name, weight in matrices(run).items():
            dense = blocks.get_parameter(name)
            dense.copy_(weight.dense(torch.float32))
            dense.requires_grad_(False)
    return plain


@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16_mixed"])
@pytest.mark.parametrize("name", SETS)
def test_a_run_is_that_of_its_matrices(name, kind):
    """Loss and every gradient, to the bit: nothing but the base's values tells the two runs apart.

    Biases that train have their gradient summed in fp32, which autocast does not: they stay out of that case.
    """
    others, bias = (Precision(kind), *SETS[name]), name != "base alone"
    run = run_of((*others, QuantizedBase(chunk=CHUNK)), config_of(attention_bias=bias, **WIDE))
    plain = twin(run, others, config_of(attention_bias=bias, **WIDE))
    assert len(matrices(run)) == 28
    results = []
    for one in (run, plain):
        for parameter_name, p in one.model.named_parameters():
            if "lora_B" in parameter_name:
                nn.init.normal_(p, std=0.05, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(3)
        results.append(loss_and_gradients(one, [one.collate(examples_of((50, 20)))]))
    (loss, found), (expected_loss, expected) = results
    assert loss == expected_loss
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma2"])
def test_a_base_of_another_family_is_close_to_its_weights(family):
    """int8 hardly moves the loss; the same weights in NF4 move it more, and both train."""
    config = config_of(family, **WIDE)
    losses = []
    for techniques in ((), (QuantizedBase(8, chunk=CHUNK),), (QuantizedBase(4, chunk=CHUNK),)):
        run = run_of((Precision("fp32"), *techniques, Lora(4), FusedOps(), FusedLoss(32), Packing()), config)
        loss, found = loss_and_gradients(run, [run.collate(examples_of((60, 20)))])
        assert found and all("lora_" in name for name in found)
        losses.append(loss)
    dense, int8, nf4 = losses
    assert abs(int8 - dense) < 0.002 * dense and abs(nf4 - dense) < 0.05 * dense
    assert int8 != dense != nf4


def test_generating_with_a_cache_is_reading_at_once():
    run = run_of((QuantizedBase(chunk=CHUNK), Lora(4), FusedOps()), config_of(**WIDE))
    run.model.eval()
    ids = torch.tensor([examples_of((20,))[0][0]])
    with torch.no_grad():
        whole = run.model(ids, use_cache=False).logits
        first = run.model(ids[:, :10], use_cache=True)
        rest = run.model(ids[:, 10:], past_key_values=first.past_key_values, use_cache=True)
    assert relative_error(torch.cat([first.logits, rest.logits], 1), whole) <= 1e-5


def golden():
    import bitsandbytes.functional as theirs

    codes, state = theirs.quantize_4bit(exact(), quant_type="nf4")
    back = theirs.dequantize_4bit(codes, state)
    return {
        "made by": "bitsandbytes", "codes": codes.flatten().numpy().tobytes().hex(), "scales": state.absmax.tolist(),
        "first block": back[0, :BLOCK].tolist(),
    }  # fmt: skip


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=1) + "\n")
