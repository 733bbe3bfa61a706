import contextlib
import threading
import time
import types

import pytest
import torch
from simulated import HandingStreams

from hf_patrickstar.memory.lanes import WorkLane
from hf_patrickstar.memory.streams import DeviceStreams, StreamCopy, Streams, copy_bytes, make_streams, seconds_of

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
        self.threads.add(threading.current_thread().name)
        copy_bytes(arrays)


@pytest.fixture
def slow():
    """A slow copy and the streams that use it."""
    copy = SlowCopy()
    made = HandingStreams(CPU, copy)
    yield copy, made
    copy.may_go.set()
    made.close()


# Copies that are waited for


@pytest.mark.parametrize("direction", ["to_device", "to_host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_bits_and_is_complete(streams, direction, dtype):
    source = torch.randn(3, 5).to(dtype)
    target = torch.full((3, 5), float("nan"), dtype=dtype)
    assert getattr(streams, direction)(source, target) is None
    assert torch.equal(source, target)
    assert source.data_ptr() != target.data_ptr()


def test_copies_into_a_view_and_nothing_beside_it(streams):
    payload = torch.zeros(10)
    streams.to_host(torch.ones(2, 3), payload.as_strided((2, 3), (3, 1), 2))
    assert payload.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]


def test_copies_from_a_transposed_gradient(streams):
    source, target = torch.randn(4, 3).t(), torch.zeros(3, 4)
    streams.to_host(source, target)
    assert torch.equal(source, target)


def test_shapes_must_agree(streams):
    with pytest.raises(RuntimeError, match="size"):
        streams.to_device(torch.zeros(4), torch.zeros(3))


# The copy thread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fetching_copies_every_bit(streams, dtype):
    """All patterns of 16 bits, NaN and subnormal numbers among them."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    source, target = bits.view(dtype), torch.zeros_like(bits).view(dtype)
    ticket = streams.fetch(source, target)
    assert ticket.lane is WorkLane.TO_DEVICE
    ticket.join()
    assert ticket.is_done
    assert torch.equal(target.view(torch.int16), bits)
    assert torch.equal(source.view(torch.int16), bits)


def test_a_copy_is_done_when_it_is_done(slow):
    copy, streams = slow
    source, target = torch.ones(4), torch.zeros(4)
    ticket = streams.fetch(source, target)
    assert copy.has_begun.wait(60)
    assert not ticket.is_done
    assert not target.any()
    copy.may_go.set()
    ticket.wait()
    assert ticket.is_done
    assert torch.equal(target, source)


@pytest.mark.parametrize("method", ["wait", "join"])
def test_waiting_blocks_until_the_copy_is_there(slow, method):
    copy, streams = slow
    target, ended = torch.zeros(4), threading.Event()
    ticket = streams.fetch(torch.ones(4), target)

    def wait():
        getattr(ticket, method)()
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not ended.wait(0.1)
    copy.may_go.set()
    waiting.join(60)
    assert ended.is_set()
    assert target.all()


def test_copies_keep_their_order_in_one_thread_of_their_own(slow):
    copy, streams = slow
    numbers = list(range(20))
    sources = [torch.full((4,), number, dtype=torch.uint8) for number in numbers]
    targets = [torch.full((4,), 255, dtype=torch.uint8) for _ in numbers]
    tickets = [streams.fetch(*pair) for pair in zip(sources, targets, strict=True)]
    assert not any(ticket.is_done for ticket in tickets)
    copy.may_go.set()
    tickets[-1].wait()
    assert all(ticket.is_done for ticket in tickets)
    assert copy.firsts == numbers
    assert len(copy.threads) == 1
    assert threading.current_thread().name not in copy.threads
    assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=True))


@pytest.mark.parametrize("method", ["wait", "join"])
def test_errors_of_a_copy_are_raised_where_it_is_waited_for(method):
    def fail(arrays):
        arrays.clear()
        raise ValueError("a bad disk")

    streams = HandingStreams(CPU, fail)
    ticket = streams.fetch(torch.ones(4), torch.zeros(4))
    with pytest.raises(ValueError, match="a bad disk"):
        getattr(ticket, method)()
    assert ticket.is_done
    streams.close()


def test_the_thread_goes_on_after_an_error():
    failures = [ValueError("once")]

    def fail_once(arrays):
        if failures:
            raise failures.pop()
        copy_bytes(arrays)

    streams = HandingStreams(CPU, fail_once)
    target = torch.zeros(4)
    first, second = streams.fetch(torch.ones(4), target), streams.fetch(torch.ones(4), target)
    second.wait()
    assert target.all()
    with pytest.raises(ValueError, match="once"):
        first.wait()
    streams.close()


def test_nothing_looks_into_the_buffers_once_a_copy_is_done(streams):
    """A chunk's payload counts as aliased while anything else holds its storage, and cannot leave then."""
    source, target = torch.ones(1000), torch.zeros(1000)
    before = use_count(source), use_count(target)
    for _ in range(50):
        streams.fetch(source, target).wait()
        assert (use_count(source), use_count(target)) == before


def test_buffers_are_held_while_they_are_copied(slow):
    """Who drops the last other reference to a payload must not pull it away under the copy."""
    copy, streams = slow
    source, target = torch.ones(4), torch.zeros(4)
    before = use_count(target)
    ticket = streams.fetch(source, target)
    assert use_count(target) > before
    copy.may_go.set()
    ticket.wait()
    assert use_count(target) == before


def test_closing_waits_for_what_was_started(slow):
    copy, streams = slow
    targets = [torch.zeros(4) for _ in range(3)]
    tickets = [streams.fetch(torch.ones(4), target) for target in targets]
    closing = threading.Thread(target=streams.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    copy.may_go.set()
    closing.join(60)
    assert not closing.is_alive()
    assert all(ticket.is_done for ticket in tickets)
    assert all(target.all() for target in targets)


def test_closing_ends_the_thread_and_may_come_twice():
    streams = HandingStreams(CPU)
    streams.close()
    before = set(threading.enumerate())
    streams.fetch(torch.ones(4), torch.zeros(4))
    assert len(set(threading.enumerate()) - before) == 1
    streams.close()
    streams.close()
    assert set(threading.enumerate()) <= before
    target = torch.zeros(4)
    streams.fetch(torch.ones(4), target).wait()
    assert target.all(), "a copy after all has a new thread"
    streams.close()


def test_small_copies_are_made_at_once_and_need_no_thread(slow):
    copy, _ = slow
    streams = HandingStreams(CPU, copy, at_once_nbytes=16)
    before = threading.active_count()
    target = torch.zeros(4)
    assert streams.fetch(torch.ones(4), target) is None
    assert target.all()
    assert threading.active_count() == before
    ticket = streams.fetch(torch.ones(5), torch.zeros(5))
    assert not ticket.is_done
    copy.may_go.set()
    ticket.wait()
    streams.close()


def test_another_thread_may_end_the_measuring_during_a_copy():
    streams = Streams(CPU)
    target = types.SimpleNamespace(copy_=lambda source: streams.end_timing())
    for _ in range(2):
        times = streams.begin_timing()
        streams.fetch(torch.ones(2), target)
        streams.fetch(torch.ones(2), torch.ones(2))
        assert len(times.works()) == 1, "the first is measured to its end, and the second is not"


def test_a_tensor_without_bytes_is_copied_at_once(streams):
    """Fake tensors, and whatever else is no plain tensor, have no memory that a thread could copy."""
    source = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    target = torch.zeros(4)
    assert streams.fetch(source, target) is None
    assert target.all()
    with torch._subclasses.FakeTensorMode():
        assert streams.fetch(torch.ones(4), torch.zeros(4)) is None


# Tickets


class FakeEvent:
    def __init__(self):
        self.calls = []
        self.has_run = False

    def synchronize(self):
        self.calls.append("synchronize")

    def query(self):
        return self.has_run


class FakeStream:
    def __init__(self, name="compute", log=None):
        self.name, self.log = name, [] if log is None else log

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event))

    def wait_stream(self, stream):
        self.log.append((self.name, "waits for", stream.name))

    def record_event(self):
        event = FakeEvent()
        self.log.append((self.name, "records", event))
        return event


class FakeDriver:
    """Streams that write down what they are told; tensors of float64 are on the device, those of float32 pinned."""

    def __init__(self):
        self.log = []
        self.names = iter(["to device", "to host"])
        self.compute = FakeStream("compute", self.log)

    def new_stream(self):
        return FakeStream(next(self.names), self.log)

    def current_stream(self):
        return self.compute

    def is_on_device(self, tensor):
        return tensor.dtype is torch.float64

    def is_pinned(self, tensor):
        return tensor.dtype is torch.float32

    def copy(self, source, target, stream):
        self.log.append((stream.name, "copies", source.numel()))

    def told(self):
        """What streams were told since the last call."""
        found, self.log[:] = list(self.log), []
        return [(name, what, "an event" if isinstance(it, FakeEvent) else it) for name, what, it in found]


def test_a_stream_ticket_waits_for_its_event_on_the_host():
    event, driver = FakeEvent(), FakeDriver()
    StreamCopy(event, WorkLane.TO_HOST, None, driver).wait()
    assert event.calls == ["synchronize"]
    assert driver.log == []


def test_a_stream_ticket_joins_on_the_device_and_does_not_block_the_host():
    event, driver = FakeEvent(), FakeDriver()
    StreamCopy(event, WorkLane.TO_HOST, None, driver).join()
    assert driver.log == [("compute", "waits for", event)]
    assert event.calls == []


def test_a_stream_ticket_is_done_when_its_event_has_run():
    event = FakeEvent()
    ticket = StreamCopy(event, WorkLane.TO_HOST, None, FakeDriver())
    assert not ticket.is_done
    event.has_run = True
    assert ticket.is_done
    assert event.calls == []


# Streams of a device


HOST, DEVICE = torch.zeros(4), torch.zeros(4, dtype=torch.float64)
COPIED = [("to device", "waits for", "compute"), ("to device", "copies", 4), ("to device", "records", "an event")]


def test_what_is_fetched_comes_after_what_was_computed_and_is_not_waited_for():
    driver = FakeDriver()
    ticket = DeviceStreams(CPU, driver).fetch(HOST, DEVICE)
    assert driver.told() == COPIED
    assert ticket.lane is WorkLane.TO_DEVICE


def test_a_copy_to_the_device_is_joined():
    driver = FakeDriver()
    DeviceStreams(CPU, driver).to_device(HOST, DEVICE)
    assert driver.told() == [*COPIED, ("compute", "waits for", "an event")]


def test_a_gradient_goes_to_the_host_in_a_lane_of_its_own_and_after_what_reads_its_home():
    driver = FakeDriver()
    streams = DeviceStreams(CPU, driver)
    load = streams.fetch(HOST, DEVICE)
    driver.told()
    first = streams.to_host(DEVICE, HOST, after=[load])
    assert driver.told() == [
        ("to host", "waits for", "compute"),
        ("to host", "waits for", "an event"),
        ("to host", "copies", 4),
        ("to host", "records", "an event"),
    ]
    assert first.lane is WorkLane.TO_HOST
    streams.to_host(DEVICE, HOST, after=[first])
    assert ("to host", "waits for", "an event") not in driver.told(), "it is the same lane"


def test_values_that_are_on_the_tier_of_another_tensor_do_not_cross():
    streams, here, there = DeviceStreams(CPU, FakeDriver()), torch.ones(4), torch.ones(4, dtype=torch.float64)
    assert streams.on_tier_of(here, HOST) is here
    assert streams.on_tier_of(there, DEVICE) is there
    crossed = streams.on_tier_of(there, HOST)
    assert crossed.data_ptr() != there.data_ptr()
    assert torch.equal(crossed, there)


@pytest.mark.parametrize(
    ("source", "target"), [(HOST, HOST), (DEVICE, DEVICE)], ids=["from the host", "to a host that is not pinned"]
)
def test_other_copies_to_the_host_are_complete(source, target):
    driver = FakeDriver()
    streams = DeviceStreams(CPU, driver)
    assert not streams.copies_beside(source, target)
    source = source.clone().fill_(3)
    target = torch.zeros_like(target)
    assert streams.to_host(source, target) is None
    assert target.tolist() == [3] * 4
    assert driver.told() == []


def test_gradients_in_flight_are_held_until_the_compute_stream_waits_for_them():
    driver = FakeDriver()
    streams = DeviceStreams(CPU, driver)
    gradient = torch.zeros(4, dtype=torch.float64)
    before = use_count(gradient)
    source = gradient.detach()
    streams.to_host(source, HOST)
    del source
    assert use_count(gradient) > before
    driver.told()
    streams.release_in_flight()
    assert driver.told() == [("compute", "waits for", "an event")]
    assert use_count(gradient) == before
    streams.release_in_flight()
    assert driver.told() == []


def test_no_more_gradients_are_held_than_they_may_take():
    driver = FakeDriver()
    streams = DeviceStreams(CPU, driver)
    wait = ("compute", "waits for", "an event")

    def send():
        driver.told()
        streams.to_host(torch.empty(2**19, dtype=torch.float64), torch.empty(2**19))  # 4 MiB
        return driver.told()[-1] == wait

    assert not streams.hold_at_most(10 * 2**20)
    assert [send() for _ in range(4)] == [False, False, True, True]
    assert not streams.hold_at_most(12 * 2**20)
    assert send(), "a limit is not raised"
    assert streams.hold_at_most(2**20), "more than that was held"
    assert driver.told() == [wait]
    assert [send() for _ in range(3)] == [False, False, True], "two may be held, whatever they take"


def test_where_there_is_no_room_no_gradient_is_held():
    driver = FakeDriver()
    streams = DeviceStreams(CPU, driver)
    gradients = [torch.zeros(4, dtype=torch.float64) for _ in range(2)]
    before = use_count(gradients[0])
    streams.to_host(gradients[0].detach(), HOST)
    assert use_count(gradients[0]) > before
    assert streams.hold_at_most(0)
    assert use_count(gradients[0]) == before
    streams.to_host(gradients[1].detach(), HOST)
    assert driver.told()[-1] == ("compute", "waits for", "an event")
    assert use_count(gradients[1]) == before
    assert not streams.hold_at_most(0)


def test_what_is_launched_beside_comes_after_copies_to_the_device():
    driver = FakeDriver()
    inside = []

    @contextlib.contextmanager
    def enter(stream):
        inside.append(stream.name)
        yield

    driver.inside = enter
    with DeviceStreams(CPU, driver).beside():
        assert driver.told() == [("to device", "waits for", "compute")]
    assert inside == ["to device"]


def test_a_cpu_has_a_thread_and_no_streams():
    assert type(make_streams(CPU)) is Streams


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_there_and_back_on_a_gpu(pinned):
    device = torch.device("cuda", torch.cuda.current_device())
    streams = make_streams(device)
    source = torch.randn(1000, pin_memory=pinned)
    on_device, back = torch.zeros(1000, device=device), torch.zeros(1000, pin_memory=pinned)
    streams.to_device(source, on_device)
    ticket = streams.to_host(on_device * 2, back)
    assert (ticket is not None) == pinned
    if ticket is not None:
        ticket.wait()
    assert torch.equal(back, source * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_fetching_on_a_gpu(pinned):
    device = torch.device("cuda", torch.cuda.current_device())
    streams = make_streams(device)
    source = torch.randn(1000, pin_memory=pinned)
    on_device = torch.zeros(1000, device=device)
    ticket = streams.fetch(source, on_device)
    assert isinstance(ticket, StreamCopy)
    ticket.join()
    doubled = on_device * 2
    ticket.wait()
    assert ticket.is_done
    assert torch.equal(doubled.cpu(), source * 2)
    streams.close()


# Time


def test_seconds_of_a_call():
    calls = []
    seconds = seconds_of(CPU, lambda: time.sleep(0.02) or calls.append("work"), lambda: calls.append("before"))
    assert calls == ["before", "work"]
    assert 0.02 <= seconds < 10
    assert seconds_of(CPU, lambda: None, lambda: time.sleep(0.2)) < 0.2, "what is done before is not counted"


def test_seconds_of_a_compute_stream(monkeypatch):
    """Two events around the work, behind what was put there before, and no other stop of the host in between."""
    told = []
    device = torch.device("cuda", 0)

    class Event:
        def __init__(self, device, enable_timing):
            assert enable_timing
            self.number = len([entry for entry in told if entry[0] == "new"])
            told.append(("new", self.number, device))

        def record(self, stream):
            told.append(("record", self.number, stream.name))

        def synchronize(self):
            told.append(("synchronize", self.number))

        def elapsed_time(self, other):
            assert (self.number, other.number) == (0, 1)
            return 250.0

    stream = types.SimpleNamespace(name="compute", synchronize=lambda: told.append(("empty",)))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    seconds = seconds_of(device, lambda: told.append(("work",)), lambda: told.append(("before",)))
    assert seconds == 0.25
    assert told == [
        ("empty",),
        ("new", 0, device),
        ("new", 1, device),
        ("before",),
        ("record", 0, "compute"),
        ("work",),
        ("record", 1, "compute"),
        ("synchronize", 1),
    ]
