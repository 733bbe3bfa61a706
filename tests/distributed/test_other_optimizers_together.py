"""Optimizers other than Adam in several processes, which update their parts beside the next forward: the same bits."""

import pytest
import torch
import torch.distributed as dist
from support.together import (
    alone,
    copy_state,
    differences,
    engaged,
    hf_loss,
    on_one_rank,
    prepared,
    train_alone,
    train_as_alone,
    train_together,
)
from transformers.optimization import Adafactor

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import ConfigError

OPTIMIZERS = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=False),
}


class Rotation:
    """As the projectors of GaLore are: an object with a tensor."""

    def __init__(self, matrix):
        self.matrix = matrix


def train_with(rank, name):
    assert dist.get_world_size() == 2
    expected = on_one_rank(lambda: alone(lambda: prepared("gpt2"), hf_loss("gpt2"), 2, OPTIMIZERS[name], steps=4))
    model = prepared("gpt2")
    config = {"placement": "host", "chunk_budget": 130_000}
    with engaged(model, config, optimizer=OPTIMIZERS[name](model)) as engine:
        train_as_alone(engine, expected, hf_loss("gpt2"), steps=4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_one_process(pair, name):
    with pair.over("simulated:1"):
        pair.run(train_with, name)


class Frugal(torch.optim.Optimizer):
    """Adam of a projection of the gradient, with one scale per row.

    Its ``exp_avg`` is smaller than the parameter, its ``exp_avg_sq`` has one dimension, and the count of steps is under
    a name. Each parameter has an object if ``projects``.
    """

    def __init__(self, params, lr=1e-2, projects=False):
        super().__init__(params, {"lr": lr})
        self.projects = projects
        self.state["total"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.state["total"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[None])

    def update(self, parameter, gradient):
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = gradient.new_zeros(gradient.shape[0], 2)
            state["exp_avg_sq"] = gradient.new_zeros(gradient.shape[0])
            if self.projects:
                generator = torch.Generator().manual_seed(gradient.shape[1])
                state["rotation"] = Rotation(torch.randn(gradient.shape[1], 2, generator=generator))
        matrix = state["rotation"].matrix if self.projects else torch.ones(gradient.shape[1], 2)
        state["exp_avg"].lerp_(gradient @ matrix, 0.1)
        state["exp_avg_sq"].lerp_(gradient.square().mean(1), 1 - 0.9 ** self.state["total"])
        change = (state["exp_avg"] @ matrix.T) / (state["exp_avg_sq"].sqrt()[:, None] + 1e-3)
        parameter.sub_(change.view_as(parameter), alpha=self.param_groups[0]["lr"])


def frugal_reference(projects):
    model = prepared("gpt2")
    optimizer, losses = Frugal(model.parameters(), 1e-3, projects=projects), []
    for first, steps in ((0, 2), (2, 1)):
        losses += train_alone(model, hf_loss("gpt2"), 2, steps, optimizer=optimizer, first=first)[1]
    return copy_state(model), optimizer.state_dict()["state"], losses


def train_frugally(rank, projects):
    values, states, losses = on_one_rank(frugal_reference, projects)
    model = prepared("gpt2")
    optimizer = Frugal(model.parameters(), 1e-3, projects=projects)
    with engaged(model, {"chunk_budget": 130_000}, optimizer=optimizer) as engine:
        found, _ = train_together(engine, hf_loss("gpt2"), 2)
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        more, _ = train_together(engine, hf_loss("gpt2"), 1, first=2)
        assert found + more == losses[rank::2]
        assert differences(values, model.state_dict()) == {}
        kept = engine.optimizer.state_dict()["state"]
    assert kept.keys() == states.keys()
    assert kept["total"] == 3
    for number in kept.keys() - {"total"}:
        assert torch.equal(kept[number]["exp_avg"], states[number]["exp_avg"])
        assert torch.equal(kept[number]["exp_avg_sq"], states[number]["exp_avg_sq"])
        assert not projects or torch.equal(kept[number]["rotation"].matrix, states[number]["rotation"].matrix)


@pytest.mark.parametrize("projects", [False, True], ids=["rows", "objects"])
def test_states_of_any_shape(pair, projects):
    pair.run(train_frugally, projects)


def refuse(rank):
    model = prepared("gpt2")
    with pytest.raises(ConfigError, match="LBFGS computes with all parameters together, and with several processes"):
        PatrickStarEngine(model, {}, torch.optim.LBFGS(model.parameters()), device="cpu")


def test_an_optimizer_that_needs_all_parameters_is_refused(pair):
    pair.run(refuse)
