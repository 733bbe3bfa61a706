"""Copies of the CPU tier, and what streams of a device hold; test_race_detector has the order of copies in lanes."""

import threading
import time
import types

import pytest
import torch
from support.race_detector import SimulatedDriver
from support.streams import HandingStreams

from hf_patrickstar.memory.streams import DeviceStreams, seconds_of
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import MIB

CPU = torch.device("cpu")


@pytest.fixture
def streams():
    made = HandingStreams(CPU)
    yield made
    made.close()


# Copies of the CPU tier


def test_small_copies_and_tensors_without_bytes_need_no_thread():
    streams = HandingStreams(CPU, at_once_nbytes=16)
    before, target = threading.active_count(), torch.zeros(4)
    assert streams.fetch(torch.ones(4), target) is None
    assert target.all()
    target = torch.zeros(40)
    assert streams.fetch(torch.nn.Parameter(torch.ones(40), requires_grad=False), target) is None
    assert target.all()
    with torch._subclasses.FakeTensorMode():
        assert streams.fetch(torch.ones(40), torch.zeros(40)) is None
    assert threading.active_count() == before
    streams.fetch(torch.ones(5), torch.zeros(5)).wait()
    streams.close()


# Streams of a device


class Device:
    """Streams over a simulated driver, whose copies run when the compute stream or the host waits for them."""

    def __init__(self):
        self.driver = SimulatedDriver()
        self.streams = DeviceStreams(CPU, self.driver)
        self.home, self.other_home = self.buffer(), self.buffer()

    def buffer(self, numel=4, tier=Tier.HOST):
        made = torch.zeros(numel)
        self.driver.take(made, tier, "param")
        return made

    def send(self, nbytes):
        """Starts the copy of a gradient; returns its ticket, which is done when the compute stream has joined it."""
        return self.streams.to_host(torch.ones(nbytes // 4), self.buffer(nbytes // 4))


@pytest.fixture
def device():
    return Device()


def test_no_more_gradients_are_held_than_they_may_take(device):
    assert not device.streams.hold_at_most(10 * MIB)
    tickets = [device.send(4 * MIB) for _ in range(4)]
    assert [ticket.is_done for ticket in tickets] == [True, True, False, False]
    assert not device.streams.hold_at_most(12 * MIB), "a limit is not raised"
    tickets.append(device.send(4 * MIB))
    assert [ticket.is_done for ticket in tickets] == [True, True, True, False, False]
    assert device.streams.hold_at_most(MIB), "more than that was held"
    assert all(ticket.is_done for ticket in tickets)
    tickets = [device.send(4 * MIB) for _ in range(3)]
    assert [ticket.is_done for ticket in tickets] == [True, False, False], "two may be held, whatever they take"
    assert device.streams.hold_at_most(0)
    assert device.send(16).is_done, "where there is no room none is held"
    assert not device.streams.hold_at_most(0)


def test_what_is_on_the_host_or_goes_to_unpinned_memory_is_copied_at_once(device):
    for source, target in ((device.home, device.other_home), (torch.zeros(4), torch.zeros(4))):
        source.fill_(3)
        assert device.streams.to_host(source, target) is None
        assert target.tolist() == [3] * 4


# Time


def test_seconds_of_a_compute_stream(monkeypatch):
    """Two events around the work, behind what was put there before."""
    done = []

    class Event:
        def __init__(self, device, enable_timing):
            assert enable_timing
            self.after = None

        def record(self, stream):
            self.after = tuple(done)

        def synchronize(self):
            done.append("synchronize")

        def elapsed_time(self, other):
            assert (self.after, other.after) == (("empty", "before"), ("empty", "before", "work"))
            return 250.0

    stream = types.SimpleNamespace(synchronize=lambda: done.append("empty"))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    device = torch.device("cuda", 0)
    assert seconds_of(device, lambda: done.append("work"), lambda: done.append("before")) == 0.25
    assert done[-1] == "synchronize"


def test_seconds_of_a_call():
    calls = []
    seconds = seconds_of(CPU, lambda: time.sleep(0.02) or calls.append("work"), lambda: calls.append("before"))
    assert calls == ["before", "work"]
    assert 0.02 <= seconds < 10
    assert seconds_of(CPU, lambda: None, lambda: time.sleep(0.2)) < 0.2, "what is done before is not counted"


def test_values_that_are_on_the_tier_of_another_tensor_do_not_cross(device):
    here, there = device.buffer(), device.buffer(tier=Tier.DEVICE)
    assert device.streams.on_tier_of(here, device.home) is here
    assert device.streams.on_tier_of(there, torch.zeros(1)) is there
    assert device.streams.on_tier_of(there, here).data_ptr() != there.data_ptr()
    assert device.streams.on_device(there) is there
    assert device.streams.on_device(here).data_ptr() != here.data_ptr()
    assert device.streams.on_device(there, copy=True).data_ptr() != there.data_ptr()


# By way of page-locked memory


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("numel", [1, 7, 64, 257])
@pytest.mark.parametrize("to_device", [True, False])
def test_what_goes_by_way_of_locked_memory_arrives_whole(seed, numel, to_device):
    """Several parts are on their way at the same time; no part is overwritten before it has left."""
    driver = SimulatedDriver(seed)
    streams = DeviceStreams(CPU, driver)
    tiers = (Tier.HOST, Tier.DEVICE) if to_device else (Tier.DEVICE, Tier.HOST)
    source, target, stage = torch.randn(numel), torch.zeros(numel), torch.zeros(32, dtype=torch.bfloat16)
    for buffer, tier in ((source, tiers[0]), (target, tiers[1]), (stage, Tier.HOST)):
        driver.take(buffer, tier, "param")
    expected = source.clone()
    streams.copy_through(source, target, stage)
    assert driver.num_copies == -(-numel * 4 // 16)
    assert torch.equal(target, expected)
    assert torch.equal(source, expected)


def test_what_stays_on_its_tier_goes_straight(device):
    stage = device.buffer(8)
    device.home.fill_(3)
    device.streams.copy_through(device.home, device.other_home, stage)
    assert device.other_home.tolist() == [3.0] * 4
    assert (stage.any(), device.driver.num_copies) == (False, 0)
