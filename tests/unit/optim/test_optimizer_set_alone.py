"""Several optimizers as one: each is stood in for, and writes down what it is told."""

import collections
import contextlib
import dataclasses

import pytest
from unit.optim.updates import make_parts
from unit.runtime.parts import Fake

from hf_patrickstar.optim.optimizer_set import OptimizerSet


class Optimizer:
    """In place of an optimizer; its methods answer with its name, and write down what they are told.

    Attributes:
        collected_states: What ``state_dict`` may use.
    """

    def __init__(self, name, told, num_groups=1, others=()):
        self.class_name, self.told = name, told
        self.param_groups = [{"of": name, "number": number} for number in range(num_groups)]
        self.kernel = Fake(told, "load_own_state", own_state=f"state of {name}", state_places=f"places of {name}")
        self.others = dict.fromkeys(others, name)
        self.collected_states = None
        self._optimizer_load_state_dict_pre_hooks = collections.OrderedDict()

    def named_groups(self):
        return [[f"{self.class_name}.{group['number']}"] for group in self.param_groups]

    def placed_groups(self):
        return [[None, *names] for names in self.named_groups()]

    @contextlib.contextmanager
    def collected(self, *, keep, states):
        self.collected_states = (keep, states)
        yield
        self.collected_states = None

    def state_dict(self):
        return self.class_name, self.collected_states

    def check_state_dict(self, state_dict):
        self.told.append((self.class_name, "check", state_dict))

    def load_state_dict(self, state_dict):
        self.told.append((self.class_name, "load", state_dict))

    def other_states(self):
        return self.others

    def load_other_states(self, states):
        self.told.append((self.class_name, "load others", states))


def make():
    """A set of two optimizers, and what they are told."""
    told = []
    optimizers = [Optimizer("SGD", told, 2, others=(0, 3)), Optimizer("AdamW", told, others=(0,))]
    return OptimizerSet(optimizers), optimizers, told


def tensor_of(index):
    """A parameter that the optimizer of this number updates."""
    (tensor,) = make_parts((2,)).tensors
    tensor.chunk.spec = dataclasses.replace(tensor.chunk.spec, optimizer_index=index)
    return tensor


def test_groups_of_all_are_one_after_the_other():
    together, optimizers, _ = make()
    assert together.param_groups == [
        {"of": "SGD", "number": 0},
        {"of": "SGD", "number": 1},
        {"of": "AdamW", "number": 0},
    ]
    assert together.param_groups[2] is optimizers[1].param_groups[0]
    assert together.named_groups() == [["SGD.0"], ["SGD.1"], ["AdamW.0"]]
    assert together.placed_groups() == [[[None, "SGD.0"], [None, "SGD.1"]], [[None, "AdamW.0"]]], "by optimizer"


def test_its_class_names_all():
    assert make()[0].class_name == "SGD+AdamW"


def test_it_follows_the_list_of_optimizers():
    together, optimizers, told = make()
    assert len(together) == 2
    optimizers.append(Optimizer("Muon", told))
    assert (len(together), together.class_name) == (3, "SGD+AdamW+Muon")


def test_without_optimizers_it_is_empty():
    together = OptimizerSet([])
    assert (len(together), together.class_name, together.param_groups, together.named_groups()) == (0, "", [], [])
    assert (together.state_dicts({}), together.other_states(), together.other_places()) == ([], {}, set())
    together.load_other_states({})


@pytest.mark.parametrize(("index", "name"), [(0, "SGD"), (1, "AdamW")])
def test_a_state_is_with_the_kernel_that_updates_the_parameter(index, name):
    together, _, told = make()
    tensor, given = tensor_of(index), {"step": 1}
    assert together.own_state(tensor) == f"state of {name}"
    assert together.state_places(tensor) == f"places of {name}"
    together.load_own_state(tensor, given)
    assert told == [("own_state", tensor), ("state_places", tensor), ("load_own_state", tensor, given)]
    assert told[-1][2] is not given


def test_each_has_a_state_dictionary_made_from_the_states_of_all_ranks():
    together, optimizers, _ = make()
    states = {0: {"step": 1}}
    assert together.state_dicts(states) == [("SGD", (True, states)), ("AdamW", (True, states))]
    assert [optimizer.collected_states for optimizer in optimizers] == [None, None]


def test_a_state_dictionary_is_checked_by_the_one_that_it_is_for():
    together, _, told = make()
    together.check_state_dict(1, {"state": {}})
    assert told == [("AdamW", "check", {"state": {}})]


def test_one_with_hooks_that_may_change_it_is_not_checked_before_them():
    together, optimizers, told = make()
    optimizers[1]._optimizer_load_state_dict_pre_hooks[0] = "hook"
    together.check_state_dict(1, {"state": {}})
    assert told == []
    together.check_state_dict(0, {})
    assert told == [("SGD", "check", {})]


def test_each_loads_its_own_state_dictionary():
    together, _, told = make()
    together.load_state_dicts([{"a": 1}, {"b": 2}])
    assert told == [("SGD", "load", {"a": 1}), ("AdamW", "load", {"b": 2})]


@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_state_dictionaries_is_an_error(number):
    with pytest.raises(ValueError, match=r"shorter|longer"):
        make()[0].load_state_dicts([{}] * number)


def test_states_outside_of_chunks_have_places_with_the_number_of_their_optimizer():
    together, _, _ = make()
    assert together.other_states() == {"0.0": "SGD", "0.3": "SGD", "1.0": "AdamW"}
    assert together.other_places() == {"0.0", "0.3", "1.0"}


def test_each_loads_the_states_of_its_places_and_nothing_for_the_rest():
    together, _, told = make()
    together.load_other_states({"0.3": {"a": 1}, "1.0": {"b": 2}, "1.7": {"c": 3}, "2.0": {"d": 4}})
    assert told == [("SGD", "load others", {0: {}, 3: {"a": 1}}), ("AdamW", "load others", {0: {"b": 2}})]
