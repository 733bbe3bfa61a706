import pytest

from hf_patrickstar.schedule.eviction import Candidate, ListOrderPolicy, LRUPolicy, make_policy

CANDIDATES = [Candidate(4, 10), Candidate(2, 30), Candidate(7, 5), Candidate(3, 5)]


def test_lru_takes_the_one_unused_longest_and_the_first_of_equals():
    assert LRUPolicy().choose(CANDIDATES) == 3
    assert LRUPolicy().choose(CANDIDATES[:2]) == 4


def test_list_order_takes_the_first_of_the_list():
    assert ListOrderPolicy().choose(CANDIDATES) == 2
    assert ListOrderPolicy().choose(CANDIDATES[2:]) == 3


@pytest.mark.parametrize("name", ["lru", "list_order"])
def test_a_choice_does_not_depend_on_the_order_of_the_candidates(name):
    policy = make_policy(name)
    assert policy.choose(CANDIDATES) == policy.choose(CANDIDATES[::-1])
    assert policy.choose([Candidate(9, 1)]) == 9


def test_names_of_the_configuration():
    assert isinstance(make_policy("lru"), LRUPolicy)
    assert isinstance(make_policy("list_order"), ListOrderPolicy)


def test_an_unknown_name():
    with pytest.raises(KeyError, match="fifo"):
        make_policy("fifo")


def test_misses_over_a_cyclic_sweep():
    """Four chunks, room for three: lru drops what comes next, every time; list order keeps the last two."""
    for name, misses in (("lru", 12), ("list_order", 8)):
        policy, resident, count = make_policy(name), {}, 0
        for tick in range(12):
            chunk = tick % 4
            if chunk not in resident:
                count += 1
                if len(resident) == 3:
                    del resident[policy.choose([Candidate(index, last) for index, last in resident.items()])]
            resident[chunk] = tick
        assert count == misses, name
