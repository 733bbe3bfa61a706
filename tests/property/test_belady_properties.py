"""Belady moves as little as any policy can, for chunks of one size; the simulator keeps to its budget."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
from movement import simulate

from hf_patrickstar.schedule.eviction import Chooser, EvictionQueue
from hf_patrickstar.schedule.move_plan import make_plan, repeated_plans
from hf_patrickstar.schedule.trace import Cursor, Trace, Visit

SIZE = 8


def fewest_loads(visits, room):
    """Loads of the best policy there is, by trying every victim."""

    @functools.cache
    def best(moment, resident):
        if moment == len(visits):
            return 0
        chunk = visits[moment]
        if chunk in resident:
            return best(moment + 1, resident)
        if len(resident) < room:
            return 1 + best(moment + 1, resident | {chunk})
        return 1 + min(best(moment + 1, resident - {victim} | {chunk}) for victim in resident)

    return best(0, frozenset())


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(1, 4))
def test_belady_is_brute_force(chunks, room):
    trace = Trace("t", (SIZE,) * 6, tuple(Visit(chunk) for chunk in chunks))
    everything = frozenset(range(6))
    moved = simulate(trace, room * SIZE, "belady", dropped_after=everything)
    assert moved.loads == fewest_loads(tuple(chunks), room)
    assert moved.device_peak_nbytes <= room * SIZE
    for other in ("lru", "list_order"):
        assert simulate(trace, room * SIZE, other, dropped_after=everything).loads >= moved.loads


@settings(deadline=None, max_examples=400, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 6), max_size=3), st.booleans()), max_size=30),
    st.sampled_from(["belady", "lru", "list_order"]),
    st.sets(st.integers(0, 6)),
    st.sets(st.integers(0, 6)),
)
def test_a_queue_lets_leave_what_the_policy_chooses(rows, policy, dropped, first):
    """Chunks come by visits, some more leave for other reasons, and some are in use when room is needed."""
    cursor = Cursor(Trace("t", (SIZE,) * 7, tuple(Visit(chunk) for chunk, _, _ in rows)), frozenset(dropped))
    chooser = Chooser(policy)
    there, queue = {index: index - 7 for index in first}, EvictionQueue(chooser, cursor)
    for index, last in there.items():
        queue.visit(index, last)
    for moment, (chunk, in_use, leaves) in enumerate(rows):
        cursor.advance(chunk)
        if leaves and there:
            gone = min(there)
            del there[gone]
            queue.remove(gone)
        in_use = in_use | {chunk}
        free = [item for item in there.items() if item[0] not in in_use]
        victim = queue.pop(in_use)
        assert victim == next(chooser.in_order(free, cursor), None)
        there.pop(victim, None)
        there[chunk] = moment
        queue.visit(chunk, moment)


@settings(deadline=None, max_examples=100, derandomize=True, database=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=10), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from(["belady", "lru", "list_order"]),
    st.frozensets(st.integers(0, 5)),
    st.integers(0, 2),
)
def test_a_step_that_repeats_itself_need_not_be_planned_again(orders, room, policy, dropped, depth):
    traces = [Trace("t", (SIZE,) * 6, tuple(map(Visit, order))) for order in orders]
    capacities = [[room * SIZE] * len(order) for order in orders]
    found = repeated_plans(traces, capacities, policy, dropped_after=dropped, prefetch_depth=depth, repetitions=5)
    chooser, resident = Chooser(policy), {}
    for _ in range(5):
        expected = []
        for trace, capacity in zip(traces, capacities, strict=True):
            is_last = trace is traces[-1]
            before = {index: place - len(resident) for place, index in enumerate(resident)}
            void = dropped if is_last else frozenset()
            plan = make_plan(trace, capacity, chooser, before, dropped_after=void, prefetch_depth=depth)
            expected.append(plan)
            by_age = sorted(plan.resident.items(), key=lambda item: item[1])
            resident = {index: moment for index, moment in by_age if index not in void}
    assert found == expected
