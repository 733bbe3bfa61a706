"""Writing parameters of a live model, in every form in which plain torch allows it."""

import copy

import numpy
import pytest
import torch
from support.live import (
    WIDTH,
    assert_same_model,
    live,
    loss_of,
    make_adamw,
    make_ids,
    make_tower,
    make_with_list,
    raises_in_both,
    train,
)
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from hf_patrickstar import PatrickStarEngine


def noise(tensor, seed=1):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


def inference(model, step=9):
    with torch.no_grad():
        return model(make_ids(step))


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# Functions that write parameters of a model, each in one way. What they return is compared.


def by_operators(model):
    found = []
    with torch.no_grad():
        for parameter in model.parameters():
            before = parameter
            parameter *= 0.5
            parameter += 0.01
            parameter -= noise(parameter) * 0.01
            parameter /= 2
            parameter **= 2
            found.append(parameter is before)
        model.scale *= 2
    weight = model.blocks[1].linear.weight
    with torch.no_grad():
        found += [weight.mul_(0.5) is weight, weight.add_(1).sub_(1).clamp_(-1, 1) is weight, weight.requires_grad]
        found += [torch.mul(weight, 2, out=weight) is weight, nn.init.ones_(weight) is weight]
    return [
        *found,
        weight.data.mul_(0.2) is weight,
        isinstance(model.scale, nn.Parameter),
        "scale" in model._parameters,
    ]


def through_views(model):
    weight = model.blocks[4].linear.weight
    with torch.no_grad():
        weight.view(-1)[:5] = 0.1
        weight.t()[0].mul_(2)
        weight[3].copy_(torch.ones(WIDTH))
        weight.T.add_(0.01)
        weight.diagonal().fill_(0.0)
        weight.unsqueeze(0).flatten().clamp_(-0.2, 0.2)
        query, key, value = weight.split([5, 5, 6])
        query.normal_(0, 0.1)
        key.copy_(query * 2)
        value.zero_()
        for row in model.blocks[5].linear.weight:
            row.div_(row.norm())
        for part in model.embedding.weight.chunk(3):
            part.sub_(part.mean())
    for row in model.blocks[6].linear.weight.detach().unbind():
        row.add_(0.1)
    model.scale.detach().requires_grad_(False)[2:4] = 3.0


def as_out(model):
    weight, other = model.blocks[1].linear.weight, model.blocks[2].linear.weight
    with torch.no_grad():
        torch.add(other, weight, alpha=0.5, out=weight)
        torch.mm(weight, other, out=model.blocks[3].linear.weight)
        torch.clamp(model.scale, max=0.9, out=model.scale)
        torch.mean(other, dim=0, out=model.blocks[2].linear.bias)
        torch.stack([model.scale] * WIDTH, out=other.data)
        torch.linalg.qr(weight.clone(), out=(weight, torch.empty(0)))
    torch.mul(model.norm.weight.data, 2, out=model.norm.weight.data)


def as_arguments(model):
    with torch.no_grad():
        functional.embedding(torch.arange(4), model.embedding.weight, max_norm=0.1)
        functional.dropout(model.norm.weight, 0.5, training=True, inplace=True)
        functional.normalize(model.blocks[0].linear.weight, dim=1, out=model.blocks[0].linear.weight)
        return functional.relu(model.scale, inplace=True) is model.scale


@torch.inference_mode()
def in_inference_mode(model):
    for parameter in model.parameters():
        parameter.mul_(0.9)
    model.scale[1:3] = 0.0
    return model(make_ids()).tolist()


def the_buffer(model):
    for buffer in model.buffers():
        buffer[2] = 1.0
    model.offset.mul_(0.5)
    model.offset = model.offset + model.scale.detach()
    return model.offset


def a_kept_list(model):
    """A list made before the engine."""
    with torch.no_grad():
        for parameter in model.kept[::3]:
            parameter.mul_(0.5)
    for parameter in model.kept[1::3]:
        parameter.data.clamp_(-0.05, 0.05)
    for parameter in model.kept[2::3]:
        parameter.data = parameter.data + 0.1


def data_replaced(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.to("cpu", torch.float32) * 0.9 + 0.01
    model.scale.data = model.norm.weight.data.clone()
    model.norm.weight.data = nn.Parameter(torch.full((WIDTH,), 0.75))
    model.blocks[0].linear.weight.data = functional.normalize(model.blocks[0].linear.weight.data, dim=1)
    model.blocks[1].linear.bias.data = torch.from_numpy(numpy.linspace(-1, 1, WIDTH, dtype=numpy.float32))
    return [[p.requires_grad, p.is_leaf, isinstance(p, nn.Parameter)] for p in model.parameters()]


def data_exchanged(model):
    first, second = model.blocks[0].linear.weight, model.blocks[5].linear.weight
    first.data, second.data = second.data, first.data
    model.blocks[2].linear.weight.data = model.blocks[3].linear.weight.data
    found = [model.blocks[2].linear.weight.detach().clone(), first.detach().clone()]
    model.blocks[2].linear.weight.data = model.blocks[2].linear.weight.data.clone()  # memory is not shared for good
    spare = model.norm.weight.data.clone()
    model.norm.weight.data.copy_(model.scale.data)
    model.scale.data.copy_(spare)
    return found


def data_turned(model):
    weight, bias = model.blocks[2].linear.weight, model.blocks[3].linear.bias
    weight.data, bias.data = weight.data.t(), torch.ones(1).expand(WIDTH)
    found = [weight.detach().clone(), bias.detach().clone()]
    weight.data, bias.data = weight.data.contiguous(), bias.data.clone()
    return found


def by_numpy(model):
    for parameter in model.parameters():
        parameter.data.numpy()[...] *= 0.9
        numpy.clip(parameter.data.numpy(), -0.5, 0.5, out=parameter.data.numpy())
        parameter.detach().numpy().flat[0] = 0.125
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.9, model.parameters())
    nn.init.orthogonal_(model.blocks[2].linear.weight)
    nn.init.sparse_(model.blocks[3].linear.weight, sparsity=0.5)
    model.scale.data.numpy().fill(1.5)
    numpy.copyto(model.blocks[1].linear.bias.detach().numpy(), numpy.arange(WIDTH, dtype=numpy.float32) / WIDTH)


def tied_once_more(model):
    model.head.weight = model.embedding.weight
    model.scale = model.scale
    model.blocks[0].linear.register_parameter("bias", model.blocks[0].linear.bias)
    model.head.weight.data[2] = 0.5
    with torch.no_grad():
        model.embedding.weight[3].zero_()
    return [model.head.weight is model.embedding.weight, len(list(model.parameters()))]


def a_state_of_another_model(model):
    other = make_tower(seed=3).state_dict()
    found = [list(keys) for keys in model.load_state_dict({key: value.double() for key, value in other.items()})]
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.load_state_dict(model.state_dict())
    return found


def a_part_of_a_state(model):
    other = make_tower(seed=5)
    state = other.state_dict()
    some = {key: value for key, value in state.items() if "blocks.1" in key} | {"strange": torch.ones(2)}
    report = model.load_state_dict(some, strict=False)
    model.blocks[3].load_state_dict(other.blocks[4].state_dict())
    model.embedding.load_state_dict({"weight": other.embedding.weight})
    model.blocks.load_state_dict({"7.linear.bias": torch.ones(WIDTH)}, strict=False)
    with raises_in_both(RuntimeError, match="Missing key"):
        model.load_state_dict(some)
    with raises_in_both(RuntimeError, match=r"size mismatch for blocks.3.linear.weight"):
        model.load_state_dict({**state, "blocks.3.linear.weight": torch.ones(WIDTH, WIDTH + 1)})
    return [report.missing_keys, report.unexpected_keys, torch.equal(model.head.weight, other.embedding.weight)]


def values_of_a_state(model):
    model.state_dict()["scale"].copy_(noise(model.scale))
    state = model.state_dict()
    state["blocks.4.linear.weight"].mul_(0.5)
    state["head.weight"][3] = 0.25
    state["offset"].fill_(0.75)
    for value in state.values():
        value.data.mul_(0.9)
    return state["scale"]


WRITES = [
    *(by_operators, through_views, as_out, as_arguments, in_inference_mode, the_buffer, a_kept_list),
    *(data_replaced, data_exchanged, data_turned, by_numpy, tied_once_more, a_state_of_another_model),
    *(a_part_of_a_state, values_of_a_state),
]


@live(make=make_with_list, everywhere=True)
def test_writes(model, optimizer, note):
    for step, write in enumerate(WRITES):
        note(write.__name__, write(model))
        note(write.__name__, [values(model), inference(model)])
        note(write.__name__, train(model, optimizer, first=step))


@live
def test_what_torch_does_not_allow(model, optimizer, note):
    train(model, optimizer)
    weight = model.blocks[1].linear.weight
    writes = {
        "method": lambda: weight.mul_(2),
        "operator": lambda: weight.__iadd__(1),
        "part": lambda: weight.__setitem__(0, 1.0),
        "out": lambda: torch.add(weight, 1, out=weight),
        "list": lambda: torch._foreach_mul_([weight], 2.0),
        "relu": lambda: functional.relu(weight, inplace=True),
        "shape": lambda: weight.data.copy_(torch.ones(3, 3)),
        "longer": lambda: weight.detach().copy_(torch.ones(WIDTH + 1)),
        "number": lambda: setattr(weight, "data", 5),
        "tensor": lambda: setattr(model.blocks[1].linear, "weight", torch.ones(WIDTH, WIDTH)),
    }
    for name, write in writes.items():
        try:
            write()
            note(name, "allowed")
        except (RuntimeError, TypeError) as error:
            note(name, type(error))
    note("values", values(model))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def loss_of_pictures(model, step=0):
    pictures = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(step))
    return model(pictures.contiguous(memory_format=torch.channels_last)).pow(2).mean()


@pytest.mark.parametrize("before", [True, False])
def test_weights_laid_out_with_their_channels_last(both, before):
    def make():
        torch.manual_seed(0)
        model = Pictures()
        return model.to(memory_format=torch.channels_last) if before else model

    def pattern(model, optimizer, note):
        train(model, optimizer, loss=loss_of_pictures)
        if not before:
            model.to(memory_format=torch.channels_last)
        note("losses", train(model, optimizer, 2, first=1, loss=loss_of_pictures))
        note("values", values(model))

    both(pattern, make=make, loss=loss_of_pictures)


# State dicts


class Kernel(nn.Linear):
    """Takes its weight under an older name and turned, and counts its loads."""

    loads = 0

    def _load_from_state_dict(self, state, prefix, *args):
        if prefix + "kernel" in state:
            self.weight.data.copy_(state.pop(prefix + "kernel").t())
            state[prefix + "weight"] = self.weight.data
        self.loads += 1
        super()._load_from_state_dict(state, prefix, *args)


class Arrays(nn.Linear):
    """Loads a state by hand."""

    def load_state_dict(self, state, strict=True, assign=False):
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                parameter.copy_(torch.as_tensor(state[name]))
        return "by hand"


def make_with_loads():
    model = make_tower()
    for block in model.blocks[:4]:
        block.linear.__class__ = Kernel
    model.blocks[5].linear.__class__ = Arrays
    return model


@live(make=make_with_loads)
def test_loads_that_are_overridden_or_have_hooks(model, optimizer, note):
    train(model, optimizer)
    seen = []

    def rename(module, state, prefix, *_):
        if prefix + "gain" in state:
            state[prefix + "scale"] = state.pop(prefix + "gain") * 2

    def after(module, incompatible):
        seen.append([module.scale.detach().clone(), list(incompatible.missing_keys)])
        module.scale.data.add_(0.5)

    model.register_load_state_dict_pre_hook(rename)
    model.register_load_state_dict_post_hook(after)
    state = make_tower(seed=3).state_dict()
    state["gain"] = state.pop("scale")
    for place in range(4):
        state[f"blocks.{place}.linear.kernel"] = state.pop(f"blocks.{place}.linear.weight")
    note("report", [list(keys) for keys in model.load_state_dict(state)])
    note("loads", [model.blocks[2].linear.loads, seen])
    arrays = {"weight": numpy.full((WIDTH, WIDTH), 0.1, dtype=numpy.float32), "bias": numpy.zeros(WIDTH)}
    note("by hand", model.blocks[5].linear.load_state_dict(arrays))
    note("values", values(model))


# Two models


def soft_data(target, source):
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.data.copy_(0.1 * theirs.data + 0.9 * mine.data)


@torch.no_grad()
def soft_lists(target, source):
    torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), 0.1)


def soft_state(target, source):
    state, theirs = target.state_dict(), source.state_dict()
    for key in theirs:
        state[key] = 0.1 * theirs[key] + 0.9 * state[key]
    target.load_state_dict(state)


def traded(target, source):
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
            mean = (mine + theirs) / 2
            mine.copy_(mean)
            theirs.copy_(mean)
    target.blocks[0].load_state_dict(source.blocks[1].state_dict())
    target.scale.data, source.scale.data = source.scale.data.clone(), target.scale.data.clone()


MOVES = [soft_data, soft_lists, soft_state, traded]


def test_two_models_that_follow_each_other(both):
    """Next to a live one the other model is live too."""
    others = []

    def pattern(model, optimizer, note):
        other = make_tower(3)
        its_optimizer = make_adamw(other)
        if others and both.config is not None:
            its_optimizer = PatrickStarEngine(other, dict(both.config), its_optimizer).optimizer
        others.append(other)

        def distilled(model, step):
            with torch.no_grad():
                goal = other(make_ids(step))
            return loss_of(model, step) + functional.mse_loss(model(make_ids(step)), goal)

        for step, move in enumerate(MOVES):
            note("losses", train(model, optimizer, first=step, loss=distilled))
            move(other, model)
            note(move.__name__, [values(other), train(other, its_optimizer, first=step + 10)])
            move(model, other)
            note(move.__name__, values(model))

    both(pattern)
    assert_same_model(*others)
