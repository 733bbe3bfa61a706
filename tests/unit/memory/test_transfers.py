import concurrent.futures
import threading

import pytest
import torch

from hf_patrickstar.memory import transfers as transfers_module
from hf_patrickstar.memory.transfers import StreamTicket, ThreadTicket, Transfers, copy_bytes

CPU = torch.device("cpu")


@pytest.fixture
def transfers():
    made = Transfers(CPU, at_once_nbytes=0)
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
    """A slow copy and the transfers that use it."""
    copy = SlowCopy()
    made = Transfers(CPU, copy, at_once_nbytes=0)
    yield copy, made
    copy.may_go.set()
    made.close()


# Copies that are waited for


@pytest.mark.parametrize("direction", ["to_device", "to_host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_bits_and_is_complete(transfers, direction, dtype):
    source = torch.randn(3, 5).to(dtype)
    target = torch.full((3, 5), float("nan"), dtype=dtype)
    assert getattr(transfers, direction)(source, target) is None
    assert torch.equal(source, target)
    assert source.data_ptr() != target.data_ptr()


def test_copies_into_a_view_and_nothing_beside_it(transfers):
    payload = torch.zeros(10)
    transfers.to_host(torch.ones(2, 3), payload.as_strided((2, 3), (3, 1), 2))
    assert payload.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]


def test_copies_from_a_transposed_gradient(transfers):
    source, target = torch.randn(4, 3).t(), torch.zeros(3, 4)
    transfers.to_host(source, target)
    assert torch.equal(source, target)


def test_shapes_must_agree(transfers):
    with pytest.raises(RuntimeError, match="size"):
        transfers.to_device(torch.zeros(4), torch.zeros(3))


# The copy thread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fetching_copies_every_bit(transfers, dtype):
    """All patterns of 16 bits, NaN and subnormal numbers among them."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    source, target = bits.view(dtype), torch.zeros_like(bits).view(dtype)
    ticket = transfers.fetch(source, target)
    assert isinstance(ticket, ThreadTicket)
    ticket.join()
    assert ticket.is_done
    assert torch.equal(target.view(torch.int16), bits)
    assert torch.equal(source.view(torch.int16), bits)


def test_a_copy_is_done_when_it_is_done(slow):
    copy, transfers = slow
    source, target = torch.ones(4), torch.zeros(4)
    ticket = transfers.fetch(source, target)
    assert copy.has_begun.wait(60)
    assert not ticket.is_done
    assert not target.any()
    copy.may_go.set()
    ticket.wait()
    assert ticket.is_done
    assert torch.equal(target, source)


@pytest.mark.parametrize("method", ["wait", "join"])
def test_waiting_blocks_until_the_copy_is_there(slow, method):
    copy, transfers = slow
    target, ended = torch.zeros(4), threading.Event()
    ticket = transfers.fetch(torch.ones(4), target)

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
    copy, transfers = slow
    numbers = list(range(20))
    sources = [torch.full((4,), number, dtype=torch.uint8) for number in numbers]
    targets = [torch.full((4,), 255, dtype=torch.uint8) for _ in numbers]
    tickets = [transfers.fetch(*pair) for pair in zip(sources, targets, strict=True)]
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

    transfers = Transfers(CPU, fail, at_once_nbytes=0)
    ticket = transfers.fetch(torch.ones(4), torch.zeros(4))
    with pytest.raises(ValueError, match="a bad disk"):
        getattr(ticket, method)()
    assert ticket.is_done
    transfers.close()


def test_the_thread_goes_on_after_an_error():
    failures = [ValueError("once")]

    def fail_once(arrays):
        if failures:
            raise failures.pop()
        copy_bytes(arrays)

    transfers = Transfers(CPU, fail_once, at_once_nbytes=0)
    target = torch.zeros(4)
    first, second = transfers.fetch(torch.ones(4), target), transfers.fetch(torch.ones(4), target)
    second.wait()
    assert target.all()
    with pytest.raises(ValueError, match="once"):
        first.wait()
    transfers.close()


def test_nothing_looks_into_the_buffers_once_a_copy_is_done(transfers):
    """A chunk's payload counts as aliased while anything else holds its storage, and cannot leave then."""
    source, target = torch.ones(1000), torch.zeros(1000)
    before = use_count(source), use_count(target)
    for _ in range(50):
        transfers.fetch(source, target).wait()
        assert (use_count(source), use_count(target)) == before


def test_buffers_are_held_while_they_are_copied(slow):
    """Who drops the last other reference to a payload must not pull it away under the copy."""
    copy, transfers = slow
    source, target = torch.ones(4), torch.zeros(4)
    before = use_count(target)
    ticket = transfers.fetch(source, target)
    assert use_count(target) > before
    copy.may_go.set()
    ticket.wait()
    assert use_count(target) == before


def test_closing_waits_for_what_was_started(slow):
    copy, transfers = slow
    targets = [torch.zeros(4) for _ in range(3)]
    tickets = [transfers.fetch(torch.ones(4), target) for target in targets]
    closing = threading.Thread(target=transfers.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    copy.may_go.set()
    closing.join(60)
    assert not closing.is_alive()
    assert all(ticket.is_done for ticket in tickets)
    assert all(target.all() for target in targets)


def test_closing_ends_the_thread_and_may_come_twice():
    transfers = Transfers(CPU, at_once_nbytes=0)
    transfers.close()
    before = set(threading.enumerate())
    transfers.fetch(torch.ones(4), torch.zeros(4))
    assert len(set(threading.enumerate()) - before) == 1
    transfers.close()
    transfers.close()
    assert set(threading.enumerate()) <= before
    target = torch.zeros(4)
    transfers.fetch(torch.ones(4), target).wait()
    assert target.all(), "a copy after all has a new thread"
    transfers.close()


def test_small_copies_are_made_at_once_and_need_no_thread(slow):
    copy, _ = slow
    transfers = Transfers(CPU, copy, at_once_nbytes=16)
    before = threading.active_count()
    target = torch.zeros(4)
    assert transfers.fetch(torch.ones(4), target) is None
    assert target.all()
    assert threading.active_count() == before
    ticket = transfers.fetch(torch.ones(5), torch.zeros(5))
    assert not ticket.is_done
    copy.may_go.set()
    ticket.wait()
    transfers.close()


def test_a_tensor_without_bytes_is_copied_at_once(transfers):
    """Fake tensors, and whatever else is no plain tensor, have no memory that a thread could copy."""
    source = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    target = torch.zeros(4)
    assert transfers.fetch(source, target) is None
    assert target.all()
    with torch._subclasses.FakeTensorMode():
        assert transfers.fetch(torch.ones(4), torch.zeros(4)) is None


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
    def __init__(self):
        self.waits = []

    def wait_event(self, event):
        self.waits.append(event)


def test_a_stream_ticket_waits_for_its_event_on_the_host():
    event = FakeEvent()
    StreamTicket(event, torch.device("cuda", 0)).wait()
    assert event.calls == ["synchronize"]


def test_a_stream_ticket_joins_on_the_device_and_does_not_block_the_host(monkeypatch):
    event, streams = FakeEvent(), {}
    monkeypatch.setattr(
        transfers_module.torch.cuda, "current_stream", lambda device: streams.setdefault(device, FakeStream())
    )
    device = torch.device("cuda", 1)
    StreamTicket(event, device).join()
    assert list(streams) == [device]
    assert streams[device].waits == [event]
    assert event.calls == []


def test_a_stream_ticket_is_done_when_its_event_has_run():
    event = FakeEvent()
    ticket = StreamTicket(event, torch.device("cuda", 0))
    assert not ticket.is_done
    event.has_run = True
    assert ticket.is_done
    assert event.calls == []


def test_a_thread_ticket_tells_what_its_future_does():
    future = concurrent.futures.Future()
    ticket = ThreadTicket(future)
    assert not ticket.is_done
    future.set_result(None)
    assert ticket.is_done
    ticket.wait()
    ticket.join()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_there_and_back_on_a_gpu(pinned):
    device = torch.device("cuda", torch.cuda.current_device())
    transfers = Transfers(device)
    source = torch.randn(1000, pin_memory=pinned)
    on_device, back = torch.zeros(1000, device=device), torch.zeros(1000, pin_memory=pinned)
    transfers.to_device(source, on_device)
    ticket = transfers.to_host(on_device * 2, back)
    assert (ticket is not None) == pinned
    if ticket is not None:
        ticket.wait()
    assert torch.equal(back, source * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_fetching_on_a_gpu(pinned):
    device = torch.device("cuda", torch.cuda.current_device())
    transfers = Transfers(device)
    source = torch.randn(1000, pin_memory=pinned)
    on_device = torch.zeros(1000, device=device)
    ticket = transfers.fetch(source, on_device)
    assert isinstance(ticket, StreamTicket)
    ticket.join()
    doubled = on_device * 2
    ticket.wait()
    assert ticket.is_done
    assert torch.equal(doubled.cpu(), source * 2)
    transfers.close()
