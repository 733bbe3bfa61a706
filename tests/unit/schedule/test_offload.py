"""Activations that leave the device: which bytes are there at which moment, and how many of them leave."""

import dataclasses

import pytest

from hf_patrickstar.schedule.margin import StepCost
from hf_patrickstar.schedule.offload import choose_offload, describe_offload
from hf_patrickstar.schedule.trace import Activation, Trace, Visit, common_trace

# Forward visits chunks 0 to 2, backward 2 to 0. Autograd keeps 10 bytes at moment 0, 20 at 1 and 40 at 2; 100 are there
# all the time.
FIRST, SECOND, THIRD = Activation(0, 10, 0, 0, 5), Activation(3, 20, 1, 1, 4), Activation(4, 40, 2, 2, 3)
THERE = (110, 130, 170, 170, 130, 110)


def make_trace(activations=(FIRST, SECOND, THIRD), there=THERE, forward_ends=(3,), **changes):
    chunks = [*range(3), *reversed(range(3))][: len(there)]
    visits = tuple(Visit(index, (), nbytes) for index, nbytes in zip(chunks, there, strict=True))
    made = Trace("training", (8, 8, 8), visits, (((4, 5),),), forward_ends, activations)
    return dataclasses.replace(made, **changes)


def there_of(trace):
    return tuple(visit.non_model_nbytes for visit in trace.visits)


LEAVE = {
    "the first, until backward needs the second": ((FIRST, SECOND, THIRD), (0, 0, 10, 10, 0, 0)),
    "the last, until forward ends": ((dataclasses.replace(FIRST, needed_at=5),), (0, 0, 0, 10, 10, 0)),
    "the model holds it for longer": ((dataclasses.replace(FIRST, idle_from=3), SECOND), (0,) * 6),
    "it is needed before the next one is": ((dataclasses.replace(FIRST, needed_at=3), SECOND), (0, 0, 10, 0, 0, 0)),
}


@pytest.mark.parametrize(("activations", "gone"), LEAVE.values(), ids=LEAVE)
def test_bytes_that_are_not_on_the_device(activations, gone):
    num, whole = 1, make_trace(activations)
    left = whole.offloading(num)
    assert tuple(before - after for before, after in zip(THERE, there_of(left), strict=True)) == gone
    assert left.offloaded == whole.activations[:num]
    assert left.offloaded_nbytes == sum(activation.nbytes for activation in left.offloaded)
    assert left.offloading(0) == whole


LONG = tuple(Activation(place, 10, place, place, 9 - place) for place in range(5))


def test_each_one_that_leaves_is_away_between_the_uses_of_the_next_one():
    there = (10, 20, 30, 40, 50, 50, 40, 30, 20, 10)
    visits = tuple(Visit(index % 3, (), nbytes) for index, nbytes in enumerate(there))
    whole = Trace("training", (8, 8, 8), visits, (), (5,), LONG)
    assert [there_of(whole.offloading(num)) for num in range(4)] == [
        there,
        (10, 20, 20, 30, 40, 40, 30, 20, 20, 10),
        (10, 20, 20, 20, 30, 30, 20, 20, 20, 10),
        (10, 20, 20, 20, 20, 20, 20, 20, 20, 10),
    ]


# Several traces


def test_processes_let_as_many_leave_as_any_of_them():
    found = common_trace([make_trace().offloading(1), make_trace().offloading(2), make_trace()])
    assert found == make_trace().offloading(2)
    assert common_trace([found] * 3) == found, "those that agreed agree again"


def test_a_process_that_visits_other_chunks_has_room_for_all_of_its_own():
    """Its activations are not those of the trace that all follow, so they may stay."""
    other = make_trace((dataclasses.replace(FIRST, needed_at=2),), (200, 0, 0), (2,))
    assert there_of(common_trace([make_trace().offloading(1), other])) == (200,) * 6


# How many


NO = None


def choose(asked, durations, copying_ns=10):
    """Decides between numbers whose steps take so long, ``None`` without room; returns also what was looked at.

    Their ends wait for copies for ``copying_ns`` of it.
    """
    looked_at = []

    def cost_of(num):
        looked_at.append(num)
        return None if durations[num] is None else StepCost(durations[num], 0, copying_ns, 0, 1)

    num, why = choose_offload(asked, len(durations) - 1, cost_of, lambda num: durations[num] is not None)
    return num, why, looked_at


@pytest.mark.parametrize(("asked", "num"), [(False, 0), (True, 3)])
def test_what_was_asked_for(asked, num):
    assert choose(asked, [100, 90, 80, 70]) == (num, "as asked", [])


@pytest.mark.parametrize(
    ("durations", "num"),
    [([1, 1, 1, 1, NO], 3), ([NO, 1, 1, NO, NO, NO, NO, NO, NO], 2), ([NO, NO, NO, 1, 1], 4), ([NO, NO, NO], 2)],
)
def test_as_many_are_asked_for_as_fit(durations, num):
    """Where none fits the error says what all would take."""
    assert choose(True, durations) == (num, "as asked", [])


@pytest.mark.parametrize("asked", [False, True, "auto"])
def test_there_may_be_none_that_can_leave(asked):
    found, why, looked_at = choose(asked, [100])
    assert (found, looked_at) == (0, [])
    assert "none" in why


@pytest.mark.parametrize("copying_ns", [0, 1])
def test_where_all_fits_and_copies_take_no_time_none_leaves(copying_ns):
    """No other number is tried, which would take a simulated step; a step of 100 ns can hardly win 1 ns."""
    found, why, looked_at = choose("auto", [100, 1, 1, 1], copying_ns=copying_ns)
    assert (found, looked_at) == (0, [0])
    assert "has room" in why


NUMBERS = {
    "the fewest that fit": ([NO, NO, NO, 100, 100, 100], 3),
    "one is enough": ([NO, 100, 100, 100, 100, 100], 1),
    "all have to": ([NO, NO, NO, NO, NO, 100], 5),
    "the host is full": ([NO, NO, 100, 100, NO, NO, NO, NO], 2),
    "few fit, between what the device and the host have": ([NO] * 11 + [100, 100] + [NO] * 3, 11),
    "the host is full soon": ([NO, 100, 100, NO, NO, NO, NO, NO, NO], 1),
    "there is room, and leaving makes nothing faster": ([100, 100, 100, 100], 0),
    "hardly faster is not faster": ([500, 498, 498, 498], 0),
    "faster with half of them": ([100, 100, 80, 80, 80], 2),
    "faster with all": ([100, 100, 100, 100, 80], 4),
    "faster than with the fewest": ([NO, NO, 100, 100, 80, 80, 80], 4),
    "slower": ([NO, NO, 100, 110, 120, 130, 140], 2),
}


@pytest.mark.parametrize(("durations", "num"), NUMBERS.values(), ids=NUMBERS)
def test_how_many_leave(durations, num):
    found, why, looked_at = choose("auto", durations)
    assert found == num
    assert len(looked_at) <= 4, "each takes a simulated step"
    fewest = next(count for count, duration in enumerate(durations) if duration)
    assert ("makes the step faster" in why) == (num > fewest)


def test_all_leave_where_not_even_that_would_help():
    found, why, _ = choose("auto", [NO] * 6)
    assert found == 5
    assert "no room" in why


def test_it_is_said_in_one_line():
    said = describe_offload([make_trace((FIRST,)), make_trace()], 2, "auto", "because")
    assert said == (
        "activation_offload=auto: 2 of 3 activations leave the device between forward and backward (30 B): because"
    )
