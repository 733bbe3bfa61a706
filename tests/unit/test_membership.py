"""What the engine books when a model changes, and that a change it has no room for changes nothing.

tests/engine has what a change means for training.
"""

import copy

import pytest
import torch
from torch import nn

from hf_patrickstar import BudgetError, PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier

WIDTH = 16
CONFIG = {"chunk_numel": 320, "chunk_budget": 4096}


def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def attached(config=CONFIG, make_optimizer=make_adamw):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    engine = PatrickStarEngine(model, config, make_optimizer(model))
    train(model, engine.optimizer)
    return model, engine


def train(model, optimizer, steps=1):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    optimizer.zero_grad()


def loss_of(model, step=0):
    return model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))).square().sum()


def books_of(engine):
    """Bytes by owner at home, chunks and their lists, and names."""
    booked = {name: nbytes for name, nbytes in engine.ledger.owners(Tier.HOST).items() if nbytes}
    chunks = [(chunk.spec, sorted(chunk.lists)) for chunk in engine.manager.chunks]
    return booked, chunks, [tensor.spec.name for tensor in engine.manager.tensors]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


@pytest.mark.parametrize(
    ("make_optimizer", "spare", "message"),
    [
        (make_adamw, None, "chunk_budget"),
        # The host budget ends at the first list of the first chunk, at a later one, or at a later chunk.
        (make_adamw, 4096, "host"),
        (make_adamw, 40960, "host"),
    ],
)
def test_a_layer_that_there_is_no_room_for_changes_nothing(make_optimizer, spare, message):
    config = CONFIG
    if spare is not None:
        config = {"chunk_numel": 320, "chunk_budget": 16384}
        _, engine = attached(config, make_optimizer)
        config = {**config, "host_budget": engine.ledger.used(Tier.HOST) + spare}
        engine.detach()
    model, engine = attached(config, make_optimizer)
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(twin)
    optimizer.load_state_dict(engine.optimizer.state_dict())
    values, states, before = (
        *(copy.deepcopy(model.state_dict()), engine.optimizer.state_dict()["state"]),
        books_of(engine),
    )
    model.append(nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)))
    engine.optimizer.add_param_group({"params": list(model[-1].parameters())})
    for _ in range(2):  # again at the next forward, as long as it is there
        with pytest.raises(BudgetError, match=message):
            loss_of(model)
        assert books_of(engine) == before
    assert all(type(parameter) is nn.Parameter for parameter in model[-1].parameters())
    del model[-1]
    del engine.optimizer.param_groups[-1]
    assert_same(values, model.state_dict())
    for number, state in engine.optimizer.state_dict()["state"].items():
        assert_same({k: v for k, v in state.items() if v is not None}, states[number])
    for item, its_optimizer in ((twin, optimizer), (model, engine.optimizer)):
        train(item, its_optimizer, 2)
    assert_same(twin.state_dict(), model.state_dict())


def test_modules_get_chunks_of_their_own_where_room_is_tight_and_empty_chunks_are_freed():
    """In model order the second and the fourth would lie in two chunks each, and four are too many at once."""
    model, engine = attached()
    before = books_of(engine)
    for _ in range(3):
        model.append(nn.Identity())
        model[-1].scales = nn.ParameterList([nn.Parameter(torch.ones(3, WIDTH, 4)) for _ in range(3)])
        loss_of(model)
        booked, _, names = books_of(engine)
        assert booked["param"] > before[0]["param"]
        assert len(names) == 8 + 3
        del model[-1]
        loss_of(model)
        assert books_of(engine)[0] == before[0]


def test_a_module_moved_within_the_model_keeps_its_place_and_gets_its_new_name():
    model, engine = attached()
    tensor, (_, chunks, _) = engine.manager.find(model[0].weight), books_of(engine)
    for place, layer in enumerate([model[1], model[2], model[0], model[3]]):
        model[place] = layer
    loss_of(model)
    assert engine.manager.find(model[2].weight) is tensor
    assert tensor.spec.name == "2.weight"
    assert books_of(engine)[1:] == (chunks, [f"{place}.{name}" for place in range(4) for name in ("weight", "bias")])
