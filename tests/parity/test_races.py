"""Training over simulated streams: the same bits, and no race; ``test_missing_waits`` shows that one would be found."""

import pytest
import torch
from models import make_model
from simulated import simulated_streams
from trainers import smallest_budget, train_with_engine

pytestmark = pytest.mark.own_streams


def tight(name, factor, **settings):
    """A configuration in which chunks come and go."""
    smallest = smallest_budget(make_model(name), checkpointing=True)
    return {"chunk_budget": int(factor * smallest), "chunk_numel": 700, **settings}


CASES = {
    "on demand, in 16-bit": ({"placement": "host", "prefetch_depth": 0, "dtype": "bf16"}, {}),
    "margin, ahead": ({"placement": "auto", "prefetch_depth": 2}, {"steps": 4}),
    "on the CPU, recomputation": ({"placement": "host", "cpu_embedding": True}, {"checkpointing": True}),
    "all is evicted, accumulation": ({"debug_evict_all": True}, {"accumulation": 2, "steps": 2}),
}


@pytest.mark.parametrize("place", range(len(CASES)), ids=list(CASES))
def test_copies_at_any_legal_moment_change_nothing(place):
    """At the latest moment and at random ones, with a model that has a decoder alone and with one that has both."""
    (settings, how), name, seed = list(CASES.values())[place], ("gpt2", "t5")[place % 2], (None, 1)[place // 2 % 2]
    config = tight(name, 1.6, **settings)
    expected = train_with_engine(name, config, **how)
    with simulated_streams(seed) as driver:
        losses, values, _ = train_with_engine(name, config, **how)
    assert losses == expected[0]
    assert all(torch.equal(values[key], value) for key, value in expected[1].items())
    assert driver.num_copies > 50
    assert driver.num_checked > 1000
