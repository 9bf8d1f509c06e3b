"""Every way to compute activations again or to send them away gives the same loss and gradients, to the bit."""

import contextlib
import errno
from collections import deque
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finefit.errors import ConfigError
from finefit.nn import offloaded
from finefit.nn.offloaded import place_of
from finefit.run import summed_loss
from finefit.techniques import (
    ActivationOffload,
    Checkpointing,
    FusedLoss,
    FusedOps,
    Lora,
    Packing,
    Precision,
    QuantizedBase,
)  # fmt: skip
from tiny import config_of, examples_of, family_config, loss_and_gradients, run_of

WAYS = {
    "block": (Checkpointing(4),),
    "attention": (Checkpointing(3, "attention"),),
    "mlp": (Checkpointing(4, "mlp"),),
    "selective": (Checkpointing(4, "selective"),),
    "nested": (Checkpointing(4, "nested"),),
    "nested three": (Checkpointing(3, "nested"),),
    "disk": (Checkpointing(4), ActivationOffload("disk")),
    "some on disk": (Checkpointing(2), ActivationOffload("disk")),
}
OTHERS = {
    "alone": (),
    "lora with dropout": (Lora(4, dropout=0.3), FusedOps(), Packing()),
    "lora": (Lora(4), FusedOps(), Packing(), FusedLoss(16)),
    "quantised": (QuantizedBase(chunk=2**14), Lora(4), FusedOps(), Packing()),
}
WIDE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 192}


def outcome(techniques, config=None, lengths=(50, 20)):
    """Loss and gradients of two micro-batches, with the run; adapters are not at their start, where half is zero."""
    run = run_of(techniques, config)
    for name, p in run.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    batches = [run.collate(examples_of(lengths, seed)) for seed in range(2)]
    return (*loss_and_gradients(run, batches), run)


def assert_same(way, others, config=None):
    loss, expected, _ = outcome(others, config)
    found_loss, found, run = outcome((*others, *way), config)
    assert loss == found_loss
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for technique in way:
        run.evidence["micro_steps"] = 2
        technique.verify(run, None)


@pytest.mark.parametrize("kind", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "bf16_mixed"])
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_are_the_same_to_the_bit(way, others, kind):
    """Dropout too: what runs again draws what it drew before."""
    assert_same(WAYS[way], (Precision(kind), *OTHERS[others]), config_of(**WIDE))


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "mixtral", "qwen3_moe", "gpt_neox"])
@pytest.mark.parametrize("way", ["attention", "mlp", "selective", "nested", "disk"])
def test_in_other_families_too(way, family):
    """Positions that are learnt, two kinds of attention, experts, blocks whose halves run side by side."""
    way = tuple(replace(t, blocks=3) if isinstance(t, Checkpointing) else t for t in WAYS[way])
    assert_same(way, (Precision("fp32"),), family_config(family))


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen[name] = self.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def operators(techniques):
    run = run_of((Precision("fp32"), Lora(4), FusedOps(), Packing(), *techniques))
    batch = run.collate(examples_of((50, 20)))
    with Counted() as counted:
        summed_loss(run, batch).backward()
    return counted.seen


def test_selective_multiplies_nothing_again():
    """As many products as without, attention's too; norms and rotations are made again."""
    plain, selective, whole = (operators(way) for way in ((), WAYS["selective"], WAYS["block"]))
    for product in ("mm", "addmm", "addmm_", "bmm"):
        assert selective.get(product, 0) == plain.get(product, 0)
    assert whole["mm"] > plain["mm"]
    assert selective["rsqrt_"] > plain["rsqrt_"]


def test_nothing_is_kept_or_written_without_gradients():
    run = run_of((Precision("fp32"), *WAYS["disk"]))
    with torch.no_grad():
        summed_loss(run, run.collate(examples_of((20,))))
    assert run.evidence == {"block_forwards": 4}


def test_a_forward_that_is_given_up_leaves_the_next_one_right():
    """As after running out of memory: what was on its way is forgotten."""
    for way in ("disk", "nested"):
        loss, expected, _ = outcome(())
        run = run_of(WAYS[way])
        given_up = summed_loss(run, run.collate(examples_of((30,))))
        del given_up
        torch.manual_seed(3)
        found_loss, found = loss_and_gradients(run, [run.collate(examples_of((50, 20), seed)) for seed in range(2)])
        assert found_loss == loss
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_places_on_the_disk_are_as_many_as_blocks_whatever_the_lengths(monkeypatch):
    disks = []
    own = offloaded.Disk.__init__
    monkeypatch.setattr(offloaded.Disk, "__init__", lambda self: (own(self), disks.append(self))[0])
    run = run_of((Precision("fp32"), Packing(), *WAYS["disk"]))
    ends = []
    for lengths in ((500, 20), (10,), (300, 40), (700,), (699,), (3,)):
        summed_loss(run, run.collate(examples_of(lengths))).backward()
        ends.append(disks[0].scratch._end)
    assert len(disks) == 1
    assert len(disks[0].free) == 4
    assert ends[0] == ends[2] < ends[3] == ends[5]


class Stream:
    """Of a device where everything is done when it is asked for."""

    def __init__(self, _device=None):
        pass

    def wait_stream(self, _other):
        pass

    def wait_event(self, event):
        assert isinstance(event, Stream)

    def record_event(self):
        return Stream()

    def synchronize(self):
        pass


@pytest.fixture
def device(monkeypatch):
    """What CUDA tensors are offloaded by, for tensors that stand for them: (host, disk, whether each buffer was pinned)."""
    host, disk, step = offloaded.Host.__new__(offloaded.Host), offloaded.Disk(), []
    host.stream, host.free, host.writing = Stream(), [], deque()
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: (step.append(pin_memory), empty(*a, **k))[1])
    return host, disk, step


@pytest.mark.parametrize("number", range(4))
def test_a_write_that_failed_is_no_gradient(device, monkeypatch, number):
    """The disk fails once, at any block's inputs, the last ones too: an error, and never what was in that place before."""
    host, disk, _ = device
    put, calls = disk.scratch.put, []

    def failing(tensor, place):
        calls.append(place)
        if len(calls) == 4 + number + 1:  # in the second micro-batch, when places have something in them
            raise OSError(errno.EIO, "Input/output error")
        put(tensor, place)

    monkeypatch.setattr(disk.scratch, "put", failing)
    monkeypatch.setattr(offloaded, "place_of", lambda _name, _device: lambda x: offloaded._ThroughHost(x, host, disk))
    with pytest.raises(OSError, match="Input/output"):
        outcome((Precision("fp32"), Checkpointing(4), ActivationOffload("disk")))


@pytest.mark.parametrize("place", ["host", "disk"])
def test_buffers_of_a_device_go_round(place, device, monkeypatch):
    """What is done for CUDA tensors, in its order, on tensors that stand for them: the same gradients, all buffers back."""
    host, disk, step = device
    trips = {"host": lambda x: offloaded._ToHost(x, host), "disk": lambda x: offloaded._ThroughHost(x, host, disk)}
    monkeypatch.setattr(offloaded, "place_of", lambda name, _device: trips[name])
    assert_same((Checkpointing(4), ActivationOffload(place)), (Precision("fp32"),))
    assert len({buffer.data_ptr() for buffer in host.free}) == len(host.free) == sum(step)
    # two micro-batches of four blocks; to the disk as many at once as may wait, and one that is read
    assert len(host.free) == 4 if place == "host" else len(host.free) <= offloaded.WRITTEN_AT_ONCE + 1
    assert len(disk.free) == (4 if place == "disk" else 0)


def test_a_host_is_no_place_beside_itself():
    with pytest.raises(ConfigError, match="it is the device"):
        place_of("host", torch.device("cpu"))
