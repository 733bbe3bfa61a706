"""Functions that all kernels use."""

import pytest
import torch

from hf_patrickstar.optim.kernel import place_state, raw_step
from hf_patrickstar.optim.torch_kernel import is_one_by_one

CPU = torch.device("cpu")


def one_parameter():
    return torch.nn.Parameter(torch.zeros(2))


# Steps and states


def test_a_raw_step_calls_no_hooks():
    parameter = one_parameter()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    told = []
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    parameter.grad = torch.ones(2)
    raw_step(optimizer)()
    assert (told, parameter.tolist()) == ([], [-1.0, -1.0])
    optimizer.step()
    assert told == ["before", "after"]


def test_a_raw_step_is_that_of_the_class_even_if_the_optimizer_was_given_another():
    parameter = one_parameter()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.step = lambda: pytest.fail("the one that a scheduler has put there")
    parameter.grad = torch.ones(2)
    assert raw_step(optimizer)(lambda: "loss") == "loss"
    assert parameter.tolist() == [-1.0, -1.0]


def test_a_state_that_is_no_tensor_is_left_as_it_is():
    given = [1]
    assert place_state("what", given, CPU, {}) is given
    assert place_state("step", 3, CPU, {}) == 3


@pytest.mark.parametrize(
    ("key", "value", "group", "device"),
    [
        ("exp_avg", torch.zeros(2), {}, "meta"),
        ("step", torch.tensor(1.0), {}, "cpu"),
        ("step", torch.tensor(1.0), {"fused": None, "capturable": False}, "cpu"),
        ("step", torch.tensor(1.0), {"fused": True}, "meta"),
        ("step", torch.tensor(1.0), {"capturable": True}, "meta"),
        ("step", torch.zeros(2), {}, "cpu"),
        ("mu", torch.tensor(1.0), {"fused": True}, "cpu"),
    ],
)
def test_states_go_where_torch_has_them(key, value, group, device):
    assert place_state(key, value, torch.device("meta"), group).device.type == device


def test_what_is_placed_is_a_copy():
    for key, value in (("exp_avg", torch.zeros(2)), ("step", torch.tensor(0.0))):
        place_state(key, value, CPU, {}).add_(1)
        assert not value.any()


class OwnSGD(torch.optim.SGD):
    """Nobody knows what it does."""


@pytest.mark.parametrize(
    ("cls", "is_known"),
    [
        *((torch.optim.AdamW, True), (torch.optim.Adam, True), (torch.optim.SGD, True), (torch.optim.Adafactor, True)),
        *((torch.optim.LBFGS, False), (OwnSGD, False)),
    ],
)
def test_which_optimizers_look_at_parameters_one_by_one(cls, is_known):
    assert is_one_by_one(cls([one_parameter()], lr=0.1)) is is_known
