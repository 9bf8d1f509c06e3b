"""The order of copies to a CUDA device, by streams and a runtime that only note what is asked of them."""

from contextlib import contextmanager

import pytest
import torch

from finefit.errors import EngineError
from finefit.nn import side_stream
from finefit.nn.stores import Extent, Origin

N = 4096


class Noting:
    """Stands for ``torch.cuda`` where streams are asked for; ``told`` is everything in order."""

    def __init__(self):
        self.told, self.events = [], 0

    def stream(self, name):
        return _Stream(self, name)


class _Stream:
    def __init__(self, noting, name):
        self.noting, self.name = noting, name

    def record_event(self):
        self.noting.events += 1
        self.noting.told.append(f"{self.name} records {self.noting.events}")
        return _Event(self.noting, self.noting.events)

    def wait_event(self, event):
        self.noting.told.append(f"{self.name} waits for {event.number}")


class _Event:
    def __init__(self, noting, number):
        self.noting, self.number = noting, number

    def synchronize(self):
        self.noting.told.append(f"host waits for {self.number}")


@pytest.fixture
def noting(monkeypatch):
    found = Noting()

    @contextmanager
    def within(stream):
        found.told.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: found.stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: found.stream("computing"))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(side_stream, "pinned", lambda n_bytes: torch.empty(n_bytes, dtype=torch.uint8))
    monkeypatch.setattr(side_stream, "STAGE", 1024)
    return found


@pytest.fixture
def arena():
    return torch.zeros(2 * N, dtype=torch.uint8)


def filled(unit):
    return torch.arange(N, dtype=torch.int64).mul(unit + 3).to(torch.uint8)


EXTENTS = [Extent(0, N), Extent(N, N), Extent(0, N)]


def test_a_copy_waits_for_what_was_asked_before_and_what_is_asked_then_for_the_copy(noting, arena):
    store = side_stream.DeviceFromHost(arena, EXTENTS)
    for unit in range(3):
        arena[EXTENTS[unit].start :][:N] = filled(unit)
        store.put(unit, 0, arena[EXTENTS[unit].start :][:N])
    arena.zero_()
    store.begin(1)
    assert noting.told == ["computing records 1", "side waits for 1", "on side", "side records 2"]
    store.finish()
    assert noting.told[4:] == ["computing waits for 2"]
    assert torch.equal(arena[N:], filled(1)) and not arena[:N].any()
    store.begin(2)
    store.finish()
    assert torch.equal(arena[:N], filled(2)) and torch.equal(arena[N:], filled(1))


def test_pinned_memory_is_filled_from_a_file_as_it_is_linked(noting, arena, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(100) + bytes(filled(0).numpy()))
    store = side_stream.DeviceFromHost(arena, EXTENTS)
    store.link(0, 64, 2000, Origin(path, 100))
    with pytest.raises(EngineError, match="not there any more"):
        store.link(1, 0, 200, Origin(path, N))
    store.begin(0)
    assert torch.equal(arena[64:2064], filled(0)[:2000])


def test_rows_of_a_table_are_copied_from_the_host(noting, arena):
    store = side_stream.DeviceFromHost(arena, EXTENTS)
    table = torch.randn(16, 64).bfloat16()
    store.put(2, 0, table)
    out = torch.empty(2, 2, 64, dtype=torch.bfloat16)
    store.rows(2, [3, 3, 15, 0], out)
    assert torch.equal(out, table[torch.tensor([[3, 3], [15, 0]])])


def test_a_file_goes_through_two_pieces_neither_of_which_is_written_over_before_it_is_copied(noting, arena, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(filled(0).numpy()))
    store = side_stream.DeviceFromDisk(arena, EXTENTS)
    store.link(1, 0, N, Origin(path, 0))
    store.begin(1)
    store.finish()
    assert torch.equal(arena[N:], filled(0))
    assert noting.told == [
        "computing records 1", "side waits for 1",
        "on side", "side records 2", "on side", "side records 3",
        "host waits for 2", "on side", "side records 4",
        "host waits for 3", "on side", "side records 5",
        "computing waits for 5",
    ]  # fmt: skip


def test_rows_of_a_table_in_a_file(noting, arena):
    store = side_stream.DeviceFromDisk(arena, EXTENTS)
    table = torch.randn(16, 64)
    store.put(0, 0, table)
    out = torch.empty(3, 64)
    store.rows(0, [15, 2, 2], out)
    assert torch.equal(out, table[[15, 2, 2]])
