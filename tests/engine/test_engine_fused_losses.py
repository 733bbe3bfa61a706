"""Fused losses read the weight of the output embedding themselves: bits are those of the same loss on a plain model."""

import pytest
from support.fused_losses import LOSSES, loss_of, make
from support.models import make_batch
from support.pairs import Pair


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("place", ["in forward", "outside"])
@pytest.mark.parametrize("tied", [False, True])
def test_bits_are_those_of_a_plain_model(kind, place, tied, budget):
    settings = {} if budget == "resident" else {"numel": 3072, "chunk_budget": 2**15}
    pair = Pair(lambda: make(kind, place, tied=tied), budget, settings=settings)
    pair.train(3, loss=lambda model, seed: loss_of(model, make_batch("llama", seed=seed), kind, place))
    stats = pair.engine.stats()
    assert stats["diverged_steps"] == 0
    assert (stats["host_to_device_nbytes"] > 0) is pair.moves
