"""Checkpoints of one process, and what is told when a disk is in the way."""

import errno
import os
import pathlib
import types

import pytest
import torch

from hf_patrickstar.checkpoint import storage
from hf_patrickstar.checkpoint.background import BackgroundWrite
from hf_patrickstar.checkpoint.transaction import Transactions
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import CheckpointError


class Killed(BaseException):
    """What a kill is here: nothing after it is done."""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def transactions():
    return Transactions(Collectives(0, 1, torch.device("cpu")))


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_a_full_disk_is_told_whoever_meets_it(transactions, tmp_path, monkeypatch, kind):
    with pytest.raises(CheckpointError) as caught, transactions.writing(tmp_path / "c") as checkpoint:  # noqa: PT012
        (checkpoint.path / "first").touch()
        (checkpoint.path / "scheduler.pt").write_bytes(b"0")
        os.utime(checkpoint.path / "first", (0, 0))
        monkeypatch.setattr(storage.os, "fsync", full)
        if kind is OSError:
            full()
        raise RuntimeError("unexpected pos 8448 vs 8342")  # what torch.save says of it
    assert "scheduler.pt' cannot be written: No space left on device; the file needs more, " in str(caught.value)
    assert "are left" in str(caught.value)
    assert names(tmp_path) == []


def test_a_full_disk_while_the_background_removes_its_part(transactions, tmp_path, monkeypatch):
    """That thread meets the full disk as well, and its file goes while this one looks for what was written last."""
    is_file = pathlib.Path.is_file

    def is_file_and_gone(path):
        found = is_file(path)
        if path.name.endswith(".writing"):
            path.unlink(missing_ok=True)
        return found

    with pytest.raises(CheckpointError) as caught, transactions.writing(tmp_path / "c") as checkpoint:  # noqa: PT012
        (checkpoint.path / "optimizer.writing").touch()
        (checkpoint.path / "scheduler.pt").touch()
        os.utime(checkpoint.path / ".mark", (0, 0))
        monkeypatch.setattr(pathlib.Path, "is_file", is_file_and_gone)
        full()
    assert "scheduler.pt' cannot be written: No space left on device" in str(caught.value)
    monkeypatch.undo()
    assert names(tmp_path) == []


def test_a_full_disk_that_has_room_again_when_the_background_removed_its_part(transactions, tmp_path, monkeypatch):
    """``torch.save`` does not say that the disk was full, and by now it is not; the background's error says it."""
    with pytest.raises(CheckpointError) as caught, transactions.writing(tmp_path / "c") as checkpoint:  # noqa: PT012
        chunk = types.SimpleNamespace(spec=types.SimpleNamespace(index=0), reader=None)
        with monkeypatch.context() as patch:
            patch.setattr(storage.os, "fsync", full)
            path = checkpoint.path / "optimizer"
            checkpoint.write = BackgroundWrite(path, {"a": torch.ones(3)}, {}, {"a": chunk}, piece_numel=8)
            checkpoint.write.join()
        raise RuntimeError("unexpected pos 8448 vs 8342")
    assert "optimizer.writing' cannot be written: No space left on device; the file needs" in str(caught.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("no disk is in this"), FileNotFoundError(2, "No such file"), Killed()])
def test_what_is_not_the_disk_stays_what_it_is(transactions, tmp_path, error):
    with pytest.raises(type(error)) as caught, transactions.writing(tmp_path / "c"):
        raise error
    assert caught.value is error
    assert names(tmp_path) == []
