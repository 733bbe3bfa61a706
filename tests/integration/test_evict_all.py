"""``debug_evict_all`` moves chunks off the device, also where everything would live there."""

import logging

import torch
from models import make_batch, make_model

from hf_patrickstar import PatrickStarEngine


def train(config):
    model = make_model("gpt2").train()
    engine = PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    losses = []
    for step in range(3):
        loss = model(**make_batch("gpt2", seed=step)).loss
        loss.backward()
        losses.append(loss.item())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return losses, engine.stats()


def test_it_keeps_chunks_off_the_device_where_all_would_fit():
    expected, stats = train({})
    assert stats["chunk_evictions"] == 0
    losses, stats = train({"debug_evict_all": True})
    assert losses == expected
    assert stats["chunk_evictions"] > stats["num_chunks"] > 2
    assert stats["chunks_in_margin"] == 0


def test_it_says_so_where_it_finds_nothing(caplog):
    with caplog.at_level(logging.WARNING, "hf_patrickstar"):
        train({"debug_evict_all": True, "chunk_numel": 2**20})
    assert "debug_evict_all has nothing to evict" in caplog.text


def test_what_binds_chunks_is_in_the_statistics():
    """A peak means something beside the setting that limits it."""
    _, stats = train({"chunk_budget": 80 * 1024})
    assert stats["device_peak_nbytes"] <= stats["chunk_budget_nbytes"] == 80 * 1024 < stats["device_budget_nbytes"]
    _, stats = train({"device_budget": "2MiB"})
    assert stats["chunk_budget_nbytes"] == stats["device_budget_nbytes"] == 2 * 2**20
