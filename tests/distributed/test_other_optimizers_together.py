"""Optimizers other than Adam in several processes, which update their parts beside the next forward: the same bits."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from together import (
    copy_state,
    differences,
    engaged,
    hf_loss,
    on_one_rank,
    prepared,
    train_alone,
    train_together,
)
from transformers.optimization import Adafactor

from hf_patrickstar.optim.torch_kernel import TorchKernel

pytestmark = pytest.mark.xdist_group("distributed")

OPTIMIZERS = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=False),
}


def reference(name, steps):
    model = prepared("gpt2")
    optimizer, losses, _ = train_alone(model, hf_loss("gpt2"), 2, steps, optimizer=OPTIMIZERS[name](model))
    return copy_state(model), optimizer.state_dict()["state"], losses


def as_tensors(state):
    """Adafactor counts in ordinary numbers."""
    return {key: torch.as_tensor(value) for key, value in state.items()}


def train_with(rank, name, settings, steps=4):
    assert dist.get_world_size() == 2
    values, states, losses = on_one_rank(reference, name, steps)
    num_beside, may_run_beside = 0, TorchKernel.may_run_beside

    def counted(self, chunks):
        nonlocal num_beside
        may = may_run_beside(self, chunks)
        num_beside += may
        return may

    model = prepared("gpt2")
    config = {"placement": "host", "chunk_budget": 130_000, **settings}
    with (
        mock.patch.object(TorchKernel, "may_run_beside", counted),
        engaged(model, config, optimizer=OPTIMIZERS[name](model)) as engine,
    ):
        found, _ = train_together(engine, hf_loss("gpt2"), steps)
        assert found == losses[rank::2]
        assert differences(values, model.state_dict()) == {}
        kept = engine.optimizer.state_dict()["state"]
        for number, state in states.items():
            assert differences(*(as_tensors(which) for which in (state, kept[number]))) == {}, number
    return num_beside


@pytest.mark.parametrize("overlap", [True, "backward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_one_process(pair, name, overlap):
    with pair.over("simulated:1"):
        for num_beside in pair.run(train_with, name, {"overlap_optimizer": overlap}):
            assert num_beside > 0


def test_on_the_threads_of_the_cpu_tier_nothing_is_beside(pair):
    assert pair.run(train_with, "momentum", {}) == [0, 0]
