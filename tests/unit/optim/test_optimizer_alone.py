"""The optimizer that users see, over small chunks and a kernel that subtracts gradients."""

import collections
import contextlib
import copy
import dataclasses
import logging
import pickle
import types
import warnings
from unittest import mock

import pytest
import torch
from unit.optim.updates import PlainKernel, add_lists, firsts, give, make_parts, masters, values
from unit.runtime.parts import Fake

from hf_patrickstar.errors import EngineError
from hf_patrickstar.events import StepFinished
from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.optim.state import StateView
from hf_patrickstar.runtime.gradient_place import GradientPlace

NONE, LIST, CONSUMED = GradientPlace.NONE, GradientPlace.LIST, GradientPlace.CONSUMED
ZERO, INCOMPLETE = GradientPlace.ZERO, GradientPlace.INCOMPLETE


class Users(torch.optim.Optimizer):
    """What a user has: it has no step that anybody may call, but a method and an attribute of its own."""

    def __init__(self, params, **defaults):
        super().__init__(params, {"lr": 1.0, **defaults})
        self.mood = "calm"

    def step(self, closure=None):
        raise AssertionError("the kernel calls it, if anybody does")

    def first(self, word, *, times=1):
        """A method that looks at the groups."""
        return word * times, self.param_groups[0]["params"][0]


def make(*chunks, groups=None, others=0, owners=(), **options):
    """Parts and an optimizer over chunks of parameters.

    Args:
        *chunks: Numbers of elements of the tensors of each chunk.
        groups: Indices of the tensors of each param group; by default one of all.
        others: How many parameters in no chunk are in the last group.
        owners: The number of the optimizer of each chunk; by default this one, 0.
        **options: For the optimizer.
    """
    parts = make_parts(*(chunks or [(2, 2)]))
    add_lists(parts, "last")
    for chunk, owner in zip(parts.chunks, owners, strict=False):
        chunk.spec = dataclasses.replace(chunk.spec, optimizer_index=owner)
    indices = [[tensor.spec.index for tensor in parts.tensors]] if groups is None else groups
    parts.outside = [torch.nn.Parameter(torch.full((2,), 100.0)) for _ in range(others)]
    members = [[parts.tensors[index].parameter for index in group] for group in indices]
    members[-1] += parts.outside
    parts.inner = Users([{"params": params} for params in members])
    parts.kernel = PlainKernel(parts.inner, parts)
    parts.emitted = []
    parts.optimizer = ChunkedOptimizer(parts.inner, parts.kernel, parts.manager, parts.emitted.append, **options)
    return parts


def updates(parts):
    """What the kernel was told to update since the last call: chunks, groups and coefficient."""
    found = [told for told in parts.kernel.told if isinstance(told, tuple) and isinstance(told[0], list)]
    parts.kernel.told.clear()
    return found


def told_of_others(parts):
    return [[id(parameter) for parameter in told[1]] for told in parts.kernel.told if told[0] == "others"]


def places(parts):
    return [tensor.gradient for tensor in parts.tensors]


# A step


def test_a_step_updates_the_parameters_that_have_gradients():
    parts = make((2, 2), (2,))
    give(parts, t0=3, t2=4)
    assert parts.optimizer.step() is None
    assert firsts(masters(parts)) == firsts(values(parts)) == [-3.0, 16.0, 28.0]
    assert parts.emitted == [StepFinished(1, skipped=False)]


def test_the_kernel_is_told_of_each_batch_between_the_begin_and_the_end():
    parts = make((2, 2), (2,), groups=[[0, 2], [1]])
    parts.optimizer.step()
    assert parts.kernel.told == ["begin", ([0], {0: 0, 2: 0, 1: 1}, None), ([1], {0: 0, 2: 0, 1: 1}, None), "end"]


def test_small_chunks_come_together():
    parts = make((2,), (2,), (2,))
    parts.kernel.batch_numel = 4
    parts.optimizer.step()
    assert [chunks for chunks, _, _ in updates(parts)] == [[0, 1], [2]]


def test_each_step_has_a_number():
    parts = make()
    for _ in range(2):
        parts.optimizer.step()
    parts.optimizer.skip_step()
    assert parts.emitted == [
        StepFinished(1, skipped=False),
        StepFinished(2, skipped=False),
        StepFinished(2, skipped=True),
    ]


@pytest.mark.parametrize("runs_beside", [True, False])
def test_what_happens_in_a_step_in_order(runs_beside):
    """Everything below is stood in for."""
    parts = make((2, 2), groups=[[0]])
    told = []

    def fake(*silent, **answers):
        return Fake(told, *silent, **answers)

    gradients = fake("check_complete", "make_ready", "move_to_list", has=False, take_factor=None, try_to_keep=True)
    gradients.has_factor, gradients.must_keep, gradients.lock = False, True, contextlib.nullcontext()
    phases = fake(
        "settle_failures",
        *("update_begin", "before_update", "leave_alone", "update", "chunk_updated", "update_end"),
    )
    phases.turns = fake(taken=contextlib.nullcontext())
    kernel = fake("begin_step", "end_step", prepare="update", may_run_beside=runs_beside)
    kernel.batch_numel, kernel.updates_at_once, kernel.runs_beside = 0, False, runs_beside
    kernel.list_names = ("master",)
    manager = types.SimpleNamespace(
        tensors=parts.tensors,
        chunks=parts.chunks,
        in_order_of_use=parts.chunks,
        find=parts.manager.find,
        gradients=gradients,
        phases=phases,
        parameters=fake("release_held_outside_forward"),
        writes=fake("sync", "take_over"),
        has_new_groups=False,
    )
    follow = fake(model=True).model
    optimizer = ChunkedOptimizer(parts.inner, kernel, manager, lambda event: told.append(("emit", event)), 0, follow)
    told.clear()
    optimizer.step()
    first, second = parts.tensors
    (chunk,) = parts.chunks
    assert told == [
        ("taken", "optimizer.step()"),
        ("model",),
        ("settle_failures",),
        ("release_held_outside_forward",),
        ("sync",),
        ("take_over", first),
        ("check_complete", first),
        ("take_factor",),
        ("begin_step",),
        ("update_begin", [chunk], 0),
        ("try_to_keep", [chunk]),
        ("before_update", chunk),
        ("make_ready", first),
        ("make_ready", second),
        ("leave_alone", second, None),
        ("prepare", [chunk], {0: 0}, None, True),
        ("may_run_beside", [chunk]),
        ("update", [chunk], "update", runs_beside),
        ("chunk_updated", chunk, {0: 0}, True),
        ("update_end",),
        ("emit", StepFinished(1, skipped=False)),
        ("end_step",),
    ]


def test_gradients_stay_until_they_were_zeroed_for_the_first_time():
    parts = make()
    give(parts, t0=3)
    parts.optimizer.step()
    assert places(parts) == [LIST, NONE]
    parts.optimizer.zero_grad()
    give(parts, t0=3)
    parts.optimizer.step()
    assert places(parts) == [CONSUMED, NONE]


def test_a_gradient_that_is_not_whole_is_an_error_and_nothing_has_changed():
    parts = make()
    give(parts, t0=3)
    parts.tensors[1].gradient = INCOMPLETE
    with pytest.raises(EngineError, match="'t1' was consumed"):
        parts.optimizer.step()
    assert firsts(masters(parts)) == [0.0, 16.0]
    assert (parts.kernel.told, parts.emitted) == ([], [])


def test_a_step_without_a_gradient_is_a_step():
    parts = make()
    parts.optimizer.step()
    assert firsts(values(parts)) == [0.0, 16.0]
    assert parts.emitted == [StepFinished(1, skipped=False)]


def test_gradients_are_not_recorded_but_in_a_closure():
    parts = make()
    found = []

    def closure():
        found.append(torch.is_grad_enabled())
        give(parts, t0=3)
        return "loss"

    parts.kernel.begin_step = lambda: found.append(torch.is_grad_enabled())
    assert parts.optimizer.step(closure) == "loss"
    assert found == [True, False]
    assert firsts(masters(parts)) == [-3.0, 16.0]


def test_hooks_of_either_optimizer_are_called_once():
    parts = make((2,), (2,))
    told = []
    parts.inner.register_step_pre_hook(lambda optimizer, *_: told.append(optimizer))
    parts.optimizer.register_step_post_hook(lambda optimizer, *_: told.append(optimizer))
    parts.optimizer.step()
    assert [optimizer is parts.optimizer for optimizer in told] == [True, True]


def test_schedulers_made_on_the_users_optimizer_work():
    parts = make()
    scheduler = torch.optim.lr_scheduler.StepLR(parts.inner, 1, gamma=0.5)
    parts.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert parts.optimizer.param_groups[0]["lr"] == 0.5


# An optimizer that needs all at once


def at_once(*chunks, result="loss", **settings):
    """Parts whose kernel runs the user's optimizer on all masters, and what that was told."""
    parts = make(*chunks, **settings)
    parts.kernel.updates_at_once = True
    parts.told = []

    def update_at_once(tensors, present, follow, closure):
        before = [tensor.gradient for tensor in tensors]
        parts.told.append((tensors, before, present(True), [tensor.gradient for tensor in tensors], closure))
        return result

    parts.kernel.update_at_once = update_at_once
    return parts


def test_all_gradients_are_made_ready_in_fp32_and_the_chunks_come_after():
    parts = at_once()
    give(parts, t0=3)
    parts.manager.gradients.coefficient = torch.tensor(0.5)
    assert parts.optimizer.step() == "loss"
    assert parts.told == [(parts.tensors, [GradientPlace.PARAM, NONE], torch.tensor(0.5), [LIST, NONE], None)]
    assert updates(parts) == [([0], {0: 0, 1: 0}, None)], "what it was told to multiply with counts once"


def test_its_closure_is_handed_on():
    parts = at_once()

    def closure():
        raise AssertionError("the kernel calls it")

    parts.optimizer.step(closure)
    assert parts.told[0][-1] is closure


def test_what_a_closure_computes_anew_need_not_be_whole_before():
    parts = at_once()
    parts.tensors[0].gradient = INCOMPLETE
    parts.kernel.update_at_once = lambda *_: "loss"
    assert parts.optimizer.step(lambda: None) == "loss"
    with pytest.raises(EngineError):
        parts.optimizer.step()


def test_it_updates_parameters_outside_of_chunks_itself():
    parts = at_once(others=1)
    parts.optimizer.step()
    assert told_of_others(parts) == []


# Groups


def test_groups_defaults_and_hooks_are_those_of_the_users_optimizer():
    parts = make()
    assert parts.optimizer.param_groups is parts.inner.param_groups
    assert parts.optimizer.param_groups[0]["params"] is parts.inner.param_groups[0]["params"]
    assert parts.optimizer.defaults is parts.inner.defaults


def test_a_parameter_that_has_changed_groups_is_updated_with_the_new_one():
    parts = make(groups=[[0, 1], []])
    first, second = (group["params"] for group in parts.inner.param_groups)
    second.append(first.pop())
    parts.optimizer.step()
    assert updates(parts) == [([0], {0: 0, 1: 1}, None)]


def test_a_parameter_that_is_in_no_group_keeps_its_value_and_its_gradient():
    parts = make(groups=[[0]])
    give(parts, t0=3, t1=4)
    parts.manager.gradients.coefficient = torch.tensor(0.5)
    parts.optimizer.step()
    assert firsts(values(parts)) == [-1.5, 16.0]
    assert parts.tensors[1].gradient is LIST
    assert firsts([parts.gradients.of(parts.tensors[1])]) == [2.0], "clipped like the others"


def test_the_engine_follows_the_model_before_a_step():
    calls = []

    def follow():
        calls.append(len(calls))
        if len(calls) == 1:
            del parts.inner.param_groups[0]["params"][1]
            return True
        return False

    parts = make(follow_model=follow)
    for _ in range(2):
        parts.optimizer.step()
    assert [groups for _, groups, _ in updates(parts)] == [{0: 0}, {0: 0}]
    assert calls == [0, 1]


def test_a_group_that_is_added_is_the_users_optimizers_and_noted():
    parts = make(groups=[[0]])
    assert not parts.manager.has_new_groups
    parts.optimizer.add_param_group({"params": [parts.tensors[1].parameter], "lr": 0.25})
    assert [group["lr"] for group in parts.inner.param_groups] == [1.0, 0.25]
    assert parts.manager.has_new_groups
    parts.optimizer.step()
    assert updates(parts) == [([0], {0: 0, 1: 1}, None)]


def test_a_parameter_of_a_group_that_no_optimizer_updates_needs_another_chunk():
    parts = make((2,), (2,), groups=[[0]], owners=(0, -1))
    parts.optimizer.step()
    assert not parts.manager.has_new_groups
    parts.inner.param_groups[0]["params"].append(parts.tensors[1].parameter)
    parts.optimizer.step()
    assert parts.manager.has_new_groups
    assert [(chunks, groups) for chunks, groups, _ in updates(parts)] == [([0], {0: 0})] * 2


def test_chunks_of_another_optimizer_are_left_alone():
    parts = make((2,), (2,), groups=[[1]], owners=(0, 1), index=1)
    give(parts, t0=3, t1=4)
    parts.optimizer.step()
    assert firsts(masters(parts)) == [0.0, 12.0]
    assert parts.tensors[0].gradient is GradientPlace.PARAM


def test_what_is_to_be_multiplied_reaches_gradients_of_another_optimizer_too():
    parts = make((2,), (2,), groups=[[0]], owners=(0, 1))
    give(parts, t0=4, t1=4)
    parts.manager.gradients.coefficient = torch.tensor(0.5)
    parts.optimizer.step()
    assert updates(parts) == [([0], {0: 0}, None)]
    assert firsts(masters(parts)) == [-2.0, 16.0]
    assert firsts([parts.gradients.of(parts.tensors[1])]) == [2.0]


def test_a_gradient_that_another_optimizer_may_need_stays():
    peers = []
    parts = make(peers=peers)
    peers += [parts.optimizer, Users([parts.tensors[1].parameter])]
    parts.optimizer.zero_grad()
    give(parts, t0=3, t1=3)
    parts.optimizer.step()
    assert places(parts) == [LIST, LIST]


def test_a_peer_with_other_parameters_needs_none():
    peers = []
    parts = make((2,), (2,), groups=[[0]], owners=(0, 1), peers=peers)
    peers += [parts.optimizer, Users([parts.tensors[1].parameter])]
    parts.optimizer.zero_grad()
    give(parts, t0=3)
    parts.optimizer.step()
    assert places(parts) == [CONSUMED, NONE]


# Parameters in no chunk


def test_parameters_in_no_chunk_are_updated_by_the_users_optimizer():
    parts = make(others=2)
    parts.optimizer.step()
    assert told_of_others(parts) == [[id(parameter) for parameter in parts.outside]]


def test_if_all_are_in_chunks_it_is_not_asked():
    parts = make()
    parts.optimizer.step()
    assert told_of_others(parts) == []


def test_parameters_in_chunks_of_another_optimizer_are_among_them():
    parts = make((2,), (2,), owners=(0, 1))
    parts.optimizer.step()
    assert told_of_others(parts) == [[id(parts.tensors[1].parameter)]]


# Zeroing and skipping


def test_zeroing_drops_the_gradients_in_its_groups():
    parts = make(groups=[[0]], others=1)
    give(parts, t0=3, t1=4)
    parts.outside[0].grad = torch.ones(2)
    parts.optimizer.zero_grad()
    assert (places(parts), firsts(values(parts))) == ([NONE, GradientPlace.PARAM], [0.0, 4.0])
    assert parts.outside[0].grad is None


def test_zeroing_in_place_keeps_those_that_are_there():
    parts = make(others=1)
    give(parts, t0=3)
    grad = parts.outside[0].grad = torch.ones(2)
    parts.optimizer.zero_grad(set_to_none=False)
    assert places(parts) == [ZERO, NONE]
    assert (parts.outside[0].grad is grad, grad.tolist()) == (True, [0.0, 0.0])
    parts.optimizer.step()
    assert parts.kernel.counts == {0: 1}, "the next step still updates it"


def test_a_step_that_is_skipped_drops_gradients_and_keeps_values():
    parts = make(others=1)
    give(parts, t0=3, t1=4)
    parts.outside[0].grad = torch.ones(2)
    parts.manager.gradients.inverse_scale = torch.tensor(0.5)
    parts.optimizer.skip_step()
    assert (places(parts), firsts(values(parts))) == ([NONE, NONE], [0.0, 16.0])
    assert parts.outside[0].grad is None
    assert not parts.manager.gradients.has_factor
    assert (parts.kernel.told, parts.emitted) == ([], [StepFinished(0, skipped=True)])


def test_a_step_that_is_skipped_drops_no_gradients_of_another_optimizer():
    parts = make((2,), (2,), groups=[[0]], owners=(0, 1))
    give(parts, t0=3, t1=4)
    parts.optimizer.skip_step()
    assert places(parts) == [NONE, GradientPlace.PARAM]


# Norm, clipping and unscaling; see ``test_clipping_alone.py``


def test_the_norm_is_that_of_all_gradients_in_chunks_and_groups():
    parts = make((1, 1), (1,), groups=[[0]], others=1)
    give(parts, t0=2, t1=4, t2=5)
    parts.outside[0].grad = torch.full((2,), 6.0)
    assert parts.optimizer.grad_norm().item() == pytest.approx((4 + 16 + 25 + 72) ** 0.5)
    assert parts.optimizer.grad_norm(norm_type=float("inf")).item() == 6.0


def test_the_norm_of_some_has_each_once():
    parts = make((1, 1), others=1)
    give(parts, t0=3, t1=7)
    parts.outside[0].grad = torch.tensor([4.0, 0.0])
    first = parts.tensors[0].parameter
    assert parts.optimizer.grad_norm([first, first, parts.outside[0]]).item() == 5.0


def test_clipping_is_left_to_the_step_that_reads_the_gradients():
    parts = make((1, 1))
    give(parts, t0=3, t1=4)
    assert parts.optimizer.clip_grad_norm_(None, 2.5).item() == 5.0
    assert firsts(values(parts)) == [3.0, 4.0]
    parts.optimizer.step()
    assert firsts(masters(parts)) == pytest.approx([-1.5, 14.0], abs=1e-5)
    give(parts, t0=3)
    parts.optimizer.zero_grad()
    give(parts, t0=1)
    parts.optimizer.step()
    assert [factor for _, _, factor in updates(parts)] == [pytest.approx(0.5), None], "it holds for one step"


def test_elements_are_clipped_at_once():
    parts = make((1, 1), others=1)
    give(parts, t0=3, t1=-4)
    parts.outside[0].grad = torch.tensor([7.0, 1.0])
    parts.optimizer.clip_grad_value_(2)
    assert [parts.gradients.of(tensor).item() for tensor in parts.tensors] == [2.0, -2.0]
    assert parts.outside[0].grad.tolist() == [2.0, 1.0]


def test_a_scale_is_removed_by_the_step():
    parts = make((1, 1), others=1)
    give(parts, t0=6, t1=8)
    parts.outside[0].grad = torch.tensor([48.0, 0.0])
    assert parts.optimizer.unscale(torch.tensor(0.5)).item() == pytest.approx((9 + 16 + 576) ** 0.5)
    assert parts.outside[0].grad.tolist() == [24.0, 0.0], "those in no chunk at once"
    assert firsts(values(parts)) == [6.0, 8.0]
    parts.optimizer.step()
    assert firsts(masters(parts)) == [-3.0, 12.0]


def test_beside_another_optimizer_its_own_gradients_are_unscaled_at_once():
    parts = make((1,), (1,), groups=[[0]], owners=(0, 1))
    give(parts, t0=6, t1=8)
    assert parts.optimizer.unscale(torch.tensor(0.5)).item() == 3.0
    assert [parts.gradients.of(tensor).item() for tensor in parts.tensors] == [3.0, 8.0]
    assert not parts.manager.gradients.has_factor


def test_a_gradient_that_has_overflowed_shows_in_the_norm():
    parts = make((1,))
    give(parts, t0=float("inf"))
    assert not parts.optimizer.unscale(torch.tensor(0.5)).isfinite()


# What the user's optimizer has beside its step


def test_attributes_are_read_from_the_users_optimizer_and_set_there():
    parts = make()
    assert parts.optimizer.mood == "calm"
    parts.optimizer.mood = "cheerful"
    parts.optimizer.new = 5
    assert (parts.inner.mood, parts.inner.new) == ("cheerful", 5)
    assert "mood" not in vars(parts.optimizer)


def test_what_neither_has_is_an_error():
    optimizer = make().optimizer
    with pytest.raises(AttributeError, match="'Users' object has no attribute 'nothing'"):
        _ = optimizer.nothing
    with pytest.raises(AttributeError, match="'ChunkedOptimizer' object has no attribute '__fspath__'"):
        _ = optimizer.__fspath__


def test_a_method_finds_masters_and_values_follow_what_it_has_changed():
    parts = make()

    @contextlib.contextmanager
    def lent(tensors):
        changed = []
        yield changed
        masters(parts)[1].fill_(7)
        changed.append(tensors[1])

    parts.kernel.lent = lent
    result, parameter = parts.optimizer.first("a", times=2)
    assert (result, parameter is parts.tensors[0].parameter) == ("aa", True)
    assert firsts(values(parts)) == [0.0, 7.0]


def test_a_function_that_is_no_method_is_not_wrapped():
    parts = make()
    parts.inner.helper = helper = lambda: "help"
    assert parts.optimizer.helper is helper


def test_it_is_printed_as_the_users_optimizer():
    parts = make()
    assert repr(parts.optimizer) == repr(parts.inner)
    assert parts.optimizer.class_name == "Users"
    assert isinstance(parts.optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_is_an_ordinary_optimizer_with_the_states(copied):
    parts = make()
    give(parts, t0=3)
    parts.optimizer.step()
    found = copied(parts.optimizer)
    assert type(found) is Users
    (state,) = found.state.values()
    assert (state["count"], state["last"].tolist()) == (1, [3.0, 3.0])
    assert [id(key) for key in found.state] == [id(found.param_groups[0]["params"][0])]
    assert parts.inner.state == {}


def test_a_deep_copy_is_made_once():
    optimizer = make().optimizer
    first, second = copy.deepcopy([optimizer, optimizer])
    assert first is second


# State


def stepped(*chunks, **settings):
    """Parts after a step in which the first parameter had a gradient of 3."""
    parts = make(*chunks, **settings)
    give(parts, t0=3)
    parts.optimizer.step()
    parts.optimizer.zero_grad()
    return parts


def read(state):
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def test_its_state_is_a_view():
    parts = stepped(others=1)
    parts.inner.state[parts.outside[0]] = {"seen": 1}
    assert isinstance(parts.optimizer.state, StateView)
    assert read(parts.optimizer.state[parts.tensors[0].parameter]) == {"count": 1, "last": [3.0, 3.0]}
    assert len(parts.optimizer.state) == 2


def test_all_states_are_replaced_by_an_assignment():
    parts = stepped(others=1)
    parts.inner.state[parts.outside[0]] = {"seen": 1}
    parts.optimizer.state = {parts.tensors[1].parameter: {"count": 5, "last": torch.ones(2)}}
    assert (parts.kernel.counts, parts.inner.state) == ({1: 5}, {})
    parts.optimizer.state = parts.optimizer.state
    assert parts.kernel.counts == {1: 5}


def test_a_state_dictionary_has_torchs_format():
    parts = stepped(groups=[[1], [0]])
    found = parts.optimizer.state_dict()
    assert found["param_groups"] == [{"lr": 1.0, "params": [0]}, {"lr": 1.0, "params": [1]}]
    assert list(found["state"]) == [1]
    assert read(found["state"][1]) == {"count": 1, "last": [3.0, 3.0]}


def test_the_master_of_a_parameter_that_is_saved_in_fewer_bits_is_in_it():
    parts = stepped()
    parts.tensors[0].original_dtype = torch.bfloat16
    found = parts.optimizer.state_dict()["state"][0]
    assert read(found) == {"count": 1, "last": [3.0, 3.0], "patrickstar_master": [-3.0, -2.0]}
    found["patrickstar_master"].fill_(100)
    assert masters(parts)[0].tolist() == [-3.0, -2.0]


def test_what_a_state_dictionary_has_are_copies():
    parts = stepped()
    parts.optimizer.state_dict()["state"][0]["last"].fill_(100)
    assert read(parts.kernel.own_state(parts.tensors[0]))["last"] == [3.0, 3.0]


def test_states_of_others_are_in_it_too():
    parts = stepped(others=1)
    parts.inner.state[parts.outside[0]] = {"seen": 1}
    assert parts.optimizer.state_dict()["state"][2] == {"seen": 1}


def test_states_that_were_collected_are_used():
    parts = stepped()
    with parts.optimizer.collected(keep=True, states={1: {"count": 8}}):
        assert parts.optimizer.state_dict()["state"] == {1: {"count": 8}}
    assert list(parts.optimizer.state_dict()["state"]) == [0]
    with parts.optimizer.collected(keep=True):
        parts.kernel.counts.clear()
        assert list(parts.optimizer.state_dict()["state"]) == [0], "those of the beginning"


def test_a_state_dictionary_is_taken_over():
    source, target = stepped(), make()
    source.tensors[0].original_dtype = torch.bfloat16
    source.optimizer.param_groups[0]["lr"] = 0.125
    target.kernel.counts[1] = 6
    target.optimizer.load_state_dict(source.optimizer.state_dict())
    assert target.kernel.counts == {0: 1}, "what has no state begins anew"
    assert read(target.kernel.own_state(target.tensors[0])) == {"count": 1, "last": [3.0, 3.0]}
    assert [tensors[0].tolist() for tensors in (masters(target), values(target))] == [[-3.0, -2.0]] * 2
    assert target.inner.param_groups[0]["lr"] == 0.125
    assert target.inner.param_groups[0]["params"][0] is target.tensors[0].parameter


def test_a_state_of_others_is_taken_over_as_a_copy():
    source, target = make(others=1), make(others=1)
    source.inner.state[source.outside[0]] = {"seen": torch.zeros(1)}
    found = source.optimizer.state_dict()
    target.optimizer.load_state_dict(found)
    target.inner.state[target.outside[0]]["seen"].fill_(3)
    assert found["state"][2]["seen"].item() == 0.0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"count": 1, "last": torch.zeros(5)}, r"shape \(5,\)"),
        ({"count": 1}, "has no 'last'"),
    ],
)
def test_a_state_that_does_not_fit_is_an_error_and_nothing_has_changed(state, message):
    parts = stepped()
    wrong = {
        "state": {0: {"count": 9, "last": torch.zeros(2)}, 1: state},
        "param_groups": [{"params": [0, 1], "lr": 9}],
    }
    for method in (parts.optimizer.check_state_dict, parts.optimizer.load_state_dict):
        with pytest.raises(ValueError, match=message):
            method(wrong)
    assert (parts.kernel.counts, parts.inner.param_groups[0]["lr"]) == ({0: 1}, 1.0)


def test_other_groups_are_an_error():
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, this optimizer of \[2\]"):
        make().optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


def test_hooks_see_and_may_change_state_dictionaries():
    parts = stepped()
    told = []
    parts.inner.register_state_dict_pre_hook(lambda optimizer: told.append("before saving"))
    parts.optimizer.register_state_dict_post_hook(lambda optimizer, found: {**found, "more": 1})
    found = parts.optimizer.state_dict()
    assert (told, found["more"]) == (["before saving"], 1)
    parts.optimizer.register_load_state_dict_pre_hook(lambda optimizer, given: {**given, "state": {}})
    parts.optimizer.register_load_state_dict_post_hook(lambda optimizer: told.append("after loading"))
    parts.optimizer.load_state_dict(found)
    assert (told, parts.kernel.counts) == (["before saving", "after loading"], {})
    assert list(found["state"]) == [0], "what was given stays"


def test_names_are_those_of_parameters_in_chunks():
    parts = make((2,), (2,), groups=[[1], [0]], owners=(0, 1), others=1)
    assert parts.optimizer.named_groups() == [["t1"], ["t0"]]
    assert parts.optimizer.placed_groups() == [[None], ["t0", None]]


def test_states_outside_of_its_chunks_have_the_places_of_parameters_in_its_groups():
    parts = make((2,), (2,), owners=(0, 1), others=1)
    parts.inner.state[parts.outside[0]] = {"seen": 1}
    parts.inner.state["steps"] = 5
    assert parts.optimizer.other_states() == {1: {}, 2: {"seen": 1}, -1: {"steps": 5}}


def test_such_states_are_replaced():
    parts = make(others=2)
    parts.inner.state[parts.outside[1]] = {"seen": 1}
    given = {2: {"step": 4, "buffer": torch.ones(2)}, 7: {"seen": 9}}
    parts.optimizer.load_other_states(given)
    assert [id(key) for key in parts.inner.state] == [id(parts.outside[0])], "one without a given state begins anew"
    found = parts.inner.state[parts.outside[0]]
    assert (found["step"], found["buffer"].tolist()) == (4, [1.0, 1.0])
    assert found["buffer"] is not given[2]["buffer"]


# States that change places


def test_states_from_earlier_use_move_into_chunks():
    parts = make()
    first, second = (tensor.parameter for tensor in parts.tensors)
    parts.inner.state[first] = {"count": 2, "last": torch.ones(2)}
    parts.inner.state[second] = {"count": 3, "last": torch.ones(2)}
    parts.optimizer.take_inner_state(parts.tensors[1])
    assert (parts.kernel.counts, [key is first for key in parts.inner.state]) == ({1: 3}, [True])
    parts.optimizer.take_inner_state()
    assert (parts.kernel.counts, parts.inner.state) == ({0: 2, 1: 3}, {})


def test_a_state_of_another_shape_begins_anew_in_the_step_that_updates_the_parameter(caplog):
    parts = make()
    first = parts.tensors[0].parameter
    parts.inner.state[first] = {"count": 2, "last": torch.ones(7)}
    parts.optimizer.take_inner_state()
    parts.optimizer.step()
    assert (parts.kernel.counts, len(parts.inner.state)) == ({}, 1), "without a gradient it stays"
    give(parts, t0=3)
    with caplog.at_level(logging.WARNING):
        parts.optimizer.step()
    assert (parts.kernel.counts, parts.inner.state) == ({0: 1}, {})
    assert "'t0' has another shape than its optimizer state" in caplog.text


@pytest.mark.parametrize("has_changed", [False, True])
def test_what_an_optimizer_keeps_in_a_shape_of_its_own_stays_unless_the_parameter_has_another_shape(has_changed):
    """Whether the shape of the parameter has changed does not show in the shapes of its state."""
    parts = make()
    tensor = parts.tensors[0]
    parts.kernel.load_tensor_state(tensor, {"count": 2, "last": torch.ones(2)})
    with mock.patch.object(parts.kernel, "tensor_state", return_value={"exp_avg": torch.ones(7)}):
        tensor.is_given_up = has_changed
        parts.optimizer.give_back_state(tensor)
    tensor.is_given_up = False
    give(parts, t0=3)
    tensor.spec = dataclasses.replace(tensor.spec, shape=(1, 2)) if has_changed else tensor.spec
    parts.optimizer._begin_anew(tensor)
    assert len(parts.inner.state) == (not has_changed)


def test_what_is_kept_under_a_name_is_saved_and_loaded():
    source, target = stepped(), make()
    source.inner.state["steps"], target.inner.state["other"] = [5], 1
    found = source.optimizer.state_dict()
    target.optimizer.load_state_dict(found)
    assert target.inner.state == {"steps": [5]}
    assert found["state"]["steps"] is not source.inner.state["steps"]
    target.optimizer.load_other_states({-1: {"more": 2}})
    assert target.inner.state == {"more": 2}


def test_states_are_given_back_as_ordinary_tensors():
    parts = stepped()
    give(parts, t1=5)
    parts.optimizer.step()
    parts.optimizer.give_back_state(parts.tensors[0])
    first, second = (tensor.parameter for tensor in parts.tensors)
    assert read(parts.inner.state[first]) == {"count": 1, "last": [3.0, 3.0]}
    assert parts.kernel.counts == {1: 1}
    parts.optimizer.give_back_state()
    assert read(parts.inner.state[second]) == {"count": 1, "last": [5.0, 5.0]}
    assert (parts.kernel.counts, parts.chunks[0].lists["last"].tolist()) == ({}, [0.0] * 4)


def test_the_state_of_a_parameter_that_was_given_another_shape_is_the_users_optimizers():
    parts = stepped()
    parts.tensors[0].is_given_up = True
    first = parts.tensors[0].parameter
    assert list(map(id, parts.optimizer.state)) == [id(first)]
    assert read(parts.inner.state[first]) == {"count": 1, "last": [3.0, 3.0]}
    assert parts.kernel.counts == {}


def test_states_of_users_optimizers_stay_of_their_kind():
    parts = stepped()
    assert isinstance(copy.deepcopy(parts.optimizer).state, collections.defaultdict)
