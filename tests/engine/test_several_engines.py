"""Models that become parts of one another, each trained in chunks at some time: the bits are those of plain torch."""

import gc

import pytest
import torch
from support.pairs import config_of
from support.same import assert_same, values_of
from support.small import Stack, adamw, batch, make, trainable
from torch import nn

from hf_patrickstar import get_engine, initialize_engine


class Around(nn.Module):
    """A model with another one as a part."""

    def __init__(self, inner):
        super().__init__()
        self.before, self.inner, self.after = Stack(2), inner, Stack(1)

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


def steps(model, *optimizers):
    losses = []
    for seed in range(2):
        loss = model(batch(seed)).square().sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def frozen_part(prepare):
    inner = make(lambda: Stack(3))
    losses = steps(inner, prepare(inner))
    around = Around(inner.requires_grad_(False))
    return losses + steps(around, prepare(around)), around


def part_whose_optimizer_goes_on(prepare):
    inner = make(lambda: Stack(3))
    of_inner = prepare(inner)
    losses = steps(inner, of_inner)
    around = Around(inner.requires_grad_(False))
    of_around = prepare(around)
    inner.requires_grad_(True)
    return losses + steps(around, of_around, of_inner), around


def part_that_is_trained_on(prepare):
    inner = make(lambda: Stack(3))
    losses = steps(inner, prepare(inner))
    gc.collect()
    around = Around(inner)
    return losses + steps(around, prepare(around)), around


def part_that_leaves(prepare):
    around = Around(make(lambda: Stack(3)))
    losses = steps(around, prepare(around))
    return losses + steps(around.inner, prepare(around.inner)), around


def shared_part(prepare):
    """Frozen layers that two models have, neither of which is a part of the other: the first keeps its engine."""
    inner = make(lambda: Stack(3)).requires_grad_(False)
    one, other = Around(inner), Around(inner)
    of_one, of_other = prepare(one), prepare(other)
    losses = steps(one, of_one) + steps(other, of_other) + steps(one, of_one)
    assert hasattr(one, "patrickstar_engine") == hasattr(other, "patrickstar_engine")
    return losses, nn.ModuleList([one, other])


def again(prepare):
    model = make(lambda: Stack(3))
    first = prepare(model)
    losses = steps(model, first)
    model(batch()).square().sum().backward()  # a gradient that no step has used
    losses += steps(model, prepare(model))
    return losses, model


@pytest.mark.parametrize("budget", ["resident", "evicting"])
@pytest.mark.parametrize(
    "case",
    [frozen_part, part_whose_optimizer_goes_on, part_that_is_trained_on, part_that_leaves, shared_part, again],
)
def test_a_model_that_was_trained_is_used_by_another_one(case, budget):
    def in_chunks(model):
        return initialize_engine(lambda: model, config_of(budget), adamw, device="cpu")[1]

    torch.manual_seed(0)
    expected, plain = case(lambda model: adamw(trainable(model)))
    torch.manual_seed(0)
    found, ours = case(in_chunks)
    assert_same(expected, found)
    assert_same(values_of(plain), values_of(ours))


def test_an_optimizer_goes_on_after_its_engine_is_detached():
    """As torch's own: with its states, the norm of clipping, and the gradients that no step has used."""
    plain, ours = make(lambda: Stack(3)), make(lambda: Stack(3))
    ours, optimizer = initialize_engine(lambda: ours, config_of("evicting"), adamw, device="cpu")
    twin = adamw(trainable(plain))
    assert_same(steps(plain, twin), steps(ours, optimizer))
    get_engine(ours).detach()
    assert_same(steps(plain, twin), steps(ours, optimizer))
    assert_same(values_of(plain), values_of(ours))
    assert_same(twin.state_dict()["state"], optimizer.state_dict()["state"])
