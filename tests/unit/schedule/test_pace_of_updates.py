"""How much of the optimizer's work fits beside a backward."""

import dataclasses

import pytest

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.bounds import ADAM_NBYTES
from hf_patrickstar.schedule.pace import updated_beside_backward
from hf_patrickstar.schedule.sketch import ChunkWork
from hf_patrickstar.schedule.trace import Trace, Visit

MACHINE = dataclasses.replace(MACHINES["h100"], kernel_s=1e-9)
NUMEL = 10**7


def trace_of(order, num_forward, rows=4):
    return Trace("training", (0, 0), tuple(map(Visit, order)), (((1, rows),),), (num_forward,))


def work(is_static=False):
    return ChunkWork(NUMEL, NUMEL, 0, 0, "bfloat16", is_static)


def test_a_measured_backward_has_room_for_what_the_host_updates_in_that_time():
    ns = MACHINE.host_ns(0, ADAM_NBYTES * NUMEL)
    found = updated_beside_backward(trace_of([0, 1, 1, 0], 2), [work(), work()], MACHINE, ns)
    assert found == pytest.approx(NUMEL, rel=1e-3)
    assert updated_beside_backward(trace_of([0, 1, 1, 0], 2), [work(), work()], MACHINE, 100 * ns) == 2 * NUMEL


def test_chunks_at_home_on_the_device_are_not_the_host_s():
    ns = MACHINE.host_ns(0, ADAM_NBYTES * NUMEL)
    assert updated_beside_backward(trace_of([0, 1, 1, 0], 2), [work(), work(True)], MACHINE, 100 * ns) == NUMEL
    assert updated_beside_backward(trace_of([0], 1), [work(True)], MACHINE, ns) == 0


def test_an_estimate_counts_what_is_computed_again():
    once = updated_beside_backward(trace_of([0, 1, 1, 0], 2, rows=512), [work(), work()], MACHINE)
    again = updated_beside_backward(trace_of([0, 1, 1, 1, 0, 0], 2, rows=512), [work(), work()], MACHINE)
    assert again == pytest.approx(1.5 * once, rel=0.01)
    more = updated_beside_backward(trace_of([0, 1, 1, 0], 2, rows=1024), [work(), work()], MACHINE)
    assert more == pytest.approx(2 * once, rel=0.01)
