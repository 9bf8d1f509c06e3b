"""Writing: whole or not at all, and one process a folder."""

import errno
import gzip
import os

import pytest
import torch

from finefit import adapter, coefficients, files
from finefit.adapter import save_tokenizer, write_tensors
from finefit.candidates import rewrite
from finefit.catalog import derived
from finefit.errors import CheckpointError, ConfigError
from finefit.files import cache_folders, hold, user_cache, writable_cache, write_atomically
from finefit.layout import Micro
from finefit.spec import resolve_model


def test_a_full_disk_says_so_and_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"x": torch.ones(3)})
    before = path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(adapter, "_raw", full)
    with pytest.raises(CheckpointError) as caught:
        write_tensors(path, {"x": torch.zeros(3)})
    assert "disk is full" in caught.value.hint
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_tokenizer_is_saved_whole_or_not_at_all(tmp_path):
    class Half:
        def save_pretrained(self, folder):
            folder.mkdir()
            (folder / "tokenizer.json").write_text("{")
            raise Exception("No space left on device")

    with pytest.raises(CheckpointError, match="tokenizer was not written"):
        save_tokenizer(Half(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def closed_cache(tmp_path, monkeypatch):
    """A cache that not even root can write to: a file is where its folder should be."""
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_STAND_INS", {})


def test_a_cache_that_cannot_be_written_to_has_a_stand_in(closed_cache, capsys):
    made = [writable_cache(part) for part in ("a", "b", "a")]
    assert (made[0], len(set(made)), made[0].is_dir()) == (made[2], 2, True)
    assert cache_folders("a") == (user_cache("a"), made[0])
    said = capsys.readouterr().err
    assert (said.count("\n"), said.count("warning: "), "set XDG_CACHE_HOME" in said) == (1, 1, True)


def test_what_cannot_be_kept_is_derived_all_the_same(closed_cache):
    layout = rewrite(resolve_model("SmolLM2-135M"), Micro(1, 64, 64), ())
    coefficients.write(coefficients._cache("llama"), {"graphs": {"of mine": []}})
    assert "of mine" in coefficients._known(layout)


def test_a_damaged_cache_counts_as_none(tmp_path):
    for name, content in (("text", b"{"), ("cut", gzip.compress(b"{}" * 99)[:-9]), ("other", gzip.compress(b"[]"))):
        (tmp_path / name).write_bytes(content)
        assert coefficients.read(tmp_path / name) == {}
    (tmp_path / "cut").write_bytes(b"{")
    assert derived._read(tmp_path / "cut") is None


def test_a_folder_is_held_by_one(tmp_path):
    held = hold(tmp_path)
    with pytest.raises(ConfigError, match="another process"):
        hold(tmp_path)
    held.close()
    hold(tmp_path).close()


def test_what_is_no_file_is_left_as_it_is(tmp_path):
    pipe, folder, loop = (tmp_path / name for name in ("pipe", "folder", "loop"))
    os.mkfifo(pipe)
    folder.mkdir()
    loop.symlink_to(loop)
    for path, message in ((pipe, "a pipe is there"), (folder, "a folder is there"), (loop, "could not write: .*")):
        with pytest.raises(CheckpointError, match=f": {message}\n"):
            write_atomically(path, b"new")
    assert pipe.is_fifo() and folder.is_dir() and loop.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "folder", "loop"}


def test_behind_a_link_it_is_the_file_that_is_replaced(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    for name in ("there", "new"):
        link = tmp_path / f"to {name}"
        link.symlink_to(name)
        write_atomically(link, name.encode())
        assert (link.is_symlink(), (tmp_path / name).read_bytes()) == (True, name.encode())
