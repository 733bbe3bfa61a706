"""What an update by an optimizer of torch costs per element."""

import pytest
import torch

from hf_patrickstar.tracing.answers import AnsweringMode
from hf_patrickstar.tracing.costs import cost_of_update
from hf_patrickstar.tracing.fake import FakeTensors


def cost(optimizer, **settings):
    with FakeTensors(), AnsweringMode():
        parameter = torch.nn.Parameter(torch.zeros(10, 10, device="cpu"))
        return cost_of_update(optimizer([parameter], lr=0.1, foreach=False, **settings))


@pytest.mark.parametrize(
    ("settings", "nbytes", "state_nbytes"),
    [({}, 12, 0), ({"momentum": 0.9}, 8 + 12 + 12, 4)],
    ids=["the gradient is read, the value read and written", "the momentum is scaled, added to, and added"],
)
def test_bytes_are_those_that_operators_read_and_write(settings, nbytes, state_nbytes):
    found = cost(torch.optim.SGD, **settings)
    assert (found.nbytes, found.state_nbytes) == (nbytes, state_nbytes)


@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"])
def test_the_cost_of_every_optimizer_of_torch_is_found(name):
    """At least the parameter and its gradient are read, and the parameter is written."""
    assert cost(getattr(torch.optim, name)).nbytes >= 12


def test_what_an_operator_returns_takes_memory_for_a_moment():
    assert cost(torch.optim.SGD).temporary_nbytes == 0
    assert cost(torch.optim.Adagrad).temporary_nbytes == 4, "the root of the sum"
