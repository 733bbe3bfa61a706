"""How long chunks take on their way, and what is decided by that."""

import dataclasses

import pytest

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.pace import choose_depth, exposed_ns
from hf_patrickstar.units import MIB

H100 = MACHINES["h100"]


def test_the_ends_of_a_step_and_the_latencies_of_its_copies_are_exposed():
    machine = dataclasses.replace(
        H100, to_device_bandwidth=4.0, to_host_bandwidth=8.0, host_bandwidth=28.0, copy_latency_s=1.0, operator_s=0.1
    )
    # 16 elements: updated in 16 s; 32 bytes to the device in 8 s + 1 s, to the host in 4 s + 1 s; 3 chunks, 2 s each
    # for copies and 1 s for the host
    assert exposed_ns(3, 16, 2, machine) == (16 + 9 + 5 + 6 + 3) * 10**9


@pytest.mark.parametrize(("nbytes", "depth"), [(1, 8), (128 * MIB, 8), (200 * MIB, 5), (512 * MIB, 2), (2048 * MIB, 2)])
def test_as_many_chunks_are_loaded_ahead_as_the_bus_brings_in_20_ms(nbytes, depth):
    found, reason = choose_depth(nbytes, H100)
    assert found == depth
    assert reason == (
        f"prefetch_depth=auto: {depth} chunks are loaded ahead; by the rates of 'h100' a chunk takes "
        f"{H100.copy_ns(nbytes, to_device=True) / 1e6:.2f} ms on the bus"
    )
