import pytest

from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.trace import Cursor, Trace, Visit

CHUNKS = [(4, 10), (2, 30), (7, 5), (3, 5)]


def cursor_of(*chunks):
    return Cursor(Trace("t", (1,) * 10, tuple(Visit(chunk) for chunk in chunks)))


def choose(chooser, *situation, **settings):
    return next(chooser.in_order(*situation, **settings))


def test_the_order_is_that_in_which_one_after_the_other_would_be_chosen():
    cursor, later = cursor_of(0, 4, 3, 2), [(4, 1), (2, 2), (3, 3), (9, 4)]
    assert list(Chooser("belady").in_order(later, cursor)) == [9, 2, 3, 4]
    assert list(Chooser("lru").in_order(CHUNKS, None)) == [3, 7, 4, 2]
    assert list(Chooser("list_order").in_order(CHUNKS, None)) == [2, 3, 4, 7]
    assert list(Chooser("lru").in_order([], None)) == []


def test_lru_takes_the_one_unused_longest_and_the_first_of_equals():
    assert choose(Chooser("lru"), CHUNKS, None) == 3
    assert choose(Chooser("lru"), CHUNKS[:2], None) == 4


def test_list_order_takes_the_first_of_the_list():
    assert choose(Chooser("list_order"), CHUNKS, None) == 2
    assert choose(Chooser("list_order"), CHUNKS[2:], None) == 3


def test_belady_takes_the_latest_to_be_needed_and_first_of_all_what_is_never_needed():
    cursor, later = cursor_of(0, 4, 3, 2), [(4, 1), (2, 2), (3, 3)]
    assert choose(Chooser("belady"), later, cursor) == 2
    assert choose(Chooser("belady"), [*later, (9, 4), (8, 5)], cursor) == 8


@pytest.mark.parametrize("policy", ["lru", "list_order", "belady"])
@pytest.mark.parametrize("cursor", [None, cursor_of(2, 7, 4)])
def test_a_choice_does_not_depend_on_the_order_of_the_chunks(policy, cursor):
    chooser = Chooser(policy)
    assert choose(chooser, CHUNKS, cursor) == choose(chooser, CHUNKS[::-1], cursor)
    assert choose(chooser, [(9, 1)], cursor) == 9


def test_names_of_the_configuration():
    """Each name decides by its own rule; Belady needs a trace, and has a rule for steps without one."""
    cursor = cursor_of(2, 7, 4)
    chunks = [(4, 10), (2, 30), (7, 5)]
    assert choose(Chooser("lru"), chunks, cursor) == 7
    assert choose(Chooser("list_order"), chunks, cursor) == 2
    assert choose(Chooser("belady"), chunks, cursor) == 4
    for name, victim in (("lru", 7), ("list_order", 2)):
        assert choose(Chooser(name), chunks, None, is_diverged=True) == victim, "the same rule whatever the step is"
    assert choose(Chooser("belady"), chunks, None) == 2, "warm-up: list order"
    assert choose(Chooser("belady"), chunks, None, is_diverged=True) == 7, "lost: least recently used"


def test_misses_over_a_cyclic_sweep():
    """Four chunks, room for three: lru drops what comes next, every time; list order keeps the last two."""
    for name, misses in (("lru", 12), ("list_order", 8)):
        policy, resident, count = Chooser(name), {}, 0
        for tick in range(12):
            chunk = tick % 4
            if chunk not in resident:
                count += 1
                if len(resident) == 3:
                    del resident[choose(policy, list(resident.items()), None)]
            resident[chunk] = tick
        assert count == misses, name
