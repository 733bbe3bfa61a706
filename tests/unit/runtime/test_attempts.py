"""Which contributions to gradients a repeated micro-batch must not count again."""

import pytest

from hf_patrickstar.runtime.attempts import Attempts
from hf_patrickstar.runtime.gradient_place import GradientPlace

NONE, LIST, PARAM, ZERO = GradientPlace.NONE, GradientPlace.LIST, GradientPlace.PARAM, GradientPlace.ZERO


def begun():
    attempts = Attempts()
    attempts.begin()
    return attempts


def contribute(attempts, index, before):
    """One contribution as gradients do it: placed unless it is there already; whether it was placed."""
    if attempts.is_counted(index):
        return False
    attempts.note_placed(index, before)
    return True


def test_outside_of_attempts_nothing_is_counted():
    attempts = Attempts()
    assert contribute(attempts, 3, LIST)
    assert attempts.undo() == set()
    assert not attempts.has_leftovers
    assert not attempts.is_counted(3)


@pytest.mark.parametrize("before", [LIST, PARAM, ZERO])
def test_what_was_added_to_earlier_gradients_is_not_added_again(before):
    attempts = begun()
    assert contribute(attempts, 3, before)
    assert attempts.undo() == set()
    assert attempts.has_leftovers
    assert [contribute(attempts, 3, before), contribute(attempts, 3, before)] == [False, True]


def test_what_an_attempt_stored_first_is_dropped_and_stored_again():
    attempts = begun()
    assert contribute(attempts, 3, NONE)
    assert contribute(attempts, 3, PARAM)  # a tied weight: the place before the first one decides
    assert attempts.undo() == {3}
    assert not attempts.has_leftovers
    assert contribute(attempts, 3, NONE)


def test_each_tensor_is_counted_by_itself():
    attempts = begun()
    for index, before in ((1, NONE), (2, LIST), (5, NONE), (6, LIST)):
        contribute(attempts, index, before)
    assert attempts.undo() == {1, 5}
    assert [contribute(attempts, index, LIST) for index in (1, 2, 5, 6, 7)] == [True, False, True, False, True]


def test_what_was_noticed_but_failed_before_its_place_counts_again():
    attempts = begun()
    contribute(attempts, 3, LIST)
    assert not attempts.is_counted(3)  # the second one fails on its way
    attempts.undo()
    assert [attempts.is_counted(3) for _ in range(2)] == [True, False]


def test_contributions_that_reach_their_place_together():
    """Two of a tied weight wait aside, and one sum is placed."""
    attempts = begun()
    assert [attempts.is_counted(3) for _ in range(2)] == [False, False]
    attempts.note_placed(3, LIST)
    attempts.undo()
    assert [attempts.is_counted(3) for _ in range(3)] == [True, True, False]


def test_an_attempt_that_fails_earlier_than_the_one_before_forgets_nothing():
    attempts = begun()
    contribute(attempts, 3, LIST)
    contribute(attempts, 3, LIST)
    attempts.undo()
    assert not contribute(attempts, 3, LIST)
    assert attempts.undo() == set()
    assert [contribute(attempts, 3, LIST) for _ in range(3)] == [False, False, True]


def test_an_attempt_that_comes_further_adds_what_it_placed():
    attempts = begun()
    contribute(attempts, 3, LIST)
    attempts.undo()
    assert [contribute(attempts, 3, LIST) for _ in range(2)] == [False, True]
    attempts.undo()
    assert [contribute(attempts, 3, LIST) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("method", ["begin", "end"])
def test_the_next_micro_batch_counts_everything(method):
    attempts = begun()
    contribute(attempts, 3, LIST)
    attempts.undo()
    getattr(attempts, method)()
    assert not attempts.has_leftovers
    assert not attempts.is_counted(3)
    assert attempts.undo() == set()


def test_after_the_last_attempt_nothing_is_noted():
    attempts = begun()
    attempts.end()
    contribute(attempts, 3, NONE)
    assert attempts.undo() == set()


def test_a_micro_batch_that_did_not_fail_leaves_nothing_to_undo():
    attempts = begun()
    contribute(attempts, 3, NONE)
    attempts.begin()
    assert attempts.undo() == set()


def test_what_was_undone_is_not_undone_again():
    attempts = begun()
    contribute(attempts, 3, NONE)
    assert [attempts.undo(), attempts.undo()] == [{3}, set()]
