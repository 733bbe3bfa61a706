"""Seconds from an engine to the end of its first step: every byte counts once, where it is slowest."""

import dataclasses

import pytest

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.pace import describe_start, seconds_to_first_step
from hf_patrickstar.schedule.placement import ChunkBytes

GB = 10**9
MACHINE = dataclasses.replace(MACHINES["h200"], num_cores=10, host_bandwidth=1e11)  # 16 GB of pages in a second
CHUNKS = [ChunkBytes(index, 2 * GB, 2 * GB, 12 * GB) for index in range(4)]
MASTERS = [4 * GB] * 4


def seconds(first=(), homed=(), machine=MACHINE, step_s=1.0):
    return list(seconds_to_first_step(CHUNKS, MASTERS, frozenset(first), frozenset(homed), machine, step_s).values())


def test_memory_is_taken_once_and_states_are_made_where_they_stay():
    assert seconds() == pytest.approx([24 / 16, 0, 1 + 32 / 16])
    bus = min(MACHINE.to_device_bandwidth, MACHINE.to_host_bandwidth, 5e10) / GB  # masters are copied on the host, too
    assert seconds(homed=range(3)) == pytest.approx([24 / 16, 18 / bus, 1 + 8 / 16])
    assert seconds(range(4), range(4)) == pytest.approx([24 * GB / MACHINE.pageable_bandwidth, 0, 1])
    _, moving, step = seconds(range(4), range(3))
    assert (moving, step) == pytest.approx((6 / bus, 1 + 8 / 16))


def test_pages_are_locked_beside_the_weights_where_there_is_a_device():
    fast = dataclasses.replace(MACHINE, num_cores=1000, host_bandwidth=1e12)
    assert seconds(machine=fast)[0] == pytest.approx(8 / 21)
    assert seconds(machine=dataclasses.replace(fast, has_accelerator=False))[0] == pytest.approx(48 / 1000)


def test_an_8b_model_begins_within_8_seconds_on_a_machine_that_was_measured():
    """16 cores of an H200's host; chunks of 98 of 112 GB move home in the first step of 1.9 seconds."""
    machine = MACHINES["h200"].with_cores(16)
    chunks = [ChunkBytes(index, 10**8, 10**8, 6 * 10**8) for index in range(160)]
    found = seconds_to_first_step(chunks, [2 * 10**8] * 160, frozenset(), frozenset(range(140)), machine, 1.9)
    assert sum(found.values()) < 8
    said = describe_start(found, machine.name)
    assert said.startswith(f"about {sum(found.values()):.1f} s from the engine to the end of the first step (weights ")
    assert said.endswith("at the rates of 'h200'")
