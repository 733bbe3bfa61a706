"""Collectives of the user's in a step, while the other processes wait for a message of the engine."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from processes import Workers
from test_branches import DROPPED, chain_loss, make_chain
from together import join_again, make_optimizer, train_together

from hf_patrickstar import PatrickStarEngine

pytestmark = pytest.mark.xdist_group("distributed")

LIMIT_S = 1.5
TIMEOUT_S = 4


def make_engine(route=None, limit_s=LIMIT_S):
    model = make_chain(2, 4, route)
    optimizer = make_optimizer(model)
    dist.barrier()  # a process that is still importing, as torch may for an optimizer, has not come, either
    config = {**DROPPED, "process_wait_s": limit_s}
    return PatrickStarEngine(model, config, optimizer, device="cpu")


def all_gather(x):
    dist.all_gather([torch.empty_like(x) for _ in range(2)], x.detach())


def on_rank_one(step, rank):
    return [0, 1, 2, 3] if rank == 1 else [0, 2, 3]


def call_on_rank_one(rank, model, call, place):
    """Lets a layer that only rank 1 uses call something."""
    if rank == 1 and place == "forward":
        model.layers[1].register_forward_hook(lambda *_: call(torch.ones(3)))


def learn(model, step, rank, call, place):
    loss = chain_loss(model, step, 0, rank)
    loss.backward()


def call_in_a_branch(rank, folder, num_steps):
    """Some steps in which all is well; then one in which only rank 1 calls something."""
    join_again(rank, folder, TIMEOUT_S)
    engine = make_engine(on_rank_one)
    train_together(engine, chain_loss, num_steps)
    call_on_rank_one(rank, engine.model, all_gather, "forward")
    with pytest.raises(RuntimeError) as caught:
        learn(engine.model, num_steps, rank, all_gather, "forward")
    return str(caught.value)


def test_the_timeout_of_the_group_ends_both(tmp_path):
    begin = time.monotonic()
    with Workers(2) as workers:
        text, other = workers.run(call_in_a_branch, str(tmp_path), 2)
    assert TIMEOUT_S <= time.monotonic() - begin < 60
    assert re.search(r"a collective failed on rank 0 of 2: rank 1 has not come.*ddp_timeout", text), text
    assert re.search("clos|imed out", other), other


# Waiting that is right

SLOW_S = 2.5 * LIMIT_S


def be_slow(x):
    time.sleep(SLOW_S)


class Slow(torch.utils.data.Dataset):
    """Data that takes long."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(SLOW_S)
        return index


def be_slow_on_rank_one(rank, place, num_steps):
    engine = make_engine(on_rank_one)
    train_together(engine, chain_loss, num_steps)
    call_on_rank_one(rank, engine.model, be_slow, place)
    if rank == 1 and place == "data":
        list(torch.utils.data.DataLoader(Slow()))
    learn(engine.model, num_steps, rank, be_slow, place)
    all_gather(torch.ones(3))
    engine.detach()


@pytest.mark.parametrize(("place", "num_steps"), [("data", 0), ("forward", 2)])
def test_a_slow_process_is_waited_for(pair, place, num_steps):
    pair.run(be_slow_on_rank_one, place, num_steps)
