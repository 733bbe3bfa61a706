"""Writing parameters of a live model, in every form in which plain torch allows it."""

import copy
import functools
import io

import numpy
import pytest
import torch
from live.both import (
    VOCAB,
    WIDTH,
    Block,
    Tower,
    loss_of,
    make_adamw,
    make_ids,
    make_tower,
    raises_in_both,
    same_bits,
    train,
)
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters
from torch.utils.flop_counter import FlopCounterMode

from hf_patrickstar import PatrickStarEngine


def make_with_list():
    model = make_tower()
    model.kept = tuple(model.parameters())
    return model


def make_untied():
    model = make_tower()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def noise(tensor, seed=1):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


def inference(model, step=9):
    with torch.no_grad():
        return model(make_ids(step))


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def make_samples(step=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(200 + step))


# In place, without a graph

LOOPS = {
    "multiply": lambda p: p.mul_(0.9),
    "divide": lambda p: p.div_(1.1),
    "add": lambda p: p.add_(noise(p), alpha=0.01),
    "subtract": lambda p: p.sub_(0.01),
    "clamp": lambda p: p.clamp_(-0.1, 0.1),
    "clamp_min": lambda p: p.clamp_min_(0.0),
    "copy": lambda p: p.copy_(noise(p) * 0.1),
    "copy of another type": lambda p: p.copy_(noise(p).double() * 0.1),
    "copy of one number": lambda p: p.copy_(torch.tensor(0.2)),
    "lerp": lambda p: p.lerp_(noise(p), 0.1),
    "zero": lambda p: p.zero_(),
    "fill": lambda p: p.fill_(0.05),
    "masked_fill": lambda p: p.masked_fill_(p.abs() < 0.1, 0.0),
    "masked_scatter": lambda p: p.masked_scatter_(p > 0.1, noise(p)),
    "addcmul": lambda p: p.addcmul_(noise(p), noise(p, 2), value=0.01),
    "addcdiv": lambda p: p.addcdiv_(noise(p), noise(p, 2).abs() + 1, value=-0.01),
    "sign": lambda p: p.sign_().mul_(0.1),
    "tanh": lambda p: p.tanh_(),
    "round": lambda p: p.mul_(16).round_().div_(16),
    "nan_to_num": lambda p: p.nan_to_num_(0.0),
    "normal": lambda p: p.normal_(0, 0.1),
    "uniform": lambda p: p.uniform_(-0.1, 0.1),
    "bernoulli": lambda p: p.mul_(torch.bernoulli(torch.full_like(p, 0.8))),
    "langevin": lambda p: p.add_(torch.randn_like(p), alpha=0.01),
    "renorm": lambda p: p.renorm_(2, 0, 0.5) if p.dim() > 1 else None,
    "index_fill": lambda p: p.index_fill_(0, torch.tensor([1, 3]), 0.0),
    "index_add": lambda p: p.index_add_(0, torch.tensor([0, 0]), torch.ones(2, *p.shape[1:]), alpha=0.1),
    "index_copy": lambda p: p.index_copy_(0, torch.tensor([2]), noise(p)[:1]),
    "index_put": lambda p: p.index_put_((torch.tensor([2, 4]),), torch.tensor(0.1), accumulate=True),
    "scatter": lambda p: p.scatter_(0, torch.zeros_like(p[:1]).long(), 0.3),
    "scatter_add": lambda p: p.scatter_add_(0, torch.ones_like(p[:2]).long(), noise(p)[:2]),
    "put": lambda p: p.put_(torch.tensor([0, 5]), torch.tensor([0.1, 0.2])),
    "cumsum": lambda p: p.cumsum_(0).mul_(0.1),
    "triangle": lambda p: p.tril_() if p.dim() > 1 else None,
    "diagonal": lambda p: p.fill_diagonal_(0.0) if p.dim() > 1 else None,
}


@pytest.mark.parametrize(
    "names", [list(LOOPS)[place : place + 7] for place in range(0, len(LOOPS), 7)], ids=lambda names: names[0]
)
def test_loops_that_write_in_place(both, names):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for name in names:
            with torch.no_grad():
                for parameter in model.parameters():
                    LOOPS[name](parameter)
            note(name, values(model))
        note("inference", inference(model))
        note("losses", train(model, optimizer, 1, first=1))

    both(pattern)


def test_what_a_writing_call_returns(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight = model.blocks[1].linear.weight
        with torch.no_grad():
            note("itself", [weight.mul_(0.5) is weight, weight.add_(1).sub_(1).clamp_(-1, 1) is weight])
            note("requires", weight.zero_().requires_grad)
            note("out", torch.mul(weight, 2, out=weight) is weight)
            note("init", nn.init.ones_(weight) is weight)
            note("data", weight.data.mul_(2) is weight)

    both(pattern)


def test_operators_that_write_in_place(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                before = parameter
                parameter *= 0.5
                parameter += 0.01
                parameter -= noise(parameter) * 0.01
                parameter /= 2
                parameter **= 2
                note("the same", parameter is before)
            model.scale *= 2
            note("registered", [isinstance(model.scale, nn.Parameter), "scale" in model._parameters])
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_assignment_to_parts(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        with torch.no_grad():
            for block in model.blocks:
                weight = block.linear.weight
                weight[0] = 0.5
                weight[1:3, ::4] = noise(weight[1:3, ::4])
                weight[:, 2] += 0.25
                weight[weight < -0.2] = -0.2
                weight[torch.tensor([4, 5])] *= 2
                weight[..., -1] = block.linear.bias
                block.linear.bias[:] = torch.linspace(-0.1, 0.1, WIDTH)
                block.norm.weight[3:5] = torch.tensor([1.5, 0.5])
            model.scale[...] = 1.25
            model.embedding.weight[7] = model.embedding.weight[3:6].mean(0)
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_writing_through_views(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
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
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_results_written_into_a_parameter(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight, other = model.blocks[1].linear.weight, model.blocks[2].linear.weight
        with torch.no_grad():
            torch.add(other, weight, alpha=0.5, out=weight)
            torch.mm(weight, other, out=model.blocks[3].linear.weight)
            torch.clamp(model.scale, max=0.9, out=model.scale)
            torch.mean(other, dim=0, out=model.blocks[2].linear.bias)
            torch.stack([model.scale] * WIDTH, out=other.data)
            note("before two results", values(model))
            torch.linalg.qr(weight.clone(), out=(weight, torch.empty(0)))
        torch.mul(model.norm.weight.data, 2, out=model.norm.weight.data)
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_lists_of_parameters_written_at_once(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        parameters = list(model.parameters())
        with torch.no_grad():
            torch._foreach_mul_(parameters, 0.9)
            torch._foreach_add_(parameters, [noise(parameter) for parameter in parameters], alpha=0.01)
            torch._foreach_lerp_(parameters, [torch.ones_like(parameter) for parameter in parameters], 0.1)
            note("first", values(model))
            torch._foreach_clamp_max_(parameters, 1.0)
            torch._foreach_addcmul_(parameters, parameters, parameters, value=-0.1)
            torch._foreach_copy_(parameters[:5], [noise(parameter) for parameter in parameters[:5]])
            torch._foreach_zero_([block.linear.bias for block in model.blocks])
        torch._foreach_mul_([parameter.data for parameter in parameters], 0.5)
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_what_torch_does_not_allow_in_place(both):
    def pattern(model, optimizer, note):
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
        }
        for name, write in writes.items():
            try:
                write()
                note(name, "allowed")
            except RuntimeError:
                note(name, "refused")
        with torch.no_grad(), raises_in_both(RuntimeError):
            weight.copy_(torch.ones(WIDTH + 1))
        with raises_in_both(TypeError):
            weight.data = 5
        with raises_in_both(TypeError):
            model.blocks[1].linear.weight = torch.ones(WIDTH, WIDTH)
        note("values", values(model))
        note("losses", train(model, optimizer, 1, first=1))

    both(pattern)


def test_frozen_parameters_are_written_freely(both):
    def make():
        model = make_tower()
        for block in model.blocks[::2]:
            block.requires_grad_(False)
        return model

    def pattern(model, optimizer, note):
        train(model, optimizer)
        for block in model.blocks[::2]:
            block.linear.weight.mul_(0.5)
            block.linear.bias += 0.1
            block.norm.weight[2] = 0.0
            block.norm.bias.data = noise(block.norm.bias) * 0.1
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern, make=make)


def test_writing_in_inference_mode(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.mul_(0.9)
            model.scale[1:3] = 0.0
            note("inference", model(make_ids()).tolist())
        note("ordinary", [parameter.is_inference() for parameter in model.parameters()])
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_buffers_are_written_too(both):
    def pattern(model, optimizer, note):
        model.offset.mul_(0.5)
        note("inference", inference(model))
        for buffer in model.buffers():
            buffer[2] = 1.0
        model.offset = model.offset + model.scale.detach()
        note("losses", train(model, optimizer, 2))
        note("buffer", model.offset)

    both(pattern)


def test_a_list_made_before_the_engine_is_written(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        with torch.no_grad():
            for parameter in model.kept[::3]:
                parameter.mul_(0.5)
        for parameter in model.kept[1::3]:
            parameter.data.clamp_(-0.05, 0.05)
        for parameter in model.kept[2::3]:
            parameter.data = parameter.data + 0.1
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern, make=make_with_list)


# Through .data


def test_data_written_in_place(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for place, parameter in enumerate(model.parameters()):
            parameter.data.mul_(0.9)
            parameter.data.add_(noise(parameter), alpha=0.01).clamp_(-1, 1)
            parameter.data[0] = 0.125
            parameter.data[..., 1:3] += 0.1
            parameter.data.view(-1)[place % 7] = -0.5
            parameter.data *= 1.5
        note("values", values(model))
        note("inference", inference(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_data_copied_filled_and_drawn(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for block in model.blocks:
            block.linear.weight.data.normal_(mean=0.0, std=0.1)
            block.linear.bias.data.zero_()
            block.norm.weight.data.fill_(1.0)
            block.norm.bias.data.copy_(noise(block.norm.bias) * 0.1)
        model.embedding.weight.data.uniform_(-0.1, 0.1)
        model.embedding.weight.data[0].zero_()
        model.scale.data[:4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_data_replaced(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9 + 0.01
        note("computed", values(model))
        for parameter in model.parameters():
            parameter.data = noise(parameter) * 0.1
        note("new", values(model))
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        model.scale.data = model.norm.weight.data.clone()
        model.norm.weight.data = nn.Parameter(torch.full((WIDTH,), 0.75))
        model.blocks[0].linear.weight.data = functional.normalize(model.blocks[0].linear.weight.data, dim=1)
        model.blocks[1].linear.bias.data = torch.from_numpy(numpy.linspace(-1, 1, WIDTH, dtype=numpy.float32))
        note("values", values(model))
        note("facts", [[p.requires_grad, p.is_leaf, isinstance(p, nn.Parameter)] for p in model.parameters()])
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_data_replaced_before_the_first_step(both):
    def pattern(model, optimizer, note):
        for parameter in model.parameters():
            parameter.data = parameter.data.to("cpu", torch.float32).clone()
            parameter.data = parameter.data - 0.01
        note("inference", inference(model))
        note("losses", train(model, optimizer, 2))

    both(pattern)


def test_data_replaced_by_what_is_changed_later(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        given = noise(model.scale)
        table = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(2))
        model.scale.data = given
        model.embedding.weight.data = table
        given.mul_(2)
        table[3:9] = 0.25
        note("read", [model.scale, model.head.weight, inference(model)])
        note("losses", train(model, optimizer, 2, first=1))
        note("what was given", [given, table])
        given.fill_(1.0)
        note("again", [model.scale, train(model, optimizer, 1, first=3), given])
        return given, table

    both(pattern)


def test_data_of_two_parameters_swapped(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        first, second = model.blocks[0].linear.weight, model.blocks[9].linear.weight
        first.data, second.data = second.data, first.data
        note("values", [first, second])
        note("losses", train(model, optimizer, 1, first=1))
        spare = model.norm.weight.data.clone()
        model.norm.weight.data.copy_(model.scale.data)
        model.scale.data.copy_(spare)
        with torch.no_grad():
            for one, other in zip(model.blocks[3].parameters(), model.blocks[4].parameters(), strict=True):
                spare = one.detach().clone()
                one.copy_(other)
                other.copy_(spare)
        note("all", values(model))
        note("more", train(model, optimizer, 2, first=2))

    both(pattern)


def test_a_kept_data_is_written_later(both):
    def pattern(model, optimizer, note):
        weight = model.blocks[2].linear.weight
        kept, row = weight.data, model.embedding.weight.data[5]
        detached = model.scale.detach()
        train(model, optimizer)
        kept.mul_(0.5)
        row.zero_()
        detached += 1
        note("read", [weight, model.embedding.weight, model.scale])
        note("losses", train(model, optimizer, 1, first=1))
        with torch.no_grad():
            kept[0] = 1.0
        note("inference", inference(model))
        note("more", train(model, optimizer, 1, first=2))
        note("kept", [kept, row, detached])
        return kept, row, detached

    both(pattern)


def test_a_kept_data_is_let_go_by_a_new_one(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight, other = model.blocks[2].linear.weight, model.blocks[3].linear.weight
        old = weight.data
        weight.data = weight.data.clone()
        old.zero_()
        note("unchanged", weight)
        kept, theirs = weight.data, other.data
        weight.data, other.data = other.data, weight.data
        kept.mul_(2)
        theirs.mul_(3)
        note("swapped", [weight, other])
        note("losses", train(model, optimizer, 1, first=1))
        note("kept", [old, kept, theirs])
        return kept, theirs

    both(pattern)


def test_a_parameter_given_the_data_of_another(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        first, second = model.blocks[2].linear.weight, model.blocks[3].linear.weight
        second.data = first.data
        note("values", [first, second])
        second.data = second.data.clone()  # sharing memory for good is for one parameter in two places
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_a_plain_copy_given_the_data_of_the_live_model(both):
    def pattern(model, optimizer, note):
        other = make_tower(seed=3)
        for theirs, mine in zip(other.parameters(), model.parameters(), strict=True):
            theirs.data = mine.data
        note("at first", inference(other))
        train(model, optimizer, 2)
        note("later", [inference(other), inference(model)])
        with torch.no_grad():
            other.scale.mul_(0.5)
        note("the other way", [model.scale, inference(model)])
        return other

    both(pattern)


def test_data_of_another_shape_before_training(both):
    def pattern(model, optimizer, note):
        table = model.embedding.weight
        table.data = torch.cat([table.data, table.data.mean(0, keepdim=True).repeat(2, 1)])
        note("shapes", [table.shape, model.head.weight.shape, model.state_dict()["head.weight"].shape, table.numel()])
        note("logits", inference(model))
        note("losses", train(model, optimizer, 2))

    both(pattern)


def test_a_parameter_set_to_another_tensor(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        given, table = noise(model.scale), noise(model.embedding.weight) * 0.1
        with torch.no_grad():
            note("itself", model.scale.set_(given) is model.scale)
            model.embedding.weight.set_(table.untyped_storage(), 0, table.shape, table.stride())
        given.mul_(0.5)
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))
        note("what was given", [given, table])
        return given, table

    both(pattern)


def test_a_parameter_set_to_another_tensor_under_a_dispatch_mode(both):
    """There torch asks the parameter what ``set_`` means; otherwise it does not."""

    def pattern(model, optimizer, note):
        train(model, optimizer)
        given = noise(model.scale)
        with torch.no_grad(), FlopCounterMode(display=False):
            note("itself", model.scale.set_(given) is model.scale)
        given.mul_(0.5)
        note("losses", train(model, optimizer, 2, first=1))
        return given

    both(pattern)


def test_data_turned_on_its_side(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight = model.blocks[2].linear.weight
        weight.data = weight.data.t()
        note("value", weight)
        model.blocks[3].linear.bias.data = torch.ones(1).expand(WIDTH)
        note("expanded", model.blocks[3].linear.bias)
        weight.data = weight.data.contiguous()
        model.blocks[3].linear.bias.data = model.blocks[3].linear.bias.data.clone()
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_weights_rounded_through_another_type(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for parameter in model.parameters():
            parameter.data = parameter.data.half().float()
        note("half", values(model))
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.bfloat16())
        note("bfloat16", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_the_model_moved_to_where_it_is(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        note("itself", [model.to("cpu") is model, model.float() is model, model.cpu() is model])
        model.to(torch.float32).to(device=torch.device("cpu"))
        note("losses", train(model, optimizer, 1, first=1))

    both(pattern)


def test_a_function_applied_to_every_tensor_of_the_model(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model._apply(lambda tensor: tensor * 0.5)
        note("values", [values(model), model.offset])
        note("losses", train(model, optimizer, 1, first=1))

    both(pattern)


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("before", [True, False])
def test_weights_laid_out_with_their_channels_last(both, before):
    def make():
        torch.manual_seed(0)
        model = Pictures()
        return model.to(memory_format=torch.channels_last) if before else model

    def loss(model, step=0):
        pictures = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(step))
        return model(pictures.contiguous(memory_format=torch.channels_last)).pow(2).mean()

    def pattern(model, optimizer, note):
        train(model, optimizer, loss=loss)
        if not before:
            model.to(memory_format=torch.channels_last)
        note("losses", train(model, optimizer, 2, first=1, loss=loss))
        note("values", values(model))

    both(pattern, make=make, loss=loss)


# numpy and vectors


def test_arrays_written_by_numpy(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for parameter in model.parameters():
            parameter.data.numpy()[...] *= 0.9
            numpy.clip(parameter.data.numpy(), -0.5, 0.5, out=parameter.data.numpy())
            parameter.detach().numpy().flat[0] = 0.125
        note("values", values(model))
        array = model.scale.detach().numpy()
        note("losses", train(model, optimizer, 1, first=1))
        array += 1
        note("read", model.scale)
        note("more", train(model, optimizer, 1, first=2))
        return array

    both(pattern)


def test_parameters_set_from_a_vector(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        vector = parameters_to_vector(model.parameters()).detach().clone()
        vector_to_parameters(vector * 0.9, model.parameters())
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))
        with torch.no_grad():
            block = parameters_to_vector(model.blocks[3].parameters())
            vector_to_parameters(block + noise(block) * 0.01, model.blocks[3].parameters())
        note("a block", values(model.blocks[3]))
        note("more", train(model, optimizer, 1, first=3))

    both(pattern)


def test_a_vector_that_parameters_were_set_from_stays_theirs(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        vector = parameters_to_vector(model.parameters()).detach().clone()
        vector_to_parameters(vector, model.parameters())
        vector.mul_(0.5)
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))
        note("vector", vector)
        return vector

    both(pattern)


def test_a_line_search_along_a_direction(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        start = parameters_to_vector(model.parameters()).detach().clone()
        direction = noise(start)
        losses = []
        for length in (0.0, 0.05, 0.1):
            vector_to_parameters(start + length * direction, model.parameters())
            with torch.no_grad():
                losses.append(loss_of(model).item())
        note("losses", losses)
        vector_to_parameters(start, model.parameters())
        note("after", train(model, optimizer, 2, first=1))

    both(pattern)


# Initialisation


def test_functions_of_init(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        inits = [
            nn.init.xavier_uniform_,
            nn.init.xavier_normal_,
            nn.init.kaiming_uniform_,
            functools.partial(nn.init.kaiming_normal_, nonlinearity="relu"),
            nn.init.orthogonal_,
            nn.init.eye_,
            functools.partial(nn.init.trunc_normal_, std=0.02),
            functools.partial(nn.init.sparse_, sparsity=0.5),
            functools.partial(nn.init.normal_, mean=0.0, std=0.1),
            functools.partial(nn.init.uniform_, a=-0.1, b=0.1),
        ]
        for place, block in enumerate(model.blocks):
            inits[place % len(inits)](block.linear.weight)
            nn.init.zeros_(block.linear.bias)
            nn.init.ones_(block.norm.weight)
            nn.init.constant_(block.norm.bias, 0.01)
        nn.init.normal_(model.embedding.weight.data, std=0.1)
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_init_by_the_number_of_dimensions(both):
    def pattern(model, optimizer, note):
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            elif "bias" in name:
                nn.init.constant_(parameter, 0.0)
        note("values", values(model))
        note("losses", train(model, optimizer, 2))

    both(pattern)


def test_modules_reset_their_parameters(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.blocks[-1].linear.reset_parameters()
        model.norm.reset_parameters()
        model.embedding.reset_parameters()
        note("some", values(model))
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        note("all", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_init_applied_to_every_module(both):
    def init(module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[1].zero_()
        elif isinstance(module, nn.LayerNorm):
            torch.nn.init.ones_(module.weight)
            torch.nn.init.zeros_(module.bias)

    def pattern(model, optimizer, note):
        train(model, optimizer)
        note("itself", model.apply(init) is model)
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))
        model.blocks[:3].apply(init)
        note("more", train(model, optimizer, 1, first=3))

    both(pattern)


def test_layers_reset_on_a_schedule(both):
    def pattern(model, optimizer, note):
        fresh = make_tower(seed=5)
        for step in range(4):
            train(model, optimizer, first=step)
            if step % 2:
                model.blocks[-1].linear.reset_parameters()
                with torch.no_grad():
                    for parameter, other in zip(model.parameters(), fresh.parameters(), strict=True):
                        parameter.mul_(0.8).add_(0.2 * other)
            note("values", values(model))

    both(pattern)


def test_silent_neurons_are_drawn_again(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for block in model.blocks:
            linear = block.linear
            silent = linear.weight.norm(dim=1) < linear.weight.norm(dim=1).median()
            drawn = torch.empty_like(linear.weight)
            nn.init.kaiming_uniform_(drawn)
            linear.weight.data[silent] = drawn[silent]
            linear.bias.data[silent] = 0.0
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


# State dicts


def test_the_state_of_another_model_is_loaded(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        other = make_tower(seed=3).state_dict()
        note("report", [list(keys) for keys in model.load_state_dict(other)])
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))
        buffer = io.BytesIO()
        torch.save(other, buffer)
        buffer.seek(0)
        model.load_state_dict(torch.load(buffer, weights_only=True))
        note("from a file", values(model))
        model.load_state_dict({key: value.double() for key, value in other.items()})
        note("from another type", values(model))

    both(pattern)


def test_an_earlier_state_is_loaded_back(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        best = copy.deepcopy(model.state_dict())
        cloned = {key: value.clone() for key, value in model.state_dict().items()}
        train(model, optimizer, 2, first=1)
        model.load_state_dict(best)
        note("back", values(model))
        train(model, optimizer, 1, first=3)
        model.load_state_dict(cloned)
        note("back again", values(model))
        model.load_state_dict(model.state_dict())
        note("onto itself", values(model))
        note("losses", train(model, optimizer, 2, first=4))

    both(pattern)


def test_a_part_of_a_state_is_loaded(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        other = make_tower(seed=3).state_dict()
        some = {key: value for key, value in other.items() if "blocks.1" in key} | {"strange": torch.ones(2)}
        report = model.load_state_dict(some, strict=False)
        note("report", [report.missing_keys, report.unexpected_keys])
        note("values", values(model))
        state = model.state_dict()
        state.update({key: value for key, value in other.items() if key.startswith("blocks.2")})
        model.load_state_dict(state)
        note("updated", values(model))
        with raises_in_both(RuntimeError, match="Missing key"):
            model.load_state_dict(some)
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_a_state_of_the_wrong_shape_is_refused(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        other = make_tower(seed=3).state_dict()
        other["blocks.3.linear.weight"] = torch.ones(WIDTH, WIDTH + 1)
        with raises_in_both(RuntimeError, match="size mismatch for blocks.3.linear.weight"):
            model.load_state_dict(other)
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_states_of_submodules_are_loaded(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        other = make_tower(seed=3)
        model.blocks[3].load_state_dict(other.blocks[4].state_dict())
        model.blocks[5].linear.load_state_dict(other.blocks[5].linear.state_dict(), strict=True)
        model.embedding.load_state_dict({"weight": other.embedding.weight})
        model.norm.load_state_dict(model.blocks[0].norm.state_dict())
        model.blocks.load_state_dict({"7.linear.bias": torch.ones(WIDTH)}, strict=False)
        note("values", values(model))
        note("tied", torch.equal(model.head.weight, other.embedding.weight))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


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


def test_overridden_loads_of_submodules(both):
    def make():
        model = make_tower()
        for block in model.blocks[:4]:
            block.linear.__class__ = Kernel
        model.blocks[5].linear.__class__ = Arrays
        return model

    def pattern(model, optimizer, note):
        train(model, optimizer)
        other = make_tower(seed=3)
        state = other.state_dict()
        for place in range(4):
            state[f"blocks.{place}.linear.kernel"] = state.pop(f"blocks.{place}.linear.weight")
        note("report", [list(keys) for keys in model.load_state_dict(state)])
        note("loads", model.blocks[2].linear.loads)
        arrays = {"weight": numpy.full((WIDTH, WIDTH), 0.1, dtype=numpy.float32), "bias": numpy.zeros(WIDTH)}
        note("by hand", model.blocks[5].linear.load_state_dict(arrays))
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern, make=make)


def test_hooks_on_loading(both):
    def pattern(model, optimizer, note):
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
        model.load_state_dict(state)
        note("seen", seen)
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_writing_through_the_values_of_a_state_dict(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.state_dict()["scale"].copy_(noise(model.scale))
        state = model.state_dict()
        state["blocks.4.linear.weight"].mul_(0.5)
        state["head.weight"][3] = 0.25
        state["offset"].fill_(0.75)
        note("values", [values(model), model.offset])
        note("losses", train(model, optimizer, 1, first=1))
        for value in state.values():
            value.data.mul_(0.9)
        note("inference", inference(model))
        note("more", train(model, optimizer, 1, first=2))
        own = model.state_dict()
        for name, value in make_tower(seed=3).state_dict().items():
            if name in own and "linear" in name:
                own[name].copy_(value.data)
        note("all", values(model))
        return state

    both(pattern)


# Constraints after a step


def unit_rows(model):
    with torch.no_grad():
        for block in model.blocks:
            block.linear.weight.div_(block.linear.weight.norm(dim=1, keepdim=True))
            norm = block.linear.bias.norm().clamp(min=0.5)
            block.linear.bias.mul_(torch.clamp(norm, max=0.3) / norm)


def max_norm(model):
    for block in model.blocks:
        block.linear.weight.data = torch.renorm(block.linear.weight.data, p=2, dim=0, maxnorm=0.4)
    model.embedding.weight.data.renorm_(2, 0, 0.5)


def clip(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def orthogonal(model):
    with torch.no_grad():
        for block in model.blocks[:6]:
            weight = block.linear.weight
            weight.copy_(1.1 * weight - 0.1 * weight @ weight.T @ weight)
            block.linear.weight.data = torch.linalg.qr(weight)[0].contiguous()


def project(model):
    for name, parameter in model.named_parameters():
        if "linear" in name:
            parameter.data = parameter.data.clamp(min=0)
            parameter.data = parameter.data / parameter.data.sum(-1, keepdim=True).clamp(min=1e-6)


def standardise(model):
    with torch.no_grad():
        for block in model.blocks:
            weight = block.linear.weight
            weight -= weight.mean(dim=1, keepdim=True)
            weight /= weight.std(dim=1, keepdim=True) + 1e-5
            weight *= 0.2


def quantise(model):
    for parameter in model.parameters():
        step = parameter.data.abs().max().clamp(min=1e-8) / 127
        parameter.data.copy_(torch.round(parameter.data / step) * step)


def decay(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(1 - 1e-2).sub_(1e-4 * module.weight.data.sign())


def freeze_rows(model):
    with torch.no_grad():
        if not hasattr(model, "first_rows"):
            model.first_rows = model.embedding.weight.data.clone()
        kept = torch.arange(VOCAB) < VOCAB - 2
        model.embedding.weight[kept] = model.first_rows[kept]


CONSTRAINTS = [unit_rows, max_norm, clip, orthogonal, project, standardise, quantise, decay, freeze_rows]


@pytest.mark.parametrize("constraints", [CONSTRAINTS[:5], CONSTRAINTS[5:]], ids=["norms", "values"])
def test_a_constraint_after_every_step(both, constraints):
    def pattern(model, optimizer, note):
        for step, constrain in enumerate(constraints):
            constrain(model)
            note(constrain.__name__, values(model))
            note(constrain.__name__, train(model, optimizer, first=2 * step))
            constrain(model)
            note(constrain.__name__, [values(model), train(model, optimizer, first=2 * step + 1)])

    both(pattern)


def test_a_constraint_from_the_end_of_step(both):
    def pattern(model, optimizer, note):
        handle = optimizer.register_step_post_hook(lambda *_: clip(model))
        note("losses", train(model, optimizer, 2))
        note("values", values(model))
        handle.remove()

    both(pattern)


def test_pruned_weights_stay_pruned(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        scores = torch.cat([block.linear.weight.detach().abs().flatten() for block in model.blocks])
        threshold = scores.kthvalue(scores.numel() // 2).values
        masks = {
            name: (parameter.abs() > threshold).float()
            for name, parameter in model.named_parameters()
            if name.endswith("linear.weight")
        }
        for step in range(1, 4):
            for name, parameter in model.named_parameters():
                if name in masks:
                    parameter.data.mul_(masks[name])
            note("pruned", sum(int((parameter == 0).sum()) for parameter in model.parameters()))
            note("losses", train(model, optimizer, first=step))

    both(pattern)


# Written by forward


class MaxNorm(Tower):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, max_norm=0.5)
        self.bag = nn.EmbeddingBag(VOCAB, WIDTH, max_norm=0.25, mode="sum")

    def forward(self, ids):
        x = self.embedding(ids) + self.offset + self.bag(ids).unsqueeze(1)
        for block in self.blocks[:10]:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


def test_an_embedding_with_a_largest_norm(both):
    def make():
        torch.manual_seed(0)
        model = MaxNorm()
        del model.blocks[10:]
        return model

    def pattern(model, optimizer, note):
        note("at first", [model.embedding.weight.norm(dim=1), model.bag.weight.norm(dim=1)])
        for step in range(3):
            note("losses", train(model, optimizer, first=step))
            note("norms", [model.embedding.weight.norm(dim=1), model.bag.weight.norm(dim=1)])
        model.eval()
        note("inference", inference(model))
        note("after it", [model.embedding.weight, model.bag.weight])

    both(pattern, make=make)


def test_a_function_that_writes_its_argument(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        with torch.no_grad():
            note("rows", functional.embedding(torch.arange(4), model.embedding.weight, max_norm=0.1))
            note("relu", functional.relu(model.scale, inplace=True) is model.scale)
            functional.dropout(model.norm.weight, 0.5, training=True, inplace=True)
            functional.normalize(model.blocks[0].linear.weight, dim=1, out=model.blocks[0].linear.weight)
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


class Constrained(nn.Module):
    """Writes its own weight in forward, in the form that was asked for."""

    def __init__(self, form):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.form = form

    def forward(self, x):
        if self.form == "data":
            self.weight.data.clamp_(min=-0.2)
        elif self.form == "replaced":
            self.weight.data = functional.normalize(self.weight.data, dim=1)
        elif self.form == "no_grad":
            with torch.no_grad():
                self.weight.copy_(functional.normalize(self.weight, dim=1, p=2))
        elif self.form == "part":
            with torch.no_grad():
                self.weight[0] = 0.0
        elif self.form == "after":
            x = x + torch.tanh(x @ self.weight)
            self.weight.data = self.weight.data * 0.9
            return x
        return x + torch.tanh(x @ self.weight)


@pytest.mark.parametrize("forms", [["data", "replaced", "after"], ["no_grad", "part"]], ids=["data", "no_grad"])
def test_forward_writes_its_own_weight(both, forms):
    def make():
        model = make_tower()
        for place, block in enumerate(model.blocks[::4]):
            block.linear = Constrained(forms[place % len(forms)])
        return model

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2))
        note("values", values(model))
        note("inference", inference(model))
        note("after it", values(model))

    both(pattern, make=make)


@pytest.mark.parametrize("before", [True, False])
def test_hooks_write_weights(both, before):
    def watch(model):
        def normalise(module, args):
            module.weight.data = functional.normalize(module.weight.data, dim=1)

        def shrink(module, args, output):
            with torch.no_grad():
                model.blocks[0].linear.bias.mul_(0.9)

        def limit(module, args):
            module.scale.data.clamp_(max=1.0)

        def shift(module, *_):
            model.blocks[13].linear.bias.data.add_(0.01)
            module.bias.data.mul_(0.9)

        for block in model.blocks[4:8]:
            block.linear.register_forward_pre_hook(normalise)
        model.blocks[8].register_forward_hook(shrink)
        model.register_forward_pre_hook(limit)
        model.blocks[12].linear.register_full_backward_hook(shift)

    def make():
        model = make_tower()
        if before:
            watch(model)
        return model

    def pattern(model, optimizer, note):
        if not before:
            watch(model)
        note("losses", train(model, optimizer, 3))
        note("values", values(model))

    both(pattern, make=make)


class Quantised(Tower):
    """A codebook between its blocks, which forward moves towards what it meets."""

    def __init__(self, form):
        super().__init__(depth=16)
        self.form = form
        self.codebook = nn.Embedding(12, WIDTH)
        self.codebook.weight.requires_grad_(form == "trained")
        self.register_buffer("counts", torch.ones(12))

    def forward(self, ids):
        x = self.embedding(ids) + self.offset
        for block in self.blocks[:8]:
            x = block(x)
        flat = x.detach().flatten(0, 1)
        codes = torch.cdist(flat, self.codebook.weight.detach()).argmin(1)
        quantised = self.codebook(codes).view_as(x)
        if self.training:
            hits = functional.one_hot(codes, 12).float()
            self.counts.data.mul_(0.9).add_(hits.sum(0), alpha=0.1)
            means = (hits.t() @ flat) / hits.sum(0).clamp(min=1).unsqueeze(1)
            if self.form == "replaced":
                self.codebook.weight.data = 0.9 * self.codebook.weight.data + 0.1 * means
            elif self.form == "parameter":
                self.codebook.weight = nn.Parameter(0.9 * self.codebook.weight + 0.1 * means, requires_grad=False)
            else:
                self.codebook.weight.data.mul_(0.9).add_(means, alpha=0.1)
                dead = self.counts < 0.5
                self.codebook.weight.data[dead] = flat[: int(dead.sum())]
        x = x + (quantised - x).detach() + 0.1 * (quantised - quantised.detach())
        for block in self.blocks[8:]:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


@pytest.mark.parametrize("form", ["frozen", "trained", "replaced", "parameter"])
def test_a_codebook_that_forward_moves(both, form):
    def make():
        torch.manual_seed(0)
        return Quantised(form)

    def pattern(model, optimizer, note):
        for step in range(3):
            note("losses", train(model, optimizer, first=step))
            note("codebook", [model.codebook.weight, model.counts])
        model.eval()
        note("inference", inference(model))
        model.train()

    both(pattern, make=make)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(8)])
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return functional.normalize(self.out(x), dim=1)


class Momentum(nn.Module):
    """Two encoders; forward moves the second towards the first and fills a queue."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.query, self.key = Encoder(), Encoder()
        for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            mine.data.copy_(theirs.data)
            mine.requires_grad = False
        self.register_buffer("queue", functional.normalize(torch.randn(8, 12), dim=0))

    @torch.no_grad()
    def move(self):
        for theirs, mine in zip(self.query.parameters(), self.key.parameters(), strict=True):
            if self.form == "replaced":
                mine.data = mine.data * 0.9 + theirs.data * (1.0 - 0.9)
            elif self.form == "data":
                mine.data.mul_(0.9).add_(0.1 * theirs.data)
            elif self.form == "lerp":
                mine.lerp_(theirs, 0.1)
        if self.form == "lists":
            torch._foreach_lerp_(list(self.key.parameters()), list(self.query.parameters()), 0.1)

    def forward(self, x):
        query = self.query(x)
        with torch.no_grad():
            self.move()
            key = self.key(x + 0.1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().detach()], dim=1)
        self.queue[:, :4] = key.T
        return logits


def loss_of_momentum(model, step=0):
    return functional.cross_entropy(model(make_samples(step)) / 0.2, torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize("form", ["replaced", "data", "lerp", "lists"])
def test_an_encoder_that_forward_moves_after_the_trained_one(both, form):
    def make():
        torch.manual_seed(0)
        return Momentum(form)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 3, loss=loss_of_momentum))
        note("values", values(model))

    both(pattern, make=make, loss=loss_of_momentum)


def test_a_target_within_the_same_model(both):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.online, self.target = Encoder(), Encoder()
            self.target.requires_grad_(False)
            self.target.load_state_dict(self.online.state_dict())

        def forward(self, x):
            with torch.no_grad():
                goal = self.target(x + 0.1)
            return 2 - 2 * (self.online(x) * goal).sum(1)

    def make():
        torch.manual_seed(0)
        return Pair()

    def loss(model, step=0):
        return model(make_samples(step)).mean()

    def pattern(model, optimizer, note):
        for step in range(3):
            note("losses", train(model, optimizer, first=step, loss=loss))
            for mine, theirs in zip(model.target.parameters(), model.online.parameters(), strict=True):
                mine.data.copy_(0.05 * theirs.data + (1.0 - 0.05) * mine.data)
            note("target", values(model.target))
        model.target.load_state_dict(model.online.state_dict())
        note("hard", values(model.target))

    both(pattern, make=make, loss=loss)


# Target, reference and other models


def soft_data(target, source):
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.data.copy_(0.1 * theirs.data + 0.9 * mine.data)


def soft_in_place(target, source):
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
            mine.mul_(0.9)
            torch.add(mine, theirs, alpha=0.1, out=mine)


def soft_lists(target, source):
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), 0.1)


def soft_by_name(target, source):
    names = dict(target.named_parameters())
    for name, parameter in source.named_parameters():
        names[name].data.mul_(0.9).add_(parameter.data, alpha=0.1)


def soft_state(target, source):
    state, theirs = target.state_dict(), source.state_dict()
    for key in theirs:
        state[key] = 0.1 * theirs[key] + 0.9 * state[key]
    target.load_state_dict(state)


def soft_state_in_place(target, source):
    theirs = source.state_dict()
    for key, value in target.state_dict().items():
        value.copy_(value * 0.9 + theirs[key] * 0.1)


def hard_copy(target, source):
    target.load_state_dict(source.state_dict())


def hard_data(target, source):
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.data = theirs.data.clone()


MOVES = [
    soft_data,
    soft_in_place,
    soft_lists,
    soft_by_name,
    soft_state,
    soft_state_in_place,
    hard_copy,
    hard_data,
]


def test_a_plain_target_follows_the_live_model(both):
    def pattern(model, optimizer, note):
        target = make_tower(seed=3).requires_grad_(False)

        def loss(model, step):
            with torch.no_grad():
                goal = target(make_ids(step))
            return loss_of(model, step) + functional.mse_loss(model(make_ids(step)), goal)

        for step, move in enumerate(MOVES):
            note("losses", train(model, optimizer, first=step, loss=loss))
            move(target, model)
            note(move.__name__, values(target))

    both(pattern)


def test_the_live_model_follows_a_plain_one(both):
    def pattern(model, optimizer, note):
        source = make_tower(seed=3)
        for step, move in enumerate(MOVES):
            note("losses", train(model, optimizer, first=step))
            move(model, source)
            note(move.__name__, values(model))
        note("source", values(source))

    both(pattern)


def with_another(both, pattern, make=make_tower, make_optimizer=make_adamw, seed=3):
    """Runs a pattern of two models, each with an optimizer; beside a live one, the other is live too."""
    runs = []

    def run(model, optimizer, note):
        other = make(seed)
        its_optimizer = make_optimizer(other)
        if runs and both.config is not None:
            its_optimizer = PatrickStarEngine(other, dict(both.config), its_optimizer).optimizer
        runs.append(other)
        return pattern(model, optimizer, other, its_optimizer, note)

    both(run)
    plain, ours = runs
    for name, value in plain.state_dict().items():
        assert same_bits(value, ours.state_dict()[name]), name


def test_one_live_model_follows_another(both):
    def pattern(model, optimizer, other, its_optimizer, note):
        for step, move in enumerate(MOVES):
            note("losses", train(model, optimizer, first=step))
            move(other, model)
            note(move.__name__, values(other))
            if step % 2:
                note("theirs", train(other, its_optimizer, first=step + 10))

    with_another(both, pattern)


def test_two_live_models_trade_weights(both):
    def pattern(model, optimizer, other, its_optimizer, note):
        train(model, optimizer)
        train(other, its_optimizer, first=1)
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mean = (mine + theirs) / 2
                mine.copy_(mean)
                theirs.copy_(mean)
        model.blocks[0].load_state_dict(other.blocks[1].state_dict())
        model.scale.data, other.scale.data = other.scale.data, model.scale.data
        note("values", [values(model), values(other)])

        def distilled(model, step):
            return loss_of(model, step) + functional.mse_loss(model(make_ids(step)), other(make_ids(step)).detach())

        note("losses", train(model, optimizer, 2, first=2, loss=distilled))
        note("theirs", train(other, its_optimizer, 1, first=2))

    with_another(both, pattern)


def test_adversaries_with_clipped_weights(both):
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(10)])
            self.out = nn.Linear(WIDTH, 1)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    def make(seed=0):
        torch.manual_seed(seed)
        return Critic()

    def make_tower_as_generator(seed):
        torch.manual_seed(seed)
        return nn.Sequential(*[Block() for _ in range(10)])

    runs = []

    def pattern(critic, optimizer, note):
        generator = make_tower_as_generator(3)
        its_optimizer = make_adamw(generator)
        if runs and both.config is not None:
            its_optimizer = PatrickStarEngine(generator, dict(both.config), its_optimizer).optimizer
        runs.append(generator)
        for step in range(3):
            for repeat in range(2):
                optimizer.zero_grad()
                fake = generator(make_samples(10 * step + repeat)).detach()
                loss = critic(fake).mean() - critic(make_samples(50 + step)).mean()
                loss.backward()
                optimizer.step()
                for parameter in critic.parameters():
                    parameter.data.clamp_(-0.1, 0.1)
                note("critic", loss.detach())
            its_optimizer.zero_grad()
            loss = -critic(generator(make_samples(90 + step))).mean()
            loss.backward()
            its_optimizer.step()
            note("generator", loss.detach())
        optimizer.zero_grad()
        note("values", [values(critic), values(generator)])

    both(pattern, make=make, loss=lambda model, step: model(make_samples(step)).pow(2).mean())


# Written and put back


def test_noise_put_on_for_an_evaluation(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        kept = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
        generator = torch.Generator().manual_seed(4)
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            note("noisy", inference(model))
            for name, parameter in model.named_parameters():
                parameter.data = kept[name].clone()
        note("clean", inference(model))
        noises = [noise(parameter) * 0.01 for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, added in zip(model.parameters(), noises, strict=True):
                parameter += added
            note("again", loss_of(model))
            for parameter, added in zip(model.parameters(), noises, strict=True):
                parameter -= added
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_an_average_swapped_in_and_out(both):
    def pattern(model, optimizer, note):
        shadow = [parameter.clone().detach() for parameter in model.parameters()]
        for step in range(3):
            train(model, optimizer, first=step)
            with torch.no_grad():
                for average, parameter in zip(shadow, model.parameters(), strict=True):
                    average.sub_(0.1 * (average - parameter))
            stored = [parameter.detach().cpu().clone() for parameter in model.parameters()]
            for average, parameter in zip(shadow, model.parameters(), strict=True):
                parameter.data.copy_(average.to(parameter.device).data)
            note("average", inference(model))
            for value, parameter in zip(stored, model.parameters(), strict=True):
                parameter.data.copy_(value.data)
            note("live", inference(model))

    both(pattern)


@pytest.mark.parametrize("form", ["in place", "data"])
def test_sharpness_aware_steps(both, form):
    def pattern(model, optimizer, note):
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            groups = optimizer.param_groups
            parameters = [p for group in groups for p in group["params"] if p.grad is not None]
            scale = 0.05 / (torch.norm(torch.stack([p.grad.norm(p=2) for p in parameters])) + 1e-12)
            kept = {}
            for parameter in parameters:
                kept[parameter] = parameter.data.clone()
                change = parameter.grad * scale
                if form == "data":
                    parameter.data = parameter.data + change
                else:
                    with torch.no_grad():
                        parameter.add_(change)
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            note("sharp", loss.detach())
            for parameter in parameters:
                if form == "data":
                    parameter.data = kept[parameter]
                else:
                    with torch.no_grad():
                        parameter.copy_(kept[parameter])
            optimizer.step()
            note("values", values(model))
        optimizer.zero_grad()

    both(pattern)


def test_forward_and_backward_with_binary_weights(both):
    def pattern(model, optimizer, note):
        weights = [block.linear.weight for block in model.blocks]
        for step in range(2):
            kept = [weight.data.clone() for weight in weights]
            for weight in weights:
                weight.data.copy_(weight.data.sign() * weight.data.abs().mean())
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            note("loss", loss.detach())
            for weight, value in zip(weights, kept, strict=True):
                weight.data.copy_(value)
            optimizer.step()
            for weight in weights:
                weight.data.clamp_(-0.5, 0.5)
            note("values", values(model))
        optimizer.zero_grad()

    both(pattern)


def test_steps_without_gradients(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

        def perturb(seed, scaling):
            torch.manual_seed(seed)
            for _, parameter in named:
                z = torch.normal(mean=0, std=1, size=parameter.data.size(), device=parameter.data.device)
                parameter.data = parameter.data + scaling * z * 1e-2

        for step in range(2):
            perturb(step, 1)
            with torch.inference_mode():
                up = loss_of(model, step).item()
            perturb(step, -2)
            with torch.inference_mode():
                down = loss_of(model, step).item()
            perturb(step, 1)
            note("losses", [up, down])
            torch.manual_seed(step)
            for _, parameter in named:
                z = torch.normal(mean=0, std=1, size=parameter.data.size(), dtype=parameter.data.dtype)
                parameter.data = parameter.data - 1e-2 * ((up - down) / 2e-2 * z)
        note("values", values(model))
        note("after", train(model, optimizer, 1, first=1))

    both(pattern)


def test_low_rank_updates_merged_and_taken_out(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        down, up = noise(torch.empty(2, WIDTH)), noise(torch.empty(WIDTH, 2), 2)
        for block in model.blocks:
            block.linear.weight.data += 0.1 * up @ down
        note("merged", inference(model))
        for block in model.blocks:
            block.linear.weight.data -= 0.1 * up @ down
        note("taken out", inference(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_a_bad_step_is_rolled_back(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for step in range(1, 4):
            backup = [parameter.detach().clone() for parameter in model.parameters()]
            loss = train(model, optimizer, first=step)[0]
            with torch.no_grad():
                after = loss_of(model, step)
                note("compared", [loss, after])
                if step % 2:
                    for parameter, value in zip(model.parameters(), backup, strict=True):
                        parameter.copy_(value)
            note("values", values(model))

    both(pattern)


def test_slow_weights_looking_ahead(both):
    def pattern(model, optimizer, note):
        slow = [parameter.clone().detach() for parameter in model.parameters()]
        for step in range(4):
            train(model, optimizer, first=step)
            if step % 2:
                for value, parameter in zip(slow, model.parameters(), strict=True):
                    value.add_(0.5 * (parameter.data - value))
                    parameter.data.copy_(value)
            note("values", values(model))

    both(pattern)


# Several states and layers put together


def test_one_layer_copied_into_another(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        with torch.no_grad():
            for mine, theirs in zip(model.blocks[0].parameters(), model.blocks[1].parameters(), strict=True):
                mine.copy_(theirs)
        model.blocks[2].load_state_dict(model.blocks[3].state_dict())
        model.blocks[4].linear.weight.data.copy_(model.blocks[5].linear.weight.data)
        model.blocks[6].linear.weight.data = model.blocks[7].linear.weight.data.clone()
        model.blocks[8].linear.weight.data = 0.5 * (model.blocks[7].linear.weight + model.blocks[9].linear.weight).data
        mean = torch.stack([block.linear.bias.data for block in model.blocks]).mean(0)
        for block in model.blocks[10:]:
            block.linear.bias.data.lerp_(mean, 0.5)
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


def test_a_soup_of_several_states(both):
    def pattern(model, optimizer, note):
        states = []
        for step in range(3):
            train(model, optimizer, first=step)
            states.append({key: value.clone() for key, value in model.state_dict().items()})
        soup = {key: sum(state[key] for state in states) / len(states) for key in states[0]}
        model.load_state_dict(soup)
        note("soup", [values(model), inference(model)])
        first = make_tower().state_dict()
        task = {key: value - first[key] for key, value in states[-1].items()}
        for name, parameter in model.named_parameters():
            parameter.data = first[name] + 0.7 * task[name]
        note("task", values(model))
        note("losses", train(model, optimizer, 2, first=3))

    both(pattern)


def test_rounds_of_averaged_clients(both):
    def pattern(model, optimizer, note):
        for turn in range(2):
            start = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
            sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
            for client in range(2):
                for name, parameter in model.named_parameters():
                    parameter.data.copy_(start[name])
                note("losses", train(model, optimizer, first=4 * turn + client))
                for name, parameter in model.named_parameters():
                    sums[name] += parameter.data - start[name]
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(start[name] + 0.5 * sums[name])
            note("values", values(model))

    both(pattern)


def test_weights_tied_once_more(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.head.weight = model.embedding.weight
        model.scale = model.scale
        model.blocks[0].linear.register_parameter("bias", model.blocks[0].linear.bias)
        note("tied", [model.head.weight is model.embedding.weight, len(list(model.parameters()))])
        model.head.weight.data[2] = 0.5
        with torch.no_grad():
            model.embedding.weight[3].zero_()
        note("one", [model.embedding.weight, model.head.weight])
        note("losses", train(model, optimizer, 2, first=1))

    both(pattern)


# Between forward, backward and step


@pytest.mark.parametrize("place", [0, 8, 13])
def test_written_in_place_between_forward_and_backward(both, place):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        loss = loss_of(model, 1)
        with torch.no_grad():
            model.blocks[place].linear.weight.mul_(2)
        with raises_in_both(RuntimeError):
            loss.backward()
        optimizer.zero_grad()
        note("values", values(model))
        note("losses", train(model, optimizer, 2, first=2))

    both(pattern)


def test_in_place_where_backward_does_not_need_it(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        loss = loss_of(model, 1)
        with torch.no_grad():
            for block in model.blocks:
                block.linear.bias.add_(0.1)
        loss.backward()
        note("gradients", [parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        note("values", values(model))

    both(pattern)


def test_data_written_between_forward_and_backward(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        loss = loss_of(model, 1)
        for block in model.blocks[::2]:
            block.linear.weight.data.mul_(1.5)
        model.blocks[1].norm.weight.data[3] = 2.0
        loss.backward()
        note("gradients", [parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        note("values", values(model))

    both(pattern)


def test_data_replaced_between_forward_and_backward(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        loss = loss_of(model, 1)
        for block in model.blocks[::2]:
            block.linear.weight.data = block.linear.weight.data * 1.5
        loss.backward()
        note("gradients", [parameter.grad for parameter in model.parameters()])
        note("replaced", values(model))
        optimizer.step()
        optimizer.zero_grad()
        note("values", values(model))

    both(pattern)


def test_written_between_a_penalty_and_its_backward(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight = model.blocks[3].linear.weight
        penalty = weight.pow(2).sum()
        with torch.no_grad():
            weight.mul_(2)
        with raises_in_both(RuntimeError):
            penalty.backward()
        penalty = weight.pow(2).sum()
        weight.data.mul_(2)
        (penalty + loss_of(model, 1)).backward()
        note("gradients", [parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()

    both(pattern)


def test_written_between_backward_and_step(both):
    def pattern(model, optimizer, note):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.95)
            model.scale.data = model.scale.data + 0.1
            model.blocks[0].linear.weight.data[0] = 0.5
            model.blocks[1].load_state_dict(model.blocks[2].state_dict())
            note("gradients", [parameter.grad for parameter in model.parameters()])
            optimizer.step()
            note("values", values(model))
        optimizer.zero_grad()

    both(pattern)


def test_written_between_micro_batches(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            for micro in range(3):
                (loss_of(model, 3 * step + micro) / 3).backward()
                for parameter in model.parameters():
                    parameter.data.add_(noise(parameter, micro), alpha=0.01)
                with torch.no_grad():
                    model.scale.clamp_(0.8, 1.2)
            optimizer.step()
            optimizer.zero_grad()
            note("values", values(model))

    both(pattern)


def test_written_while_gradients_arrive(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)

        def descend(parameter):
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        handles = [p.register_post_accumulate_grad_hook(descend) for p in model.parameters()]
        for step in range(2):
            loss = loss_of(model, step)
            loss.backward()
            note("loss", loss.detach())
            note("values", values(model))
        for handle in handles:
            handle.remove()

    both(pattern)


def test_states_of_the_optimizer_written_with_a_layer(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        linear = model.blocks[5].linear
        linear.reset_parameters()
        for parameter in linear.parameters():
            optimizer.state[parameter]["exp_avg"].zero_()
            optimizer.state[parameter]["exp_avg_sq"].mul_(0.5)
        note("losses", train(model, optimizer, 2, first=2))

    both(pattern)


# Pruning and parametrisations of torch


def make_pruned():
    model = make_tower()
    for block in model.blocks[:10]:
        prune.l1_unstructured(block.linear, "weight", amount=0.4)
    prune.global_unstructured(
        [(block.linear, "weight") for block in model.blocks[10:]], pruning_method=prune.L1Unstructured, amount=0.3
    )
    return model


def test_pruned_before_the_engine(both):
    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2))
        note("weights", [block.linear.weight.detach() for block in model.blocks])
        note("masks", dict(model.named_buffers()))
        prune.l1_unstructured(model.blocks[3].linear, "weight", amount=0.5)
        prune.random_structured(model.blocks[12].linear, "weight", amount=0.25, dim=0)
        note("zeros", [int((block.linear.weight == 0).sum()) for block in model.blocks])
        model.blocks[4].linear.weight_orig.data.mul_(0.5)
        note("more", train(model, optimizer, 2, first=2))

    both(pattern, make=make_pruned)


def test_pruned_and_made_permanent_later(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for block in model.blocks[:4]:
            prune.l1_unstructured(block.linear, "weight", amount=0.5)
        note("names", list(model.state_dict())[:12])
        note("losses", train(model, optimizer, 1, first=1))
        for block in model.blocks[:4]:
            prune.remove(block.linear, "weight")
        note("values", dict(model.state_dict()))
        note("more", train(model, optimizer, 1, first=2))

    both(pattern)


NORMS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("norm", list(NORMS))
def test_normed_before_the_engine(both, norm):
    def make():
        model = make_tower()
        for block in model.blocks[::6]:
            NORMS[norm](block.linear)
        return model

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2))
        note("values", dict(model.state_dict()))
        model.eval()
        note("inference", inference(model))
        model.train()
        if not norm.startswith("old"):
            note("weights", [block.linear.weight.detach() for block in model.blocks])
            with parametrize.cached():
                note("cached", inference(model))
        if norm == "weight_norm":
            with torch.no_grad():
                model.blocks[0].linear.weight = noise(model.blocks[1].linear.weight)
        if norm == "orthogonal":
            model.blocks[0].linear.weight = torch.linalg.qr(noise(model.blocks[1].linear.weight))[0]
        note("afterwards", train(model, optimizer, 1, first=2))

    both(pattern, make=make)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x):
        return x.triu()


def test_a_parametrisation_of_the_user(both):
    def make():
        model = make_tower()
        for block in model.blocks[::3]:
            parametrize.register_parametrization(block.linear, "weight", Symmetric())
        return model

    def penalised(model, step):
        return loss_of(model, step) + 0.01 * sum(block.linear.weight.pow(2).sum() for block in model.blocks)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2, loss=penalised))
        linear = model.blocks[3].linear
        linear.weight = noise(linear.weight)
        with torch.no_grad():
            linear.parametrizations.weight.original.mul_(0.5)
        note("weight", [linear.weight.detach(), linear.parametrizations.weight.original])
        note("more", train(model, optimizer, 2, first=2, loss=penalised))

    both(pattern, make=make, loss=penalised)


def test_weights_standardised_within_forward(both):
    class Standardised(nn.Linear):
        def forward(self, x):
            weight = self.weight - self.weight.mean(dim=1, keepdim=True)
            return functional.linear(x, weight / (weight.std(dim=1, keepdim=True) + 1e-5), self.bias)

    class FakeQuantised(nn.Linear):
        def forward(self, x):
            step = self.weight.detach().abs().max() / 7
            quantised = torch.round(self.weight / step) * step
            return functional.linear(x, self.weight + (quantised - self.weight).detach(), self.bias)

    def make():
        model = make_tower()
        for block in model.blocks[::2]:
            block.linear.__class__ = Standardised
        for block in model.blocks[1::2]:
            block.linear.__class__ = FakeQuantised
        return model

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 2))
        model.blocks[1].linear.weight.data.mul_(2)
        note("more", train(model, optimizer, 1, first=2))

    both(pattern, make=make)
