"""Averages of the weights of a live model, made before or after it came to live in chunks."""

import copy

import pytest
import torch
from live.both import loss_of, make_tower, train
from torch.optim import swa_utils


def weights_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def evaluate(model):
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, 90)
    model.train()
    return loss


class Average:
    """What people keep beside a model: made of the model, updated with it, and put into it for a while."""

    def __init__(self, model, **kwargs):
        self.kept, self.average = None, self.make(model, **kwargs)

    def put_in(self, model):
        self.kept = [parameter.clone() for parameter in model.parameters()]
        for value, parameter in zip(self.values(), model.parameters(), strict=True):
            parameter.data.copy_(value.data)

    def take_out(self, model):
        for value, parameter in zip(self.kept, model.parameters(), strict=True):
            parameter.data.copy_(value.data)

    def values(self):
        return list(self.average)


class Torchs(Average):
    """``AveragedModel``, exchanged with the model by three copies."""

    def make(self, model, **kwargs):
        return swa_utils.AveragedModel(model, **kwargs)

    def update(self, model):
        self.average.update_parameters(model)

    def values(self):
        return list(self.average.parameters())

    @torch.no_grad()
    def put_in(self, model):
        for averaged, current in zip(self.values(), model.parameters(), strict=True):
            kept = averaged.clone()
            averaged.copy_(current)
            current.copy_(kept)

    take_out = put_in


class Exchanged(Torchs):
    """The same, exchanged by assigning ``data``."""

    def put_in(self, model):
        for averaged, current in zip(self.values(), model.parameters(), strict=True):
            averaged.data, current.data = current.data, averaged.data

    take_out = put_in


class Shadow(Average):
    """The class that many scripts have: values are put into the model, and taken back, by assigning ``data``."""

    def make(self, model):
        return {name: parameter.data.clone() for name, parameter in model.named_parameters()}

    def update(self, model):
        for name, parameter in model.named_parameters():
            self.average[name] = (0.1 * parameter.data + 0.9 * self.average[name]).clone()

    def values(self):
        return list(self.average.values())

    def put_in(self, model):
        self.kept = {}
        for name, parameter in model.named_parameters():
            self.kept[name] = parameter.data
            parameter.data = self.average[name]

    def take_out(self, model):
        for name, parameter in model.named_parameters():
            parameter.data = self.kept[name]


class States(Average):
    """Of the state dict, put in by ``load_state_dict``."""

    def make(self, model):
        return {name: value.clone() for name, value in model.state_dict().items()}

    def update(self, model):
        for name, value in model.state_dict().items():
            self.average[name] = 0.9 * self.average[name] + 0.1 * value.detach()

    def values(self):
        return list(self.average.values())

    def put_in(self, model):
        self.kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(self.average)

    def take_out(self, model):
        model.load_state_dict(self.kept)


class Diffusers(Average):
    def make(self, model, **kwargs):
        return pytest.importorskip("diffusers.training_utils").EMAModel(model.parameters(), **kwargs)

    def update(self, model):
        self.average.step(model.parameters())

    def values(self):
        return self.average.shadow_params

    def put_in(self, model):
        self.average.store(model.parameters())
        self.average.copy_to(model.parameters())

    def take_out(self, model):
        self.average.restore(model.parameters())
        again = type(self.average)(model.parameters())
        again.load_state_dict(copy.deepcopy(self.average.state_dict()))
        again.step(model.parameters())


AVERAGES = {
    "equal": lambda m: Torchs(m),
    "ema": lambda m: Torchs(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    "ema_loop": lambda m: Exchanged(m, avg_fn=swa_utils.get_ema_avg_fn(0.9), use_buffers=True),
    "shadow": Shadow,
    "states": States,
    "diffusers": lambda m: Diffusers(m, decay=0.99, foreach=True, use_ema_warmup=True, inv_gamma=1.0, power=0.75),
}


@pytest.mark.parametrize(("kind", "before"), [(kind, n % 2 == 0) for n, kind in enumerate(AVERAGES)])
def test_averages(both, kind, before):
    def make():
        model = make_tower()
        model.blocks[1].requires_grad_(False)
        return model if not before else kept.setdefault(id(model), (model, AVERAGES[kind](model)))[0]

    kept = {}

    def pattern(model, optimizer, note):
        average = kept[id(model)][1] if before else AVERAGES[kind](model)
        for round_ in range(2):
            for step in range(2):
                note("loss", train(model, optimizer, first=2 * round_ + step))
                average.update(model)
            note("average", average.values())
            average.put_in(model)
            note("put in", [weights_of(model), evaluate(model)])
            average.take_out(model)
            note("taken out", weights_of(model))

    both(pattern, make=make)
