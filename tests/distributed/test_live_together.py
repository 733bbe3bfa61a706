"""The live model in two processes: the same bits as one plain process that has the micro-batches of both.

A pattern is written as for plain torch, as in ``tests/live``; only ``world.learn`` stands for forward and backward of a
batch, since one process has one and the plain one has all of them.
"""

import pytest
import torch
import torch.distributed as dist
from support.live import VOCAB, Block, Notes, assert_same_model, assert_same_notes, make_adamw, make_tower
from support.models import make_batch, make_model
from support.together import engaged
from torch import nn

from hf_patrickstar.errors import CollectiveError

CONFIGS = {
    "roomy": {},
    "tight": {"chunk_numel": 320, "chunk_budget": 2**14},  # the embedding is spread over both
    "poisoned": {"chunk_numel": 320, "chunk_budget": 2**14, "debug_evict_all": True},
}


def loss_of(model, step, rank):
    """The next token, of the batch of a rank."""
    ids = torch.randint(0, VOCAB, (3, 6), generator=torch.Generator().manual_seed(100 + 2 * step + rank))
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def hf_loss_of(model, step, rank):
    return model(**make_batch("gpt2", 2, 100 + 2 * step + rank, 8)).loss


class Alone:
    """One plain process: gradients of all ranks, in their order, make an average, which is added to what is there."""

    def __init__(self, rank, loss=loss_of):
        self.rank, self.loss = rank, loss

    def learn(self, model, step, loss=None):
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        model.zero_grad()
        losses = []
        for rank in range(dist.get_world_size()):
            value = (loss or self.loss)(model, step, rank)
            value.backward()
            losses.append(value.detach().clone())
        for parameter, before in gradients:
            if parameter.grad is not None:
                parameter.grad.div_(dist.get_world_size())
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        return losses[self.rank]


class Together(Alone):
    """This process, which has its own batch."""

    def learn(self, model, step, loss=None):
        value = (loss or self.loss)(model, step, self.rank)
        value.backward()
        return value.detach().clone()


def train(world, model, optimizer, first=0, steps=1):
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        losses.append(world.learn(model, step))
        optimizer.step()
    optimizer.zero_grad()
    return losses


def evaluate(world, model, step=90):
    """Leaves copies of all chunks on the device, if there is room."""
    with torch.no_grad():
        return world.loss(model, step, 0)


# Writing


def write_data(world, model, optimizer, note):
    kept = [p.data for p in model.parameters()]
    note("losses", train(world, model, optimizer))
    note("kept", [value.shape for value in kept])
    note("before", evaluate(world, model))
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    note("after", evaluate(world, model))
    model.embedding.weight.data[3] = 0.25
    note("a row", evaluate(world, model))
    model.blocks[0].linear.weight.data.view(-1)[-5:].fill_(0.125)
    note("a view", world.learn(model, 5))
    optimizer.step()
    optimizer.zero_grad()
    model.scale.data = torch.full_like(model.scale, 0.75)
    note("assigned", evaluate(world, model))


# Gradients


def change_gradients(world, model, optimizer, note):
    world.learn(model, 0)
    for number, parameter in enumerate(model.parameters()):
        if number % 5 == 0:
            parameter.grad.mul_(-2)
        elif number % 5 == 1:
            parameter.grad = torch.full_like(parameter, 0.1)
        elif number % 5 == 2:
            parameter.grad = None
        elif number % 5 == 3:
            parameter.grad.zero_()
    world.learn(model, 1)
    note("gradients", [p.grad for p in model.parameters()])
    optimizer.step()
    note("losses", train(world, model, optimizer, 2))


# Changing what is trained


def freeze_all_but_the_end(model):
    model.requires_grad_(False)
    for module in (*model.blocks[-2:], model.norm):
        module.requires_grad_(True)


def make_frozen():
    model = make_tower()
    freeze_all_but_the_end(model)
    return model


def make_adamw_of_trained(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def unfreeze(world, model, optimizer, note):
    note("losses", train(world, model, optimizer))
    for block in (model.blocks[4], model.blocks[5]):
        block.requires_grad_(True)
        optimizer.add_param_group({"params": list(block.parameters()), "lr": 3e-3})
    note("losses afterwards", train(world, model, optimizer, 1, steps=2))
    model.blocks[-1].requires_grad_(False)
    note("losses in the end", train(world, model, optimizer, 3, steps=2))


def add_module(world, model, optimizer, note):
    note("losses", train(world, model, optimizer))
    torch.manual_seed(3)
    new = Block()
    model.blocks.append(new)
    optimizer.add_param_group({"params": list(new.parameters())})
    note("losses afterwards", train(world, model, optimizer, 1, steps=2))
    del model.blocks[2]
    note("losses in the end", train(world, model, optimizer, 3, steps=2))


def resize(world, model, optimizer, note):
    world.loss = hf_loss_of
    note("losses", train(world, model, optimizer))
    weight = model.get_input_embeddings().weight
    model.resize_token_embeddings(100, mean_resizing=False)
    optimizer.state.pop(weight, None)  # with several processes one has it
    with torch.no_grad():
        model.transformer.wte.weight[96:].fill_(0.01)
    note("losses afterwards", train(world, model, optimizer, 1, steps=2))


def make_gpt2():
    return make_model("gpt2").eval()  # no dropout


PATTERNS = {
    function.__name__: (function, make_tower, make_adamw) for function in (write_data, change_gradients, add_module)
} | {
    "unfreeze": (unfreeze, make_frozen, make_adamw_of_trained),
    "resize": (resize, make_gpt2, make_adamw),
}


def compare(rank, name, config):
    pattern, make, make_optimizer = PATTERNS[name]
    if make is make_gpt2:
        config = {key: 8 * value if key.startswith("chunk") else value for key, value in config.items()}
    plain, ours = make(), make()
    optimizer = make_optimizer(plain)
    with engaged(ours, config, make_optimizer(ours)) as engine:
        rows = []
        for world, model, its in ((Alone(rank), plain, optimizer), (Together(rank), ours, engine.optimizer)):
            torch.manual_seed(7)
            note = Notes()
            pattern(world, model, its, note)
            note("losses of two more steps", train(world, model, its, 50, steps=2))
            rows.append(note.rows)
        assert_same_notes(*rows)
        assert_same_model(plain, ours)
    assert_same_model(plain, ours)  # detached


@pytest.mark.parametrize(("name", "config"), [(name, list(CONFIGS)[n % 3]) for n, name in enumerate(PATTERNS)])
def test_patterns(pair, name, config):
    pair.run(compare, name, CONFIGS[config])


# What only one of them does


def write_on_one_rank(rank):
    model = make_tower()
    with engaged(model, CONFIGS["roomy"], make_adamw(model)):
        world = Together(rank)
        evaluate(world, model)
        for parameter in model.parameters():
            value = parameter.data
            if rank == 0:
                value.mul_(0.5)
        with pytest.raises(CollectiveError, match="do not do the same"):
            evaluate(world, model)


def test_a_write_of_one_rank_alone_is_an_error(pair):
    pair.run(write_on_one_rank)
