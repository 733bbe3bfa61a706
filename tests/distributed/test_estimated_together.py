"""Ranks that estimate different first steps, or of which one cannot: they go on together, and compute the same."""

import pytest
import torch
from support.models import make_batch, make_model
from support.together import alone, engaged, on_one_rank, seed_of, tight, train_as_alone

WIDTH = 8
SMALL = {"chunk_numel": WIDTH * WIDTH}


class Routed(torch.nn.Module):
    """Layers of which each rank takes those that ``route`` names.

    Args:
        route: Says which layers a rank takes.
        unseen: A rank whose forward asks for numbers, which a tensor without bytes does not have.
    """

    def __init__(self, route, unseen=None):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.route, self.unseen = route, unseen

    def forward(self, x, rank):
        for index in self.route[rank]:
            x = torch.tanh(self.layers[index](x))
        if rank == self.unseen:
            x = x * float(x.detach().numpy().sum() != 7)
        return x


def make_routed(*args):
    torch.manual_seed(0)
    return Routed(*args)


def routed_loss(model, step, micro, rank):
    generator = torch.Generator().manual_seed(seed_of(step, micro, rank))
    return model(torch.randn(4, WIDTH, generator=generator), rank).square().mean()


def padded_loss(model, step, micro, rank):
    torch.manual_seed(seed_of(step, micro, rank))  # for dropout
    batch = make_batch("gpt2", 2, seed_of(step, micro, rank), 8)
    if rank == 1:
        batch["attention_mask"][0, 5:] = 0
    return model(**batch).loss


def train(rank, make, args, loss_of, accumulation, is_tight):
    """Trains as one process does; returns how many steps were recorded, and how many have left their trace."""
    expected = on_one_rank(lambda: alone(lambda: make(*args), loss_of, accumulation=accumulation))
    model = make(*args)
    config = tight(model, SMALL) if is_tight else SMALL
    with engaged(model, {**config, "debug_collectives": True}, accumulation=accumulation) as engine:
        train_as_alone(engine, expected, loss_of, accumulation=accumulation)
        stats = engine.stats()
    return stats["recorded_steps"], stats["diverged_steps"]


@pytest.mark.parametrize(("accumulation", "is_tight"), [(1, True), (2, False)])
def test_steps_are_estimated_where_only_one_rank_has_padding(pair, accumulation, is_tight):
    found = pair.run(train, make_model, ("gpt2",), padded_loss, accumulation, is_tight)
    assert found == [(0, 0)] * 2


@pytest.mark.parametrize(("unseen", "accumulation", "is_tight"), [(0, 1, False), (1, 2, True)])
def test_where_one_rank_cannot_estimate_a_step_all_record_it(pair, unseen, accumulation, is_tight):
    route = ((0, 1, 2, 3),) * 2
    first, second = pair.run(train, make_routed, (route, unseen), routed_loss, accumulation, is_tight)
    assert first == second
    assert first[0] > 0
    assert first[1] == 0


@pytest.mark.parametrize(
    ("route", "is_tight"),
    [(((0, 1, 2, 3), (3, 2, 1, 0)), False), (((0, 1), (0, 1, 2, 3)), True), (((0, 1, 2), (0, 3, 2)), True)],
    ids=str,
)
def test_ranks_that_estimate_different_steps_go_on_together(pair, route, is_tight):
    pair.run(train, make_routed, (route,), routed_loss, 1, is_tight)
