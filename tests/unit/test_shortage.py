"""What allocators say when they refuse is known for what it is, and nothing else is."""

import errno
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from finefit import shortage
from finefit.cap import Cap, Refused, capped
from finefit.errors import CheckpointError
from finefit.scratch import Scratch

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.13 GiB is free."
)
CPU = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1234567 bytes. Error code 12 (Cannot allocate memory)"


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(CUDA), round(2.5 * 2**30)),
        (RuntimeError(CPU), 1234567),
        (MemoryError("std::bad_alloc"), 0),
        (RuntimeError("std::bad_alloc"), 0),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 0),
        (Refused(5, 7, 10), 5),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), 0),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 0),
        (RuntimeError("can't start new thread"), 0),
    ],
)
def test_refusals(error, asked):
    assert shortage.is_shortage(error)
    assert shortage.asked_bytes(error) == asked


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes do not match"), OSError(errno.ENOSPC, "No space left"), ValueError("memory")],
    ids=repr,
)
def test_what_is_no_refusal(error):
    assert not shortage.is_shortage(error)


def test_the_systems_own_refusal_is_known():
    """A process that may have no more address space, with a real allocation of torch's."""
    code = (
        "import resource, torch; from finefit import shortage\n"
        "held = torch.ones(10)\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + 2**28\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try:\n    torch.ones(2**28)\n"
        "except shortage.ERRORS as error:\n    print(shortage.is_shortage(error), shortage.asked_bytes(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"True {4 * 2**28}\n"


def test_a_cap_counts_storages_while_they_live(tmp_path):
    with Cap(10_000) as cap:
        one = torch.zeros(1000)
        view = one[:10]
        assert cap.live_bytes == 4000
        with pytest.raises(Refused) as caught:
            torch.zeros(1501)
        assert (caught.value.asked_bytes, caught.value.held_bytes) == (6004, 4000)
        del one
        assert cap.live_bytes == 4000 and view.sum() == 0
        del view
        assert cap.live_bytes == 0
        torch.zeros(2500)
        mapped = Scratch(tmp_path).mapped(torch.zeros(2000))
        assert cap.live_bytes == 0 and len(mapped) == 2000


def test_a_cap_holds_in_backward_and_what_died_is_gone():
    weight = torch.ones(100, 100, requires_grad=True)
    with Cap(90_000) as cap:
        doubled = weight * 2
        loss = doubled.exp().sum()
        with pytest.raises(Refused):
            loss.backward()
        kept = weakref.ref(loss)
        del loss, doubled
        shortage.let_go(torch.device("cpu"))
        assert kept() is None and cap.live_bytes == 0


def test_a_refusal_behind_an_error_of_ours_is_known():
    def raised(code):
        try:
            try:
                raise OSError(code, "no")
            except OSError as error:
                raise CheckpointError("not written") from error
        except CheckpointError as error:
            return error

    assert shortage.is_shortage(raised(errno.ENOMEM))
    assert not shortage.is_shortage(raised(errno.ENOSPC)) and not shortage.is_shortage(CheckpointError("not written"))


def test_of_a_gpu_what_was_held_is_what_the_error_says():
    """Not the highest there was: that may have been long before."""
    said = f"{CUDA} Of the allocated memory 20.25 GiB is allocated by PyTorch, and 1.00 GiB is reserved"
    gpu = torch.device("cuda")
    assert shortage.held_bytes(torch.OutOfMemoryError(said), gpu) == round(20.25 * 2**30)
    assert shortage.held_bytes(torch.OutOfMemoryError("other words"), gpu) == 0
    assert shortage.is_of_host(MemoryError(), gpu) and shortage.is_of_host(
        RuntimeError("CUDA error: out of memory"), gpu
    )
    assert not shortage.is_of_host(torch.OutOfMemoryError(said), gpu)
    assert not shortage.is_of_host(MemoryError(), torch.device("cpu"))


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpus_allocator_is_told_its_limit_and_told_back(monkeypatch, device):
    """By the number of the device, which it wants to have."""
    told = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, index: told.append((share, index)))
    with capped(250, torch.device(device)):
        assert told == [(0.25, int(device == "cuda:1"))]
    assert told[1:] == [(1.0, int(device == "cuda:1"))]
