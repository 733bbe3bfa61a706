"""Where chunks live once a step is known: chunks of 100 bytes, 700 with their optimizer states."""

import dataclasses

import pytest

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.estimate import Estimate, PlacementRules
from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.schedule.step_estimate import ChunkWork
from hf_patrickstar.schedule.trace import Trace, Visit

NUM, PARAM, STATE, OTHERS = 4, 100, 600, 50
WHOLE = PARAM + STATE
ALL = frozenset(range(NUM))


def estimate_of(device_nbytes, host_nbytes=NUM * WHOLE, may_move=True, has_groups=False, workspace=0):
    order = [*range(NUM), *reversed(range(NUM))]
    visits = tuple(Visit(index, non_model_nbytes=OTHERS) for index in order)
    return Estimate(
        [Trace("training/4", (PARAM,) * NUM, visits, (((4,),),), (NUM,))],
        1,
        [ChunkBytes(index, PARAM, PARAM, STATE) for index in range(NUM)],
        [ChunkWork(50, 50, PARAM, 0, "bfloat16", False, may_move)] * NUM,
        frozenset(range(NUM)),
        has_groups,
        host_nbytes,
        device_nbytes,
        None,
        PlacementRules(workspace, 0, 1, "belady", MACHINES["h100"], True, True),
    )


@pytest.mark.parametrize(
    ("device_nbytes", "homed", "settings", "room"),
    [
        (1000, set(), {}, 1000 - OTHERS - PARAM),
        (1000, {0}, {}, 1000 - OTHERS - PARAM - WHOLE),
        (4 * WHOLE, ALL, {}, -OTHERS),
        (4 * WHOLE, ALL, {"has_groups": True}, -OTHERS - PARAM),
        (1000, set(), {"workspace": 64}, 1000 - OTHERS - PARAM - 64),
    ],
    ids=["none at home", "one at home", "nothing moves any more", "groups are gathered", "scratch space"],
)
def test_the_room_beside_homes_is_what_no_moment_needs(device_nbytes, homed, settings, room):
    assert estimate_of(device_nbytes, **settings).room_beside(frozenset(homed)) == room


def test_chunks_leave_the_device_where_a_step_has_no_room_beside_them():
    assert estimate_of(4 * WHOLE + OTHERS, may_move=False).settled(ALL, frozenset()) == (ALL, [])
    homed, reasons = estimate_of(WHOLE + OTHERS + PARAM).settled(frozenset({0, 1, 2}), frozenset())
    assert len(homed) <= 1
    assert reasons[0].startswith("3 chunks left the device")
    assert "live in the device margin" in reasons[1]


@pytest.mark.parametrize("spilled", [frozenset({2, 3}), frozenset({0, 1})])
def test_chunks_that_the_host_has_no_room_for_stay(spilled):
    estimate = estimate_of(2 * WHOLE + OTHERS + PARAM, host_nbytes=2 * WHOLE)
    homed, (reason,) = estimate.settled(spilled, spilled)
    assert homed == spilled
    assert reason.startswith("the host has no room for 2 chunks, which live on the device; beside them ")
    estimate = estimate_of(2 * WHOLE + OTHERS + PARAM, host_nbytes=3 * WHOLE)
    homed, reasons = estimate.settled(frozenset({0, 1, 2}), frozenset({2}))
    assert 2 in homed
    assert reasons[0].startswith("2 chunks left the device")


def test_what_fits_neither_tier_is_an_error():
    with pytest.raises(BudgetError):
        estimate_of(WHOLE, host_nbytes=2 * WHOLE).settled(frozenset(), frozenset())


def test_nothing_is_said_of_chunks_that_are_not_there():
    estimate = estimate_of(OTHERS + PARAM - 1)
    assert estimate.room_beside(frozenset()) < 0
    assert dataclasses.replace(estimate, works=estimate.works[:0]).settled(frozenset(), frozenset()) == (set(), [])
