"""Lanes of an accelerator that are measured: every copy, every stop, and none of it when nothing is measured."""

import time

import pytest
import torch
from race_detector import SimulatedDriver
from simulated import HandingStreams

from hf_patrickstar.memory import lanes
from hf_patrickstar.memory.lanes import WorkLane
from hf_patrickstar.memory.streams import DeviceStreams
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


def test_copies_in_both_directions_have_times(sim):
    before = time.perf_counter_ns()
    times = sim.streams.begin_timing()
    sim.streams.to_device(sim.home, sim.copy)
    sim.streams.to_host(torch.full((2,), 7.0), sim.home[:2]).wait()
    found = times.works()
    assert [(copy.lane, copy.nbytes, copy.is_ahead) for copy in found] == [
        (WorkLane.TO_DEVICE, 16, True),
        (WorkLane.TO_HOST, 8, True),
    ]
    for copy in found:
        assert before <= copy.begin_ns <= copy.end_ns <= time.perf_counter_ns()


def test_work_of_the_hosts_thread_has_its_own_time_also_if_it_fails(sim):
    times = sim.streams.begin_timing()

    def fail():
        slow()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        sim.streams.on_host(fail).wait()
    (work,) = times.works()
    assert work.lane is WorkLane.HOST_WORK
    assert work.end_ns - work.begin_ns >= LONG_S * 1e9


def test_the_host_and_the_compute_stream_stand_still(sim):
    times = sim.streams.begin_timing()
    sim.streams.on_host(slow).wait()
    begun = time.perf_counter_ns()
    work = sim.streams.on_host(slow)
    sim.streams.fetch(sim.home, sim.copy, [work]).join()  # comes after work: it is put into the lane late
    stops = times.stops()
    assert [(stop.lane, stop.is_host) for stop in stops if stop.is_host] == [
        (WorkLane.HOST_WORK, True),
        (WorkLane.TO_DEVICE, True),
    ]
    (of_device,) = [stop for stop in stops if not stop.is_host]
    assert of_device.lane is WorkLane.TO_DEVICE
    assert of_device.begin_ns >= begun - 1e6
    for stop in stops:
        assert stop.end_ns - stop.begin_ns >= LONG_S * 0.9e9


def test_what_is_not_late_is_no_stop(sim, monkeypatch):
    now = iter(range(0, 10**9, 100))  # each look at the clock takes a tenth of a microsecond
    monkeypatch.setattr(lanes.time, "perf_counter_ns", lambda: next(now))
    monkeypatch.setattr(lanes.time, "perf_counter", lambda: next(now) / 1e9)
    times = sim.streams.begin_timing()
    ticket = sim.streams.fetch(sim.home, sim.copy)
    ticket.wait()
    ticket.join()
    monkeypatch.undo()
    assert len(times._stops) == len(times._waits) - 1 == 1
    assert times.stops() == []


def test_marks_are_in_order_and_on_the_hosts_clock(sim):
    times = sim.streams.begin_timing()
    since = time.perf_counter_ns()
    first = times.mark()
    slow()
    second = times.mark()
    assert times.ns_of(second) - times.ns_of(first) == pytest.approx(LONG_S * 1e9, rel=0.5)
    assert since - 1e6 <= times.ns_of(first) <= times.ns_of(second) <= time.perf_counter_ns() + 1e6


def test_nothing_is_measured_before_and_after(sim):
    sim.streams.fetch(sim.home, sim.copy).join()
    times = sim.streams.begin_timing()
    timed = sim.streams.fetch(sim.home, sim.copy)
    sim.streams.end_timing()
    sim.streams.fetch(sim.home, sim.copy).join()
    sim.streams.on_host(lambda: None).wait()
    timed.join()
    assert len(times.works()) == 1, "the copy of before the end is done, and counts"
    assert len(times._stops) == len(times._waits) == 1


def test_copies_of_the_cpu_tier_have_times():
    streams = HandingStreams(CPU, at_once_nbytes=16)
    times = streams.begin_timing()
    streams.to_host(torch.ones(2), torch.ones(2))
    streams.fetch(torch.ones(5), torch.ones(5)).wait()
    assert [(copy.lane, copy.nbytes, copy.is_ahead) for copy in times.works()] == [
        (WorkLane.TO_HOST, 8, False),
        (WorkLane.TO_DEVICE, 20, True),
    ]
    assert [stop.lane for stop in times._waits] == [WorkLane.TO_DEVICE]
    streams.close()


def test_measured_tickets_wait_for_what_others_wait_for(sim):
    """A copy comes after a measured one of the other lane, and after measured work: the race detector would say it."""
    sim.streams.begin_timing()
    away = sim.streams.to_host(torch.full((4,), 7.0), sim.home)
    work = sim.streams.on_host(lambda: sim.home.mul_(2), [away])
    sim.streams.fetch(sim.home, sim.copy, [away, work]).join()
    assert (sim.copy + 1).tolist() == [15, 15, 15, 15]
