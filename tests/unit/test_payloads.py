"""New payloads: workers fill them with zeros, and stop when one does not fit."""

import threading
import time

import pytest
import torch

from hf_patrickstar import BudgetError, PatrickStarEngine, payloads
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.optim.workers import SMALL_NUMEL

CONFIG = {"host_threads": 2, "chunk_numel": 2**18}


def make_engine(config=CONFIG):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
    return PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters()), device="cpu")


@pytest.fixture
def zeroed(monkeypatch):
    """The threads that filled each part, slowly."""
    found, real = [], payloads._fill_with_zeros

    def fill(worker, part):
        time.sleep(0.05)
        real(worker, part)
        found.append(threading.current_thread())

    monkeypatch.setattr(payloads, "_fill_with_zeros", fill)
    return found


def test_workers_fill_all_parts_before_the_values_come(zeroed):
    engine = make_engine()
    large = [chunk for chunk in engine.manager.chunks if chunk.spec.chunk_numel > SMALL_NUMEL]
    assert len(zeroed) == 2 * len(large) > 0, "values and masters; states have no values yet"
    assert threading.current_thread() not in zeroed
    assert not any(chunk.lists["exp_avg"].any() for chunk in engine.manager.chunks)


def test_nobody_writes_after_a_payload_that_does_not_fit(zeroed, monkeypatch):
    real, given = PayloadPool.allocate, []

    def allocate(self, tier, numel, dtype, owner, **kwargs):
        if len(given) == 7:
            raise BudgetError("no room for one more")
        given.append(owner)
        return real(self, tier, numel, dtype, owner, **kwargs)

    monkeypatch.setattr(PayloadPool, "allocate", allocate)
    with pytest.raises(BudgetError, match="one more"):
        make_engine()
    num = len(zeroed)
    assert num < len(given)  # what was not begun is not done
    time.sleep(0.2)
    assert len(zeroed) == num
