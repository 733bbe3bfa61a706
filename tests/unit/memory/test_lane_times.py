"""Lanes that are measured: every copy, every stop, and none of it when nothing is measured."""

import time
import types

import pytest
import torch
from support.race_detector import SimulatedDriver
from support.streams import HandingStreams

from hf_patrickstar.memory.streams import DeviceStreams, Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.schedule.clock import Lane

CPU = torch.device("cpu")
LONG_S = 0.02


class Sim:
    """Streams over a simulated driver, whose copies run when somebody waits for them."""

    def __init__(self):
        self.driver = SimulatedDriver()
        self.streams = DeviceStreams(CPU, self.driver)
        self.home, self.copy = self.buffer(Tier.HOST), self.buffer(Tier.DEVICE)

    def buffer(self, tier):
        made = torch.ones(4)
        self.driver.take(made, tier, "param")
        return made


@pytest.fixture
def sim():
    made = Sim()
    with made.driver.watching():
        yield made


def slow():
    time.sleep(LONG_S)


def test_copies_in_both_directions_and_work_that_fails_have_times(sim):
    def fail():
        slow()
        raise ValueError("no")

    before = time.perf_counter_ns()
    times = sim.streams.begin_timing()
    sim.streams.to_device(sim.home, sim.copy)
    sim.streams.to_host(torch.full((2,), 7.0), sim.home[:2]).wait()
    with pytest.raises(ValueError, match="no"):
        sim.streams.on_host(fail).wait()
    found = [one for one in times.found() if not one.waiter]
    assert {(work.lane, work.nbytes) for work in found} == {
        (Lane.TO_DEVICE, 16),
        (Lane.TO_HOST, 8),
        (Lane.HOST_WORK, 0),
    }
    for work in found:
        assert before <= work.begin <= work.end <= time.perf_counter_ns()
        if work.lane is Lane.HOST_WORK:
            assert work.end - work.begin >= LONG_S * 1e9


def test_the_host_and_the_compute_stream_stand_still(sim):
    times = sim.streams.begin_timing()
    sim.streams.on_host(slow).wait()
    begun = time.perf_counter_ns()
    work = sim.streams.on_host(slow)
    sim.streams.fetch(sim.home, sim.copy, [work]).join()  # comes after work: it is put into the lane late
    waits = [one for one in times.found() if one.waiter]
    of_device = [one for one in waits if one.waiter is Lane.COMPUTE]
    assert [one.lane for one in waits if one.waiter is Lane.HOST] == [Lane.HOST_WORK, Lane.TO_DEVICE]
    assert [one.lane for one in of_device] == [Lane.TO_DEVICE]
    assert of_device[0].begin >= begun - 1e6
    assert all(one.end - one.begin >= LONG_S * 0.9e9 for one in waits)


def test_another_thread_may_end_the_measuring_during_a_copy():
    streams = Streams(CPU)
    target = types.SimpleNamespace(copy_=lambda source: streams.end_timing())
    for _ in range(2):
        times = streams.begin_timing()
        streams.fetch(torch.ones(2), target)
        streams.fetch(torch.ones(2), torch.ones(2))
        assert len(times.found()) == 2, "the first is measured to its end, and the second is not"


def test_copies_of_the_cpu_tier_have_times():
    streams = HandingStreams(CPU, at_once_nbytes=16)
    times = streams.begin_timing()
    streams.to_host(torch.ones(2), torch.ones(2))
    streams.fetch(torch.ones(4), torch.ones(4))
    streams.fetch(torch.ones(5), torch.ones(5)).wait()
    assert [one[:2] + one[4:] for one in times.found() if one.nbytes] == [
        *((Lane.TO_HOST, None, 8), (Lane.TO_HOST, Lane.HOST, 8)),
        *((Lane.TO_DEVICE, None, 16), (Lane.TO_DEVICE, Lane.HOST, 16)),
        (Lane.TO_DEVICE, None, 20),
    ], "nobody waits for a copy that a thread makes"
    streams.close()
