"""Files that are written while training goes on: what the step waits for, and what is left of a failure."""

import errno
import os
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from hf_patrickstar.checkpoint import background
from hf_patrickstar.checkpoint.background import BackgroundWrite, failure_of
from hf_patrickstar.checkpoint.training_state import shard_name
from hf_patrickstar.checkpoint.transaction import Transactions
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.layout.packing import pack
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk

TENSORS = {
    "exp_avg/a": torch.arange(4.0),
    "exp_avg/b": torch.arange(5.0),
    "exp_avg_sq/a": torch.arange(4.0) + 10,
    "exp_avg/c": torch.arange(6, dtype=torch.float64),
}


def make_chunks():
    """Three: parameters a and b are in the first, c in the second, nothing in the third."""
    specs = [TensorSpec(index, f"w{index}", (64,), True) for index in range(3)]
    return [Chunk(spec, Tier.HOST) for spec in pack(specs, 64).chunks]


def chunks_of(chunks):
    return dict(zip(TENSORS, (chunks[0], chunks[0], chunks[0], chunks[1]), strict=True))


class Gate:
    """A writer that stops before each tensor is done until it is told to go on, and fails where it is told to."""

    def __init__(self, monkeypatch, fails_at=None, error=None):
        self.asked, self.may_go = threading.Semaphore(0), threading.Semaphore(0)
        original = background.write_safetensors

        def write(path, tensors, metadata, *, on_written, **kwargs):
            def stop_before(name):
                self.asked.release()
                assert self.may_go.acquire(timeout=60)
                if name == fails_at:
                    raise error
                on_written(name)

            original(path, tensors, metadata, on_written=stop_before, **kwargs)

        monkeypatch.setattr(background, "write_safetensors", write)

    def wait(self):
        assert self.asked.acquire(timeout=60)

    def go(self):
        self.may_go.release()


def begin(path, chunks):
    return BackgroundWrite(path, TENSORS, {"format": "pt"}, chunks_of(chunks), 3)


def test_chunks_are_let_go_one_after_the_other(tmp_path, monkeypatch):
    chunks, gate, path = make_chunks(), Gate(monkeypatch), tmp_path / "f.safetensors"
    write = begin(path, chunks)
    first, second, third = (chunk.reader for chunk in chunks)
    assert third is None
    seen = []
    for _ in TENSORS:
        gate.wait()
        seen.append((first.is_set(), second.is_set()))
        assert not path.exists()
        gate.go()
    write.join()
    assert seen == [(False, False)] * 3 + [(True, False)]
    assert first.is_set()
    assert second.is_set()
    assert write.error is None
    assert os.listdir(tmp_path) == [path.name]
    loaded = safetensors.torch.load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert set(loaded) == set(TENSORS)


def test_a_step_waits_for_its_chunk_alone(tmp_path, monkeypatch):
    chunks, gate = make_chunks(), Gate(monkeypatch)
    write = begin(tmp_path / "f", chunks)
    arrived = threading.Event()
    step = threading.Thread(target=lambda: [chunks[2].wait_for_reader(), chunks[0].wait_for_reader(), arrived.set()])
    step.start()
    for _ in range(3):
        gate.wait()
        assert not arrived.is_set()
        gate.go()
    gate.wait()  # before the tensor of the second chunk
    assert arrived.wait(timeout=60)
    assert chunks[0].reader is None
    gate.go()
    write.join()
    step.join()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("fails_at", TENSORS)
def test_a_failure(fails_at, error, tmp_path, monkeypatch):
    chunks, gate, path = make_chunks(), Gate(monkeypatch, fails_at, error), tmp_path / "f.safetensors"
    write = begin(path, chunks)
    events = [chunk.reader for chunk in chunks[:2]]
    for _ in TENSORS:
        gate.go()
    write.join()
    if isinstance(error, OSError):
        assert isinstance(write.error, CheckpointError)
        assert "f.safetensors.writing' cannot be written: No space left on device; the file needs" in str(write.error)
    else:
        assert write.error is error
    assert all(event.is_set() for event in events)
    assert not path.exists()
    assert failure_of(path) == (str(write.error) or f"'{path}' could not be written")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_directory_that_another_process_has_given_up(tmp_path, monkeypatch):
    """Its file cannot get its name then, nor can the mark of the failure be made; nobody waits for it for ever."""
    chunks, gate = make_chunks(), Gate(monkeypatch)
    (tmp_path / "sub").mkdir()
    write = begin(tmp_path / "sub" / "f", chunks)
    events = [chunk.reader for chunk in chunks[:2]]
    gate.wait()
    for name in os.listdir(tmp_path / "sub"):
        (tmp_path / "sub" / name).unlink()
    (tmp_path / "sub").rmdir()
    for _ in TENSORS:
        gate.go()
    write.join()
    assert isinstance(write.error, FileNotFoundError)
    assert all(event.is_set() for event in events)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_does_not_even_take_the_mark(tmp_path, monkeypatch):
    """The checkpoint is given up at once, not when patience ends."""

    def fail(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(background, "write_safetensors", fail)
    transactions = Transactions(Collectives(0, 1, torch.device("cpu")))
    with transactions.writing(tmp_path / "last") as checkpoint:
        monkeypatch.setattr(Path, "write_text", fail)
        checkpoint.write = begin(checkpoint.path / shard_name(0, 1), make_chunks())
    with pytest.raises(CheckpointError, match=r"last' was not written: .*No space left on device"):
        transactions.wait()
    assert os.listdir(tmp_path) == []


def test_an_older_file_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    chunks, gate, path = make_chunks(), Gate(monkeypatch), tmp_path / "f"
    path.write_text("old")
    write = begin(path, chunks)
    gate.wait()
    assert path.read_text() == "old"
    for _ in TENSORS:
        gate.go()
    write.join()
    assert set(safetensors.torch.load_file(path)) == set(TENSORS)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lists_on_a_device_are_written_after_what_the_compute_stream_was_told(tmp_path, monkeypatch, device):
    """The thread reads on a stream that does not wait for the optimizer's; ``meta`` stands for any device here."""
    told = []
    monkeypatch.setattr(background, "synchronize", lambda device: told.append(device.type))
    chunks = make_chunks()
    tensors = {name: tensor.to(device) for name, tensor in TENSORS.items()}
    monkeypatch.setattr(background, "write_safetensors", lambda *args, **kwargs: told.append("written"))
    BackgroundWrite(tmp_path / "file", tensors, {}, chunks_of(chunks), 2).join()
    assert told == ["meta"] * (device == "meta") + ["written"]
