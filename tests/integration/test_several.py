"""Several models and optimizers, in any order, in one call or in several: bit for bit against plain Accelerate."""

import copy
import itertools

import pytest
import torch
from support.hf import CONFIGS, Accelerated, states
from support.live import TIGHT, WIDTH
from torch import nn
from torch.optim import lr_scheduler

from hf_patrickstar import CheckpointError, PatrickStarAccelerator
from hf_patrickstar.integrations.accelerator_checkpoints import engine_of


@pytest.fixture(params=list(CONFIGS))
def accelerated(request):
    """Runs a script with stock Accelerate, and with ours at a small budget and when all fits."""
    return Accelerated(CONFIGS[request.param])


def perceptron(sizes, seed):
    torch.manual_seed(seed)
    layers = []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def make_encoder():
    return perceptron([2] + [WIDTH] * 8 + [4], 1)


def make_decoder():
    return perceptron([4] + [WIDTH] * 8 + [2], 2)


def make_judge():
    return perceptron([4] + [WIDTH] * 8 + [1], 3)


def adam(*models, lr=1e-2):
    return torch.optim.Adam(itertools.chain(*(model.parameters() for model in models)), lr=lr, betas=(0.5, 0.9))


def batch(step, size=4):
    return torch.randn(size, 2, generator=torch.Generator().manual_seed(step))


def note_all(note, *parts):
    for part in parts:
        if isinstance(part, torch.optim.Optimizer):
            note("optimizer", states(part))
        else:
            note("model", part.state_dict())


def steps(accelerator, models, optimizers, note, first=0, count=3, max_norm=None):
    """One loss through all models, every optimizer's step."""
    for step in range(first, first + count):
        x = batch(step)
        for model in models[:2]:
            x = model(x)
        loss = (x - batch(step)).square().mean()
        for model in models[2:]:
            loss = loss + model(models[0](batch(step))).square().mean()
        accelerator.backward(loss)
        if max_norm is not None:
            everything = itertools.chain(*(model.parameters() for model in models))
            note("norm", accelerator.clip_grad_norm_(everything, max_norm))
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        note("loss", loss.detach())


ORDERS = list(itertools.islice(itertools.permutations(range(6)), 0, None, 241))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(map(str, order)))
def test_one_call_in_any_order(accelerated, order):
    """One optimizer over two models, two over the third."""

    def script(make, note):
        accelerator = make()
        models = [make_encoder(), make_decoder(), make_judge()]
        optimizers = [
            adam(*models[:2]),
            torch.optim.SGD(models[2][:6].parameters(), lr=0.05, momentum=0.9),
            adam(models[2][6:]),
        ]
        things = [*models, *optimizers]
        prepared = accelerator.prepare(*(things[place] for place in order))
        parts = [prepared[order.index(place)] for place in range(6)]
        steps(accelerator, parts[:3], parts[3:], note, max_norm=0.1)
        note_all(note, *parts)
        if isinstance(accelerator, PatrickStarAccelerator):
            encoder, decoder, judge = map(engine_of, parts[:3])
            assert encoder is decoder is not judge
            assert [len(engine.optimizers) for engine in (encoder, judge)] == [1, 2]

    accelerated(script)


def test_the_models_of_an_optimizer_in_two_calls(accelerated):
    """What was returned for the optimizer, and the schedulers made on it, go on when its second model comes."""

    def script(make, note):
        accelerator = make()
        encoder, decoder = make_encoder(), make_decoder()
        inner = adam(encoder, decoder)
        early = lr_scheduler.ExponentialLR(inner, 0.9)
        encoder, optimizer, early = accelerator.prepare(encoder, inner, early)
        late = lr_scheduler.StepLR(optimizer, 1, 0.5)
        for count in range(2):
            steps(accelerator, [encoder, decoder], [optimizer], note, 2 * count, 2)
            early.step()
            late.step()
            note("rates", [early.get_last_lr(), late.get_last_lr()])
            decoder = accelerator.prepare(decoder)
        note_all(note, encoder, decoder, optimizer)
        if isinstance(accelerator, PatrickStarAccelerator):
            assert engine_of(encoder) is engine_of(decoder)
            assert optimizer.optimizer is engine_of(encoder).optimizer

    accelerated(script)


@pytest.mark.parametrize(("kinds", "when"), [("adam_adam", "together"), ("adam_sgd", "later")])
def test_two_optimizers_that_hold_some_of_the_same(accelerated, when, kinds):
    """In torch both update it from the same gradient, one after the other."""

    def make_one(kind, parameters):
        return torch.optim.Adam(parameters, 1e-2) if kind == "adam" else torch.optim.SGD(parameters, 0.05, momentum=0.9)

    def script(make, note):
        accelerator = make()
        encoder, decoder = make_encoder(), make_decoder()
        one, other = kinds.split("_")
        first, second = make_one(one, encoder[:10].parameters()), make_one(other, encoder[6:].parameters())
        third = adam(decoder)
        encoder, decoder, first, third = accelerator.prepare(encoder, decoder, first, third)
        if when == "later":
            steps(accelerator, [encoder, decoder], [first, third], note)
        second = accelerator.prepare(second)
        steps(accelerator, [encoder, decoder], [first, second, third], note, 3, max_norm=0.1)
        steps(accelerator, [encoder, decoder], [second, first, third], note, 6)
        note_all(note, encoder, decoder, first, second, third)

    accelerated(script)


# Saved and loaded


def test_a_checkpoint_of_fewer_optimizers_changes_nothing(tmp_path):
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=TIGHT)
    encoder, decoder = make_encoder(), make_decoder()
    parts = accelerator.prepare(encoder, decoder, adam(encoder))
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.prepare(adam(decoder))
    with torch.no_grad():
        encoder[0].weight.fill_(7.0)
    before = copy.deepcopy([part.state_dict() for part in parts])
    with pytest.raises(CheckpointError, match="no training state; prepare the models and optimizers that were saved"):
        accelerator.load_state(str(tmp_path / "state"))
    for part, state in zip(parts[:2], before, strict=False):
        assert all(torch.equal(value, state[key]) for key, value in part.state_dict().items())
