"""Parameters that answer, with what answers for them stood in for: which call reaches what, and the class they have."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from unit.runtime.parts import Fake

from hf_patrickstar.errors import EngineError
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.runtime.access import Access
from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.live_parameter import (
    AcquiredMixin,
    LiveMixin,
    ReleasedMixin,
    call_with_values,
    can_answer,
    original_type,
    raw_data,
    raw_grad,
    set_raw_data,
    set_raw_grad,
    take_raw_grad,
)

T = torch.Tensor


class Told(Access):
    """An access that writes down what it is told.

    Args:
        value: The value.
        told: Where to.
        name: Whose value it is.
        copy: What ``needs_copy`` gives the call instead of the value.
    """

    def __init__(self, value, told, name, copy=None):
        super().__init__(value)
        self.told, self.name, self.copy = told, name, copy

    def needs_copy(self, results):
        self.told.append(("needs copy", self.name, [result.tolist() for result in results]))
        if self.copy is None:
            return False
        self.value, self.copy = self.copy, None
        return True

    def make_room(self):
        self.told.append(("make room", self.name))

    def finish(self):
        self.told.append(("finish", self.name))

    def note_returned(self):
        self.told.append(("returned", self.name))

    def end(self):
        self.told.append(("end", self.name))


def make(value=(3.0, 4.0), told=None, name="a", **answers):
    """A released parameter and what is told of it; it requires a gradient, and its value is what it is given."""
    told, value = [] if told is None else told, torch.tensor(value)

    def access(func, *, is_graph, writes=False):
        error = answers.get("errors") and answers["errors"].pop(0)
        if error:
            raise error
        return Told(value, told, name, answers.get("copy"))

    silent = ("set_grad", "assign", "note_data_is_out")
    found = {
        "access": access,
        "get_grad": "the gradient",
        "copy_from": False,
        "value_for": None,
        "host_value": value,
        "copied_value": value.clone(),
        "detached_for_state_dict": value * 10,
        "view_whole": "a view",
    }
    live = Fake(told, **{**dict.fromkeys(silent), **found, **answers})
    live.value = value
    parameter, placeholder = torch.nn.Parameter(value.clone()), torch.full((), float("nan")).expand(value.shape)
    tensor = ManagedTensor(TensorSpec(0, name, tuple(value.shape), True), parameter, 0, placeholder)
    tensor.bind(live)
    tensor.dematerialize()
    told.clear()
    return parameter, tensor, told


def words(told, *left_out):
    """What was told, but for the question which parameter it is; tensors in numbers."""
    found = [
        (it[0], *(word.tolist() if isinstance(word, T) else word for word in it[1:]))
        for it in told
        if it[0] not in ("value_for", *left_out)
    ]
    told.clear()
    return found


def steps(told):
    """What accesses were told."""
    return words(told, "access")


# Without the value


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda p: p.shape, (2,)),
        (lambda p: p.size(0), 2),
        (lambda p: p.dtype, torch.float32),
        (lambda p: p.device, torch.device("cpu")),
        (lambda p: p.requires_grad, True),
        (lambda p: p.is_leaf, True),
        (lambda p: p.grad_fn, None),
        (lambda p: p.numel(), 2),
        (lambda p: p.nelement(), 2),
        (lambda p: len(p), 2),
        (lambda p: p.ndim, 1),
        (lambda p: p.is_floating_point(), True),
        (lambda p: torch.zeros_like(p).tolist(), [0, 0]),
        (lambda p: p.new_full((1,), 5.0).tolist(), [5]),
        (lambda p: isinstance(p, torch.nn.Parameter), True),
        (lambda p: type(p).__name__, "Parameter"),
        (lambda p: p.stride(), (1,)),
        (lambda p: p.is_contiguous(), True),
    ],
)
def test_shapes_and_flags_need_no_value(read, expected):
    parameter, _, told = make()
    assert read(parameter) == expected
    assert told == []


def test_requires_grad_may_be_changed_without_the_value():
    parameter, _, told = make()
    parameter.requires_grad = False
    assert parameter.requires_grad is False
    assert parameter.requires_grad_() is parameter
    assert (parameter.requires_grad, told) == (True, [])


def test_strides_are_those_of_a_contiguous_value():
    parameter, _, _ = make(((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)))
    assert parameter.stride() == (3, 1)
    assert raw_data(parameter).stride() == (0, 0)


def test_a_parameter_formats_as_what_it_is():
    parameter, _, told = make()
    assert f"{parameter}" == "Parameter containing:\ntensor([3., 4.], requires_grad=True)"
    assert steps(told) == [("end", "a")]


# With the value


def test_a_function_gets_the_value():
    parameter, _, told = make()
    assert (parameter * 2).tolist() == [6, 8]
    assert steps(told) == [("needs copy", "a", [[6, 8]]), ("finish", "a"), ("end", "a")]


def test_a_function_gets_values_that_are_deep_inside_its_arguments():
    told = []
    (first, _, _), (second, _, _) = make(told=told), make((5.0, 6.0), told, "b")
    assert torch.stack([first, torch.ones(2), second]).tolist() == [[3, 4], [1, 1], [5, 6]]
    assert [it for it in steps(told) if it[0] == "end"] == [("end", "b"), ("end", "a")], "in reverse"


def test_a_parameter_that_is_there_twice_is_accessed_once():
    parameter, _, told = make()
    assert (parameter + parameter).tolist() == [6, 8]
    assert [it[0] for it in words(told)].count("access") == 1


def asked(told):
    """What each access was asked for."""
    return [it[1:] for it in words(told) if it[0] == "access"]


@pytest.mark.parametrize(
    ("call", "writes"),
    [
        (lambda p: p.add(1), False),
        (lambda p: p.add_(1), True),
        (lambda p: p.__iadd__(1), True),
        (lambda p: p.__setitem__(0, 1.0), True),
        (lambda p: torch.add(torch.ones(2), 1, out=p), True),
        (lambda p: torch.ones(2).add_(p), False),
        (lambda p: torch.nn.init.zeros_(p), True),
        (lambda p: p.__index__, None),
    ],
)
def test_an_access_is_told_whether_the_call_may_write(call, writes):
    parameter, _, told = make()
    with torch.no_grad():
        call(parameter)
    assert [it[-1] for it in asked(told)] == ([] if writes is None else [writes])


def test_an_access_is_told_whether_the_call_is_recorded():
    parameter, _, told = make()
    parameter * 2
    with torch.no_grad():
        parameter * 2
    parameter.requires_grad = False
    parameter * 2
    parameter * torch.ones(2, requires_grad=True)
    assert [is_graph for _, is_graph, _ in asked(told)] == [True, False, False, True]


def test_a_call_in_place_returns_the_parameter():
    parameter, tensor, told = make()
    with torch.no_grad():
        assert parameter.add_(1) is parameter
    assert tensor.live.value.tolist() == [4, 5]
    assert steps(told) == [("needs copy", "a", []), ("finish", "a"), ("end", "a")]


def test_a_call_that_returns_its_value_unchanged_returns_the_parameter_and_says_so():
    parameter, _, told = make()
    assert call_with_values(lambda x: (x, 1), (parameter,), {}) == (parameter, 1)
    assert steps(told)[1:] == [("finish", "a"), ("returned", "a"), ("end", "a")]


def test_a_call_whose_result_must_be_of_a_copy_is_repeated():
    parameter, _, told = make(copy=torch.tensor([8.0, 9.0]))
    assert parameter[:1].tolist() == [8]
    assert steps(told) == [("needs copy", "a", [[3]]), ("finish", "a"), ("end", "a")]


def test_a_call_that_raises_is_not_finished_and_ends():
    parameter, _, told = make()
    with pytest.raises(RuntimeError, match="size"):
        parameter + torch.ones(3)
    assert steps(told) == [("end", "a")]


def test_parameters_that_do_not_fit_together_make_room_for_the_next():
    told = []
    first, _, _ = make(told=told)
    second, _, _ = make((5.0, 6.0), told, "b", errors=[MemoryError("full"), None])
    assert (first + second).tolist() == [8, 10]
    assert steps(told)[0] == ("make room", "a")


def test_a_parameter_that_does_not_fit_at_all_raises_and_the_others_end():
    told = []
    first, _, _ = make(told=told)
    second, _, _ = make((5.0, 6.0), told, "b", errors=[MemoryError("full"), MemoryError("still full")])
    with pytest.raises(MemoryError, match="still full"):
        first + second
    assert steps(told) == [("make room", "a"), ("end", "a")]


# What it answers by itself


def test_the_gradient_is_what_answers():
    parameter, _, told = make()
    assert parameter.grad == "the gradient"
    parameter.grad = "new"
    del parameter.grad
    assert words(told) == [("get_grad",), ("set_grad", "new"), ("set_grad", None)]


def test_an_assignment_to_data_is_what_answers():
    parameter, _, told = make()
    parameter.data = torch.ones(2)
    assert words(told) == [("assign", [1, 1])]


@pytest.mark.parametrize("does_more", [True, False])
def test_a_copy_into_it_is_a_write_unless_more_must_be_done(does_more):
    parameter, tensor, told = make(copy_from=does_more)
    with torch.no_grad():
        assert parameter.copy_(torch.ones(2)) is parameter
    assert [it[0] for it in words(told)][:2] == (["copy_from"] if does_more else ["copy_from", "access"])
    assert tensor.live.value.tolist() == ([3, 4] if does_more else [1, 1])


@pytest.mark.parametrize("name", ["view_as", "expand_as"])
def test_a_view_of_the_whole_is_what_answers_if_it_is_recorded(name):
    parameter, _, told = make()
    function = getattr(T, name)
    assert function(parameter, parameter) == "a view"
    assert words(told) == [("view_whole", function)]
    with torch.no_grad():
        assert function(parameter, parameter).tolist() == [3, 4]


def test_a_backward_gets_the_parameters_themselves():
    """Accumulating its gradient is autograd's work, and calls inside still reach the parameter."""
    parameter, _, _ = make()
    with torch._C.DisableTorchFunctionSubclass():
        result = (parameter * torch.tensor([5.0, 6.0])).sum()
    (found,) = torch.autograd.grad(result, [parameter])
    assert found.tolist() == [5, 6]
    assert isinstance(parameter, ReleasedMixin)


def test_a_detached_one_for_a_state_dictionary_is_read_later():
    module = torch.nn.Linear(1, 1, bias=False)
    module.weight, _, told = make()
    assert module.state_dict()["weight"].tolist() == [30, 40]
    assert words(told) == [("detached_for_state_dict",)]
    assert module.weight.detach().tolist() == [3, 4]


# Copies are ordinary parameters


def saved_and_loaded(parameter):
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "make_copy",
    [
        copy.deepcopy,
        lambda parameter: pickle.loads(pickle.dumps(parameter)),
        saved_and_loaded,
        copy.copy,
        lambda parameter: type(parameter)(parameter.detach()),
    ],
)
def test_copies_are_ordinary_parameters_with_the_value(make_copy):
    parameter, _, _ = make()
    made = make_copy(parameter)
    assert type(made) is torch.nn.Parameter
    assert (made.tolist(), made.requires_grad) == ([3, 4], True)
    assert "_live" not in made.__dict__


@pytest.mark.parametrize("make_copy", [copy.copy, lambda parameter: pickle.loads(pickle.dumps(parameter))])
def test_copies_have_the_users_attributes(make_copy):
    parameter, _, _ = make()
    parameter.note = "theirs"
    assert make_copy(parameter).__dict__ == {"note": "theirs"}


def test_a_deep_copy_has_memory_of_its_own_and_is_made_once():
    parameter, tensor, _ = make()
    first, second = copy.deepcopy([parameter, parameter])
    assert first is second
    assert first.data_ptr() != tensor.live.value.data_ptr()


def test_a_frozen_parameter_has_frozen_copies():
    parameter, _, _ = make()
    parameter.requires_grad_(False)
    assert not copy.deepcopy(parameter).requires_grad


def test_a_parameter_that_is_made_of_one_becomes_ordinary_with_its_first_use():
    parameter, _, _ = make()
    made = torch.nn.Parameter(parameter)
    assert (made is parameter, isinstance(made, LiveMixin)) == (False, True)
    assert made.tolist() == [3, 4]
    assert type(made) is torch.nn.Parameter
    assert isinstance(parameter, ReleasedMixin)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda made: made.grad, None),
        (lambda made: made.detach().tolist(), [3, 4]),
        (lambda made: copy.deepcopy(made).tolist(), [3, 4]),
        (lambda made: made.view_as(made).tolist(), [3, 4]),
        (lambda made: setattr(made, "grad", torch.ones(2)), None),
        (lambda made: setattr(made, "data", torch.ones(2)), None),
    ],
)
def test_whatever_its_first_use_is(use, expected):
    parameter, _, told = make()
    made = torch.nn.Parameter(parameter)
    told.clear()
    assert use(made) == expected
    assert type(made) is torch.nn.Parameter
    assert told == [], "the parameter that it was made of has nothing to do with it"


def test_its_memory_is_free_when_the_last_reference_is_gone():
    parameter, _, _ = make()
    made = torch.nn.Parameter(parameter)
    there = weakref.ref(made)
    gc.disable()
    try:
        del made
        assert there() is None
    finally:
        gc.enable()


def test_what_was_exchanged_with_a_parameter_is_ordinary_and_has_the_value_that_was_kept():
    parameter, tensor, _ = make()
    other = torch.nn.Parameter(torch.zeros(2))
    torch.utils.swap_tensors(parameter, other)
    assert isinstance(other, LiveMixin)
    tensor.live = Fake([], value_for=torch.tensor([7.0, 8.0]))
    other.__dict__["_live"] = tensor.live
    assert other.tolist() == [7, 8]
    assert type(other) is torch.nn.Parameter


# While it has its value


def test_a_parameter_with_its_value_is_torchs_in_all_but_data_and_gradient():
    parameter, tensor, told = make()
    tensor.materialize(torch.tensor([5.0, 6.0]))
    assert isinstance(parameter, AcquiredMixin)
    assert (parameter * 2).tolist() == [10, 12]
    assert (words(told), type(parameter.detach())) == ([], T)
    assert parameter.data.tolist() == [5, 6]
    assert parameter.grad == "the gradient"
    parameter.grad = None
    assert words(told) == [("note_data_is_out",), ("get_grad",), ("set_grad", None)]


def test_data_that_is_assigned_meanwhile_is_there_at_once():
    parameter, tensor, told = make()
    tensor.materialize(torch.tensor([5.0, 6.0]))
    parameter.data = torch.ones(2)
    assert parameter.tolist() == [1, 1]
    assert words(told) == []


def test_classes_remember_which_one_the_parameter_had():
    parameter, tensor, _ = make()
    assert original_type(type(parameter)) is torch.nn.Parameter
    tensor.materialize(torch.zeros(2))
    assert original_type(type(parameter)) is torch.nn.Parameter
    assert original_type(torch.nn.Parameter) is torch.nn.Parameter


# Data of another device; torch refuses that of "meta" as it refuses that of devices which are not its own


def moved():
    """A parameter with hooks that was on "meta" meanwhile, and what its hooks will say."""
    parameter, calls = torch.nn.Parameter(torch.ones(2)), []
    parameter.note = "kept"
    parameter.register_hook(lambda gradient: calls.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda _: calls.append("post"))
    set_raw_data(parameter, torch.empty(2, device="meta"))
    assert (parameter.device.type, parameter.requires_grad) == ("meta", True)
    set_raw_data(parameter, torch.full((3,), 5.0))
    return parameter, calls


def test_a_parameter_that_gets_data_of_another_device_stays_what_it_is():
    parameter, _ = moved()
    assert parameter.tolist() == [5, 5, 5]
    assert (type(parameter), parameter.note) == (torch.nn.Parameter, "kept")
    assert (parameter.requires_grad, parameter.is_leaf) == (True, True)


def test_its_hooks_are_called_as_before():
    parameter, calls = moved()
    (parameter * 2).sum().backward()
    assert calls == ["hook", "post"]
    assert parameter.grad.tolist() == [2, 2, 2]


def test_a_released_one_is_released_still():
    parameter, _, _ = make()
    set_raw_data(parameter, torch.empty(2, device="meta"))
    assert isinstance(parameter, ReleasedMixin)
    assert parameter.device.type == "meta"
    assert parameter.tolist() == [3, 4]


def test_a_frozen_one_and_a_buffer_may_be_parts_of_a_graph():
    weight, buffer = torch.nn.Parameter(torch.ones(2)), torch.full((2,), 3.0)
    graph = (weight * buffer).sum()
    set_raw_data(buffer, torch.empty(2, device="meta"))
    assert (buffer.device.type, buffer.requires_grad) == ("meta", False)
    graph.backward()
    assert weight.grad.tolist() == [3, 3]


def test_a_backward_that_is_older_than_the_move_raises():
    parameter = torch.nn.Parameter(torch.ones(2))
    graph = (parameter * 2).sum()
    set_raw_data(parameter, torch.empty(2, device="meta"))
    with pytest.raises(EngineError, match="moved to another device after the forward"):
        graph.backward()


def test_what_torch_refuses_for_another_reason_is_torchs_error():
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        set_raw_data(torch.nn.Parameter(torch.ones(2)), torch.ones(2).to_sparse())


def test_only_parameters_of_a_class_of_their_own_can_answer():
    class Marked(T):
        pass

    marked = torch.ones(1).as_subclass(Marked)
    marked._is_param = True
    assert [can_answer(x) for x in (torch.nn.Parameter(torch.ones(1)), torch.ones(1), marked)] == [True, False, False]


def test_autograds_own_gradient_is_taken_once():
    parameter, _, told = make()
    set_raw_grad(parameter, torch.tensor([1.0, 2.0]))
    assert raw_grad(parameter).tolist() == [1, 2]
    assert take_raw_grad(parameter).tolist() == [1, 2]
    assert (take_raw_grad(parameter), told) == (None, [])
