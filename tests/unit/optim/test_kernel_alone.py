"""Functions that all kernels use."""

import pytest
import torch

from hf_patrickstar.optim.kernel import place_state
from hf_patrickstar.optim.torch_kernel import is_one_by_one


@pytest.mark.parametrize(
    ("key", "value", "group", "device"),
    [
        ("exp_avg", torch.zeros(2), {}, "meta"),
        ("step", torch.tensor(1.0), {"fused": None, "capturable": False}, "cpu"),
        ("step", torch.tensor(1.0), {"fused": True}, "meta"),
        ("step", torch.tensor(1.0), {"capturable": True}, "meta"),
        ("step", torch.zeros(2), {}, "cpu"),
        ("mu", torch.tensor(1.0), {"fused": True}, "cpu"),
    ],
)
def test_states_are_copied_to_where_torch_has_them(key, value, group, device):
    assert place_state({key: value}, torch.device("meta"), group)[key].device.type == device
    before = value.clone()
    place_state({key: value}, torch.device("cpu"), group)[key].add_(1)
    assert torch.equal(value, before)


class OwnSGD(torch.optim.SGD):
    """Nobody knows what it does."""


@pytest.mark.parametrize(
    ("cls", "is_known"),
    [
        *((torch.optim.AdamW, True), (torch.optim.SGD, True), (torch.optim.Adafactor, True)),
        *((torch.optim.LBFGS, False), (OwnSGD, False)),
    ],
)
def test_which_optimizers_look_at_parameters_one_by_one(cls, is_known):
    assert is_one_by_one(cls([torch.nn.Parameter(torch.zeros(2))], lr=0.1)) is is_known
