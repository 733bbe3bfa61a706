"""Functions that all kernels use."""

import pytest
import torch

from hf_patrickstar.optim.kernel import place_state, raw_step
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
    assert place_state(key, value, torch.device("meta"), group).device.type == device
    before = value.clone()
    place_state(key, value, torch.device("cpu"), group).add_(1)
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


def test_a_raw_step_is_that_of_the_class_and_calls_no_hooks():
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook"))
    optimizer.step = lambda: pytest.fail("the one that a scheduler has put there")
    parameter.grad = torch.ones(2)
    assert raw_step(optimizer)(lambda: "loss") == "loss"
    assert parameter.tolist() == [-1.0, -1.0]
