"""Where chunks live once a step is known: chunks of 100 bytes, 700 with their optimizer states."""

import dataclasses

import pytest

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.estimate import Estimate
from hf_patrickstar.schedule.placement import ChunkBytes, Homes
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
        [ChunkWork(50, 50, PARAM, 0, "bfloat16", may_move)] * NUM,
        frozenset(range(NUM)),
        has_groups,
        host_nbytes,
        device_nbytes,
        None,
        *(workspace, 0, 1, "belady", MACHINES["h100"], True, True),
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
    homes = estimate_of(WHOLE + OTHERS + PARAM).settled(Homes(indices(0, 1, 2)))
    assert len(homes.device) <= 1
    assert (
        homes.reasons["homes"]
        == "3 chunks left the device, where not everything fits after all: beside what else a step takes"
    )
    assert "stay on the device with their optimizer states" in homes.reasons["margin"]


@pytest.mark.parametrize("spilled", [(2, 3), (0, 1)])
def test_chunks_that_the_host_has_no_room_for_stay(spilled):
    estimate = estimate_of(2 * WHOLE + OTHERS + PARAM, host_nbytes=2 * WHOLE)
    homes = estimate.settled(Homes(frozenset(spilled), spilled))
    assert homes.device == frozenset(spilled)
    assert list(homes.reasons) == ["margin"]


def test_chunks_are_allocated_where_they_were_decided_to_be_unless_the_host_has_no_room():
    """What a step takes decides which chunks are spilled, and which leave; it does not fill the margin yet."""
    everywhere, spilled = Homes(indices(0, 1, 2, 3)), Homes(indices(2, 3), (2, 3))
    assert estimate_of(10 * WHOLE).first(everywhere) == everywhere
    assert estimate_of(WHOLE).first(everywhere) == everywhere, "a first step may take less than was planned"
    estimate = estimate_of(2 * WHOLE + OTHERS + PARAM, host_nbytes=2 * WHOLE)
    assert estimate.first(spilled).margin == (0, 1), "those that are needed first"
    assert estimate.homes_with_room(spilled) == estimate.first(spilled)
    assert estimate_of(WHOLE, host_nbytes=2 * WHOLE).homes_with_room(spilled) is None


def test_homes_that_do_not_move_are_those_of_before():
    homes = Homes(indices(0, 1, 2))
    fixed = dataclasses.replace(estimate_of(WHOLE + OTHERS + PARAM), moves_homes=False)
    assert fixed.settled(homes) == homes
    assert fixed.homes_with_room(homes) is None


def test_what_fits_neither_tier_is_an_error():
    with pytest.raises(BudgetError):
        estimate_of(WHOLE, host_nbytes=2 * WHOLE).settled(Homes(indices()))


def streaming(estimate, host_ns, bus_ns, **changes):
    """An estimate on a machine on which the update of a chunk takes so long, in microseconds."""
    crossing = PARAM + STATE
    machine = dataclasses.replace(
        MACHINES["h100"],
        host_bandwidth=50 * 28 / (host_ns * 1e-6),
        memory_bandwidth=1e15,
        duplex_share=1.0,
        to_device_bandwidth=crossing / (bus_ns * 1e-6),
        to_host_bandwidth=crossing / (bus_ns * 1e-6),
        copy_latency_s=1e-12,
    )
    works = [dataclasses.replace(work, chunk_numel=50) for work in estimate.works]
    return dataclasses.replace(estimate, machine=machine, works=works, **changes)


@pytest.mark.parametrize(
    ("host_ns", "bus_ns", "expected"),
    [(4, 4, {1, 3}), (2, 7, set()), (9, 3, {0, 1, 3}), (100, 1, {0, 1, 2, 3})],
)
def test_chunks_are_updated_where_that_is_done_first(host_ns, bus_ns, expected):
    """In the order of the next forward; states of 600 bytes and a value of 100 cross for 50 parameters."""
    estimate = streaming(estimate_of(10**6), host_ns, bus_ns, updates="faster")
    assert estimate.streamed(indices()) == expected
    assert estimate.streamed(indices(0, 1, 2, 3)) == indices()
    assert dataclasses.replace(estimate, updates="device").streamed(indices(0)) == indices(1, 2, 3)
    assert dataclasses.replace(estimate, updates="auto").streamed(indices()) == indices()


@pytest.mark.parametrize(("room", "expected"), [(WHOLE, 1), (WHOLE - 1, 4), (100, 4), (99, None)])
def test_tiles_are_smaller_where_the_device_has_no_room_for_slots(room, expected):
    slots = {"slots_nbytes": {1: WHOLE, 4: 100}, "updates": "auto"}
    # Chunks have no homes there: what one of them needs at a moment is all that there is room for.
    estimate = streaming(estimate_of(OTHERS + PARAM + room, host_nbytes=10**6), 100_000, 1, **slots)
    homes = dataclasses.replace(estimate, moves_homes=False).settled(Homes(indices()))
    assert (homes.tile_part if homes.streamed else None) == expected
    assert ("over the bus: a step takes" in homes.reasons["updates"]) == (expected is not None)


def test_memory_that_the_host_needs_for_its_own_updates_is_no_room_for_the_bus():
    """Where its cores take all of the memory's bandwidth, nothing is faster over the bus."""
    machine = dataclasses.replace(MACHINES["h100"], host_bandwidth=100e9, memory_bandwidth=0.0)
    assert not dataclasses.replace(estimate_of(10**6), machine=machine, updates="faster").streamed(indices())
