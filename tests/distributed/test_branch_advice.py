"""A budget that is too small where ranks take different branches: the error says how much is enough."""

import re

import pytest
import torch
from as_one import make_optimizer, train_together
from processes import Workers
from test_branches import ROUTES, SMALL, WIDTH, Chain, chain_loss

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import BudgetError

pytestmark = pytest.mark.xdist_group("distributed")

ADVICE = re.compile(r"chunk_budget to at least (\d+) bytes")
LARGE_GROUPS = {"chunk_numel": 3 * WIDTH * WIDTH, "reshard_after_forward": True}


def train(rank, config, route, num_weights):
    torch.manual_seed(0)
    model = Chain(num_weights, 4, ROUTES[route])
    engine = PatrickStarEngine(model, config, make_optimizer(model), device="cpu")
    train_together(engine, chain_loss, 6)
    engine.detach()


def try_to_train(config, route, num_weights):
    """What fails leaves the ranks in different places, so each attempt has processes of its own."""
    with Workers(2, grace_s=1) as workers:
        workers.run(train, config, route, num_weights)


@pytest.mark.parametrize(("route", "config", "num_weights"), [("one_twice", {}, 2), ("by_parity", LARGE_GROUPS, 5)])
def test_one_correction_is_enough(route, config, num_weights):
    settings = {**SMALL, **config, "chunk_budget": 64}
    with pytest.raises(BudgetError, match="Where data leads the processes down different branches") as caught:
        try_to_train(settings, route, num_weights)
    (least,), (more,) = ADVICE.findall(str(caught.value)), re.findall(r"\((\d+) bytes\) more", str(caught.value))
    try_to_train({**settings, "chunk_budget": int(least) + int(more)}, route, num_weights)
