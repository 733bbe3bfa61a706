"""What all kernels have in common, and which one there is for an optimizer."""

import pytest
import torch
from unit.optim.updates import PlainKernel, add_lists, give, make_parts
from unit.runtime.data_parts import CPU

from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.adam_kernel import AdamKernel
from hf_patrickstar.optim.kernel import WORKSPACE, in_batches, place_state, raw_step
from hf_patrickstar.optim.kernels import is_one_by_one, make_kernel
from hf_patrickstar.optim.torch_kernel import TorchKernel


def one_parameter():
    return torch.nn.Parameter(torch.zeros(2))


# Batches


def batches(parts, batch_numel):
    return [[chunk.spec.index for chunk in batch] for batch in in_batches(parts.chunks, batch_numel)]


def test_chunks_come_together_up_to_a_number_of_elements():
    parts = make_parts((4,), (4,), (4,), (4,), (4,))
    assert batches(parts, 8) == [[0, 1], [2, 3], [4]]
    assert batches(parts, 11) == [[0, 1], [2, 3], [4]]
    assert batches(parts, 12) == [[0, 1, 2], [3, 4]]


def test_none_comes_with_others_if_batches_have_no_elements():
    assert batches(make_parts((4,), (4,)), 0) == [[0], [1]]


def test_one_that_is_too_large_comes_alone_and_the_order_stays():
    parts = make_parts((2,), (2,), (100,), (2,), (2,))
    assert batches(parts, 4) == [[0, 1], [2], [3, 4]]


def test_what_a_batch_has_is_counted_anew_after_each():
    parts = make_parts((3,), (3,), (1,), (3,))
    assert batches(parts, 4) == [[0], [1, 2], [3]]


def test_chunks_of_two_tiers_do_not_come_together():
    parts = make_parts()
    for home in (Tier.HOST, Tier.HOST, Tier.DEVICE, Tier.HOST):
        parts.add_chunk(4, home=home)
    assert batches(parts, 100) == [[0, 1], [2], [3]]


def test_of_a_chunk_the_elements_that_this_rank_has_count():
    parts = make_parts((4,), (4,), chunk_numel=16)
    assert batches(parts, 8) == [[0], [1]]


def test_of_none_there_is_no_batch():
    assert list(in_batches([], 8)) == []


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


# What a kernel need not say itself


def make(*chunks, **settings):
    parts = make_parts(*(chunks or [(4, 2)]), **settings)
    add_lists(parts, "last")
    parts.optimizer = torch.optim.SGD([tensor.parameter for tensor in parts.tensors], lr=1.0)
    parts.kernel = PlainKernel(parts.optimizer, parts)
    return parts


def test_nothing_is_lent_and_nothing_changed():
    parts = make()
    with parts.kernel.lent(parts.tensors) as changed:
        assert parts.optimizer.param_groups[0]["params"][0] is parts.tensors[0].parameter
    assert changed == []


def test_it_cannot_update_all_at_once():
    parts = make()
    with pytest.raises(NotImplementedError):
        parts.kernel.update_at_once(parts.tensors, lambda is_all: None, lambda tensor: None, None)


def test_the_kernel_says_how_much_scratch_space_the_largest_chunk_needs():
    parts = make((4, 2), (3,))
    parts.add_chunk(50, trainable=False)
    parts.kernel.reserve(parts.chunks)
    assert parts.ledger.owners(Tier.HOST)[WORKSPACE] == 4 * 12
    parts.kernel.release()
    parts.kernel.reserve([parts.chunks[1]])
    assert parts.ledger.owners(Tier.HOST)[WORKSPACE] == 4 * 6


def test_a_copy_of_a_state_is_taken_apart_from_its_place():
    parts = make()
    give(parts, t0=3)
    parts.kernel.update(parts.chunks, {0: 0}, None)
    copy = parts.kernel.tensor_state(parts.tensors[0])
    assert (copy["count"], copy["last"].tolist()) == (1, [3.0] * 4)
    copy["last"].fill_(9)
    assert parts.kernel.own_state(parts.tensors[0])["last"].tolist() == [3.0] * 4


def test_a_state_goes_to_its_places_and_the_rest_to_the_kernel():
    parts = make()
    parts.kernel.load_tensor_state(parts.tensors[1], {"count": 5, "last": torch.tensor([1.0, 2.0])})
    assert parts.kernel.counts == {1: 5}
    assert parts.chunks[0].lists["last"].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 2.0]
    parts.kernel.load_tensor_state(parts.tensors[1], {})
    assert parts.kernel.counts == {}


# Which kernel there is


class OwnSGD(torch.optim.SGD):
    """Nobody knows what it does."""


@pytest.mark.parametrize(
    ("cls", "kernel", "at_once"),
    [
        (torch.optim.AdamW, AdamKernel, False),
        (torch.optim.Adam, AdamKernel, False),
        (torch.optim.SGD, TorchKernel, False),
        (torch.optim.Adafactor, TorchKernel, False),
        (torch.optim.LBFGS, TorchKernel, True),
        (OwnSGD, TorchKernel, True),
    ],
)
def test_there_is_a_kernel_for_each_optimizer(cls, kernel, at_once):
    parts = make_parts()
    optimizer = cls([one_parameter()], lr=0.1)
    found = make_kernel(optimizer, parts.pool, prefer_fused=False)
    assert (type(found), found.updates_at_once) == (kernel, at_once)
    assert is_one_by_one(optimizer) is not at_once


def test_adam_with_further_lists_is_an_optimizer_like_others():
    optimizer = torch.optim.AdamW([one_parameter()], amsgrad=True)
    assert type(make_kernel(optimizer, make_parts().pool, prefer_fused=False)) is TorchKernel
