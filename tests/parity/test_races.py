"""Training over simulated streams: the same bits, no race, and every wait of the package is needed."""

import contextlib
from unittest import mock

import pytest
import torch
from models import make_model
from simulated import simulated_streams
from trainers import smallest_budget, train_with_engine

from hf_patrickstar.errors import RaceError
from hf_patrickstar.memory.simulation import SimulatedStream
from hf_patrickstar.memory.streams import DeviceStreams, StreamTicket
from hf_patrickstar.runtime.chunk import Chunk

pytestmark = pytest.mark.own_streams


def tight(name, factor, **settings):
    """A configuration in which chunks come and go."""
    smallest = smallest_budget(make_model(name), checkpointing=True)
    return {"chunk_budget": int(factor * smallest), "chunk_numel": 700, **settings}


CASES = {
    "on demand": ({"placement": "host", "prefetch_depth": 0}, {}),
    "ahead": ({"placement": "host", "prefetch_depth": 2}, {}),
    "margin": ({"placement": "auto", "prefetch_depth": 2}, {"steps": 4}),
    "16-bit": ({"placement": "host", "dtype": "bf16"}, {}),
    "accumulation": ({"placement": "host"}, {"accumulation": 2, "steps": 2}),
    "recomputation": ({"placement": "host"}, {"checkpointing": True}),
    "on the CPU": ({"placement": "host", "cpu_embedding": True}, {}),
    "all is evicted": ({"debug_evict_all": True}, {"steps": 2}),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("settings", "how"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_copies_at_any_legal_moment_change_nothing(name, settings, how, seed):
    config = tight(name, 1.6, **settings)
    expected = train_with_engine(name, config, **how)
    with simulated_streams(seed) as driver:
        losses, values, _ = train_with_engine(name, config, **how)
    assert losses == expected[0]
    assert all(torch.equal(values[key], value) for key, value in expected[1].items())
    assert driver.num_copies > 50
    assert driver.num_checked > 1000


RELEASE = DeviceStreams.release_in_flight


def release_at_once(streams):
    """Lets go of gradients in flight, and does not wait for them."""
    with mock.patch.object(StreamTicket, "join"):
        RELEASE(streams)


WAITS = {
    "a ticket is joined": (StreamTicket, "join", lambda ticket: None),
    "a ticket is waited for": (StreamTicket, "wait", lambda ticket: None),
    "memory of gradients is waited for": (
        DeviceStreams,
        "release_in_flight",
        release_at_once,
    ),
    "lanes wait for the compute stream": (SimulatedStream, "wait_stream", lambda lane, other: None),
    "lanes wait for each other": (Chunk, "under_way", ()),
    "the host waits for a home": (Chunk, "wait", lambda chunk: None),
    "a chunk remembers its copies": (Chunk, "note", lambda chunk, ticket: None),
}


@pytest.mark.parametrize(("owner", "name", "instead"), WAITS.values(), ids=WAITS)
def test_every_wait_is_missed(owner, name, instead):
    """Without it, one of these runs meets a race."""
    found = []
    for seed, settings in ((None, {"prefetch_depth": 2}), (1, {"prefetch_depth": 0}), (2, {"prefetch_depth": 1})):
        config = tight("gpt2", 1.6, placement="host", **settings)
        with contextlib.suppress(RaceError), mock.patch.object(owner, name, instead), simulated_streams(seed):
            train_with_engine("gpt2", config, steps=2)
            found.append("none")
    assert len(found) < 3, "nothing noticed that it was gone"
