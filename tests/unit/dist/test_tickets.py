"""What to wait for before the buffer of a collective is used."""

import threading
import time

import pytest
import torch

from hf_patrickstar.dist.tickets import DeviceTicket, GlooTicket
from hf_patrickstar.errors import CollectiveError

CPU = torch.device("cpu")


class Work:
    """A collective under way."""

    def __init__(self, error=None):
        self.is_done, self.error, self.num_waits = False, error, 0

    def is_completed(self):
        return self.is_done

    def wait(self):
        self.num_waits += 1
        if self.error is not None:
            raise self.error
        self.is_done = True


def wait_for(work, what):
    assert what == "gathers"
    work.wait()


@pytest.mark.parametrize("num", [0, 2])
def test_all_works_are_waited_for_once(num):
    ticket = GlooTicket("gathers", wait_for, torch.zeros(4))
    ticket.works = works = [Work() for _ in range(num)]
    assert ticket.is_done is (num == 0)
    ticket.join()
    ticket.wait()
    assert ticket.is_done
    assert [work.num_waits for work in works] == [1] * num


def test_it_ends_when_gloo_has_let_go_of_the_buffer():
    """Else the engine would take the reference for an alias of the chunk."""
    buffer, held = torch.zeros(4), []
    ticket = GlooTicket("gathers", wait_for, buffer)
    held.append(buffer[:2])
    threading.Timer(0.1, held.clear).start()
    begin = time.monotonic()
    ticket.wait()
    assert not held
    ticket = GlooTicket("gathers", wait_for, buffer)
    other = buffer[:2]
    ticket.wait()  # something else keeps it
    assert time.monotonic() - begin < 3
    assert len(other) == 2


def test_a_device_goes_on_after_its_collective_and_finishes_it_once():
    done, work = [], Work()
    ticket = DeviceTicket(work, CPU, "reduces", None, lambda: done.append(work.is_done))
    assert not ticket.is_done
    ticket.join()
    ticket.join()
    assert (done, ticket.is_done) == ([True], True)
    failed = Work(RuntimeError("aborted"))
    with pytest.raises(CollectiveError, match="reduces"):
        DeviceTicket(failed, CPU, "reduces", lambda *args: CollectiveError(*args)).join()
