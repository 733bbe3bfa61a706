"""Lanes that are measured: every copy, every stop, and none of it when nothing is measured."""

import time
import types

import pytest
import torch
from support.race_detector import SimulatedDriver
from support.streams import HandingStreams

from hf_patrickstar.memory.lanes import WorkLane
from hf_patrickstar.memory.streams import DeviceStreams, Streams
from hf_patrickstar.memory.tiers import Tier

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
    found = times.works()
    assert [(work.lane, work.nbytes, work.is_ahead) for work in found] == [
        (WorkLane.TO_DEVICE, 16, True),
        (WorkLane.TO_HOST, 8, True),
        (WorkLane.HOST_WORK, 0, True),
    ]
    for work in found:
        assert before <= work.begin_ns <= work.end_ns <= time.perf_counter_ns()
    assert found[2].end_ns - found[2].begin_ns >= LONG_S * 1e9


def test_the_host_and_the_compute_stream_stand_still(sim):
    times = sim.streams.begin_timing()
    sim.streams.on_host(slow).wait()
    begun = time.perf_counter_ns()
    work = sim.streams.on_host(slow)
    sim.streams.fetch(sim.home, sim.copy, [work]).join()  # comes after work: it is put into the lane late
    stops = times.stops()
    of_device = [stop for stop in stops if not stop.is_host]
    assert [stop.lane for stop in stops if stop.is_host] == [WorkLane.HOST_WORK, WorkLane.TO_DEVICE]
    assert [stop.lane for stop in of_device] == [WorkLane.TO_DEVICE]
    assert of_device[0].begin_ns >= begun - 1e6
    assert all(stop.end_ns - stop.begin_ns >= LONG_S * 0.9e9 for stop in stops)


def test_another_thread_may_end_the_measuring_during_a_copy():
    streams = Streams(CPU)
    target = types.SimpleNamespace(copy_=lambda source: streams.end_timing())
    for _ in range(2):
        times = streams.begin_timing()
        streams.fetch(torch.ones(2), target)
        streams.fetch(torch.ones(2), torch.ones(2))
        assert len(times.works()) == 1, "the first is measured to its end, and the second is not"


def test_copies_of_the_cpu_tier_have_times():
    streams = HandingStreams(CPU, at_once_nbytes=16)
    times = streams.begin_timing()
    streams.to_host(torch.ones(2), torch.ones(2))
    streams.fetch(torch.ones(4), torch.ones(4))
    streams.fetch(torch.ones(5), torch.ones(5)).wait()
    assert [(copy.lane, copy.nbytes, copy.is_ahead) for copy in times.works()] == [
        (WorkLane.TO_HOST, 8, False),
        (WorkLane.TO_DEVICE, 16, False),
        (WorkLane.TO_DEVICE, 20, True),
    ]
    streams.close()
