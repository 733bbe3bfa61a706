"""Huge pages: which part of a buffer the system is asked for, and that buffers are what they would be without."""

import contextlib
import functools
import mmap
import pathlib
import re
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_patrickstar.memory import pages, pinning
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pages import advise_huge_pages, new_on_host
from hf_patrickstar.memory.pinning import PagePinning
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier

CPU = torch.device("cpu")
MIB = 2**20
SMAPS = pathlib.Path("/proc/self/smaps")

on_linux = pytest.mark.skipif(sys.platform != "linux" or not SMAPS.exists(), reason="asks Linux what it was told")


class Watching(TorchDispatchMode):
    """Sees operators, as the engine's meter does, and changes nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def advised_nbytes(begin, end):
    """Bytes between two addresses that the system was told to give huge pages.

    The system writes the list in parts, and leaves out what another thread changes between two of them.
    """
    return max(_read_advised_nbytes(begin, end) for _ in range(3))


def _read_advised_nbytes(begin, end):
    found, first, last = 0, 0, 0
    for line in SMAPS.read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            first, last = (int(text, 16) for text in bounds.groups())
        elif line.startswith("VmFlags:") and "hg" in line.split():
            found += max(min(last, end) - max(first, begin), 0)
    return found


@on_linux
def test_only_whole_huge_pages_inside_of_a_buffer_are_asked_for():
    memory = torch.empty(16 * MIB, dtype=torch.uint8)
    start = -memory.data_ptr() % (2 * MIB) + 4096
    buffer = memory[start : start + 7 * MIB]
    nbytes = advise_huge_pages(buffer)
    assert nbytes == 4 * MIB
    assert advised_nbytes(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) == nbytes
    assert advised_nbytes(memory.data_ptr(), memory.data_ptr() + memory.nbytes) == nbytes


@on_linux
@pytest.mark.parametrize("make", ["pool", "pool, zeros", "pool, under a mode", "locked"])
def test_buffers_of_the_engine_ask_for_them(make, monkeypatch):
    if make == "locked":
        monkeypatch.setattr(pinning, "lock_pages", lambda *_: None)
        monkeypatch.setattr(pinning, "unlock_pages", lambda *_: None)
        source = PagePinning(CPU)
        buffer = source.begin(40 * MIB, torch.uint8, zero=False)
        source.lock(buffer)
    else:
        pool = PayloadPool(Ledger(dict.fromkeys(Tier, 64 * MIB)), CPU, None)
        with Watching() if make == "pool, under a mode" else contextlib.nullcontext():
            buffer = pool.allocate(Tier.HOST, 40 * MIB, torch.uint8, "param", zero=make == "pool, zeros")
    assert advised_nbytes(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) >= 36 * MIB
    assert make != "pool, zeros" or not buffer.any()


@pytest.mark.parametrize("kind", ["pool", "locked"])
def test_lists_that_are_used_together_begin_at_different_places_of_huge_pages(kind, monkeypatch):
    """Else their lines are in the same sets of the caches: Adam over four lists took twice as long on an EPYC."""
    monkeypatch.setattr(pinning, "lock_pages", lambda *_: None)
    monkeypatch.setattr(pinning, "unlock_pages", lambda *_: None)
    make = PagePinning(CPU).begin if kind == "locked" else functools.partial(new_on_host, device=CPU)
    buffers, between = [], []
    for num_pages in (1, 1, 2, 15, 1, 1, 16, 1):  # what else asks for memory decides where the system finds room
        buffers.append(make(8 * MIB, dtype=torch.float32, zero=True))
        between.append(mmap.mmap(-1, 64 * MIB + num_pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE))
    places = {buffer.data_ptr() % (16 * mmap.PAGESIZE) for buffer in buffers}
    assert len(places) == len(buffers)
    assert all(place % 4096 == 0 for place in places), "the driver locks whole pages"
    assert not any(buffer.any() for buffer in buffers)


def test_small_buffers_and_systems_that_take_no_advice_keep_small_pages(monkeypatch):
    for nbytes in (0, 1, 2 * MIB - 1):
        assert advise_huge_pages(torch.empty(nbytes, dtype=torch.uint8)) == 0
    monkeypatch.delattr(pages.mmap, "MADV_HUGEPAGE", raising=False)
    assert advise_huge_pages(torch.empty(8 * MIB, dtype=torch.uint8)) == 0
    assert not new_on_host(8 * MIB, dtype=torch.uint8, device=CPU).any()
