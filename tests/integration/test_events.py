"""What moves, and when: literal event lists, and bytes against formulas with named terms."""

import logging

import pytest
import torch
from support.models import make_model
from torch import nn

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.events import (
    ChunkEvicted,
    ChunkInvalidated,
    ChunkLoaded,
    ChunkRehomed,
    ChunkVisited,
    GradientStored,
    ModelDecided,
    StepDiverged,
    StepFinished,
    StepRecorded,
)

WIDTH = 8
HOW = (ModelDecided, ChunkVisited, StepRecorded, StepDiverged)
"""Events that say how a step went, and not what moved."""
WORDS = {
    ChunkLoaded: "load",
    ChunkEvicted: "evict",
    ChunkInvalidated: "drop",
    ChunkRehomed: "move home",
    GradientStored: "gradient",
    StepFinished: "step",
}


def make_layers(count=3):
    """Layers that each fill one chunk of 64 elements."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def record(eviction, num_chunks, num_layers=3, prefetch_depth=0, **kwargs):
    events = []
    model = make_layers(num_layers)
    config = {
        "chunk_numel": 64,
        "chunk_budget": num_chunks * 64 * 4,
        "eviction": eviction,
        "prefetch_depth": prefetch_depth,
    }
    engine = PatrickStarEngine(
        model,
        config,
        torch.optim.AdamW(model.parameters(), fused=True),
        listener=lambda event: None if isinstance(event, HOW) else events.append(event),
        **kwargs,
    )
    return model, engine, events


def words(events):
    listed = []
    for event in events:
        chunk = "" if isinstance(event, StepFinished) else f" {event.chunk_index}"
        ahead = " ahead" if isinstance(event, ChunkLoaded) and event.ahead else ""
        listed.append(WORDS[type(event)] + chunk + ahead)
    return listed


def train_step(model, engine):
    engine.optimizer.zero_grad()
    model(torch.randn(2, WIDTH)).square().mean().backward()
    engine.optimizer.step()


ON_DEMAND = ["gradient 3", "gradient 2", "evict 2", "load 1", "gradient 1", "gradient 0", "drop 1", "drop 3"]
AHEAD = ["gradient 3", "evict 3", "load 1 ahead", "gradient 2", "evict 2", "gradient 1", "gradient 0", "drop 1"]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_events_of_a_first_step_and_of_planned_ones(is_recorded, request):
    """Room for two of four chunks: what a plan brings ahead arrives while the layer before computes."""
    if is_recorded:
        request.getfixturevalue("recorded")
    model, engine, events = record("belady", 2, num_layers=4, prefetch_depth=1)
    for step in range(3):
        events.clear()
        train_step(model, engine)
        recorded = ["load 0", "load 1", "evict 0", "load 2", "evict 1", "load 3"]
        planned = ["load 0", "load 1 ahead", "evict 0", "load 2 ahead", "evict 1", "load 3 ahead"]
        is_planned = not is_recorded or step > 0
        assert words(events) == [*(planned + AHEAD if is_planned else recorded + ON_DEMAND), "step"]


WITH_ROOM_FOR = {
    # Every visit is a load, both ways; layer 0 needs no weight in backward.
    1: "load 0, evict 0, load 1, evict 1, load 2, gradient 2, evict 2, load 1, gradient 1, gradient 0, drop 1",
    # After chunks 0 and 1, both rules evict chunk 0.
    2: "load 0, load 1, evict 0, load 2, gradient 2, gradient 1, gradient 0, drop 1, drop 2",
}


@pytest.mark.parametrize(("eviction", "num_chunks"), [("lru", 1), ("lru", 2), ("list_order", 2)])
def test_events_of_a_step(eviction, num_chunks):
    model, engine, events = record(eviction, num_chunks)
    for _ in range(2):
        events.clear()
        train_step(model, engine)
        assert words(events) == [*WITH_ROOM_FOR[num_chunks].split(", "), "step"], "every step is the same"


def test_evicting_all_warns_where_there_is_nothing_to_evict(caplog):
    with caplog.at_level(logging.WARNING, "hf_patrickstar"):
        model = make_model("gpt2")
        PatrickStarEngine(model, {"debug_evict_all": True, "chunk_numel": 2**20}, torch.optim.AdamW(model.parameters()))
    assert "debug_evict_all has nothing to evict" in caplog.text
