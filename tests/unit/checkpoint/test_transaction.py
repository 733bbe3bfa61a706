"""Checkpoints of one process, and what is told when a disk is in the way."""

import errno
import os

import pytest
import torch

from hf_patrickstar.checkpoint import storage
from hf_patrickstar.checkpoint.transaction import Transactions
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.runtime.collectives import Collectives


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


@pytest.mark.parametrize("error", [RuntimeError("no disk is in this"), FileNotFoundError(2, "No such file"), Killed()])
def test_what_is_not_the_disk_stays_what_it_is(transactions, tmp_path, error):
    with pytest.raises(type(error)) as caught, transactions.writing(tmp_path / "c"):
        raise error
    assert caught.value is error
    assert names(tmp_path) == []
