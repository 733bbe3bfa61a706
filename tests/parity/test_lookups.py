"""Embeddings looked up on the CPU: what crosses, and which are; ``test_stock_trainer`` has every architecture."""

import pytest
import torch
from support import inside
from support.pairs import Pair
from support.small import tokens
from torch import nn


def test_variants_of_embeddings():
    """Padding, scaling by frequency, renormalisation in place, sparse gradients, a subclass that scales."""

    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 3.0

    class Buffered(Scaled):
        """It is computed with on the device."""

        def __init__(self, *args):
            super().__init__(*args)
            self.register_buffer("factor", torch.tensor(3.0))

        def forward(self, ids):
            return super().forward(ids) * self.factor

    makers = (
        lambda: nn.Embedding(20, 8, padding_idx=0),
        lambda: nn.Embedding(20, 8, scale_grad_by_freq=True),
        lambda: nn.Embedding(20, 8, max_norm=0.5),
        lambda: nn.Embedding(20, 8, sparse=False),
        lambda: Scaled(20, 8),
        lambda: Buffered(20, 8),
    )
    for make in makers:
        pair = Pair(
            lambda make=make: nn.Sequential(make(), nn.Linear(8, 8), nn.Linear(8, 8)),
            settings={"cpu_embedding": True, "chunk_budget": 1000 if make is makers[-1] else 600, "chunk_numel": 64},
        )
        pair.train(4, loss=loss_of)


def loss_of(model, seed):
    return model(tokens(seed)).square().sum()


@pytest.mark.parametrize(
    ("rows", "num_tokens", "budget", "evaluations", "at_home"),
    [
        (5000, 64, 5000 * 8 * 4 + 4096, 0, True),
        (4096, 5000, 4096 * 8 * 4 + 4096, 0, False),
        (4096, 5000, 20000, 0, True),  # the weight is larger than the budget
        (5000, 1000, 5000 * 8 * 4 + 4096, 10, True),  # rows of evaluations do not count
    ],
)
def test_auto_decides_by_the_bytes_of_the_first_step(rows, num_tokens, budget, evaluations, at_home):
    pair = Pair(
        lambda: nn.Sequential(nn.Embedding(rows, 8), nn.Linear(8, 8), nn.Linear(8, 8)),
        "resident",
        settings={"chunk_budget": budget, "numel": "auto"},
    )
    with torch.no_grad():
        for _ in range(evaluations):
            pair.ours(torch.randint(0, rows, (num_tokens,)))
    pair.train(3, loss=lambda model, seed: model(tokens(seed, 1, num_tokens, rows)).square().sum())
    tensor = inside.find(pair.engine, pair.ours[0].weight)
    assert tensor.lookup == ("home" if at_home else "device")
    assert (pair.engine.stats()["host_to_device_nbytes"] > rows * 8 * 4) is not at_home
    assert pair.engine.stats()["diverged_steps"] == 0
