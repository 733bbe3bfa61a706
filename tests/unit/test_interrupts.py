"""Ctrl-C that waits."""

import signal
import threading

import pytest

from hf_patrickstar.interrupts import held_back


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_comes_when_the_block_has_ended():
    done = []

    @held_back()
    def work():
        interrupt()
        done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_does_not_wait():
    done = []

    @held_back()
    def work():
        interrupt()
        interrupt()
        done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_of_the_program_is_called_once():
    calls = []
    before = signal.signal(signal.SIGINT, lambda *args: calls.append(args))
    try:
        with held_back():
            interrupt()
            assert not calls
        assert [number for number, _ in calls] == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_one_block_may_be_in_another():
    done = []

    @held_back()
    def work():
        with held_back():
            interrupt()
        done.append("the outer one, too")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done


def test_an_error_of_the_block_is_the_context_of_the_interrupt():
    @held_back()
    def work():
        interrupt()
        raise ArithmeticError("no")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ArithmeticError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_function_stays(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
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
