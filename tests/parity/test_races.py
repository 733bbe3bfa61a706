"""Training over simulated streams: the same bits, no race, and every wait of the package is needed."""

import contextlib
from unittest import mock

import pytest
import torch
from models import make_batch, make_model
from simulated import simulated_streams
from trainers import smallest_budget

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import RaceError
from hf_patrickstar.memory.simulation import SimulatedStream
from hf_patrickstar.memory.streams import DeviceStreams, StreamTicket
from hf_patrickstar.runtime.chunk import Chunk

pytestmark = pytest.mark.own_streams


def train(name, config, *, accumulation=1, checkpointing=False, steps=3):
    """Losses of steps with an evaluation in each, and the weights after them."""
    torch.manual_seed(0)
    model = make_model(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    engine = PatrickStarEngine(model, config, optimizer, gradient_accumulation_steps=accumulation)
    losses = []
    for step in range(steps):
        for micro in range(accumulation):
            loss = model(**make_batch(name, seed=10 * step + micro)).loss
            loss.backward()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(model(**make_batch(name, seed=99)).loss.item())
        engine.optimizer.clip_grad_norm_(None, 0.5)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return losses, {key: value.clone() for key, value in model.state_dict().items()}


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
    expected = train(name, config, **how)
    with simulated_streams(seed) as driver:
        losses, values = train(name, config, **how)
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
            train("gpt2", config, steps=2)
            found.append("none")
    assert len(found) < 3, "nothing noticed that it was gone"
