"""A budget that is too small where ranks take different branches: whoever does what the error says once can train."""

import re

import pytest
import torch
from as_one import make_optimizer, train_together
from processes import Workers
from test_branches import ROUTES, SMALL, WIDTH, Chain, chain_loss

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import BudgetError, DeviceMemoryError

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
    """What fails leaves the ranks in different places, so each attempt has processes of its own.

    Returns:
        The bytes that the error advises; ``None`` if there was no error.
    """
    try:
        with Workers(2, grace_s=1) as workers:
            workers.run(train, config, route, num_weights)
    except (BudgetError, DeviceMemoryError) as error:
        text = str(error).split("\ntier ")[0]
        return int(ADVICE.search(text)[1]), text
    return None


@pytest.mark.parametrize(("route", "config", "num_weights"), [("one_twice", {}, 2), ("by_parity", LARGE_GROUPS, 5)])
def test_one_correction_is_enough(route, config, num_weights):
    settings = {**SMALL, **config, "chunk_budget": 64}
    advised, text = try_to_train(settings, route, num_weights)
    assert "Where data leads the processes down different branches" in text
    settings["chunk_budget"] = advised  # the least, which may not be enough for branches
    found = try_to_train(settings, route, num_weights)
    if found is not None:
        assert found[0] > settings["chunk_budget"]
        settings["chunk_budget"] = found[0]
        assert try_to_train(settings, route, num_weights) is None
