"""Plans in examples by hand; tests/property follows every plan and compares it with brute force."""

import dataclasses

import pytest

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.move_plan import chunkable_nbytes, make_plan
from hf_patrickstar.schedule.trace import Trace, Visit

EVERYTHING = frozenset(range(4))


def make_trace(chunks, sizes=(10, 10, 10, 10), pinned=None, others=None, turns=(), reduced=None):
    """A trace; ``pinned``, ``others`` and ``reduced`` are by moment."""
    pinned, others, reduced = pinned or {}, others or {}, reduced or {}
    visits = [
        Visit(chunk, pinned.get(moment, ()), others.get(moment, 0), reduced=reduced.get(moment, ()))
        for moment, chunk in enumerate(chunks)
    ]
    return dataclasses.replace(Trace("t", sizes, tuple(visits)), forward_ends=turns)


def plan_of(trace, capacities, resident=None, policy="belady", **settings):
    if isinstance(capacities, int):
        capacities = [capacities] * len(trace.visits)
    return make_plan(trace, capacities, Chooser(policy), resident or {}, **settings)


def told(plan):
    """What a plan does, a word for each moment: ``-0+2`` evicts chunk 0 and loads chunk 2."""
    words = ["".join([*(f"-{n}" for n in each.evict), *(f"+{n}" for n in each.load)]) for each in plan.moments]
    return " ".join(word or "." for word in words)


@pytest.mark.parametrize(
    ("visits", "budget", "chunk_budget", "floor", "room"),
    [
        ([(5, 0), (70, 0), (30, 0)], 60, 40, 0, (40, -10, 30)),
        ([(5, 3), (20, 0), (0, 70)], 60, 30, 0, (27, 30, -40)),
        ([(5, 3), (20, 0), (0, 70)], 60, 50, 0, (47, 40, -20)),
        ([(5, 3), (20, 0), (0, 70)], 60, None, 10, (47, 40, -20)),
    ],
)
def test_the_tide_leaves_what_others_and_gradients_that_wait_do_not_need(visits, budget, chunk_budget, floor, room):
    """Gradients are booked like chunks, so the limit of chunks is theirs too; the floor is below what others took."""
    trace = Trace("t", (10,), tuple(Visit(0, (), others, gradients) for others, gradients in visits))
    assert chunkable_nbytes(trace, budget, chunk_budget, floor) == room


SWEEP = make_trace([0, 1, 2, 2, 1, 0])
TURNING = make_trace([0, 1, 2, 2, 1, 0], turns=(3,))
AROUND = make_trace([0, 1, 2, 3, 1, 0], pinned={1: (0,), 2: (0, 1)}, turns=(4,))
RESHARD = {"reshard_after_forward": True}
PLANS = {
    # A trace, bytes of chunks, settings -> what is done, and bytes of chunks that are there afterwards.
    "a forward and a backward": (SWEEP, 20, {}, "+0 +1 -0+2 . . -2+0", (10, 20, 20, 20, 20, 20)),
    "the tide comes in": (SWEEP, [30, 30, 30, 10, 20, 30], {}, "+0 +1 +2 -0-1 +1 +0", (10, 20, 30, 10, 20, 30)),
    # Prefetch: chunk 3 waits for chunk 0, its victim, to be done.
    "loads come as early as there is room": (
        make_trace([0, 1, 2, 3], pinned={1: (0,)}),
        *(30, {"dropped_after": EVERYTHING, "prefetch_depth": 3}, "+0+1+2 . -0-1+3 -2", None),
    ),
    # What the update will void leaves when it is done: at the peak there is room for the next load.
    "void copies make room for loads": (
        make_trace([0, 1, 2, 3]),
        *([30, 30, 20, 30], {"dropped_after": EVERYTHING, "prefetch_depth": 1}, "+0+1 -0+2 -1+3 -2", None),
    ),
    # Leaving after forward though there is room; what backward has loaded stays.
    "chunks leave after forward": (TURNING, 100, RESHARD, "+0 -0+1 -1+2 -2+2 +1 +0", (10, 10, 10, 10, 20, 30)),
    # A module around others keeps its own parameters until the one after them is visited.
    "a chunk in use leaves when it is not": (
        AROUND,
        100,
        RESHARD,
        "+0 +1 +2 -0-1-2+3 -3+1 +0",
        (10, 20, 30, 10, 10, 20),
    ),
    "loads come ahead around what leaves": (
        *(TURNING, 100, {**RESHARD, "prefetch_depth": 2}, "+0+1+2 -0 -1 -2+2+1+0 . .", (30, 20, 10, 30, 30, 30)),
    ),
}


@pytest.mark.parametrize(("trace", "room", "settings", "does", "nbytes"), PLANS.values(), ids=PLANS)
def test_what_a_plan_does(trace, room, settings, does, nbytes):
    plan = plan_of(trace, room, **settings)
    assert told(plan) == does
    assert nbytes in (None, plan.chunk_nbytes)
    assert (plan.num_loads, plan.num_evictions) == (does.count("+"), does.count("-"))


def test_a_plan_knows_what_is_there_after_it_and_what_it_reduces():
    assert plan_of(SWEEP, 20).resident == {0: 5, 1: 4}
    assert plan_of(TURNING, 100, **RESHARD).resident == {2: 3, 1: 4, 0: 5}
    trace = make_trace([0, 1, 1], turns=(2,))
    assert plan_of(trace, 100, {0: -1, 3: -2}, **RESHARD).resident == {3: -2, 1: 2}, "not visited, so it stays"
    trace = make_trace([0, 1, 1, 0], turns=(2,), reduced={2: (1, 3), 3: (0,)})
    for settings in ({}, {**RESHARD, "prefetch_depth": 1}):
        assert [actions.reduce for actions in plan_of(trace, 100, **settings).moments] == [(), (), (1, 3), (0,)]


def test_a_plan_knows_which_visits_need_not_be_noted():
    """Those of chunks that never move, unless something else moves then."""
    trace = make_trace([0, 1, 2, 1, 3, 1, 0], others={0: 1, 1: 9, 2: 3, 3: 4, 4: 2, 5: 8})
    plan = plan_of(trace, 100, static=frozenset({0, 1}))
    assert told(plan) == ". . +2 . +3 . ."
    assert plan.quiet == {0, 1}
    assert plan.reserved_nbytes == (9, 9, 4, 4, 8, 8, 0)
    ahead = plan_of(trace, 100, static=frozenset({0, 1}), prefetch_depth=1)
    assert told(ahead) == "+2 . +3 . . . ."
    assert ahead.quiet == {1}
    assert ahead.reserved_nbytes == (9, 9, 4, 4, 8, 8, 0)


@pytest.mark.parametrize("depth", [0, 2])
def test_too_little_room_names_the_moment_and_the_bytes(depth):
    trace = make_trace([0, 1], pinned={1: (0,)}, others={1: 7})
    message = (
        r"moment 1 of trace 't': chunk 1 and the chunks in use \(\[0\]\) need 20 B \(20 bytes\), 15 B \(15 bytes\) "
        r"are there beside non-model data of 7 B"
    )
    with pytest.raises(BudgetError, match=message):
        plan_of(trace, 15, prefetch_depth=depth)
    assert plan_of(trace, 20, prefetch_depth=depth).num_loads == 2
    with pytest.raises(BudgetError, match=r"0 B \(0 bytes\) are there"):
        plan_of(make_trace([0]), -5, prefetch_depth=depth)
