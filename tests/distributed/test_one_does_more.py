"""One process does something more than the others, in the middle of training; all end with an error by name."""

import collections
import re

import pytest
import torch.distributed as dist
from support.models import make_batch, make_model
from support.processes import Workers
from support.together import hf_loss, join_again, make_optimizer

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import CollectiveError

LIMIT_S = 1.5
TIMEOUT_S = 6


def read_gradients(engine, folder):
    return [parameter.grad for parameter in engine.model.parameters()]


def save(engine, folder):
    engine.save_checkpoint(folder)


def go_forward(engine, folder):
    return engine.model(**make_batch("gpt2", 2, 1, 8))


def freeze_and_go_forward(engine, folder):
    next(engine.model.parameters()).requires_grad_(False)
    return go_forward(engine, folder)


DOINGS = {
    read_gradients: "reads the gradient of parameter 'transformer.wte.weight'",
    save: "saves a checkpoint",
}


def train(rank, call, moment, at, folder, checks_all):
    """Some steps; at one moment of one of them rank 1 alone calls something."""
    join_again(rank, folder, TIMEOUT_S)
    model = make_model("gpt2")
    optimizer = make_optimizer(model)
    dist.barrier()
    config = {"chunk_numel": 2048, "process_wait_s": LIMIT_S, "debug_collectives": checks_all}
    engine = PatrickStarEngine(model, config, optimizer, device="cpu", precision="bf16")
    assert engine.collectives.world_size == dist.get_world_size() > 1
    loss_of = hf_loss("gpt2")

    def learn(step):
        model.train()
        engine.backward(loss_of(model, step, 0, rank))
        if (rank, moment, step) == (1, "backward", at):
            call(engine, folder)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        if (rank, moment, step) == (1, "end", at):
            call(engine, folder)

    with pytest.raises(CollectiveError) as caught:
        collections.deque(map(learn, range(at + 3)), 0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "world_size", "at", "checks_all"),
    [
        (read_gradients, 2, 2, False),
        (save, 3, 0, True),
    ],
)
def test_between_backward_and_step(tmp_path, call, world_size, at, checks_all):
    """In step 0 the others agree on what was recorded, which is a long message."""
    with Workers(world_size) as workers:
        texts = set(workers.run(train, call, "backward", at, tmp_path, checks_all, timeout=60))
    (text,) = texts
    assert text.startswith("the processes do not do the same: rank 0 ")
    assert f"rank 1 {DOINGS[call]}" in text


def test_one_waits_for_data_and_the_other_for_a_message(tmp_path):
    """A forward is the same for both, so that only their plans part; the timeout of the group ends it."""
    with Workers(2) as workers:
        texts = workers.run(train, freeze_and_go_forward, "end", 1, tmp_path, False, timeout=60)
    for text in texts:
        assert re.search(r"a collective failed on rank \d of", text)
    # The first that fails says what the others wait for.
    assert re.search(r"ank \d (reduces group|gathers group|has ended its) .* \(called at .*meanwhile", texts[0]), texts


def test_the_debug_setting_names_the_call_at_once(tmp_path):
    with Workers(2) as workers:
        texts = set(workers.run(train, go_forward, "end", 1, tmp_path, True, timeout=60))
    (text,) = texts
    assert text.startswith("the processes do not do the same: rank 0 ")
