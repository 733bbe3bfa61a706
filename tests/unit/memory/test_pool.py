import logging

import pytest
import torch

from hf_patrickstar.errors import BudgetError, DeviceMemoryError
from hf_patrickstar.memory import pool as pool_module
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.meters import StorageMeter
from hf_patrickstar.memory.pinning import TorchPinning
from hf_patrickstar.memory.pool import CACHE_OWNER, PayloadPool
from hf_patrickstar.memory.tiers import Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST
CPU = torch.device("cpu")
FP32 = torch.float32


def make_pool(device=1000, host=1000, pin_memory=False, non_model=lambda booked: 0):
    pinning = TorchPinning() if pin_memory else None
    return PayloadPool(Ledger({DEVICE: device, HOST: host}, non_model), CPU, pinning)


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

    monkeypatch.setattr(pool_module.torch, "empty", make)
    return state


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
def test_a_buffer_is_what_was_asked_for_and_booked(tier, dtype):
    pool = make_pool()
    buffer = pool.allocate(tier, 50, dtype, "param", zero=True)
    assert (buffer.shape, buffer.dtype, buffer.device) == ((50,), dtype, CPU)
    assert torch.equal(buffer, torch.zeros(50, dtype=dtype))
    assert pool.ledger.owners(tier) == {"param": 50 * dtype.itemsize}
    pool.release(tier, buffer, "param", keep=False)
    assert pool.ledger.owners(tier) == {}


def test_a_device_buffer_is_reused():
    pool = make_pool()
    buffer = pool.allocate(DEVICE, 50, FP32, "param")
    address = buffer.data_ptr()
    pool.release(DEVICE, buffer.fill_(7), "param")
    assert pool.ledger.owners(DEVICE) == {CACHE_OWNER: 200}
    again = pool.allocate(DEVICE, 50, FP32, "master")
    assert again.data_ptr() == address
    assert pool.ledger.owners(DEVICE) == {"master": 200}
    assert pool.room(DEVICE) == 800
    pool.trim()
    assert pool.ledger.owners(DEVICE) == {"master": 200}


def test_a_reused_buffer_can_be_zeroed():
    pool = make_pool()
    pool.release(DEVICE, pool.allocate(DEVICE, 50, FP32, "param").fill_(7), "param")
    assert not pool.allocate(DEVICE, 50, FP32, "param", zero=True).any()


@pytest.mark.parametrize(("numel", "dtype"), [(25, FP32), (100, torch.bfloat16)])
def test_only_a_buffer_of_the_same_kind_is_reused(numel, dtype):
    pool = make_pool()
    pool.release(DEVICE, pool.allocate(DEVICE, 50, FP32, "param"), "param")
    pool.allocate(DEVICE, numel, dtype, "param")
    assert pool.ledger.owners(DEVICE) == {CACHE_OWNER: 200, "param": numel * dtype.itemsize}


def test_a_buffer_that_is_still_looked_into_is_not_kept():
    pool = make_pool()
    pool.release(DEVICE, pool.allocate(DEVICE, 50, FP32, "param"), "param", keep=False)
    assert pool.ledger.used(DEVICE) == 0


def test_host_buffers_are_not_kept():
    pool = make_pool()
    pool.release(HOST, pool.allocate(HOST, 50, FP32, "param"), "param")
    assert pool.ledger.used(HOST) == 0


def test_room_counts_what_is_kept():
    pool = make_pool()
    first = pool.allocate(DEVICE, 50, FP32, "param")
    pool.allocate(DEVICE, 100, FP32, "param")
    assert pool.room(DEVICE) == 400
    pool.release(DEVICE, first, "param")
    assert pool.room(DEVICE) == 600
    assert pool.ledger.available(DEVICE) == 400
    assert pool.room(HOST) == 1000


def test_kept_buffers_go_when_room_is_tight():
    pool = make_pool()
    for numel in (50, 60):
        pool.release(DEVICE, pool.allocate(DEVICE, numel, FP32, "param"), "param")
    assert pool.ledger.owners(DEVICE) == {CACHE_OWNER: 440}
    assert pool.allocate(DEVICE, 250, FP32, "param").numel() == 250
    assert pool.ledger.owners(DEVICE) == {"param": 1000}


def test_no_more_kept_buffers_go_than_must_and_the_oldest_kind_first():
    pool = make_pool()
    buffers = {numel: pool.allocate(DEVICE, numel, FP32, "param") for numel in (50, 60, 70)}
    for numel in (60, 50, 70):
        pool.release(DEVICE, buffers[numel], "param")
    pool.release(DEVICE, pool.allocate(DEVICE, 60, FP32, "param"), "param")  # it is the newest now
    assert pool.ledger.owners(DEVICE) == {CACHE_OWNER: 720}
    pool.allocate(DEVICE, 80, FP32, "master")  # 280 are free, 320 needed
    assert pool.ledger.owners(DEVICE) == {CACHE_OWNER: 520, "master": 320}
    assert pool.allocate(DEVICE, 70, FP32, "param").data_ptr() == buffers[70].data_ptr()
    assert pool.allocate(DEVICE, 60, FP32, "param").data_ptr() == buffers[60].data_ptr()
    assert pool.ledger.owners(DEVICE) == {"master": 320, "param": 520}


def test_kept_buffers_stay_when_there_is_room():
    pool = make_pool()
    pool.release(DEVICE, pool.allocate(DEVICE, 50, FP32, "param"), "param")
    pool.allocate(DEVICE, 200, FP32, "param")
    assert pool.ledger.owners(DEVICE) == {CACHE_OWNER: 200, "param": 800}


def test_two_buffers_of_one_size_are_both_kept():
    pool = make_pool()
    buffers = [pool.allocate(DEVICE, 50, FP32, "param") for _ in range(2)]
    addresses = {buffer.data_ptr() for buffer in buffers}
    for buffer in buffers:
        pool.release(DEVICE, buffer, "param")
    again = [pool.allocate(DEVICE, 50, FP32, "param") for _ in range(2)]
    assert {buffer.data_ptr() for buffer in again} == addresses
    assert pool.ledger.owners(DEVICE) == {"param": 400}


def test_trim():
    pool = make_pool()
    pool.release(DEVICE, pool.allocate(DEVICE, 50, FP32, "param"), "param")
    pool.trim()
    assert (pool.ledger.used(DEVICE), pool.room(DEVICE)) == (0, 1000)
    pool.trim()
    assert pool.ledger.used(DEVICE) == 0
    assert pool.allocate(DEVICE, 250, FP32, "param").numel() == 250


def test_a_buffer_is_not_kept_where_others_need_the_room():
    others = {"nbytes": 0}
    pool = make_pool(non_model=lambda booked: others["nbytes"])
    buffer = pool.allocate(DEVICE, 200, FP32, "param")
    others["nbytes"] = 900
    pool.release(DEVICE, buffer, "param")
    assert pool.ledger.used(DEVICE) == 0


def test_room_can_really_be_had_when_others_grew():
    """100 bytes are over the limit, 200 + 400 are kept: giving up the larger buffer leaves room for the smaller."""
    others = {"nbytes": 0}
    pool = make_pool(non_model=lambda booked: others["nbytes"])
    for numel in (50, 100):
        pool.release(DEVICE, pool.allocate(DEVICE, numel, FP32, "param"), "param")
    others["nbytes"] = 500
    assert pool.ledger.available(DEVICE) == -100
    assert pool.room(DEVICE) == 500
    assert pool.allocate(DEVICE, 50, FP32, "param").numel() == 50


@pytest.mark.parametrize("tier", Tier)
def test_over_budget_nothing_is_allocated(tier, monkeypatch):
    pool = make_pool()
    pool.allocate(tier, 200, FP32, "param")

    def refuse(*args, **kwargs):
        raise AssertionError("allocated")

    monkeypatch.setattr(pool_module.torch, "empty", refuse)
    with pytest.raises(BudgetError, match=f"{tier.value}_budget is too small: .* for 'master'"):
        pool.allocate(tier, 51, FP32, "master")
    assert pool.ledger.owners(tier) == {"param": 800}


def test_a_refusal_of_the_system_is_a_budget_error(monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise RuntimeError("can't allocate memory: you tried to allocate 200 bytes")

    monkeypatch.setattr(pool_module.torch, "empty", out_of_memory)
    with pytest.raises(BudgetError, match=r"cpu has no 200 B \(200 bytes\) for .*: the machine has less than"):
        make_pool().allocate(HOST, 50, FP32, "param")


def test_a_refusal_of_the_system_leaves_the_book_as_it_was(monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise RuntimeError("can't allocate memory: you tried to allocate 200 bytes")

    pool = make_pool()
    monkeypatch.setattr(pool_module.torch, "empty", out_of_memory)
    for tier in Tier:
        with pytest.raises(BudgetError) as caught:
            pool.allocate(tier, 50, FP32, "param")
        assert isinstance(caught.value, DeviceMemoryError) == (tier is DEVICE), "only there evicting may help"
        assert pool.ledger.used(tier) == 0


@pytest.fixture
def gpu(monkeypatch):
    """A pool of a device that is not there: its memory is the host's; and what each attempt to allocate calls first."""
    ledger = Ledger({DEVICE: 1000, HOST: 1000})
    pool, empty = PayloadPool(ledger, torch.device("cuda", 0), None), torch.empty
    pool.attempts = []

    def make(*args, device=None, **kwargs):
        for attempt in pool.attempts:
            attempt()
        return empty(*args, **kwargs)

    monkeypatch.setattr(pool_module.torch, "empty", make)
    monkeypatch.setattr(pool_module, "empty_cache", lambda: None)
    return pool


def test_a_device_with_memory_in_pieces_is_asked_again_without_kept_buffers(gpu):
    """The budget has room, and kept buffers may be what lies between free pieces."""
    pool = gpu
    pool.release(DEVICE, pool.allocate(DEVICE, 50, FP32, "param"), "param")

    def fail():
        if pool.ledger.owners(DEVICE).get(CACHE_OWNER):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 160 bytes")

    pool.attempts.append(fail)
    assert pool.allocate(DEVICE, 40, FP32, "param").numel() == 40
    assert pool.ledger.owners(DEVICE) == {"param": 160}


def test_a_device_that_is_full_all_the_same_says_so(gpu):
    calls = []

    def fail():
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 160 bytes")

    gpu.attempts.append(fail)
    with pytest.raises(DeviceMemoryError, match="Tried to allocate 160 bytes"):
        gpu.allocate(DEVICE, 40, FP32, "param")
    assert gpu.ledger.used(DEVICE) == 0
    assert len(calls) == 2


def test_other_errors_are_not_hidden(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(pool_module.torch, "empty", broken)
    with pytest.raises(RuntimeError, match="illegal instruction") as caught:
        make_pool().allocate(HOST, 50, FP32, "param")
    assert not isinstance(caught.value, BudgetError)


# Whose storages they are


def key_of(tensor):
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("tier", Tier)
def test_it_knows_its_own_storages(tier):
    pool = make_pool()
    buffer, stranger = pool.allocate(tier, 50, FP32, "param"), torch.zeros(50)
    assert pool.owns(key_of(buffer))
    assert pool.owns(key_of(buffer[3:].view(torch.uint8)))
    assert not pool.owns(key_of(stranger))
    pool.release(tier, buffer, "param", keep=False)
    assert not pool.owns(key_of(buffer)), "whoever still looks into it holds it from now on"


def test_kept_buffers_stay_its_own_until_they_are_given_up():
    pool = make_pool()
    buffer = pool.allocate(DEVICE, 50, FP32, "param")
    pool.release(DEVICE, buffer, "param")
    assert pool.owns(key_of(buffer))
    pool.trim()
    assert not pool.owns(key_of(buffer))


def test_pinned_buffers_are_its_own(pinning):
    pool = make_pool(pin_memory=True)
    buffer = pool.allocate(HOST, 50, FP32, "param", pinned=True)
    assert pool.owns(key_of(buffer))
    pool.release(HOST, buffer, "param")
    assert not pool.owns(key_of(buffer))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("tier", Tier)
def test_a_meter_never_sees_a_buffer_of_the_pool_not_even_while_it_is_made(tier, zero):
    pool = make_pool()
    meter = StorageMeter(pool.owns, lambda: None)
    meter.start(())
    try:
        buffer = pool.allocate(tier, 50, FP32, "param", zero=zero)
        views = [buffer[3:], buffer.view(5, 10)]
        assert meter.live(0) == meter.peak(0) == 0
        result = buffer + 1
        assert meter.live(0) == result.nbytes
    finally:
        meter.stop()
    del views


def test_a_refused_allocation_leaves_other_storages_to_others(monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise RuntimeError("can't allocate memory: you tried to allocate 200 bytes")

    pool, stranger = make_pool(), torch.zeros(1)
    monkeypatch.setattr(pool_module.torch, "empty", out_of_memory)
    with pytest.raises(BudgetError):
        pool.allocate(HOST, 50, FP32, "param")
    assert not pool.owns(key_of(stranger))


def test_bytes_in_use_are_those_that_are_not_kept():
    pool = make_pool()
    first = pool.allocate(DEVICE, 50, FP32, "param")
    pool.allocate(DEVICE, 100, FP32, "param")
    pool.allocate(HOST, 100, FP32, "param")
    pool.release(DEVICE, first, "param")
    assert (pool.in_use(DEVICE), pool.in_use(HOST)) == (400, 400)
    assert pool.ledger.used(DEVICE) == 600


def test_room_keeps_to_the_fraction_only_while_cautious():
    pool = PayloadPool(Ledger({DEVICE: 1000, HOST: 1000}, device_fraction=0.5), CPU, None)
    pool.release(DEVICE, pool.allocate(DEVICE, 50, FP32, "param"), "param")
    assert (pool.room(DEVICE), pool.room(DEVICE, cautious=False), pool.room(HOST)) == (500, 1000, 1000)
    pool.ledger.is_cautious = False
    assert (pool.room(DEVICE), pool.room(DEVICE, cautious=True)) == (1000, 500)


def test_while_cautious_kept_buffers_go_before_the_fraction_is_passed():
    pool = PayloadPool(Ledger({DEVICE: 1000, HOST: 1000}, device_fraction=0.5), CPU, None)
    pool.release(DEVICE, pool.allocate(DEVICE, 50, FP32, "param"), "param")
    pool.allocate(DEVICE, 90, FP32, "param")
    assert pool.ledger.owners(DEVICE) == {"param": 360}
    pool.allocate(DEVICE, 150, FP32, "param")
    assert pool.ledger.owners(DEVICE) == {"param": 960}, "what is needed is given up to the whole budget"


# Pinned memory


def test_pinned_buffers_are_booked_as_what_is_really_taken(pinning):
    pool = make_pool(host=2000, pin_memory=True)
    buffer = pool.allocate(HOST, 150, FP32, "param", pinned=True, zero=True)
    assert buffer.is_pinned()
    assert not buffer.any()
    assert pool.ledger.owners(HOST) == {"param": 1024}
    pool.release(HOST, buffer, "param")
    assert pool.ledger.used(HOST) == 0


class ExactPinning(TorchPinning):
    """Notes when its cache is emptied."""

    def __init__(self):
        super().__init__(exact_above_nbytes=128)
        self.num_emptied = 0

    def empty_cache(self):
        self.num_emptied += 1


def test_host_bytes_are_what_a_buffer_would_be_booked_as(pinning):
    pool = make_pool(host=2000, pin_memory=True)
    assert (pool.host_nbytes(600, pinned=True), pool.host_nbytes(600, pinned=False)) == (1024, 600)
    assert make_pool().host_nbytes(600, pinned=True) == 600
    pool = PayloadPool(Ledger({DEVICE: 1000, HOST: 1000}), CPU, ExactPinning())
    pool.allocate(HOST, 150, FP32, "param", pinned=True)
    assert pool.ledger.owners(HOST) == {"param": 600} == {"param": pool.host_nbytes(600, pinned=True)}


def test_freed_pinned_memory_is_given_back_before_the_host_is_booked_again(pinning):
    """Its allocator may keep it: then it would be there beside what was booked in its place."""
    source = ExactPinning()
    pool = PayloadPool(Ledger({DEVICE: 1000, HOST: 1000}), CPU, source)
    first = pool.allocate(HOST, 150, FP32, "param", pinned=True)
    second = pool.allocate(HOST, 50, FP32, "master")
    pool.release(HOST, second, "master")
    pool.allocate(DEVICE, 50, FP32, "param")
    pool.allocate(HOST, 10, FP32, "master")
    assert source.num_emptied == 0, "no pinned memory was freed"
    pool.release(HOST, first, "param")
    pool.allocate(DEVICE, 50, FP32, "param")
    assert source.num_emptied == 0
    pool.allocate(HOST, 150, FP32, "exp_avg")
    pool.allocate(HOST, 10, FP32, "exp_avg")
    assert source.num_emptied == 1


def test_only_what_asks_for_it_is_pinned(pinning):
    pool = make_pool(pin_memory=True)
    assert not pool.allocate(HOST, 50, FP32, "master").is_pinned()
    assert not pool.allocate(DEVICE, 50, FP32, "param", pinned=True).is_pinned()
    assert not make_pool(pin_memory=False).allocate(HOST, 50, FP32, "param", pinned=True).is_pinned()
    assert pinning["left"] == 10**6
    assert pool.ledger.owners(HOST) == {"master": 200}


def test_pinned_bytes_over_the_budget(pinning):
    pool = make_pool(pin_memory=True)
    with pytest.raises(BudgetError, match=r"1.00 KiB \(1024 bytes\) more needed for 'param'"):
        pool.allocate(HOST, 150, FP32, "param", pinned=True)
    assert pool.ledger.used(HOST) == 0


def test_where_pinning_fails_it_warns_once_and_goes_on(pinning, caplog):
    pinning["left"] = 0
    pool = make_pool(pin_memory=True)
    with caplog.at_level(logging.WARNING):
        buffers = [pool.allocate(HOST, 25, FP32, "param", pinned=True) for _ in range(3)]
    assert [record.getMessage() for record in caplog.records] == [
        "cannot pin host memory (cannot pin: locked memory limit); copies will be slower and synchronous"
    ]
    assert pool.ledger.owners(HOST) == {"param": 300}
    for buffer in buffers:
        pool.release(HOST, buffer, "param")
    assert pool.ledger.used(HOST) == 0


def test_buffers_pinned_before_pinning_failed_are_given_back_whole(pinning):
    pinning["left"] = 1
    pool = make_pool(pin_memory=True)
    first = pool.allocate(HOST, 25, FP32, "param", pinned=True)
    second = pool.allocate(HOST, 25, FP32, "param", pinned=True)
    assert (first.is_pinned(), second.is_pinned()) == (True, False)
    assert pool.ledger.used(HOST) == 128 + 100
    pool.release(HOST, first, "param")
    pool.release(HOST, second, "param")
    assert pool.ledger.used(HOST) == 0


def test_a_kept_buffer_is_taken_again_where_others_are_measured_by_what_is_not_booked():
    """As on CUDA: unbooking a buffer that is still there makes it somebody else's, and leaves no room to book it."""
    allocated = [60]
    budgets = dict.fromkeys(Tier, 100)
    pool = PayloadPool(Ledger(budgets, lambda booked: max(allocated[0] - booked, 0)), CPU, None)
    held = [pool.allocate(Tier.DEVICE, 10, torch.int8, "param") for _ in range(6)]
    while held:
        pool.release(Tier.DEVICE, held.pop(), "param")
    held = [pool.allocate(Tier.DEVICE, 10, torch.int8, "param") for _ in range(5)]
    allocated[0] += 32
    assert pool.room(Tier.DEVICE) == 18
    held.append(pool.allocate(Tier.DEVICE, 10, torch.int8, "param"))
    assert pool.ledger.owners(Tier.DEVICE) == {"param": 60}
    pool.release(Tier.DEVICE, held.pop(), "param")
    assert pool.ledger.owners(Tier.DEVICE) == {"param": 50, "pool": 10}, "a full device still keeps what fits"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: mapping of buffer object failed",
        "shared memory file is gone",
    ],
)
def test_a_device_that_is_broken_is_not_a_full_one(monkeypatch, text):
    """Else the micro-batch would be repeated on a dead context, or copies would be slow for no reason."""

    def fail(*args, **kwargs):
        raise RuntimeError(text)

    monkeypatch.setattr(torch, "empty", fail)
    for pinned in (False, True):
        pool = make_pool(pin_memory=True)
        with pytest.raises(RuntimeError, match=text) as caught:
            pool.allocate(HOST if pinned else DEVICE, 50, FP32, "param", pinned=pinned)
        assert type(caught.value) is RuntimeError
        assert pool.ledger.used(HOST) == pool.ledger.used(DEVICE) == 0
        assert pool.pins_memory
