"""Tensors on a disk: what is put there comes back to the bit, places are used again, and a full disk says so."""

import errno
import os

import pytest
import torch

from finefit import scratch as scratch_module
from finefit.errors import EngineError
from finefit.scratch import Scratch, is_mapped, let_go


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool], ids=str)
def test_what_is_put_comes_back_to_the_bit(tmp_path, dtype):
    scratch = Scratch(tmp_path)
    drawn = [torch.randint(0, 2, (37, n)).to(dtype) for n in (1, 200, 3000)]
    places = [scratch.reserve(t.nbytes) for t in drawn]
    for tensor, place in zip(drawn, places, strict=True):
        scratch.put(tensor, place)
    for tensor, place in zip(drawn, places, strict=True):
        back = torch.empty_like(tensor)
        scratch.get(back, place)
        assert torch.equal(back, tensor)


def test_a_released_place_is_used_again_and_no_other(tmp_path):
    scratch = Scratch(tmp_path)
    first, second = scratch.reserve(5000), scratch.reserve(5000)
    assert second.offset >= first.offset + 5000
    scratch.release(first)
    assert scratch.reserve(4097) == first
    assert scratch.reserve(5000).offset >= second.offset + 5000


def test_nothing_is_left_in_the_folder(tmp_path):
    scratch = Scratch(tmp_path)
    scratch.put(torch.ones(1000), scratch.reserve(4000))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_that_says_where(tmp_path, monkeypatch):
    scratch = Scratch(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(EngineError, match="No space left") as caught:
        scratch.put(torch.ones(10), scratch.reserve(40))
    assert caught.value.where == str(tmp_path)


def test_writes_and_reads_in_parts_are_whole(tmp_path, monkeypatch):
    """The system may take or give less than was asked for."""
    scratch, pwrite, preadv = Scratch(tmp_path), os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, left, offset: pwrite(file, left[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: preadv(file, [parts[0][:700]], offset))
    drawn, place = torch.randn(3000), scratch.reserve(12_000)
    scratch.put(drawn, place)
    back = torch.empty_like(drawn)
    scratch.get(back, place)
    assert torch.equal(back, drawn)


def test_a_view_of_a_mapped_tensor_is_mapped_and_an_old_address_is_not(tmp_path):
    scratch = Scratch(tmp_path)
    mapped = scratch.mapped(torch.arange(3000.0))
    address = mapped.data_ptr()
    assert is_mapped(mapped) and is_mapped(mapped[1000:]) and not is_mapped(mapped.clone())
    let_go(mapped[1000:])
    assert torch.equal(mapped, torch.arange(3000.0))
    del mapped, scratch
    assert address not in scratch_module._PAGES


def test_tensors_mapped_side_by_side_are_apart_and_outlive_their_file(tmp_path, monkeypatch):
    """Of several mappings, one of them larger than is mapped at once; letting one go touches no other."""
    monkeypatch.setattr(scratch_module, "_EXTENT", 2**16)
    scratch = Scratch(tmp_path)
    drawn = [torch.full((n,), float(i)) for i, n in enumerate((1, 5000, 3000, 40_000, 7, 9000, 1024))]
    mapped = [scratch.mapped(t) for t in drawn]
    del scratch
    for i in (1, 3, 6):
        let_go(mapped[i])
        mapped[i] += 100
        drawn[i] += 100
    assert all(torch.equal(a, b) for a, b in zip(drawn, mapped, strict=True))


def test_open_files_do_not_grow_with_mapped_tensors(tmp_path):
    """A process may have about a thousand, and a model has more tensors."""
    scratch, count = Scratch(tmp_path), lambda: len(os.listdir("/proc/self/fd"))
    mapped, before = [scratch.mapped(torch.ones(10))], count()
    mapped += [scratch.mapped(torch.ones(10)) for _ in range(2000)]
    assert count() <= before and len(mapped) == 2001


def test_a_mapping_takes_no_disk_until_tensors_do(tmp_path):
    scratch = Scratch(tmp_path)
    mapped = scratch.mapped(torch.ones(10))
    assert os.fstat(scratch.file).st_blocks * 512 <= 2**16 and is_mapped(mapped)
