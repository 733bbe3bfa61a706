"""What the engine adopts and gives back when a model changes, and that a change it has no room for changes nothing."""

import copy

import pytest
import torch
from torch import nn

from hf_patrickstar import BudgetError, EngineError, PatrickStarEngine
from hf_patrickstar.membership import holders
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.hooks import ModelHooks

WIDTH = 16
CONFIG = {"chunk_numel": 320, "chunk_budget": 4096}


def make_model(depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])


def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def attached(config=CONFIG, make_optimizer=make_adamw, **kwargs):
    model = make_model()
    engine = PatrickStarEngine(model, config, make_optimizer(model), **kwargs)
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


def booked(engine):
    """Bytes by owner at home."""
    host = engine.ledger.owners(Tier.HOST)
    return {name: nbytes for name, nbytes in host.items() if nbytes}


def chunks_of(engine):
    return [(chunk.spec, sorted(chunk.lists)) for chunk in engine.manager.chunks]


def names_of(engine):
    return [tensor.spec.name for tensor in engine.manager.tensors]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


def host_budget_of(config, spare):
    """What an engine for the model takes on the host, and so many bytes more."""
    _, engine = attached(config)
    nbytes = engine.ledger.used(Tier.HOST)
    engine.detach()
    return {**config, "host_budget": nbytes + spare}


# No room


def wide_layer():
    return nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH))


@pytest.mark.parametrize("make_optimizer", [make_adamw, make_sgd])
def test_a_layer_that_the_device_has_no_room_for_changes_nothing(make_optimizer):
    model, engine = attached(make_optimizer=make_optimizer)
    _assert_refused(model, engine, make_optimizer, "chunk_budget")


@pytest.mark.parametrize("spare", [4096, 12288, 40960])
def test_a_layer_that_the_host_has_no_room_for_changes_nothing(spare):
    """The budget ends at the first list of the first chunk, at a later one, or at a later chunk."""
    config = host_budget_of({"chunk_numel": 320, "chunk_budget": 16384}, spare)
    model, engine = attached(config)
    _assert_refused(model, engine, make_adamw, "host")


def _assert_refused(model, engine, make_optimizer, message):
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(twin)
    optimizer.load_state_dict(engine.optimizer.state_dict())
    values, states = copy.deepcopy(model.state_dict()), engine.optimizer.state_dict()["state"]
    before = booked(engine), chunks_of(engine), names_of(engine)
    model.append(wide_layer())
    engine.optimizer.add_param_group({"params": list(model[-1].parameters())})
    for _ in range(2):  # again at the next forward, as long as it is there
        with pytest.raises(BudgetError, match=message):
            loss_of(model)
        assert (booked(engine), chunks_of(engine), names_of(engine)) == before
    assert all(type(parameter) is nn.Parameter for parameter in model[-1].parameters())
    del model[-1]
    del engine.optimizer.param_groups[-1]
    assert_same(values, model.state_dict())
    for number, state in engine.optimizer.state_dict()["state"].items():
        assert_same({k: v for k, v in state.items() if v is not None}, states[number])
    for item, its_optimizer in ((twin, optimizer), (model, engine.optimizer)):
        train(item, its_optimizer, 2)
    assert_same(twin.state_dict(), model.state_dict())


def test_parameters_of_meta_are_refused_before_anything_changes():
    model, engine = attached()
    before = booked(engine), chunks_of(engine), names_of(engine)
    model.append(nn.Linear(WIDTH, WIDTH, device="meta"))
    with pytest.raises(EngineError, match=r"4\.weight"):
        loss_of(model)
    assert (booked(engine), chunks_of(engine), names_of(engine)) == before


def test_modules_get_chunks_of_their_own_where_room_is_tight():
    """In model order the second and the fourth would lie in two chunks each, and four are too many at once."""
    model, engine = attached()
    scales = nn.ParameterList([nn.Parameter(torch.ones(3, WIDTH, 4)) for _ in range(3)])
    model.append(nn.Identity())
    model[-1].scales = scales
    loss_of(model)
    assert len(names_of(engine)) == 8 + 3


# Room


def test_what_is_new_is_adopted_and_what_is_gone_is_given_back():
    model, engine = attached()
    gone, new = model[1], nn.Linear(WIDTH, WIDTH)
    value = gone.weight.detach().clone()
    state = {key: item.clone() for key, item in engine.optimizer.state[gone.weight].items()}
    loss_of(model).backward()
    gradient = gone.weight.grad.clone()
    nbytes = booked(engine)["master"]
    model[1] = new
    loss_of(model)
    assert engine.manager.find(new.weight) is not None
    assert engine.manager.find(gone.weight) is None
    assert type(gone.weight) is nn.Parameter
    assert torch.equal(gone.weight, value)
    assert torch.equal(gone.weight.grad, gradient)
    assert_same(engine.optimizer.state[gone.weight], state)
    assert names_of(engine) == [f"{place}.{name}" for place in range(4) for name in ("weight", "bias")]
    model[1] = gone
    loss_of(model)
    assert torch.equal(gone.weight.grad, gradient)
    assert_same(dict(engine.optimizer.state[gone.weight]), state)
    assert engine.manager.find(new.weight) is None
    assert booked(engine)["master"] == nbytes


def test_empty_chunks_are_freed():
    model, engine = attached()
    before = booked(engine)
    for _ in range(5):
        model.append(nn.Linear(WIDTH, WIDTH))
        loss_of(model)
        assert booked(engine)["param"] > before["param"]
        del model[-1]
        loss_of(model)
        assert booked(engine) == before


def test_a_module_moved_within_the_model_keeps_its_place_and_gets_its_new_name():
    model, engine = attached()
    tensor = engine.manager.find(model[0].weight)
    order = [model[1], model[2], model[0], model[3]]
    for place, layer in enumerate(order):
        model[place] = layer
    chunks = chunks_of(engine)
    loss_of(model)
    assert engine.manager.find(model[2].weight) is tensor
    assert tensor.spec.name == "2.weight"
    assert names_of(engine)[4] == "2.weight"
    assert chunks_of(engine) == chunks


def test_a_frozen_parameter_is_unfrozen_for_training_alone():
    model = make_model()
    model[0].requires_grad_(False)
    engine = PatrickStarEngine(model, CONFIG, make_adamw(model))
    train(model, engine.optimizer)
    model[0].requires_grad_(True)
    with torch.no_grad():
        loss_of(model)
    with torch.inference_mode():
        loss_of(model)
    assert not engine.manager.find(model[0].weight).spec.trainable
    before = model[0].weight.detach().clone()
    loss_of(model).backward()
    assert engine.manager.find(model[0].weight).spec.trainable
    assert torch.equal(before, model[0].weight)
    assert model[0].weight.grad.abs().max() > 0


def test_a_parameter_unfrozen_inside_of_a_forward_gets_its_gradient_and_is_adopted_with_it():
    models = [make_model(), make_model()]
    for model in models:
        model[1].requires_grad_(False)
        model[0].register_forward_hook(lambda module, args, output, model=model: model[1].requires_grad_(True) and None)
    optimizers = [make_adamw(models[0]), PatrickStarEngine(models[1], CONFIG, make_adamw(models[1])).optimizer]
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer)
    assert_same(models[0].state_dict(), models[1].state_dict())


def test_exchanged_tensors_are_followed():
    model, engine = attached()
    old, new = model[0].weight.detach().clone(), nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))
    parameter = model[0].weight
    torch.utils.swap_tensors(parameter, new)
    loss_of(model).backward()
    assert torch.equal(new, old)
    assert type(new) is nn.Parameter
    assert torch.equal(parameter.detach(), torch.full((WIDTH, WIDTH), 0.1))
    assert engine.manager.find(parameter) is not None
    assert parameter.grad.abs().max() > 0


def test_the_first_optimizer_that_holds_a_parameter_has_it():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(first.parameters()), torch.optim.SGD([*second.parameters(), first.weight])]
    found = holders(optimizers)
    assert [found[id(p)] for p in (first.weight, first.bias, second.weight, second.bias)] == [0, 0, 1, 1]


def test_a_parameter_that_goes_to_the_next_module_is_noticed(monkeypatch):
    """Read one after the other, the dictionaries of both modules have the same contents before and after."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Module())
    engine = PatrickStarEngine(model, CONFIG, make_adamw(model))
    refresh, refreshed = ModelHooks.refresh, []
    monkeypatch.setattr(ModelHooks, "refresh", lambda hooks: refreshed.append(hooks) or refresh(hooks))
    engine.follow_model()
    assert refreshed == []
    model[1]._parameters["bias"] = model[0]._parameters.popitem()[1]
    engine.follow_model()
    assert len(refreshed) == 1
    assert names_of(engine) == ["0.weight", "1.bias"]
    engine.follow_model()
    assert len(refreshed) == 1, "it is known by now"
