"""A budget that is too small for several processes: the error says how much is enough, to whichever reads it."""

import re

import pytest
import torch
import torch.distributed as dist
from support.models import make_model
from support.processes import Workers
from support.together import make_optimizer, train_together
from test_branches import ROUTES, SMALL, WIDTH, Chain, chain_loss

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import BudgetError

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


def read_alone(rank):
    model = make_model("gpt2")
    budgets = {"device_budget": 100_000, "host_budget": 5000}
    with pytest.raises(BudgetError) as caught:
        PatrickStarEngine(model, {**budgets, "process_wait_s": 5}, make_optimizer(model), device="cpu")
    text = "" if rank else str(caught.value)
    dist.barrier()
    return text


def test_one_process_alone_reads_how_much_would_be_enough(pair):
    """To find it out, no other process is asked, which may not read the error."""
    text, _ = pair.run(read_alone)
    assert re.search(r"With a host_budget of at least \d+.*, the host has room for all chunks", text)
