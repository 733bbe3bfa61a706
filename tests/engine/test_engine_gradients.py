"""The way of a gradient: over its value, beside it, later, dropped, kept, put there by a user; always that of torch."""

import gc
import weakref

import pytest
import torch
from engine.small import (
    DTYPES,
    WIDTH,
    Pair,
    Stack,
    Tied,
    adamw,
    batch,
    copied,
    loss_of,
    sgd,
    values_of,
)
from torch import nn

from hf_patrickstar import BudgetError, EngineError

SITUATIONS = ("resident", "moving")


def step_of(model, optimizer, seed=0):
    loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("factory", [Stack, Tied])
def test_gradients_are_read_between_backward_and_step(factory, budget):
    pair = Pair(factory, budget)
    for step in range(3):
        pair.backward(step)
        pair.check_gradients()
        pair.check_gradients()
        pair.check()
        pair.both(lambda model, optimizer: optimizer.step())
        pair.both(lambda model, optimizer: optimizer.zero_grad())
        pair.check()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sums_of_several_backwards_are_read_and_stepped_with(accumulation, budget):
    pair = Pair(Tied, budget, gradient_accumulation_steps=accumulation)
    for step in range(2):
        for part in range(3):
            pair.backward(3 * step + part)
            pair.check_gradients()
        pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
        pair.check()


@pytest.mark.parametrize("micro", [1, 2])
def test_gradients_in_16_bits_and_their_sums_in_32(micro, budget):
    pair = Pair(Stack, budget, dtype="bf16")
    for part in range(micro):
        pair.backward(part)
    for parameter, master in zip(pair.ours.parameters(), pair.plain_optimizer.masters, strict=True):
        assert parameter.grad.dtype == (torch.bfloat16 if micro == 1 else torch.float32)
        assert torch.equal(parameter.grad.float(), master.grad)
        assert not parameter.isnan().any()
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_value_is_there_while_a_gradient_has_its_place(dtype, budget):
    pair = Pair(Stack, budget, dtype=dtype)
    pair.train(1)
    before = values_of(pair.ours)
    rounded = [copied(parameter) for parameter in pair.ours.parameters()]
    pair.backward(1)
    with torch.no_grad():
        pair.both(lambda model, _: model(batch(7).to(model.layers[0].weight.dtype)))
    for parameter, value in zip(pair.ours.parameters(), rounded, strict=True):
        assert torch.equal(parameter.detach(), value)
    after = values_of(pair.ours)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


@pytest.mark.parametrize(("dtype", "how"), [("fp32", "optimizer"), ("bf16", "model"), ("fp32", "none")])
def test_dropped_gradients_leave_no_trace(dtype, how, budget):
    pair = Pair(Stack, budget, dtype=dtype)
    pair.train(1)
    before = values_of(pair.ours)
    pair.backward(5)

    def drop(model, optimizer):
        optimizer.zero_grad()
        if how == "model":
            model.zero_grad()
        elif how == "none":
            for parameter in model.parameters():
                parameter.grad = None
        return [parameter.grad for parameter in model.parameters()]

    if how == "optimizer":
        pair.both(drop)
    else:
        for parameter in pair.ours.parameters():
            assert parameter.grad is not None
        pair.both(drop)
    after = values_of(pair.ours)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    pair.both(lambda model, optimizer: optimizer.step())
    pair.check()
    pair.train(2, first=1)


def test_zeroing_in_place_leaves_zeros(budget):
    pair = Pair(Tied, budget)

    def run(model, optimizer):
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        found = [copied(parameter.grad) for parameter in model.parameters()]
        optimizer.step()  # momentum goes on; what has no gradient stays
        return found

    pair.both(run)
    pair.check()
    pair.both(lambda model, _: model.zero_grad(set_to_none=False))
    pair.train(2, first=3)


@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_parameters_without_a_gradient_are_left_alone(make_optimizer, budget):
    pair = Pair(Tied, budget, make_optimizer)
    before = values_of(pair.ours)
    pair.train(3)
    after = values_of(pair.ours)
    assert pair.ours.unused.weight.grad is None
    for name in ("unused.weight", "unused.bias"):
        assert torch.equal(before[name], after[name])
    numbers = {id(parameter): number for number, parameter in enumerate(pair.ours.parameters())}
    assert numbers[id(pair.ours.unused.weight)] not in pair.optimizer.state_dict()["state"]


def test_a_value_that_backward_still_needs_when_its_gradient_is_complete(budget):
    """A second use of the weight, through a detached alias, whose backward comes after that of the first."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.randn(WIDTH))
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

        def forward(self, x):
            x = torch.tanh(nn.functional.linear(x, self.weight.detach())) + self.shift
            return nn.functional.linear(x, self.weight)

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(WIDTH, WIDTH), Twice(), Twice()

        def forward(self, x):
            return self.third(self.second(self.first(x)))

    pair = Pair(Late, budget)
    for step in range(4):
        pair.backward(step)
        pair.check_gradients()
        pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
        pair.check()
    assert pair.engine.stats()["model_data_nbytes"] == 3 * (WIDTH * WIDTH + WIDTH) * 16, "no list of gradients"
    Pair(Late, budget).train(4)
    Pair(Late, budget, dtype="bf16").train(3)


def test_sparse_gradients_of_an_embedding(budget):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, WIDTH, sparse=True)

        def forward(self, x):
            return self.embedding(x[0].argsort())  # each row once

    pair = Pair(Sparse, budget, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    pair.train(3)


# After a step


def test_without_zero_grad_a_loop_accumulates_as_in_torch(budget):
    """Gradients stay until they are zeroed for the first time."""
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        found = []
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            found += [copied(parameter.grad) for parameter in model.parameters()]
        return found

    pair.both(run)
    pair.check()


def test_a_consumed_gradient_is_an_error_and_never_a_wrong_number(budget):
    pair = Pair(Stack, budget)
    pair.train(2)
    loss_of(pair.ours, 2).backward()
    pair.optimizer.step()
    before = values_of(pair.ours)
    match = r"gradient of parameter 'layers\.0\.weight' was consumed by optimizer\.step\(\).*zero_grad.*keep_gradients"
    with pytest.raises(EngineError, match=match):
        copied(pair.ours.layers[0].weight.grad)
    loss_of(pair.ours, 3).backward()
    with pytest.raises(EngineError, match="consumed"):
        pair.optimizer.step()
    with pytest.raises(EngineError, match="consumed"):
        pair.optimizer.clip_grad_norm_(None, 1.0)
    after = values_of(pair.ours)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    pair.optimizer.zero_grad()
    assert pair.ours.layers[0].weight.grad is None
    step_of(pair.plain, pair.plain_optimizer, 2)
    pair.train(2, first=3)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_gradients_stay_for_readers_and_for_the_next_backward(dtype, accumulation, budget):
    settings = {"keep_gradients": True}
    pair = Pair(Stack, budget, dtype=dtype, settings=settings, gradient_accumulation_steps=accumulation)
    pair.train(2, micro=accumulation)

    def run(model, optimizer):
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()

    pair.both(run)
    pair.check()
    if dtype == "fp32":
        pair.check_gradients()
    else:
        for parameter, master in zip(pair.ours.parameters(), pair.plain_optimizer.masters, strict=True):
            assert torch.equal(parameter.grad.float(), master.grad)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_without_keeping_every_step_begins_with_new_gradients(accumulation, budget):
    settings = {"keep_gradients": False}
    pair = Pair(Stack, budget, settings=settings, gradient_accumulation_steps=accumulation)
    for step in range(3):
        for part in range(accumulation):
            pair.backward(10 * step + part)
        pair.both(lambda model, optimizer: optimizer.step())
        pair.plain_optimizer.zero_grad()
        pair.check()


def test_whoever_reads_gradients_after_a_step_finds_them_from_then_on(budget):
    """What somebody has read after the first step is kept, though ``zero_grad`` is called."""
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        found = []
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            found += [copied(parameter.grad) for parameter in model.parameters()]
            optimizer.zero_grad()
        return found

    pair.both(run)
    pair.check()


def test_a_gradient_that_somebody_holds_over_the_step_stays(budget):
    pair = Pair(Stack, budget)
    pair.train(2)

    def run(model, optimizer):
        loss_of(model, 5).backward()
        held = model.layers[1].weight.grad
        optimizer.step()
        found = [copied(held)]
        held.mul_(2)
        found.append(copied(model.layers[1].weight.grad))
        return found

    pair.both(run)
    pair.both(lambda model, optimizer: optimizer.zero_grad())
    pair.train(1, first=6)


@pytest.mark.parametrize("what", ["read", "value", "drop", "more", "evaluation"])
def test_the_last_of_several_gradients_waits_for_the_step_or_for_whoever_comes_first(what, budget):
    """In 16 bits the update may add it to the sum; whatever comes before finds the sum, and the value."""
    pair = Pair(Stack, budget, dtype="bf16", gradient_accumulation_steps=2)
    pair.train(2, micro=2)
    for part in range(2):
        pair.backward(20 + part)
    if what == "read":
        for parameter, master in zip(pair.ours.parameters(), pair.plain_optimizer.masters, strict=True):
            assert torch.equal(parameter.grad, master.grad)
    elif what == "value":
        pair.check()
    elif what == "drop":
        pair.both(lambda model, optimizer: optimizer.zero_grad())
        pair.check()
    elif what == "more":
        pair.backward(22)
    else:
        with torch.no_grad():
            pair.both(lambda model, _: model(batch().bfloat16()).clone())
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()
    pair.train(1, first=3, micro=2)


# What users do with them


def test_gradients_put_by_users_are_stepped_with(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        for step in range(2):
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(loss_of(model, step), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            found = [copied(parameter.grad) for parameter in parameters]
            optimizer.step()
            optimizer.zero_grad()
        model.layers[0].weight.grad = torch.ones(WIDTH, WIDTH)
        loss_of(model, 3).backward()
        model.layers[1].bias.grad = torch.full((WIDTH,), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        return found

    pair.both(run)
    pair.check()


@pytest.mark.parametrize("write", ["mul", "copy", "zero", "data", "add"])
def test_writes_to_gradients_count(write, budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        for step in range(2):
            loss_of(model, step).backward()
            for parameter in model.parameters():
                gradient = parameter.grad
                if write == "mul":
                    gradient.mul_(0.5)
                elif write == "copy":
                    gradient.copy_(torch.ones_like(gradient))
                elif write == "zero":
                    gradient.zero_()
                elif write == "data":
                    gradient.data[..., 0] = 3.0
                else:
                    gradient += 1
            optimizer.step()
            optimizer.zero_grad()

    pair.both(run)
    pair.check()


def test_a_gradient_that_is_held_follows_the_next_backward(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        loss_of(model, 0).backward()
        held = [parameter.grad for parameter in model.parameters()]
        loss_of(model, 1).backward()
        found = [copied(gradient) for gradient in held]
        held[0].mul_(3)
        loss_of(model, 2).backward()
        return found + [copied(gradient) for gradient in held]

    pair.both(run)
    pair.check_gradients()
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


def test_gradients_given_up_by_everybody_are_freed(budget):
    pair = Pair(Stack, budget)
    pair.train(2)
    loss_of(pair.ours, 2).backward()
    held = pair.ours.layers[0].weight.grad
    assert held.numel() == WIDTH * WIDTH
    reference = weakref.ref(held)
    del held
    pair.optimizer.step()
    gc.collect()
    assert reference() is None


def test_penalties_on_gradients_and_double_backward(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        for step in range(2):
            x = batch(step).requires_grad_()
            out = model(x).square().sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            (out + slope.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            out = model(batch(step)).square().sum()
            gradients = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
            sum(gradient.square().sum() for gradient in gradients).backward()
            optimizer.step()
            optimizer.zero_grad()

    pair.both(run)
    pair.check()


def test_backward_with_create_graph_leaves_recorded_gradients(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        loss_of(model, 0).backward(create_graph=True)
        penalty = sum(parameter.grad.square().sum() for parameter in model.parameters())
        penalty.backward()
        found = [copied(parameter.grad) for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        return found

    pair.both(run)
    pair.train(2)


def test_retained_graphs_go_backward_again(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        found = [copied(parameter.grad) for parameter in model.parameters()]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    pair.both(run)
    pair.check()


def test_backward_into_some_inputs_alone(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        chosen = [model.layers[1].weight, model.layers[3].bias]
        loss_of(model, 0).backward(inputs=chosen)
        found = [copied(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return found

    pair.both(run)
    pair.check()


def test_a_frozen_parameter_that_is_unfrozen_has_its_first_gradient(budget):
    pair = Pair(Stack, budget, sgd, prepare=lambda model: model.layers[2].requires_grad_(False))
    pair.train(2)
    for _, optimizer in pair:
        optimizer.add_param_group({"params": trainable_of(optimizer, pair)})
    for model, _ in pair:
        model.layers[2].requires_grad_(True)
    pair.train(2, first=2)


def trainable_of(optimizer, pair):
    model = pair.ours if optimizer is pair.optimizer else pair.plain
    return list(model.layers[2].parameters())


# Bytes


def test_without_room_for_sums_a_gradient_is_not_lost():
    pair = Pair(Stack, "moving", settings={"host_budget": 5 * 320 * 16 + 64})
    loss_of(pair.plain, 0).backward()
    loss_of(pair.ours, 0).backward()
    with pytest.raises(BudgetError, match="'grad'"):
        loss_of(pair.ours, 1)
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()
    pair.train(2, first=1)


def test_zeros_that_are_read_between_forward_and_backward(budget):
    """They get a place in the chunk then, where the value is that backward needs."""
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        for step in range(3):
            loss = loss_of(model, step)
            found = [copied(parameter.grad) for parameter in model.parameters()]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return found

    pair.both(run)
    pair.check()


def test_a_gradient_that_is_held_is_zeroed_in_place(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        loss_of(model, 0).backward()
        held = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad(set_to_none=False)
        zeros = [copied(gradient) for gradient in held]
        loss_of(model, 1).backward()
        optimizer.step()
        return zeros, [copied(parameter.grad) for parameter in model.parameters()]

    pair.both(run)
    pair.check()
