"""LiveTensor with a manager that writes down what it is told: how each call gets at a value, and at a gradient."""

import contextlib
import types

import pytest
import torch
from unit.runtime.data_parts import InBackward
from unit.runtime.parts import Fake, Parts, narrow

from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.access import Access
from hf_patrickstar.runtime.frames import Frame, Frames, Lookup
from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.live_parameter import raw_data, raw_grad, set_raw_grad, storage_key
from hf_patrickstar.runtime.live_tensor import ConsumedGradient, LiveServices, LiveTensor
from hf_patrickstar.states import Stage

T = torch.Tensor
DATA = T.data.__get__


class Lock:
    """A lock that only counts."""

    def __init__(self):
        self.num_held = 0

    def acquire(self):
        self.num_held += 1

    def release(self):
        self.num_held -= 1

    def __enter__(self):
        self.acquire()

    def __exit__(self, *error):
        self.release()


class Alive:
    """A parameter of two elements, 0 and 1 (and one more, 16 and 17), that answers; and what is told.

    Args:
        is_alone: Whether there is one process.
        trainable: Whether it is trained.
        **answers: What is answered, or raised.
    """

    def __init__(self, *, is_alone=True, trainable=True, **answers):
        parts = Parts()
        self.tensor, self.other = parts.add_chunk(2, 2, trainable=trainable)
        parts.load(self.tensor.chunk)
        self.told = told = []

        def fake(*silent, **found):
            names = {**dict.fromkeys(silent), **found}
            return Fake(told, **{**names, **{name: answers[name] for name in names if name in answers}})

        self.lock, self.frames = Lock(), Frames()
        self.parameters = fake("acquire", "release", "check_usable")
        self.parameters.held_outside_forward = []
        self.mirror = narrow(50, 51)
        gradients = fake("note_read", "drop", has=True)
        gradients.lock = self.lock
        self.phases = fake("apply_factor")
        self.phases.turns = fake("take", "give_up")
        self.manager = manager = types.SimpleNamespace(
            parameters=self.parameters,
            gradients=gradients,
            mirrors=fake("sync_unused", "add", hand_out=self.mirror, has_reusable=False),
            gradient_mirrors=fake("sync_unused", "drop", "assign", hand_out=narrow(3, 4)),
            values=fake(
                look=lambda tensor: tensor.view_copy(tensor.chunk.compute),
                host_alias=lambda tensor, dtype: torch.ones(2, dtype=dtype),
            ),
            writes=fake("take_over", "assign", "apply", "give_up_swapped"),
            watch=fake("add"),
            phases=self.phases,
            sharing=types.SimpleNamespace(is_alone=is_alone),
        )
        weights = types.SimpleNamespace(deferred=lambda tensor: answers.get("deferred"))
        autograd = types.SimpleNamespace(kept_as_numbers=self.kept_as_numbers)
        self.live = LiveTensor(self.tensor, LiveServices(manager, weights, self.frames, autograd))
        self.tensor.bind(self.live)
        self.tensor.dematerialize()

    @contextlib.contextmanager
    def kept_as_numbers(self):
        self.told.append(("begin to keep",))
        yield
        self.told.append(("end of keeping",))

    def inside(self, stage=Stage.FORWARD):
        """Begins a forward; returns its frame."""
        self.frames.stack.append(Frame(torch.nn.Identity(), stage))
        return self.frames.stack[-1]

    def take(self, *left_out):
        """What was told since the last call: tensors by name or value."""
        found, self.told[:] = list(self.told), []
        return [(name, *map(_word, args)) for name, *args in found if name not in left_out]

    def kind(self, func, **settings):
        """How a call gets at the value: ``inside``, ``graph``, ``value``, or ``given``."""
        access = self.live.access(func, **{"is_graph": False, **settings})
        access.end()
        whats = {
            "code that reads a parameter of another module": "inside",
            "code outside of every forward that computes with a parameter": "graph",
        }
        told = self.take()
        kinds = [whats[it[2]] for it in told if it[0] == "acquire"] + ["value" for it in told if it[0] == "look"]
        return kinds[0] if kinds else "given"

    def materialize(self):
        """What acquiring does: the parameter has its value, in the copy of its chunk."""
        self.tensor.materialize(self.tensor.chunk.compute)


def _word(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value.spec.name if hasattr(value, "spec") else value


# Which access is chosen


@pytest.mark.parametrize(
    ("func", "settings", "outside", "in_forward"),
    [
        (torch.mul, {"is_graph": True}, "graph", "inside"),
        (torch.mul, {"is_graph": False}, "value", "inside"),
        (T.mul_, {"is_graph": False, "writes": True}, "value", "value"),
        (T.mul_, {"is_graph": True, "writes": True}, "graph", "inside"),
        (T.detach, {"is_graph": True}, "value", "value"),
        (T.item, {"is_graph": True}, "value", "value"),
        (T.tolist, {"is_graph": False}, "value", "value"),
        (torch.equal, {"is_graph": True}, "value", "value"),
        (DATA, {"is_graph": True}, "value", "value"),
        (T.t_, {"is_graph": False, "writes": True}, "value", "value"),
    ],
)
def test_where_a_call_is_made_and_what_it_calls_choose_the_access(func, settings, outside, in_forward):
    one = Alive()
    assert one.kind(func, **settings) == outside
    one.inside()
    assert one.kind(func, **settings) == in_forward


@pytest.mark.parametrize("func", [T.numpy, T.data_ptr, T.untyped_storage, T.__dlpack__, torch.Tensor.is_set_to])
@pytest.mark.parametrize("is_graph", [True, False])
def test_memory_itself_is_that_of_a_mirror(func, is_graph):
    one = Alive()
    access = one.live.access(func, is_graph=is_graph)
    assert access.value.data_ptr() == one.mirror.data_ptr()
    access.end()


@pytest.mark.parametrize(
    ("func", "writes"), [(T.detach, False), (T.mul_, True), (torch.mul, False), (T.data_ptr, False)]
)
def test_with_several_processes_every_call_inside_of_a_forward_uses_the_chunk(func, writes):
    one = Alive(is_alone=False)
    one.inside()
    assert one.kind(func, writes=writes) == "inside"


@pytest.mark.parametrize(("is_graph", "expected"), [(True, "inside"), (False, "value")])
def test_inside_of_a_backward_only_what_is_recorded_uses_the_chunk(is_graph, expected):
    one, seen = Alive(), []
    function = lambda: seen.append(one.kind(torch.mul, is_graph=is_graph))  # noqa: E731
    InBackward.apply(torch.ones(1, requires_grad=True), function).backward()
    assert seen == [expected]


def test_while_the_model_is_saved_a_call_gets_what_is_read_later():
    later = torch.zeros(2)
    one = Alive(deferred=later)
    access = one.live.access(T.detach, is_graph=False)
    assert (type(access), access.value is later, one.take()) == (Access, True, [])


def test_a_parameter_that_is_looked_up_is_its_leaf():
    one, leaf = Alive(), torch.zeros(2)
    one.inside().lookups[id(one.tensor.parameter)] = Lookup(one.tensor, leaf, 0)
    access = one.live.access(torch.nn.functional.embedding, is_graph=True)
    assert (type(access), access.value is leaf, one.take()) == (Access, True, [])


def test_a_parameter_cannot_be_shared_with_other_processes():
    one = Alive()
    with pytest.raises(EngineError, match=r"'t0' is in a chunk and cannot be moved to shared memory"):
        one.live.access(T.share_memory_, is_graph=False)


# The value, not recorded


def test_a_value_is_looked_at_where_it_is_after_all_writes_are_taken_over():
    one = Alive()
    one.tensor.num_writes = 3
    access = one.live.access(torch.mul, is_graph=False)
    assert one.take() == [
        ("check_usable", "t0"),
        *[("sync_unused", "t0")] * 2,
        ("take_over", "t0", True),
        ("look", "t0"),
    ]
    assert access.value.tolist() == [0, 1]
    assert access.value.data_ptr() == one.tensor.chunk.compute.data_ptr()
    assert (access.value.requires_grad, access.value.is_leaf, one.tensor.read_at) == (True, True, 3)
    assert one.lock.num_held == 1
    access.finish()
    access.end()
    assert (one.lock.num_held, one.take()) == (0, [])


def test_the_value_of_a_frozen_parameter_requires_no_gradient():
    access = Alive(trainable=False).live.access(torch.mul, is_graph=False)
    assert not access.value.requires_grad


def test_a_parameter_that_cannot_be_used_leaves_no_lock_behind():
    def refuse(tensor):
        raise EngineError("lost")

    one = Alive(look=refuse)
    with pytest.raises(EngineError, match="lost"):
        one.live.access(torch.mul, is_graph=False)
    assert one.lock.num_held == 0


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("leave", [lambda tensor: tensor.unbind(), lambda tensor: setattr(tensor, "is_open", True)])
def test_a_parameter_that_has_left_meanwhile_answers_for_itself(leave, is_graph):
    one = Alive()
    leave(one.tensor)
    access = one.live.access(torch.mul, is_graph=is_graph)
    assert access.value is one.tensor.parameter
    assert one.take() == [("take", "code that computes with a parameter"), ("give_up",)] * is_graph
    assert one.lock.num_held == 0


def test_what_a_call_writes_is_written_everywhere():
    one = Alive()
    access = one.live.access(T.mul_, is_graph=False)
    one.take()
    with torch.no_grad():
        access.value.add_(5)
    access.finish()
    assert one.take() == [("apply", "t0", [5, 6])]


def test_a_call_that_says_that_it_writes_is_believed():
    one = Alive()
    access = one.live.access(T.mul_, is_graph=False, writes=True)
    one.take()
    access.finish()
    assert one.take() == [("apply", "t0", [0, 1])]


def test_a_write_to_another_parameter_of_the_chunk_is_none_to_this():
    one = Alive()
    access = one.live.access(torch.mul, is_graph=False)
    one.take()
    one.tensor.chunk.compute.add_(5)
    access.finish()
    assert one.take() == []


def test_a_change_of_shape_is_made_on_a_copy_and_assigned():
    one = Alive()
    access = one.live.access(T.unsqueeze_, is_graph=False)
    assert access.value.data_ptr() != one.tensor.chunk.compute.data_ptr()
    one.take()
    with torch.no_grad():
        access.value.unsqueeze_(0)
    access.finish()
    assert one.take() == [("assign", "t0", [[0, 1]])]


@pytest.mark.parametrize(("func", "is_held"), [(T.data_ptr, True), (T.numpy, False)])
def test_only_who_has_an_address_may_keep_a_mirror_unseen(func, is_held):
    one = Alive()
    access = one.live.access(func, is_graph=False)
    assert one.take()[-1] == ("hand_out", "t0", is_held)
    assert access.needs_copy([access.value]) is False
    assert one.take() == []


def test_a_result_that_looks_into_the_chunk_is_made_again_from_a_mirror():
    one = Alive()
    access = one.live.access(T.view, is_graph=False)
    one.take()
    assert access.needs_copy([torch.ones(1), access.value[:1]]) is True
    assert one.take() == [("hand_out", "t0")]
    assert (access.value.tolist(), access.value.requires_grad) == ([50, 51], True)
    assert access.needs_copy([access.value]) is False, "once"


def test_a_result_that_looks_into_memory_of_its_own_becomes_the_mirror():
    one = Alive(look=narrow(8, 9))
    access = one.live.access(T.view, is_graph=False)
    one.take()
    assert access.needs_copy([access.value[:1]]) is False
    assert one.take() == [("has_reusable", "t0"), ("add", "t0", [8, 9])]


def test_a_mirror_that_is_there_is_taken_before_memory_becomes_another():
    one = Alive(look=narrow(8, 9), has_reusable=True)
    access = one.live.access(T.view, is_graph=False)
    one.take()
    assert access.needs_copy([access.value[:1]]) is True
    assert one.take() == [("has_reusable", "t0"), ("hand_out", "t0")]


@pytest.mark.parametrize("make", [lambda value: value.clone(), lambda value: torch.eye(2).to_sparse()])
def test_results_of_their_own_need_no_mirror(make):
    one = Alive()
    access = one.live.access(torch.mul, is_graph=False)
    one.take()
    assert access.needs_copy([make(access.value.detach())]) is False
    assert one.take() == []


# Outside of forwards, recorded


def test_code_outside_of_forwards_has_the_turn_and_the_parameter_and_keeps_numbers():
    one = Alive()
    access = one.live.access(torch.mul, is_graph=True)
    assert one.take() == [
        ("take", "code that computes with a parameter"),
        ("acquire", "t0", "code outside of every forward that computes with a parameter"),
        ("begin to keep",),
    ]
    assert access.value is one.tensor.parameter
    access.end()
    assert one.take() == [("end of keeping",), ("release", "t0"), ("give_up",)]


def test_code_that_cannot_have_the_parameter_gives_its_turn_up():
    def refuse(tensor, who):
        raise EngineError("no room")

    one = Alive(acquire=refuse)
    with pytest.raises(EngineError, match="no room"):
        one.live.access(torch.mul, is_graph=True)
    assert [it[0] for it in one.take()] == ["take", "acquire", "give_up"]


def test_a_recorded_view_is_made_of_a_copy_that_is_a_part_of_the_graph():
    one = Alive()
    one.materialize()
    access = one.live.access(T.view, is_graph=True)
    one.take()
    assert access.needs_copy([access.value[:1]]) is True
    assert one.take() == [("has_reusable", "t0"), ("add", "t0", [0, 1])]
    assert storage_key(access.value) != one.tensor.chunk.storage._cdata
    (access.value * 3).sum().backward()
    assert raw_grad(one.tensor.parameter).tolist() == [3, 3]
    assert access.needs_copy([access.value]) is False, "once"


def test_a_recorded_view_of_a_mirror_that_is_there_has_its_gradient_too():
    one = Alive(has_reusable=True)
    one.materialize()
    access = one.live.access(T.view, is_graph=True)
    one.take()
    assert access.needs_copy([access.value[:1]]) is True
    assert one.take() == [("has_reusable", "t0"), ("hand_out", "t0")]
    assert access.value.data_ptr() == one.mirror.data_ptr()
    (access.value * 3).sum().backward()
    assert raw_grad(one.tensor.parameter).tolist() == [3, 3]


def test_recorded_results_of_their_own_need_no_copy():
    one = Alive()
    one.materialize()
    access = one.live.access(torch.mul, is_graph=True)
    assert access.needs_copy([access.value * 2]) is False


def test_a_recorded_call_makes_room_by_a_copy_and_is_released_once():
    one = Alive()
    one.materialize()
    access = one.live.access(torch.mul, is_graph=True)
    one.take()
    access.make_room()
    assert one.take() == [("release", "t0")]
    assert (access.value is one.tensor.parameter, access.value.requires_grad) == (False, True)
    access.end()
    assert one.take() == [("end of keeping",), ("give_up",)]


# Inside of forwards


def test_inside_of_a_forward_the_parameter_itself_is_computed_with():
    one = Alive()
    one.inside()
    access = one.live.access(torch.mul, is_graph=True)
    assert one.take() == [("acquire", "t0", "code that reads a parameter of another module", False)]
    assert access.value is one.tensor.parameter
    access.end()
    access.end()
    assert one.take() == [("release", "t0")], "once"


@pytest.mark.parametrize(("stage", "trainable"), [(Stage.BACKWARD, True), (Stage.FORWARD, False)])
def test_only_frozen_parameters_of_a_recomputation_are_aliased(stage, trainable):
    one = Alive(trainable=trainable)
    one.inside(stage)
    assert one.live.access(torch.mul, is_graph=True).value is one.tensor.parameter


def test_a_recomputation_gets_an_alias_of_a_frozen_parameter():
    one = Alive(trainable=False)
    one.inside(Stage.BACKWARD)
    access = one.live.access(torch.mul, is_graph=True)
    assert one.take()[0][-1] is True
    assert access.value.data_ptr() == one.tensor.chunk.compute.data_ptr()
    assert (access.value.tolist(), access.value is one.tensor.parameter) == ([0, 1], False)


def test_what_is_given_away_stays_until_the_forward_ends():
    one = Alive(is_alone=False)
    frame = one.inside()
    one.live.access(T.data_ptr, is_graph=False).end()
    assert (frame.acquired, one.take("acquire")) == ([one.tensor], [])


def test_what_a_call_returns_itself_stays_until_the_forward_ends():
    one = Alive()
    frame = one.inside()
    access = one.live.access(torch.mul, is_graph=True)
    access.note_returned()
    access.end()
    assert (frame.acquired, one.take("acquire")) == ([one.tensor], [])


def test_what_is_given_away_in_a_backward_stays_until_that_ends():
    one = Alive(is_alone=False)

    def inside():
        one.live.access(T.data_ptr, is_graph=False).end()

    InBackward.apply(torch.ones(1, requires_grad=True), inside).backward()
    assert (one.parameters.held_outside_forward, one.take("acquire")) == ([one.tensor], [])


def test_a_result_that_looks_into_the_chunk_is_watched_and_not_copied():
    one = Alive()
    one.inside()
    one.materialize()
    access = one.live.access(T.view, is_graph=True)
    one.take()
    assert access.needs_copy([torch.ones(2)]) is False
    assert one.take() == []
    assert access.needs_copy([one.tensor.chunk.compute[:1]]) is False
    assert one.take() == [("add", "t0")]


def test_inside_of_a_forward_room_is_made_by_a_copy():
    one = Alive()
    one.inside()
    one.materialize()
    access = one.live.access(torch.mul, is_graph=True)
    one.take()
    access.make_room()
    access.make_room()
    assert one.take() == [("release", "t0")]
    assert access.value.tolist() == [0, 1]
    assert storage_key(access.value) != one.tensor.chunk.storage._cdata
    access.end()
    assert one.take() == []


# Assignments and copies


def test_an_assignment_is_a_write_of_its_own():
    one, value = Alive(), torch.ones(2, requires_grad=True)
    one.live.assign(value)
    assert one.take() == [("assign", "t0", [1, 1])]
    with pytest.raises(TypeError, match="Variable data has to be a tensor, but got list"):
        one.live.assign([1, 2])


@pytest.mark.parametrize(
    ("source", "is_graph", "is_inside", "copies"),
    [
        (torch.full((1,), 5.0), False, False, True),
        (torch.full((2,), 5.0), True, False, False),
        (torch.full((2,), 5.0), False, True, False),
        (narrow(5, 5), False, False, False),
        (torch.tensor([5, 5]), False, False, False),
    ],
)
def test_all_bits_of_a_wider_source_are_copied(source, is_graph, is_inside, copies):
    one = Alive()
    if is_inside:
        one.inside()
    assert one.live.copy_from(source, is_graph) is copies
    assert one.take() == ([("take_over", "t0"), ("apply", "t0", [5, 5])] if copies else [])
    assert one.lock.num_held == 0


def test_data_that_is_out_is_watched():
    one = Alive()
    one.live.note_data_is_out()
    assert one.take() == [("add", "t0")]


def test_a_state_dictionary_gets_the_placeholder_first():
    one = Alive()
    assert one.live.detached_for_state_dict().isnan().tolist() == [True, True]
    assert one.take() == []


def test_the_value_on_the_host_has_the_type_that_was_loaded():
    one = Alive()
    assert one.live.host_value().dtype is torch.float32
    assert one.take() == [("take_over", "t0"), ("host_alias", "t0", torch.float32)]


def test_the_parameter_itself_answers_and_what_it_was_exchanged_for_gets_what_was_kept():
    one = Alive()
    assert one.live.value_for(one.tensor.parameter) is None
    assert one.take() == []
    one.live.kept = kept = torch.ones(2)
    assert one.live.value_for(torch.nn.Parameter(torch.zeros(2))) is kept
    assert one.take() == [("give_up_swapped", "t0")]


def test_a_view_of_the_whole_is_made_over_a_mirror_and_belongs_to_the_parameter():
    one = Alive()
    view = one.live.view_whole(T.view_as)
    assert (view.tolist(), view.data_ptr()) == ([50, 51], one.mirror.data_ptr())
    assert view.grad_fn.next_functions[0][0].variable is one.tensor.parameter
    assert raw_data(one.tensor.parameter).isnan().all()
    assert one.take() == [("take_over", "t0", True), ("hand_out", "t0")]
    assert one.lock.num_held == 0


def test_a_view_that_fails_leaves_the_placeholder():
    def fail(parameter, other):
        raise ValueError("inside")

    one = Alive()
    with pytest.raises(ValueError, match="inside"):
        one.live.view_whole(fail)
    assert raw_data(one.tensor.parameter).isnan().all()
    assert one.lock.num_held == 0


# The gradient


def test_a_gradient_is_handed_out_after_the_factor_is_applied():
    one = Alive()
    assert one.live.get_grad().tolist() == [3, 4]
    assert one.take() == [("has", "t0"), ("apply_factor",), ("note_read",), ("hand_out", "t0")]
    assert one.lock.num_held == 0


def test_where_there_is_no_gradient_there_is_none():
    one = Alive(has=False)
    assert one.live.get_grad() is None
    assert one.take() == [("has", "t0")]


def test_in_the_middle_of_a_backward_the_gradient_is_autograds():
    one, own, new = Alive(), narrow(1, 1), narrow(2, 2)
    set_raw_grad(one.tensor.parameter, own)
    assert one.live.get_grad() is own
    one.live.set_grad(new)
    assert raw_grad(one.tensor.parameter) is new
    assert one.take() == []


def test_a_frozen_parameter_has_what_gradient_it_is_given():
    one, new = Alive(trainable=False), narrow(2, 2)
    assert one.live.get_grad() is None
    one.live.set_grad(new)
    assert one.live.get_grad() is new
    assert one.take() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_may_be_replaced_in_both_types(dtype):
    one = Alive()
    one.live.set_grad(torch.ones(2, dtype=dtype))
    assert one.take() == [("apply_factor",), ("assign", "t0", [1, 1])]


def test_a_gradient_that_is_set_to_none_is_dropped_in_both_places():
    one = Alive()
    one.live.set_grad(None)
    assert one.take() == [("drop", "t0"), ("drop", "t0")]


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (torch.ones(3), r"'t0' must have shape \(2,\) and type torch.bfloat16, got \(3,\) and torch.float32"),
        (torch.ones(2, dtype=torch.float16), r"got \(2,\) and torch.float16"),
    ],
)
def test_a_gradient_of_another_shape_or_type_is_refused(gradient, message):
    one = Alive()
    with pytest.raises(EngineError, match=message):
        one.live.set_grad(gradient)
    assert one.take() == []


def test_what_is_no_tensor_is_no_gradient():
    with pytest.raises(TypeError, match="the gradient of parameter 't0' must be a tensor or None, got a list"):
        Alive().live.set_grad([1, 2])


def test_a_parameter_is_not_its_own_gradient():
    one = Alive()
    with pytest.raises(EngineError, match="'t0' cannot be its own gradient"):
        one.live.set_grad(one.tensor.parameter)


# A gradient that was consumed


@pytest.mark.parametrize("place", [GradientPlace.CONSUMED, GradientPlace.INCOMPLETE])
def test_a_consumed_gradient_is_there_and_not_to_be_read(place):
    one = Alive()
    one.tensor.gradient = place
    gradient = one.live.get_grad()
    assert (gradient.shape, gradient.dtype, gradient.numel()) == ((2,), torch.bfloat16, 2)
    with pytest.raises(EngineError, match=r"'t0' was consumed by optimizer.step\(\), and 'add' was called on it"):
        gradient.add(1)
    with pytest.raises(EngineError, match="'add' was called on it"):
        torch.add(torch.ones(2), gradient)
    assert one.take() == []


@pytest.mark.parametrize(("is_owned", "place"), [(True, GradientPlace.ZERO), (False, GradientPlace.REMOTE)])
def test_a_consumed_gradient_that_is_zeroed_is_zero_where_it_lives(is_owned, place):
    one = Alive()
    one.tensor.gradient, one.tensor.is_owned = GradientPlace.CONSUMED, is_owned
    gradient = one.live.get_grad()
    assert gradient.zero_() is gradient
    assert one.tensor.gradient is place


def test_a_consumed_gradient_that_is_written_back_changes_nothing():
    one = Alive()
    one.live.set_grad(ConsumedGradient.make(one.tensor))
    assert one.take() == []
