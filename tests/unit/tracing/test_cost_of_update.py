"""What an update by an optimizer of torch costs: bytes of its operators and of its states."""

import pytest
import torch

from hf_patrickstar.tracing.fake import FakeTensors
from hf_patrickstar.tracing.updates import UpdateCost, cost_of_update


def cost(make_optimizer) -> UpdateCost:
    with FakeTensors():
        return cost_of_update(make_optimizer([torch.nn.Parameter(torch.zeros(4, 4))]))


def test_sgd_reads_values_gradients_and_momenta_and_writes_values_and_momenta():
    """Parameter and gradient are read and the parameter written; of momenta the same, and a product in place."""
    plain = cost(lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False))
    assert (plain.nbytes, plain.state_nbytes) == (12.0, 0.0)
    momenta = cost(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False))
    assert (momenta.nbytes, momenta.state_nbytes) == (32.0, 4.0)


@pytest.mark.parametrize("name", ["Adagrad", "RMSprop", "Adamax", "Rprop"])
def test_every_operator_of_an_update_counts(name):
    """At least the parameter and its gradient are read, and the parameter is written."""
    assert cost(lambda parameters: getattr(torch.optim, name)(parameters)).nbytes >= 12.0
