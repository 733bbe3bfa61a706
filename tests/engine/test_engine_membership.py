"""The model changes while it is in chunks: parameters and modules come, go, are frozen, reshaped or exchanged."""

import copy

import pytest
import torch
from support.pairs import Pair, config_of, engine_of
from support.same import assert_same, assert_same_values, copied, values_of
from support.small import WIDTH, Stack, Tied, adamw, batch, loss_of, make, step_of, trainable
from torch import nn

from hf_patrickstar import BudgetError, ConfigError, EngineError, PatrickStarEngine, get_engine, initialize_engine

SITUATIONS = ("resident", "moving")


class All(Pair):
    """A pair whose optimizers have frozen parameters too."""

    def __init__(self, factory, budget, prepare, **settings):
        super().__init__(factory, budget, prepare=prepare, settings=settings)
        for model, optimizer in self:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            rest = [parameter for parameter in model.parameters() if id(parameter) not in held]
            optimizer.add_param_group({"params": rest})


def test_unfreezing_costs_lists_once_and_only_when_training_goes_on(budget):
    pair = All(Stack, budget, lambda model: model.layers[:2].requires_grad_(False))
    pair.train(1)
    before = pair.engine.stats()["model_data_nbytes"]
    for model, _ in pair:
        model.layers[0].requires_grad_(True)
    with torch.no_grad():
        pair.both(lambda model, _: model(batch()).clone())
    assert pair.engine.stats()["model_data_nbytes"] == before
    pair.train(1, first=1)
    after = pair.engine.stats()["model_data_nbytes"]
    assert after == before + (WIDTH * WIDTH + WIDTH) * 12
    for model, _ in pair:
        model.layers[0].requires_grad_(False)
    pair.train(1, first=2)
    for model, _ in pair:
        model.layers[0].requires_grad_(True)
    pair.train(1, first=3)
    assert pair.engine.stats()["model_data_nbytes"] == after


def test_in_16_bits_a_parameter_that_gets_another_shape(budget):
    """Rows are added to an embedding: the parameter begins anew with its optimizer state."""
    model = make(Tied)
    engine = engine_of(model, budget, dtype="bf16")
    for step in range(2):
        step_of(model, engine.optimizer, step)
    weight = model.embedding.weight
    rows = copied(weight)
    weight.data = torch.cat([rows, torch.ones(2, WIDTH, dtype=rows.dtype)])
    assert torch.equal(weight[: len(rows)].detach(), rows)
    step_of(model, engine.optimizer, 2)
    assert weight.shape == (len(rows) + 2, WIDTH)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    pair = Pair(Stack, "moving", settings={"host_budget": 5 * 320 * 16 + 2000})
    pair.train(1)
    model, optimizer = pair.ours, pair.optimizer
    model.layers.append(nn.Linear(WIDTH, WIDTH))
    optimizer.add_param_group({"params": list(model.layers[-1].parameters())})
    with pytest.raises(BudgetError, match=r"host_budget is too small.*at least \d+ bytes"):
        model(batch())
    optimizer.param_groups.pop()
    del model.layers[-1]
    pair.train(2, first=1)


def test_a_module_that_joins_and_is_too_large_for_the_device_is_named():
    pair = Pair(Stack, "moving")
    pair.ours.wide = nn.Linear(100, 100)
    with pytest.raises(
        BudgetError, match=r"chunk_budget is too small for module 'wide' \(Linear\), which is new.*40\d\d\d"
    ):
        pair.ours(batch())
    del pair.ours.wide
    pair.train(2)


def test_a_gradient_of_before_a_parameter_joined_is_not_lost(budget):
    pair = Pair(Stack, budget)
    pair.train(1)

    def join(model, optimizer):
        model.extra = nn.Parameter(torch.ones(WIDTH))
        (model.extra * 3).sum().backward()
        optimizer.add_param_group({"params": [model.extra]})
        loss_of(model, 1).backward()
        found = copied(model.extra.grad)
        optimizer.step()
        optimizer.zero_grad()
        return found, copied(model.extra)

    pair.both(join)


def test_an_optimizer_of_another_model_is_refused():
    model, other = make(Stack), make(Stack)
    with pytest.raises(EngineError, match=r"not one is the model's \(Stack\).*model\.parameters\(\)"):
        PatrickStarEngine(model, config_of("moving"), adamw(other.parameters()), device="cpu")
    engine = engine_of(model, "moving")
    with pytest.raises(EngineError, match="not one is the model's"):
        engine.add_optimizer(adamw(other.parameters()))
    assert len(engine.optimizers) == 1
    loss_of(model).backward()
    engine.optimizer.step()


# Attaching and detaching


@pytest.mark.parametrize(("dtype", "when"), [("fp32", "at once"), ("bf16", "after backward"), ("fp32", "after a step")])
def test_detaching_gives_model_and_optimizer_back(when, dtype, budget):
    model = make(Tied)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    optimizer = adamw(trainable(model))
    engine = PatrickStarEngine(model, config_of(budget, dtype, chunks=4), optimizer, device="cpu")
    if when != "at once":
        loss_of(model).backward()
    if when == "after a step":
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    expected, states = values_of(model), copy.deepcopy(engine.optimizer.state_dict()["state"])
    engine.detach()
    engine.detach()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.dtype is torch.float32
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.grad is None
        assert not parameter._post_accumulate_grad_hooks
    for name, module in model.named_modules():
        assert set(vars(module)) == attributes[name]
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"):
            assert not getattr(module, hooks)
    masters = {key: {k: v for k, v in state.items() if k != "patrickstar_master"} for key, state in states.items()}
    assert_same(masters, optimizer.state_dict()["state"])
    loss_of(model, 3).backward()
    optimizer.step()


def test_a_construction_that_fails_leaves_the_model_as_it_was(budget, monkeypatch):
    model = make(Stack)
    before = values_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer, calls, register = adamw(model.parameters()), [], nn.Linear.register_forward_pre_hook

    def refuse(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 3:
            raise MemoryError("no hook")
        return register(self, *args, **kwargs)

    monkeypatch.setattr(nn.Linear, "register_forward_pre_hook", refuse)
    with pytest.raises(MemoryError, match="no hook"):
        PatrickStarEngine(model, config_of(budget), optimizer, device="cpu")
    monkeypatch.setattr(nn.Linear, "register_forward_pre_hook", register)
    assert not hasattr(model, "patrickstar_engine")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert type(parameter) is nn.Parameter
        assert parameter.grad is gradient
    optimizer.zero_grad()
    engine = PatrickStarEngine(model, config_of(budget), optimizer, device="cpu")
    loss_of(model).backward()
    engine.optimizer.step()


def test_models_that_cannot_be_managed_are_refused_with_a_remedy():
    frozen = make(Stack).requires_grad_(False)
    with pytest.raises(EngineError, match=r"no trainable parameter.*unfreeze"):
        PatrickStarEngine(frozen, config_of("moving"), adamw(frozen.parameters()), device="cpu")
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(EngineError, match=r"'layers\.0\.weight' is on the meta device.*load weights first"):
        engine_of(model)
    model = make(Stack)
    model.layers[1].weight = nn.Parameter(model.layers[0].weight.data)
    with pytest.raises((EngineError, ConfigError), match=r"layers\.[01]\.weight.*memory"):
        engine_of(model)


def test_a_bare_loop_by_one_call(budget):
    plain = make(Stack)
    theirs = adamw(plain.parameters())
    model, optimizer = initialize_engine(lambda: make(Stack), config_of(budget), lambda p: adamw(p), device="cpu")
    for step in range(3):
        loss_of(plain, step).backward()
        model.backward(loss_of(model, step))
        for each in (theirs, optimizer):
            each.step()
            each.zero_grad()
    assert_same_values(plain, model)
    get_engine(model).detach()
    assert not hasattr(model, "backward")
