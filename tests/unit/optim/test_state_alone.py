"""``optimizer.state``: a mapping over what a kernel and what the user's optimizer have; and how states are packed."""

import collections
import types

import pytest
import torch
from unit.optim.updates import PlainKernel, add_lists, give, make_parts
from unit.runtime.parts import Fake

from hf_patrickstar.optim.state import (
    ParameterState,
    StateView,
    call_hooks,
    check_keys,
    check_shapes,
    has_shapes,
    pack_state,
    pair_up,
)


def make(*, ours=(0, 1)):
    """A view over two parameters in chunks, and one that is in none; those of ``ours`` are the kernel's."""
    parts = make_parts((2, 3))
    add_lists(parts, "last")
    parts.other = torch.nn.Parameter(torch.zeros(2))
    parts.kernel = PlainKernel(torch.optim.SGD([parts.other], lr=1.0), parts)
    parts.own = collections.defaultdict(dict)
    found = {id(tensor.parameter): tensor for tensor in parts.tensors}
    manager = types.SimpleNamespace(find=lambda parameter: found.get(id(parameter)), tensors=parts.tensors)
    parts.view = StateView(parts.kernel, manager, parts.own, lambda tensor: tensor.spec.index in ours)
    parts.first, parts.second = (tensor.parameter for tensor in parts.tensors)
    return parts


def step(parts, **gradients):
    give(parts, **gradients)
    parts.kernel.update(parts.chunks, {0: 0, 1: 0}, None)
    for tensor in parts.tensors:
        parts.gradients.clear(tensor)


def read(state):
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


# The states of all parameters


def test_it_is_empty_before_the_first_step():
    parts = make()
    assert (len(parts.view), list(parts.view), dict(parts.view)) == (0, [], {})
    assert parts.first not in parts.view


def test_asking_makes_no_state():
    parts = make()
    assert parts.view.get(parts.first) is None
    assert parts.view.get(parts.other, "none") == "none"
    assert parts.other not in parts.view
    assert (len(parts.view), parts.own) == (0, {})


def test_looking_up_one_that_is_in_no_chunk_makes_one_where_the_optimizer_does_so():
    parts = make()
    parts.view[parts.other]["seen"] = 1
    assert parts.own == {parts.other: {"seen": 1}}


def test_it_has_the_state_of_those_that_were_updated():
    parts = make()
    step(parts, t1=5)
    assert [key is parts.second for key in parts.view] == [True]
    assert (parts.second in parts.view, parts.first in parts.view) == (True, False)
    assert read(parts.view[parts.second]) == {"count": 1, "last": [5.0, 5.0, 5.0]}
    assert isinstance(parts.view[parts.second], ParameterState)
    assert read(parts.view.get(parts.second)) == {"count": 1, "last": [5.0, 5.0, 5.0]}


def test_others_come_first_and_then_those_in_chunks_in_model_order():
    parts = make()
    step(parts, t0=1, t1=1)
    parts.own[parts.other] = {"seen": 1}
    parts.own["word"] = 3
    assert [id(key) for key in parts.view] == [id(key) for key in (parts.other, "word", parts.first, parts.second)]
    assert len(parts.view) == 4


def test_keys_that_are_no_parameters_are_the_optimizers():
    parts = make()
    parts.view["word"] = 3
    assert parts.own == {"word": 3}
    assert (parts.view["word"], "word" in parts.view, parts.view.pop("word")) == (3, True, 3)
    assert parts.own == {}


def test_a_state_that_is_set_is_the_kernels():
    parts = make()
    parts.view[parts.first] = {"count": 4, "last": torch.tensor([1.0, 2.0])}
    assert read(parts.kernel.own_state(parts.tensors[0])) == {"count": 4, "last": [1.0, 2.0]}
    assert parts.own == {}


def test_a_state_of_another_is_set_where_the_optimizer_has_it():
    parts = make()
    parts.view[parts.other] = {"seen": 1}
    assert parts.own == {parts.other: {"seen": 1}}
    del parts.view[parts.other]
    assert parts.own == {}


def test_parameters_that_another_optimizer_updates_are_not_the_kernels():
    parts = make(ours=(0,))
    step(parts, t0=1, t1=1)
    assert [key is parts.first for key in parts.view] == [True]
    parts.view[parts.second] = {"seen": 1}
    assert parts.own == {parts.second: {"seen": 1}}


def test_without_lists_the_optimizers_own_state_counts():
    """A kernel that runs the user's optimizer leaves states with that one."""
    parts = make()
    step(parts, t0=1)
    parts.kernel.state_places = lambda tensor: {}
    assert list(parts.view) == []
    parts.own[parts.first] = {"momentum": 1}
    assert parts.view[parts.first] == {"momentum": 1}


def test_deleting_a_state_begins_anew():
    parts = make()
    step(parts, t0=5)
    del parts.view[parts.first]
    assert parts.first not in parts.view
    assert parts.chunks[0].lists["last"].tolist() == [0.0] * 5
    with pytest.raises(KeyError):
        del parts.view[parts.first]


def test_what_is_taken_out_is_a_copy():
    parts = make()
    step(parts, t0=5)
    state = parts.view.pop(parts.first)
    assert read(state) == {"count": 1, "last": [5.0, 5.0]}
    assert parts.first not in parts.view


@pytest.mark.parametrize("key", ["first", "other"])
def test_taking_out_what_is_not_there(key):
    parts = make()
    assert parts.view.pop(getattr(parts, key), "none") == "none"
    assert parts.view.pop(getattr(parts, key), None) is None
    with pytest.raises(KeyError):
        parts.view.pop(getattr(parts, key))


def test_clearing_forgets_all():
    parts = make()
    step(parts, t0=1, t1=1)
    parts.own[parts.other] = {"seen": 1}
    parts.view.clear()
    assert (len(parts.view), parts.own, parts.kernel.counts) == (0, {}, {})


def test_it_is_printed_like_a_dictionary():
    parts = make()
    parts.own["word"] = {"seen": 1}
    assert repr(parts.view) == "{'word': {'seen': 1}}"


# The state of one


def test_tensors_of_a_state_are_the_places_themselves():
    parts = make()
    step(parts, t0=5)
    parts.view[parts.first]["last"].fill_(7)
    assert parts.chunks[0].lists["last"].tolist() == [7.0, 7.0, 0.0, 0.0, 0.0]


def test_one_entry_is_set_and_the_rest_stays():
    parts = make()
    step(parts, t0=5)
    state = parts.view[parts.first]
    state["last"] = torch.tensor([1.0, 2.0])
    assert read(state) == {"count": 1, "last": [1.0, 2.0]}
    state["count"] = 9
    assert read(state) == {"count": 9, "last": [1.0, 2.0]}


def test_an_entry_of_a_state_that_is_not_there_yet_begins_with_zeros():
    parts = make()
    parts.chunks[0].lists["last"].fill_(3)
    given = []
    parts.kernel.load_own_state = lambda tensor, state: given.append((tensor, read(state)))
    parts.view[parts.first]["count"] = 2
    assert given == [(parts.tensors[0], {"step": 0.0, "last": [0.0, 0.0], "count": 2})]
    assert parts.chunks[0].lists["last"].tolist() == [0.0, 0.0, 3.0, 3.0, 3.0]


def test_an_entry_cannot_go_alone():
    parts = make()
    step(parts, t0=5)
    with pytest.raises(KeyError, match="'last' is a part of what the optimizer keeps of 't0'"):
        del parts.view[parts.first]["last"]
    assert read(parts.view[parts.first]) == {"count": 1, "last": [5.0, 5.0]}


def test_clearing_the_state_of_one_begins_anew_with_it():
    parts = make()
    step(parts, t0=5, t1=5)
    parts.view[parts.first].clear()
    assert (len(parts.view[parts.first]), parts.kernel.counts) == (0, {1: 1})


def test_what_is_asked_of_it_is_read_each_time():
    parts = make()
    state = ParameterState(parts.kernel, parts.tensors[0])
    assert (list(state), len(state), repr(state)) == ([], 0, "{}")
    step(parts, t0=5)
    assert (list(state), len(state), state["count"]) == (["count", "last"], 2, 1)
    assert repr(state) == "{'count': 1, 'last': tensor([5., 5.])}"


def test_a_checkpoint_that_is_being_written_goes_first():
    parts = make()
    told = []
    parts.chunks[0].reader = Fake(told, "wait")
    len(ParameterState(parts.kernel, parts.tensors[0]))
    assert (told, parts.chunks[0].reader) == ([("wait",)], None)


# Shapes and keys


LISTS = ("master", "exp_avg", "exp_avg_sq")
SAVED = ("patrickstar_master", "exp_avg", "exp_avg_sq")


def test_what_has_a_place_in_chunks_has_the_parameters_shape():
    tensor = make().tensors[1]
    good = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "master": torch.zeros(7), "row": torch.zeros(7)}
    check_shapes(tensor, good, LISTS)
    check_shapes(tensor, {}, LISTS)
    assert has_shapes(tensor, good, LISTS)
    assert has_shapes(tensor, {"exp_avg": 5}, LISTS)
    assert has_shapes(tensor, {"exp_avg": torch.zeros(1, 3)}, ["master"]), "it is no average of Adam's"


@pytest.mark.parametrize("key", SAVED)
def test_another_shape_is_an_error(key):
    tensor = make().tensors[1]
    state = {key: torch.zeros(1, 3)}
    with pytest.raises(ValueError, match=rf"'{key}' of parameter 't1' has shape \(1, 3\), the parameter has \(3,\)"):
        check_shapes(tensor, state, LISTS)
    assert not has_shapes(tensor, state, LISTS)


def test_a_state_has_every_key_or_none():
    tensor = make().tensors[0]
    check_keys(tensor, {"a": 1, "b": 2, "c": 3}, ["a", "b"])
    check_keys(tensor, {}, ["a"])
    with pytest.raises(ValueError, match="parameter 't0' has no 'a'"):
        check_keys(tensor, {"c": 1}, ["b", "a"])


# Hooks


def test_hooks_are_called_in_order_with_what_the_one_before_returned():
    told = []

    def hook(result):
        def call(*arguments):
            told.append(arguments)
            return result

        return call

    hooks = {3: hook(None), 1: hook("changed"), 2: hook(None)}
    assert call_hooks(hooks, "optimizer", "state") == "changed"
    assert told == [("optimizer", "state"), ("optimizer", "state"), ("optimizer", "changed")]


def test_hooks_of_the_optimizer_alone_return_nothing():
    told = []
    assert call_hooks({0: lambda *arguments: told.append(arguments) or "ignored"}, "optimizer") is None
    assert told == [("optimizer",)]


def test_without_hooks_a_state_is_as_it_was():
    assert call_hooks({}, "optimizer", "state") == "state"


# Torch's format


def groups(*sizes):
    return [{"params": [torch.nn.Parameter(torch.zeros(1)) for _ in range(size)], "lr": size} for size in sizes]


def test_states_are_packed_as_torch_does():
    ordinary = groups(2, 1)
    optimizer = torch.optim.SGD(ordinary, lr=1.0)
    last = optimizer.param_groups[1]["params"][0]
    optimizer.state[last] = {"momentum_buffer": 7}
    optimizer.state["steps"] = 3
    packed = pack_state(optimizer.param_groups, [(last, {"momentum_buffer": 7})], {"steps": 3})
    assert packed == optimizer.state_dict()
    assert packed["state"] == {2: {"momentum_buffer": 7}, "steps": 3}
    assert [group["params"] for group in packed["param_groups"]] == [[0, 1], [2]]


def test_one_parameter_has_one_number():
    (group,) = groups(2)
    packed = pack_state([group, {"params": group["params"][:1]}], [], {})
    assert [found["params"] for found in packed["param_groups"]] == [[0, 1], [0]]
    assert packed["param_groups"][0]["lr"] == 2


def test_parameters_are_paired_with_their_states():
    ours = groups(2, 1)
    parameters = [parameter for group in ours for parameter in group["params"]]
    saved = {"state": {9: {"a": 1}, 7: {"b": 2}}, "param_groups": [{"params": [7, 8]}, {"params": [9]}]}
    pairs = pair_up(ours, saved)
    assert [id(parameter) for parameter, _ in pairs] == [id(parameter) for parameter in parameters]
    assert [state for _, state in pairs] == [{"b": 2}, {}, {"a": 1}]
    pairs[0][1]["b"] = 3
    assert saved["state"][7] == {"b": 2}, "what was given stays"


@pytest.mark.parametrize("sizes", [(1, 2), (2,), (2, 1, 1), (3,)])
def test_other_groups_are_an_error(sizes):
    saved = {"state": {}, "param_groups": [{"params": list(range(size))} for size in sizes]}
    with pytest.raises(ValueError, match=r"of \[[0-9, ]+\] parameters, this optimizer of \[2, 1\]"):
        pair_up(groups(2, 1), saved)
