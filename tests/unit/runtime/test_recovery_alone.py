"""Memory that was there in pieces, on an accelerator that is not there, and errors that say that a device is full."""

import types

import pytest
import torch

from hf_patrickstar.errors import BudgetError, ConfigError, DeviceMemoryError
from hf_patrickstar.events import MicroBatchRepeated
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.model_lock import ModelLock
from hf_patrickstar.runtime.recovery import Recovery, is_out_of_memory

CAREFUL = ["discard trace", "leave margin", "evict unused"]


class Attempts:
    def __init__(self, log):
        self.has_leftovers = False
        self.begin, self.end = (lambda: log.append("begin")), (lambda: log.append("end"))


class Manager:
    """What ``Recovery`` needs of ``ChunkManager``."""

    def __init__(self):
        self.log = log = []
        self.events = []

        def note(event):
            return lambda: log.append(event)

        self.ledger = Ledger({Tier.DEVICE: 1000, Tier.HOST: 1000})
        self.gradients = types.SimpleNamespace(attempts=Attempts(log))
        self.unwind, self.model_lock = note("unwind"), ModelLock()
        self.steps = types.SimpleNamespace(abandon_step=note("forget step"))
        self.tracer = types.SimpleNamespace(distrust=note("discard trace"))
        self.placement = types.SimpleNamespace(leave_margin=note("leave margin"))
        self.executor = types.SimpleNamespace(evict_unused=note("evict unused"))
        self.undo_attempt = note("undo attempt")
        self.discard_gradients = note("discard gradients")


@pytest.fixture
def manager():
    return Manager()


# Memory in pieces, on an accelerator

IN_PIECES = "CUDA out of memory. Tried to allocate 20.00 MiB, and 64.00 MiB is reserved by PyTorch but unallocated."
NONE_LEFT = "CUDA out of memory. Tried to allocate 20.00 MiB, and 2.00 MiB is reserved by PyTorch but unallocated."


@pytest.fixture
def on_gpu(manager, monkeypatch):
    """A recovery on a device that is not there."""
    for name in ("random_state", "set_random_state"):
        monkeypatch.setattr(f"hf_patrickstar.runtime.recovery.{name}", lambda *args: None)
    monkeypatch.setattr("hf_patrickstar.runtime.recovery.empty_cache", lambda: manager.log.append("empty_cache"))
    return Recovery(manager, torch.device("cuda", 0), lambda: (), manager.events.append)


def fail(manager, recovery, *texts):
    """Runs a micro-batch whose attempts fail with these texts; returns the limit afterwards."""
    errors = [torch.OutOfMemoryError(text) for text in texts]

    def micro_batch():
        if errors:
            raise errors.pop(0)

    recovery.run(micro_batch)
    return manager.ledger.limit(Tier.DEVICE, cautious=False)


def test_memory_that_was_there_in_pieces_costs_no_budget(manager, on_gpu, caplog):
    assert fail(manager, on_gpu, IN_PIECES) == 1000
    assert [event for event in manager.log if event in (*CAREFUL, "empty_cache")] == [*CAREFUL, "empty_cache"]
    assert manager.events == [MicroBatchRepeated(1, is_defragmented=True)]
    assert (
        "1000 B leave as before, because the memory was there in pieces; if this is often said, start with"
        in caplog.text
    )


def test_memory_that_was_not_there_costs_a_tenth(manager, on_gpu):
    assert fail(manager, on_gpu, NONE_LEFT) == 900
    assert manager.events == [MicroBatchRepeated(1)]


def test_pieces_that_come_again_at_once_cost_a_tenth(manager, on_gpu):
    """Everything had left the device, and yet the memory was not there: it is not the pieces."""
    assert fail(manager, on_gpu, IN_PIECES, IN_PIECES) == 900
    assert manager.events == [MicroBatchRepeated(1, is_defragmented=True), MicroBatchRepeated(2)]


@pytest.mark.parametrize(("num_between", "limit"), [(8, 900), (9, 1000)])
def test_pieces_that_come_again_soon_cost_a_tenth_and_later_nothing(manager, on_gpu, num_between, limit):
    """A repetition in every step would cost more than a tenth of the room; the repeated one itself is calm."""
    fail(manager, on_gpu, IN_PIECES)
    for _ in range(num_between):
        fail(manager, on_gpu)
    assert fail(manager, on_gpu, IN_PIECES) == limit


# Errors


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (DeviceMemoryError("no room"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), False),
        (BudgetError("host_budget: 30 bytes more needed"), False),
        (MemoryError("out of memory"), False),
        (ConfigError("out of memory"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_say_that_the_device_is_full(error, is_memory):
    assert is_out_of_memory(error) == is_memory
