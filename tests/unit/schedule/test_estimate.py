"""Where chunks live once a step is known: chunks of 100 bytes, 700 with their optimizer states."""

import pytest

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.estimate import Estimate, PlacementRules
from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.schedule.step_estimate import ChunkWork
from hf_patrickstar.schedule.trace import Trace, Visit

NUM, PARAM, STATE, OTHERS = 4, 100, 600, 50
WHOLE = PARAM + STATE


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


def indices(*numbers):
    return frozenset(numbers)


def test_the_room_beside_homes_is_what_no_moment_needs():
    assert estimate_of(1000).room_beside(indices()) == 1000 - OTHERS - PARAM
    assert estimate_of(1000).room_beside(indices(0)) == 1000 - OTHERS - PARAM - WHOLE
    assert estimate_of(4 * WHOLE).room_beside(indices(0, 1, 2, 3)) == -OTHERS, "nothing moves any more"
    assert estimate_of(1000, has_groups=True).room_beside(indices(0)) == 1000 - OTHERS - PARAM - WHOLE
    assert estimate_of(4 * WHOLE, has_groups=True).room_beside(indices(0, 1, 2, 3)) == -OTHERS - PARAM
    assert estimate_of(1000, workspace=64).room_beside(indices()) == 1000 - OTHERS - PARAM - 64


def test_chunks_leave_the_device_where_a_step_has_no_room_beside_them():
    homed, reasons = estimate_of(WHOLE + OTHERS + PARAM).settled(indices(0, 1, 2), indices())
    assert len(homed) <= 1
    assert reasons[0] == "3 chunks left the device, where not everything fits after all: beside what else a step takes"
    assert "stay on the device with their optimizer states" in reasons[1]


@pytest.mark.parametrize("spilled", [indices(2, 3), indices(0, 1)])
def test_chunks_that_the_host_has_no_room_for_stay(spilled):
    estimate = estimate_of(2 * WHOLE + OTHERS + PARAM, host_nbytes=2 * WHOLE)
    homed, reasons = estimate.settled(spilled, spilled)
    assert homed == spilled
    assert len(reasons) == 1


def test_more_of_the_host_changes_nothing_where_it_has_room_for_all_that_is_worth_being_there():
    device = 2 * WHOLE + OTHERS + 2 * PARAM
    for host, spilled in ((2 * WHOLE, indices(0, 1)), (3 * WHOLE, indices(0)), (4 * WHOLE, indices())):
        assert estimate_of(device, host_nbytes=host).settled(spilled, spilled)[0] == indices(0, 1)


def test_what_fits_neither_tier_is_an_error():
    with pytest.raises(BudgetError):
        estimate_of(WHOLE, host_nbytes=2 * WHOLE).settled(indices(), indices())
