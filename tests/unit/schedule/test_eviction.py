import pytest

from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.trace import Cursor, Trace, Visit

CHUNKS = [(4, 10), (2, 30), (7, 5), (3, 5)]


def cursor_of(*chunks):
    return Cursor(Trace("t", (1,) * 10, tuple(Visit(chunk) for chunk in chunks)))


def test_lru_takes_the_one_unused_longest_and_the_first_of_equals():
    assert Chooser("lru").choose(CHUNKS, None) == 3
    assert Chooser("lru").choose(CHUNKS[:2], None) == 4


def test_list_order_takes_the_first_of_the_list():
    assert Chooser("list_order").choose(CHUNKS, None) == 2
    assert Chooser("list_order").choose(CHUNKS[2:], None) == 3


def test_belady_takes_the_latest_to_be_needed_and_first_of_all_what_is_never_needed():
    cursor, later = cursor_of(0, 4, 3, 2), [(4, 1), (2, 2), (3, 3)]
    assert Chooser("belady").choose(later, cursor) == 2
    assert Chooser("belady").choose([*later, (9, 4), (8, 5)], cursor) == 8


@pytest.mark.parametrize("policy", ["lru", "list_order", "belady"])
@pytest.mark.parametrize("cursor", [None, cursor_of(2, 7, 4)])
def test_a_choice_does_not_depend_on_the_order_of_the_chunks(policy, cursor):
    chooser = Chooser(policy)
    assert chooser.choose(CHUNKS, cursor) == chooser.choose(CHUNKS[::-1], cursor)
    assert chooser.choose([(9, 1)], cursor) == 9


def test_names_of_the_configuration():
    """Each name decides by its own rule; Belady needs a trace, and has a rule for steps without one."""
    cursor = cursor_of(2, 7, 4)
    chunks = [(4, 10), (2, 30), (7, 5)]
    assert Chooser("lru").choose(chunks, cursor) == 7
    assert Chooser("list_order").choose(chunks, cursor) == 2
    assert Chooser("belady").choose(chunks, cursor) == 4
    for name, victim in (("lru", 7), ("list_order", 2)):
        assert Chooser(name).choose(chunks, None, is_diverged=True) == victim, "the same rule whatever the step is"
    assert Chooser("belady").choose(chunks, None) == 2, "warm-up: list order"
    assert Chooser("belady").choose(chunks, None, is_diverged=True) == 7, "lost: least recently used"


def test_misses_over_a_cyclic_sweep():
    """Four chunks, room for three: lru drops what comes next, every time; list order keeps the last two."""
    for name, misses in (("lru", 12), ("list_order", 8)):
        policy, resident, count = Chooser(name), {}, 0
        for tick in range(12):
            chunk = tick % 4
            if chunk not in resident:
                count += 1
                if len(resident) == 3:
                    del resident[policy.choose(list(resident.items()), None)]
            resident[chunk] = tick
        assert count == misses, name
