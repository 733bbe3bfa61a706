"""Buffers that are reused, pinned, or refused; tests/property compares the book of a pool with what is out."""

import contextlib
import errno
import itertools
import logging
import os
import weakref

import pytest
import torch

from hf_patrickstar.counts import Counts
from hf_patrickstar.errors import BudgetError, DeviceMemoryError
from hf_patrickstar.memory import pool as pool_module
from hf_patrickstar.memory.disk import Disk
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pinning import TorchPinning
from hf_patrickstar.memory.pool import CACHE_OWNER, PayloadPool
from hf_patrickstar.memory.tiers import Tier

DEVICE, HOST, DISK = Tier
CPU = torch.device("cpu")
FP32 = torch.float32


def make_pool(host=1000, pinning=None, non_model=lambda booked: 0, device=CPU, **settings):
    return PayloadPool(Ledger({DEVICE: 1000, HOST: host}, non_model, **settings), device, pinning)


def keep(pool, *numels):
    """Buffers that were used and came back."""
    buffers = [pool.allocate(DEVICE, numel, FP32, "param") for numel in numels]
    for buffer in buffers:
        pool.release(DEVICE, buffer, "param")
    return buffers


# Buffers that are kept for reuse


def test_a_buffer_that_came_back_is_used_again_for_the_same_size_and_type():
    pool = make_pool()
    (buffer,) = keep(pool, 50)
    assert pool.ledger.owners(DEVICE) == {CACHE_OWNER: 200}
    pool.allocate(DEVICE, 25, FP32, "param")
    pool.allocate(DEVICE, 100, torch.bfloat16, "param")
    assert pool.ledger.owners(DEVICE) == {CACHE_OWNER: 200, "param": 300}
    assert (pool.in_use(DEVICE), pool.room(DEVICE)) == (300, 700)
    again = pool.allocate(DEVICE, 50, FP32, "master")
    assert again.data_ptr() == buffer.data_ptr()
    assert pool.ledger.owners(DEVICE) == {"master": 200, "param": 300}
    pool.release(HOST, pool.allocate(HOST, 50, FP32, "param"), "param")
    assert pool.ledger.used(HOST) == 0, "the host keeps none"


def test_no_more_kept_buffers_go_than_must_and_the_oldest_kind_first():
    pool = make_pool()
    buffers = {numel: pool.allocate(DEVICE, numel, FP32, "param") for numel in (50, 60, 70)}
    for numel in (60, 50, 70):
        pool.release(DEVICE, buffers[numel], "param")
    pool.release(DEVICE, pool.allocate(DEVICE, 60, FP32, "param"), "param")  # it is the newest now
    pool.allocate(DEVICE, 80, FP32, "master")  # 280 are free, 320 needed
    assert pool.ledger.owners(DEVICE) == {CACHE_OWNER: 520, "master": 320}
    for numel in (70, 60):
        assert pool.allocate(DEVICE, numel, FP32, "param").data_ptr() == buffers[numel].data_ptr()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_free_memory_grows_together_from_the_highest_address(order):
    """Whatever the order in which buffers came back: large tensors find room there."""
    pool = make_pool()
    buffers = sorted((pool.allocate(DEVICE, 50, FP32, "param") for _ in range(3)), key=torch.Tensor.data_ptr)
    lowest, highest = buffers[0].data_ptr(), weakref.ref(buffers[2].untyped_storage())
    for place in order:
        pool.release(DEVICE, buffers[place], "param")
    del buffers
    assert pool.allocate(DEVICE, 50, FP32, "param").data_ptr() == lowest
    pool.allocate(DEVICE, 101, FP32, "master")  # one of the kept buffers is in the way
    assert highest() is None
    assert pool.ledger.owners(DEVICE)[CACHE_OWNER] == 200


def test_a_kept_buffer_is_taken_again_where_memory_is_measured_by_what_is_not_booked():
    """As on CUDA: unbooking a buffer that is still there makes it non-model data, and leaves no room to book it."""
    allocated = [60]
    pool = PayloadPool(Ledger(dict.fromkeys(Tier, 100), lambda booked: max(allocated[0] - booked, 0)), CPU, None)
    held = [pool.allocate(DEVICE, 10, torch.int8, "param") for _ in range(6)]
    while held:
        pool.release(DEVICE, held.pop(), "param")
    held = [pool.allocate(DEVICE, 10, torch.int8, "param") for _ in range(5)]
    allocated[0] += 32
    assert pool.room(DEVICE) == 18
    held.append(pool.allocate(DEVICE, 10, torch.int8, "param"))
    pool.release(DEVICE, held.pop(), "param")
    assert pool.ledger.owners(DEVICE) == {"param": 50, CACHE_OWNER: 10}, "a full device still keeps what fits"


# Memory that is not there


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_what_the_budget_or_the_system_refuses_leaves_the_book_as_it_was(tier, monkeypatch):
    pool, stranger = make_pool(), torch.zeros(1)
    pool.allocate(tier, 200, FP32, "param")
    monkeypatch.setattr(torch, "empty", raising(RuntimeError("can't allocate memory: you tried to allocate 200 bytes")))
    with pytest.raises(BudgetError, match=f"{tier.value}_budget is too small: .* for 'master'"):
        pool.allocate(tier, 51, FP32, "master")
    message = rf"cpu has no 200 B \(200 bytes\) for .*lower {tier.value}_budget to at most 800 bytes"
    with pytest.raises(BudgetError, match=message) as caught:
        pool.allocate(tier, 50, FP32, "master")
    assert isinstance(caught.value, DeviceMemoryError) == (tier is DEVICE), "only there evicting may help"
    assert pool.ledger.owners(tier) == {"param": 800}
    assert not pool.owns(stranger.untyped_storage()._cdata)


def test_what_the_budget_or_the_filesystem_refuses_leaves_the_book_of_the_disk_as_it_was(tmp_path, monkeypatch):
    disk, stranger = Disk([str(tmp_path)], Counts()), torch.zeros(1)
    pool = PayloadPool(Ledger({DEVICE: 1000, HOST: 1000, DISK: 12000}), CPU, None)
    pool.disk = disk
    first = pool.allocate(DISK, 2000, FP32, "master").fill_(1)
    with pytest.raises(BudgetError, match=r"disk_budget is too small: .* for 'exp_avg'"):
        pool.allocate(DISK, 1001, FP32, "exp_avg")
    full, message = OSError(errno.ENOSPC, "No space left"), rf"disk_path '{tmp_path}' has no .* \(No space left\)"
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", raising(full))
        with pytest.raises(BudgetError, match=message) as caught:
            pool.allocate(DISK, 1000, FP32, "exp_avg")
    assert caught.value.__cause__ is full
    assert not isinstance(caught.value, DeviceMemoryError), "evicting does not help"
    assert {tier: pool.ledger.owners(tier) for tier in Tier} == {DEVICE: {}, HOST: {}, DISK: {"master": 8000}}
    assert not pool.owns(stranger.untyped_storage()._cdata)
    second = pool.allocate(DISK, 1000, FP32, "exp_avg").fill_(2)
    assert pool.ledger.owners(DISK) == {"master": 8000, "exp_avg": 4000}, "there is as much room as before"
    assert [pool.tier_of(buffer, HOST) for buffer in (first, second, stranger)] == [DISK, DISK, HOST]
    assert (first == 1).all()
    for buffer, owner in ((first, "master"), (second, "exp_avg")):
        pool.release(DISK, buffer, owner)
    assert pool.ledger.used(DISK) == 0


@pytest.fixture
def gpu(monkeypatch):
    """A pool of a device that is not there: its memory is the host's; and what each attempt to allocate calls first."""
    pool, empty = make_pool(device=torch.device("cuda", 0)), torch.empty
    pool.attempts = []

    def make(*args, device=None, **kwargs):
        for attempt in pool.attempts:
            attempt()
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(pool_module, "empty_cache", lambda: None)
    return pool


def test_buffers_of_a_device_are_allocated_where_they_are_to_lie(gpu, monkeypatch):
    """That is left before the allocator's cache is emptied: inside of a pool nothing else would be freed."""
    inside, seen, failures = [], [], [torch.OutOfMemoryError("CUDA out of memory.")]

    @contextlib.contextmanager
    def segment(nbytes):
        inside.append(nbytes)
        try:
            yield
        finally:
            inside.clear()

    def attempt():
        seen.append(tuple(inside))
        if failures:
            raise failures.pop()

    gpu._segment = segment
    gpu.attempts.append(attempt)
    monkeypatch.setattr(pool_module, "empty_cache", lambda: seen.append(tuple(inside)))
    gpu.allocate(DEVICE, 50, FP32, "param")
    gpu.allocate(HOST, 50, FP32, "param")
    assert seen == [(200,), (), (200,), ()]


@pytest.mark.parametrize("is_in_pieces", [True, False])
def test_a_device_is_asked_again_without_kept_buffers(gpu, is_in_pieces):
    """The budget has room, and kept buffers may be what lies between free pieces."""
    keep(gpu, 50)
    kept = []

    def fail():
        kept.append(gpu.ledger.owners(DEVICE).get(CACHE_OWNER, 0))
        if kept[-1] or not is_in_pieces:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 160 bytes")

    gpu.attempts.append(fail)
    if is_in_pieces:
        gpu.allocate(DEVICE, 40, FP32, "param")
    else:
        with pytest.raises(DeviceMemoryError, match="Tried to allocate 160 bytes"):
            gpu.allocate(DEVICE, 40, FP32, "param")
    assert kept == [200, 0]
    assert gpu.ledger.used(DEVICE) == (160 if is_in_pieces else 0)


@pytest.mark.parametrize(
    ("text", "pinned"),
    [
        ("CUDA error: an illegal memory access was encountered", False),
        ("mapping of buffer object failed", True),
        ("no such page", False),
    ],
)
def test_a_device_that_is_broken_is_not_a_full_one(monkeypatch, text, pinned):
    """Else the micro-batch would be repeated on a dead context, or copies would be slow for no reason."""
    pool = make_pool(pinning=TorchPinning())
    monkeypatch.setattr(torch, "empty", raising(RuntimeError(text)))
    with pytest.raises(RuntimeError, match=text) as caught:
        pool.allocate(HOST if pinned else DEVICE, 50, FP32, "param", pinned=pinned)
    assert type(caught.value) is RuntimeError
    assert pool.ledger.used(HOST) == pool.ledger.used(DEVICE) == 0
    assert pool.pins_memory


# Pinned memory


class PinnedTensor(torch.Tensor):
    """What a machine with a CUDA device would give: a tensor that says it is page-locked."""

    def is_pinned(self):
        return True


@pytest.fixture
def pinning(monkeypatch):
    """Makes ``pin_memory=True`` work without a CUDA device, as often as ``pinning["left"]`` says."""
    state, empty = {"left": 10**6}, torch.empty

    def make(*args, pin_memory=False, **kwargs):
        if not pin_memory:
            return empty(*args, **kwargs)
        if not state["left"]:
            raise RuntimeError("cannot pin: locked memory limit")
        state["left"] -= 1
        return empty(*args, **kwargs).as_subclass(PinnedTensor)

    monkeypatch.setattr(torch, "empty", make)
    return state


class ExactPinning(TorchPinning):
    """Notes when its cache is emptied."""

    def __init__(self):
        self.num_emptied = 0

    def nbytes(self, nbytes):
        return nbytes

    def empty_cache(self):
        self.num_emptied += 1


@pytest.mark.parametrize(("make", "nbytes"), [(TorchPinning, 1024), (ExactPinning, 600)])
def test_pinned_buffers_are_booked_as_what_is_really_taken(pinning, make, nbytes):
    pool = make_pool(host=2000, pinning=make())
    buffer = pool.allocate(HOST, 150, FP32, "param", pinned=True, zero=True)
    assert buffer.is_pinned()
    assert not buffer.any()
    assert pool.ledger.owners(HOST) == {"param": nbytes} == {"param": pool.host_nbytes(600, pinned=True)}
    assert (pool.ledger.used(HOST), pool.host_nbytes(600, pinned=False)) == (nbytes, 600)
    with pytest.raises(BudgetError, match=rf"\({pool.host_nbytes(1600, pinned=True)} bytes\) more needed"):
        pool.allocate(HOST, 400, FP32, "param", pinned=True)
    pool.release(HOST, buffer, "param")
    assert pool.ledger.used(HOST) == 0


def test_freed_pinned_memory_is_given_back_before_the_host_is_booked_again(pinning):
    """Its allocator may keep it: then it would be there beside what was booked in its place."""
    source = ExactPinning()
    pool = make_pool(pinning=source)
    first = pool.allocate(HOST, 150, FP32, "param", pinned=True)
    pool.release(HOST, pool.allocate(HOST, 50, FP32, "master"), "master")
    pool.allocate(HOST, 10, FP32, "master")
    assert source.num_emptied == 0, "no pinned memory was freed"
    pool.release(HOST, first, "param")
    pool.allocate(DEVICE, 50, FP32, "param")
    assert source.num_emptied == 0
    for _ in range(2):
        pool.allocate(HOST, 10, FP32, "exp_avg")
        assert source.num_emptied == 1


def test_where_pinning_fails_it_warns_once_and_goes_on(pinning, caplog):
    pinning["left"] = 1
    pool = make_pool(pinning=TorchPinning())
    with caplog.at_level(logging.WARNING):
        buffers = [pool.allocate(HOST, 25, FP32, "param", pinned=True) for _ in range(3)]
    (record,) = caplog.records
    assert "cannot pin host memory (cannot pin: locked memory limit)" in record.getMessage()
    assert [buffer.is_pinned() for buffer in buffers] == [True, False, False]
    assert pool.ledger.used(HOST) == 128 + 2 * 100
    for buffer in buffers:
        pool.release(HOST, buffer, "param")
    assert pool.ledger.used(HOST) == 0
