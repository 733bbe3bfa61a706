"""Ctrl-C that waits."""

import signal
import threading

import pytest

from hf_patrickstar.common.interrupts import held_back


def interrupt():
    signal.raise_signal(signal.SIGINT)


def nest():
    with held_back():
        interrupt()


def fail():
    interrupt()
    raise ArithmeticError("no")


@pytest.mark.parametrize(
    ("work", "goes_on"),
    [(interrupt, True), (lambda: (interrupt(), interrupt()), False), (nest, True), (fail, False)],
    ids=["comes at the end", "a second one does not wait", "the outer block goes on", "an error is the context"],
)
def test_an_interrupt_comes_when_the_block_has_ended(work, goes_on):
    done = []

    @held_back()
    def block():
        work()
        done.append("all of it")

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert bool(done) is goes_on
    assert isinstance(caught.value.__context__, ArithmeticError) is (work is fail)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_of_the_program_is_called_once_and_what_is_no_function_stays():
    calls = []
    before = signal.signal(signal.SIGINT, lambda *args: calls.append(args))
    try:
        with held_back():
            interrupt()
            assert not calls
        assert [number for number, _ in calls] == [signal.SIGINT]
        for handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGINT, handler)
            with held_back():
                assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_nothing_to_hold_back():
    def work():
        with held_back():
            found.append(signal.getsignal(signal.SIGINT))

    found = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
