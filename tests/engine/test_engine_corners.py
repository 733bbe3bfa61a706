"""What is easily missed: larger copies, old idioms, odd calls of the model."""

import dataclasses
import threading
import time

import pytest
import torch
from engine.small import DTYPES, WIDTH, Pair, Stack, Tied, batch, copied, loss_of, values_of
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_patrickstar import EngineError

SITUATIONS = ("resident", "moving")

# Training


def test_copies_that_are_too_large_to_be_made_at_once():
    """A thread brings them ahead; whoever computes waits until they have arrived."""

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(320, 320) for _ in range(5))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def loss(model, seed):
        return model(torch.randn(2, 320, generator=torch.Generator().manual_seed(seed))).square().sum()

    pair = Pair(Large, "moving", settings={"numel": 102_784, "chunks": 3})
    pair.train(4, loss=loss)
    assert pair.engine.stats()["prefetches"] > 0
    pair.engine.detach()


# Gradients


def test_gradients_that_are_zeroed_in_a_loop_by_hand(budget):
    """As old code does it: consumed gradients may be zeroed, detached and assigned, but not read."""
    pair = Pair(Stack, budget)
    pair.train(1)

    def run(model, optimizer):
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        return [copied(parameter.grad) for parameter in model.parameters()]

    pair.both(run)
    pair.both(lambda model, optimizer: optimizer.zero_grad())
    pair.train(1, first=4)


def test_a_consumed_gradient_that_is_written_back_changes_nothing(budget):
    pair = Pair(Stack, budget)
    pair.train(2)
    pair.backward(2)
    pair.both(lambda model, optimizer: optimizer.step())
    for parameter in pair.ours.parameters():
        parameter.grad = parameter.grad
    with pytest.raises(EngineError, match="consumed"):
        pair.ours.layers[1].bias.grad.sum()
    pair.both(lambda model, optimizer: optimizer.zero_grad())
    pair.train(1, first=3)


@pytest.mark.parametrize("wide", [False, True])
def test_gradients_put_in_16_bits_or_in_32(wide, budget):
    pair = Pair(Stack, budget, dtype="bf16")
    gradients = [torch.randn_like(parameter).bfloat16() * 1.01 for parameter in pair.plain.parameters()]
    gradients = [gradient.float() * (1 + 2**-10) if wide else gradient for gradient in gradients]
    for parameter, master, gradient in zip(
        pair.ours.parameters(), pair.plain_optimizer.masters, gradients, strict=True
    ):
        master.grad = gradient.float()
        parameter.grad = gradient.clone()
        assert torch.equal(parameter.grad.float(), gradient.float())
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


def test_a_gradient_of_a_frozen_parameter_is_the_users_own(budget):
    pair = Pair(Stack, budget, prepare=lambda model: model.layers[0].requires_grad_(False))

    def run(model, optimizer):
        model.layers[0].bias.grad = torch.ones(WIDTH)
        loss_of(model).backward()
        optimizer.step()
        found = copied(model.layers[0].bias.grad)
        model.layers[0].bias.grad = None
        return found

    pair.both(run)
    pair.check()


def test_memory_of_a_gradient_is_exchanged(budget):
    pair = Pair(Stack, budget)

    def run(model, optimizer):
        loss_of(model).backward()
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 2
        found = [copied(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return found

    pair.both(run)
    pair.check()


# Live parameters


def test_bits_that_compare_equal_or_to_nothing_are_taken_over(budget):
    pair = Pair(Stack, budget)

    def run(model, _):
        view = model.layers[0].bias.data
        view.zero_()
        model.layers[0].bias.sum().item()
        view[3] = -0.0
        other = model.layers[1].bias.data
        other[2] = float("nan")
        model.layers[2].bias.data[1] = float("inf")

    pair.both(run)
    found, expected = pair.ours.state_dict(), pair.plain.state_dict()
    assert torch.equal(found["layers.0.bias"].signbit(), expected["layers.0.bias"].signbit())
    assert torch.equal(found["layers.1.bias"].isnan(), expected["layers.1.bias"].isnan())
    with torch.no_grad():
        pair.both(lambda model, _: model(batch()).clone())


def test_functions_applied_to_modules(budget):
    pair = Pair(Stack, budget)
    pair.train(1)
    pair.backward(1)

    def halve(module):
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(0.5)
            nn.init.constant_(module.bias, 0.25)

    def run(model, _):
        model.apply(halve)
        model._apply(lambda tensor: tensor * 2)

    pair.both(run)
    pair.check_gradients()
    pair.check()
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


def test_a_parameter_made_of_another_one_is_ordinary(budget):
    pair = Pair(Stack, budget)

    def run(model, _):
        made = nn.Parameter(model.layers[0].weight)
        (made * 2).sum().backward()
        return type(made) is nn.Parameter or None, copied(made), copied(made.grad)

    pair.both(run)
    pair.train(2)


def test_a_write_to_one_parameter_of_a_chunk_is_none_to_its_neighbours(budget):
    """They share one memory, and so torch's count of writes to it."""
    pair = Pair(Stack, budget)

    def run(model, _):
        loss = loss_of(model)
        with torch.no_grad():
            model.layers[2].bias.add_(1)  # nothing needs it in backward
        loss.backward()
        return [copied(parameter.grad) for parameter in model.parameters()]

    pair.both(run)
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


# Odd models and calls


class Recursive(Stack):
    """Calls itself, reads its inputs from a dictionary or a dataclass, and is called while an error is handled."""

    def forward(self, x, depth=1):
        if isinstance(x, dict):
            x = x["x"]
        elif dataclasses.is_dataclass(x):
            x = x.x
        x = super().forward(x)
        return self(x, depth=depth - 1) if depth else x


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor


def test_odd_calls_of_the_model(budget):
    def loss(model, seed):
        x = batch(seed)
        try:
            raise LookupError
        except LookupError:
            out = model(({"x": x}, Inputs(x), x)[seed % 3])
        return out.square().sum()

    pair = Pair(Recursive, budget)
    pair.train(6, loss=loss)


@pytest.mark.own_streams
def test_nothing_watches_the_operators_of_the_user_between_steps():
    pair = Pair(Stack, "resident", settings={"device_budget": 14000})
    for step in range(3):
        pair.backward(step)
        pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
        assert not _get_current_dispatch_mode_stack()
        with torch.no_grad():
            pair.both(lambda model, _: model(batch()).clone())
        assert not _get_current_dispatch_mode_stack()
    pair.check()


def test_an_embedding_with_a_scale_is_computed_with_on_the_device():
    class Scaled(nn.Embedding):
        def __init__(self, *args):
            super().__init__(*args)
            self.register_buffer("factor", torch.tensor(3.0))

        def forward(self, ids):
            return super().forward(ids) * self.factor

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layer = Scaled(20, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, ids):
            return self.layer(self.embedding(ids))

    def loss(model, seed):
        return model(torch.arange(5) + seed % 10).square().sum()

    Pair(Model, "moving", settings={"cpu_embedding": True, "chunks": 3}).train(3, loss=loss)


# Optimizers


def test_an_error_in_an_update_names_parameters_and_leaves_them(budget):
    pair = Pair(Stack, budget)
    pair.train(1)
    before = values_of(pair.ours)
    loss_of(pair.ours, 1).backward()
    rate, pair.optimizer.param_groups[0]["lr"] = pair.optimizer.param_groups[0]["lr"], None
    with pytest.raises(TypeError) as caught:
        pair.optimizer.step()
    assert "layers.0.weight" in " ".join(caught.value.__notes__)
    pair.optimizer.param_groups[0]["lr"] = rate
    after = values_of(pair.ours)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    pair.optimizer.zero_grad()
    pair.train(2, first=1)


def test_the_step_counts_of_parameters_that_are_updated_in_turn(budget):
    pair = Pair(Stack, budget)

    def loss(model, seed):
        x = batch(seed)
        for number, layer in enumerate(model.layers):
            if number != seed // 10 % 5:
                x = torch.tanh(layer(x))
        return x.square().sum()

    pair.train(7, loss=loss)
    steps = {int(state["step"]) for state in pair.optimizer.state_dict()["state"].values()}
    assert len(steps) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_small_parameters_of_odd_lengths(dtype, budget):
    """Places begin at multiples of 64 elements, and vectors of the processor end elsewhere."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in (1, 2, 3, 63, 64, 65, 7, 128, 31))

        def forward(self, x):
            return x.sum() * sum(part.square().sum() for part in self.parts)

    pair = Pair(Small, budget, dtype=dtype, settings={"numel": 256, "chunks": 6})
    pair.train(4, loss=lambda model, seed: model(batch(seed).to(next(model.parameters()).dtype)).float())


# Threads


def test_a_thread_that_computes_all_the_time_does_not_keep_others_out():
    pair = Pair(Tied, "moving")
    has_ended, errors = threading.Event(), []

    @torch.no_grad()
    def compute():
        try:
            while not has_ended.is_set():
                pair.ours(torch.arange(6)[None])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=compute, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    try:
        for step in range(3):
            pair.both(lambda model, optimizer, step=step: loss_of(model, step).backward())
            pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    finally:
        has_ended.set()
        for thread in threads:
            thread.join(30)
    assert not errors
    assert time.monotonic() - begin < 30
    pair.check()
