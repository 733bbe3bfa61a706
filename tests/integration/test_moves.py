"""What moves, and when: literal lists, and bytes against formulas with named terms."""

import logging

import pytest
import torch
from support.models import make_model
from torch import nn

from hf_patrickstar import PatrickStarEngine

WIDTH = 8


def make_layers(count=3):
    """Layers that each fill one chunk of 64 elements."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def record(eviction, num_chunks, num_layers=3, prefetch_depth=0, **kwargs):
    model = make_layers(num_layers)
    config = {
        "chunk_numel": 64,
        "chunk_budget": num_chunks * 64 * 4,
        "eviction": eviction,
        "prefetch_depth": prefetch_depth,
    }
    engine = PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters(), fused=True), **kwargs)
    engine.counts.log = []
    return model, engine


def moves(engine):
    """What moved, in order; visits are left out."""
    return [f"{what} {number}" for what, number in engine.counts.log if what != "visit"]


def train_step(model, engine):
    engine.optimizer.zero_grad()
    model(torch.randn(2, WIDTH)).square().mean().backward()
    engine.optimizer.step()


ON_DEMAND = ["gradient 3", "gradient 2", "evict 2", "load 1", "gradient 1", "gradient 0", "drop 1", "drop 3"]
AHEAD = ["gradient 3", "evict 3", "load ahead 1", "gradient 2", "evict 2", "gradient 1", "gradient 0", "drop 1"]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_moves_of_a_first_step_and_of_planned_ones(is_recorded, request):
    """Room for two of four chunks: what a plan brings ahead arrives while the layer before computes."""
    if is_recorded:
        request.getfixturevalue("recorded")
    model, engine = record("belady", 2, num_layers=4, prefetch_depth=1)
    for step in range(3):
        engine.counts.log.clear()
        train_step(model, engine)
        recorded = ["load 0", "load 1", "evict 0", "load 2", "evict 1", "load 3"]
        planned = ["load 0", "load ahead 1", "evict 0", "load ahead 2", "evict 1", "load ahead 3"]
        is_planned = not is_recorded or step > 0
        expected = planned + AHEAD if is_planned else recorded + ON_DEMAND
        assert moves(engine) == [*expected, f"step {step + 1}"]


WITH_ROOM_FOR = {
    # Every visit is a load, both ways; layer 0 needs no weight in backward.
    1: "load 0, evict 0, load 1, evict 1, load 2, gradient 2, evict 2, load 1, gradient 1, gradient 0, drop 1",
    # After chunks 0 and 1, both rules evict chunk 0.
    2: "load 0, load 1, evict 0, load 2, gradient 2, gradient 1, gradient 0, drop 1, drop 2",
}


@pytest.mark.parametrize(("eviction", "num_chunks"), [("lru", 1), ("lru", 2), ("list_order", 2)])
def test_moves_of_a_step(eviction, num_chunks):
    model, engine = record(eviction, num_chunks)
    for step in range(2):
        engine.counts.log.clear()
        train_step(model, engine)
        expected = WITH_ROOM_FOR[num_chunks].split(", ")
        assert moves(engine) == [*expected, f"step {step + 1}"], "every step is the same"


def test_evicting_all_warns_where_there_is_nothing_to_evict(caplog):
    with caplog.at_level(logging.WARNING, "hf_patrickstar"):
        model = make_model("gpt2")
        PatrickStarEngine(model, {"debug_evict_all": True, "chunk_numel": 2**20}, torch.optim.AdamW(model.parameters()))
    assert "debug_evict_all has nothing to evict" in caplog.text
