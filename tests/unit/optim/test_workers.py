"""The threads of updates on the host: who does what, with how many cores, and how they end."""

import concurrent.futures
import os
import signal
import threading
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_patrickstar.optim.workers import SMALL_NUMEL, HostWorkers

LARGE = SMALL_NUMEL + 1


@pytest.fixture
def workers():
    found = HostWorkers(3)
    yield found
    found.close()


@pytest.fixture
def two_threads():
    """torch computes with two threads, here and in threads that begin."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


HAS_PROC = os.path.isdir("/proc/self/task")
OTHERS = set()
"""Threads of other tests, whose engines have not been collected yet."""


@pytest.fixture(autouse=True)
def _others():
    OTHERS.update(threading.enumerate())
    yield
    OTHERS.clear()


def alive():
    threads = set(threading.enumerate()) - OTHERS
    return sorted(thread.name for thread in threads if thread.name.startswith("hf_patrickstar-update"))


def in_a_thread(ask):
    """What a function returns in a thread that begins for it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


# Who does what


def test_all_workers_work_at_the_same_time_on_every_item_once_and_record_nothing(workers):
    together, seen, done = threading.Barrier(3, timeout=20), set(), []

    def work(item):
        together.wait()
        seen.add((threading.current_thread().name, torch.is_grad_enabled()))
        done.append(item)

    for _ in range(5):
        workers.submit(work, range(3)).wait()
    assert sorted(done) == sorted([0, 1, 2] * 5)
    assert {name for name, _ in seen} == set(alive())
    assert not any(is_recorded for _, is_recorded in seen)
    assert workers.submit(work, []).future.done()


# One thread in a worker


def test_a_worker_computes_alone_and_all_others_as_before(workers, two_threads):
    together, seen, teams = threading.Barrier(3, timeout=20), [], []

    def work(item):
        together.wait()
        before = set(os.listdir("/proc/self/task") if HAS_PROC else ())  # others may end meanwhile
        torch.ones(2**20).add_(1)  # torch may set the number of a thread when it computes for the first time
        together.wait()
        teams.append(len(set(os.listdir("/proc/self/task")) - before) if HAS_PROC else 0)
        seen.append(torch.get_num_threads())

    torch.ones(2**20).add_(1)  # the team of this thread
    workers.submit(lambda item: None, range(3)).wait()
    workers.submit(work, range(3)).wait()
    assert (torch.get_num_threads(), in_a_thread(torch.get_num_threads)) == (2, 2)
    torch.set_num_threads(4)
    workers.submit(work, range(3)).wait()
    assert (seen, teams) == ([1] * 6, [0] * 6)


# Errors


def test_an_error_reaches_the_caller_and_nothing_more_is_begun(workers):
    begun = []

    def work(item):
        begun.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item"):
        workers.submit(work, range(1000)).wait()
    assert len(begun) <= 3
    workers.submit(lambda item: begun.append("after"), [0]).wait()
    assert begun[-1] == "after"


def test_an_error_is_raised_when_the_others_have_ended(workers):
    together, done = threading.Barrier(2, timeout=20), []

    def work(item):
        together.wait()
        if item == 0:
            raise ValueError("item 0")
        time.sleep(0.2)
        done.append(item)

    with pytest.raises(ValueError, match="item 0"):
        workers.submit(work, range(2)).wait()
    assert done == [1]
    gate, ticket = threading.Event(), workers.submit(lambda item: (gate.wait(10), 1 / 0), range(100))
    threading.Timer(0.05, gate.set).start()
    ticket.cancel()
    assert ticket.future.done(), "what is cancelled ends with the items that were begun, and raises nothing"


def test_who_interrupts_the_wait_gets_it_when_nobody_works_any_more(workers):
    begun, ended = [], []

    def work(item):
        begun.append(item)
        time.sleep(0.2)  # by then the other thread waits: a signal that comes just before wakes nobody
        if item == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        ended.append(item)

    # A background job of a shell begins with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            workers.submit(work, range(1000)).wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(begun) == sorted(ended)
    assert len(begun) < 100


def test_workers_that_cannot_start_leave_none_behind(monkeypatch, two_threads):
    workers, start, started = HostWorkers(3), threading.Thread.start, []

    def start_one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        workers.submit(lambda item: None, [0])
    assert (alive(), torch.get_num_threads()) == ([], 2)


def test_work_that_only_some_workers_were_given_is_done(workers, monkeypatch):
    """The program begins to exit between the first worker and the second."""
    workers.submit(lambda item: None, [0]).wait()
    give, given, done = concurrent.futures.ThreadPoolExecutor.submit, [], []

    def give_one(pool, work):
        if given:
            raise RuntimeError("cannot schedule new futures after shutdown")
        given.append(work)
        return give(pool, work)

    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", give_one)
    workers.submit(done.append, range(3)).wait()
    assert sorted(done) == [0, 1, 2]


def test_of_work_whose_submission_is_interrupted_nothing_is_begun(workers, monkeypatch):
    """The user interrupts between the first worker and the second: nobody has a ticket to wait for."""
    workers.submit(lambda item: None, [0]).wait()
    give, given, done = concurrent.futures.ThreadPoolExecutor.submit, [], []

    def give_one(pool, work):
        if given:
            raise KeyboardInterrupt
        given.append(work)
        return give(pool, work)

    with monkeypatch.context() as patch:
        patch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", give_one)
        with pytest.raises(KeyboardInterrupt):
            workers.submit(lambda item: done.append("interrupted"), range(3))
    workers.submit(done.append, range(20)).wait()
    assert done == [*range(20)]


# What is given to them


class OwnMode(TorchDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num", "torch_threads", "suit"), [(2, 1, True), (1, 2, True), (2, 2, True), (1, 1, False)])
def test_they_suit_where_the_caller_would_compute_with_another_number(num, torch_threads, suit, two_threads):
    torch.set_num_threads(torch_threads)
    assert HostWorkers(num).suits(torch.ones(1), LARGE) is suit
    assert not HostWorkers(num).suits(torch.ones(1), SMALL_NUMEL), "it takes longer to hand it over"


def test_there_are_as_many_as_torch_has_threads_unless_a_number_is_given(two_threads):
    assert (HostWorkers().num, HostWorkers(5).num) == (2, 5)


def test_they_do_not_suit_where_a_mode_of_the_caller_counts(workers):
    with FakeTensorMode():
        fake = torch.ones(1)
    with OwnMode():
        assert not workers.suits(torch.ones(1), LARGE)
    assert not workers.suits(fake, LARGE)
    assert not workers.suits(torch.ones(1, device="meta"), LARGE)
