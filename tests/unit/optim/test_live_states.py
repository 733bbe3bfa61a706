"""A dictionary of states that is told before a state is given out or replaced."""

import collections
import copy
import gc
import operator
import pickle

import pytest
import torch

from hf_patrickstar.optim.live_states import LiveStates, make_live, make_ordinary, peek, put, without_states


class Told:
    """Writes down the keys of which it is told."""

    def __init__(self):
        self.keys = []

    def before_use(self, key):
        self.keys.append(key)


def make(**states):
    told = Told()
    return LiveStates(dict, states, told.before_use), told


USES = {
    "an item": (lambda states: states["a"], ["a"]),
    "an item that is made": (lambda states: states["c"], ["c", "c"]),
    "get": (lambda states: states.get("b"), ["b"]),
    "setdefault": (lambda states: states.setdefault("b", {}), ["b"]),
    "an assignment": (lambda states: states.__setitem__("a", {}), ["a"]),
    "an update": (lambda states: states.update({"a": {}}, b={}), ["a", "b"]),
    "a removal": (lambda states: states.__delitem__("a"), ["a"]),
    "pop": (lambda states: states.pop("a"), ["a"]),
    "popitem": (lambda states: states.popitem(), ["a", "b"]),
    "clear": (lambda states: states.clear(), ["a", "b"]),
    "values": (lambda states: list(states.values()), ["a", "b"]),
    "items": (lambda states: list(states.items()), ["a", "b"]),
    "a dictionary": (dict, ["a", "b"]),
    "an unpacked one": (lambda states: {**states}, ["a", "b"]),
    "a copy": (copy.copy, ["a", "b"]),
    "a deep copy": (copy.deepcopy, ["a", "b"]),
    "a pickle": (pickle.dumps, ["a", "b"]),
    "a comparison": (lambda states: (states == {"a": 1}, states != {"a": 1}), ["a", "b", "a", "b"]),
    "text": (repr, ["a", "b"]),
    "a union": (lambda states: states | {"c": 1}, ["a", "b"]),
    "a union from the left": (lambda states: {"c": 1} | states, ["a", "b"]),
    "a union in place": (lambda states: operator.ior(states, {"a": {}}) is states, ["a"]),
}


@pytest.mark.parametrize(("use", "keys"), USES.values(), ids=USES)
def test_it_is_told_before_a_state_is_given_out_or_replaced(use, keys):
    ordinary, (states, told) = collections.defaultdict(dict, a={"x": 1}, b={"x": 2}), make(a={"x": 1}, b={"x": 2})
    expected, found = use(ordinary), use(states)
    assert told.keys == keys
    assert states == ordinary
    if use not in (pickle.dumps, repr):
        assert found == expected
        assert type(found) is type(expected), "copies are ordinary"


def test_nothing_is_told_of_keys():
    states, told = make(a={}, b={})
    assert (list(states), list(states.keys()), len(states), "a" in states, bool(states)) == (
        ["a", "b"],
        ["a", "b"],
        2,
        True,
        True,
    )
    assert told.keys == []


def test_a_pickle_is_an_ordinary_dictionary():
    found = pickle.loads(pickle.dumps(make(a={"x": 1})[0]))
    assert (type(found), found, found["new"]) == (collections.defaultdict, {"a": {"x": 1}, "new": {}}, {})


def test_it_does_not_keep_the_one_that_it_tells():
    states, told = make(a={})
    del told
    gc.collect()
    assert states["a"] == {}


def make_optimizer():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.5)
    parameter.grad = torch.ones(1)
    optimizer.step()
    return optimizer, parameter


def test_an_optimizer_gets_one_with_what_it_has():
    (optimizer, parameter), told = make_optimizer(), Told()
    before = optimizer.state[parameter]
    assert make_live(optimizer, told.before_use)
    assert peek(optimizer, parameter) is before
    put(optimizer, parameter, before)
    assert told.keys == []
    assert optimizer.state[parameter] is before
    assert told.keys == [parameter]
    optimizer.step()  # it is used as any other
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].item() == 1.5


def test_another_one_takes_its_place():
    (optimizer, parameter), first, second = make_optimizer(), Told(), Told()
    assert make_live(optimizer, first.before_use)
    assert make_live(optimizer, second.before_use)
    first.keys.clear()
    assert len(optimizer.state[parameter]) == 1
    assert (first.keys, second.keys) == ([], [parameter])


def test_it_can_be_undone():
    (optimizer, parameter), told = make_optimizer(), Told()
    make_live(optimizer, told.before_use)
    make_ordinary(optimizer)
    assert type(optimizer.state) is collections.defaultdict
    assert optimizer.state[parameter].keys() == {"momentum_buffer"}
    assert told.keys == []


def test_one_that_somebody_holds_tells_nothing_any_more():
    (optimizer, parameter), told = make_optimizer(), Told()
    held = make_live(optimizer, told.before_use)
    make_ordinary(optimizer)
    assert optimizer.state is held
    assert len(held[parameter]) == 1
    assert told.keys == []


@pytest.mark.parametrize("kind", [LiveStates, collections.defaultdict, collections.OrderedDict])
def test_an_optimizer_without_states_reads_none(kind):
    (optimizer, _), told = make_optimizer(), Told()
    optimizer.mark = "mine"
    if kind is LiveStates:
        make_live(optimizer, told.before_use)
    elif kind is collections.OrderedDict:
        optimizer.state = kind(optimizer.state)
    found = without_states(optimizer)
    assert type(found.state) is (collections.defaultdict if kind is LiveStates else kind)
    assert (len(found.state), len(optimizer.state), found.mark) == (0, 1, "mine")
    assert type(found) is torch.optim.SGD
    assert told.keys == []


def test_a_dictionary_that_somebody_holds_stays():
    (optimizer, _), told = make_optimizer(), Told()
    held = optimizer.state
    assert not make_live(optimizer, told.before_use)
    assert optimizer.state is held


def test_a_dictionary_of_another_kind_stays():
    (optimizer, parameter), told = make_optimizer(), Told()
    optimizer.state = dict(optimizer.state)
    assert not make_live(optimizer, told.before_use)
    put(optimizer, parameter, {"x": 1})
    assert peek(optimizer, parameter) == {"x": 1}
