"""What a step does in backward for the next one: which chunks are updated there, and which come back."""

import dataclasses

import pytest

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.ahead import plan_ahead, spread
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.plan import Ahead, make_plan, repeated_plans
from hf_patrickstar.schedule.sketch import ChunkWork
from hf_patrickstar.schedule.trace import Trace, Visit

NUM = 20
NUMEL = 10**6
NBYTES = 2 * NUMEL
SLOW_BUS = dataclasses.replace(
    MACHINES["h100"], to_device_bandwidth=1e9, to_host_bandwidth=1e12, host_bandwidth=28e9, copy_latency_s=1e-9
)
"""A copy to the device takes 2 ms, and an update 1 ms."""
ROWS = round(1e-3 * SLOW_BUS.flops["bfloat16"] / (2 * NUMEL))
"""With so many rows forward computes with a chunk for 1 ms."""
EVERYTHING = frozenset(range(NUM))
TRACE = Trace(
    "training", (NBYTES,) * NUM, tuple(map(Visit, [*range(NUM), *reversed(range(NUM))])), (((1, ROWS),),), (NUM,)
)


def work(**values):
    return dataclasses.replace(ChunkWork(NUMEL, NUMEL, NBYTES, 0, "bfloat16", False), **values)


def ahead(room, works=None, depth=2, machine=SLOW_BUS):
    return plan_ahead(TRACE, [room * NBYTES] * len(TRACE.visits), works or [work()] * NUM, machine, depth)


@pytest.mark.parametrize(
    ("share", "chosen"), [(0.0, ()), (0.5, (7, 5, 3, 1)), (0.25, (7, 3)), (1.0, (7, 6, 5, 4, 3, 2, 1, 0))]
)
def test_a_share_is_spread_over_the_model(share, chosen):
    assert spread(tuple(reversed(range(8))), [10] * 8, share) == chosen


def test_large_chunks_count_for_more():
    assert spread((0, 1, 2, 3), [30, 10, 10, 10], 0.6) == (0, 3)


def test_as_much_is_carried_over_as_forward_cannot_copy_while_it_computes():
    """Forward computes for 20 ms and copies for 40: half of the chunks."""
    found = ahead(room=NUM)
    assert found.updated[0] == NUM - 1, "in the order of backward"
    assert set(found.carried) <= set(found.updated)
    assert len(found.carried) == pytest.approx(NUM / 2, abs=1)
    assert len([index for index in found.carried if index < NUM / 2]) == pytest.approx(NUM / 4, abs=1), "evenly"


def test_forward_needs_room_beside_them():
    """Of eight chunks that fit, three are those that forward works with."""
    assert len(ahead(room=8).carried) == pytest.approx(5, abs=1)
    assert ahead(room=3).carried == ()


def test_nothing_is_carried_over_where_the_bus_is_fast_or_nothing_comes_ahead():
    assert ahead(room=NUM, machine=dataclasses.replace(SLOW_BUS, to_device_bandwidth=1e12)).carried == ()
    assert ahead(room=NUM, depth=0).carried == ()
    assert ahead(room=NUM, depth=0).updated


def test_frozen_chunks_and_those_at_home_on_the_device_are_left_out():
    works = [work(own_numel=0)] * 5 + [work(is_static=True)] * 5 + [work()] * 10
    found = ahead(room=NUM, works=works)
    assert found.updated
    assert min(found.updated) >= 10


def plan_of(order, room, carried, dropped=None, depth=1, pinned=()):
    visits = tuple(Visit(index, pinned if index not in pinned else ()) for index in order)
    trace = Trace("training", (10,) * 6, visits, ((),), (len(set(order)),))
    dropped = frozenset(order) if dropped is None else dropped
    ahead = Ahead(carried, carried)
    return make_plan(
        trace, [room] * len(visits), Chooser("belady"), {}, dropped_after=dropped, prefetch_depth=depth, ahead=ahead
    )


def carried_at(plan):
    return {index: moment for moment, actions in enumerate(plan.moments) for index in actions.carry}


def test_a_chunk_is_carried_over_after_its_update_and_stays():
    """The last chunk is visited for the last time at moment 4, and its copy of before leaves then."""
    plan = plan_of([0, 1, 2, 3, 3, 2, 1, 0], 100, (3, 2))
    assert carried_at(plan) == {3: 6, 2: 7}
    assert plan.moments[5].evict == (3,)
    assert plan.resident == {3: 4, 2: 5, 0: 7}
    assert plan.chunk_nbytes[-1] == 30
    assert plan.ahead == Ahead((3, 2), (3, 2))


def test_a_chunk_waits_for_room_and_stays_at_home_without():
    assert carried_at(plan_of([0, 1, 2, 3, 3, 2, 1, 0], 30, (3, 2))) == {3: 6}, "the next step works with two"
    assert carried_at(plan_of([0, 1, 2, 3, 3, 2, 1, 0], 20, (3, 2))) == {}


def test_the_next_step_finds_them_and_loads_them_once():
    order = [0, 1, 2, 3, 3, 2, 1, 0]
    trace = Trace("training", (10,) * 4, tuple(map(Visit, order)), ((),), (4,))
    (plan,) = repeated_plans(
        [trace], [[100] * 8], "belady", dropped_after=frozenset(order), prefetch_depth=1, ahead=Ahead((3, 2), (3, 2))
    )
    assert [index for actions in plan.moments for index in actions.load] == [0, 1]
    assert plan.num_loads == 4
    assert carried_at(plan) == {3: 6, 2: 7}


def test_chunks_that_backward_does_not_visit_are_updated_and_not_carried_over(monkeypatch):
    """No operator keeps their values, as those of biases; the trace does not tell when their gradients come."""
    monkeypatch.setattr("hf_patrickstar.schedule.pace.share_beside_backward", lambda *args: 1.0)
    trace = dataclasses.replace(TRACE, visits=tuple(map(Visit, [*range(NUM), *reversed(range(2, NUM))])))
    found = plan_ahead(trace, [NUM * NBYTES] * len(trace.visits), [work()] * NUM, SLOW_BUS, 2)
    assert found.updated == (*reversed(range(2, NUM)), 0, 1)
    assert found.carried
    assert not {0, 1} & set(found.carried)
