"""Fused losses read the weight of the output embedding themselves: bits are those of the same loss on a plain model."""

import pytest
import torch
from support.fused_losses import LOSSES, loss_of, make
from support.models import make_batch

from hf_patrickstar import PatrickStarEngine

BUDGETS = {
    "resident": {},
    "moving": {"chunk_budget": 2**15, "placement": "host", "chunk_numel": 3072},
    "evicting": {"chunk_budget": 2**15, "placement": "host", "chunk_numel": 3072, "debug_evict_all": True},
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("place", ["in forward", "outside"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("budget", BUDGETS)
def test_bits_are_those_of_a_plain_model(kind, place, tied, budget):
    plain, model = make(kind, place, tied=tied), make(kind, place, tied=tied)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (plain, model)]
    engine = PatrickStarEngine(model, BUDGETS[budget], optimizers[1], device="cpu")
    optimizers[1] = engine.optimizer
    for step in range(3):
        losses = []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            loss = loss_of(each, make_batch("llama", seed=step), kind, place)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    stats = engine.stats()
    assert stats["diverged_steps"] == 0
    assert (stats["host_to_device_nbytes"] > 0) is (budget != "resident")
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
