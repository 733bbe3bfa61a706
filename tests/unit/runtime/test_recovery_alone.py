"""Memory that was there in pieces, on an accelerator that is not there, and errors that say that a device is full."""

import pytest
import torch

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import BudgetError, ConfigError, DeviceMemoryError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime import recovery
from hf_patrickstar.runtime.recovery import is_out_of_memory

IN_PIECES = "CUDA out of memory. Tried to allocate 20.00 MiB, and 64.00 MiB is reserved by PyTorch but unallocated."
NONE_LEFT = "CUDA out of memory. Tried to allocate 20.00 MiB, and 2.00 MiB is reserved by PyTorch but unallocated."
DEFRAGMENTED = "with as much for chunks as before, because the memory was there in pieces; if this is often said"


@pytest.fixture
def on_gpu(monkeypatch):
    """Runs micro-batches whose attempts fail with texts, as on a GPU; returns the limit, and how many were repeated."""
    for name in ("random_state", "set_random_state", "empty_cache"):
        monkeypatch.setattr(recovery, name, lambda *args: None)
    is_fragmented, gpu = recovery.is_fragmented, torch.device("cuda", 0)
    monkeypatch.setattr(recovery, "is_fragmented", lambda error, _: is_fragmented(error, gpu))
    monkeypatch.setattr(recovery, "is_accelerator", lambda device: True)
    config = {"device_budget": 1000, "chunk_numel": 64}
    engine = PatrickStarEngine(torch.nn.Linear(2, 2), config, device="cpu")

    def run(*micro_batches):
        for texts in micro_batches:
            errors = [torch.OutOfMemoryError(text) for text in texts]

            def micro_batch(errors=errors):
                if errors:
                    raise errors.pop(0)

            engine.attempt(micro_batch)
        return engine.ledger.limit(Tier.DEVICE, cautious=False), engine.counts.retries

    yield run
    engine.detach()


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
