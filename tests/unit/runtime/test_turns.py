import threading
import time

import pytest
import torch

from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.turns import Turns, is_backward_elsewhere, pauses_s


def in_thread(function):
    """Starts a function in a thread; the returned function waits for it and raises what it raised."""
    results = []

    def run():
        try:
            results.append((function(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run, name="other")
    thread.start()

    def join():
        thread.join(30)
        assert not thread.is_alive()
        value, error = results[0]
        if error is not None:
            raise error
        return value

    return join


def test_a_second_thread_waits_for_the_first():
    turns, order = Turns(), []

    def other():
        with turns.taken("the forward of B"):
            order.append("other")

    with turns.taken("the forward of A"):
        with turns.taken("a part of it"):
            join = in_thread(other)
            time.sleep(0.05)
        order.append("first")
    join()
    assert order == ["first", "other"]


def test_the_thread_that_has_waited_longest_is_next():
    turns, order, may_end = Turns(limit_s=5), [], threading.Event()

    def compute_all_the_time():
        while not may_end.is_set():
            with turns.taken("the forward of A"):
                order.append("busy")
                time.sleep(0.02)

    join = in_thread(compute_all_the_time)
    while not order:
        time.sleep(0.001)
    try:
        for _ in range(3):
            begin = len(order)
            with turns.taken("a step"):
                order.append("patient")
            assert order[begin:].index("patient") <= 1
    finally:
        may_end.set()
        join()


def test_a_wait_is_for_one_call_at_a_time():
    """Many short calls of others that came first are no mistake, however long they take together."""
    turns, order = Turns(limit_s=0.5), []

    def compute(number):
        with turns.taken("a forward"):
            time.sleep(0.2)
            order.append(number)

    joins = []
    with turns.taken("a forward"):
        for number in range(4):
            joins.append(in_thread(lambda number=number: compute(number)))
            time.sleep(0.05)
    for join in joins:
        join()
    assert order == [0, 1, 2, 3]


def test_what_a_backward_begins_does_not_wait_behind_others():
    turns = Turns(limit_s=5)
    joins = []

    class TakeTwice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            turns.take_backward()
            joins.append(in_thread(lambda: turns.take("a forward")))
            time.sleep(0.05)
            with turns.taken("a step in a hook"):
                turns.take_backward()
            turns.give_up_backward()
            return gradient

    TakeTwice.apply(torch.ones(2, requires_grad=True)).sum().backward()
    joins[0]()


def test_a_wait_that_is_too_long_names_both_threads():
    turns = Turns(limit_s=0.05)
    with turns.taken("the forward of A"):
        join = in_thread(lambda: turns.take("the forward of B"))
        with pytest.raises(
            EngineError, match="thread 'other' cannot begin the forward of B: thread 'MainThread' has been"
        ):
            join()
    turns.take("again")
    turns.give_up()


def test_a_thread_that_died_has_no_turn():
    turns = Turns(limit_s=5)
    in_thread(lambda: turns.take("the forward of B"))()
    turns.take("the forward of A")
    turns.give_up()


class Wait(torch.autograd.Function):
    """Its backward takes a turn and waits until it may go on."""

    @staticmethod
    def forward(ctx, x, turns, begun, may_end):
        ctx.parts = turns, begun, may_end
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        turns, begun, may_end = ctx.parts
        turns.take_backward()
        begun.set()
        may_end.wait(30)
        if may_end.fails:
            raise RuntimeError("no gradient")
        turns.give_up_backward()
        return gradient, None, None, None


def backward_in_thread(turns, fails=False):
    begun, may_end = threading.Event(), threading.Event()
    may_end.fails = fails
    loss = Wait.apply(torch.ones(2, requires_grad=True), turns, begun, may_end).sum()
    join = in_thread(loss.backward)
    assert begun.wait(30)
    return may_end, join


def test_a_forward_waits_for_a_backward_of_another_thread():
    turns, order = Turns(), []
    may_end, join = backward_in_thread(turns)
    assert is_backward_elsewhere()

    def forward():
        with turns.taken("the forward of A"):
            order.append("forward")

    join_forward = in_thread(forward)
    time.sleep(0.05)
    order.append("backward")
    may_end.set()
    join()
    join_forward()
    assert order == ["backward", "forward"]
    assert not is_backward_elsewhere()


def test_a_backward_that_raised_has_no_turn():
    turns = Turns(limit_s=5)
    may_end, join = backward_in_thread(turns, fails=True)
    may_end.set()
    with pytest.raises(RuntimeError, match="no gradient"):
        join()
    turns.take("the forward of A")
    turns.give_up()


def test_a_backward_inside_of_a_turn_needs_none():
    turns = Turns(limit_s=5)
    with turns.taken("the step"):
        turns.take_backward()
        turns.give_up_backward()
    assert in_thread(lambda: turns.take("the forward of B"))() is None


def test_pauses_only_where_another_thread_may_let_go_of_memory(monkeypatch):
    earlier, every = set(threading.enumerate()) - {threading.current_thread()}, threading.enumerate
    monkeypatch.setattr(threading, "enumerate", lambda: [thread for thread in every() if thread not in earlier])
    assert pauses_s() == (0.0,)
    may_end = threading.Event()
    join = in_thread(lambda: may_end.wait(30))
    assert len(pauses_s()) > 1
    assert pauses_s()[-1] == 0
    may_end.set()
    join()
    assert pauses_s() == (0.0,)


def test_others_may_read_while_a_thread_is_there_that_may(monkeypatch):
    earlier, every = set(threading.enumerate()) - {threading.current_thread()}, threading.enumerate
    monkeypatch.setattr(threading, "enumerate", lambda: [thread for thread in every() if thread not in earlier])
    turns, may_end = Turns(), threading.Event()
    assert not turns.others_may_read()
    for name in ("hf_patrickstar-host_0", "tqdm_monitor", "QueueFeederThread", "Thread-3 (_pin_memory_loop)"):
        harmless = threading.Thread(target=may_end.wait, args=(30,), name=name)
        harmless.start()
        assert not turns.others_may_read()
    join = in_thread(lambda: may_end.wait(30))
    assert turns.others_may_read()
    may_end.set()
    join()


def test_a_turn_looks_again_for_threads(monkeypatch):
    """As many threads as before may be other threads."""
    turns = Turns()
    looks = []
    monkeypatch.setattr("hf_patrickstar.runtime.turns._has_readers", lambda: bool(looks.append(1)))
    with turns.taken("a forward"):
        turns.others_may_read()
        with turns.taken("a part of it"):
            turns.others_may_read()
    assert len(looks) == 1
    with turns.taken("a forward"):
        turns.others_may_read()
    assert len(looks) == 2


def test_a_turn_is_of_one_thread():
    turns = Turns()
    assert not turns.is_computing
    with turns.taken("a forward"):
        assert turns.is_computing
        assert in_thread(lambda: turns.is_computing)() is False


def test_calls_that_have_begun_are_waited_for_and_threads_that_wait_are_not():
    turns, may_end, has_ended = Turns(), threading.Event(), []
    idle = in_thread(lambda: may_end.wait(30))

    def compute():
        time.sleep(0.2)  # as a call of torch: Python's code stays where it is
        has_ended.append(True)
        may_end.wait(30)

    join = in_thread(compute)
    time.sleep(0.05)
    turns.wait_for_calls()
    assert has_ended
    may_end.set()
    for each in (idle, join):
        each()


def test_a_thread_that_something_else_blocks_is_waited_for_once(monkeypatch):
    monkeypatch.setattr("hf_patrickstar.runtime.turns._CALL_LIMIT_S", 0.05)
    turns = Turns()
    join = in_thread(lambda: time.sleep(0.5))
    time.sleep(0.05)
    turns.wait_for_calls()
    monkeypatch.setattr("hf_patrickstar.runtime.turns._CALL_LOOK_S", 30)
    turns.wait_for_calls()
    join()
