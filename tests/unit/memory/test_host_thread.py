"""Work of the host's thread: its order, its failures, its end."""

import threading
import time

import pytest

from hf_patrickstar.memory.driver import HostThread
from hf_patrickstar.memory.streams import Copy, StreamCopy
from hf_patrickstar.optim.workers import HostWorkers
from hf_patrickstar.schedule.clock import Lane


class Gate:
    """An event that comes when it is opened."""

    def __init__(self, stream=None):
        self._event = threading.Event()

    def open(self):
        self._event.set()

    def query(self):
        return self._event.is_set()

    def synchronize(self):
        assert self._event.wait(10)


def host_work(event):
    return Copy(event, Lane.HOST_WORK)


@pytest.fixture
def thread():
    thread = HostThread()
    yield thread
    thread.close()


def test_work_is_done_in_order_and_after_its_events(thread):
    done, gate = [], Gate()
    first = host_work(thread.on_host(lambda: done.append(1), [gate]))
    second = host_work(thread.on_host(lambda: done.append(2), []))
    time.sleep(0.05)
    assert (done, first.is_done, second.is_done) == ([], False, False)
    gate.open()
    second.wait()
    assert (done, first.is_done) == ([1, 2], True)


def test_what_failed_is_raised_once_and_work_after_it_is_replaced_until_then(thread):
    done = []

    def fail():
        done.append("1 in part")
        raise ValueError("a reason")

    first = host_work(thread.on_host(fail, [], lambda: done.append("not 1")))
    second = host_work(thread.on_host(lambda: done.append("2"), [], lambda: done.append("not 2")))
    always = host_work(thread.on_host(lambda: done.append("always"), []))
    with pytest.raises(ValueError, match="a reason"):
        second.join()
    for ticket in (always, first, second):
        ticket.join()
    assert done == ["1 in part", "not 1", "not 2", "always"]
    host_work(thread.on_host(lambda: done.append("3"), [], lambda: done.append("not 3"))).wait()
    assert done[4:] == ["3"]


def test_a_copy_after_work_that_failed_is_made_and_raises_the_error(thread):
    def fail():
        raise ValueError("a reason")

    work = thread.on_host(fail, [])
    copy = StreamCopy(thread.begin_after(work, "stream", Gate), Lane.TO_DEVICE, None, None, work)
    with pytest.raises(ValueError, match="a reason"):
        copy.wait()
    assert not copy.is_done
    copy.event.open()
    copy.wait()
    assert copy.is_done


@pytest.fixture
def workers():
    workers = HostWorkers(2)
    yield workers
    workers.close()


def test_work_of_workers_is_waited_for_by_its_own_event_alone(thread, workers):
    gate, done, threads = threading.Event(), [], []
    first = thread.on_host(lambda: workers.submit(lambda item: gate.wait(10), [0]), [])
    second = host_work(thread.on_host(lambda: done.append(2), []))
    copy = thread.begin_after(first, "stream", lambda stream: threads.append(threading.current_thread().name))
    second.wait()
    assert (done, first.query(), copy.done(), threads) == ([2], False, False, [])
    gate.set()
    host_work(first).wait()
    copy.result(10)
    assert threads[0].startswith("hf_patrickstar-host"), "a worker has the next share to compute"


def test_what_a_worker_failed_with_is_raised_once_after_what_is_done_in_place_of_its_work(thread, workers):
    done = []

    def fail(item):
        raise ValueError("a reason")

    def work():
        return workers.submit(fail, range(3))

    ticket = host_work(thread.on_host(work, [], lambda: done.append("not 1")))
    with pytest.raises(ValueError, match="a reason"):
        ticket.wait()
    ticket.wait()
    assert done == ["not 1"]


def test_it_prepares_itself_once_ends_after_its_work_and_can_begin_again():
    before, prepared, done = set(threading.enumerate()), [], []
    thread = HostThread(lambda: prepared.append(threading.current_thread()))
    thread.on_host(lambda: time.sleep(0.05) or done.append(1), [])
    thread.on_host(lambda: done.append(2), [])
    (started,) = set(threading.enumerate()) - before
    thread.close()
    thread.close()
    assert (done, started.is_alive(), prepared) == ([1, 2], False, [started])
    assert started.name.startswith("hf_patrickstar-host")
    host_work(thread.on_host(lambda: done.append(3), [])).wait()
    thread.close()
    assert done == [1, 2, 3]
