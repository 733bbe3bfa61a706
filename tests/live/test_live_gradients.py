"""Gradients of a live model: read, logged, clipped, replaced and used, as code for plain torch does it."""

import collections
import math

import numpy
import pytest
import torch
from live.both import WIDTH, Block, Tower, copy_of, loss_of, make_ids, make_tower, raises_in_both, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_patrickstar import PatrickStarEngine

KEEP = {"keep_gradients": True}


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def backward(model, step=0, loss=loss_of):
    value = loss(model, step)
    value.backward()
    return value.detach()


def loop(model, optimizer, steps=3, between=None, loss=loss_of):
    """An ordinary loop, with something done between backward and step."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(backward(model, step, loss))
        if between is not None:
            between(step)
        optimizer.step()
    return losses


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


def make_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class Forked(Tower):
    """Has two blocks of which a batch uses one."""

    def __init__(self):
        super().__init__(depth=30)
        self.forks = nn.ModuleList([Block(), Block()])

    def forward(self, ids, fork=0):
        x = self.embedding(ids) + self.offset
        for block in self.blocks:
            x = block(x)
        x = self.forks[fork](x)
        return self.head(self.norm(x) * self.scale)


def make_forked():
    torch.manual_seed(0)
    return Forked()


def forked_loss(model, step=0, fork=None):
    ids = make_ids(step)
    logits = model(ids[:, :-1], step % 2 if fork is None else fork)
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Checkpointed(Tower):
    def forward(self, ids):
        x = self.embedding(ids) + self.offset
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x) * self.scale)


def make_checkpointed():
    torch.manual_seed(0)
    return Checkpointed()


# Reading


def test_a_gradient_is_none_until_there_was_a_backward(both):
    def pattern(model, optimizer, note):
        note("before", [parameter.grad is None for parameter in model.parameters()])
        loss_of(model)
        note("after forward", [parameter.grad is None for parameter in model.parameters()])
        backward(model)
        note("after backward", [parameter.grad is None for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        note("after zero_grad", [parameter.grad is None for parameter in model.parameters()])

    both(pattern)


def test_gradients_of_all_parameters_after_backward(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            optimizer.zero_grad()
            note("loss", backward(model, step))
            note("gradients", gradients_of(model))
            optimizer.step()

    both(pattern)


def test_what_a_gradient_says_about_itself(both):
    def pattern(model, optimizer, note):
        backward(model)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            note(name, [gradient.shape, gradient.dtype, str(gradient.device), gradient.stride(), gradient.layout])
            note(name, [gradient.is_leaf, gradient.requires_grad, gradient.grad_fn is None, gradient.is_contiguous()])
            note(name, [gradient.numel(), gradient.element_size(), gradient.ndim, type(gradient) is torch.Tensor])
            note(name, [isinstance(gradient, nn.Parameter), gradient.is_sparse, gradient.grad is None])

    both(pattern)


def test_gradients_by_attribute(both):
    def pattern(model, optimizer, note):
        backward(model)
        note("weight", model.blocks[3].linear.weight.grad)
        note("bias", model.blocks[13].linear.bias.grad)
        note("own", model.scale.grad)
        note("tied", [model.embedding.weight.grad, model.head.weight.grad])
        note("by name", model.get_parameter("blocks.7.norm.weight").grad)
        note("by getattr", getattr(model.blocks[0].norm, "bias").grad)  # noqa: B009
        note("by dictionary", model.norm._parameters["weight"].grad)
        note("underscore", model.norm.bias._grad)

    both(pattern)


def test_gradients_by_a_list_of_parameters_made_before_training(both):
    lists = {}

    def make():
        model = make_tower()
        lists[id(model)] = list(model.parameters())
        return model

    def pattern(model, optimizer, note):
        in_pattern = [parameter for parameter in model.parameters() if parameter.requires_grad]
        train(model, optimizer)
        backward(model, 1)
        note("from before the engine", [parameter.grad for parameter in lists[id(model)]])
        note("from after", [parameter.grad for parameter in in_pattern])
        note("of the optimizer", [parameter.grad for group in optimizer.param_groups for parameter in group["params"]])
        optimizer.step()

    both(pattern, make=make)


def test_logging_gradient_norms_in_every_step(both):
    def pattern(model, optimizer, note):
        def log(step):
            note("norms", {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()})
            total = 0.0
            for parameter in model.parameters():
                total += parameter.grad.data.norm(2).item() ** 2
            note("total", total**0.5)
            norms = torch.stack([parameter.grad.detach().norm(2) for parameter in model.parameters()])
            note("stacked", torch.norm(norms, 2))
            note("foreach", torch._foreach_norm([parameter.grad for parameter in model.parameters()]))
            note("largest", max(parameter.grad.abs().max().item() for parameter in model.parameters()))

        note("losses", loop(model, optimizer, between=log))

    both(pattern)


def test_logging_histograms_of_gradients(both):
    def pattern(model, optimizer, note):
        def log(step):
            for name, parameter in model.named_parameters():
                if "weight" not in name or parameter.grad is None:
                    continue
                note(name, torch.histc(parameter.grad, 8))
                counts, edges = numpy.histogram(parameter.grad.detach().cpu().numpy(), bins=8)
                note(name, [counts, edges])
                note(name, [parameter.grad.mean(), parameter.grad.std(), parameter.grad.float().quantile(0.9)])

        loop(model, optimizer, 2, log)

    both(pattern)


def test_logging_the_ratio_of_gradient_update_and_weight(both):
    def pattern(model, optimizer, note):
        def log(step):
            with torch.no_grad():
                ratios = [(p.grad.norm() / (p.norm() + 1e-12)).log10() for p in model.parameters()]
                note("ratios", ratios)
                note("share of zeros", [(p.grad == 0).float().mean() for p in model.parameters()])

        loop(model, optimizer, 2, log)

    both(pattern)


def test_printing_gradients(both):
    def pattern(model, optimizer, note):
        print(model.scale.grad)
        backward(model)
        note("repr", repr(model.scale.grad))
        note("text", f"{model.blocks[2].norm.bias.grad}")
        note("list", model.norm.weight.grad.tolist())
        note("number", f"{model.norm.weight.grad[0].item():.9g}")

    both(pattern)


def test_cosine_similarity_of_the_gradients_of_two_batches(both):
    def pattern(model, optimizer, note):
        flat = []
        for step in range(2):
            model.zero_grad()
            backward(model, step)
            flat.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        note("cosine", torch.cosine_similarity(*flat, dim=0))
        note("vector", nn.utils.parameters_to_vector(parameter.grad for parameter in model.parameters()))
        optimizer.step()

    both(pattern)


def test_gradient_noise_scale_over_micro_batches(both):
    def pattern(model, optimizer, note):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        squares = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for step in range(3):
            model.zero_grad()
            backward(model, step)
            for parameter, total, square in zip(model.parameters(), sums, squares, strict=True):
                total.add_(parameter.grad)
                square.addcmul_(parameter.grad, parameter.grad)
        note("means", [total / 3 for total in sums])
        note("variances", [square / 3 - (total / 3) ** 2 for total, square in zip(sums, squares, strict=True)])

    both(pattern)


def test_a_gradient_that_was_read_is_the_gradient_and_not_a_copy(both):
    def pattern(model, optimizer, note):
        backward(model)
        weight = model.blocks[5].linear.weight
        gradient = weight.grad
        gradient.mul_(3)
        note("through the parameter", weight.grad)
        weight.grad.add_(1)
        note("through the reference", gradient)
        note("same", weight.grad is weight.grad)
        backward(model, 1)
        note("added up in the reference", gradient)
        optimizer.step()

    both(pattern)


def test_gradients_kept_in_a_list_stay_after_step_and_zero_grad(both):
    def pattern(model, optimizer, note):
        backward(model)
        kept = [parameter.grad for parameter in model.parameters()]
        copies = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        note("after the step", kept)
        train(model, optimizer)
        note("two steps later", kept)
        note("copies", copies)

    both(pattern)


def test_gradients_kept_in_a_list_from_step_to_step(both):
    def pattern(model, optimizer, note):
        history = []
        loop(model, optimizer, between=lambda step: history.append([p.grad for p in model.parameters()]))
        optimizer.zero_grad()
        note("history", history)

    both(pattern)


def test_gradients_read_after_the_step(both):
    def pattern(model, optimizer, note):
        backward(model)
        optimizer.step()
        note("after the step", gradients_of(model))
        optimizer.zero_grad()
        note("after zero_grad", [parameter.grad is None for parameter in model.parameters()])

    both(pattern)


def test_gradients_read_after_every_step_of_a_loop_that_begins_with_zero_grad(both):
    def pattern(model, optimizer, note):
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            note("norms", [parameter.grad.norm() for parameter in model.parameters()])
        note("gradients", gradients_of(model))

    both(pattern, settings=KEEP)


# Adding up


def test_gradients_of_several_backwards_add_up(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            for micro in range(3):
                (loss_of(model, 3 * step + micro) / 3).backward()
                note("so far", gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()

    both(pattern)


def test_a_step_without_zero_grad_adds_up(both):
    def pattern(model, optimizer, note):
        for step in range(3):
            note("loss", backward(model, step))
            note("gradients", gradients_of(model))
            optimizer.step()

    both(pattern)


def test_zero_grad_in_every_second_step(both):
    def pattern(model, optimizer, note):
        for step in range(4):
            if step % 2 == 0:
                optimizer.zero_grad()
            note("loss", backward(model, step))
            optimizer.step()
            note("norm", nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))

    both(pattern, settings=KEEP)


def test_two_steps_with_the_same_gradients(both):
    def pattern(model, optimizer, note):
        backward(model)
        optimizer.step()
        optimizer.step()
        note("weights", list(model.parameters()))

    both(pattern)


def test_backward_of_several_losses_at_once(both):
    def pattern(model, optimizer, note):
        torch.autograd.backward([loss_of(model, 0), loss_of(model, 1)])
        note("gradients", gradients_of(model))
        logits = model(make_ids(2))
        logits.backward(gradient=torch.full_like(logits, 0.01))
        note("added", gradients_of(model))
        optimizer.step()

    both(pattern)


def test_backward_twice_with_retain_graph(both):
    def pattern(model, optimizer, note):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        note("once", gradients_of(model))
        loss.backward()
        note("twice", gradients_of(model))
        optimizer.step()

    both(pattern)


def test_two_losses_of_one_forward(both):
    def pattern(model, optimizer, note):
        logits = model(make_ids())
        first, second = logits.pow(2).mean(), logits.abs().mean()
        first.backward(retain_graph=True)
        note("first", gradients_of(model))
        second.backward()
        note("both", gradients_of(model))
        optimizer.step()

    both(pattern)


def test_backward_twice_without_retain_graph_fails_and_training_goes_on(both):
    def pattern(model, optimizer, note):
        loss = loss_of(model)
        loss.backward()
        with raises_in_both(RuntimeError, match="second time"):
            loss.backward()
        optimizer.zero_grad()
        note("losses", train(model, optimizer, 2))

    both(pattern)


def test_a_backward_that_is_left_in_between_adds_up_what_had_been_done(both):
    class Stop(Exception):
        pass

    def stop(gradient):
        raise Stop

    def pattern(model, optimizer, note):
        activations = []
        handle = model.blocks[8].register_forward_hook(lambda module, args, output: activations.append(output))
        loss = loss_of(model)
        handle.remove()
        activations[0].register_hook(stop)
        with raises_in_both(Stop):
            loss.backward()
        note("head", model.norm.weight.grad)
        note("below", [model.blocks[3].linear.weight.grad is None, model.embedding.weight.grad is None])
        optimizer.zero_grad()
        note("losses", train(model, optimizer, 2))

    both(pattern)


def test_zero_grad_to_zeros(both):
    def pattern(model, optimizer, note):
        backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        note("zeros", gradients_of(model))
        backward(model, 1)
        note("gradients", gradients_of(model))
        optimizer.step()
        model.zero_grad(set_to_none=False)
        note("zeros again", gradients_of(model))

    both(pattern)


def test_references_to_gradients_become_zero_with_zero_grad_to_zeros(both):
    def pattern(model, optimizer, note):
        backward(model)
        kept = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        note("kept", kept)
        backward(model, 1)
        note("filled again", kept)

    both(pattern)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_momentum_and_parameters_that_a_step_does_not_use(both, set_to_none):
    def pattern(model, optimizer, note):
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            note("loss", backward(model, step, forked_loss))
            note("unused", [parameter.grad for parameter in model.forks.parameters()])
            optimizer.step()
            note("weights", [parameter.detach() for parameter in model.forks.parameters()])

    both(pattern, make=make_forked, make_optimizer=make_momentum, loss=forked_loss)


def test_weight_decay_and_parameters_that_never_get_a_gradient(both):
    def loss(model, step=0):
        return forked_loss(model, step, fork=0)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 3, loss=loss))
        backward(model, 0, loss)
        note("none", [name for name, parameter in model.named_parameters() if parameter.grad is None])
        optimizer.step()

    both(pattern, make=make_forked, loss=loss)


def test_zero_grad_of_the_model_and_of_a_part(both):
    def pattern(model, optimizer, note):
        backward(model)
        model.zero_grad()
        note("model", gradients_of(model))
        backward(model)
        model.blocks[:10].zero_grad()
        model.norm.zero_grad()
        note("part", gradients_of(model))
        backward(model, 1)
        note("the rest adds up", gradients_of(model))
        optimizer.step()

    both(pattern)


def test_zero_grad_of_the_parameters_of_one_group(both):
    def make_optimizer(model):
        blocks = list(model.blocks.parameters())
        others = [model.embedding.weight, model.scale, *model.norm.parameters()]
        return torch.optim.AdamW([{"params": blocks, "lr": 1e-2}, {"params": others, "lr": 1e-3}])

    def pattern(model, optimizer, note):
        for step in range(3):
            backward(model, step)
            optimizer.step()
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = None
            note("the other group's add up", gradients_of(model))

    both(pattern, make_optimizer=make_optimizer)


def test_zeroing_as_old_code_does(both):
    def pattern(model, optimizer, note):
        for step in range(3):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.detach_()
                    parameter.grad.zero_()
            note("loss", backward(model, step))
            note("gradients", gradients_of(model))
            optimizer.step()

    both(pattern)


def test_gradients_of_parameters_that_no_group_holds_add_up(both):
    def make_optimizer(model):
        return torch.optim.AdamW(model.blocks.parameters(), lr=1e-2)

    def pattern(model, optimizer, note):
        for step in range(3):
            optimizer.zero_grad()
            note("loss", backward(model, step))
            note("left out", [model.scale.grad, model.embedding.weight.grad, model.norm.bias.grad])
            optimizer.step()
        note("weights", [model.scale, model.embedding.weight])
        model.zero_grad()
        note("none", [model.scale.grad, model.embedding.weight.grad])

    both(pattern, make_optimizer=make_optimizer)


def test_a_frozen_parameter_has_no_gradient(both):
    def make():
        model = make_tower()
        model.embedding.requires_grad_(False)
        model.blocks[:4].requires_grad_(False)
        return model

    def pattern(model, optimizer, note):
        backward(model)
        note("gradients", gradients_of(model))
        optimizer.step()
        note("frozen", [model.embedding.weight, model.blocks[0].linear.weight])

    both(pattern, make=make)


# Replacing and changing


def test_a_gradient_assigned(both):
    def pattern(model, optimizer, note):
        backward(model)
        given = []
        for parameter in model.parameters():
            given.append(torch.randn(parameter.shape, generator=generator()))
            parameter.grad = given[-1]
        note("read back", gradients_of(model))
        note("the same tensor", [p.grad is x for p, x in zip(model.parameters(), given, strict=True)])
        optimizer.step()
        note("given", given)

    both(pattern)


def test_a_tensor_that_is_changed_after_it_was_assigned(both):
    def pattern(model, optimizer, note):
        backward(model)
        weight = model.blocks[8].linear.weight
        x = torch.randn(weight.shape, generator=generator())
        weight.grad = x
        x.mul_(2)
        x[0] = 1
        note("changed", weight.grad)
        weight.grad.neg_()
        note("the tensor itself", x)
        optimizer.step()

    both(pattern)


def test_backward_adds_to_a_gradient_that_was_assigned(both):
    def pattern(model, optimizer, note):
        given = {}
        for name, parameter in model.named_parameters():
            given[name] = torch.full(parameter.shape, 0.01)
            parameter.grad = given[name]
        backward(model)
        note("sum", gradients_of(model))
        note("the tensors that were given", given)
        optimizer.step()

    both(pattern)


def test_gradients_without_any_backward_as_evolution_strategies_make_them(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            rewards, directions = [], []
            for trial in range(3):
                source = generator(10 * step + trial)
                noise = [torch.randn(p.shape, generator=source) for p in model.parameters()]
                with torch.no_grad():
                    for parameter, direction in zip(model.parameters(), noise, strict=True):
                        parameter.add_(direction, alpha=0.01)
                    rewards.append(-loss_of(model, step))
                    for parameter, direction in zip(model.parameters(), noise, strict=True):
                        parameter.sub_(direction, alpha=0.01)
                directions.append(noise)
            note("rewards", rewards)
            for place, parameter in enumerate(model.parameters()):
                parameter.grad = -sum(reward * noise[place] for reward, noise in zip(rewards, directions, strict=True))
            optimizer.step()
            optimizer.zero_grad()

    both(pattern)


def test_a_layer_left_out_of_one_step_by_setting_its_gradient_to_none(both):
    def pattern(model, optimizer, note):
        def freeze(step):
            if step == 1:
                for parameter in model.blocks[4].parameters():
                    parameter.grad = None
            note("gradients", [parameter.grad for parameter in model.blocks[4].parameters()])

        note("losses", loop(model, optimizer, 3, freeze))

    both(pattern)


def test_a_gradient_deleted(both):
    def pattern(model, optimizer, note):
        backward(model)
        del model.scale.grad
        del model.blocks[6].linear.weight.grad
        note("deleted", [model.scale.grad is None, model.blocks[6].linear.weight.grad is None])
        optimizer.step()
        note("unchanged", model.scale)

    both(pattern)


def test_a_gradient_replaced_by_something_made_of_it(both):
    def pattern(model, optimizer, note):
        backward(model)
        for place, parameter in enumerate(model.parameters()):
            if place % 4 == 0:
                parameter.grad = parameter.grad * 2
            elif place % 4 == 1:
                parameter.grad = parameter.grad.clone().clamp(-0.01, 0.01)
            elif place % 4 == 2:
                parameter.grad = torch.where(parameter.grad > 0, parameter.grad, torch.zeros_like(parameter.grad))
            else:
                parameter.grad = torch.sign(parameter.grad) * 0.1
        note("replaced", gradients_of(model))
        optimizer.step()

    both(pattern)


def test_gradients_changed_in_place(both):
    def pattern(model, optimizer, note):
        backward(model)
        changes = [
            lambda g: g.mul_(2),
            lambda g: g.data.mul_(0.5),
            lambda g: g.zero_(),
            lambda g: g.data.zero_(),
            lambda g: g.fill_(0.25),
            lambda g: g.clamp_(-1e-3, 1e-3),
            lambda g: g.copy_(torch.ones_like(g)),
            lambda g: g.detach().add_(0.5),
            lambda g: g.view(-1)[:3].fill_(1.0),
            lambda g: g.flatten()[0].neg_(),
            lambda g: g.add_(torch.ones(g.shape), alpha=0.1),
            lambda g: torch.neg(g, out=g),
            lambda g: nn.init.constant_(g, 0.125),
            lambda g: g.sign_(),
            lambda g: g.numpy().__imul__(3),
        ]
        for place, parameter in enumerate(model.parameters()):
            changes[place % len(changes)](parameter.grad)
        note("changed", gradients_of(model))
        optimizer.step()

    both(pattern)


def test_parts_of_a_gradient_assigned_by_index(both):
    def pattern(model, optimizer, note):
        backward(model)
        model.blocks[0].linear.weight.grad[...] = 0.5
        model.blocks[1].linear.weight.grad[2] = 0
        model.blocks[2].linear.weight.grad[:, 3] = torch.arange(WIDTH).float()
        model.blocks[3].linear.bias.grad[:] = model.blocks[4].linear.bias.grad
        model.blocks[5].linear.weight.grad[model.blocks[5].linear.weight.grad < 0] = 0.0
        model.blocks[6].linear.weight.grad.data[1:3] *= 4
        note("gradients", gradients_of(model))
        optimizer.step()

    both(pattern)


def test_augmented_assignments_to_a_gradient(both):
    def pattern(model, optimizer, note):
        backward(model)
        for parameter in model.blocks[0].parameters():
            parameter.grad += 0.5
        for parameter in model.blocks[1].parameters():
            parameter.grad *= 2
        for parameter in model.blocks[2].parameters():
            parameter.grad -= 0.01 * torch.ones_like(parameter)
        for parameter in model.blocks[3].parameters():
            parameter.grad /= parameter.grad.norm() + 1e-6
        note("gradients", gradients_of(model))
        optimizer.step()

    both(pattern)


def test_the_data_of_a_gradient_replaced_as_a_filter_of_slow_gradients_does(both):
    def pattern(model, optimizer, note):
        slow = {}

        def filtered(step):
            for name, parameter in model.named_parameters():
                gradient = parameter.grad.data.detach()
                slow[name] = gradient.clone() if name not in slow else slow[name] * 0.9 + gradient * 0.1
                parameter.grad.data = parameter.grad.data + slow[name] * 2.0
            note("filtered", gradients_of(model))

        note("losses", loop(model, optimizer, 3, filtered))

    both(pattern)


def test_a_gradient_that_is_a_transposed_or_an_expanded_tensor(both):
    def pattern(model, optimizer, note):
        backward(model)
        weight = model.blocks[0].linear.weight
        weight.grad = weight.grad.t()
        model.scale.grad = torch.full((1,), 0.25).expand(WIDTH)
        model.embedding.weight.grad = torch.randn(WIDTH, 24, generator=generator()).t()
        note("gradients", gradients_of(model))
        optimizer.step()

    both(pattern)


def test_one_tensor_as_the_gradient_of_two_parameters(both):
    def pattern(model, optimizer, note):
        backward(model)
        shared = torch.randn(WIDTH, WIDTH, generator=generator())
        model.blocks[0].linear.weight.grad = shared
        model.blocks[8].linear.weight.grad = shared
        model.blocks[0].linear.weight.grad.mul_(2)
        note("both", [model.blocks[0].linear.weight.grad, model.blocks[8].linear.weight.grad])
        optimizer.step()

    both(pattern)


def test_gradients_that_are_views_of_one_flat_buffer(both):
    def pattern(model, optimizer, note):
        flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
        place = 0
        for parameter in model.parameters():
            parameter.grad = flat[place : place + parameter.numel()].view_as(parameter)
            place += parameter.numel()
        for step in range(3):
            flat.zero_()
            backward(model, step)
            note("buffer", flat)
            flat.clamp_(-0.02, 0.02)
            note("views", gradients_of(model))
            optimizer.step()

    both(pattern)


def test_what_plain_torch_refuses_as_a_gradient(both):
    def pattern(model, optimizer, note):
        backward(model)
        weight = model.blocks[0].linear.weight
        with raises_in_both(RuntimeError):
            weight.grad = torch.zeros(3)
        with raises_in_both(RuntimeError):
            weight.grad = torch.zeros(weight.shape, dtype=torch.float64)
        with raises_in_both(TypeError):
            weight.grad = 0.0
        with raises_in_both(TypeError):
            weight.grad = weight.detach().numpy()
        with raises_in_both(RuntimeError):
            weight.grad = weight
        note("untouched", weight.grad)
        optimizer.step()

    both(pattern)


# Clipping


@pytest.mark.parametrize("foreach", [None, False])
def test_clip_grad_norm(both, foreach):
    def pattern(model, optimizer, note):
        def clip(step):
            note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.3, foreach=foreach))
            note("clipped", gradients_of(model))

        note("losses", loop(model, optimizer, 3, clip))

    both(pattern)


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_clip_grad_norm_of_other_orders(both, norm_type):
    def pattern(model, optimizer, note):
        def clip(step):
            note("norm", nn.utils.clip_grad_norm_(list(model.parameters()), 0.05, norm_type=norm_type))
            note("clipped", gradients_of(model))

        note("losses", loop(model, optimizer, 2, clip))

    both(pattern)


def test_clipping_a_part_of_the_parameters(both):
    def pattern(model, optimizer, note):
        def clip(step):
            note("blocks", nn.utils.clip_grad_norm_(model.blocks.parameters(), 0.1))
            note("one", nn.utils.clip_grad_norm_(model.scale, 0.01))
            trained = [p for name, p in model.named_parameters() if "norm" in name and p.grad is not None]
            note("chosen", nn.utils.clip_grad_norm_(trained, 0.02))
            note("clipped", gradients_of(model))

        note("losses", loop(model, optimizer, 3, clip))

    both(pattern)


def test_clipping_by_param_group_and_by_parameter(both):
    def make_optimizer(model):
        blocks = list(model.blocks.parameters())
        others = [model.embedding.weight, model.scale, *model.norm.parameters()]
        return torch.optim.AdamW([{"params": blocks, "lr": 1e-2}, {"params": others, "lr": 1e-3}])

    def pattern(model, optimizer, note):
        def clip(step):
            for group in optimizer.param_groups:
                note("group", nn.utils.clip_grad_norm_(group["params"], 0.1))
            for parameter in model.parameters():
                note("parameter", nn.utils.clip_grad_norm_([parameter], 0.02))
            note("clipped", gradients_of(model))

        note("losses", loop(model, optimizer, 2, clip))

    both(pattern, make_optimizer=make_optimizer)


@pytest.mark.parametrize("foreach", [None, False])
def test_clip_grad_value(both, foreach):
    def pattern(model, optimizer, note):
        def clip(step):
            nn.utils.clip_grad_value_(model.parameters(), 0.005, foreach=foreach)
            note("clipped", gradients_of(model))

        note("losses", loop(model, optimizer, 3, clip))

    both(pattern)


def test_total_norm_and_clipping_with_it(both):
    def pattern(model, optimizer, note):
        def clip(step):
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            total = nn.utils.get_total_norm(gradients)
            note("total", total)
            note("largest", nn.utils.get_total_norm(gradients, norm_type=math.inf))
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.2, total)
            note("clipped", gradients_of(model))

        note("losses", loop(model, optimizer, 2, clip))

    both(pattern)


def test_clipping_twice_and_clipping_what_is_small_enough(both):
    def pattern(model, optimizer, note):
        def clip(step):
            note("first", nn.utils.clip_grad_norm_(model.parameters(), 1e6))
            note("second", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            note("third", nn.utils.clip_grad_norm_(model.parameters(), 0.25))
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            note("fourth", nn.utils.clip_grad_norm_(model.parameters(), math.inf))

        note("losses", loop(model, optimizer, 2, clip))

    both(pattern)


def test_clipping_after_several_micro_batches(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            for micro in range(3):
                (loss_of(model, 3 * step + micro) / 3).backward()
            note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.2))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    both(pattern)


def test_clipping_by_hand(both):
    def pattern(model, optimizer, note):
        def clip(step):
            total = torch.norm(torch.stack([torch.norm(p.grad.detach(), 2.0) for p in model.parameters()]), 2.0)
            coefficient = 0.1 / (total + 1e-6)
            note("total", total)
            if coefficient < 1:
                for parameter in model.parameters():
                    parameter.grad.detach().mul_(coefficient)
            torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 0.5)
            note("clipped", gradients_of(model))

        note("losses", loop(model, optimizer, 2, clip))

    both(pattern)


def test_clipping_by_the_norm_of_the_weights(both):
    """As in NFNets."""

    def unit_norm(x):
        return x.norm(2.0) if x.ndim <= 1 else x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)

    def pattern(model, optimizer, note):
        def clip(step):
            for parameter in model.parameters():
                weight, gradient = parameter.detach(), parameter.grad.detach()
                largest = unit_norm(weight).clamp_(min=1e-3).mul_(0.01)
                norm = unit_norm(gradient)
                clipped = gradient * (largest / norm.clamp(min=1e-6))
                parameter.grad.detach().copy_(torch.where(norm < largest, gradient, clipped))
            note("clipped", gradients_of(model))

        note("losses", loop(model, optimizer, 2, clip))

    both(pattern)


def test_clipping_refuses_what_is_not_finite(both):
    def pattern(model, optimizer, note):
        backward(model)
        model.scale.grad[3] = math.inf
        with raises_in_both(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        note("still there", gradients_of(model))
        note("norm", nn.utils.clip_grad_norm_(model.scale, 1.0))
        note("clipped to nan", model.scale.grad)
        optimizer.zero_grad()

    both(pattern)


def test_clipping_without_gradients(both):
    def pattern(model, optimizer, note):
        note("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        train(model, optimizer)
        note("norm after zero_grad", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        backward(model)
        model.scale.grad = None
        note("norm of the rest", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()

    both(pattern)


# Surgery between backward and step


def test_gradient_noise(both):
    def pattern(model, optimizer, note):
        source = generator()

        def add_noise(step):
            for parameter in model.parameters():
                parameter.grad += torch.randn(parameter.grad.shape, generator=source) * 0.01 / (1 + step)

        note("losses", loop(model, optimizer, 3, add_noise))

    both(pattern)


def test_gradient_centralisation(both):
    def pattern(model, optimizer, note):
        def centralise(step):
            for parameter in model.parameters():
                if parameter.grad is not None and parameter.grad.dim() > 1:
                    others = tuple(range(1, parameter.grad.dim()))
                    parameter.grad.data.add_(-parameter.grad.data.mean(dim=others, keepdim=True))
            note("gradients", gradients_of(model))

        note("losses", loop(model, optimizer, 2, centralise))

    both(pattern)


def test_training_only_some_rows_of_an_embedding(both):
    def pattern(model, optimizer, note):
        def keep_new_rows(step):
            model.embedding.weight.grad[:20] = 0
            mask = torch.zeros(24, 1)
            mask[22:] = 1
            model.head.weight.grad.mul_(mask)
            note("gradient", model.embedding.weight.grad)

        note("losses", loop(model, optimizer, 2, keep_new_rows))

    both(pattern, make_optimizer=make_sgd)


def test_gradients_scaled_by_depth(both):
    def pattern(model, optimizer, note):
        def scale(step):
            for depth, block in enumerate(model.blocks):
                for parameter in block.parameters():
                    parameter.grad.mul_(0.9 ** (len(model.blocks) - depth))

        note("losses", loop(model, optimizer, 3, scale))

    both(pattern)


def test_gradients_masked_at_random(both):
    def pattern(model, optimizer, note):
        source = generator()

        def mask(step):
            for parameter in model.parameters():
                kept = torch.bernoulli(torch.full(parameter.shape, 0.3), generator=source)
                parameter.grad = parameter.grad * kept / 0.3

        note("losses", loop(model, optimizer, 3, mask))

    both(pattern)


def test_the_part_of_the_gradient_along_the_weight_removed(both):
    def pattern(model, optimizer, note):
        def project(step):
            for parameter in model.parameters():
                weight, gradient = parameter.view(-1), parameter.grad.view(-1)
                share = torch.dot(weight, gradient) / (torch.dot(weight, weight) + 1e-30)
                orthogonal = gradient.to(torch.float32, copy=True).add_(weight, alpha=-share.item())
                parameter.grad.copy_(orthogonal.view_as(parameter.grad))
            note("gradients", gradients_of(model))

        note("losses", loop(model, optimizer, 2, project))

    both(pattern)


def test_a_step_left_out_because_a_gradient_is_not_finite(both):
    def pattern(model, optimizer, note):
        for step in range(3):
            optimizer.zero_grad()
            value = loss_of(model, step)
            (value * math.nan if step == 1 else value).backward()
            finite = all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
            note("finite", finite)
            if finite:
                optimizer.step()

    both(pattern)


def test_gradients_that_are_not_finite_set_to_zero(both):
    def pattern(model, optimizer, note):
        def mend(step):
            if step == 1:
                model.blocks[9].linear.weight.grad[0, 0] = math.nan
                model.scale.grad[1] = math.inf
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(nan=0.0, posinf=1.0, neginf=-1.0)
            note("gradients", gradients_of(model))

        note("losses", loop(model, optimizer, 3, mend))

    both(pattern)


def _project_conflicting(gradients, source):
    """PCGrad: of every task's gradient the part that is against another task's is removed."""
    projected = []
    for place, gradient in enumerate(gradients):
        mine = gradient.clone()
        for other in torch.randperm(len(gradients), generator=source).tolist():
            dot = torch.dot(mine, gradients[other])
            if other != place and dot < 0:
                mine -= dot * gradients[other] / gradients[other].norm() ** 2
        projected.append(mine)
    return torch.stack(projected).sum(dim=0)


def test_conflicting_gradients_of_several_backwards_projected(both):
    def pattern(model, optimizer, note):
        source = generator()
        for step in range(2):
            flat = []
            for task in range(3):
                optimizer.zero_grad()
                (loss_of(model, 10 * step + task) * (-1) ** task).backward()
                flat.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
            merged = _project_conflicting(flat, source)
            note("merged", merged)
            optimizer.zero_grad()
            place = 0
            for parameter in model.parameters():
                parameter.grad = merged[place : place + parameter.numel()].view_as(parameter)
                place += parameter.numel()
            optimizer.step()

    both(pattern)


def test_conflicting_gradients_by_autograd_grad_of_one_forward(both):
    def pattern(model, optimizer, note):
        source = generator()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for step in range(2):
            logits = model(make_ids(step))
            losses = [logits.pow(2).mean(), -logits.abs().mean(), logits.exp().mean()]
            flat = []
            for loss in losses:
                gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
                flat.append(torch.cat([gradient.flatten() for gradient in gradients]))
            note("norms", [vector.norm() for vector in flat])
            merged = _project_conflicting(flat, source)
            pieces = merged.split([parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece.view_as(parameter).clone()
            optimizer.step()
            optimizer.zero_grad()

    both(pattern)


def test_losses_weighted_by_their_gradient_at_a_shared_layer(both):
    """GradNorm."""

    def pattern(model, optimizer, note):
        weights = torch.ones(2, requires_grad=True)
        shared = model.blocks[-1].linear.weight
        for step in range(2):
            logits = model(make_ids(step))
            losses = torch.stack([logits.pow(2).mean(), logits.abs().mean()])
            norms = torch.stack(
                [
                    torch.autograd.grad(weight * loss, shared, retain_graph=True, create_graph=True)[0].norm()
                    for weight, loss in zip(weights, losses, strict=True)
                ]
            )
            gap = (norms - norms.mean().detach()).abs().sum()
            (weights.grad,) = torch.autograd.grad(gap, weights, retain_graph=True)
            note("norms", norms.detach())
            optimizer.zero_grad()
            (weights.detach() * losses).sum().backward()
            optimizer.step()
            with torch.no_grad():
                weights -= 0.1 * weights.grad
            note("weights", weights)

    both(pattern)


# Loss scaling


def test_grad_scaler_in_a_bare_loop(both):
    def pattern(model, optimizer, note):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            scaler.scale(loss).backward()
            note("scaled", gradients_of(model))
            scaler.step(optimizer)
            scaler.update()
            note("scale", scaler.get_scale())
            note("loss", loss.detach())
        note("state", scaler.state_dict())

    both(pattern)


def test_grad_scaler_with_clipping(both):
    def pattern(model, optimizer, note):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(optimizer)
            note("unscaled", gradients_of(model))
            note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.2))
            note("clipped", gradients_of(model))
            scaler.step(optimizer)
            scaler.update()

    both(pattern)


def test_grad_scaler_leaves_out_a_step_with_an_overflow(both):
    def pattern(model, optimizer, note):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 1:
                model.blocks[11].linear.weight.grad[0, 0] = math.inf
            before = model.blocks[0].linear.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            note("scale", scaler.get_scale())
            note("left out", torch.equal(before, model.blocks[0].linear.weight))

    both(pattern)


def test_grad_scaler_leaves_out_a_step_whose_loss_overflowed(both):
    def pattern(model, optimizer, note):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            scaler.scale(loss * 1e38 * 1e38 if step == 1 else loss).backward()
            scaler.unscale_(optimizer)
            note("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            note("scale", scaler.get_scale())

    both(pattern)


def test_grad_scaler_with_several_micro_batches(both):
    def pattern(model, optimizer, note):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
        for step in range(2):
            for micro in range(2):
                scaler.scale(loss_of(model, 2 * step + micro) / 2).backward()
            scaler.unscale_(optimizer)
            note("gradients", gradients_of(model))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    both(pattern)


def test_grad_scaler_that_is_disabled_and_one_that_is_used_twice(both):
    def pattern(model, optimizer, note):
        for enabled in (False, True):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(optimizer)
            if enabled:
                with raises_in_both(RuntimeError, match="already been called"):
                    scaler.step(optimizer)
            scaler.update()

    both(pattern)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_with_an_optimizer_of_ones_own(both, fused):
    def pattern(model, optimizer, note):
        own = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
        for step in range(3):
            own.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 1:
                model.scale.grad[0] = math.nan
            scaler.step(own)
            scaler.update()
            note("scale", scaler.get_scale())
        own.zero_grad()

    both(pattern)


def test_autocast_and_grad_scaler(both):
    def pattern(model, optimizer, note):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, step)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            note("loss", loss.detach())
            note("gradients", gradients_of(model))
            scaler.step(optimizer)
            scaler.update()

    both(pattern)


# Optimizers written by hand


def _sgd_data_add(parameters):
    for parameter in parameters:
        parameter.data.add_(parameter.grad.data, alpha=-0.1)


def _sgd_data_sub(parameters):
    for parameter in parameters:
        parameter.data.sub_(parameter.grad.data * 0.1)


def _sgd_data_assigned(parameters):
    for parameter in parameters:
        parameter.data = parameter.data - 0.1 * parameter.grad


def _sgd_data_augmented(parameters):
    for parameter in parameters:
        parameter.data -= 0.1 * parameter.grad


def _sgd_no_grad(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 0.1 * parameter.grad


def _sgd_no_grad_copy(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter - 0.1 * parameter.grad)


def _sgd_foreach(parameters):
    parameters = list(parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, [parameter.grad for parameter in parameters], alpha=-0.1)


def _sgd_sign(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(parameter.grad.sign(), alpha=-1e-3)


@pytest.mark.parametrize(
    "update",
    [
        _sgd_data_add,
        _sgd_data_sub,
        _sgd_data_assigned,
        _sgd_data_augmented,
        _sgd_no_grad,
        _sgd_no_grad_copy,
        _sgd_foreach,
        _sgd_sign,
    ],
)
def test_gradient_descent_by_hand(both, update):
    def pattern(model, optimizer, note):
        for step in range(3):
            model.zero_grad()
            note("loss", backward(model, step))
            update(model.parameters())
        model.zero_grad()

    both(pattern)


def test_momentum_by_hand(both):
    def pattern(model, optimizer, note):
        velocity = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
        for step in range(3):
            note("loss", backward(model, step))
            with torch.no_grad():
                for parameter in model.parameters():
                    velocity[parameter].mul_(0.9).add_(parameter.grad)
                    parameter.add_(velocity[parameter], alpha=-0.05)
                    parameter.grad.zero_()
        note("velocity", list(velocity.values()))
        model.zero_grad()

    both(pattern)


def test_adam_by_hand(both):
    def pattern(model, optimizer, note):
        first = {name: torch.zeros_like(p.data) for name, p in model.named_parameters()}
        second = {name: torch.zeros_like(p.data) for name, p in model.named_parameters()}
        for step in range(1, 4):
            note("loss", backward(model, step))
            for name, parameter in model.named_parameters():
                gradient = parameter.grad.data
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.99 * second[name] + 0.01 * gradient**2
                corrected = first[name] / (1 - 0.9**step)
                root = (second[name] / (1 - 0.99**step)).sqrt() + 1e-8
                parameter.data.addcdiv_(corrected, root, value=-1e-2)
                parameter.grad = None
        note("second", second)

    both(pattern)


def test_lion_by_hand_with_foreach(both):
    def pattern(model, optimizer, note):
        parameters = list(model.parameters())
        averages = [torch.zeros_like(parameter) for parameter in parameters]
        for step in range(3):
            note("loss", backward(model, step))
            with torch.no_grad():
                gradients = [parameter.grad for parameter in parameters]
                torch._foreach_mul_(parameters, 1 - 1e-3)
                updates = torch._foreach_lerp(averages, gradients, 0.1)
                torch._foreach_sign_(updates)
                torch._foreach_add_(parameters, updates, alpha=-1e-3)
                torch._foreach_lerp_(averages, gradients, 0.01)
            for parameter in parameters:
                parameter.grad = None

    both(pattern)


def test_langevin_dynamics_by_hand(both):
    def pattern(model, optimizer, note):
        source = generator()
        for step in range(3):
            model.zero_grad()
            note("loss", backward(model, step))
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=source)
                parameter.data.add_(-0.05 * parameter.grad.data + 0.01 * noise)
        model.zero_grad()

    both(pattern)


class Lion(torch.optim.Optimizer):
    """An optimizer as people write them: states by parameter, one parameter at a time."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["average"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                update = state["average"].clone().mul_(0.9).add_(p.grad, alpha=0.1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["average"].mul_(0.99).add_(p.grad, alpha=0.01)


# Optimizers of one's own beside the one that was given


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


OWN_OPTIMIZERS = {
    "sgd": _sgd,
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lion": Lion,
}


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_another_torch_optimizer_used_instead(both, name):
    def pattern(model, optimizer, note):
        own = OWN_OPTIMIZERS[name](model.parameters())
        note("losses", train(model, own, 3))
        note("states", [dict(own.state[p]) for p in model.parameters()])

    both(pattern)


def test_another_optimizer_without_zero_grad_adds_up(both):
    def pattern(model, optimizer, note):
        own = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            note("loss", backward(model, step))
            own.step()
            note("gradients", gradients_of(model))
        own.zero_grad(set_to_none=False)
        note("zeros", gradients_of(model))

    both(pattern)


def test_another_optimizer_with_clipping_and_a_scheduler(both):
    def pattern(model, optimizer, note):
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(own, 4)
        for step in range(4):
            own.zero_grad()
            note("loss", backward(model, step))
            note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            own.step()
            scheduler.step()
            note("rate", scheduler.get_last_lr())
        own.zero_grad()

    both(pattern)


def test_another_optimizer_made_before_the_engine(both):
    kept = {}

    def make():
        model = make_tower()
        kept[id(model)] = torch.optim.Adam(model.parameters(), lr=1e-2)
        return model

    def pattern(model, optimizer, note):
        own = kept[id(model)]
        note("losses", train(model, own, 3))
        note("other losses", train(model, optimizer, 2))

    both(pattern, make=make)


def test_another_optimizer_saved_and_loaded(both):
    def pattern(model, optimizer, note):
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, own, 2)
        state = own.state_dict()
        again = torch.optim.AdamW(model.parameters(), lr=1e-3)
        again.load_state_dict(state)
        note("losses", train(model, again, 2, first=2))
        note("state", again.state_dict()["state"])

    both(pattern)


def test_another_optimizer_over_a_part_while_the_given_one_does_nothing(both):
    def pattern(model, optimizer, note):
        own = torch.optim.SGD([*model.blocks[-2:].parameters(), model.scale], lr=0.1, momentum=0.9)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(3):
            model.zero_grad()
            note("loss", backward(model, step))
            own.step()
        model.zero_grad()
        note("moved", [torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)])

    both(pattern)


def test_another_optimizer_with_groups_by_kind_of_parameter(both):
    def pattern(model, optimizer, note):
        decayed = [p for name, p in model.named_parameters() if p.ndim >= 2]
        others = [p for name, p in model.named_parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
        note("losses", train(model, torch.optim.AdamW(groups, lr=1e-2), 3))

    both(pattern)


def test_two_optimizers_one_for_matrices_and_one_for_the_rest(both):
    def pattern(model, optimizer, note):
        matrices = [block.linear.weight for block in model.blocks]
        chosen = set(matrices)
        muon = torch.optim.Muon(matrices, lr=1e-2)
        adam = torch.optim.Adam([p for p in model.parameters() if p not in chosen], lr=1e-2)
        for step in range(2):
            note("loss", backward(model, step))
            for own in (muon, adam):
                own.step()
                own.zero_grad()

    both(pattern)


def test_another_optimizer_and_the_given_one_in_turns(both):
    def pattern(model, optimizer, note):
        own = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(4):
            model.zero_grad()
            note("loss", backward(model, step))
            (own if step % 2 else optimizer).step()

    both(pattern)


def test_another_optimizer_and_the_given_one_with_the_same_gradients(both):
    def pattern(model, optimizer, note):
        own = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            model.zero_grad()
            note("loss", backward(model, step))
            own.step()
            optimizer.step()

    both(pattern)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_as_another_optimizer(both, search):
    def pattern(model, optimizer, note):
        own = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3, line_search_fn=search)

        def closure():
            own.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(2):
            note("loss", own.step(closure).detach())
        own.zero_grad()

    both(pattern)


def test_hooks_of_another_optimizer_and_of_the_given_one_see_gradients(both):
    def pattern(model, optimizer, note):
        own = torch.optim.SGD(model.parameters(), lr=0.05)
        handles = []
        for each in (own, optimizer):

            def clip(which, args, kwargs):
                norm = nn.utils.clip_grad_norm_([p for g in which.param_groups for p in g["params"]], 0.1)
                note("norm", norm)

            handles.append(each.register_step_pre_hook(clip))
        for step in range(3):
            model.zero_grad()
            backward(model, step)
            (own if step == 1 else optimizer).step()
        for handle in handles:
            handle.remove()

    both(pattern)


# Gradients by torch.autograd and torch.func


def test_autograd_grad_of_all_parameters(both):
    def pattern(model, optimizer, note):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model), parameters)
        note("gradients", list(gradients))
        note("none in grad", [parameter.grad is None for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    both(pattern)


def test_autograd_grad_of_some_parameters(both):
    def pattern(model, optimizer, note):
        loss = loss_of(model)
        note("one", list(torch.autograd.grad(loss, model.blocks[12].linear.weight, retain_graph=True)))
        note("embedding", list(torch.autograd.grad(loss, model.embedding.weight, retain_graph=True)))
        note("two", list(torch.autograd.grad(loss, [model.scale, model.blocks[0].norm.bias], retain_graph=True)))
        loss.backward()
        note("all", gradients_of(model))
        optimizer.step()

    both(pattern)


def test_autograd_grad_of_parameters_that_were_not_used(both):
    def pattern(model, optimizer, note):
        parameters = list(model.parameters())
        with raises_in_both(RuntimeError, match="not have been used"):
            torch.autograd.grad(forked_loss(model, fork=0), parameters)
        note("none", list(torch.autograd.grad(forked_loss(model, fork=0), parameters, allow_unused=True)))
        note("zeros", list(torch.autograd.grad(forked_loss(model, fork=1), parameters, materialize_grads=True)))

    both(pattern, make=make_forked, loss=forked_loss)


def test_a_penalty_on_the_norm_of_the_gradient(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            penalty = sum(gradient.pow(2).sum() for gradient in gradients)
            (loss + 0.1 * penalty).backward()
            note("penalty", penalty.detach())
            note("gradients", gradients_of(model))
            optimizer.step()

    both(pattern)


def test_products_of_the_hessian_and_a_vector(both):
    def pattern(model, optimizer, note):
        source = generator()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model), parameters, create_graph=True)
        for _ in range(2):
            vectors = [torch.randint(0, 2, p.shape, generator=source).float() * 2 - 1 for p in parameters]
            products = torch.autograd.grad(gradients, parameters, grad_outputs=vectors, retain_graph=True)
            note("products", list(products))
            note("trace", sum((v * h).sum() for v, h in zip(vectors, products, strict=True)))

    both(pattern)


def test_backward_with_create_graph(both):
    def pattern(model, optimizer, note):
        loss_of(model).backward(create_graph=True)
        note("has a graph", [parameter.grad.requires_grad for parameter in model.parameters()])
        curvature = sum(parameter.grad.pow(2).sum() for parameter in model.parameters())
        gradients = torch.autograd.grad(curvature, list(model.parameters()))
        note("of the gradients", list(gradients))
        for parameter in model.parameters():
            parameter.grad = None

    both(pattern)


def test_backward_for_some_parameters(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            optimizer.zero_grad()
            chosen = [model.scale, *model.blocks[2].parameters()]
            loss_of(model, step).backward(inputs=chosen)
            note("gradients", gradients_of(model))
            optimizer.step()

    both(pattern)


def test_backward_of_a_penalty_on_the_weights_alone(both):
    def pattern(model, optimizer, note):
        sum(parameter.pow(2).sum() for parameter in model.parameters()).backward()
        note("gradients", gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
        model.blocks[3].linear.weight.abs().sum().backward()
        note("one", gradients_of(model))
        optimizer.step()

    both(pattern)


def test_gradients_of_single_samples_by_func(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}

        def loss(parameters, sample):
            logits = torch.func.functional_call(model, (parameters, buffers), (sample.unsqueeze(0),))
            return logits.pow(2).mean()

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, make_ids())
        note("gradients", gradients)

    both(pattern)


def test_gradients_by_func_then_a_step(both):
    def pattern(model, optimizer, note):
        def loss(parameters, ids):
            return torch.func.functional_call(model, parameters, (ids,)).pow(2).mean()

        for step in range(2):
            parameters = dict(model.named_parameters())
            detached = {name: parameter.detach() for name, parameter in parameters.items()}
            gradients, value = torch.func.grad_and_value(loss)(detached, make_ids(step))
            note("value", value)
            for name, parameter in parameters.items():
                parameter.grad = gradients[name]
            optimizer.step()
            optimizer.zero_grad()

    both(pattern)


def test_an_inner_step_that_the_outer_gradient_goes_through(both):
    """MAML."""

    def pattern(model, optimizer, note):
        for step in range(2):
            optimizer.zero_grad()
            parameters = dict(model.named_parameters())
            inner = torch.func.functional_call(model, parameters, (make_ids(step),)).pow(2).mean()
            gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
            fast = {
                name: parameter - 0.1 * gradient
                for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
            }
            outer = torch.func.functional_call(model, fast, (make_ids(10 + step),)).abs().mean()
            outer.backward()
            note("losses", [inner.detach(), outer.detach()])
            note("gradients", gradients_of(model))
            optimizer.step()

    both(pattern)


def test_anomaly_detection(both):
    def pattern(model, optimizer, note):
        with torch.autograd.detect_anomaly(check_nan=True):
            note("losses", train(model, optimizer, 2))

    both(pattern)


# Activation checkpointing


def test_gradients_with_activation_checkpointing(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            optimizer.zero_grad()
            note("loss", backward(model, step))
            note("gradients", gradients_of(model))
            note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.2))
            optimizer.step()
        note("by autograd", list(torch.autograd.grad(loss_of(model), list(model.parameters()))))

    both(pattern, make=make_checkpointed)


def test_another_optimizer_with_activation_checkpointing(both):
    def pattern(model, optimizer, note):
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        note("losses", train(model, own, 3))

    both(pattern, make=make_checkpointed)


# Hooks


def test_hooks_after_accumulation_that_log(both):
    def pattern(model, optimizer, note):
        norms, counts = {}, collections.Counter()

        def log(name):
            def hook(parameter):
                norms[name] = parameter.grad.norm()
                counts[name] += 1

            return hook

        handles = [p.register_post_accumulate_grad_hook(log(name)) for name, p in model.named_parameters()]
        for step in range(2):
            optimizer.zero_grad()
            backward(model, step)
            note("norms", dict(sorted(norms.items())))
            optimizer.step()
        for handle in handles:
            handle.remove()
        train(model, optimizer)
        note("counts", dict(sorted(counts.items())))

    both(pattern)


def test_hooks_after_accumulation_that_change_the_gradient(both):
    def change(parameter):
        parameter.grad.mul_(0.5)

    def replace(parameter):
        parameter.grad = torch.sign(parameter.grad) * 0.01

    def drop(parameter):
        parameter.grad = None

    def pattern(model, optimizer, note):
        model.blocks[0].linear.weight.register_post_accumulate_grad_hook(change)
        model.embedding.weight.register_post_accumulate_grad_hook(change)
        model.blocks[1].linear.weight.register_post_accumulate_grad_hook(replace)
        model.scale.register_post_accumulate_grad_hook(drop)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            note("gradients", gradients_of(model))
            optimizer.step()

    both(pattern)


def test_hooks_on_parameters(both):
    def pattern(model, optimizer, note):
        seen = {}
        handles = [
            model.blocks[2].linear.weight.register_hook(lambda gradient: gradient * 2),
            model.embedding.weight.register_hook(lambda gradient: torch.clamp(gradient, -0.01, 0.01)),
            model.scale.register_hook(lambda gradient: seen.update(scale=gradient.clone())),
            model.norm.bias.register_hook(lambda gradient: torch.zeros_like(gradient)),
        ]
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            note("seen", seen)
            note("gradients", gradients_of(model))
            optimizer.step()
            if step == 1:
                for handle in handles:
                    handle.remove()

    both(pattern)


def test_hooks_on_parameters_registered_before_the_engine(both):
    def triple(parameter):
        parameter.grad.mul_(3)

    def make():
        model = make_tower()
        mask = torch.zeros(24, 1)
        mask[20:] = 1
        model.embedding.weight.register_hook(lambda gradient: gradient * mask)
        model.blocks[0].linear.weight.register_post_accumulate_grad_hook(triple)
        return model

    def pattern(model, optimizer, note):
        for step in range(2):
            optimizer.zero_grad()
            backward(model, step)
            note("gradients", gradients_of(model))
            optimizer.step()

    both(pattern, make=make)


def test_a_hook_when_the_gradients_of_several_parameters_are_there(both):
    def pattern(model, optimizer, note):
        watched = [model.scale, model.blocks[5].linear.weight, model.norm.weight]
        seen = []
        handle = torch.autograd.graph.register_multi_grad_hook(
            watched, lambda gradients: seen.append([gradient.clone() for gradient in gradients])
        )
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        note("seen", seen)

    both(pattern)


def test_module_backward_hooks_that_read_gradients(both):
    def pattern(model, optimizer, note):
        seen = {}

        def hook(module, grad_input, grad_output):
            seen[id(module)] = grad_output[0].norm()

        handles = [block.register_full_backward_hook(hook) for block in model.blocks[:3]]
        for step in range(2):
            optimizer.zero_grad()
            backward(model, step)
            note("seen", [seen[id(block)] for block in model.blocks[:3]])
            note("gradients", gradients_of(model))
            optimizer.step()
        for handle in handles:
            handle.remove()

    both(pattern)


def test_an_optimizer_in_backward(both):
    """As torch's tutorial does it: one optimizer per parameter, in a hook."""

    def pattern(model, optimizer, note):
        optimizers = {p: torch.optim.Adam([p], lr=1e-2, foreach=False) for p in model.parameters()}

        def hook(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
        for step in range(3):
            note("loss", backward(model, step))
            note("none left", [parameter.grad is None for parameter in model.parameters()])
        for handle in handles:
            handle.remove()

    both(pattern)


def test_an_update_in_backward_by_hand(both):
    """As LOMO does it."""

    def hook(parameter):
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.05)
        parameter.grad = None

    def pattern(model, optimizer, note):
        handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
        for step in range(3):
            note("loss", backward(model, step))
        for handle in handles:
            handle.remove()
        note("weights", list(model.parameters()))

    both(pattern)


# Closures, sharpness, information


def test_a_step_with_a_closure(both):
    def pattern(model, optimizer, note):
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.3))
                return loss

            note("loss", optimizer.step(closure).detach())

    both(pattern)


def test_sharpness_aware_minimisation(both):
    def pattern(model, optimizer, note):
        for step in range(3):
            backward(model, step)
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
            note("norm", norm)
            moves = {}
            with torch.no_grad():
                for parameter in model.parameters():
                    moves[parameter] = parameter.grad * (0.05 / (norm + 1e-12))
                    parameter.add_(moves[parameter])
            optimizer.zero_grad()
            note("loss", backward(model, step))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(moves[parameter])
            optimizer.step()
            optimizer.zero_grad()

    both(pattern)


def test_sharpness_aware_minimisation_that_keeps_the_old_weights(both):
    def pattern(model, optimizer, note):
        for step in range(3):
            backward(model, step)
            norm = torch.stack([p.grad.norm(p=2) for p in model.parameters()]).norm(p=2)
            old = {}
            for parameter in model.parameters():
                old[parameter] = parameter.data.clone()
                parameter.data.add_(parameter.grad * (0.05 / (norm + 1e-12)))
            optimizer.zero_grad()
            note("loss", backward(model, step))
            for parameter in model.parameters():
                parameter.data = old[parameter]
            optimizer.step()
            optimizer.zero_grad()

    both(pattern)


def test_fisher_information_and_a_penalty_with_it(both):
    """Elastic weight consolidation."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        fisher = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for batch in range(3):
            model.zero_grad()
            backward(model, batch)
            for name, parameter in model.named_parameters():
                fisher[name] += parameter.grad.detach() ** 2 / 3
        model.zero_grad()
        note("fisher", fisher)
        anchors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

        def loss(model, step):
            drift = sum((fisher[n] * (p - anchors[n]) ** 2).sum() for n, p in model.named_parameters())
            return loss_of(model, step) + 100.0 * drift

        note("losses", train(model, optimizer, 2, first=10, loss=loss))

    both(pattern)


def test_influence_as_products_of_gradients(both):
    def pattern(model, optimizer, note):
        def gradient(step):
            model.zero_grad()
            backward(model, step)
            return [parameter.grad.clone() for parameter in model.parameters()]

        train(model, optimizer, 1)
        tested = gradient(40)
        for step in range(3):
            trained = gradient(step)
            note("influence", sum((a * b).sum() for a, b in zip(tested, trained, strict=True)))
            optimizer.step()

    both(pattern)


# Several models


def test_gradients_of_a_worker_put_into_the_shared_model(both):
    """A3C: workers compute, the shared model steps."""

    def pattern(model, optimizer, note):
        worker = make_tower(seed=5)
        for step in range(3):
            worker.load_state_dict(model.state_dict())
            worker.zero_grad()
            note("loss", backward(worker, step))
            nn.utils.clip_grad_norm_(worker.parameters(), 0.3)
            for local, shared in zip(worker.parameters(), model.parameters(), strict=True):
                shared._grad = local.grad
            note("gradients", gradients_of(model))
            optimizer.step()

    both(pattern)


def test_gradients_of_the_model_given_to_another(both):
    def pattern(model, optimizer, note):
        student = make_tower(seed=5)
        own = torch.optim.SGD(student.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            backward(model, step)
            for theirs, ours in zip(student.parameters(), model.parameters(), strict=True):
                theirs.grad = ours.grad
            own.step()
            optimizer.step()
            note("student", list(student.parameters()))

    both(pattern)


def test_gradients_averaged_over_two_models(both):
    def pattern(model, optimizer, note):
        other = copy_of(model)
        own = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(2):
            for each in (model, other):
                each.zero_grad()
            backward(model, 2 * step)
            backward(other, 2 * step + 1)
            for left, right in zip(model.parameters(), other.parameters(), strict=True):
                mean = (left.grad + right.grad) / 2
                left.grad.copy_(mean)
                right.grad.copy_(mean)
            optimizer.step()
            own.step()
        note("other", list(other.parameters()))

    both(pattern)


# The stock Trainer


def _train_with_stock_trainer(both, tmp_path, pass_optimizer=False, **kwargs):
    """Losses, norms and weights of the stock Trainer, on a plain model and on one with an engine attached by hand."""
    from trainers import LossRecorder, arguments, assert_same_weights, make_model, make_rows, tight
    from transformers import Trainer, TrainingArguments

    runs = []
    for attached in (False, True):
        model = make_model("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if attached and both.config is not None:
            config = dict(both.config)
            if "chunk_budget" in config:
                config.update(chunk_numel="auto", **tight("gpt2"))
                config["chunk_budget"] *= (
                    4 if kwargs.get("gradient_checkpointing") else 1
                )  # a block is recomputed whole
            optimizer = PatrickStarEngine(model, config, optimizer).optimizer
        recorder = LossRecorder()
        trainer = Trainer(
            model=model,
            args=arguments(TrainingArguments, tmp_path / str(attached), max_steps=3, **kwargs),
            train_dataset=make_rows("gpt2", 32),
            callbacks=[recorder],
            **({"optimizers": (optimizer, None)} if pass_optimizer else {}),
        )
        torch.manual_seed(11)
        trainer.train()
        runs.append((model, recorder))
    (plain, expected), (ours, actual) = runs
    assert len(expected.losses) == 3
    assert expected.losses == actual.losses
    assert expected.norms == actual.norms
    assert_same_weights(plain, ours)
    assert not torch.equal(plain.lm_head.weight, make_model("gpt2").lm_head.weight)


def test_stock_trainer_with_its_own_optimizer(both, tmp_path):
    _train_with_stock_trainer(both, tmp_path)


def test_stock_trainer_with_several_micro_batches_and_little_clipping(both, tmp_path):
    _train_with_stock_trainer(both, tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.05)


def test_stock_trainer_with_activation_checkpointing(both, tmp_path):
    _train_with_stock_trainer(both, tmp_path, gradient_checkpointing=True)


def test_stock_trainer_with_the_optimizer_that_was_given(both, tmp_path):
    _train_with_stock_trainer(both, tmp_path, pass_optimizer=True)


def test_stock_trainer_with_adafactor_and_without_clipping(both, tmp_path):
    _train_with_stock_trainer(both, tmp_path, optim="adafactor", max_grad_norm=0.0)
