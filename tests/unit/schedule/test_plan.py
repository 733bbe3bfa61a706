import dataclasses

import pytest
from movement import Movement, simulate

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.plan import Actions, chunkable_nbytes, make_plan
from hf_patrickstar.schedule.trace import Trace, Visit

NOTHING = Actions()


def make_trace(chunks, sizes=(10, 10, 10, 10), pinned=None, others=None):
    """A trace; ``pinned`` and ``others`` are by moment."""
    pinned, others = pinned or {}, others or {}
    visits = (Visit(chunk, pinned.get(moment, ()), others.get(moment, 0)) for moment, chunk in enumerate(chunks))
    return Trace("t", sizes, tuple(visits))


def plan_of(trace, capacities, resident=None, policy="belady", **settings):
    if isinstance(capacities, int):
        capacities = [capacities] * len(trace.visits)
    return make_plan(trace, capacities, Chooser(policy), resident or {}, **settings)


def moved(evict=(), load=()):
    return Actions(tuple(evict), tuple(load))


# Capacities


def test_the_tide_leaves_what_others_do_not_need():
    trace = make_trace([0, 1, 2], others={0: 5, 1: 70, 2: 30})
    assert chunkable_nbytes(trace, 60) == (55, -10, 30)
    assert chunkable_nbytes(trace, 60, 40) == (40, -10, 30)


def test_the_tide_leaves_room_for_gradients_that_wait():
    """They are booked like chunks, so the limit of chunks is theirs too; the floor is below what others took."""
    trace = Trace("t", (10,), (Visit(0, (), 5, 3), Visit(0, (), 20, 0), Visit(0, (), 0, 70)))
    assert chunkable_nbytes(trace, 60) == (52, 40, -10)
    assert chunkable_nbytes(trace, 60, 30) == (27, 30, -40)
    assert chunkable_nbytes(trace, 60, 50) == (47, 40, -20)
    assert chunkable_nbytes(trace, 60, None, 10) == (47, 40, -20)


# Demand


def test_a_forward_and_a_backward_by_hand():
    """Room for two of three: at moment 2 chunk 0 is the later needed one, at moment 5 chunk 2, in the next step."""
    plan = plan_of(make_trace([0, 1, 2, 2, 1, 0]), 20)
    assert plan.moments == (
        moved(load=[0]),
        moved(load=[1]),
        moved(evict=[0], load=[2]),
        NOTHING,
        NOTHING,
        moved(evict=[2], load=[0]),
    )
    assert plan.chunk_nbytes == (10, 20, 20, 20, 20, 20)
    assert plan.resident == {0: 5, 1: 4}
    assert (plan.num_loads, plan.num_evictions) == (4, 2)


def test_the_policy_chooses():
    """Least recent use drops chunk 0 as well; list order drops the first of those that are there."""
    trace = make_trace([0, 1, 2, 2, 1, 0])
    assert [actions.evict for actions in plan_of(trace, 20, policy="lru").moments if actions.evict] == [(0,), (2,)]
    assert [actions.evict for actions in plan_of(trace, 20, policy="list_order").moments if actions.evict] == [
        (0,),
        (1,),
    ]


def test_pinned_chunks_stay():
    plan = plan_of(make_trace([0, 1, 2], pinned={2: (0,)}), 20, policy="list_order")
    assert plan.moments[2] == moved(evict=[1], load=[2])


def test_as_many_leave_as_are_in_the_way():
    plan = plan_of(make_trace([0, 1, 2], sizes=(10, 10, 25)), 30)
    assert plan.moments[2] == moved(evict=[1, 0], load=[2])
    assert plan.chunk_nbytes == (10, 20, 25)


def test_what_is_there_when_the_step_begins_is_not_loaded():
    plan = plan_of(make_trace([0, 1, 2]), 20, {0: -1, 3: -2})
    assert plan.moments == (NOTHING, moved(evict=[3], load=[1]), moved(evict=[1], load=[2]))
    assert plan.chunk_nbytes == (20, 20, 20)


def test_what_is_void_after_the_step_leaves_before_what_is_not():
    trace = make_trace([0, 1, 2])
    assert plan_of(trace, 20).moments[2].evict == (1,), "chunk 1 is needed later, in the next repetition"
    assert plan_of(trace, 20, dropped_after=frozenset({0})).moments[2].evict == (0,)


def test_static_chunks_neither_move_nor_take_room():
    plan = plan_of(make_trace([0, 1, 0, 2], pinned={2: (1,)}), 10, static=frozenset({1}), prefetch_depth=2)
    assert plan.moments == (moved(load=[0]), NOTHING, NOTHING, moved(evict=[0], load=[2]))
    assert plan.resident == {2: 3}


def test_the_tide_comes_in():
    """Between visits of resident chunks capacity shrinks: two leave, and nothing is loaded until one is needed."""
    plan = plan_of(make_trace([0, 1, 2, 2, 1, 0]), [30, 30, 30, 10, 20, 30])
    assert plan.moments == (
        moved(load=[0]),
        moved(load=[1]),
        moved(load=[2]),
        moved(evict=[0, 1]),
        moved(load=[1]),
        moved(load=[0]),
    )
    assert plan.chunk_nbytes == (10, 20, 30, 10, 20, 30)


@pytest.mark.parametrize("depth", [0, 2])
def test_too_little_room(depth):
    trace = make_trace([0, 1], pinned={1: (0,)}, others={1: 7})
    message = (
        r"moment 1 of trace 't': chunk 1 and the chunks in use \(\[0\]\) need 20 B \(20 bytes\), 15 B \(15 bytes\) "
        r"are there beside non-model data of 7 B"
    )
    with pytest.raises(BudgetError, match=message):
        plan_of(trace, 15, prefetch_depth=depth)
    assert plan_of(trace, 20, prefetch_depth=depth).num_loads == 2


def test_no_room_at_all_is_told_as_none():
    with pytest.raises(BudgetError, match=r"0 B \(0 bytes\) are there"):
        plan_of(make_trace([0]), -5)


# Prefetch


def test_loads_come_as_early_as_there_is_room():
    """Room for three of four. Chunk 2 arrives with the first; chunk 3 waits for chunk 0, its victim, to be done."""
    trace = make_trace([0, 1, 2, 3], pinned={1: (0,)})
    assert plan_of(trace, 30, dropped_after=frozenset({0, 1, 2, 3}), prefetch_depth=3).moments == (
        moved(load=[0, 1, 2]),
        NOTHING,
        moved(evict=[0], load=[3]),
        NOTHING,
    )


def test_only_so_many_loads_are_under_way():
    trace = make_trace([0, 1, 2, 3])
    loads = {
        depth: [actions.load for actions in plan_of(trace, 40, prefetch_depth=depth).moments] for depth in range(5)
    }
    assert loads == {
        0: [(0,), (1,), (2,), (3,)],
        1: [(0, 1), (2,), (3,), ()],
        2: [(0, 1, 2), (3,), (), ()],
        3: [(0, 1, 2, 3), (), (), ()],
        4: [(0, 1, 2, 3), (), (), ()],
    }


def test_prefetch_waits_for_the_tide():
    """At moment 1 others need so much that chunk 2 could not be beside chunks 0 and 1."""
    trace = make_trace([0, 1, 1, 2])
    plan = plan_of(trace, [30, 20, 30, 30], prefetch_depth=2)
    assert plan.moments == (moved(load=[0, 1]), NOTHING, moved(load=[2]), NOTHING)
    assert plan.chunk_nbytes == (20, 20, 30, 30)


def test_a_chunk_is_not_loaded_before_it_left():
    """Chunk 0 leaves at moment 1 and comes back for moment 3, over a moment with room for it."""
    plan = plan_of(make_trace([0, 1, 1, 0]), [10, 10, 20, 20], prefetch_depth=4)
    assert plan.moments == (moved(load=[0]), moved(evict=[0], load=[1]), moved(load=[0]), NOTHING)


def test_loads_keep_their_order():
    """Chunk 3 is small enough to come at once, but must not pass chunk 2, which is not."""
    plan = plan_of(make_trace([0, 1, 2, 3], sizes=(10, 10, 20, 1)), [25, 25, 45, 45], prefetch_depth=4)
    assert [actions.load for actions in plan.moments] == [(0, 1), (), (2, 3), ()]


# Leaving after forward


def make_turning(chunks, turns, pinned=None, reduced=None):
    trace = make_trace(chunks, pinned=pinned)
    visits = [
        dataclasses.replace(visit, reduced=(reduced or {}).get(moment, ())) for moment, visit in enumerate(trace.visits)
    ]
    return dataclasses.replace(trace, visits=tuple(visits), forward_ends=turns)


def test_chunks_leave_after_forward_though_there_is_room():
    """Each is loaded for forward and for backward, the last one too; what backward has loaded stays."""
    trace = make_turning([0, 1, 2, 2, 1, 0], (3,))
    plan = plan_of(trace, 100, reshard_after_forward=True)
    assert plan.moments == (
        moved(load=[0]),
        moved(evict=[0], load=[1]),
        moved(evict=[1], load=[2]),
        moved(evict=[2], load=[2]),
        moved(load=[1]),
        moved(load=[0]),
    )
    assert plan.chunk_nbytes == (10, 10, 10, 10, 20, 30)
    assert plan.resident == {2: 3, 1: 4, 0: 5}
    assert plan_of(trace, 100).num_loads == 3


def test_a_chunk_leaves_after_its_last_visit_in_forward_only():
    plan = plan_of(make_turning([0, 1, 0, 2, 0], (4,)), 100, reshard_after_forward=True)
    assert plan.moments == (
        moved(load=[0]),
        moved(load=[1]),
        moved(evict=[1]),
        moved(evict=[0], load=[2]),
        moved(evict=[2], load=[0]),
    )


def test_a_chunk_in_use_leaves_when_it_is_not():
    """A module around others keeps its own parameters until the one after them is visited."""
    trace = make_turning([0, 1, 2, 3, 1, 0], (4,), pinned={1: (0,), 2: (0, 1)})
    plan = plan_of(trace, 100, reshard_after_forward=True)
    assert plan.moments == (
        moved(load=[0]),
        moved(load=[1]),
        moved(load=[2]),
        moved(evict=[0, 1, 2], load=[3]),
        moved(evict=[3], load=[1]),
        moved(load=[0]),
    )
    assert plan.chunk_nbytes == (10, 20, 30, 10, 10, 20)


def test_a_chunk_in_use_until_backward_visits_it_stays():
    trace = make_turning([0, 1, 0, 2], (2,), pinned={1: (0,)})
    plan = plan_of(trace, 100, reshard_after_forward=True)
    assert plan.moments == (moved(load=[0]), moved(load=[1]), moved(evict=[1]), moved(load=[2]))
    trace = make_turning([0, 1, 1, 0, 2], (2,), pinned={1: (0,), 2: (0,)})
    plan = plan_of(trace, 100, reshard_after_forward=True)
    assert plan.moments == (moved(load=[0]), moved(load=[1]), moved(evict=[1], load=[1]), NOTHING, moved(load=[2]))


def test_several_forwards_of_one_step():
    plan = plan_of(make_turning([0, 1, 0, 1, 1, 0], (2, 4)), 100, reshard_after_forward=True)
    assert [(actions.evict, actions.load) for actions in plan.moments] == [
        ((), (0,)),
        ((0,), (1,)),
        ((1,), (0,)),
        ((0,), (1,)),
        ((1,), (1,)),
        ((), (0,)),
    ]


def test_a_forward_without_backward_keeps_its_last_chunk():
    plan = plan_of(make_turning([0, 1], (2,)), 100, reshard_after_forward=True)
    assert plan.moments == (moved(load=[0]), moved(evict=[0], load=[1]))
    assert plan.resident == {1: 1}


def test_a_trace_without_turns_and_static_chunks_are_left_alone():
    assert plan_of(make_turning([0, 1, 1, 0], ()), 100, reshard_after_forward=True).num_evictions == 0
    plan = plan_of(make_turning([0, 1, 1, 0], (2,)), 100, reshard_after_forward=True, static=frozenset({0}))
    assert plan.moments == (NOTHING, moved(load=[1]), moved(evict=[1], load=[1]), NOTHING)


def test_chunks_that_were_there_leave_too():
    plan = plan_of(make_turning([0, 1, 1], (2,)), 100, {0: -1, 3: -2}, reshard_after_forward=True)
    assert plan.moments == (NOTHING, moved(evict=[0], load=[1]), moved(evict=[1], load=[1]))
    assert plan.resident == {3: -2, 1: 2}, "one that forward does not visit stays"


def test_what_leaves_makes_room_before_others_have_to():
    """Chunk 0 leaves for chunk 2 in any case; nobody is asked for room."""
    plan = plan_of(make_turning([0, 1, 2, 2, 1, 0], (3,)), 20, reshard_after_forward=True)
    assert [actions.evict for actions in plan.moments] == [(), (0,), (1,), (2,), (), (2,)]


def test_loads_come_ahead_around_what_leaves():
    """Two ahead at most. None comes back before it left, and the ones behind it keep their order."""
    plan = plan_of(make_turning([0, 1, 2, 2, 1, 0], (3,)), 100, reshard_after_forward=True, prefetch_depth=2)
    assert plan.moments == (
        moved(load=[0, 1, 2]),
        moved(evict=[0]),
        moved(evict=[1]),
        moved(evict=[2], load=[2, 1, 0]),
        NOTHING,
        NOTHING,
    )
    assert plan.chunk_nbytes == (30, 20, 10, 30, 30, 30)
    assert plan_of(trace_of_two(), 20, reshard_after_forward=True, prefetch_depth=2).chunk_nbytes == (20, 10, 20, 20)


def trace_of_two():
    return make_turning([0, 1, 1, 0], (2,))


def test_what_is_reduced_is_reduced_by_the_plan():
    trace = make_turning([0, 1, 1, 0], (2,), reduced={2: (1, 3), 3: (0,)})
    for settings in ({}, {"reshard_after_forward": True, "prefetch_depth": 1}):
        moments = plan_of(trace, 100, **settings).moments
        assert [actions.reduce for actions in moments] == [(), (), (1, 3), (0,)]
    assert plan_of(trace, 100).moments[2:] == (Actions(reduce=(1, 3)), Actions(reduce=(0,)))


# What moves (benchmarks/movement.py)


def test_movement_is_what_a_plan_does():
    trace = make_trace([0, 1, 2, 2, 1, 0], others={2: 12, 3: 20})
    moved = simulate(
        trace,
        20,
        "belady",
        dropped_after=frozenset(range(4)),
        gradient_nbytes=(3, 4, 5, 0),
        home_nbytes=(30, 40, 50, 60),
        static=frozenset({2}),
    )
    assert moved == Movement(
        loads=2,
        evictions=0,
        prefetches=0,
        host_to_device_nbytes=20,
        device_to_host_nbytes=7,
        device_peak_nbytes=20,
        device_total_peak_nbytes=40,
        host_peak_nbytes=130,
    )


def test_a_step_is_repeated_until_it_starts_with_what_it_leaves():
    trace = make_trace([0, 1, 2])
    assert simulate(trace, 30, "belady", repetitions=1).loads == 3
    assert simulate(trace, 30, "belady").loads == 0
    assert simulate(trace, [20, 20, 20], "belady", repetitions=2).loads == 1


def test_prefetches_are_told_from_other_loads():
    trace = make_trace([0, 1, 2, 3])
    everything = frozenset(range(4))
    for depth, prefetches in ((0, 0), (1, 3), (4, 3)):
        movement = simulate(trace, 40, "belady", dropped_after=everything, prefetch_depth=depth)
        assert (movement.loads, movement.prefetches) == (4, prefetches)


def test_a_simulation_that_cannot_work():
    trace = make_trace([0, 1], pinned={1: (0,)})
    with pytest.raises(BudgetError, match=r"moment 1 of trace 't': chunk 1 and the chunks in use \(\[0\]\)"):
        simulate(trace, 15, "belady")
    assert simulate(trace, 20, "lru", dropped_after=frozenset({0, 1})).loads == 2
