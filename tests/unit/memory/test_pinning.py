"""Page-locked memory: how much of it is taken, with a stand-in for the driver."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from support.buffers import are_there

from hf_patrickstar.memory import pages, pinning
from hf_patrickstar.memory.pinning import PagePinning, TorchPinning, make_pinning

CUDA = torch.device("cuda", 0)
KIB, MIB = 2**10, 2**20

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about pages")


class Host:
    """A driver, and which pages are locked."""

    def __init__(self, locks=True):
        self.locks, self.locked = locks, {}

    def lock(self, device, address, nbytes):
        if not self.locks:
            raise RuntimeError(f"cannot pin {nbytes} bytes: the driver answers 2")
        self.locked[address] = nbytes

    def unlock(self, device, address):
        del self.locked[address]


@pytest.fixture
def host(monkeypatch):
    found = Host()
    monkeypatch.setattr(pinning, "lock_pages", found.lock)
    monkeypatch.setattr(pinning, "unlock_pages", found.unlock)
    yield found
    gc.collect()  # pages are unlocked by the stand-in


@pytest.mark.parametrize(
    ("locks", "kind", "taken", "how"),
    [
        (True, PagePinning, [3 * MIB + 4 * KIB, 8 * KIB], "whole pages, locked by the driver"),
        (False, TorchPinning, [4 * MIB, 8 * KIB], "rounded up to powers of two by torch"),
    ],
)
def test_where_memory_comes_from_and_what_buffers_take(host, locks, kind, taken, how):
    host.locks = locks
    source, said = make_pinning(CUDA)
    gc.collect()
    assert not host.locked, "the page that it was tried with is given back"
    assert (type(source), said) == (kind, how)
    assert [source.nbytes(nbytes) for nbytes in (3 * MIB + 1, 5 * KIB)] == taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_pages_are_locked_as_long_as_a_tensor_looks_into_them(host, dtype):
    source = PagePinning(CUDA)
    buffer = source.begin(3000, dtype, zero=False)
    assert not host.locked
    source.lock(buffer)
    assert (buffer.shape, buffer.dtype) == ((3000,), dtype)
    assert buffer.data_ptr() % (4 * KIB) == 0
    assert list(host.locked.items()) == [(buffer.data_ptr(), source.nbytes(buffer.nbytes))]
    assert source.nbytes(buffer.nbytes) % (4 * KIB) == 0 <= source.nbytes(buffer.nbytes) - buffer.nbytes < 4 * KIB
    buffer.fill_(3)
    view = buffer[10:20]
    del buffer
    assert len(host.locked) == 1
    assert view.sum() == 30
    del view
    assert not host.locked


@on_linux
def test_threads_make_all_pages_before_the_driver_locks_them_and_keep_what_is_there(host, monkeypatch):
    """Two are at it at the same time, beside whoever has begun to write."""
    both, real = threading.Barrier(2), pages.ctypes.CDLL(None)

    class System:
        def madvise(self, *args):
            if args[-1].value == pages._POPULATE_WRITE:
                both.wait(timeout=60)
            return real.madvise(*args)

    monkeypatch.setattr(pages.ctypes, "CDLL", lambda _: System())
    monkeypatch.setattr(pages, "own_cores", lambda num_sharers: 2)
    found = []
    monkeypatch.setattr(pinning, "lock_pages", lambda device, *pages: found.append(are_there(*pages)))
    monkeypatch.setattr(pinning, "unlock_pages", lambda *_: None)
    source = PagePinning(CUDA)
    buffer = source.begin(60 * MIB + 1, torch.uint8, zero=True)
    assert sum(are_there(buffer.data_ptr(), 60 * MIB)) < 600
    buffer[5 * MIB] = 3
    source.lock(buffer)
    assert found == [[True] * (60 * 256 + 1)]
    assert buffer.sum() == 3


@on_linux
def test_a_forked_process_neither_copies_nor_unlocks_pages(host):
    """It has zeros of its own there, so that it may do with them what it likes."""
    source = PagePinning(CUDA)
    buffer = source.begin(3000, torch.float32, zero=True)
    source.lock(buffer)
    buffer.fill_(3)
    pid = os.fork()
    if not pid:
        try:
            is_empty = not buffer.any()
            buffer.fill_(4)
            del buffer
            os._exit(0 if is_empty and host.locked else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert buffer.eq(3).all()


def test_a_program_ends_in_silence_with_pages_locked_and_workers_idle():
    program = """
import torch
from hf_patrickstar.memory import pages, pinning
from hf_patrickstar.optim.workers import HostWorkers
pinning.lock_pages = pinning.unlock_pages = lambda *_: None
source = pinning.PagePinning(torch.device("cuda", 0))
kept = source.begin(10, torch.float32, zero=False)
source.lock(kept)
workers = HostWorkers(2)
workers.submit(lambda item: None, range(4)).wait()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("done\n", "")
