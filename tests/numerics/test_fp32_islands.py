"""Parts that stay in fp32: nearer to fp32 than the run without, the same by either loss, in every family."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finefit.nn.in_fp32 import is_island
from finefit.run import blocks_of, summed_loss
from finefit.techniques import (
    Checkpointing,
    Fp32Islands,
    FusedLoss,
    FusedOps,
    Lora,
    Packing,
    Precision,
    QuantizedBase,
    Unsuitable,
)
from tiny import (
    FAMILIES,
    config_of,
    examples_of,
    family_config,
    layout_for,
    loss_and_gradients,
    measured,
    predicted,
    run_of,
)

ROUTED = [name for name, changes in FAMILIES.items() if any("experts" in key for key in changes)]


def islands_of(run):
    return {name for name, module in run.model.named_modules() if is_island(module)}


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_and_head_of_every_family(name):
    """To the byte what was planned; hidden states stay in bf16, and a step gives finite gradients in each weight's type."""
    parts = ("head",) if name == "olmo" else ("head", "norms")  # whose norms have no weights
    config, techniques = family_config(name), (Precision("bf16"), Fp32Islands(parts))
    run = run_of(techniques, config)
    batch = run.collate(examples_of((24,)))
    of_blocks = [block.register_forward_hook(lambda _m, _a, out: kinds.add((out[0] if isinstance(out, tuple) else out).dtype))
                 for block in blocks_of(run.model)]  # fmt: skip
    kinds: set[torch.dtype] = set()
    loss = summed_loss(run, batch)
    loss.backward()
    assert kinds == {torch.bfloat16} and len(of_blocks) == 3 and loss.isfinite()
    assert all(p.grad is None or (p.grad.dtype == p.dtype and p.grad.isfinite().all()) for p in run.model.parameters())
    said = {g.name: g.bits for g in layout_for(config, techniques, batch).groups}
    real = {name.split(".weight")[0]: p.element_size() * 8 for name, p in run.model.named_parameters()}
    assert sorted(set(said.values())) == sorted(set(real.values())) == [16, 32]
    expected = sum(p.nbytes for p in run.model.parameters())
    assert sum(g.numel * g.count * g.bits // 8 for g in layout_for(config, techniques, batch).groups) == expected


@pytest.mark.parametrize("name", ROUTED)
def test_routers_of_every_mixture(name):
    run = run_of((Precision("bf16"), Fp32Islands(("router",))), family_config(name))
    routed = [n for n in islands_of(run) if n.split(".")[-1] in ("gate", "router", "layer")]
    assert routed and all(name.startswith(tuple(routed)) for name in islands_of(run))
    assert summed_loss(run, run.collate(examples_of((24,)))).isfinite()


@pytest.mark.parametrize("rest", [(), (FusedOps(),)], ids=["plain", "fused"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_neox", "olmo2", "cohere"])
def test_a_norm_is_that_of_fp32_rounded_once(name, rest):
    config = family_config(name)
    run = run_of((Precision("bf16"), *rest, Fp32Islands(("norms",))), config)
    wide = run_of((Precision("fp32"),), config)
    for at in islands_of(run):
        ours, theirs = run.model.get_submodule(at), wide.model.get_submodule(at)
        x = torch.randn(7, *theirs.weight.shape).bfloat16()
        with torch.no_grad():
            for p in theirs.parameters():
                p.copy_(torch.randn_like(p))  # no values of bf16's
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                p.copy_(q)
            found, exact = ours(x), theirs(x.float())
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, exact.bfloat16())


def test_small_updates_of_a_norm_are_not_lost():
    """One of a thousandth of a bf16 step, of each weight; the weights of bf16 beside them stand still."""
    run = run_of((Precision("bf16"), Fp32Islands(("norms",))))
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    loss_and_gradients(run, [run.collate(examples_of((24,)))])
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-6
    run.optimizer.step()
    moved = {name: (p - before[name]).abs().max().item() for name, p in run.model.named_parameters()}
    assert all(0 < n <= 2e-6 for name, n in moved.items() if "norm" in name)
    assert run.model.get_submodule("model.norm").weight.dtype == torch.float32


def test_the_head_multiplies_in_fp32_by_either_loss():
    config, used = config_of(), (Precision("bf16"), Fp32Islands(("head",)))
    batches = [run_of().collate(examples_of((90, 33)))]
    plain, fused = (loss_and_gradients(run_of((*used, *more), config), batches) for more in ((), (FusedLoss(16),)))
    assert fused[0] == pytest.approx(plain[0], rel=1e-6)
    alone = loss_and_gradients(run_of((Precision("bf16"), FusedLoss(16)), config), batches)
    assert abs(alone[0] - plain[0]) > 1e-6 * plain[0]


def test_by_name_and_under_an_adapter():
    run = run_of((Precision("bf16"), Lora(4), Fp32Islands(("mlp.down_proj", "q_*"))))
    assert {name.split(".", 3)[3] for name in islands_of(run)} == {"mlp.down_proj", "self_attn.q_proj"}
    assert summed_loss(run, run.collate(examples_of((24,)))).isfinite()


class Products(TorchDispatchMode):
    """How many matrix products there are of each type."""

    def __init__(self):
        super().__init__()
        self.of = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.of[args[-1].dtype] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["bf16", "bf16_mixed"])
@pytest.mark.parametrize("adapted", [(), (Lora(4),), (Lora(4, dropout=0.1),)], ids=["full", "lora", "dropout"])
@pytest.mark.parametrize("part", ["mlp.down_proj", "q_proj", "up_proj", "mlp.*"])
def test_what_is_taken_over_by_fused_ops_still_multiplies_in_fp32(part, adapted, kind):
    """As many products in fp32, forward, as without them: an island's own call is not gone round."""
    found = []
    for fused in ((), (FusedOps(),)):
        run = run_of((Precision(kind), *adapted, *fused, Fp32Islands((part,)), Packing()))
        with Products() as products:
            loss = summed_loss(run, run.collate(examples_of((24,))))
        loss.backward()
        assert all(p.grad.isfinite().all() for p in run.model.parameters() if p.grad is not None)
        found.append(products.of[torch.float32])
    linears = ("down_proj", "q_proj", "k_proj", "v_proj", "up_proj", "gate_proj")
    assert found[1] >= sum(name.endswith(linears) for name in islands_of(run)) > 0
    assert found[0] > 0 and (adapted or found[1] == found[0])


def test_what_is_none_is_said():
    batch = run_of().collate(examples_of((24,)))
    with pytest.raises(
        Unsuitable, match=r"no part of this model is 'router' of memory.fp32_islands; it has .*input_layernorm"
    ):
        layout_for(config_of(), (Precision("bf16"), Fp32Islands(("router",))), batch)
    with pytest.raises(Unsuitable, match=r"q_proj\.weight is quantised"):
        layout_for(
            config_of(), (Precision("bf16"), QuantizedBase(chunk=2**14), Lora(4), Fp32Islands(("q_proj",))), batch
        )


@pytest.mark.parametrize(
    ("parts", "blocks"),
    [
        (("norms",), 4),
        (("head",), 0),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((("head", "norms"), 4), (("down_proj",), 0))),
    ],
)
def test_bytes_of_a_step_as_a_plan_has_it(parts, blocks):
    used = (Precision("bf16"), Lora(4), FusedOps(), Fp32Islands(parts), Packing(), FusedLoss(32))
    used = (*used, Checkpointing(blocks)) if blocks else used
    run = run_of(used)
    batch = run.collate(examples_of((128, 128)))
    seen, said = measured(run, batch, 2).moments(), predicted(config_of(), used, batch, 2).moments
    for moment in ("forward_end", "loss", "backward_peak"):
        assert {c: n for c, n in seen[moment].items() if c != "input" and n} == {
            c: n for c, n in said[moment].items() if c != "input" and n
        }
