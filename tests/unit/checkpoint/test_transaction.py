"""Checkpoints of one process: written while training goes on, complete or not at all, and what a full disk leaves."""

import errno
import os
import threading

import pytest
import safetensors.torch
import torch
from support.spec_builders import pack

from hf_patrickstar.checkpoint import safetensors_file, state_files, storage
from hf_patrickstar.checkpoint.state_files import StateFile
from hf_patrickstar.checkpoint.training_state import shard_name
from hf_patrickstar.checkpoint.transaction import Transactions
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk

TENSORS = {
    "exp_avg/a": torch.arange(4.0),
    "exp_avg/b": torch.arange(5.0),
    "exp_avg_sq/a": torch.arange(4.0) + 10,
    "exp_avg/c": torch.arange(6, dtype=torch.float64),
}


class Killed(BaseException):
    """What a kill is here: nothing after it is done."""


def full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make_chunks():
    """Three: parameters a and b are in the first, c in the second, nothing in the third."""
    specs = [TensorSpec(index, f"w{index}", (64,), True) for index in range(3)]
    return [Chunk(spec, Tier.HOST) for spec in pack(specs, 64).chunks]


def begin(path, chunks, tensors=TENSORS):
    of = dict(zip(TENSORS, (chunks[0], chunks[0], chunks[0], chunks[1]), strict=True))

    def write(**how):
        safetensors_file.write_safetensors(path, tensors, {"format": "pt"}, **how)

    file = StateFile(path, tensors, of, write)
    file.start(3)
    return file


class Gate:
    """A writer that stops before each tensor is done until it is told to go on, and fails where it is told to."""

    def __init__(self, monkeypatch, fails_at=None, error=None):
        self.asked, self.may_go = threading.Semaphore(0), threading.Semaphore(0)
        original = safetensors_file.write_safetensors

        def write(path, tensors, metadata, *, on_written, **kwargs):
            def stop_before(name):
                self.asked.release()
                assert self.may_go.acquire(timeout=60)
                if name == fails_at:
                    raise error
                on_written(name)

            original(path, tensors, metadata, on_written=stop_before, **kwargs)

        monkeypatch.setattr(safetensors_file, "write_safetensors", write)

    def wait(self):
        assert self.asked.acquire(timeout=60)

    def go(self, times=1):
        self.may_go.release(times)


# Writing while training goes on


def test_a_step_waits_for_each_chunk_until_it_is_written(tmp_path, monkeypatch):
    chunks, gate, path = make_chunks(), Gate(monkeypatch), tmp_path / "f.safetensors"
    path.write_text("old")
    write = begin(path, chunks)
    first, second, third = (chunk.reader for chunk in chunks)
    assert third is None
    arrived = threading.Event()
    step = threading.Thread(target=lambda: [chunks[2].wait_for_reader(), chunks[0].wait_for_reader(), arrived.set()])
    step.start()
    seen = []
    for _ in TENSORS:
        gate.wait()
        seen.append((first.is_set(), second.is_set()))
        assert not arrived.is_set() or first.is_set()
        assert path.read_text() == "old"
        gate.go()
    assert arrived.wait(timeout=60)
    write.join()
    step.join()
    assert seen == [(False, False)] * 3 + [(True, False)]
    assert second.is_set()
    assert write.error is chunks[0].reader is None
    assert os.listdir(tmp_path) == [path.name]
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("fails_at", ["exp_avg/b", "exp_avg/c"])
def test_after_a_failure_nobody_waits(fails_at, error, tmp_path, monkeypatch):
    chunks, gate, path = make_chunks(), Gate(monkeypatch, fails_at, error), tmp_path / "f.safetensors"
    write = begin(path, chunks)
    events = [chunk.reader for chunk in chunks[:2]]
    gate.go(len(TENSORS))
    write.join()
    if isinstance(error, OSError):
        assert isinstance(write.error, CheckpointError)
        assert "cannot be written: No space left on device; the file needs" in str(write.error)
    else:
        assert write.error is error
    assert all(event.is_set() for event in events)
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_directory_that_another_process_has_given_up(tmp_path, monkeypatch):
    chunks, gate = make_chunks(), Gate(monkeypatch)
    (tmp_path / "sub").mkdir()
    write = begin(tmp_path / "sub" / "f", chunks)
    events = [chunk.reader for chunk in chunks[:2]]
    gate.wait()
    storage._remove_tree(tmp_path / "sub")
    gate.go(len(TENSORS))
    write.join()
    assert isinstance(write.error.__cause__, FileNotFoundError)
    assert all(event.is_set() for event in events)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lists_on_a_device_are_written_after_what_the_compute_stream_was_told(tmp_path, monkeypatch, device):
    """The thread reads on a stream that does not wait for the optimizer's; ``meta`` stands for any device here."""
    told = []
    monkeypatch.setattr(state_files, "synchronize", lambda device: told.append(device.type))
    monkeypatch.setattr(safetensors_file, "write_safetensors", lambda *args, **kwargs: told.append("written"))
    begin(tmp_path / "file", make_chunks(), {name: tensor.to(device) for name, tensor in TENSORS.items()}).join()
    assert told == ["meta"] * (device == "meta") + ["written"]


# Complete or not at all


@pytest.fixture
def transactions():
    return Transactions(Collectives(0, 1, torch.device("cpu")))


def test_it_appears_when_the_background_has_written_its_part(transactions, tmp_path, monkeypatch):
    gate, committed = Gate(monkeypatch), threading.Event()
    with transactions.writing(tmp_path / "last") as checkpoint:
        checkpoint.on_commit = committed.set
        checkpoint.write = begin(checkpoint.path / shard_name(0, 1), make_chunks())
    gate.wait()
    assert os.listdir(tmp_path) == ["_partial"]
    gate.go(len(TENSORS))
    assert committed.wait(timeout=60), "nobody has to wait for it"
    transactions.wait()
    assert os.listdir(tmp_path) == ["last"]
    assert os.listdir(tmp_path / "last") == [shard_name(0, 1)]


@pytest.mark.parametrize("how", ["wait", "close", "writing"])
def test_a_background_that_fails(how, transactions, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(safetensors_file, "write_safetensors", full)
    (tmp_path / "last").mkdir()
    with transactions.writing(tmp_path / "last") as checkpoint:
        (checkpoint.path / "file").touch()
        checkpoint.write = begin(checkpoint.path / shard_name(0, 1), make_chunks())
    if how == "close":
        transactions.close()
        assert "last' was not written: " in caplog.text
    else:
        wait = transactions.wait if how == "wait" else lambda: transactions.writing(tmp_path / "next").__enter__()
        with pytest.raises((CheckpointError), match=r"last' was not written: .*No space left on device.* as they were"):
            wait()
        assert os.listdir(tmp_path) == ["last"]
    assert os.listdir(tmp_path / "last") == []


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_full_disk_is_named_whoever_meets_it(error, transactions, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError) as caught, transactions.writing(tmp_path / "c") as checkpoint:  # noqa: PT012
        (checkpoint.path / "first.pt").touch()
        (checkpoint.path / "scheduler.pt").write_bytes(b"0")
        os.utime(checkpoint.path / "first.pt", (0, 0))
        if error is OSError:
            full()
        monkeypatch.setattr(storage.os, "fsync", full)
        raise RuntimeError("unexpected pos 8448 vs 8342")  # what torch.save says of it
    assert "scheduler.pt' cannot be written: No space left on device; the file needs more, " in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_that_has_room_again_when_the_background_removed_its_part(transactions, tmp_path, monkeypatch):
    """``torch.save`` does not say that the disk was full, and by now it is not; the background's error says it."""
    with pytest.raises(CheckpointError) as caught, transactions.writing(tmp_path / "c") as checkpoint:  # noqa: PT012
        with monkeypatch.context() as patch:
            patch.setattr(storage.os, "fsync", full)
            checkpoint.write = begin(checkpoint.path / "optimizer", make_chunks())
            checkpoint.write.join()
        raise RuntimeError("unexpected pos 8448 vs 8342")
    assert "optimizer' cannot be written: No space left on device; the file needs" in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("no disk is in this"), FileNotFoundError(2, "No such file"), Killed()])
def test_what_is_not_the_disk_stays_what_it_is(transactions, tmp_path, error):
    with pytest.raises(type(error)) as caught, transactions.writing(tmp_path / "c"):
        raise error
    assert caught.value is error
    assert os.listdir(tmp_path) == []
