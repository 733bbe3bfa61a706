"""Several models and optimizers, and models without one, in two processes: as one of plain torch that averages."""

import itertools

import pytest
import torch
import torch.distributed as dist
from support.together import copy_state, differences, launched, seed_of
from torch import nn

from hf_patrickstar import PatrickStarAccelerator
from hf_patrickstar.integrations.accelerator_checkpoints import engine_of

CONFIGS = [{}, {"chunk_numel": 128, "reshard_after_forward": True}, {"chunk_numel": 128, "debug_evict_all": True}]


def make(sizes, seed):
    torch.manual_seed(seed)
    layers = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def make_models():
    return [make([2, 16, 16, 4], 1), make([4, 16, 16, 2], 2), make([4, 16, 1], 3)]


def loss_of(models, step, rank):
    """Through all models."""
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(seed_of(step, 0, rank)))
    between = models[0](x)
    return (models[1](between) - x).square().mean() + models[2](between).square().mean()


def train_plain(models, optimizers_of, steps, max_norm=None):
    """Backward of both ranks' batches; the average of what they give."""
    optimizers = optimizers_of(models)
    parameters = [parameter for model in models for parameter in model.parameters()]
    for step in range(steps):
        for rank in range(dist.get_world_size()):
            loss_of(models, step, rank).backward()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(dist.get_world_size())
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        for optimizer in optimizers:
            optimizer.step()
        for model in models:
            model.zero_grad()
    return optimizers


def train(accelerator, models, optimizers, rank, steps, first=0, max_norm=None):
    for step in range(first, first + steps):
        accelerator.backward(loss_of(models, step, rank))
        if max_norm is not None:
            accelerator.clip_grad_norm_([p for model in models for p in model.parameters()], max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for model in models:
            model.zero_grad()


def assert_same(expected, models):
    for plain, model in zip(expected, models, strict=True):
        assert differences(copy_state(plain), model.state_dict()) == {}


def three_optimizers(models):
    """One over two models, two over the third."""
    return [
        torch.optim.Adam([*models[0].parameters(), *models[1].parameters()], 1e-2),
        torch.optim.SGD(models[2][0].parameters(), 0.05, momentum=0.9),
        torch.optim.Adam(models[2][2].parameters(), 1e-2),
    ]


def detach(models):
    for engine in dict.fromkeys(map(engine_of, models)):
        engine.detach()


def prepare_in_any_order(rank, config, max_norm):
    expected = make_models()
    train_plain(expected, three_optimizers, 3, max_norm)
    models = make_models()
    with launched(rank):
        accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=config)
        assert accelerator.num_processes == dist.get_world_size() == 2
        first, second, third = three_optimizers(models)
        second = accelerator.prepare(second)
        third, one, first, two, three = accelerator.prepare(third, models[0], first, models[1], models[2])
        assert engine_of(one) is engine_of(two) is not engine_of(three)
        assert {engine_of(model).collectives.world_size for model in models} == {2}
        train(accelerator, models, [first, second, third], rank, 3, max_norm=max_norm)
        assert_same(expected, models)
        detach(models)
    assert_same(expected, models)


@pytest.mark.parametrize(("config", "max_norm"), [(CONFIGS[0], None), (CONFIGS[1], 0.05)], ids=["resident", "dropped"])
def test_several_models_and_optimizers(pair, config, max_norm):
    pair.run(prepare_in_any_order, config, max_norm)


def train_without_prepared_optimizers(rank, config, way):
    """A plain optimizer over models that were prepared alone; then, perhaps, one that is prepared later."""

    def plain_optimizers(models):
        return [torch.optim.SGD([p for model in models for p in model.parameters()], 0.1, momentum=0.9)]

    expected = make_models()
    train_plain(expected, plain_optimizers, 2, 0.05 if way == "clipped" else None)
    models = make_models()
    with launched(rank):
        accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=config)
        models = list(accelerator.prepare(*models))
        engines = list(map(engine_of, models))
        assert [engine.collectives.world_size for engine in engines] == [dist.get_world_size()] * 3 == [2] * 3
        assert [engine.optimizers for engine in engines] == [[], [], []]
        optimizer = plain_optimizers(models)[0]
        train(accelerator, models, [optimizer], rank, 2, max_norm=0.05 if way == "clipped" else None)
        assert_same(expected, models)
        if way == "prepared_later":
            # Goes on with the state that it has, now in chunks of one engine.
            prepared = accelerator.prepare(optimizer)
            train(accelerator, models, [prepared], rank, 2, first=2)
            again = make_models()
            train_plain(again, plain_optimizers, 4)
            assert_same(again, models)
        detach(models)


@pytest.mark.parametrize(("config", "way"), [(CONFIGS[1], "clipped"), (CONFIGS[2], "prepared_later")])
def test_models_prepared_without_an_optimizer(pair, config, way):
    pair.run(train_without_prepared_optimizers, config, way)
