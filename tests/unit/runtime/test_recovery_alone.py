"""Memory that was there in pieces, on an accelerator that is not there, and errors that say that a device is full."""

import types
from unittest import mock

import pytest
import torch

from hf_patrickstar.counts import Counts
from hf_patrickstar.errors import BudgetError, ConfigError, DeviceMemoryError
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime import recovery as module
from hf_patrickstar.runtime.lock import EngineLock
from hf_patrickstar.runtime.recovery import Recovery, is_out_of_memory

IN_PIECES = "CUDA out of memory. Tried to allocate 20.00 MiB, and 64.00 MiB is reserved by PyTorch but unallocated."
NONE_LEFT = "CUDA out of memory. Tried to allocate 20.00 MiB, and 2.00 MiB is reserved by PyTorch but unallocated."
DEFRAGMENTED = "with as much for chunks as before, because the memory was there in pieces; if this is often said"


@pytest.fixture
def on_gpu(monkeypatch):
    """Runs micro-batches whose attempts fail with texts, on a device that is not there.

    Returns the limit, and how many were repeated.
    """
    for name in ("random_state", "set_random_state", "empty_cache"):
        monkeypatch.setattr(module, name, lambda *args: None)
    ledger = Ledger({Tier.DEVICE: 1000, Tier.HOST: 1000})
    manager = mock.MagicMock(ledger=ledger, lock=EngineLock(), counts=Counts())
    manager.gradients = types.SimpleNamespace(
        attempts=types.SimpleNamespace(has_leftovers=False, begin=lambda: None, end=lambda: None)
    )
    recovery = Recovery(manager, torch.device("cuda", 0), lambda: ())

    def run(*micro_batches):
        for texts in micro_batches:
            errors = [torch.OutOfMemoryError(text) for text in texts]

            def micro_batch(errors=errors):
                if errors:
                    raise errors.pop(0)

            recovery.run(micro_batch)
        return ledger.limit(Tier.DEVICE, cautious=False), manager.counts.retries

    return run


@pytest.mark.parametrize(
    ("micro_batches", "limit", "in_pieces"),
    [
        ([[IN_PIECES]], 1000, [True]),
        ([[NONE_LEFT]], 900, [False]),
        # Everything had left the device, and yet the memory was not there: it is not the pieces.
        ([[IN_PIECES, IN_PIECES]], 900, [True, False]),
        # A repetition in every step would cost more than a tenth of the room; the repeated one itself is calm.
        ([[IN_PIECES], *[[]] * 8, [IN_PIECES]], 900, [True, False]),
        ([[IN_PIECES], *[[]] * 9, [IN_PIECES]], 1000, [True, True]),
    ],
    ids=["in pieces", "not there", "again at once", "again soon", "again later"],
)
def test_memory_that_was_there_in_pieces_costs_no_budget(on_gpu, caplog, micro_batches, limit, in_pieces):
    assert on_gpu(*micro_batches) == (limit, len(in_pieces))
    said = [record.getMessage() for record in caplog.records if "is repeated" in record.getMessage()]
    assert [DEFRAGMENTED in line for line in said] == in_pieces


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
        (ConfigError("out of memory"), False),
    ],
)
def test_which_errors_say_that_the_device_is_full(error, is_memory):
    assert is_out_of_memory(error) == is_memory
