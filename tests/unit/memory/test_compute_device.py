"""What is asked of torch's allocators, with stand-ins for what only a machine with an accelerator has."""

import contextlib
import types
import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hf_patrickstar.memory import compute_device
from hf_patrickstar.memory.compute_device import (
    allocator_settings,
    choose_segments,
    device_name,
    grow_segments,
    is_fragmented,
    lock_pages,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MIB = 2**20
FULL = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 79.10 GiB of which 1.50 GiB is free. "
    "Including non-PyTorch memory, this process has 77.00 GiB memory in use. Of the allocated memory 70.00 GiB is "
    "allocated by PyTorch, and {pieces} is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


class Allocator:
    """What torch's allocators were told, and what they have taken."""

    def __init__(self):
        self.told, self.reserved, self.allocated = "", 0, 0


@pytest.fixture
def allocator(monkeypatch):
    found = Allocator()
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: found.told, raising=False)
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", lambda text: setattr(found, "told", text), raising=False
    )
    monkeypatch.setattr(compute_device, "reserved_nbytes", lambda device: found.reserved)
    monkeypatch.setattr(compute_device, "allocated_nbytes", lambda device, what: found.allocated)
    return found


# Segments that grow


def test_segments_grow_where_nothing_is_allocated_yet_and_what_else_was_told_stays(allocator, monkeypatch):
    assert grow_segments(CUDA) == "expandable_segments:True is set, so that memory is not lost in pieces"
    assert allocator.told == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:[64:8,>:1],max_split_size_mb:128")
    allocator.told = "max_split_size_mb:64"
    grow_segments(CUDA)
    assert allocator.told == "roundup_power2_divisions:[64:8,>:1],max_split_size_mb:64,expandable_segments:True"
    assert grow_segments(CPU) is None


@pytest.mark.parametrize(
    ("variable", "setting"),
    [
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
    ],
)
def test_what_the_user_has_set_stays(allocator, monkeypatch, variable, setting):
    monkeypatch.setenv(variable, f"max_split_size_mb:128,{setting}")
    assert grow_segments(CUDA) == f"expandable_segments is left alone: the user has set {setting}"
    assert allocator.told == ""


def refuse(*_):
    raise RuntimeError("Cannot access accelerator device when none is available.")


def test_where_it_cannot_be_set_the_user_is_advised(allocator, monkeypatch):
    advice = "start with PYTORCH_ALLOC_CONF=expandable_segments:True"
    allocator.reserved = 1
    assert f"in use already: {advice}" in grow_segments(CUDA)
    assert allocator.told == ""
    allocator.reserved = 0
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse)
    assert f"this torch cannot set it now: {advice}" in grow_segments(CUDA)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", refuse)
    assert allocator_settings() == {}


# Segments of chunks


class Cuda:
    """``torch.cuda`` of a device that is not there, and its pools of memory that somebody holds."""

    def __init__(self):
        self.pools, self.inside = weakref.WeakSet(), None
        self.init = lambda: None
        self.device = contextlib.nullcontext

    def MemPool(self):
        pool = type("Pool", (), {})()
        self.pools.add(pool)
        return pool

    @contextlib.contextmanager
    def use_mem_pool(self, pool, device):
        self.inside = pool
        try:
            yield
        finally:
            self.inside = None


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    monkeypatch.setattr(torch, "cuda", made)
    return made


def test_large_chunks_have_segments_of_their_own_where_those_of_torch_do_not_grow(allocator, cuda):
    allocator.reserved = 1
    segment, said = choose_segments(CUDA)
    assert "is off" in said
    assert said.endswith("chunks have segments of their own")
    for nbytes, has_own in ((10 * MIB, True), (10 * MIB - 1, False)):
        with segment(nbytes):
            assert (cuda.inside is not None) is has_own
        assert cuda.inside is None
        assert not cuda.pools, "torch gives free memory of a pool back only when nobody holds the pool"


def test_chunks_share_segments_that_grow(allocator, cuda):
    segment, said = choose_segments(CUDA)
    assert said.endswith("in pieces; chunks share them with activations")
    with segment(10 * MIB):
        assert cuda.inside is None
    assert choose_segments(CPU)[1] is None


@pytest.mark.parametrize("error", [AttributeError("no MemPool"), RuntimeError("does not yet support pools")])
def test_where_torch_has_no_pools_chunks_are_allocated_as_before(allocator, cuda, error):
    def fail():
        raise error

    allocator.reserved, cuda.MemPool = 1, fail
    segment, said = choose_segments(CUDA)
    assert said.endswith(f"chunks share them with activations, since torch has no pools: {error}")
    with segment(10 * MIB):
        assert cuda.inside is None


# Memory in pieces


@pytest.mark.parametrize(
    ("asked", "pieces", "is_in_pieces"),
    [
        ("20.00 MiB", "20.00 MiB", True),
        ("20.00 MiB", "19.99 MiB", False),
        ("2.00 GiB", "512.00 MiB", False),
        ("512 bytes", "1.00 KiB", True),
    ],
)
def test_memory_is_in_pieces_where_torch_has_taken_as_much_as_was_asked_for(asked, pieces, is_in_pieces):
    error = torch.OutOfMemoryError(FULL.format(asked=asked, pieces=pieces))
    assert is_fragmented(error, CUDA) == is_in_pieces
    assert not is_fragmented(error, CPU), "its tier is counted, not measured"


@pytest.mark.parametrize(("reserved", "is_in_pieces"), [(30, True), (29, False)])
def test_where_the_message_does_not_say_the_allocator_is_asked(allocator, reserved, is_in_pieces):
    allocator.reserved, allocator.allocated = reserved * MIB, 10 * MIB
    assert is_fragmented(torch.OutOfMemoryError("Tried to allocate 20.00 MiB."), CUDA) == is_in_pieces
    assert not is_fragmented(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), CUDA), "nobody knows how much was asked for"


@pytest.mark.parametrize(
    ("module", "name"), [({"get_device_name": lambda device: f"Fake {device.index}"}, "Fake 1"), ({}, "xpu")]
)
def test_an_accelerator_has_the_name_that_its_driver_knows(module, name, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(**module))
    assert device_name(torch.device("xpu", 1)) == name


# Locked pages


class RefusingDriver(TorchFunctionMode):
    """Locks nothing, and keeps that as its last error, which the next kernel raises and so forgets."""

    def __init__(self):
        super().__init__()
        self.last_error = 0

    def cudaHostRegister(self, address, nbytes, flags):
        self.last_error = 1
        return self.last_error

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if torch.device((kwargs or {}).pop("device", CPU)) == CUDA and self.last_error:
            self.last_error = 0
            raise RuntimeError("CUDA error: invalid argument")
        return func(*args, **(kwargs or {}))


def test_a_refused_lock_is_no_error_of_the_next_kernel(monkeypatch):
    with RefusingDriver() as driver:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        with pytest.raises(RuntimeError, match="cannot pin 4096 bytes: the driver answers 1"):
            lock_pages(CUDA, 0, 4096)
        assert torch.zeros(1, device=CUDA) == 0
    with pytest.raises(RuntimeError, match="cannot pin pages for xpu:0"):
        lock_pages(torch.device("xpu", 0), 0, 4096)
