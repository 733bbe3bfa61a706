"""Losses in chunks of rows in two processes: the bits of one process that has the micro-batches of both."""

import pytest
import torch
import torch.distributed as dist
from support.fused_losses import LOSSES, loss_of, make
from support.models import make_batch, make_model
from support.together import alone, differences, engaged, on_one_rank, parts_of, seed_of, tight, train_as_alone

from hf_patrickstar.model.chunked_loss import chunk_losses, find_heads


def train_like_one(rank, make, of_batch, settings, extra_nbytes=0):
    def loss(model, step, micro, rank):
        torch.manual_seed(seed_of(step, micro, rank))  # for dropout
        return of_batch(model, make_batch("llama", 2, seed_of(step, micro, rank), 8))

    model, world_size = make(False), dist.get_world_size()
    config = tight(model, settings, extra_nbytes)
    with engaged(model, config) as engine:
        parts = parts_of(engine)
        expected = on_one_rank(lambda: alone(lambda: make(True), loss, world_size, parts=parts))
        train_as_alone(engine, expected, loss)
        stats = engine.stats()
    assert differences(expected[0], model.state_dict()) == {}  # after detach
    return stats


def train_fused(rank, kind, place, tied):
    return train_like_one(
        rank,
        lambda is_plain: make(kind, place, tied=tied),
        lambda model, batch: loss_of(model, batch, kind, place),
        {},
        # The first step is planned without what its loss reads outside of forward, and keeps gradients until it ends.
        2**17 if (kind, place) == ("recomputed", "outside") else 0,
    )


def train_chunked(rank, name):
    def make(is_plain):
        model = make_model(name)
        if is_plain:
            chunk_losses(find_heads(model))
        return model

    return train_like_one(rank, make, lambda model, batch: model(**batch).loss, {"chunked_loss": True})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("place", ["in forward", "outside"])
@pytest.mark.parametrize("kind", LOSSES)
def test_fused_losses_need_no_change(pair, kind, place, tied):
    for stats in pair.run(train_fused, kind, place, tied):
        assert stats["diverged_steps"] == (1 if (kind, place) == ("recomputed", "outside") else 0)
        assert stats["all_gathers"] > 0


@pytest.mark.parametrize("name", ["gpt2", "llama"])  # tied and not
def test_losses_in_chunks_train_like_one(pair, name):
    for stats in pair.run(train_chunked, name):
        assert stats["diverged_steps"] == 0
        assert stats["all_gathers"] > 0
