"""Where gradients are, from their arrival to the end of the optimizer's step."""

import itertools

import pytest
import torch
from unit.runtime.data_parts import Process, Ticket, values_at
from unit.spec_builders import BF16, FP32

from hf_patrickstar.errors import BudgetError, EngineError
from hf_patrickstar.events import GradientStored, ValueRestored
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import GRADIENT
from hf_patrickstar.runtime.gradient_place import GradientPlace
from hf_patrickstar.runtime.gradients import Gradients, consumed, gradient_norm

NONE, PARAM, LIST, REMOTE = GradientPlace.NONE, GradientPlace.PARAM, GradientPlace.LIST, GradientPlace.REMOTE
ZERO, KEPT = GradientPlace.ZERO, GradientPlace.KEPT
CONSUMED, INCOMPLETE = GradientPlace.CONSUMED, GradientPlace.INCOMPLETE


class OneOfTwo:
    """The first of two processes, of which the other never says anything."""

    rank, world_size = 0, 2


def narrow(*numbers):
    return torch.tensor(numbers, dtype=torch.bfloat16)


def wide(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


def make(*, accumulate=False, keeps="auto", collectives=None, device_nbytes=4096, host_nbytes=4096, **chunk):
    """A process with a chunk of two tensors of two elements (0, 1 and 16, 17), and the first of them."""
    process = Process(collectives, device_nbytes, host_nbytes)
    tensor, _ = process.add_chunk(2, 2, **chunk)
    return process, process.make_gradients(accumulate, keeps), tensor


def has(gradients, tensor):
    """The gradient as numbers, with its place."""
    found = gradients.of(tensor)
    return tensor.gradient, None if found is None else found.tolist()


# Storing


def test_there_is_none_at_first():
    _, gradients, tensor = make()
    assert has(gradients, tensor) == (NONE, None)
    assert not gradients.has(tensor)
    assert gradients.is_absent(tensor)


def test_the_first_gradient_is_written_over_the_parameter():
    process, gradients, tensor = make()
    tensor.crossing_nbytes = 4
    gradients.place(tensor, narrow(5, 6))
    assert has(gradients, tensor) == (PARAM, [5.0, 6.0])
    assert gradients.of(tensor).dtype is torch.bfloat16
    assert values_at(tensor) == [[5.0, 6.0], [0.0, 1.0]], "the master has the value"
    assert values_at(process.tensors[1]) == [[16.0, 17.0]] * 2
    assert process.events == [GradientStored(0, 0, 4)]
    assert tensor.crossing_nbytes == 0
    assert gradients.has(tensor)
    assert not gradients.is_absent(tensor)
    assert GRADIENT not in tensor.chunk.lists


@pytest.mark.parametrize("home", list(Tier))
def test_what_is_found_is_the_place_itself(home):
    _, gradients, tensor = make(home=home)
    gradients.place(tensor, narrow(5, 6))
    gradients.of(tensor).mul_(2)
    assert has(gradients, tensor) == (PARAM, [10.0, 12.0])


@pytest.mark.parametrize("home", list(Tier))
def test_the_second_gradient_is_added_in_fp32_and_the_value_comes_back(home):
    process, gradients, tensor = make(home=home)
    gradients.place(tensor, narrow(256, 6))
    gradients.place(tensor, narrow(1, 6))
    assert has(gradients, tensor) == (LIST, [257.0, 12.0])
    assert values_at(tensor) == [[0.0, 1.0]] * 2
    assert process.events == [GradientStored(0, 0, 0)] * 2
    assert process.room.asked == ([16] if home is Tier.DEVICE else []), "on the host nobody can make room"


def test_a_copy_on_the_device_gets_the_value_that_comes_back():
    process, gradients, tensor = make()
    process.load(tensor.chunk)
    tensor.chunk.compute.fill_(0)
    gradients.place(tensor, narrow(5, 6))
    gradients.place(tensor, narrow(1, 1))
    assert tensor.chunk.compute.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert process.events == [GradientStored(0, 0, 0), ValueRestored(0, 0, 4), GradientStored(0, 0, 0)]


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": True},
        {"has_master": False},
        {"has_master": False, "types": FP32},
        {"accumulate": True, "types": FP32},
    ],
)
def test_gradients_go_to_a_list_where_the_value_has_no_other_place_or_more_are_to_come(settings):
    process, gradients, tensor = make(**settings)
    gradients.place(tensor, narrow(256, 6).to(tensor.chunk.param.dtype))
    assert has(gradients, tensor) == (LIST, [256.0, 6.0])
    assert gradients.of(tensor).dtype is torch.float32
    gradients.place(tensor, narrow(1, 6).to(tensor.chunk.param.dtype))
    assert has(gradients, tensor) == (LIST, [257.0, 12.0])
    assert values_at(tensor)[0] == [0.0, 1.0]
    assert process.events == [GradientStored(0, 0, 0)] * 2


def test_what_was_in_a_list_before_does_not_count():
    """A new list is not filled with zeros."""
    _, gradients, tensor = make(accumulate=True)
    gradients.place(tensor, narrow(5, 6))
    gradients.drop(tensor)
    gradients.place(tensor, narrow(1, 2))
    assert has(gradients, tensor) == (LIST, [1.0, 2.0])


@pytest.mark.parametrize("need", ["num_saved", "users"])
def test_a_gradient_waits_while_the_value_in_its_place_is_needed(need):
    process, gradients, tensor = make()
    setattr(tensor, need, 1)
    gradients.place(tensor, narrow(5, 6))
    gradients.place(tensor, narrow(1, 1))
    assert tensor.gradient is NONE
    assert values_at(tensor) == [[0.0, 1.0]] * 2
    assert process.events == []
    assert gradients.has(tensor)
    assert not gradients.is_absent(tensor)
    setattr(tensor, need, 0)
    gradients.place_deferred(tensor)
    assert tensor.deferred_gradient is None
    assert has(gradients, tensor) == (PARAM, [6.0, 7.0])
    assert process.events == [GradientStored(0, 0, 0)]


def test_whoever_asks_for_a_gradient_that_waits_gets_it():
    _, gradients, tensor = make()
    tensor.num_saved = 1
    gradients.place(tensor, narrow(5, 6))
    assert has(gradients, tensor) == (LIST, [5.0, 6.0]), "the value is still needed"
    assert values_at(tensor) == [[0.0, 1.0]] * 2


def test_where_gradients_accumulate_none_waits():
    _, gradients, tensor = make(accumulate=True)
    tensor.num_saved = 1
    gradients.place(tensor, narrow(5, 6))
    assert tensor.deferred_gradient is None
    assert has(gradients, tensor) == (LIST, [5.0, 6.0])


def test_gradients_of_a_lookup_wait_for_each_other():
    _, gradients, tensor = make(accumulate=True)
    tensor.is_looked_up = True
    gradients.place(tensor, narrow(256, 6))
    gradients.place(tensor, narrow(1, 6))
    assert tensor.gradient is NONE
    gradients.place_deferred(tensor)
    assert has(gradients, tensor) == (LIST, [256.0, 12.0]), "added in the parameter's type, as autograd does"


def test_with_other_processes_nobody_needs_what_is_at_home():
    _, gradients, tensor = make(collectives=OneOfTwo())
    tensor.num_saved = 1
    gradients.add(tensor, narrow(5, 6))
    assert has(gradients, tensor) == (PARAM, [5.0, 6.0])


def test_a_gradient_that_finds_no_room_is_where_it_was():
    process, gradients, tensor = make(host_nbytes=30)
    gradients.attempts.begin()
    gradients.place(tensor, narrow(5, 6))
    with pytest.raises(BudgetError, match="'grad'"):
        gradients.place(tensor, narrow(1, 1))
    assert has(gradients, tensor) == (PARAM, [5.0, 6.0])
    tensor.deferred_gradient = narrow(1, 1)
    with pytest.raises(BudgetError):
        gradients.place_deferred(tensor)
    assert tensor.deferred_gradient.tolist() == [1.0, 1.0]
    assert process.events == [GradientStored(0, 0, 0)]


@pytest.mark.parametrize(("before", "dropped"), [(NONE, {0}), (LIST, set())])
def test_attempts_know_what_was_placed(before, dropped):
    _, gradients, tensor = make(accumulate=True)
    if before is LIST:
        gradients.place(tensor, narrow(1, 1))
    gradients.attempts.begin()
    assert not gradients.attempts.is_counted(0)
    gradients.place(tensor, narrow(5, 6))
    assert gradients.attempts.undo() == dropped
    assert gradients.attempts.is_counted(0) == (before is LIST)


def test_what_waits_is_not_placed_yet():
    _, gradients, tensor = make()
    gradients.attempts.begin()
    tensor.users = 1
    gradients.place(tensor, narrow(5, 6))
    assert gradients.attempts.undo() == set()


@pytest.mark.parametrize("records", [True, False])
def test_norms_are_computed_when_a_gradient_is_stored(records):
    _, gradients, tensor = make()
    gradients.records_norms = records
    gradients.place(tensor, narrow(3, 4))
    assert tensor.gradient_norm == (torch.tensor(5.0) if records else None)
    gradients.place(tensor, narrow(3, 4))
    assert tensor.gradient_norm is None, "it is another gradient now"


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 5.0), (1.0, 7.0), (float("inf"), 4.0)])
def test_norms_are_of_the_type_of_the_states(norm_type, expected):
    found = gradient_norm(narrow(3, -4), torch.float64, norm_type)
    assert (found.item(), found.dtype) == (expected, torch.float64)


@pytest.mark.parametrize("action", ["add", "of", "put", "move_to_list", "multiply", "drop"])
def test_the_home_is_not_touched_while_it_is_copied(action):
    _, gradients, tensor = make()
    gradients.place(tensor, narrow(5, 6))
    seen = []
    tensor.chunk.note(Ticket(lambda: seen.append(values_at(tensor)[0])))
    arguments = {"add": [narrow(1, 1)], "put": [narrow(1, 1)], "multiply": [torch.tensor(2.0)]}.get(action, [])
    getattr(gradients, action)(tensor, *arguments)
    assert seen == [[5.0, 6.0]]
    assert tensor.chunk.under_way == ()


# Making way


def test_the_value_makes_way_for_nothing_it_does_not_have_to():
    process, gradients, tensor = make()
    gradients.move_to_list(tensor)
    assert GRADIENT not in tensor.chunk.lists
    assert process.events == []


def test_all_values_of_a_chunk_come_back():
    process, gradients, first = make()
    second = process.tensors[1]
    gradients.place(first, narrow(5, 6))
    gradients.place(second, narrow(7, 8))
    gradients.records_norms, first.gradient_norm = True, torch.tensor(1.0)
    gradients.bring_values_back(first.chunk)
    assert first.chunk.param.tolist() == [0.0, 1.0, 16.0, 17.0]
    assert [has(gradients, tensor) for tensor in (first, second)] == [(LIST, [5.0, 6.0]), (LIST, [7.0, 8.0])]
    assert first.gradient_norm is None


def test_the_error_for_want_of_room_knows_what_other_chunks_will_need():
    process, gradients, tensor = make(host_nbytes=24 + 60 + 7)
    process.add_chunk(3)  # 18 bytes, and 12 for its gradients
    process.add_chunk(3, trainable=False)  # 6 bytes, and none
    process.add_chunk(6, home=Tier.DEVICE)  # chunks of the device may come back
    process.pool.allocate(Tier.HOST, 36, torch.uint8, "param")
    gradients.place(tensor, narrow(5, 6))
    with pytest.raises(BudgetError, match=r"16 B \(16 bytes\) more needed for 'grad', and up to 36 B") as caught:
        gradients.move_to_list(tensor)
    assert "7 B" in str(caught.value)
    assert has(gradients, tensor) == (PARAM, [5.0, 6.0])


def test_chunks_of_the_host_need_nothing_on_the_device():
    process, gradients, tensor = make(home=Tier.DEVICE, device_nbytes=30)
    process.add_chunk(3)
    gradients.place(tensor, narrow(5, 6))
    with pytest.raises(BudgetError, match="more needed for 'grad'") as caught:
        gradients.move_to_list(tensor)
    assert "and up to" not in str(caught.value)
    assert process.room.asked == [16]


@pytest.mark.parametrize(
    ("settings", "is_made"),
    [
        ({}, True),
        ({"types": FP32}, False),
        ({"types": FP32, "accumulate": True}, True),
        ({"types": FP32, "has_master": False}, True),
    ],
)
def test_room_for_gradients_that_are_given(settings, is_made):
    _, gradients, tensor = make(**settings)
    gradients.reserve(tensor.chunk)
    assert (GRADIENT in tensor.chunk.lists) == is_made


# Replacing


@pytest.mark.parametrize(
    ("settings", "own", "place"),
    [
        ({}, narrow(5, 6), PARAM),
        ({}, wide(257, 6), LIST),
        ({"accumulate": True}, narrow(5, 6), LIST),
        ({"types": FP32}, wide(257, 6), PARAM),
    ],
)
@pytest.mark.parametrize("before", [NONE, CONSUMED, INCOMPLETE, ZERO])
def test_a_gradient_that_is_given_keeps_all_bits(settings, own, place, before):
    _, gradients, tensor = make(**settings)
    tensor.gradient = before
    tensor.gradient_norm = torch.tensor(1.0)
    given = own.clone()
    gradients.put(tensor, given)
    if before is not ZERO or place is LIST:
        assert tensor.gradient is place
    assert has(gradients, tensor)[1] == own.tolist()
    assert tensor.gradient_norm is None
    gradients.of(tensor).add_(1)
    assert torch.equal(given, own), "what was given is somebody's"


@pytest.mark.parametrize(("own", "place"), [(narrow(1, 2), PARAM), (wide(257, 2), LIST)])
def test_a_gradient_that_is_given_replaces_what_is_over_the_parameter(own, place):
    _, gradients, tensor = make()
    gradients.place(tensor, narrow(5, 6))
    gradients.put(tensor, own)
    assert has(gradients, tensor) == (place, own.tolist())
    assert values_at(tensor)[1] == [0.0, 1.0]
    assert (values_at(tensor)[0] == [0.0, 1.0]) == (place is LIST)


@pytest.mark.parametrize("own", [narrow(1, 2), wide(257, 2)])
def test_a_gradient_that_is_given_replaces_what_is_in_the_list(own):
    _, gradients, tensor = make(accumulate=True)
    gradients.place(tensor, narrow(5, 6))
    gradients.put(tensor, own)
    assert has(gradients, tensor) == (LIST, own.tolist())


def test_a_gradient_of_another_rank_is_there():
    process, gradients, _ = make(collectives=OneOfTwo(), chunk_numel=2)
    other = process.tensors[1]
    assert not other.is_owned
    other.gradient_norm = torch.tensor(1.0)
    gradients.put(other, narrow(1, 2))
    assert (other.gradient, other.gradient_norm, gradients.of(other)) == (REMOTE, None, None)
    assert gradients.has(other)


@pytest.mark.parametrize("keeps", [True, "auto", False])
@pytest.mark.parametrize("before", [NONE, REMOTE, CONSUMED, INCOMPLETE])
def test_another_rank_got_a_gradient(before, keeps):
    _, gradients, tensor = make(keeps=keeps)
    tensor.gradient = before
    gradients.note_remote(tensor)
    is_lost = before in (CONSUMED, INCOMPLETE) and keeps is not False
    assert tensor.gradient is (INCOMPLETE if is_lost else REMOTE)


# Scaling


@pytest.mark.parametrize(
    ("coefficient", "scale", "factor"), [(None, None, None), (0.5, None, 0.5), (None, 0.25, 0.25), (0.5, 0.25, 0.125)]
)
def test_what_is_still_to_be_multiplied_is_taken_once(coefficient, scale, factor):
    _, gradients, _ = make()
    gradients.coefficient = None if coefficient is None else torch.tensor(coefficient)
    gradients.inverse_scale = None if scale is None else torch.tensor(scale)
    assert gradients.has_factor == (factor is not None)
    found = gradients.take_factor()
    assert (found if found is None else found.item()) == factor
    assert not gradients.has_factor
    assert gradients.take_factor() is None


@pytest.mark.parametrize(("types", "place"), [(BF16, LIST), (FP32, PARAM)])
def test_gradients_are_multiplied_in_fp32(types, place):
    _, gradients, tensor = make(types=types)
    gradients.place(tensor, narrow(257 if types is FP32 else 255, 6).to(tensor.chunk.param.dtype))
    tensor.gradient_norm = torch.tensor(1.0)
    gradients.multiply(tensor, torch.tensor(1.5))
    first = gradients.of(tensor)[0].item()
    assert (tensor.gradient, first) == (place, 384.0 if types is FP32 else 382.5)
    assert tensor.gradient_norm is None


@pytest.mark.parametrize("place", [NONE, CONSUMED, INCOMPLETE])
def test_what_is_not_there_is_not_multiplied(place):
    process, gradients, tensor = make()
    tensor.gradient = place
    gradients.multiply(tensor, torch.tensor(2.0))
    assert (tensor.gradient, process.events, tensor.chunk.lists.keys()) == (place, [], {"master"})


def test_a_gradient_that_waits_is_multiplied_too():
    _, gradients, tensor = make()
    tensor.num_saved = 1
    gradients.place(tensor, narrow(5, 6))
    gradients.multiply(tensor, torch.tensor(2.0))
    assert has(gradients, tensor) == (LIST, [10.0, 12.0])


# Zeros


@pytest.mark.parametrize(
    ("settings", "place"), [({}, PARAM), ({"accumulate": True}, LIST), ({"has_master": False}, LIST)]
)
def test_zeros_are_written_when_they_are_asked_for(settings, place):
    _, gradients, tensor = make(**settings)
    gradients.place(tensor, narrow(5, 6))
    gradients.drop(tensor, to_zero=True)
    assert tensor.gradient is ZERO
    assert values_at(tensor)[0] == [0.0, 1.0]
    assert gradients.has(tensor)
    assert has(gradients, tensor) == (place, [0.0, 0.0])


def test_zeros_and_a_gradient_are_that_gradient():
    _, gradients, tensor = make()
    tensor.gradient = ZERO
    gradients.place(tensor, narrow(5, 6))
    assert has(gradients, tensor) == (PARAM, [5.0, 6.0]), "and not a sum in the list"


@pytest.mark.parametrize("before", [NONE, PARAM, LIST, CONSUMED, INCOMPLETE])
@pytest.mark.parametrize("to_zero", [True, False])
def test_what_was_never_there_is_not_zero(before, to_zero):
    _, gradients, tensor = make(accumulate=before is LIST)
    if before in (PARAM, LIST):
        gradients.place(tensor, narrow(5, 6))
    tensor.gradient = before
    gradients.drop(tensor, to_zero=to_zero)
    assert tensor.gradient is (ZERO if to_zero and before is not NONE else NONE)
    assert values_at(tensor) == [[0.0, 1.0]] * 2


def test_zeros_of_another_rank_are_there():
    process, gradients, _ = make(collectives=OneOfTwo(), chunk_numel=2)
    other = process.tensors[1]
    other.gradient = REMOTE
    gradients.drop(other, to_zero=True)
    assert other.gradient is REMOTE
    gradients.drop(other)
    assert other.gradient is NONE


def test_a_gradient_that_is_forgotten_leaves_nothing():
    _, gradients, tensor = make()
    tensor.gradient, tensor.gradient_norm, tensor.crossing_nbytes = KEPT, torch.tensor(1.0), 4
    tensor.deferred_gradient, tensor.kept = narrow(1, 2), narrow(1, 2)
    gradients.clear(tensor)
    assert gradients.is_absent(tensor)
    assert (tensor.gradient_norm, tensor.deferred_gradient, tensor.kept) == (None, None, None)
    assert tensor.take_crossing() == 0


# After the step


def test_the_step_consumes_a_gradient():
    _, gradients, tensor = make()
    gradients.place(tensor, narrow(5, 6))
    gradients.finish_update(tensor, None, keeps=False)
    assert has(gradients, tensor) == (CONSUMED, None)
    assert not gradients.has(tensor)
    assert not gradients.is_absent(tensor), "it was there"


@pytest.mark.parametrize(("place", "after"), [(LIST, LIST), (ZERO, ZERO), (REMOTE, REMOTE), (PARAM, CONSUMED)])
def test_a_step_that_keeps_gradients_leaves_all_but_those_over_values(place, after):
    _, gradients, tensor = make()
    tensor.gradient = place
    gradients.finish_update(tensor, None, keeps=True)
    assert tensor.gradient is after


def test_what_somebody_refers_to_is_the_gradient_after_the_step():
    _, gradients, tensor = make()
    gradients.place(tensor, narrow(5, 6))
    handed_out = narrow(5, 6)
    gradients.finish_update(tensor, handed_out, keeps=False)
    assert tensor.gradient is KEPT
    assert tensor.kept is handed_out
    assert gradients.has(tensor)
    tensor.chunk.param.copy_(tensor.chunk.lists["master"])  # as the optimizer leaves it
    gradients.place(tensor, narrow(1, 1))
    assert has(gradients, tensor) == (LIST, [6.0, 7.0]), "torch adds to it"
    assert tensor.kept is None
    assert handed_out.tolist() == [5.0, 6.0]
    assert values_at(tensor) == [[0.0, 1.0]] * 2


@pytest.mark.parametrize("keeps", [True, "auto"])
def test_what_torch_would_add_to_a_consumed_gradient_is_incomplete(keeps):
    process, gradients, tensor = make(keeps=keeps)
    tensor.gradient = CONSUMED
    gradients.place(tensor, narrow(5, 6))
    assert has(gradients, tensor) == (INCOMPLETE, None)
    assert process.events == []
    assert values_at(tensor) == [[0.0, 1.0]] * 2
    gradients.place(tensor, narrow(5, 6))
    assert tensor.gradient is INCOMPLETE
    with pytest.raises(EngineError, match="torch would have added the next one to it"):
        gradients.check_complete(tensor)


def test_who_wants_no_gradients_after_the_step_starts_anew():
    _, gradients, tensor = make(keeps=False)
    tensor.gradient = CONSUMED
    gradients.check_complete(tensor)
    gradients.place(tensor, narrow(5, 6))
    assert has(gradients, tensor) == (PARAM, [5.0, 6.0])


@pytest.mark.parametrize("keeps", [True, "auto"])
def test_a_consumed_gradient_is_not_used_again(keeps):
    _, gradients, tensor = make(keeps=keeps)
    tensor.gradient = CONSUMED
    with pytest.raises(EngineError) as caught:
        gradients.check_complete(tensor)
    assert str(caught.value) == consumed(tensor, "it is used again: torch would still have it")
    assert str(caught.value).startswith("the gradient of parameter 't0' was consumed by optimizer.step(), and it is")


@pytest.mark.parametrize("place", [NONE, PARAM, LIST, REMOTE, ZERO, KEPT])
def test_other_gradients_are_complete(place):
    _, gradients, tensor = make()
    tensor.gradient = place
    gradients.check_complete(tensor)


KEEPING = list(itertools.product([True, False, "auto"], [False, True], [False, True], [False, True]))


@pytest.mark.parametrize(("keeps", "is_zeroed", "is_watched", "is_read_late"), KEEPING)
def test_when_a_step_leaves_gradients(keeps, is_zeroed, is_watched, is_read_late):
    process, gradients, _ = make(keeps=keeps)
    gradients.note_read()  # before the step, which says nothing
    if is_zeroed:
        gradients.note_zeroed(process.chunks)
    gradients.is_watched = is_watched
    gradients.note_step()
    if is_read_late:
        gradients.note_read()
    expected = keeps if keeps != "auto" else not is_zeroed or is_watched or is_read_late
    assert gradients.must_keep == expected


def test_gradients_of_the_next_backward_are_read_early_again():
    process, gradients, tensor = make()
    gradients.note_zeroed(process.chunks)
    gradients.note_step()
    gradients.place(tensor, narrow(5, 6))
    gradients.note_read()
    assert not gradients.must_keep


def test_gradients_are_moved_out_of_the_way_of_the_step():
    process, gradients, first = make()
    second = process.tensors[1]
    gradients.place(first, narrow(5, 6))
    second.deferred_gradient = narrow(7, 8)
    assert gradients.try_to_keep(process.chunks)
    assert [has(gradients, tensor) for tensor in (first, second)] == [(LIST, [5.0, 6.0]), (LIST, [7.0, 8.0])]


@pytest.mark.parametrize("keeps", [True, "auto", False])
def test_where_there_is_no_room_they_are_kept_only_if_that_was_asked_for(keeps):
    process, gradients, tensor = make(keeps=keeps, host_nbytes=30)
    gradients.place(tensor, narrow(5, 6))
    if keeps is True:
        with pytest.raises(BudgetError):
            gradients.try_to_keep(process.chunks)
    else:
        assert not gradients.try_to_keep(process.chunks)
    assert has(gradients, tensor) == (PARAM, [5.0, 6.0])


def grown(**settings):
    """A process with a chunk whose gradients went to a list, and another chunk."""
    process, gradients, tensor = make(**settings)
    gradients.place(tensor, narrow(5, 6))
    gradients.move_to_list(tensor)
    gradients.drop(tensor)
    return process, gradients, tensor


def test_the_first_zero_grad_gives_the_lists_back():
    process, gradients, tensor = grown()
    assert process.ledger.owners(Tier.HOST)[GRADIENT] == 16
    gradients.note_zeroed(process.chunks)
    assert GRADIENT not in tensor.chunk.lists
    assert GRADIENT not in process.ledger.owners(Tier.HOST)


def test_later_ones_leave_them():
    process, gradients, tensor = make()
    gradients.note_zeroed(process.chunks)
    gradients.place(tensor, narrow(5, 6))
    gradients.move_to_list(tensor)
    gradients.drop(tensor)
    gradients.note_zeroed(process.chunks)
    assert GRADIENT in tensor.chunk.lists


@pytest.mark.parametrize("why", ["accumulate", "keeps", "watched", "other gradient"])
def test_lists_that_are_needed_stay(why):
    process, gradients, tensor = grown(accumulate=why == "accumulate", keeps=True if why == "keeps" else "auto")
    gradients.is_watched = why == "watched"
    if why == "other gradient":
        process.tensors[1].gradient = LIST
    gradients.note_zeroed(process.chunks)
    assert GRADIENT in tensor.chunk.lists


def test_methods_that_need_no_instance():
    _, _, tensor = make()
    for place in GradientPlace:
        tensor.gradient = place
        assert Gradients.has(tensor) == (place not in (NONE, CONSUMED, INCOMPLETE))
        assert Gradients.is_absent(tensor) == (place is NONE)
