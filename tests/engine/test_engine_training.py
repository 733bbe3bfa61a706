"""Losses, values, gradients and states are those of plain torch, to the last bit, whatever moves when."""

import pytest
import torch
from support.pairs import Pair
from support.small import WIDTH, Stack, Tied, loss_of, tokens
from support.streams import delayed_streams, simulated_streams
from torch import nn


@pytest.mark.parametrize(
    ("factory", "dtype", "accumulation"), [(Stack, "fp32", 1), (Stack, "bf16", 2), (Tied, "fp32", 2), (Tied, "bf16", 1)]
)
def test_training_has_the_bits_of_torch(factory, dtype, accumulation, budget):
    pair = Pair(factory, budget, dtype=dtype, gradient_accumulation_steps=accumulation)
    pair.train(4, micro=accumulation)
    stats = pair.engine.stats()
    assert (stats["chunk_loads"] > 0) is pair.moves
    assert stats["diverged_steps"] == 0
    assert stats["steps"] == 4


@pytest.mark.parametrize(("dtype", "micro"), [("fp32", 3), ("bf16", 2)])
def test_any_number_of_micro_batches_whatever_was_announced(dtype, micro, budget):
    pair = Pair(Stack, budget, dtype=dtype)
    pair.train(2)
    pair.train(2, first=2, micro=micro)
    pair.train(2, first=4)


@pytest.mark.parametrize(
    ("streams", "dtype", "micro"),
    [(simulated_streams, "fp32", 1), (delayed_streams, "bf16", 1), (simulated_streams, "bf16", 2)],
)
@pytest.mark.own_streams
def test_copies_updates_and_clipping_beside_computation_change_no_bit(streams, dtype, micro):
    with streams():
        pair = Pair(Tied, "moving", dtype=dtype, gradient_accumulation_steps=micro)
        pair.train(4, micro=micro, max_norms=(0.5,))
        pair.engine.detach()


def test_evaluations_before_between_and_inside_of_steps_change_nothing(budget):
    pair = Pair(Tied, budget)

    def evaluate(model):
        results = []
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                results.append(model.eval()(tokens(7)).clone())
        model.train()
        return results

    def run(model, optimizer):
        results = evaluate(model)
        for step in range(3):
            loss = loss_of(model, step)
            results += evaluate(model)
            loss.backward()
            results += evaluate(model)
            optimizer.step()
            results += evaluate(model)
            optimizer.zero_grad()
            results.append(loss.detach().clone())
        return results

    pair.check(run)


def test_one_parameter_larger_than_a_chunk_and_parameters_without_dimensions_or_elements(budget):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.large = nn.Linear(40, WIDTH)
            self.scalar = nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.wide = nn.Parameter(torch.randn(2, 3, WIDTH))

        def forward(self, x):
            return self.large(torch.cat([x, x, x[:, :8]], 1)) * self.scalar + self.wide.sum((0, 1)) + self.empty.sum()

    pair = Pair(Odd, budget, settings={"chunks": 6})
    pair.train(3)


def test_random_numbers_are_drawn_as_without_an_engine(budget):
    def factory():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))

    pair = Pair(factory, budget)
    pair.both(lambda model, _: torch.rand(3))
    pair.train(3)
    pair.both(lambda model, _: (loss_of(model).detach().clone(), torch.rand(3)))


def test_buffers_are_updated_once_in_each_forward(budget):
    def factory():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))

    Pair(factory, budget).train(3)


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
