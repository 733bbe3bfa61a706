"""New payloads: who locks their pages, and what is left of them after an error."""

import gc
import threading
import weakref

import pytest
import torch
from support import inside

from hf_patrickstar import BudgetError, PatrickStarEngine
from hf_patrickstar.checkpoint.first_values import FirstValues
from hf_patrickstar.memory import pinning
from hf_patrickstar.memory.pinning import PagePinning
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.setup import resources

CONFIG = {"host_threads": 2, "chunk_numel": 2**18}


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])


def make_engine(config=CONFIG, model=None):
    model = model or make_model()
    return PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters()), device="cpu")


def test_memory_is_free_after_a_payload_that_does_not_fit(monkeypatch):
    real, pools, given = PayloadPool.allocate, [], []

    def allocate(self, tier, numel, dtype, owner, **kwargs):
        if len(given) == 7:
            raise BudgetError("no room for one more")
        buffer = real(self, tier, numel, dtype, owner, **kwargs)
        given.append(weakref.ref(buffer.untyped_storage()))
        pools.append(self)
        return buffer

    monkeypatch.setattr(PayloadPool, "allocate", allocate)
    with pytest.raises(BudgetError, match="one more"):
        make_engine()
    assert {tier: pools[0].ledger.used(tier) for tier in Tier} == dict.fromkeys(Tier, 0)
    gc.collect()
    assert not any(storage() for storage in given)


@pytest.mark.parametrize("refusal", [None, "cannot pin 4096 bytes: the driver answers 2", "an illegal memory access"])
def test_pages_are_locked_beside_the_first_values(monkeypatch, caplog, refusal):
    """The driver locks all, refuses more than some, or is broken; the model has its values, or is as it was."""
    locked, writing, move_in = [], threading.Event(), FirstValues.move_in

    def lock(device, address, nbytes):
        assert writing.wait(5), "values come at the same time"
        if len(locked) == 2 and refusal:
            raise RuntimeError(refusal)
        locked.append(address)

    def begin(*args):
        writing.set()
        move_in(*args)

    monkeypatch.setattr(FirstValues, "move_in", begin)
    monkeypatch.setattr(pinning, "lock_pages", lock)
    monkeypatch.setattr(pinning, "unlock_pages", lambda device, address: locked.remove(address))
    monkeypatch.setattr(resources, "can_pin_memory", lambda: True)
    monkeypatch.setattr(resources, "make_pinning", lambda device: (PagePinning(device), "pages"))
    config = {**CONFIG, "pin_memory": True, "placement": "host", "chunk_budget": "4MiB"}
    expected, engine = make_model().state_dict(), None
    if refusal is not None and "illegal" in refusal:
        model = make_model()
        with pytest.raises(RuntimeError, match=refusal):
            make_engine(config, model)
    else:
        engine = make_engine(config)
        model, pool = engine.model, engine.resources.pool
        places = {chunk.param.data_ptr() for chunk in inside.chunks(engine)}
        assert set(locked) < places if refusal else set(locked) == places
        assert pool.pins_memory == (refusal is None)
        engine.detach()
        assert {tier: pool.ledger.used(tier) for tier in Tier} == dict.fromkeys(Tier, 0)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    del engine, model
    gc.collect()
    assert not locked
