import pytest

from hf_patrickstar.schedule.eviction import BeladyPolicy, Candidate, Chooser, ListOrderPolicy, LRUPolicy
from hf_patrickstar.schedule.trace import Cursor, Trace, Visit

CANDIDATES = [Candidate(4, 10), Candidate(2, 30), Candidate(7, 5), Candidate(3, 5)]


def test_lru_takes_the_one_unused_longest_and_the_first_of_equals():
    assert LRUPolicy().choose(CANDIDATES) == 3
    assert LRUPolicy().choose(CANDIDATES[:2]) == 4


def test_list_order_takes_the_first_of_the_list():
    assert ListOrderPolicy().choose(CANDIDATES) == 2
    assert ListOrderPolicy().choose(CANDIDATES[2:]) == 3


def test_belady_takes_the_latest_to_be_needed_and_first_of_all_what_is_never_needed():
    later = [Candidate(4, 1, 20), Candidate(2, 2, 30), Candidate(3, 3, 30)]
    assert BeladyPolicy().choose(later) == 2
    assert BeladyPolicy().choose([*later, Candidate(9, 4, None), Candidate(8, 5, None)]) == 8


@pytest.mark.parametrize("policy", [LRUPolicy(), ListOrderPolicy(), BeladyPolicy()])
def test_a_choice_does_not_depend_on_the_order_of_the_candidates(policy):
    assert policy.choose(CANDIDATES) == policy.choose(CANDIDATES[::-1])
    assert policy.choose([Candidate(9, 1)]) == 9


def test_names_of_the_configuration():
    """Each name decides by its own rule; Belady needs a trace, and has a rule for steps without one."""
    cursor = Cursor(Trace("t", (1,) * 8, (Visit(2), Visit(7), Visit(4))))
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
