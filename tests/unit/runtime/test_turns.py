import functools
import hashlib
import threading
import time
import types

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


def wait_until(is_true):
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_thread_that_has_waited_longest_is_next():
    turns, order, main = Turns(), [], threading.current_thread()

    def compute_all_the_time():
        for number in range(100):
            with turns.taken("the forward of A"):
                order.append("busy")
                if number == 0:
                    wait_until(lambda: main in turns._waiting)

    join = in_thread(compute_all_the_time)
    wait_until(lambda: order)
    with turns.taken("a step"):
        order.append("patient")
    join()
    assert order.index("patient") == 1


def test_a_wait_is_for_one_call_at_a_time(monkeypatch):
    """Many short calls of others that came first are no mistake, however long they take together."""
    turns, order, now = Turns(limit_s=10), [], [0.0]
    monkeypatch.setattr("hf_patrickstar.runtime.turns.time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("hf_patrickstar.runtime.turns._LOOK_S", 0.001)

    def compute(number):
        with turns.taken("a forward"):
            now[0] += 4
            time.sleep(0.05)  # the others look whether it has taken too long
            order.append(number)

    joins = []
    with turns.taken("a forward"):
        for number in range(4):
            joins.append(in_thread(lambda number=number: compute(number)))
            wait_until(lambda number=number: len(turns._waiting) == number + 1)
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


def call_in_thread(call, number=1, file="user.py"):
    """Calls a function in a thread, in one line of a file; what is returned ends the thread and says what has ended."""
    begun, may_end, ended = threading.Event(), threading.Event(), []
    names = {"call": call, "begun": begun, "may_end": may_end, "ended": ended, "number": number}
    lines = "begun.set()", "for _ in range(number): call()", "ended.append(True)", "may_end.wait(30)"
    exec(compile("def function():" + "".join(f"\n    {line}" for line in lines), file, "exec"), names)
    join = in_thread(names["function"])
    assert begun.wait(30)

    def end():
        may_end.set()
        join()

    return ended, end


compute = functools.partial(hashlib.pbkdf2_hmac, "sha256", b"", b"", 1_000_000)
"""As a call of torch: it takes a quarter of a second, lets other threads run, and Python's code stays where it is."""


@pytest.mark.parametrize("file", ["user.py", "reader_thread.py", "my_queue.py", "websocket.py", "own/threading.py"])
def test_calls_that_have_begun_are_waited_for_and_threads_that_wait_are_not(monkeypatch, file):
    monkeypatch.setattr("hf_patrickstar.runtime.turns._CALL_LIMIT_S", 30)
    turns, may_end = Turns(), threading.Event()
    idle = in_thread(lambda: may_end.wait(30))
    ended, end = call_in_thread(compute, file=file)
    turns.wait_for_calls()
    assert ended
    may_end.set()
    for each in (idle, end):
        each()


def test_a_thread_that_calls_the_same_again_is_waited_for_again(monkeypatch):
    turns = Turns()
    ended, end = call_in_thread(compute, number=3)
    monkeypatch.setattr("hf_patrickstar.runtime.turns._CALL_LIMIT_S", 0.05)
    turns.wait_for_calls()
    monkeypatch.setattr("hf_patrickstar.runtime.turns._CALL_LIMIT_S", 30)
    turns.wait_for_calls()
    assert ended
    end()


def test_a_thread_that_something_else_blocks_is_waited_for_once(monkeypatch):
    monkeypatch.setattr("hf_patrickstar.runtime.turns._CALL_LIMIT_S", 30)
    turns, lock = Turns(), threading.Lock()
    with lock:
        ended, end = call_in_thread(functools.partial(lock.acquire, timeout=20))
        turns.wait_for_calls()
        monkeypatch.setattr("hf_patrickstar.runtime.turns._CALL_LOOK_S", 25)
        turns.wait_for_calls()
        assert not ended
    end()


def test_a_thread_that_polls_is_not_waited_for_as_long_as_one_that_computes(monkeypatch):
    monkeypatch.setattr("hf_patrickstar.runtime.turns._CALL_LIMIT_S", 30)
    turns = Turns()
    ended, end = call_in_thread(functools.partial(time.sleep, 0.01), number=300)
    turns.wait_for_calls()
    assert not ended
    end()
