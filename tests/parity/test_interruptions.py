"""Ctrl-C in the middle of the optimizer's step: what follows has the bits of torch."""

import itertools
import signal
import threading

import pytest
import torch
from support import inside
from support.runs import Run
from support.streams import DelayedDriver, streams_of
from test_overlapped_updates import threads_of_engines

from hf_patrickstar.layout.specs import MASTER
from hf_patrickstar.optim.adam_kernel import AdamKernel

pytestmark = pytest.mark.own_streams


def interrupt():
    signal.raise_signal(signal.SIGINT)


def around_hand_over(patched, begin, end=lambda: None):
    on_host = DelayedDriver.on_host

    def interrupted(thread, work, *args):
        if not inside.is_of_update(args[-1]):  # what is done if it fails
            return on_host(thread, work, *args)
        begin()
        event = on_host(thread, work, *args)
        end()
        return event

    patched.setattr(DelayedDriver, "on_host", interrupted)


def before_hand_over(patched, come):
    around_hand_over(patched, come)


def after_hand_over(patched, come):
    around_hand_over(patched, lambda: None, come)


def in_the_pools_lock(patched, come):
    """A signal that comes when a lock was just taken would leave it locked."""
    enter, is_on = threading.Condition.__enter__, []

    def entering(condition):
        result = enter(condition)
        if is_on and threading.current_thread() is threading.main_thread():
            is_on.clear()
            come()
        return result

    patched.setattr(threading.Condition, "__enter__", entering)
    around_hand_over(patched, lambda: is_on.append(1), is_on.clear)


def after_counting(patched, come):
    prepare = AdamKernel.prepare

    def interrupted(kernel, *args, **settings):
        update = prepare(kernel, *args, **settings)
        come()
        return update

    patched.setattr(AdamKernel, "prepare", interrupted)


def before_noting(patched, come):
    note = getattr(*inside.NOTE_UPDATES)

    def interrupted(phases, *args, **settings):
        come()
        return note(phases, *args, **settings)

    patched.setattr(*inside.NOTE_UPDATES, interrupted)


PLACES = [before_hand_over, after_hand_over, in_the_pools_lock]
"""The hand-over of the update of each chunk."""


def states_of(run):
    """Master, number of steps and moments of every parameter."""
    kernel = run.optimizer.kernel
    found = []
    for tensor in inside.tensors(run.engine):
        tensor.chunk.wait()
        state = kernel.own_state(tensor)
        found.append([tensor.view(tensor.chunk.lists[MASTER]).clone(), *(state[key].clone() for key in sorted(state))])
    return found


def same(one, other):
    return all(map(torch.equal, one, other))


def train(num):
    run = Run()
    for seed in range(num):
        run.step(seed)
    return run


def after_steps(num):
    run = train(num)
    states = states_of(run)
    run.engine.detach()
    return states


@pytest.mark.parametrize(
    ("place", "number"), [*itertools.product(PLACES, (1, 4)), (after_counting, 1), (before_noting, 1)]
)
def test_an_interrupted_update_is_made_as_a_whole_or_not_at_all(place, number, monkeypatch):
    threads, calls = threads_of_engines(), []

    def come():
        calls.append(1)
        if len(calls) == number:
            interrupt()

    with streams_of("delayed"):
        before, after = (after_steps(num) for num in (3, 4))
        run = train(3)
        with monkeypatch.context() as patched:
            place(patched, come)
            with pytest.raises(KeyboardInterrupt):
                run.step(3)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        found = states_of(run)
        for parameter, *states in zip(found, before, after, strict=True):
            assert any(same(parameter, state) for state in states)
        assert sum(map(same, found, after)) > 0, "the update that was interrupted was made"
        run.engine.detach()
    assert not threads_of_engines() - threads
