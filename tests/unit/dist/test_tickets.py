"""What to wait for before the buffer of a collective is used."""

import pytest
import torch

from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.dist import tickets
from hf_patrickstar.dist.tickets import DeviceTicket, GlooTicket, Users


class Work:
    """A collective under way."""

    def __init__(self, is_done=False, error=None):
        self.is_done, self.error = is_done, error

    def is_completed(self):
        return self.is_done

    def wait(self):
        if self.error is not None:
            raise self.error
        self.is_done = True


class Clock:
    """In place of ``time``: every pause takes a tenth of a second, and does something."""

    def __init__(self, during=lambda now: None):
        self.now, self.during, self.num_pauses = 0.0, during, 0

    def monotonic(self):
        return self.now

    def sleep(self, _):
        self.now += 0.125
        self.num_pauses += 1
        self.during(self.now)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(tickets, "time", made)
    return made


class Waiter(list):
    """Waits for works, and lists them."""

    def __call__(self, work, what):
        self.append((work, what))
        work.wait()


def test_a_ticket_over_nothing_is_done():
    waited = Waiter()
    ticket = GlooTicket((), "gathers", waited)
    assert ticket.is_done
    ticket.wait()
    assert waited == []


@pytest.mark.parametrize("method", ["wait", "join"])
def test_every_work_is_waited_for_once(method):
    works, waited = [Work(), Work(is_done=True)], Waiter()
    ticket = GlooTicket(works, "gathers", waited)
    assert not ticket.is_done
    getattr(ticket, method)()
    assert waited == [(work, "gathers") for work in works]
    assert ticket.is_done
    getattr(ticket, method)()
    assert len(waited) == 2


def test_one_work_of_several_that_is_not_done():
    works = [Work(is_done=True), Work()]
    ticket = GlooTicket(works, "gathers", Waiter())
    assert not ticket.is_done
    works[1].is_done = True
    assert ticket.is_done


def test_a_collective_that_failed_is_told():
    error = CollectiveError("gathers: failed")
    with pytest.raises(CollectiveError, match="gathers: failed"):
        GlooTicket([Work(error=error)], "gathers", Waiter()).wait()


def test_a_ticket_waits_until_nobody_else_looks_into_the_buffer(clock):
    buffer = torch.zeros(4)
    users = Users(buffer)
    others = [buffer[:2], buffer[2:]]
    clock.during = lambda now: others.pop()
    ticket = GlooTicket([Work()], "gathers", Waiter(), users)
    ticket.wait()
    assert (others, clock.num_pauses) == ([], 2)
    alias = buffer[:2]
    ticket.wait()  # that was it: who comes later is not waited for
    assert alias.numel() == 2
    assert clock.num_pauses == 2


def test_those_who_looked_into_it_before_may_stay(clock):
    buffer = torch.zeros(4)
    alias = buffer[1:]
    users = Users(buffer)
    users.wait()
    assert alias.numel() == 3
    assert clock.num_pauses == 0


def test_who_does_not_let_go_is_waited_for_a_second(clock):
    buffer = torch.zeros(4)
    users = Users(buffer)
    alias = buffer[1:]
    users.wait()
    assert alias.numel() == 3
    assert (clock.num_pauses, clock.now) == (8, 1.0)


# On a device


def fail(what, error):
    return CollectiveError(f"{what}: rank 1 is gone ({error})")


def test_a_device_ticket_is_done_when_its_work_is():
    work = Work()
    ticket = DeviceTicket(work, torch.device("cuda"), "reduces group 2", fail)
    assert not ticket.is_done
    ticket.join()
    assert ticket.is_done


@pytest.mark.parametrize("method", ["wait", "join"])
def test_a_device_collective_that_failed_says_who_is_gone(method):
    error = RuntimeError("connection closed")
    ticket = DeviceTicket(Work(error=error), torch.device("cuda"), "reduces group 2", fail)
    with pytest.raises(CollectiveError, match=r"reduces group 2: rank 1 is gone \(connection closed\)") as caught:
        getattr(ticket, method)()
    assert caught.value.__cause__ is error


@pytest.mark.gpu
def test_the_host_waits_for_what_the_device_was_told():
    buffer = torch.zeros(4, device="cuda")
    ticket = DeviceTicket(Work(), buffer.device, "reduces group 2", fail)
    buffer.fill_(3)
    ticket.wait()
    assert torch.cuda.current_stream(buffer.device).query()
