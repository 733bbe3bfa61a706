"""Copies of the CPU tier, and what streams of a device hold; test_race_detector has the order of copies in lanes."""

import threading
import time
import types

import pytest
import torch
from race_detector import SimulatedDriver
from simulated import HandingStreams

from hf_patrickstar.memory.lanes import WorkLane
from hf_patrickstar.memory.streams import DeviceStreams, StreamCopy, copy_bytes, make_streams, seconds_of
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import MIB

CPU = torch.device("cpu")


@pytest.fixture
def streams():
    made = HandingStreams(CPU)
    yield made
    made.close()


def use_count(tensor):
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class SlowCopy:
    """Copies when it is told to, and remembers what it copied and on which thread."""

    def __init__(self):
        self.may_go = threading.Event()
        self.has_begun = threading.Event()
        self.firsts = []
        self.threads = set()

    def __call__(self, arrays):
        self.has_begun.set()
        assert self.may_go.wait(60)
        self.firsts.append(int(arrays[1][0]))
        self.threads.add(threading.current_thread())
        copy_bytes(arrays)


@pytest.fixture
def slow():
    """A slow copy and the streams that use it."""
    copy = SlowCopy()
    made = HandingStreams(CPU, copy)
    yield copy, made
    copy.may_go.set()
    made.close()


# Copies of the CPU tier


@pytest.mark.parametrize("direction", ["to_device", "to_host"])
def test_a_copy_that_is_waited_for_fills_its_target_and_nothing_else(streams, direction):
    payload, source = torch.zeros(10), torch.randn(3, 2).t()
    assert getattr(streams, direction)(source, payload.as_strided((2, 3), (3, 1), 2)) is None
    assert torch.equal(payload[2:8].view(2, 3), source)
    assert not payload[[0, 1, 8, 9]].any()
    with pytest.raises(RuntimeError, match="size"):
        getattr(streams, direction)(torch.zeros(4), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fetching_copies_every_bit(streams, dtype):
    """All patterns of 16 bits, NaN and subnormal numbers among them."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    target = torch.zeros_like(bits).view(dtype)
    ticket = streams.fetch(bits.view(dtype), target)
    ticket.join()
    assert (ticket.lane, ticket.is_done) == (WorkLane.TO_DEVICE, True)
    assert torch.equal(target.view(torch.int16), bits)


@pytest.mark.parametrize("method", ["wait", "join"])
def test_waiting_blocks_until_the_copy_is_there(slow, method):
    copy, streams = slow
    target, ended = torch.zeros(4), threading.Event()
    ticket = streams.fetch(torch.ones(4), target)
    waiting = threading.Thread(target=lambda: (getattr(ticket, method)(), ended.set()))
    waiting.start()
    assert copy.has_begun.wait(60)
    assert not ended.wait(0.1)
    assert not ticket.is_done
    assert not target.any()
    copy.may_go.set()
    waiting.join(60)
    assert (ended.is_set(), ticket.is_done, target.tolist()) == (True, True, [1.0] * 4)


def test_copies_keep_their_order_in_one_thread_of_their_own(slow):
    copy, streams = slow
    numbers = list(range(20))
    pairs = [(torch.full((4,), number, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)) for number in numbers]
    tickets = [streams.fetch(*pair) for pair in pairs]
    assert not any(ticket.is_done for ticket in tickets)
    copy.may_go.set()
    tickets[-1].wait()
    assert all(ticket.is_done for ticket in tickets)
    assert copy.firsts == numbers
    assert len(copy.threads - {threading.current_thread()}) == 1
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("method", ["wait", "join"])
def test_an_error_of_a_copy_is_raised_where_it_is_waited_for_and_the_thread_goes_on(method):
    failures = [ValueError("a bad disk")]

    def fail_once(arrays):
        if failures:
            raise failures.pop()
        copy_bytes(arrays)

    streams, target = HandingStreams(CPU, fail_once), torch.zeros(4)
    first, second = streams.fetch(torch.ones(4), target), streams.fetch(torch.ones(4), target)
    second.wait()
    assert target.all()
    with pytest.raises(ValueError, match="a bad disk"):
        getattr(first, method)()
    assert first.is_done
    streams.close()


def test_buffers_are_held_while_they_are_copied_and_no_longer(slow):
    """A chunk's payload counts as aliased while anything else holds its storage, and cannot leave then."""
    copy, streams = slow
    source, target = torch.ones(4), torch.zeros(4)
    before = use_count(source), use_count(target)
    ticket = streams.fetch(source, target)
    assert use_count(target) > before[1]
    copy.may_go.set()
    for _ in range(20):
        ticket.wait()
        assert (use_count(source), use_count(target)) == before
        ticket = streams.fetch(source, target)


def test_closing_ends_the_thread_and_may_come_twice():
    streams = HandingStreams(CPU)
    streams.close()
    before = set(threading.enumerate())
    for _ in range(2):  # a copy after all has a new thread
        target = torch.zeros(4)
        streams.fetch(torch.ones(4), target).wait()
        assert target.all()
        assert len(set(threading.enumerate()) - before) == 1
        streams.close()
        streams.close()
        assert set(threading.enumerate()) <= before


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


def test_gradients_in_flight_are_held_until_the_compute_stream_waits_for_them(device):
    gradient = torch.ones(4)
    before = use_count(gradient)
    ticket = device.streams.to_host(gradient.detach(), device.home)
    assert (ticket.lane, ticket.is_done) == (WorkLane.TO_HOST, False)
    assert use_count(gradient) > before
    device.streams.release_in_flight()
    assert ticket.is_done
    del ticket
    device.driver.find_lost()
    assert use_count(gradient) == before
    device.streams.release_in_flight()


def test_what_is_on_the_host_or_goes_to_unpinned_memory_is_copied_at_once(device):
    for source, target in ((device.home, device.other_home), (torch.zeros(4), torch.zeros(4))):
        assert not device.streams.copies_beside(source, target)
        source.fill_(3)
        assert device.streams.to_host(source, target) is None
        assert target.tolist() == [3] * 4


def test_values_that_are_on_the_tier_of_another_tensor_do_not_cross(device):
    here, there = device.buffer(), device.buffer(tier=Tier.DEVICE)
    assert device.streams.on_tier_of(here, device.home) is here
    assert device.streams.on_tier_of(there, torch.zeros(1)) is there
    assert device.streams.on_tier_of(there, here).data_ptr() != there.data_ptr()
    assert device.streams.on_device(there) is there
    assert device.streams.on_device(here).data_ptr() != here.data_ptr()
    assert device.streams.on_device(there, copy=True).data_ptr() != there.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_there_and_back_on_a_gpu(pinned):
    device = torch.device("cuda", torch.cuda.current_device())
    streams = make_streams(device)
    source = torch.randn(1000, pin_memory=pinned)
    on_device, back = torch.zeros(1000, device=device), torch.zeros(1000, pin_memory=pinned)
    fetched = streams.fetch(source, on_device)
    assert isinstance(fetched, StreamCopy)
    fetched.join()
    ticket = streams.to_host(on_device * 2, back)
    assert (ticket is not None) == pinned
    if ticket is not None:
        ticket.wait()
    fetched.wait()
    assert fetched.is_done
    assert torch.equal(back, source * 2)
    streams.close()


# Time


def test_seconds_of_a_call():
    calls = []
    seconds = seconds_of(CPU, lambda: time.sleep(0.02) or calls.append("work"), lambda: calls.append("before"))
    assert calls == ["before", "work"]
    assert 0.02 <= seconds < 10
    assert seconds_of(CPU, lambda: None, lambda: time.sleep(0.2)) < 0.2, "what is done before is not counted"


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
