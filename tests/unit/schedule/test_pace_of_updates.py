"""Which share of the optimizer's work is done beside a backward."""

import dataclasses

import pytest

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.bounds import ADAM_NBYTES
from hf_patrickstar.schedule.pace import share_beside_backward, share_to_carry
from hf_patrickstar.schedule.sketch import ChunkWork
from hf_patrickstar.schedule.trace import Trace, Visit

MACHINE = dataclasses.replace(MACHINES["h100"], kernel_s=1e-9)
NUMEL = 10**7
UPDATING_NS = MACHINE.host_ns(0, ADAM_NBYTES * NUMEL)
"""What the host takes for a chunk."""


def trace_of(order, num_forward, rows):
    return Trace("training", (0, 0), tuple(map(Visit, order)), (((1, rows),),), (num_forward,))


def rows_of(updates):
    """As many rows as make forward last as long as so many updates of a chunk."""
    ns_per_row = MACHINE.kernel_ns(2 * NUMEL * 10**6, 0, "bfloat16") / 10**6
    return round(updates * UPDATING_NS / ns_per_row / 2)


def share(updates, *works):
    works = works or (work(), work())
    return share_beside_backward(trace_of([0, 1, 1, 0], 2, rows_of(updates)), works, MACHINE)


def work(is_static=False):
    return ChunkWork(NUMEL, NUMEL, 0, 0, "bfloat16", is_static)


def test_where_there_is_much_time_half_of_it_is_on_either_side():
    assert share(10.0) == 0.5


def test_in_the_middle_between_what_forward_leaves_and_what_backward_has_time_for():
    """Two updates; forward has time for 0.8 of one, and backward for 1.6."""
    assert share(0.8) == pytest.approx((0.6 + 0.8) / 2, rel=0.01)


def test_where_the_host_is_late_anyway_it_works_as_the_device_does():
    """Forward has time for 0.4 of two updates, and backward for 0.8: twice as much."""
    assert share(0.4) == pytest.approx(2 / 3, rel=0.01)


def test_a_backward_that_computes_forward_again_lasts_longer():
    """It visits chunks in the order of forward: three times what forward has time for, and not twice."""
    works = [work(), work()]
    trace = trace_of([0, 1, 0, 1], 2, rows_of(0.4))
    assert share_beside_backward(trace, works, MACHINE) == pytest.approx(3 / 4, rel=0.01)


def test_what_is_there_when_forward_begins_does_not_make_it_longer():
    """Copies take as long as one of two updates; without three quarters of them forward has time for a quarter."""
    nbytes = round(UPDATING_NS / 1e9 * MACHINE.to_device_bandwidth / 2)
    works = [dataclasses.replace(work(), gradient_nbytes=nbytes)] * 2
    trace = trace_of([0, 1, 1, 0], 2, rows_of(0.1))
    shares = [share_beside_backward(trace, works, MACHINE, carried) for carried in (0.0, 0.75)]
    assert shares == pytest.approx([1 / 2, 7 / 8], rel=0.02)


@pytest.mark.parametrize(("updated", "carried"), [(0.0, 0.0), (0.5, 0.0), (0.75, 0.5), (1.0, 0.8)])
def test_what_forward_has_no_time_to_copy_is_carried_over(updated, carried):
    """Copies take as long as one of two updates; forward lasts as long as what is left, or as it computes: 0.2."""
    nbytes = round(UPDATING_NS / 1e9 * MACHINE.to_device_bandwidth / 2)
    works = [dataclasses.replace(work(), gradient_nbytes=nbytes)] * 2
    found = share_to_carry(trace_of([0, 1, 1, 0], 2, rows_of(0.2)), works, MACHINE, updated)
    assert found == pytest.approx(carried, abs=0.02)


def test_where_nothing_is_copied_nothing_is_carried():
    assert share_to_carry(trace_of([0, 0], 1, 1), [work(is_static=True)], MACHINE, 1.0) == 0.0


def test_chunks_at_home_on_the_device_are_not_the_host_s():
    """One update; forward has time for 0.4, and backward for 0.8."""
    assert share(0.4, work(), work(is_static=True)) == pytest.approx((0.6 + 0.8) / 2, rel=0.01)
    assert share(0.4, work(is_static=True), work(is_static=True)) == 0.5, "of nothing"


def test_forward_lasts_as_long_as_its_copies():
    nbytes = round(UPDATING_NS / 1e9 * MACHINE.to_device_bandwidth / 2)
    slow = dataclasses.replace(work(), gradient_nbytes=nbytes)
    assert share(0.1, slow, slow) == pytest.approx(0.5, rel=0.01), "as two chunks are, each for half an update"


def test_a_gather_takes_its_time_too():
    machine = MACHINES["8xh100"]
    updating_ns = machine.host_ns(0, ADAM_NBYTES * NUMEL)
    sent = dataclasses.replace(work(), sent_nbytes=round(0.9 * updating_ns / 1e9 * machine.link_bandwidth))
    found = share_beside_backward(trace_of([0, 0], 1, 1), [sent], machine)
    assert found == pytest.approx((0.1 + 0.9) / 2, abs=0.02)
