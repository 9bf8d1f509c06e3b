"""Growing memory: what grows is told apart, and a leak is named by its size and by who holds it."""

import gc

import pytest
import torch
from torch import nn

from finefit import growth
from finefit.growth import SETTLED, WINDOW, Growth

CPU = torch.device("cpu")
MIB = 2**20
STEPS = SETTLED + 2 * WINDOW + 4


class Keeper:
    def __init__(self):
        self.losses = []


class Keeping(nn.Module):
    """Keeps every output, which is a mistake."""

    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(64, 512), []

    def forward(self, x):
        out = self.linear(x)
        self.kept.append(out.detach())
        return out


def watched(step, model, at_least=4 * MIB):
    """Findings of so many steps."""
    seen = Growth(model, CPU, at_least)
    if seen.read() == (0, 0, 2**62):
        pytest.skip("this C library does not count its heap")
    found = []
    for number in range(1, STEPS):
        step(number)
        if one := seen.look(number, 512, 0.1):
            found.append(one)
    return found


@pytest.fixture(params=[False, True], ids=["", "frozen"])
def put_aside(request):
    """As a loop does with all that is there before it."""

    def freeze():
        if request.param:
            gc.collect()
            gc.freeze()

    yield freeze
    gc.unfreeze()


def test_a_module_that_keeps_what_it_made_is_named(put_aside):
    model = nn.Sequential(nn.Linear(64, 64), Keeping())
    put_aside()
    (found,) = watched(lambda _: model(torch.randn(512, 64)).sum().backward(), model)
    assert found.kind == "leak" and found.n_bytes > 8 * MIB
    assert "tensors of 1 MiB (float32, 512×512)" in found.message.replace("1.00 MiB", "1 MiB").replace(
        "1.0 MiB", "1 MiB"
    )
    assert found.message.endswith("held by 1")


def test_losses_that_are_kept_with_their_graphs_are_named(put_aside):
    """The tensor is of four bytes; what it holds is not Python's."""
    model, keeper = nn.Sequential(nn.Linear(64, 512), nn.Tanh()), Keeper()
    others = [torch.tensor(float(i)) for i in range(50)]  # of the same size, there before
    put_aside()
    (found,) = watched(lambda _: keeper.losses.append(model(torch.randn(512, 64)).square().sum()), model)
    assert found.kind == "leak"
    assert "tensors of 1 MiB (float32, 512×512), held by the graphs of" in found.message
    assert "tensors of 4 B (float32, one number)" in found.message.replace("4 bytes", "4 B")
    assert found.message.endswith("test_growth.Keeper") and len(others) == 50


def test_a_step_as_it_should_be_is_no_growth():
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh())
    assert watched(lambda n: model(torch.randn(256 + 32 * (n % 8), 64)).square().sum().backward(), model) == []


def test_what_a_collection_frees_is_no_leak():
    class Ring:
        def __init__(self):
            self.ring, self.tensor = self, torch.zeros(MIB // 4)

    assert [one.kind for one in watched(lambda n: [Ring() for _ in range(n < SETTLED + WINDOW)], nn.Linear(1, 1))] == []


def told(
    monkeypatch,
    *,
    allocated=lambda _: MIB,
    reserved=lambda _: MIB,
    tokens=lambda _: 512,
    seconds=lambda _: 0.1,
    free=2**62,
):
    """The first finding of made-up counters, as functions of the step."""
    seen, at = Growth(nn.Linear(1, 1), CPU, MIB), [0]
    monkeypatch.setattr(growth, "let_go", lambda _device: at.append(-1))
    seen.read = lambda: (allocated(at[0]), reserved(at[0]), free)
    for at[0] in range(1, 300):
        if found := seen.look(at[0], tokens(at[0]), seconds(at[0])):
            return found, -1 in at
    return None, -1 in at


def test_more_is_held_and_no_more_is_in_use(monkeypatch):
    found, was_let_go = told(monkeypatch, reserved=lambda n: n * MIB)
    assert (found.kind, was_let_go) == ("fragmentation", True)


def test_more_is_held_as_steps_have_more_tokens(monkeypatch):
    found, was_let_go = told(monkeypatch, reserved=lambda n: n * MIB, tokens=lambda n: 512 + 16 * n)
    assert (found.kind, was_let_go) == ("data", False)


def test_a_rise_that_does_not_go_on_is_nothing(monkeypatch):
    assert told(monkeypatch, allocated=lambda n: min(n, 40) * MIB)[0] is None


def test_a_driver_that_moves_memory_to_the_host(monkeypatch):
    slow = {"seconds": lambda n: 0.1 if n < 100 else 0.9, "free": MIB}
    assert told(monkeypatch, **slow)[0] is None, "Linux' driver refuses"
    monkeypatch.setattr(growth, "may_spill", lambda: True)
    assert told(monkeypatch, **slow)[0].kind == "spill"
    assert told(monkeypatch, **{**slow, "free": 2**40})[0] is None


def test_the_allocator_is_held_to_what_is_free_where_the_driver_would_not_refuse(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (6 * 2**30, 8 * 2**30))
    told = [1.0]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: told[0], raising=False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _device: set_to.append(share))
    cuda = torch.device("cuda")
    assert growth.hold_to(cuda) == 0
    monkeypatch.setattr(growth, "may_spill", lambda: True)
    assert (growth.hold_to(cuda), set_to) == (6 * 2**30, [0.75])
    told[0] = 0.5  # --memory-limit, which stays
    assert (growth.hold_to(cuda), set_to[-1]) == (6 * 2**30, 0.5)
    assert growth.hold_to(CPU) == 0
